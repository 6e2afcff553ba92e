"""The campaign: many seeded checks of all ops in several processes, recorded while they run.

A part (`parts.py`) lists its tasks and has a function that runs one task and counts the results.
`runner.py` gives the tasks to worker processes and writes the record.
"""
