"""Fused mixed-precision kernels for CuPy users, with FP64 references and derived error bounds."""

from __future__ import annotations

from . import nonfinite as _nonfinite
from . import norm as _norm
from . import softmax as _softmax
from .arrays import asarray, empty
from .nonfinite import NonfiniteReport, nonfinite_report
from .norm import layer_norm, rms_norm
from .numerics import finfo
from .softmax import log_softmax, softmax

__version__ = "0.1.0"

OPS = (_softmax.OP, _softmax.LOG_OP, _norm.LAYER_OP, _norm.RMS_OP, _norm.ADD_OP, _nonfinite.OP)
"""Every op: what check, bench, compile and the property tests go through."""

__all__ = [
    "OPS",
    "NonfiniteReport",
    "asarray",
    "empty",
    "finfo",
    "layer_norm",
    "log_softmax",
    "nonfinite_report",
    "rms_norm",
    "softmax",
]
