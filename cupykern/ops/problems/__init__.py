"""What ops with many options share: problems for check, bench and tests, and their arrays."""
