"""Fused mixed-precision kernels for CuPy users, with FP64 references and derived error bounds."""

from __future__ import annotations

from . import matmul as _matmul
from . import norm as _norm
from . import quantize as _quantize
from . import scaled_mm as _scaled_mm
from . import softmax as _softmax
from .arrays import asarray, empty
from .matmul import matmul
from .norm import layer_norm, rms_norm
from .numerics import finfo
from .quantize import quantize
from .scaled_mm import scaled_mm
from .softmax import log_softmax, softmax

__version__ = "0.1.0"

OPS = (
    _softmax.OP,
    _softmax.LOG_OP,
    _norm.LAYER_OP,
    _norm.RMS_OP,
    _norm.ADD_OP,
    _quantize.OP,
    _matmul.OP,
    _scaled_mm.OP,
)
"""Every op: what check, bench, compile and the property tests go through."""

__all__ = [
    "OPS",
    "asarray",
    "empty",
    "finfo",
    "layer_norm",
    "log_softmax",
    "matmul",
    "quantize",
    "rms_norm",
    "scaled_mm",
    "softmax",
]
