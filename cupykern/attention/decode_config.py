"""Configs of attention for decoding: chunks of keys, their groups, and where these meet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels_cu import EITHER, Variant

from .. import dtypes
from ..choice import Family
from ..targets.limits import is_measured, max_cluster_size, max_shared_bytes, multiprocessors

MAX_QUERIES = 16
MAX_DIM = 256
MAX_KEYS = 2**30
_DIMS = (64, 128, MAX_DIM)
MAX_CHUNKS = 256  # of a sequence
GROUP = 8  # chunks that are folded into one, before those of a sequence are added up
NUM_THREADS = 128
_BLOCKS_AT_ONCE = 2  # on a multiprocessor
_BLOCKS_PER_PLACE = 4  # so that the last ones to end are short


@dataclass(frozen=True)
class DecodeConfig:
    """A block takes `rows` queries and streams tiles of `tile_k` keys through `stages` buffers.

    chunk: how many keys are summed up before they meet others, of sequences of up to 256 chunks; it
        doubles with every further doubling of the length.
    least_chunk: the same of short sequences, a power of two times less: of up to 8 chunks, it doubles too.
    chunks_per_block: how many neighbouring chunks a block takes on, one after another: 1, or a multiple
        of the 8 of a group.
    threads: of a block; 256 take fewer registers each where rows have more than 64 numbers.
    pairs: two blocks, neighbours in a cluster, have the two groups that sequences have at most, and add
        them up without going through memory.
    paged_or_not: the variant is for caches with a block table and without.
    stages, chunks_per_block, pairs and paged_or_not change no bit of a result.
    """

    rows: int
    tile_k: int
    stages: int
    chunk: int = 256
    chunks_per_block: int = 1
    threads: int = NUM_THREADS
    least_chunk: int = 128
    pairs: bool = False
    paged_or_not: bool = False

    @property
    def merges_later(self) -> bool:
        """Whether a launch of its own adds up what blocks leave: kMergesLater."""
        return self.rows > 16

    def shared_bytes(self, dim: int) -> int:
        """sizeof(DecodeStorage), for warps of 32 threads; of 64 it is less."""
        warps, most_groups = self.threads // 32, MAX_CHUNKS // GROUP
        own_rows = self.rows >= 16 * warps
        key_warps = min(warps, self.tile_k // 16)
        size = self.stages * 4 * self.tile_k * dim
        if not self.merges_later:
            node = 16 * self.threads
            size = max(size, node * min(max(size // node // GROUP, 1) * GROUP, most_groups))
        size += self.rows * 2 * dim
        if not own_rows:
            rows_at_once = 4 * self.threads // dim
            of_warps = 8 * key_warps * self.rows + 4 * key_warps * rows_at_once * (dim + 8)
            size += max(of_warps, 0 if self.merges_later else merge_sums_bytes(dim, self.threads))
        if self.pairs:
            size += self.rows * (8 + 4 * dim)
        return -(-(size + 80) // 16) * 16


def merge_sums_bytes(dim: int, threads: int) -> int:
    """sizeof(MergeSums)."""
    groups_of_lane = -(-(MAX_CHUNKS // GROUP) // min(dim // 4, 32))
    return 8 * GROUP * groups_of_lane * threads


class DecodeTask(NamedTuple):
    """What a call computes, as its shapes and dtype say.  rows: of a KV head."""

    dtype: np.dtype
    batch: int
    num_kv_heads: int
    rows: int
    dim: int
    dim_v: int
    max_keys: int

    @property
    def padded_dim(self) -> int:
        """Of queries, keys and values in shared memory."""
        return next(dim for dim in _DIMS if dim >= max(self.dim, self.dim_v))

    def max_chunks(self, config: DecodeConfig) -> int:
        """Of a sequence of any length up to max_keys."""
        short = min(-(-self.max_keys // config.least_chunk), GROUP)
        return max(1, short, min(-(-self.max_keys // config.chunk), MAX_CHUNKS))

    def num_tasks(self, config: DecodeConfig) -> int:
        runs = -(-self.max_chunks(config) // config.chunks_per_block)
        return self.batch * self.num_kv_heads * runs * -(-self.rows // config.rows)


@cache
def _tiles(arch: str, dim: int) -> tuple[DecodeConfig, DecodeConfig]:
    """For up to 16 rows, and for more.  Two blocks fit on a multiprocessor of an H200.

    Where nothing is measured rows beyond 16 are further blocks', which find the keys in the L2 cache.
    """
    if arch.startswith("gfx"):
        # More rows would take more registers than gfx11 has.
        few = DecodeConfig(16, 64, 2, paged_or_not=True)
        if dim > 64:
            few = replace(few, tile_k=32, stages=2 if dim < MAX_DIM else 1, threads=256)
        return few, few
    roomy = max_shared_bytes(arch) >= 160 * 1024
    few = DecodeConfig(16, 8192 // dim, 3 if roomy and dim > 64 else 2)
    if not is_measured(arch):
        return (replace(few, paged_or_not=True),) * 2
    many = DecodeConfig(64, 64, 3 if dim == 64 else 2)
    if dim == MAX_DIM:
        many = DecodeConfig(32, 32, 2, threads=256)
    # Measured on an H200.
    return tuple(replace(c, chunk=512) for c in (few, many)) if arch == "sm_90a" else (few, many)


def _busy_tiles(arch: str, dim: int) -> tuple[DecodeConfig, ...]:
    """For up to 16 rows where multiprocessors have more than a block each, as measured on an H200: in
    pairs, which not all tasks allow, and alone.  Less is on its way then, to more of them."""
    if arch != "sm_90a" or dim != 128:
        return ()
    tile = replace(_tiles(arch, dim)[0], stages=2)
    return replace(tile, chunks_per_block=GROUP, pairs=True), tile


def configs(task: DecodeTask, arch: str, blocks: int | None = None) -> tuple[DecodeConfig, ...]:
    """The configs of `task` on `arch`, the default first; their results agree bit for bit, so that it
    does not matter which of them a batch gets.

    blocks: how many multiprocessors the device has; None: as most of `arch`.
    """
    few, many = _tiles(arch, task.padded_dim)
    tile = few if task.rows <= few.rows else many
    if task.rows > tile.rows and arch == "sm_90a":
        # Blocks of other rows read the same keys: the more chunks, the more blocks there are without
        # that.  Measured on an H200.
        tile = replace(tile, chunk=tile.least_chunk)
    places = blocks or multiprocessors(arch)
    # Whole groups, as many as leave each place some blocks; single chunks where that would leave places
    # without any.
    at_once = _BLOCKS_AT_ONCE * places
    groups = max(1, task.num_tasks(tile) // GROUP // (_BLOCKS_PER_PLACE * at_once))
    run = GROUP << (groups.bit_length() - 1)
    # Measured on an H200: a block on nearly every multiprocessor is enough for whole groups.
    if 10 * task.num_tasks(replace(tile, chunks_per_block=GROUP)) < 9 * places:
        run = 1
    busy = _busy_tiles(arch, task.padded_dim) if tile is few else ()
    found: dict[DecodeConfig, None] = {}
    for n in (run, 1, 8, 16, 32):
        config = replace(tile, chunks_per_block=n)
        others = [replace(c, chunks_per_block=n) for c in busy if not c.pairs or n == GROUP]
        others = [c for c in others if not _refusal_of_pairs(c, task, arch)]
        if task.num_tasks(config) > places:
            found |= dict.fromkeys((*others, config))
        else:
            found |= dict.fromkeys((config, *others))
    return tuple(found)


def choose_config(task: DecodeTask, arch: str, blocks: int | None = None) -> DecodeConfig:
    """The config for `task` on `arch` with `blocks` multiprocessors."""
    return configs(task, arch, blocks)[0]


def refusal(config: DecodeConfig, task: DecodeTask, arch: str) -> str | None:
    """Why `config` cannot compute `task` on `arch`; None: it can."""
    reason = _refusal(config, task.padded_dim, arch) or _refusal_of_pairs(config, task, arch)
    return reason and f"{reason}; got {config}"


def _refusal(config: DecodeConfig, dim: int, arch: str) -> str | None:
    c = config
    sizes = (c.rows, c.tile_k, c.stages, c.chunk, c.least_chunk, c.chunks_per_block)
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return "all sizes must be positive integers"
    if not isinstance(c.pairs, bool):
        return "pairs must be a bool"
    if c.rows not in (16, 32, 64):
        return "rows must be 16, 32 or 64"
    if c.threads != NUM_THREADS and not (
        c.threads == 256 and dim > 64 and c.rows < 64 and c.tile_k >= 32
    ):
        return f"threads must be {NUM_THREADS}, or 256 of dims above 64, rows below 64 and tile_k above 16"
    if c.tile_k not in (16, 32, 64, 128):
        return "tile_k must be 16, 32, 64 or 128"
    if c.chunk > MAX_KEYS:
        return f"chunk must be at most {MAX_KEYS}"
    times = c.chunk // c.least_chunk
    if c.least_chunk % c.tile_k or times * c.least_chunk != c.chunk or times & (times - 1):
        return "chunk must be least_chunk, a multiple of tile_k, times a power of two"
    if c.chunks_per_block > 1 and c.chunks_per_block % GROUP:
        return f"chunks_per_block must be 1 or a multiple of {GROUP}"
    if c.shared_bytes(dim) > max_shared_bytes(arch):
        return f"it needs {c.shared_bytes(dim)} bytes of shared memory, of {max_shared_bytes(arch)}"
    return None


def _refusal_of_pairs(config: DecodeConfig, task: DecodeTask, arch: str) -> str | None:
    if not config.pairs:
        return None
    chunks = task.max_chunks(config)
    if max_cluster_size(arch) < 2:
        return f"{arch} has no clusters"
    if config.chunks_per_block != GROUP or not GROUP < chunks <= 2 * GROUP:
        return f"pairs are for two groups of chunks, and blocks of one; there are {chunks} chunks"
    if config.merges_later or task.rows > config.rows:
        return "pairs are for rows that one block of 16 has"
    return None


def variant(dtype: np.dtype, dim: int, config: DecodeConfig, paged: bool = False) -> Variant:
    """The kernel of `config`, for padded dims of `dim`, and caches with a block table if `paged`."""
    constants = {
        "kRows": config.rows,
        "kDim": dim,
        "kTileK": config.tile_k,
        "kStages": config.stages,
        "kMaxChunks": MAX_CHUNKS,
        "kGroup": GROUP,
        "kPaged": EITHER if config.paged_or_not else int(paged),
    }
    return Variant(
        "decode_attention",
        (("Element", dtypes.CPP_NAMES[dtype]),),
        tuple(constants.items()),
        config.threads,
        cluster_size=2 if config.pairs else 1,
        min_blocks=_BLOCKS_AT_ONCE if config.threads == NUM_THREADS else 1,
    )


def merge_variant(dtype: np.dtype, dim: int, config: DecodeConfig) -> Variant:
    """The kernel that adds up what that of `config` leaves, if it `merges_later`."""
    constants = {"kRows": config.rows, "kDim": dim, "kMaxChunks": MAX_CHUNKS, "kGroup": GROUP}
    types = (("Element", dtypes.CPP_NAMES[dtype]),)
    return Variant("decode_merge", types, tuple(constants.items()), NUM_THREADS)


def variants(arch: str) -> tuple[Variant, ...]:
    kinds = [
        (t, dim, tile)
        for t in (dtypes.float16, dtypes.bfloat16)
        for dim in _DIMS
        for tile in dict.fromkeys((*_tiles(arch, dim), *_busy_tiles(arch, dim)))
    ]
    return (
        *dict.fromkeys(variant(*kind, paged) for kind in kinds for paged in (False, True)),
        *(merge_variant(*kind) for kind in kinds if kind[-1].merges_later),
    )


def _traits(task: DecodeTask) -> tuple[dict[str, int], dict[str, Any]]:
    t = task
    kinds = {
        "heads": t.num_kv_heads, "rows": t.rows, "dtype": t.dtype.name, "dim": t.dim,
        "dim_v": t.dim_v,
    }  # fmt: skip
    return {"batch": t.batch, "keys": t.max_keys}, kinds


FAMILY = Family(
    "decode_attention",
    (DecodeConfig,),
    lambda task, device: configs(task, device.arch, device.multiprocessors),
    lambda config, task, device: refusal(config, task, device.arch),
    lambda task, config: variant(task.dtype, task.padded_dim, config),
    _traits,
)
