"""Fused mixed-precision kernels for CuPy users, with FP64 references and derived error bounds."""

from __future__ import annotations

from .arrays import asarray, empty
from .attention import attention as _attention
from .attention import attention_ops as _attention_ops
from .attention import decode_attention as _decode
from .attention import decode_problem as _decode_problem
from .attention import varlen_ops as _varlen_ops
from .attention.block_mask import BlockMask
from .gemm import dequant_softmax as _dequant_softmax
from .gemm import dual_gemm as _dual_gemm
from .gemm import matmul as _matmul
from .gemm import matmul_problem as _matmul_problem
from .gemm import quantize_nvfp4 as _quantize_nvfp4
from .gemm import scaled_mm as _scaled_mm
from .gemm import scaled_problem as _scaled_problem
from .gemm.nvfp4 import NvFp4
from .numerics import finfo
from .public import public as _public
from .rows import nonfinite as _nonfinite
from .rows import norm as _norm
from .rows import norm_ops as _norm_ops
from .rows import quantize as _quantize
from .rows import quantize_ops as _quantize_ops
from .rows import softmax as _softmax
from .rows import softmax_ops as _softmax_ops
from .rows.nonfinite import NonfiniteReport
from .tools import tuning as _tuning
from .watch import Watch, WatchRecord, watch

__version__ = "0.1.0"

OPS = (
    _softmax_ops.OP,
    _softmax_ops.LOG_OP,
    _norm_ops.LAYER_OP,
    _norm_ops.RMS_OP,
    _norm_ops.ADD_OP,
    _quantize_ops.OP,
    _quantize_nvfp4.OP,
    _matmul_problem.OP,
    _scaled_problem.OP,
    _dual_gemm.OP,
    _dequant_softmax.OP,
    _decode_problem.OP,
    _attention_ops.OP,
    _varlen_ops.VARLEN_OP,
    _nonfinite.OP,
)
"""Every op: what check, bench, compile and the property tests go through."""

softmax = _public(_softmax.softmax, _softmax_ops.OP)
log_softmax = _public(_softmax.log_softmax, _softmax_ops.LOG_OP)
layer_norm = _public(_norm.layer_norm, _norm_ops.LAYER_OP)
rms_norm = _public(_norm.rms_norm, _norm_ops.RMS_OP)
quantize = _public(_quantize.quantize, _quantize_ops.OP)
quantize_nvfp4 = _public(_quantize_nvfp4.quantize_nvfp4, _quantize_nvfp4.OP)
matmul = _public(_matmul.matmul, _matmul_problem.OP)
scaled_mm = _public(_scaled_mm.scaled_mm, _scaled_problem.OP)
dual_gemm_silu = _public(_dual_gemm.dual_gemm_silu, _dual_gemm.OP)
dequant_softmax = _public(_dequant_softmax.dequant_softmax, _dequant_softmax.OP)
decode_attention = _public(_decode.decode_attention, _decode_problem.OP)
attention = _public(_attention.attention, _attention_ops.OP)
attention_varlen = _public(_attention.attention_varlen, _varlen_ops.VARLEN_OP)
scaled_dot_product_attention = _public(_attention.scaled_dot_product_attention)
nonfinite_report = _public(_nonfinite.nonfinite_report)
tune = _public(_tuning.tune)

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
