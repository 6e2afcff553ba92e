"""Configs of rope_and_cache: the number of head vectors that a thread loads at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import dtypes
from ..arguments import config_class
from ..kernels import Variant
from ..runtime.choice import Family
from ..targets import Device
from ..targets.limits import is_measured

DTYPES = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
CACHE_DTYPES = (dtypes.float8_e4m3fn, dtypes.int8)  # besides q's dtype
LAYOUTS = ("hnd", "nhd")  # order of the caches' dims
MAX_DIM = 512
VECTOR_BYTES = 16
_THREADS = 128
_LANES = 32  # the most threads per head vector
_SCALAR_PAIRS = MAX_DIM // 2 // _LANES  # pairs per thread
TABLE_FLOATS, MAX_TOKENS = 3072, 64  # rope_and_cache.cu: kTableFloats, kMaxTokens
_WAVES = 4  # the fewest waves of blocks for several vectors per thread


@config_class
class RopeConfig:
    """vectors: head vectors of which a thread loads its parts before it computes."""

    vectors: int = 1


class RopeTask(NamedTuple):
    """Everything that determines which kernel is launched.

    num_heads: heads of q, k and, with a cache, v.  half: pairs that are rotated.
    by_vectors: vectors can walk the rows of all arrays.
    """

    dtype: np.dtype
    num_tokens: int
    num_heads: int
    dim: int
    half: int
    normalizes: bool
    by_vectors: bool

    @property
    def width(self) -> int:
        """kVectorWidth."""
        return VECTOR_BYTES // self.dtype.itemsize if self.by_vectors else 1

    @property
    def num_pairs(self) -> int:
        return -(-self.dim // 2)

    @property
    def lanes(self) -> int:
        """Threads per head vector, a power of two."""
        return 1 << (min(-(-self.num_pairs // self.width), _LANES) - 1).bit_length()

    def vectors_per_block(self, config: RopeConfig) -> int:
        """Head vectors per block: whole tokens if that leaves at most 1/8 of the threads idle, and
        no more than the tables hold."""
        count = most = _THREADS // self.lanes * config.vectors
        whole = most // self.num_heads * self.num_heads
        if 8 * whole >= 7 * most:
            count = whole
        while not self._fits(count):
            count //= 2
        return count

    def _fits(self, vectors: int) -> bool:
        tokens = (vectors + self.num_heads - 2) // self.num_heads + 1
        if vectors % self.num_heads == 0:
            tokens = vectors // self.num_heads
        floats = 2 * tokens * self.half + 4 * self.num_pairs * self.normalizes
        return tokens <= MAX_TOKENS and floats <= TABLE_FLOATS

    def num_blocks(self, config: RopeConfig) -> int:
        return -(-self.num_tokens * self.num_heads // self.vectors_per_block(config))


def takes_vectors(dtype: np.dtype, dim: int, half: int) -> bool:
    """Whether a head consists of pairs of whole vectors, at most one pair per lane of a warp."""
    width = VECTOR_BYTES // dtype.itemsize
    return dim % (2 * width) == 0 and half % width == 0 and dim <= 2 * width * _LANES


def configs(task: RopeTask, device: Device) -> tuple[RopeConfig, ...]:
    """The legal configs, the default first: the most vectors per thread that leave _WAVES waves.

    Several vectors per thread keep more loads in flight; too few blocks leave SMs idle.
    """
    found = _configs(device.arch, task.by_vectors)
    full = [c for c in found if task.num_blocks(c) >= _WAVES * device.multiprocessors]
    best = full[-1] if full else found[0]
    return (best, *(c for c in found if c != best))


def _configs(arch: str, by_vectors: bool) -> tuple[RopeConfig, ...]:
    several = (1, 2, 3) if by_vectors and is_measured(arch) else (1,)
    return tuple(map(RopeConfig, several))


def _refusal(config: RopeConfig, task: RopeTask, device: Device) -> str | None:
    allowed = _configs(device.arch, task.by_vectors)
    if config in allowed:
        return None
    most = "1 of strided arrays, or where" if not task.by_vectors else f"1 to {len(allowed)} where"
    return f"vectors must be {most} the kernel has no more; got {config.vectors}"


def variant_of(dtype: np.dtype, by_vectors: bool, config: RopeConfig) -> Variant:
    width = VECTOR_BYTES // dtype.itemsize if by_vectors else 1
    constants = (
        ("kVectorWidth", width),
        ("kLoads", 1 if by_vectors else _SCALAR_PAIRS),
        ("kVectors", config.vectors),
        ("kTableFloats", TABLE_FLOATS),
        ("kMaxTokens", MAX_TOKENS),
    )
    return Variant("rope_and_cache", (("Element", dtypes.CPP_NAMES[dtype]),), constants, _THREADS)


def variants(arch: str) -> tuple[Variant, ...]:
    return tuple(
        variant_of(dtype, by_vectors, config)
        for dtype in DTYPES
        for by_vectors in (True, False)
        for config in _configs(arch, by_vectors)
    )


FAMILY = Family(
    "rope_and_cache",
    (RopeConfig,),
    configs,
    _refusal,
    lambda task, config: variant_of(task.dtype, task.by_vectors, config),
    lambda task: (
        {"vectors": task.num_tokens * task.num_heads, "dim": task.dim},
        {"dtype": task.dtype.name, "by_vectors": task.by_vectors, "norm": task.normalizes},
    ),
)
