"""Configs of rope_and_cache: the tokens and the heads of a block."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import dtypes, tuned
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
TABLE_FLOATS = 2048  # rope_and_cache.cu: kTableFloats, for the longest heads and most tokens
_C = tuned.constants("sm_90a", "rope")


@config_class
class RopeConfig:
    """tokens: tokens per block; a thread loads its part of one head of all of them before it
        computes.
    passes: how often a block's threads pass on to further heads of these tokens; in each pass a
        thread works on one head.
    """

    tokens: int = 1
    passes: int = 1


class RopeTask(NamedTuple):
    """Everything that determines which kernel is launched.

    num_heads: heads of q, k and, with a cache, v.  half: pairs that are rotated.
    normalizes: heads have a norm.  by_vectors: all arrays can be accessed in aligned vectors.
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

    @property
    def heads_per_pass(self) -> int:
        return _THREADS // self.lanes

    @property
    def most_passes(self) -> int:
        """Passes over all heads."""
        return -(-self.num_heads // self.heads_per_pass)

    def blocks_per_token(self, config: RopeConfig) -> int:
        return -(-self.most_passes // config.passes)

    def num_blocks(self, config: RopeConfig) -> int:
        return self.blocks_per_token(config) * -(-self.num_tokens // config.tokens)


def takes_vectors(dtype: np.dtype, dim: int, half: int) -> bool:
    """Whether a head consists of pairs of whole vectors, at most one pair per lane of a warp."""
    width = VECTOR_BYTES // dtype.itemsize
    return dim % (2 * width) == 0 and half % width == 0 and dim <= 2 * width * _LANES


def configs(task: RopeTask, device: Device) -> tuple[RopeConfig, ...]:
    """The legal configs, the default first: several tokens and passes per block if that leaves
    enough blocks.

    A thread that loads parts of two tokens has more loads in flight.  With several passes fewer
    blocks compute the same angles: (4, 4096) tokens of 32/8 heads of 128 take 104.5 us, with one
    pass 108.5 (BF16, H200; a copy of the bytes 101.5).
    """
    most, passes = max(_tokens(device.arch, task.by_vectors)), min(_C["passes"], task.most_passes)
    found = dict.fromkeys((RopeConfig(most, passes), RopeConfig(most), RopeConfig(1)))

    def has_enough_blocks(config: RopeConfig) -> bool:
        least = _C["blocks_for_passes" if config.passes > 1 else "blocks_for_tokens"]
        return bool(task.num_blocks(config) >= least * device.multiprocessors)

    best = next(filter(has_enough_blocks, found), RopeConfig(1))
    return tuple(dict.fromkeys((best, *found)))


def _tokens(arch: str, by_vectors: bool) -> tuple[int, ...]:
    return (1, 2) if by_vectors and is_measured(arch) else (1,)


def _refusal(config: RopeConfig, task: RopeTask, device: Device) -> str | None:
    allowed = _tokens(device.arch, task.by_vectors)
    if config.tokens not in allowed:
        return f"tokens must be one of {allowed}; got {config.tokens}"
    if not 1 <= config.passes <= task.most_passes:
        return f"passes must be 1 to {task.most_passes}; got {config.passes}"
    return None


def variant_of(dtype: np.dtype, by_vectors: bool, config: RopeConfig) -> Variant:
    width = VECTOR_BYTES // dtype.itemsize if by_vectors else 1
    constants = (
        ("kVectorWidth", width),
        ("kLoads", 1 if by_vectors else _SCALAR_PAIRS),
        ("kTokens", config.tokens),
        ("kTableFloats", TABLE_FLOATS),
    )
    types = (("Element", dtypes.CPP_NAMES[dtype]),)
    least = _C["min_blocks"][config.tokens] if by_vectors else 1
    return Variant("rope_and_cache", types, constants, _THREADS, min_blocks=least)


def variants(arch: str) -> tuple[Variant, ...]:
    return tuple(
        variant_of(dtype, by_vectors, RopeConfig(tokens))
        for dtype in DTYPES
        for by_vectors in (True, False)
        for tokens in _tokens(arch, by_vectors)
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
