"""Checks of arguments that several ops share."""
