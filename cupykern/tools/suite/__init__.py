"""Benchmark suites: shapes of public models and random shapes, not chosen for these kernels.

models.py holds the models' dimensions, shapes.py derives calls from them, choice.py draws a seeded
sample, summary.py compares our times with the fastest peer's.
"""
