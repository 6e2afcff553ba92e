# Written by python -m cupykern.tools.stubs
# fmt: off
from typing import Any, Literal, overload

import numpy as np

from ..typing import Activation, Array, DTypeLike, Factor, Precision
from .attention import zigzag
from .collectives import shares
from .communicator import CommunicationError, Communicator, SelfCommunicator
from .mpi import MpiCommunicator
from .nccl import NcclCommunicator

__all__ = [
    "CommunicationError", "Communicator", "MpiCommunicator", "NcclCommunicator", "SelfCommunicator",
    "all_gather", "all_reduce", "all_reduce_layer_norm", "all_reduce_rms_norm",
    "column_parallel_dual_gemm_silu", "column_parallel_matmul", "column_parallel_scaled_mm",
    "expert_parallel_moe", "reduce_scatter", "ring_attention", "row_parallel_dual_gemm_silu",
    "row_parallel_matmul", "row_parallel_scaled_mm", "sequence_parallel_layer_norm",
    "sequence_parallel_rms_norm", "shares", "vocabulary_parallel_argmax",
    "vocabulary_parallel_cross_entropy", "vocabulary_parallel_log_softmax",
    "vocabulary_parallel_sample", "vocabulary_parallel_softmax", "zigzag",
]

@overload
def all_gather(comm: Communicator, x: np.ndarray) -> np.ndarray: ...
@overload
def all_gather(comm: Communicator, x: Array) -> Array: ...

@overload
def all_reduce(
    comm: Communicator, x: np.ndarray, *, dtype: DTypeLike | None = None,
) -> np.ndarray: ...
@overload
def all_reduce(comm: Communicator, x: Array, *, dtype: DTypeLike | None = None) -> Array: ...

@overload
def all_reduce_layer_norm(
    comm: Communicator, x: np.ndarray, weight: Array | None = None, bias: Array | None = None, *,
    eps: Factor | None = 1e-05, residual: None = None,
    output: Literal["replicated", "rows"] = "replicated",
) -> np.ndarray: ...
@overload
def all_reduce_layer_norm(
    comm: Communicator, x: np.ndarray, weight: Array | None = None, bias: Array | None = None, *,
    eps: Factor | None = 1e-05, residual: Array,
    output: Literal["replicated", "rows"] = "replicated",
) -> tuple[np.ndarray, ...]: ...
@overload
def all_reduce_layer_norm(
    comm: Communicator, x: Array, weight: Array | None = None, bias: Array | None = None, *,
    eps: Factor | None = 1e-05, residual: None = None,
    output: Literal["replicated", "rows"] = "replicated",
) -> Array: ...
@overload
def all_reduce_layer_norm(
    comm: Communicator, x: Array, weight: Array | None = None, bias: Array | None = None, *,
    eps: Factor | None = 1e-05, residual: Array,
    output: Literal["replicated", "rows"] = "replicated",
) -> tuple[Array, ...]: ...

@overload
def all_reduce_rms_norm(
    comm: Communicator, x: np.ndarray, weight: Array | None = None, *, eps: Factor | None = None,
    residual: None = None, output: Literal["replicated", "rows"] = "replicated",
) -> np.ndarray: ...
@overload
def all_reduce_rms_norm(
    comm: Communicator, x: np.ndarray, weight: Array | None = None, *, eps: Factor | None = None,
    residual: Array, output: Literal["replicated", "rows"] = "replicated",
) -> tuple[np.ndarray, ...]: ...
@overload
def all_reduce_rms_norm(
    comm: Communicator, x: Array, weight: Array | None = None, *, eps: Factor | None = None,
    residual: None = None, output: Literal["replicated", "rows"] = "replicated",
) -> Array: ...
@overload
def all_reduce_rms_norm(
    comm: Communicator, x: Array, weight: Array | None = None, *, eps: Factor | None = None,
    residual: Array, output: Literal["replicated", "rows"] = "replicated",
) -> tuple[Array, ...]: ...

@overload
def column_parallel_dual_gemm_silu(
    comm: Communicator, a: np.ndarray, b1: Array, b2: Array, *, scale_a: Factor | None = None,
    scale_b1: Factor | None = None, scale_b2: Factor | None = None,
    policy: Literal["fp32", "hybrid", "fp16"] = "fp32", out_dtype: DTypeLike | None = None,
    input: Literal["replicated", "rows"] = "replicated",
    output: Literal["columns", "replicated"] = "columns",
) -> np.ndarray: ...
@overload
def column_parallel_dual_gemm_silu(
    comm: Communicator, a: Array, b1: Array, b2: Array, *, scale_a: Factor | None = None,
    scale_b1: Factor | None = None, scale_b2: Factor | None = None,
    policy: Literal["fp32", "hybrid", "fp16"] = "fp32", out_dtype: DTypeLike | None = None,
    input: Literal["replicated", "rows"] = "replicated",
    output: Literal["columns", "replicated"] = "columns",
) -> Array: ...

@overload
def column_parallel_matmul(
    comm: Communicator, a: np.ndarray, b: Array, *, bias: Array | None = None,
    activation: Activation | None = None, residual: Array | None = None,
    alpha: Factor | None = 1.0, out_dtype: DTypeLike | None = None,
    precision: Precision = "float32", input: Literal["replicated", "rows"] = "replicated",
    output: Literal["columns", "replicated"] = "columns",
) -> np.ndarray: ...
@overload
def column_parallel_matmul(
    comm: Communicator, a: Array, b: Array, *, bias: Array | None = None,
    activation: Activation | None = None, residual: Array | None = None,
    alpha: Factor | None = 1.0, out_dtype: DTypeLike | None = None,
    precision: Precision = "float32", input: Literal["replicated", "rows"] = "replicated",
    output: Literal["columns", "replicated"] = "columns",
) -> Array: ...

@overload
def column_parallel_scaled_mm(
    comm: Communicator, a: np.ndarray, b: Array, scale_a: Factor | None = None,
    scale_b: Factor | None = None, *, bias: Array | None = None,
    activation: Activation | None = None, out_dtype: DTypeLike | None = None,
    input: Literal["replicated", "rows"] = "replicated",
    output: Literal["columns", "replicated"] = "columns",
) -> np.ndarray: ...
@overload
def column_parallel_scaled_mm(
    comm: Communicator, a: Array, b: Array, scale_a: Factor | None = None,
    scale_b: Factor | None = None, *, bias: Array | None = None,
    activation: Activation | None = None, out_dtype: DTypeLike | None = None,
    input: Literal["replicated", "rows"] = "replicated",
    output: Literal["columns", "replicated"] = "columns",
) -> Array: ...

@overload
def expert_parallel_moe(
    comm: Communicator, x: np.ndarray, experts: Array, gates: Array, w_gate: Array, w_up: Array,
    w_down: Array,
) -> np.ndarray: ...
@overload
def expert_parallel_moe(
    comm: Communicator, x: Array, experts: Array, gates: Array, w_gate: Array, w_up: Array,
    w_down: Array,
) -> Array: ...

@overload
def reduce_scatter(comm: Communicator, x: np.ndarray) -> np.ndarray: ...
@overload
def reduce_scatter(comm: Communicator, x: Array) -> Array: ...

@overload
def ring_attention(
    comm: Communicator, q: np.ndarray, k: Array, v: Array, *, causal: bool = False,
    scale: Factor | None = None, softcap: Factor | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd", return_lse: Literal[False] = False,
) -> np.ndarray: ...
@overload
def ring_attention(
    comm: Communicator, q: np.ndarray, k: Array, v: Array, *, causal: bool = False,
    scale: Factor | None = None, softcap: Factor | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd", return_lse: Literal[True],
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def ring_attention(
    comm: Communicator, q: Array, k: Array, v: Array, *, causal: bool = False,
    scale: Factor | None = None, softcap: Factor | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd", return_lse: Literal[False] = False,
) -> Array: ...
@overload
def ring_attention(
    comm: Communicator, q: Array, k: Array, v: Array, *, causal: bool = False,
    scale: Factor | None = None, softcap: Factor | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd", return_lse: Literal[True],
) -> tuple[Array, Array]: ...
@overload
def ring_attention(
    comm: Communicator, q: Array, k: Array, v: Array, *, causal: bool = False,
    scale: Factor | None = None, softcap: Factor | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd", return_lse: bool = False,
) -> Any: ...

@overload
def row_parallel_dual_gemm_silu(
    comm: Communicator, a: np.ndarray, b1: Array, b2: Array, *, out_dtype: DTypeLike | None = None,
    precision: Precision = "float32", output: Literal["replicated", "rows"] = "replicated",
) -> np.ndarray: ...
@overload
def row_parallel_dual_gemm_silu(
    comm: Communicator, a: Array, b1: Array, b2: Array, *, out_dtype: DTypeLike | None = None,
    precision: Precision = "float32", output: Literal["replicated", "rows"] = "replicated",
) -> Array: ...

@overload
def row_parallel_matmul(
    comm: Communicator, a: np.ndarray, b: Array, *, bias: Array | None = None,
    activation: Activation | None = None, residual: Array | None = None,
    alpha: Factor | None = 1.0, out_dtype: DTypeLike | None = None,
    precision: Precision = "float32", output: Literal["replicated", "rows"] = "replicated",
) -> np.ndarray: ...
@overload
def row_parallel_matmul(
    comm: Communicator, a: Array, b: Array, *, bias: Array | None = None,
    activation: Activation | None = None, residual: Array | None = None,
    alpha: Factor | None = 1.0, out_dtype: DTypeLike | None = None,
    precision: Precision = "float32", output: Literal["replicated", "rows"] = "replicated",
) -> Array: ...

@overload
def row_parallel_scaled_mm(
    comm: Communicator, a: np.ndarray, b: Array, scale_a: Factor | None = None,
    scale_b: Factor | None = None, *, bias: Array | None = None,
    activation: Activation | None = None, residual: Array | None = None,
    out_dtype: DTypeLike | None = None, output: Literal["replicated", "rows"] = "replicated",
) -> np.ndarray: ...
@overload
def row_parallel_scaled_mm(
    comm: Communicator, a: Array, b: Array, scale_a: Factor | None = None,
    scale_b: Factor | None = None, *, bias: Array | None = None,
    activation: Activation | None = None, residual: Array | None = None,
    out_dtype: DTypeLike | None = None, output: Literal["replicated", "rows"] = "replicated",
) -> Array: ...

@overload
def sequence_parallel_layer_norm(
    comm: Communicator, x: np.ndarray, weight: Array | None = None, bias: Array | None = None, *,
    eps: Factor | None = 1e-05, residual: None = None,
    output: Literal["rows", "replicated"] = "rows",
) -> np.ndarray: ...
@overload
def sequence_parallel_layer_norm(
    comm: Communicator, x: np.ndarray, weight: Array | None = None, bias: Array | None = None, *,
    eps: Factor | None = 1e-05, residual: Array, output: Literal["rows", "replicated"] = "rows",
) -> tuple[np.ndarray, ...]: ...
@overload
def sequence_parallel_layer_norm(
    comm: Communicator, x: Array, weight: Array | None = None, bias: Array | None = None, *,
    eps: Factor | None = 1e-05, residual: None = None,
    output: Literal["rows", "replicated"] = "rows",
) -> Array: ...
@overload
def sequence_parallel_layer_norm(
    comm: Communicator, x: Array, weight: Array | None = None, bias: Array | None = None, *,
    eps: Factor | None = 1e-05, residual: Array, output: Literal["rows", "replicated"] = "rows",
) -> tuple[Array, ...]: ...

@overload
def sequence_parallel_rms_norm(
    comm: Communicator, x: np.ndarray, weight: Array | None = None, *, eps: Factor | None = None,
    residual: None = None, output: Literal["rows", "replicated"] = "rows",
) -> np.ndarray: ...
@overload
def sequence_parallel_rms_norm(
    comm: Communicator, x: np.ndarray, weight: Array | None = None, *, eps: Factor | None = None,
    residual: Array, output: Literal["rows", "replicated"] = "rows",
) -> tuple[np.ndarray, ...]: ...
@overload
def sequence_parallel_rms_norm(
    comm: Communicator, x: Array, weight: Array | None = None, *, eps: Factor | None = None,
    residual: None = None, output: Literal["rows", "replicated"] = "rows",
) -> Array: ...
@overload
def sequence_parallel_rms_norm(
    comm: Communicator, x: Array, weight: Array | None = None, *, eps: Factor | None = None,
    residual: Array, output: Literal["rows", "replicated"] = "rows",
) -> tuple[Array, ...]: ...

@overload
def vocabulary_parallel_argmax(comm: Communicator, x: np.ndarray) -> np.ndarray: ...
@overload
def vocabulary_parallel_argmax(comm: Communicator, x: Array) -> Array: ...

@overload
def vocabulary_parallel_cross_entropy(
    comm: Communicator, x: np.ndarray, targets: Array, *, scale: Factor | None = None,
) -> np.ndarray: ...
@overload
def vocabulary_parallel_cross_entropy(
    comm: Communicator, x: Array, targets: Array, *, scale: Factor | None = None,
) -> Array: ...

@overload
def vocabulary_parallel_log_softmax(
    comm: Communicator, x: np.ndarray, *, scale: Factor | None = None,
    dtype: DTypeLike | None = None,
) -> np.ndarray: ...
@overload
def vocabulary_parallel_log_softmax(
    comm: Communicator, x: Array, *, scale: Factor | None = None, dtype: DTypeLike | None = None,
) -> Array: ...

@overload
def vocabulary_parallel_sample(
    comm: Communicator, x: np.ndarray, draws: Array, *, temperature: float = 1.0,
) -> np.ndarray: ...
@overload
def vocabulary_parallel_sample(
    comm: Communicator, x: Array, draws: Array, *, temperature: float = 1.0,
) -> Array: ...

@overload
def vocabulary_parallel_softmax(
    comm: Communicator, x: np.ndarray, *, scale: Factor | None = None,
    dtype: DTypeLike | None = None,
) -> np.ndarray: ...
@overload
def vocabulary_parallel_softmax(
    comm: Communicator, x: Array, *, scale: Factor | None = None, dtype: DTypeLike | None = None,
) -> Array: ...
