"""Users' formulas: one typed tree that is C++ in a kernel, FP64 in the reference, and its error.

`parse` makes trees of Python's expression syntax, `trace` of a Python callable, `cpp` C++ of a
tree.  reference/expression.py computes trees in FP64 and bounds their errors.
"""

from .expression import Expression, expression, read

__all__ = ["Expression", "expression", "read"]
