"""Tools behind the command line: checks, measurements, tuning and reports."""
