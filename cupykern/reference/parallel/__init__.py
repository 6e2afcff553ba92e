"""FP64 references of `cupykern.parallel`, computed by one process, and error bounds.

The bounds include the order of sums over ranks.  Arguments that differ between ranks are sequences
with one item per rank.
"""

from .attention import ring_attention, ring_attention_bound
from .moe import expert_parallel_moe, expert_parallel_moe_bound
from .norms import all_reduce_norm, all_reduce_norm_bound
from .products import (
    all_reduce,
    all_reduce_bound,
    reduce_scatter_bound,
    row_parallel_dual_gemm_silu,
    row_parallel_dual_gemm_silu_bound,
    row_parallel_matmul,
    row_parallel_matmul_bound,
    row_parallel_scaled_mm,
    row_parallel_scaled_mm_bound,
)
from .vocabulary import (
    vocabulary_parallel_cross_entropy,
    vocabulary_parallel_cross_entropy_bound,
    vocabulary_parallel_log_softmax,
    vocabulary_parallel_log_softmax_bound,
    vocabulary_parallel_sample_bound,
    vocabulary_parallel_softmax,
    vocabulary_parallel_softmax_bound,
)

__all__ = [
    "all_reduce",
    "all_reduce_bound",
    "all_reduce_norm",
    "all_reduce_norm_bound",
    "expert_parallel_moe",
    "expert_parallel_moe_bound",
    "reduce_scatter_bound",
    "ring_attention",
    "ring_attention_bound",
    "row_parallel_dual_gemm_silu",
    "row_parallel_dual_gemm_silu_bound",
    "row_parallel_matmul",
    "row_parallel_matmul_bound",
    "row_parallel_scaled_mm",
    "row_parallel_scaled_mm_bound",
    "vocabulary_parallel_cross_entropy",
    "vocabulary_parallel_cross_entropy_bound",
    "vocabulary_parallel_log_softmax",
    "vocabulary_parallel_log_softmax_bound",
    "vocabulary_parallel_sample_bound",
    "vocabulary_parallel_softmax",
    "vocabulary_parallel_softmax_bound",
]
