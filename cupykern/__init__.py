"""Fused mixed-precision kernels for CuPy users, with FP64 references and derived error bounds."""

from __future__ import annotations

import os as _os

from .arrays import asarray, empty
from .attention import attention_ops as _attention
from .attention import decode_problem as _decode_problem
from .attention import varlen_ops as _varlen
from .attention.attention import attention, attention_varlen, scaled_dot_product_attention
from .attention.block_mask import BlockMask
from .attention.decode_attention import decode_attention
from .gemm import dequant_softmax as _dequant_softmax
from .gemm import dual_gemm as _dual_gemm
from .gemm import matmul_problem as _matmul_problem
from .gemm import quantize_nvfp4 as _quantize_nvfp4
from .gemm import scaled_problem as _scaled_problem
from .gemm.dequant_softmax import dequant_softmax
from .gemm.dual_gemm import dual_gemm_silu
from .gemm.matmul import matmul
from .gemm.nvfp4 import NvFp4
from .gemm.quantize_nvfp4 import quantize_nvfp4
from .gemm.scaled_mm import scaled_mm
from .numerics import finfo
from .rows import nonfinite as _nonfinite
from .rows import norm_ops as _norm
from .rows import quantize_ops as _quantize
from .rows import softmax_ops as _softmax
from .rows.nonfinite import NonfiniteReport, nonfinite_report
from .rows.norm import layer_norm, rms_norm
from .rows.quantize import quantize
from .rows.softmax import log_softmax, softmax
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
    _matmul_problem.OP,
    _scaled_problem.OP,
    _dual_gemm.OP,
    _dequant_softmax.OP,
    _decode_problem.OP,
    _attention.OP,
    _varlen.VARLEN_OP,
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
