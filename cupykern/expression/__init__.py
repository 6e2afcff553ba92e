"""User formulas: one typed tree gives the kernel's C++, the FP64 reference and the error bound.

`parse` builds a tree from Python expression syntax, `trace` from a Python callable; `cpp` writes a
tree as C++.  reference/expression.py evaluates trees in FP64 and bounds their errors.
"""

from .expression import Expression, expression, read

__all__ = ["Expression", "expression", "read"]
