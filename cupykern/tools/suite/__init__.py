"""Benchmark suites: shapes of public models and random ones, not chosen for these kernels.

models.py holds the models' figures, shapes.py makes calls of them, choice.py picks a seeded sample,
summary.py says how our times compare with the fastest peer's.
"""
