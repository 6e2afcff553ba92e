"""The public ops, one module each: argument checks, the function, and its `Op` record."""

from __future__ import annotations

from . import (
    attention,
    attention_varlen,
    cascade_attention,
    complex_matmul,
    decode_attention,
    dequant_softmax,
    dual_gemm_silu,
    matmul,
    merge_attention,
    nonfinite_report,
    norm,
    quantize,
    quantize_nvfp4,
    rope_and_cache,
    scaled_mm,
    softmax,
)

OPS = (
    softmax.OP,
    softmax.LOG_OP,
    norm.LAYER_OP,
    norm.RMS_OP,
    norm.ADD_OP,
    quantize.OP,
    quantize_nvfp4.OP,
    matmul.OP,
    complex_matmul.OP,
    scaled_mm.OP,
    dual_gemm_silu.OP,
    dequant_softmax.OP,
    decode_attention.OP,
    attention.OP,
    attention_varlen.OP,
    cascade_attention.OP,
    merge_attention.OP,
    rope_and_cache.OP,
    nonfinite_report.OP,
)
"""All ops, for check, bench, compile and the property tests."""
