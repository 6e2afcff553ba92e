"""Fused mixed-precision kernels for CuPy users, with FP64 references and derived error bounds.

Rows: softmax, log_softmax, layer_norm, rms_norm, quantize, quantize_nvfp4.
Products: matmul, scaled_mm, dual_gemm_silu, dequant_softmax.
Attention: attention, attention_varlen, decode_attention, cascade_attention, merge_attention,
rope_and_cache.
Arrays: CuPy's (on their GPU), NumPy's (on the CPU), torch's, JAX's and others by DLPack.

help(cupykern.softmax) describes an op; reference.softmax and reference.softmax_bound are its FP64
reference and its error bound.
"""

from __future__ import annotations

from . import ops
from .arrays import empty
from .attention.block_mask import BlockMask
from .attention.rope_frequencies import rope_inv_freq
from .expression import expression
from .interop.asarray import asarray
from .numerics import finfo
from .nvfp4 import NvFp4
from .ops import OPS
from .ops.nonfinite_report import NonfiniteReport
from .public import public as _public
from .targets.launches import overlap_launches
from .tuning import tune as _tune
from .watch import Watch, WatchRecord, watch

__version__ = "0.1.0"

softmax = _public(ops.softmax.softmax, ops.softmax.OP)
log_softmax = _public(ops.softmax.log_softmax, ops.softmax.LOG_OP)
layer_norm = _public(ops.norm.layer_norm, ops.norm.LAYER_OP)
rms_norm = _public(ops.norm.rms_norm, ops.norm.RMS_OP)
quantize = _public(ops.quantize.quantize, ops.quantize.OP)
quantize_nvfp4 = _public(ops.quantize_nvfp4.quantize_nvfp4, ops.quantize_nvfp4.OP)
matmul = _public(ops.matmul.matmul, ops.matmul.OP)
scaled_mm = _public(ops.scaled_mm.scaled_mm, ops.scaled_mm.OP)
dual_gemm_silu = _public(ops.dual_gemm_silu.dual_gemm_silu, ops.dual_gemm_silu.OP)
dequant_softmax = _public(ops.dequant_softmax.dequant_softmax, ops.dequant_softmax.OP)
decode_attention = _public(ops.decode_attention.decode_attention, ops.decode_attention.OP)
attention = _public(ops.attention.attention, ops.attention.OP)
attention_varlen = _public(ops.attention_varlen.attention_varlen, ops.attention_varlen.OP)
merge_attention = _public(ops.merge_attention.merge_attention, ops.merge_attention.OP)
rope_and_cache = _public(ops.rope_and_cache.rope_and_cache, ops.rope_and_cache.OP)
cascade_attention = _public(ops.cascade_attention.cascade_attention, ops.cascade_attention.OP)
scaled_dot_product_attention = _public(ops.attention.scaled_dot_product_attention)
nonfinite_report = _public(ops.nonfinite_report.nonfinite_report)
tune = _public(_tune.tune)

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
    "cascade_attention",
    "decode_attention",
    "dequant_softmax",
    "dual_gemm_silu",
    "empty",
    "expression",
    "finfo",
    "layer_norm",
    "log_softmax",
    "matmul",
    "merge_attention",
    "nonfinite_report",
    "overlap_launches",
    "quantize",
    "quantize_nvfp4",
    "rms_norm",
    "rope_and_cache",
    "rope_inv_freq",
    "scaled_dot_product_attention",
    "scaled_mm",
    "softmax",
    "tune",
    "watch",
]
