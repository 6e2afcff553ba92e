"""Which epilogue of Hopper's matmul kernels a product needs (gemm/epilogue/matmul.cuh:
EpilogueKind)."""

from __future__ import annotations

from .. import dtypes
from .operand_maps import tma_stores
from .product import ACTIVATIONS, FP4, Product

GENERAL, TMA_STORE, TMA_RESIDUAL = range(3)
_SMALLEST_HALVED = 2.0**-125  # whose half FP32 does not flush to zero


def epilogue_kind(product: Product, swap_ab: bool) -> int:
    """The cheapest that does."""
    if product.formula is not None:
        return GENERAL
    if fits_tma_store(product, swap_ab):
        return TMA_STORE
    return TMA_RESIDUAL if _fits_tma_residual(product, swap_ab) else GENERAL


def fits_tma_store(product: Product, swap_ab: bool) -> bool:
    """Whether kernels with TmaStore do: 16-bit results without a residual; of 16-bit operands at
    most one scale, in alpha's place."""
    p = product
    if p.residual is not None or p.formula is not None or _are_parts(p):
        return False
    if _has_scalar_scales(p) and (None not in (p.scale_a, p.scale_b) or p.alpha != 1):
        return False
    return tma_stores(p.out, p.m, p.n) and _is_short(p, swap_ab)


def with_a_decoded(product: Product) -> Product:
    """With FP16 in the place of an NVFP4 a, which every mainloop on Hopper takes decoded."""
    if product.a.dtype != FP4:
        return product
    return product._replace(a=product.a._replace(dtype=dtypes.float16))


def fits_tma_store_decoded(product: Product) -> bool:
    """fits_tma_store of 16-bit operands in the place of NVFP4 ones."""
    b = product.b._replace(dtype=dtypes.float16)
    return fits_tma_store(with_a_decoded(product)._replace(b=b), False)


def _fits_tma_residual(product: Product, swap_ab: bool) -> bool:
    """Whether TMA stores in kernels with General: with a residual of the result's dtype, FP32
    results or scales of 16-bit operands."""
    p, scaled = product, _has_scalar_scales(product)
    if p.residual is None:
        floats = p.activation is None and tma_stores(p.out, p.m, p.n, (dtypes.float32,))
        stores = tma_stores(p.out, p.m, p.n)
        fits = floats or ((scaled or _are_parts(p)) and stores)
        return fits and not swap_ab and _is_short(p, swap_ab)
    same = p.residual.dtype == p.out.dtype and not (scaled or _are_parts(p))
    both = same and all(tma_stores(x, p.m, p.n) for x in (p.out, p.residual))
    return both and _is_short(p, swap_ab)


def _has_scalar_scales(p: Product) -> bool:
    """Of 16-bit operands, which have no others."""
    return p.b.dtype.itemsize > 1 and (p.scale_a, p.scale_b) != (None, None)


def _are_parts(p: Product) -> bool:
    """Of FP32 operands, with block scales."""
    return p.block_scales and p.b.dtype.itemsize > 1


def _is_short(p: Product, swap_ab: bool) -> bool:
    scales = [None if p.block_scales else scale for scale in (p.scale_a, p.scale_b)]
    return (
        # alpha takes the place of a scale, or stands alone.
        (swap_ab or p.b.dtype.itemsize > 1 or p.alpha == 1 or None in scales)
        and (p.bias is None or (p.bias.row == 0 and p.bias.col != 0))
        and (p.activation is None or p.a.dtype.itemsize == 2)
        and (not ACTIVATIONS[p.activation].halves or _is_halved_exactly(p))
    )


def _is_halved_exactly(p: Product) -> bool:
    """Whether half of what stands in alpha's place is."""
    return not _has_scalar_scales(p) and (p.alpha == 0 or abs(p.alpha) >= _SMALLEST_HALVED)
