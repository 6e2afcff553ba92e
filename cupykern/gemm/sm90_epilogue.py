"""Choose the epilogue of a product in Hopper's matmul kernels (gemm/epilogue/matmul.cuh:
EpilogueKind)."""

from __future__ import annotations

from .. import dtypes
from .operand_maps import tma_stores
from .product import ACTIVATIONS, FP4, Matrix, Product

GENERAL, BY_TMA = range(2)
_SMALLEST_HALVED = 2.0**-125  # half of it is not flushed to zero in FP32


def epilogue_of(product: Product, swap_ab: bool) -> str:
    """The cheapest epilogue that computes `product`, of one matrix B (GemmTask.epilogue).

    But for "general", 16-bit operands have at most one scale, which takes the place of alpha, and
    with a residual none.
    """
    p = product
    if p.formula is not None or _are_parts(p) or not _allows_tma_epilogue(p, swap_ab):
        return "general"
    if p.residual is not None:
        same = p.residual.dtype == p.out.dtype and not _has_scalar_scales(p)
        fits = same and all(tma_stores(x, p.m, p.n) for x in (p.out, p.residual))
        return "residual" if fits else "general"
    if _has_scalar_scales(p) and (None not in (p.scale_a, p.scale_b) or p.alpha != 1):
        return "general"
    if tma_stores(p.out, p.m, p.n):
        return "tma_store" if p.activation is None else "activated"
    floats = p.activation is None and tma_stores(p.out, p.m, p.n, (dtypes.float32,))
    return "floats" if floats else "general"


def general_kind(product: Product, swap_ab: bool) -> int:
    """How the General kernel stores `product` (gemm/epilogue/matmul.cuh: EpilogueKind)."""
    p = product
    if p.formula is not None:
        return GENERAL if loaded_operand(p, swap_ab) is None else BY_TMA
    if swap_ab and _has_scalar_scales(p):  # TileBroadcast: kMatrixScales
        return GENERAL
    floats = p.activation is None and tma_stores(p.out, p.m, p.n, (dtypes.float32,))
    scaled = (_has_scalar_scales(p) or _are_parts(p)) and tma_stores(p.out, p.m, p.n)
    fits = p.residual is None and not swap_ab and _allows_tma_epilogue(p, swap_ab)
    return BY_TMA if fits and (floats or scaled) else GENERAL


def loaded_operand(product: Product, swap_ab: bool) -> tuple[int, Matrix] | None:
    """(number, matrix) of the formula's operand that TMA loads as it loads a residual: the first
    16-bit matrix that varies along rows and columns (gemm/epilogue/expression.cuh: kLoaded).

    None if there is none, or if TMA cannot load it.
    """
    p = product
    if p.formula is None or p.kernel != "gemm" or swap_ab or p.batch:
        return None
    for k, x in enumerate(p.formula.arguments):
        if isinstance(x, Matrix) and x.row != 0 and x.col != 0 and x.dtype.itemsize == 2:
            return (k, x) if all(tma_stores(y, p.m, p.n) for y in (p.out, x)) else None
    return None


def with_a_decoded(product: Product) -> Product:
    """`product` with FP16 in place of an NVFP4 a: every Hopper mainloop takes it decoded."""
    if product.a.dtype != FP4:
        return product
    return product._replace(a=product.a._replace(dtype=dtypes.float16))


def with_both_decoded(product: Product) -> Product:
    """`product` with FP16 in place of an NVFP4 b, and of an NVFP4 a."""
    return with_a_decoded(product)._replace(b=product.b._replace(dtype=dtypes.float16))


def _has_scalar_scales(p: Product) -> bool:
    """Whether 16-bit operands have scales, which are per tensor."""
    return p.b.dtype.itemsize > 1 and (p.scale_a, p.scale_b) != (None, None)


def _are_parts(p: Product) -> bool:
    """Whether the operands are parts of FP32 ones, which have block scales."""
    return p.block_scales and p.b.dtype.itemsize > 1


def _allows_tma_epilogue(p: Product, swap_ab: bool) -> bool:
    """Whether the epilogues that store by TMA support alpha beside the scales, the bias (only per
    column) and the activation (only with a 16-bit a)."""
    scales = [None if p.block_scales else scale for scale in (p.scale_a, p.scale_b)]
    return (
        # alpha takes the place of a scale, or stands alone.
        (swap_ab or p.b.dtype.itemsize > 1 or p.alpha == 1 or None in scales)
        and (p.bias is None or (p.bias.row == 0 and p.bias.col != 0))
        and (p.activation is None or p.a.dtype.itemsize == 2)
        and (not ACTIVATIONS[p.activation].halves or _is_halved_exactly(p))
    )


def _is_halved_exactly(p: Product) -> bool:
    """Whether half of the factor applied as alpha is exact in FP32; False for a scale in memory."""
    return not _has_scalar_scales(p) and (p.alpha == 0 or abs(p.alpha) >= _SMALLEST_HALVED)
