"""The campaign: many seeded checks of all ops by several processes, recorded while they run.

A part (`parts.py`) is a list of tasks and a function that runs one of them and counts what it
found.  `runner.py` gives the tasks to worker processes and writes the record.
"""
