"""Instruments: what the command runs to check, measure, tune and report."""
