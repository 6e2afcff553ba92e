"""Tuning: compile, verify and time configs, and keep the fastest.

Benchmarks measure in the same way.
"""
