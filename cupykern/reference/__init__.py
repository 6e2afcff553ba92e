"""FP64 references of the ops, and derived bounds of the kernels' errors.

A reference takes the op's arguments, as numpy or CuPy arrays, and returns a tuple of FP64 arrays
with the shapes of the op's results.  A bound takes the same arguments and `reference`, the
reference's results, and returns one `Bound` per output.
"""

from .attention import attention, attention_varlen
from .attention_bound import attention_bound, attention_varlen_bound
from .cascade_attention import cascade_attention, cascade_attention_bound
from .chunked_matmul import chunked_matmul_bound
from .complex64 import complex_matmul, complex_matmul_bound
from .decode_attention import decode_attention, decode_attention_bound
from .dequant_softmax import dequant_softmax, dequant_softmax_bound
from .dual_gemm import dual_gemm_silu, dual_gemm_silu_bound
from .matmul import matmul, matmul_bound, scaled_mm, scaled_mm_bound
from .merge_attention import merge_attention, merge_attention_bound
from .nonfinite import nonfinite, nonfinite_bound
from .norm import layer_norm, layer_norm_bound, rms_norm, rms_norm_bound
from .quantize import quantize, quantize_bound, quantize_nvfp4, quantize_nvfp4_bound
from .rope import rope_and_cache, rope_and_cache_bound
from .softmax import log_softmax, log_softmax_bound, softmax, softmax_bound

__all__ = [
    "attention",
    "attention_bound",
    "attention_varlen",
    "attention_varlen_bound",
    "cascade_attention",
    "cascade_attention_bound",
    "chunked_matmul_bound",
    "complex_matmul",
    "complex_matmul_bound",
    "decode_attention",
    "decode_attention_bound",
    "dequant_softmax",
    "dequant_softmax_bound",
    "dual_gemm_silu",
    "dual_gemm_silu_bound",
    "layer_norm",
    "layer_norm_bound",
    "log_softmax",
    "log_softmax_bound",
    "matmul",
    "matmul_bound",
    "merge_attention",
    "merge_attention_bound",
    "nonfinite",
    "nonfinite_bound",
    "quantize",
    "quantize_bound",
    "quantize_nvfp4",
    "quantize_nvfp4_bound",
    "rms_norm",
    "rms_norm_bound",
    "rope_and_cache",
    "rope_and_cache_bound",
    "scaled_mm",
    "scaled_mm_bound",
    "softmax",
    "softmax_bound",
]
