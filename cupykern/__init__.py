"""Fused mixed-precision kernels for CuPy users, with FP64 references and derived error bounds."""

from __future__ import annotations

import os as _os

from . import attention_ops as _attention
from . import decode_problem as _decode_problem
from . import dequant_softmax as _dequant_softmax
from . import dual_gemm as _dual_gemm
from . import matmul as _matmul
from . import nonfinite as _nonfinite
from . import norm as _norm
from . import quantize as _quantize
from . import quantize_nvfp4 as _quantize_nvfp4
from . import scaled_mm as _scaled_mm
from . import softmax as _softmax
from .arrays import asarray, empty
from .attention import attention, attention_varlen, scaled_dot_product_attention
from .block_mask import BlockMask
from .decode_attention import decode_attention
from .dequant_softmax import dequant_softmax
from .dual_gemm import dual_gemm_silu
from .matmul import matmul
from .nonfinite import NonfiniteReport, nonfinite_report
from .norm import layer_norm, rms_norm
from .numerics import finfo
from .nvfp4 import NvFp4
from .quantize import quantize
from .quantize_nvfp4 import quantize_nvfp4
from .scaled_mm import scaled_mm
from .softmax import log_softmax, softmax
from .tools.tuning import tune
from .tools.tuning import tuned_at_first as _tuned_at_first
from .watch import Watch, WatchRecord, watch
from .watch import watched as _watched

__version__ = "0.1.0"

OPS = (
    _softmax.OP,
    _softmax.LOG_OP,
    _norm.LAYER_OP,
    _norm.RMS_OP,
    _norm.ADD_OP,
    _quantize.OP,
    _quantize_nvfp4.OP,
    _matmul.OP,
    _scaled_mm.OP,
    _dual_gemm.OP,
    _dequant_softmax.OP,
    _decode_problem.OP,
    _attention.OP,
    _attention.VARLEN_OP,
    _nonfinite.OP,
)
"""Every op: what check, bench, compile and the property tests go through."""

__all__ = [
    "OPS",
    "BlockMask",
    "NonfiniteReport",
    "NvFp4",
    "Watch",
    "WatchRecord",
    "asarray",
    "attention",
    "attention_varlen",
    "decode_attention",
    "dequant_softmax",
    "dual_gemm_silu",
    "empty",
    "finfo",
    "layer_norm",
    "log_softmax",
    "matmul",
    "nonfinite_report",
    "quantize",
    "quantize_nvfp4",
    "rms_norm",
    "scaled_dot_product_attention",
    "scaled_mm",
    "softmax",
    "tune",
    "watch",
]

# The public functions of all ops, also of those to come, are those that a watch looks at.
for _op in OPS:
    if _op.run.__name__ in __all__:
        _function = _watched(_op.run)
        if _os.environ.get("CUPYKERN_TUNE") == "1":
            _function = _tuned_at_first(_op, _function)
        globals()[_op.run.__name__] = _function
scaled_dot_product_attention = _watched(scaled_dot_product_attention)  # another name of an op
