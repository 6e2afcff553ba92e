"""Argument checks shared by several ops."""
