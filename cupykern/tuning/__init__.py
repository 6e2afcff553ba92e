"""Tuning: configs are compiled, verified and timed, and the fastest are kept.

Benchmarks measure alike.
"""
