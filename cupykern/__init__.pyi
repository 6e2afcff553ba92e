# Written by python -m cupykern.tools.stubs
# fmt: off
from typing import Any, Literal, overload

import numpy as np

from .arrays import empty
from .attention.attention_hopper import AttentionHopperConfig
from .attention.attention_plan import AttentionConfig
from .attention.block_mask import BlockMask
from .attention.decode_config import DecodeConfig
from .attention.merge_plan import MergeConfig
from .attention.rope_config import RopeConfig
from .attention.rope_frequencies import rope_inv_freq
from .expression.expression import expression
from .gemm.gemm import AnyConfig
from .gemm.quantize_nvfp4_plan import NvFp4Config
from .interop.asarray import asarray
from .numerics import finfo
from .nvfp4 import NvFp4
from .ops import OPS
from .ops.nonfinite_report import NonfiniteReport
from .rows.configs import RowConfig
from .rows.nonfinite_walk import NonfiniteConfig
from .targets.launches import overlap_launches
from .tuning.tune import tune
from .typing import (
    Activation,
    AnyArray,
    AnyDType,
    AnyFactor,
    AnyOperands,
    AnyResultDTypes,
    FormulaLike,
    GivenArray,
    Precision,
)
from .watch import Watch, WatchRecord, watch

__version__: str
__all__ = [
    "OPS", "BlockMask", "NonfiniteReport", "NvFp4", "Watch", "WatchRecord", "asarray", "attention",
    "attention_varlen", "cascade_attention", "decode_attention", "dequant_softmax",
    "dual_gemm_silu", "empty", "expression", "finfo", "layer_norm", "log_softmax", "matmul",
    "merge_attention", "nonfinite_report", "overlap_launches", "quantize", "quantize_nvfp4",
    "rms_norm", "rope_and_cache", "rope_inv_freq", "scaled_dot_product_attention", "scaled_mm",
    "softmax", "tune", "watch",
]

@overload
def attention(
    q: np.ndarray, k: AnyArray, v: AnyArray, *, causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] | None = None,
    mask: AnyArray | BlockMask | FormulaLike | None = None, seq_lens: AnyArray | None = None,
    input_pos: int | None = None, scale: AnyFactor | None = None,
    window: tuple[int, int] | None = None, softcap: AnyFactor | None = None,
    score: FormulaLike | None = None, operands: AnyOperands | None = None,
    alibi_slopes: AnyArray | None = None, sinks: AnyArray | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd",
    qk_accumulate: Literal["float32", "float16"] = "float32", return_lse: Literal[False] = False,
    return_row_stats: Literal[False] = False, algorithm: Literal["flash", "naive"] = "flash",
    out: AnyArray | None = None, config: AttentionConfig | AttentionHopperConfig | None = None,
) -> np.ndarray: ...
@overload
def attention(
    q: np.ndarray, k: AnyArray, v: AnyArray, *, causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] | None = None,
    mask: AnyArray | BlockMask | FormulaLike | None = None, seq_lens: AnyArray | None = None,
    input_pos: int | None = None, scale: AnyFactor | None = None,
    window: tuple[int, int] | None = None, softcap: AnyFactor | None = None,
    score: FormulaLike | None = None, operands: AnyOperands | None = None,
    alibi_slopes: AnyArray | None = None, sinks: AnyArray | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd",
    qk_accumulate: Literal["float32", "float16"] = "float32", return_lse: Literal[True],
    return_row_stats: bool = False, algorithm: Literal["flash", "naive"] = "flash",
    out: AnyArray | None = None, config: AttentionConfig | AttentionHopperConfig | None = None,
) -> tuple[np.ndarray, ...]: ...
@overload
def attention(
    q: np.ndarray, k: AnyArray, v: AnyArray, *, causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] | None = None,
    mask: AnyArray | BlockMask | FormulaLike | None = None, seq_lens: AnyArray | None = None,
    input_pos: int | None = None, scale: AnyFactor | None = None,
    window: tuple[int, int] | None = None, softcap: AnyFactor | None = None,
    score: FormulaLike | None = None, operands: AnyOperands | None = None,
    alibi_slopes: AnyArray | None = None, sinks: AnyArray | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd",
    qk_accumulate: Literal["float32", "float16"] = "float32", return_lse: bool = False,
    return_row_stats: Literal[True], algorithm: Literal["flash", "naive"] = "flash",
    out: AnyArray | None = None, config: AttentionConfig | AttentionHopperConfig | None = None,
) -> tuple[np.ndarray, ...]: ...
@overload
def attention(
    q: GivenArray, k: AnyArray, v: AnyArray, *, causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] | None = None,
    mask: AnyArray | BlockMask | FormulaLike | None = None, seq_lens: AnyArray | None = None,
    input_pos: int | None = None, scale: AnyFactor | None = None,
    window: tuple[int, int] | None = None, softcap: AnyFactor | None = None,
    score: FormulaLike | None = None, operands: AnyOperands | None = None,
    alibi_slopes: AnyArray | None = None, sinks: AnyArray | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd",
    qk_accumulate: Literal["float32", "float16"] = "float32", return_lse: Literal[False] = False,
    return_row_stats: Literal[False] = False, algorithm: Literal["flash", "naive"] = "flash",
    out: AnyArray | None = None, config: AttentionConfig | AttentionHopperConfig | None = None,
) -> GivenArray: ...
@overload
def attention(
    q: GivenArray, k: AnyArray, v: AnyArray, *, causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] | None = None,
    mask: AnyArray | BlockMask | FormulaLike | None = None, seq_lens: AnyArray | None = None,
    input_pos: int | None = None, scale: AnyFactor | None = None,
    window: tuple[int, int] | None = None, softcap: AnyFactor | None = None,
    score: FormulaLike | None = None, operands: AnyOperands | None = None,
    alibi_slopes: AnyArray | None = None, sinks: AnyArray | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd",
    qk_accumulate: Literal["float32", "float16"] = "float32", return_lse: Literal[True],
    return_row_stats: bool = False, algorithm: Literal["flash", "naive"] = "flash",
    out: AnyArray | None = None, config: AttentionConfig | AttentionHopperConfig | None = None,
) -> tuple[GivenArray, ...]: ...
@overload
def attention(
    q: GivenArray, k: AnyArray, v: AnyArray, *, causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] | None = None,
    mask: AnyArray | BlockMask | FormulaLike | None = None, seq_lens: AnyArray | None = None,
    input_pos: int | None = None, scale: AnyFactor | None = None,
    window: tuple[int, int] | None = None, softcap: AnyFactor | None = None,
    score: FormulaLike | None = None, operands: AnyOperands | None = None,
    alibi_slopes: AnyArray | None = None, sinks: AnyArray | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd",
    qk_accumulate: Literal["float32", "float16"] = "float32", return_lse: bool = False,
    return_row_stats: Literal[True], algorithm: Literal["flash", "naive"] = "flash",
    out: AnyArray | None = None, config: AttentionConfig | AttentionHopperConfig | None = None,
) -> tuple[GivenArray, ...]: ...
@overload
def attention(
    q: AnyArray, k: AnyArray, v: AnyArray, *, causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] | None = None,
    mask: AnyArray | BlockMask | FormulaLike | None = None, seq_lens: AnyArray | None = None,
    input_pos: int | None = None, scale: AnyFactor | None = None,
    window: tuple[int, int] | None = None, softcap: AnyFactor | None = None,
    score: FormulaLike | None = None, operands: AnyOperands | None = None,
    alibi_slopes: AnyArray | None = None, sinks: AnyArray | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd",
    qk_accumulate: Literal["float32", "float16"] = "float32", return_lse: bool = False,
    return_row_stats: bool = False, algorithm: Literal["flash", "naive"] = "flash",
    out: AnyArray | None = None, config: AttentionConfig | AttentionHopperConfig | None = None,
) -> Any: ...

@overload
def attention_varlen(
    q: np.ndarray, k: AnyArray, v: AnyArray, cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray | None = None, *, max_seqlen_q: int, max_seqlen_k: int | None = None,
    block_table: AnyArray | None = None, seq_lens_k: AnyArray | None = None,
    layout: Literal["hnd", "nhd"] = "hnd", k_scale: AnyFactor | None = None,
    v_scale: AnyFactor | None = None, causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] = "bottom_right",
    scale: AnyFactor | None = None, window: tuple[int, int] | None = None,
    softcap: AnyFactor | None = None, score: FormulaLike | None = None,
    mask: FormulaLike | None = None, operands: AnyOperands | None = None,
    alibi_slopes: AnyArray | None = None, sinks: AnyArray | None = None,
    return_lse: Literal[False] = False, out: AnyArray | None = None,
    config: AttentionConfig | AttentionHopperConfig | None = None,
) -> np.ndarray: ...
@overload
def attention_varlen(
    q: np.ndarray, k: AnyArray, v: AnyArray, cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray | None = None, *, max_seqlen_q: int, max_seqlen_k: int | None = None,
    block_table: AnyArray | None = None, seq_lens_k: AnyArray | None = None,
    layout: Literal["hnd", "nhd"] = "hnd", k_scale: AnyFactor | None = None,
    v_scale: AnyFactor | None = None, causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] = "bottom_right",
    scale: AnyFactor | None = None, window: tuple[int, int] | None = None,
    softcap: AnyFactor | None = None, score: FormulaLike | None = None,
    mask: FormulaLike | None = None, operands: AnyOperands | None = None,
    alibi_slopes: AnyArray | None = None, sinks: AnyArray | None = None, return_lse: Literal[True],
    out: AnyArray | None = None, config: AttentionConfig | AttentionHopperConfig | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def attention_varlen(
    q: GivenArray, k: AnyArray, v: AnyArray, cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray | None = None, *, max_seqlen_q: int, max_seqlen_k: int | None = None,
    block_table: AnyArray | None = None, seq_lens_k: AnyArray | None = None,
    layout: Literal["hnd", "nhd"] = "hnd", k_scale: AnyFactor | None = None,
    v_scale: AnyFactor | None = None, causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] = "bottom_right",
    scale: AnyFactor | None = None, window: tuple[int, int] | None = None,
    softcap: AnyFactor | None = None, score: FormulaLike | None = None,
    mask: FormulaLike | None = None, operands: AnyOperands | None = None,
    alibi_slopes: AnyArray | None = None, sinks: AnyArray | None = None,
    return_lse: Literal[False] = False, out: AnyArray | None = None,
    config: AttentionConfig | AttentionHopperConfig | None = None,
) -> GivenArray: ...
@overload
def attention_varlen(
    q: GivenArray, k: AnyArray, v: AnyArray, cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray | None = None, *, max_seqlen_q: int, max_seqlen_k: int | None = None,
    block_table: AnyArray | None = None, seq_lens_k: AnyArray | None = None,
    layout: Literal["hnd", "nhd"] = "hnd", k_scale: AnyFactor | None = None,
    v_scale: AnyFactor | None = None, causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] = "bottom_right",
    scale: AnyFactor | None = None, window: tuple[int, int] | None = None,
    softcap: AnyFactor | None = None, score: FormulaLike | None = None,
    mask: FormulaLike | None = None, operands: AnyOperands | None = None,
    alibi_slopes: AnyArray | None = None, sinks: AnyArray | None = None, return_lse: Literal[True],
    out: AnyArray | None = None, config: AttentionConfig | AttentionHopperConfig | None = None,
) -> tuple[GivenArray, GivenArray]: ...
@overload
def attention_varlen(
    q: AnyArray, k: AnyArray, v: AnyArray, cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray | None = None, *, max_seqlen_q: int, max_seqlen_k: int | None = None,
    block_table: AnyArray | None = None, seq_lens_k: AnyArray | None = None,
    layout: Literal["hnd", "nhd"] = "hnd", k_scale: AnyFactor | None = None,
    v_scale: AnyFactor | None = None, causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] = "bottom_right",
    scale: AnyFactor | None = None, window: tuple[int, int] | None = None,
    softcap: AnyFactor | None = None, score: FormulaLike | None = None,
    mask: FormulaLike | None = None, operands: AnyOperands | None = None,
    alibi_slopes: AnyArray | None = None, sinks: AnyArray | None = None, return_lse: bool = False,
    out: AnyArray | None = None, config: AttentionConfig | AttentionHopperConfig | None = None,
) -> Any: ...

@overload
def cascade_attention(
    q: np.ndarray, shared_k: AnyArray, shared_v: AnyArray, k_cache: AnyArray, v_cache: AnyArray, *,
    seq_lens: AnyArray | None = None, block_table: AnyArray | None = None,
    layout: Literal["hnd", "nhd"] = "hnd", k_scale: AnyFactor | None = None,
    v_scale: AnyFactor | None = None, scale: AnyFactor | None = None,
    softcap: AnyFactor | None = None, return_lse: Literal[False] = False,
    out: AnyArray | None = None, config: DecodeConfig | None = None,
) -> np.ndarray: ...
@overload
def cascade_attention(
    q: np.ndarray, shared_k: AnyArray, shared_v: AnyArray, k_cache: AnyArray, v_cache: AnyArray, *,
    seq_lens: AnyArray | None = None, block_table: AnyArray | None = None,
    layout: Literal["hnd", "nhd"] = "hnd", k_scale: AnyFactor | None = None,
    v_scale: AnyFactor | None = None, scale: AnyFactor | None = None,
    softcap: AnyFactor | None = None, return_lse: Literal[True], out: AnyArray | None = None,
    config: DecodeConfig | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def cascade_attention(
    q: GivenArray, shared_k: AnyArray, shared_v: AnyArray, k_cache: AnyArray, v_cache: AnyArray, *,
    seq_lens: AnyArray | None = None, block_table: AnyArray | None = None,
    layout: Literal["hnd", "nhd"] = "hnd", k_scale: AnyFactor | None = None,
    v_scale: AnyFactor | None = None, scale: AnyFactor | None = None,
    softcap: AnyFactor | None = None, return_lse: Literal[False] = False,
    out: AnyArray | None = None, config: DecodeConfig | None = None,
) -> GivenArray: ...
@overload
def cascade_attention(
    q: GivenArray, shared_k: AnyArray, shared_v: AnyArray, k_cache: AnyArray, v_cache: AnyArray, *,
    seq_lens: AnyArray | None = None, block_table: AnyArray | None = None,
    layout: Literal["hnd", "nhd"] = "hnd", k_scale: AnyFactor | None = None,
    v_scale: AnyFactor | None = None, scale: AnyFactor | None = None,
    softcap: AnyFactor | None = None, return_lse: Literal[True], out: AnyArray | None = None,
    config: DecodeConfig | None = None,
) -> tuple[GivenArray, GivenArray]: ...
@overload
def cascade_attention(
    q: AnyArray, shared_k: AnyArray, shared_v: AnyArray, k_cache: AnyArray, v_cache: AnyArray, *,
    seq_lens: AnyArray | None = None, block_table: AnyArray | None = None,
    layout: Literal["hnd", "nhd"] = "hnd", k_scale: AnyFactor | None = None,
    v_scale: AnyFactor | None = None, scale: AnyFactor | None = None,
    softcap: AnyFactor | None = None, return_lse: bool = False, out: AnyArray | None = None,
    config: DecodeConfig | None = None,
) -> Any: ...

@overload
def decode_attention(
    q: np.ndarray, k_cache: AnyArray, v_cache: AnyArray, *, seq_lens: AnyArray | None = None,
    block_table: AnyArray | None = None, layout: Literal["hnd", "nhd"] = "hnd",
    k_scale: AnyFactor | None = None, v_scale: AnyFactor | None = None, causal: bool = True,
    scale: AnyFactor | None = None, window: tuple[int, int] | None = None,
    softcap: AnyFactor | None = None, score: FormulaLike | None = None,
    mask: FormulaLike | None = None, operands: AnyOperands | None = None,
    alibi_slopes: AnyArray | None = None, sinks: AnyArray | None = None,
    return_lse: Literal[False] = False, out: AnyArray | None = None,
    config: DecodeConfig | None = None,
) -> np.ndarray: ...
@overload
def decode_attention(
    q: np.ndarray, k_cache: AnyArray, v_cache: AnyArray, *, seq_lens: AnyArray | None = None,
    block_table: AnyArray | None = None, layout: Literal["hnd", "nhd"] = "hnd",
    k_scale: AnyFactor | None = None, v_scale: AnyFactor | None = None, causal: bool = True,
    scale: AnyFactor | None = None, window: tuple[int, int] | None = None,
    softcap: AnyFactor | None = None, score: FormulaLike | None = None,
    mask: FormulaLike | None = None, operands: AnyOperands | None = None,
    alibi_slopes: AnyArray | None = None, sinks: AnyArray | None = None, return_lse: Literal[True],
    out: AnyArray | None = None, config: DecodeConfig | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def decode_attention(
    q: GivenArray, k_cache: AnyArray, v_cache: AnyArray, *, seq_lens: AnyArray | None = None,
    block_table: AnyArray | None = None, layout: Literal["hnd", "nhd"] = "hnd",
    k_scale: AnyFactor | None = None, v_scale: AnyFactor | None = None, causal: bool = True,
    scale: AnyFactor | None = None, window: tuple[int, int] | None = None,
    softcap: AnyFactor | None = None, score: FormulaLike | None = None,
    mask: FormulaLike | None = None, operands: AnyOperands | None = None,
    alibi_slopes: AnyArray | None = None, sinks: AnyArray | None = None,
    return_lse: Literal[False] = False, out: AnyArray | None = None,
    config: DecodeConfig | None = None,
) -> GivenArray: ...
@overload
def decode_attention(
    q: GivenArray, k_cache: AnyArray, v_cache: AnyArray, *, seq_lens: AnyArray | None = None,
    block_table: AnyArray | None = None, layout: Literal["hnd", "nhd"] = "hnd",
    k_scale: AnyFactor | None = None, v_scale: AnyFactor | None = None, causal: bool = True,
    scale: AnyFactor | None = None, window: tuple[int, int] | None = None,
    softcap: AnyFactor | None = None, score: FormulaLike | None = None,
    mask: FormulaLike | None = None, operands: AnyOperands | None = None,
    alibi_slopes: AnyArray | None = None, sinks: AnyArray | None = None, return_lse: Literal[True],
    out: AnyArray | None = None, config: DecodeConfig | None = None,
) -> tuple[GivenArray, GivenArray]: ...
@overload
def decode_attention(
    q: AnyArray, k_cache: AnyArray, v_cache: AnyArray, *, seq_lens: AnyArray | None = None,
    block_table: AnyArray | None = None, layout: Literal["hnd", "nhd"] = "hnd",
    k_scale: AnyFactor | None = None, v_scale: AnyFactor | None = None, causal: bool = True,
    scale: AnyFactor | None = None, window: tuple[int, int] | None = None,
    softcap: AnyFactor | None = None, score: FormulaLike | None = None,
    mask: FormulaLike | None = None, operands: AnyOperands | None = None,
    alibi_slopes: AnyArray | None = None, sinks: AnyArray | None = None, return_lse: bool = False,
    out: AnyArray | None = None, config: DecodeConfig | None = None,
) -> Any: ...

@overload
def dequant_softmax(
    a: np.ndarray, w: AnyArray, scale_w: AnyFactor, *, bias: AnyArray | None = None,
    dtype: AnyDType | None = None, out: AnyArray | None = None, config: AnyConfig | None = None,
) -> np.ndarray: ...
@overload
def dequant_softmax(
    a: GivenArray, w: AnyArray, scale_w: AnyFactor, *, bias: AnyArray | None = None,
    dtype: AnyDType | None = None, out: AnyArray | None = None, config: AnyConfig | None = None,
) -> GivenArray: ...

@overload
def dual_gemm_silu(
    a: np.ndarray, b1: AnyArray | NvFp4, b2: AnyArray | NvFp4, *, scale_a: AnyFactor | None = None,
    scale_b1: AnyFactor | None = None, scale_b2: AnyFactor | None = None,
    policy: Literal["fp32", "hybrid", "fp16"] = "fp32", out_dtype: AnyResultDTypes = None,
    out: AnyArray | None = None, precision: Precision = "float32", config: AnyConfig | None = None,
    epilogue: None = None, operands: AnyOperands | None = None,
) -> np.ndarray: ...
@overload
def dual_gemm_silu(
    a: np.ndarray, b1: AnyArray | NvFp4, b2: AnyArray | NvFp4, *, scale_a: AnyFactor | None = None,
    scale_b1: AnyFactor | None = None, scale_b2: AnyFactor | None = None,
    policy: Literal["fp32", "hybrid", "fp16"] = "fp32", out_dtype: AnyResultDTypes = None,
    out: AnyArray | None = None, precision: Precision = "float32", config: AnyConfig | None = None,
    epilogue: FormulaLike, operands: AnyOperands | None = None,
) -> Any: ...
@overload
def dual_gemm_silu(
    a: GivenArray, b1: AnyArray | NvFp4, b2: AnyArray | NvFp4, *, scale_a: AnyFactor | None = None,
    scale_b1: AnyFactor | None = None, scale_b2: AnyFactor | None = None,
    policy: Literal["fp32", "hybrid", "fp16"] = "fp32", out_dtype: AnyResultDTypes = None,
    out: AnyArray | None = None, precision: Precision = "float32", config: AnyConfig | None = None,
    epilogue: None = None, operands: AnyOperands | None = None,
) -> GivenArray: ...
@overload
def dual_gemm_silu(
    a: GivenArray, b1: AnyArray | NvFp4, b2: AnyArray | NvFp4, *, scale_a: AnyFactor | None = None,
    scale_b1: AnyFactor | None = None, scale_b2: AnyFactor | None = None,
    policy: Literal["fp32", "hybrid", "fp16"] = "fp32", out_dtype: AnyResultDTypes = None,
    out: AnyArray | None = None, precision: Precision = "float32", config: AnyConfig | None = None,
    epilogue: FormulaLike, operands: AnyOperands | None = None,
) -> Any: ...
@overload
def dual_gemm_silu(
    a: NvFp4, b1: AnyArray | NvFp4, b2: AnyArray | NvFp4, *, scale_a: AnyFactor | None = None,
    scale_b1: AnyFactor | None = None, scale_b2: AnyFactor | None = None,
    policy: Literal["fp32", "hybrid", "fp16"] = "fp32", out_dtype: AnyResultDTypes = None,
    out: AnyArray | None = None, precision: Precision = "float32", config: AnyConfig | None = None,
    epilogue: None = None, operands: AnyOperands | None = None,
) -> Any: ...
@overload
def dual_gemm_silu(
    a: NvFp4, b1: AnyArray | NvFp4, b2: AnyArray | NvFp4, *, scale_a: AnyFactor | None = None,
    scale_b1: AnyFactor | None = None, scale_b2: AnyFactor | None = None,
    policy: Literal["fp32", "hybrid", "fp16"] = "fp32", out_dtype: AnyResultDTypes = None,
    out: AnyArray | None = None, precision: Precision = "float32", config: AnyConfig | None = None,
    epilogue: FormulaLike, operands: AnyOperands | None = None,
) -> Any: ...

@overload
def layer_norm(
    x: np.ndarray, weight: AnyArray | None = None, bias: AnyArray | None = None, *,
    eps: AnyFactor | None = 1e-05, residual: None = None, compensated: bool = False,
    return_stats: Literal[False] = False, dtype: AnyDType | None = None,
    out: AnyArray | None = None, config: RowConfig | None = None,
) -> np.ndarray: ...
@overload
def layer_norm(
    x: np.ndarray, weight: AnyArray | None = None, bias: AnyArray | None = None, *,
    eps: AnyFactor | None = 1e-05, residual: AnyArray, compensated: bool = False,
    return_stats: bool = False, dtype: AnyDType | None = None, out: AnyArray | None = None,
    config: RowConfig | None = None,
) -> tuple[np.ndarray, ...]: ...
@overload
def layer_norm(
    x: np.ndarray, weight: AnyArray | None = None, bias: AnyArray | None = None, *,
    eps: AnyFactor | None = 1e-05, residual: AnyArray | None = None, compensated: bool = False,
    return_stats: Literal[True], dtype: AnyDType | None = None, out: AnyArray | None = None,
    config: RowConfig | None = None,
) -> tuple[np.ndarray, ...]: ...
@overload
def layer_norm(
    x: GivenArray, weight: AnyArray | None = None, bias: AnyArray | None = None, *,
    eps: AnyFactor | None = 1e-05, residual: None = None, compensated: bool = False,
    return_stats: Literal[False] = False, dtype: AnyDType | None = None,
    out: AnyArray | None = None, config: RowConfig | None = None,
) -> GivenArray: ...
@overload
def layer_norm(
    x: GivenArray, weight: AnyArray | None = None, bias: AnyArray | None = None, *,
    eps: AnyFactor | None = 1e-05, residual: AnyArray, compensated: bool = False,
    return_stats: bool = False, dtype: AnyDType | None = None, out: AnyArray | None = None,
    config: RowConfig | None = None,
) -> tuple[GivenArray, ...]: ...
@overload
def layer_norm(
    x: GivenArray, weight: AnyArray | None = None, bias: AnyArray | None = None, *,
    eps: AnyFactor | None = 1e-05, residual: AnyArray | None = None, compensated: bool = False,
    return_stats: Literal[True], dtype: AnyDType | None = None, out: AnyArray | None = None,
    config: RowConfig | None = None,
) -> tuple[GivenArray, ...]: ...
@overload
def layer_norm(
    x: AnyArray, weight: AnyArray | None = None, bias: AnyArray | None = None, *,
    eps: AnyFactor | None = 1e-05, residual: AnyArray | None = None, compensated: bool = False,
    return_stats: bool = False, dtype: AnyDType | None = None, out: AnyArray | None = None,
    config: RowConfig | None = None,
) -> Any: ...

@overload
def log_softmax(
    x: np.ndarray, axis: int = -1, *, mask: AnyArray | None = None, scale: AnyFactor | None = None,
    dtype: AnyDType | None = None, out: AnyArray | None = None, config: RowConfig | None = None,
) -> np.ndarray: ...
@overload
def log_softmax(
    x: GivenArray, axis: int = -1, *, mask: AnyArray | None = None, scale: AnyFactor | None = None,
    dtype: AnyDType | None = None, out: AnyArray | None = None, config: RowConfig | None = None,
) -> GivenArray: ...

@overload
def matmul(
    a: np.ndarray, b: AnyArray, *, bias: AnyArray | None = None,
    activation: Activation | None = None, residual: AnyArray | None = None,
    alpha: AnyFactor | None = 1.0, out_dtype: AnyResultDTypes = None, out: AnyArray | None = None,
    accumulate: Literal["float32", "float16"] = "float32", precision: Precision = "float32",
    config: AnyConfig | None = None, epilogue: None = None, operands: AnyOperands | None = None,
) -> np.ndarray: ...
@overload
def matmul(
    a: np.ndarray, b: AnyArray, *, bias: AnyArray | None = None,
    activation: Activation | None = None, residual: AnyArray | None = None,
    alpha: AnyFactor | None = 1.0, out_dtype: AnyResultDTypes = None, out: AnyArray | None = None,
    accumulate: Literal["float32", "float16"] = "float32", precision: Precision = "float32",
    config: AnyConfig | None = None, epilogue: FormulaLike, operands: AnyOperands | None = None,
) -> Any: ...
@overload
def matmul(
    a: GivenArray, b: AnyArray, *, bias: AnyArray | None = None,
    activation: Activation | None = None, residual: AnyArray | None = None,
    alpha: AnyFactor | None = 1.0, out_dtype: AnyResultDTypes = None, out: AnyArray | None = None,
    accumulate: Literal["float32", "float16"] = "float32", precision: Precision = "float32",
    config: AnyConfig | None = None, epilogue: None = None, operands: AnyOperands | None = None,
) -> GivenArray: ...
@overload
def matmul(
    a: GivenArray, b: AnyArray, *, bias: AnyArray | None = None,
    activation: Activation | None = None, residual: AnyArray | None = None,
    alpha: AnyFactor | None = 1.0, out_dtype: AnyResultDTypes = None, out: AnyArray | None = None,
    accumulate: Literal["float32", "float16"] = "float32", precision: Precision = "float32",
    config: AnyConfig | None = None, epilogue: FormulaLike, operands: AnyOperands | None = None,
) -> Any: ...

@overload
def merge_attention(
    out1: np.ndarray, lse1: AnyArray, out2: AnyArray, lse2: AnyArray, *,
    layout: Literal["bhsd", "bshd"] = "bhsd", out: AnyArray | None = None,
    config: MergeConfig | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def merge_attention(
    out1: GivenArray, lse1: AnyArray, out2: AnyArray, lse2: AnyArray, *,
    layout: Literal["bhsd", "bshd"] = "bhsd", out: AnyArray | None = None,
    config: MergeConfig | None = None,
) -> tuple[GivenArray, GivenArray]: ...

def nonfinite_report(x: AnyArray, *, config: NonfiniteConfig | None = None) -> NonfiniteReport: ...

@overload
def quantize(
    x: np.ndarray, dtype: AnyDType, *,
    granularity: Literal["tensor", "row", "column", "block"] = "tensor",
    block: tuple[int, int] = (1, 128), config: RowConfig | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def quantize(
    x: GivenArray, dtype: AnyDType, *,
    granularity: Literal["tensor", "row", "column", "block"] = "tensor",
    block: tuple[int, int] = (1, 128), config: RowConfig | None = None,
) -> tuple[GivenArray, GivenArray]: ...

def quantize_nvfp4(
    x: AnyArray, *, layout: Literal["plain", "blocked"] = "plain",
    config: NvFp4Config | None = None,
) -> NvFp4: ...

@overload
def rms_norm(
    x: np.ndarray, weight: AnyArray | None = None, *, eps: AnyFactor | None = None,
    residual: None = None, quantize: None = None, granularity: Literal["row", "block"] = "row",
    return_stats: Literal[False] = False, dtype: AnyDType | None = None,
    out: AnyArray | None = None, config: RowConfig | None = None,
) -> np.ndarray: ...
@overload
def rms_norm(
    x: np.ndarray, weight: AnyArray | None = None, *, eps: AnyFactor | None = None,
    residual: AnyArray, quantize: Literal["e4m3", "e5m2", "int8"] | None = None,
    granularity: Literal["row", "block"] = "row", return_stats: bool = False,
    dtype: AnyDType | None = None, out: AnyArray | None = None, config: RowConfig | None = None,
) -> tuple[np.ndarray, ...]: ...
@overload
def rms_norm(
    x: np.ndarray, weight: AnyArray | None = None, *, eps: AnyFactor | None = None,
    residual: AnyArray | None = None, quantize: Literal["e4m3", "e5m2", "int8"],
    granularity: Literal["row", "block"] = "row", return_stats: bool = False,
    dtype: AnyDType | None = None, out: AnyArray | None = None, config: RowConfig | None = None,
) -> tuple[np.ndarray, ...]: ...
@overload
def rms_norm(
    x: np.ndarray, weight: AnyArray | None = None, *, eps: AnyFactor | None = None,
    residual: AnyArray | None = None, quantize: Literal["e4m3", "e5m2", "int8"] | None = None,
    granularity: Literal["row", "block"] = "row", return_stats: Literal[True],
    dtype: AnyDType | None = None, out: AnyArray | None = None, config: RowConfig | None = None,
) -> tuple[np.ndarray, ...]: ...
@overload
def rms_norm(
    x: GivenArray, weight: AnyArray | None = None, *, eps: AnyFactor | None = None,
    residual: None = None, quantize: None = None, granularity: Literal["row", "block"] = "row",
    return_stats: Literal[False] = False, dtype: AnyDType | None = None,
    out: AnyArray | None = None, config: RowConfig | None = None,
) -> GivenArray: ...
@overload
def rms_norm(
    x: GivenArray, weight: AnyArray | None = None, *, eps: AnyFactor | None = None,
    residual: AnyArray, quantize: Literal["e4m3", "e5m2", "int8"] | None = None,
    granularity: Literal["row", "block"] = "row", return_stats: bool = False,
    dtype: AnyDType | None = None, out: AnyArray | None = None, config: RowConfig | None = None,
) -> tuple[GivenArray, ...]: ...
@overload
def rms_norm(
    x: GivenArray, weight: AnyArray | None = None, *, eps: AnyFactor | None = None,
    residual: AnyArray | None = None, quantize: Literal["e4m3", "e5m2", "int8"],
    granularity: Literal["row", "block"] = "row", return_stats: bool = False,
    dtype: AnyDType | None = None, out: AnyArray | None = None, config: RowConfig | None = None,
) -> tuple[GivenArray, ...]: ...
@overload
def rms_norm(
    x: GivenArray, weight: AnyArray | None = None, *, eps: AnyFactor | None = None,
    residual: AnyArray | None = None, quantize: Literal["e4m3", "e5m2", "int8"] | None = None,
    granularity: Literal["row", "block"] = "row", return_stats: Literal[True],
    dtype: AnyDType | None = None, out: AnyArray | None = None, config: RowConfig | None = None,
) -> tuple[GivenArray, ...]: ...
@overload
def rms_norm(
    x: AnyArray, weight: AnyArray | None = None, *, eps: AnyFactor | None = None,
    residual: AnyArray | None = None, quantize: Literal["e4m3", "e5m2", "int8"] | None = None,
    granularity: Literal["row", "block"] = "row", return_stats: bool = False,
    dtype: AnyDType | None = None, out: AnyArray | None = None, config: RowConfig | None = None,
) -> Any: ...

@overload
def rope_and_cache(
    q: np.ndarray, k: AnyArray, v: AnyArray, positions: AnyArray, k_cache: None = None,
    v_cache: AnyArray | None = None, *, inv_freq: AnyArray | None = None,
    cos_sin: AnyArray | None = None, interleaved: bool = False,
    attention_factor: AnyFactor | None = 1.0, q_weight: AnyArray | None = None,
    k_weight: AnyArray | None = None, eps: AnyFactor | None = 1e-06,
    block_table: AnyArray | None = None, layout: Literal["hnd", "nhd"] = "hnd",
    k_scale: AnyFactor | None = None, v_scale: AnyFactor | None = None,
    out: AnyArray | None = None, config: RopeConfig | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def rope_and_cache(
    q: np.ndarray, k: AnyArray, v: AnyArray, positions: AnyArray, k_cache: AnyArray,
    v_cache: AnyArray, *, inv_freq: AnyArray | None = None, cos_sin: AnyArray | None = None,
    interleaved: bool = False, attention_factor: AnyFactor | None = 1.0,
    q_weight: AnyArray | None = None, k_weight: AnyArray | None = None,
    eps: AnyFactor | None = 1e-06, block_table: AnyArray | None = None,
    layout: Literal["hnd", "nhd"] = "hnd", k_scale: AnyFactor | None = None,
    v_scale: AnyFactor | None = None, out: AnyArray | None = None, config: RopeConfig | None = None,
) -> np.ndarray: ...
@overload
def rope_and_cache(
    q: GivenArray, k: AnyArray, v: AnyArray, positions: AnyArray, k_cache: None = None,
    v_cache: AnyArray | None = None, *, inv_freq: AnyArray | None = None,
    cos_sin: AnyArray | None = None, interleaved: bool = False,
    attention_factor: AnyFactor | None = 1.0, q_weight: AnyArray | None = None,
    k_weight: AnyArray | None = None, eps: AnyFactor | None = 1e-06,
    block_table: AnyArray | None = None, layout: Literal["hnd", "nhd"] = "hnd",
    k_scale: AnyFactor | None = None, v_scale: AnyFactor | None = None,
    out: AnyArray | None = None, config: RopeConfig | None = None,
) -> tuple[GivenArray, GivenArray]: ...
@overload
def rope_and_cache(
    q: GivenArray, k: AnyArray, v: AnyArray, positions: AnyArray, k_cache: AnyArray,
    v_cache: AnyArray, *, inv_freq: AnyArray | None = None, cos_sin: AnyArray | None = None,
    interleaved: bool = False, attention_factor: AnyFactor | None = 1.0,
    q_weight: AnyArray | None = None, k_weight: AnyArray | None = None,
    eps: AnyFactor | None = 1e-06, block_table: AnyArray | None = None,
    layout: Literal["hnd", "nhd"] = "hnd", k_scale: AnyFactor | None = None,
    v_scale: AnyFactor | None = None, out: AnyArray | None = None, config: RopeConfig | None = None,
) -> GivenArray: ...

@overload
def scaled_dot_product_attention(
    query: np.ndarray, key: AnyArray, value: AnyArray, attn_mask: AnyArray | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: AnyFactor | None = None,
    enable_gqa: bool = False,
) -> np.ndarray: ...
@overload
def scaled_dot_product_attention(
    query: GivenArray, key: AnyArray, value: AnyArray, attn_mask: AnyArray | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: AnyFactor | None = None,
    enable_gqa: bool = False,
) -> GivenArray: ...

@overload
def scaled_mm(
    a: np.ndarray, b: AnyArray | NvFp4, scale_a: AnyFactor | None = None,
    scale_b: AnyFactor | None = None, *, bias: AnyArray | None = None,
    activation: Activation | None = None, out_dtype: AnyResultDTypes = None,
    out: AnyArray | None = None, config: AnyConfig | None = None, epilogue: None = None,
    operands: AnyOperands | None = None,
) -> np.ndarray: ...
@overload
def scaled_mm(
    a: np.ndarray, b: AnyArray | NvFp4, scale_a: AnyFactor | None = None,
    scale_b: AnyFactor | None = None, *, bias: AnyArray | None = None,
    activation: Activation | None = None, out_dtype: AnyResultDTypes = None,
    out: AnyArray | None = None, config: AnyConfig | None = None, epilogue: FormulaLike,
    operands: AnyOperands | None = None,
) -> Any: ...
@overload
def scaled_mm(
    a: GivenArray, b: AnyArray | NvFp4, scale_a: AnyFactor | None = None,
    scale_b: AnyFactor | None = None, *, bias: AnyArray | None = None,
    activation: Activation | None = None, out_dtype: AnyResultDTypes = None,
    out: AnyArray | None = None, config: AnyConfig | None = None, epilogue: None = None,
    operands: AnyOperands | None = None,
) -> GivenArray: ...
@overload
def scaled_mm(
    a: GivenArray, b: AnyArray | NvFp4, scale_a: AnyFactor | None = None,
    scale_b: AnyFactor | None = None, *, bias: AnyArray | None = None,
    activation: Activation | None = None, out_dtype: AnyResultDTypes = None,
    out: AnyArray | None = None, config: AnyConfig | None = None, epilogue: FormulaLike,
    operands: AnyOperands | None = None,
) -> Any: ...
@overload
def scaled_mm(
    a: NvFp4, b: AnyArray | NvFp4, scale_a: AnyFactor | None = None,
    scale_b: AnyFactor | None = None, *, bias: AnyArray | None = None,
    activation: Activation | None = None, out_dtype: AnyResultDTypes = None,
    out: AnyArray | None = None, config: AnyConfig | None = None, epilogue: None = None,
    operands: AnyOperands | None = None,
) -> Any: ...
@overload
def scaled_mm(
    a: NvFp4, b: AnyArray | NvFp4, scale_a: AnyFactor | None = None,
    scale_b: AnyFactor | None = None, *, bias: AnyArray | None = None,
    activation: Activation | None = None, out_dtype: AnyResultDTypes = None,
    out: AnyArray | None = None, config: AnyConfig | None = None, epilogue: FormulaLike,
    operands: AnyOperands | None = None,
) -> Any: ...

@overload
def softmax(
    x: np.ndarray, axis: int = -1, *, mask: AnyArray | None = None, scale: AnyFactor | None = None,
    dtype: AnyDType | None = None, out: AnyArray | None = None, config: RowConfig | None = None,
) -> np.ndarray: ...
@overload
def softmax(
    x: GivenArray, axis: int = -1, *, mask: AnyArray | None = None, scale: AnyFactor | None = None,
    dtype: AnyDType | None = None, out: AnyArray | None = None, config: RowConfig | None = None,
) -> GivenArray: ...
