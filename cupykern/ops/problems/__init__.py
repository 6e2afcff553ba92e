"""Problems of ops with many options, for check, bench and tests, and their arrays."""
