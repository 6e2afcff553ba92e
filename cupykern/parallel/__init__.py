"""Model layers over several ranks; each rank holds a part of the weights, rows, keys or experts.

The functions take a communicator over the user's mpi4py or NCCL communicator: `MpiCommunicator`,
`NcclCommunicator`, or `SelfCommunicator` for one rank.  Sums over ranks are FP32, in rank order.
All ranks compare their arguments first and raise the same error if these differ.
"""

from .attention import ring_attention, zigzag
from .collectives import all_gather, all_reduce, reduce_scatter, shares
from .column_products import (
    column_parallel_dual_gemm_silu,
    column_parallel_matmul,
    column_parallel_scaled_mm,
)
from .communicator import CommunicationError, Communicator, SelfCommunicator
from .moe import expert_parallel_moe
from .mpi import MpiCommunicator
from .nccl import NcclCommunicator
from .norms import (
    all_reduce_layer_norm,
    all_reduce_rms_norm,
    sequence_parallel_layer_norm,
    sequence_parallel_rms_norm,
)
from .row_products import (
    row_parallel_dual_gemm_silu,
    row_parallel_matmul,
    row_parallel_scaled_mm,
)
from .vocabulary import (
    vocabulary_parallel_argmax,
    vocabulary_parallel_cross_entropy,
    vocabulary_parallel_log_softmax,
    vocabulary_parallel_sample,
    vocabulary_parallel_softmax,
)

__all__ = [
    "CommunicationError",
    "Communicator",
    "MpiCommunicator",
    "NcclCommunicator",
    "SelfCommunicator",
    "all_gather",
    "all_reduce",
    "all_reduce_layer_norm",
    "all_reduce_rms_norm",
    "column_parallel_dual_gemm_silu",
    "column_parallel_matmul",
    "column_parallel_scaled_mm",
    "expert_parallel_moe",
    "reduce_scatter",
    "ring_attention",
    "row_parallel_dual_gemm_silu",
    "row_parallel_matmul",
    "row_parallel_scaled_mm",
    "sequence_parallel_layer_norm",
    "sequence_parallel_rms_norm",
    "shares",
    "vocabulary_parallel_argmax",
    "vocabulary_parallel_cross_entropy",
    "vocabulary_parallel_log_softmax",
    "vocabulary_parallel_sample",
    "vocabulary_parallel_softmax",
    "zigzag",
]
