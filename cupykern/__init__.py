"""Fused mixed-precision kernels for CuPy users, with FP64 references and derived error bounds."""

from __future__ import annotations

from . import matmul as _matmul
from . import scaled_mm as _scaled_mm
from . import softmax as _softmax
from .arrays import asarray, empty
from .matmul import matmul
from .numerics import finfo
from .scaled_mm import scaled_mm
from .softmax import log_softmax, softmax

__version__ = "0.1.0"

OPS = (_softmax.OP, _softmax.LOG_OP, _matmul.OP, _scaled_mm.OP)
"""Every op: what check, bench, compile and the property tests go through."""

__all__ = ["OPS", "asarray", "empty", "finfo", "log_softmax", "matmul", "scaled_mm", "softmax"]
