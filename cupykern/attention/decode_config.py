"""Configs of decode attention: the tile of a block, its pipeline, and the split of the keys."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..arguments import config_class
from ..expression.code import FormulaCode
from ..kernels import Variant
from ..runtime.choice import Family
from ..targets.limits import is_measured, max_cluster_size, max_shared_bytes, multiprocessors
from .decode_estimate import Blocks, estimate_us

DTYPES = (dtypes.float16, dtypes.bfloat16)
CACHE_DTYPES = (dtypes.float8_e4m3fn, dtypes.int8)  # besides q's dtype
LAYOUTS = ("hnd", "nhd")  # order of the caches' dims
MAX_QUERIES = 64
MAX_DIM = 256
MAX_KEYS = 2**30
_PADDED_DIMS = (64, 128, MAX_DIM)
MAX_CHUNKS = 256  # per sequence
CHUNKS_PER_GROUP = 8
NUM_THREADS = 128
_BLOCKS_PER_SM = 2  # resident at once
_GROUPS = (8, 16, 32)  # chunks per block, for blocks of whole groups


@config_class
class DecodeConfig:
    """A block computes `tile_m` rows of a KV head: tiles of `tile_n` keys, loaded in `stages`.

    chunk: keys per chunk, for sequences of up to 256 chunks; it doubles for each doubling of the
        length beyond that.
    min_chunk: keys per chunk of short sequences: chunk divided by a power of two.  It doubles, up
        to chunk, instead of a sequence having more than 8 chunks.
    chunks_per_block: adjacent chunks that a block computes in sequence: 1, 2 or 4, or a multiple of
        the 8 of a group.
    tile_m: 8, for up to 8 rows, halves products and registers.
    threads: threads per block.  256 halve the accumulators of a thread; for D above 64.
    cluster: 1; or 2: two blocks compute the two groups of a sequence and merge them through
        distributed shared memory.

    stages, chunks_per_block and cluster do not change any bit of a result.
    """

    tile_m: int
    tile_n: int
    stages: int
    chunk: int = 256
    chunks_per_block: int = 1
    threads: int = NUM_THREADS
    min_chunk: int = 128
    cluster: int = 1

    @property
    def has_merge_kernel(self) -> bool:
        """Whether decode_merge.cu merges the partial results (kHasMergeKernel)."""
        return self.tile_m > 16

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that are resident on an SM at once."""
        return _BLOCKS_PER_SM if self.threads == NUM_THREADS else 1

    def merges(self, num_chunks: int) -> int:
        """Merges of partial results through memory, 0 to 2, for a sequence of `num_chunks` chunks:
        one merges the chunks of each group, one the groups."""
        return self.stores_chunks(num_chunks) + (num_chunks > CHUNKS_PER_GROUP)

    def stores_chunks(self, num_chunks: int) -> bool:
        """Whether blocks store partial results of chunks, not of groups (decode/work_tile.cuh)."""
        return self.chunks_per_block < min(CHUNKS_PER_GROUP, num_chunks)

    def shared_bytes(
        self, dim: int, dtype: np.dtype = dtypes.float16, cache_dtype: np.dtype | None = None
    ) -> int:
        """sizeof(DecodeStorage) for 32-thread warps; 64-thread warps need less."""
        itemsize = (cache_dtype or dtype).itemsize
        warps, max_groups = self.threads // 32, MAX_CHUNKS // CHUNKS_PER_GROUP
        warp_owns_rows = self.tile_m >= 16 * warps
        key_warps = min(warps, self.tile_n // (16 if itemsize == 2 else 32))
        scales = 4 if itemsize == 1 else 0  # bytes per key
        size = self.stages * 2 * self.tile_n * (dim * itemsize + scales)
        if not self.has_merge_kernel:
            partial = 16 * self.threads  # bytes of MergeValues per partial result
            whole_groups = size // partial // CHUNKS_PER_GROUP * CHUNKS_PER_GROUP
            size = max(size, partial * min(max(whole_groups, CHUNKS_PER_GROUP), max_groups))
        size += self.tile_m * 2 * dim
        if not warp_owns_rows:
            rows_per_pass = 4 * self.threads // dim
            exchange = 8 * key_warps * self.tile_m + 4 * key_warps * rows_per_pass * (dim + 8)
            merge = 0 if self.has_merge_kernel else merge_states_bytes(dim, self.threads)
            size += max(exchange, merge)
        if self.cluster > 1:
            size += self.tile_m * (8 + 4 * dim)
        if cache_dtype and dtype == dtypes.bfloat16:
            size += 4 * self.tile_m  # QueryUnits
        return -(-(size + 80) // 16) * 16


def merge_states_bytes(dim: int, threads: int) -> int:
    """sizeof(MergeStates)."""
    groups_per_lane = -(-(MAX_CHUNKS // CHUNKS_PER_GROUP) // min(dim // 4, 32))
    return 8 * CHUNKS_PER_GROUP * groups_per_lane * threads


class DecodeTask(NamedTuple):
    """Everything that determines how a call is computed.

    rows: rows per KV head: its query heads times the queries.
    max_keys: the most keys of a sequence, within its window.
    general: scores have options (attention/decode/score.cuh).
    formulas: code of the score's and the mask's formulas.
    cache_dtype: an 8-bit dtype; None: dtype.
    """

    dtype: np.dtype
    batch: int
    num_kv_heads: int
    rows: int
    dim: int
    dim_v: int
    max_keys: int
    general: bool = False
    formulas: FormulaCode | None = None
    cache_dtype: np.dtype | None = None

    @property
    def cache_itemsize(self) -> int:
        return (self.cache_dtype or self.dtype).itemsize

    @property
    def padded_dim(self) -> int:
        """kDim: the padded size of D and Dv in shared memory."""
        return next(dim for dim in _PADDED_DIMS if dim >= max(self.dim, self.dim_v))

    def max_chunks(self, config: DecodeConfig) -> int:
        """The most chunks that a sequence of up to max_keys keys can have."""
        short = min(-(-self.max_keys // config.min_chunk), CHUNKS_PER_GROUP)
        return max(1, short, min(-(-self.max_keys // config.chunk), MAX_CHUNKS))

    def chunks_of_longest(self, config: DecodeConfig) -> tuple[int, int]:
        """(keys per chunk, chunks) of a sequence of max_keys (decode/work_tile.cuh: Chunks)."""
        size, keys = config.min_chunk, max(self.max_keys, 1)
        while size < config.chunk and keys > size * CHUNKS_PER_GROUP:
            size *= 2
        while keys > size * MAX_CHUNKS:
            size *= 2
        return size, -(-keys // size)

    def blocks(self, config: DecodeConfig, num_sms: int) -> Blocks:
        """The blocks if all sequences have max_keys keys, on a device with `num_sms` SMs."""
        size, count = self.chunks_of_longest(config)
        splits = -(-count // config.chunks_per_block)
        row_tiles = max(1, -(-self.rows // config.tile_m))  # row tiles share keys through L2
        keys = self.max_keys / splits
        return Blocks(
            number=self.batch * self.num_kv_heads * row_tiles * splits,
            resident=config.blocks_per_sm * num_sms,
            longest=min(config.chunks_per_block * size, self.max_keys),
            read=keys * self.cache_itemsize * (self.dim + self.dim_v) / row_tiles,
            merges=config.merges(count),
            dim=self.padded_dim,
            is_8bit=self.cache_itemsize == 1,
        )

    def num_work_tiles(self, config: DecodeConfig) -> int:
        """Number of blocks of the launch."""
        splits = -(-self.max_chunks(config) // config.chunks_per_block)
        return self.batch * self.num_kv_heads * splits * -(-self.rows // config.tile_m)


def _tiles_8bit(arch: str, dim: int) -> tuple[DecodeConfig, ...]:
    """Tiles for 8-bit caches, by rising tile_m: 16 rows, and 8 where that was measured.

    Twice the keys per tile, or twice the stages, keep as many bytes in flight as with 16 bits; a
    warp has at least 32 keys.
    """
    tile = _tile_of_16(arch, dim)
    if 2 * tile.tile_n <= tile.min_chunk:
        tile = replace(tile, tile_n=2 * tile.tile_n)
    else:
        tile = replace(tile, stages=2 * tile.stages)
    if not is_measured(arch):
        return (tile,)
    # 11% faster than 16 rows on 30 random shapes of e4m3 (H200); longer chunks are not faster.
    return replace(tile, tile_m=8), tile


def _tile_of_16(arch: str, dim: int) -> DecodeConfig:
    """The tile of 16 rows for 16-bit caches.  Two blocks fit on an SM of an H200."""
    if arch.startswith("gfx"):
        tile = DecodeConfig(16, 64, 2)
        if dim > 64:
            tile = replace(tile, tile_n=32, stages=2 if dim < MAX_DIM else 1, threads=256)
        return tile
    three_stages = max_shared_bytes(arch) >= 160 * 1024 and dim > 64
    tile = DecodeConfig(16, 8192 // dim, 3 if three_stages else 2)
    return replace(tile, chunk=512) if arch == "sm_90a" else tile  # measured on an H200


@cache
def _tiles(arch: str, dim: int) -> tuple[DecodeConfig, ...]:
    """Tiles for 16-bit caches, by rising tile_m.

    Architectures without measurements have only that of 16 rows.  Further rows are further blocks,
    which find the keys in L2; larger tiles would also exceed the registers of gfx11.
    """
    middle = _tile_of_16(arch, dim)
    if not is_measured(arch):
        return (middle,)
    if dim == MAX_DIM:
        return middle, replace(middle, tile_m=32, tile_n=32, stages=2, threads=256)
    if dim == 128:
        return middle, replace(middle, tile_m=64, tile_n=64, stages=2)
    few = replace(middle, tile_m=8, tile_n=64, stages=4)
    return few, middle, replace(middle, tile_m=64, tile_n=64, stages=3)


def _tiles_of(arch: str, dim: int, is_8bit: bool, general: bool) -> tuple[DecodeConfig, ...]:
    """Tiles by rising tile_m; for general scores up to 16 rows, because decode_merge.cu, which
    larger tiles need, does not support them."""
    tiles = (_tiles_8bit if is_8bit else _tiles)(arch, dim)
    return tuple(tile for tile in tiles if not (general and tile.has_merge_kernel))


def _full_sm_tiles(arch: str, dim: int, is_8bit: bool) -> tuple[DecodeConfig, ...]:
    """Tiles for few rows and more blocks than SMs: with clusters, which not all tasks allow, and
    without.

    They have two stages: the more blocks an SM has, the fewer loads each needs in flight (measured
    on an H200).
    """
    if arch != "sm_90a" or dim == MAX_DIM or (is_8bit and dim == 64):
        return ()
    tile = replace(_tiles_of(arch, dim, is_8bit, general=False)[0], stages=2)
    if is_8bit or dim == 64:
        return (tile,)
    return replace(tile, chunks_per_block=CHUNKS_PER_GROUP, cluster=2), tile


def configs(task: DecodeTask, arch: str, num_sms: int | None = None) -> tuple[DecodeConfig, ...]:
    """The configs of `task` on `arch`, the default first.  Their results agree bit for bit, so the
    choice can depend on the batch size.

    num_sms: SMs of the device; None: the usual number of `arch`.
    """
    is_8bit = task.cache_itemsize == 1
    by_rows = _tiles_of(arch, task.padded_dim, is_8bit, task.general)
    tile = next((tile for tile in by_rows if task.rows <= tile.tile_m), by_rows[-1])
    if task.rows > tile.tile_m and arch == "sm_90a":
        # Row tiles of a KV head read the same keys; smaller chunks give more blocks with different
        # keys.  Measured on an H200.
        tile = replace(tile, chunk=tile.min_chunk)
    sms = num_sms or multiprocessors(arch)
    plain = tile is by_rows[0] and not task.general
    full = _full_sm_tiles(arch, task.padded_dim, is_8bit) if plain else ()
    found: dict[DecodeConfig, None] = {}
    # Prefer blocks of whole groups, the fewest first, unless another config is 2% faster.
    tiles = [replace(tile, chunks_per_block=n) for n in (*_GROUPS, 1)]
    us = {config: estimate_us(task.blocks(config, sms)) for config in tiles}
    least = 1.02 * min(us.values())
    for config in sorted(tiles, key=lambda config: max(us[config], least)):
        n = config.chunks_per_block
        others = [
            replace(c, chunks_per_block=n) for c in full if c.cluster == 1 or n == CHUNKS_PER_GROUP
        ]
        others = [c for c in others if not _cluster_refusal(c, task, arch)]
        # Heads of 64: two blocks per SM with as many loads in flight as four with two stages.
        resident = sms * (config.blocks_per_sm if task.padded_dim == 64 else 1)
        if task.num_work_tiles(config) > resident:
            found |= dict.fromkeys((*others, config))
        else:
            found |= dict.fromkeys((config, *others))
    return tuple(found)


def choose_config(task: DecodeTask, arch: str, num_sms: int | None = None) -> DecodeConfig:
    """The default config for `task` on a device of `arch` with `num_sms` SMs."""
    return configs(task, arch, num_sms)[0]


def refusal(config: DecodeConfig, task: DecodeTask, arch: str) -> str | None:
    """Why `config` cannot compute `task` on `arch`; None if it can."""
    reason = (
        _size_refusal(config)
        or _tile_refusal(config, task, arch)
        or _chunk_refusal(config)
        or _memory_refusal(config, task, arch)
        or _cluster_refusal(config, task, arch)
        or _option_refusal(config, task)
    )
    return reason and f"{reason}; got {config}"


def _size_refusal(c: DecodeConfig) -> str | None:
    if min(c.tile_m, c.tile_n, c.stages, c.chunk, c.min_chunk, c.chunks_per_block) <= 0:
        return "all sizes must be positive"
    if c.cluster not in (1, 2):
        return "cluster must be 1 or 2"
    if c.tile_m not in (8, 16, 32, 64):
        return "tile_m must be 8, 16, 32 or 64"
    if c.tile_n not in (16, 32, 64, 128):
        return "tile_n must be 16, 32, 64 or 128"
    return None


def _tile_refusal(c: DecodeConfig, task: DecodeTask, arch: str) -> str | None:
    if c.tile_m == 8 and arch.startswith("gfx"):
        return f"{arch} has no tiles of 8 rows"
    twice = c.threads == 256 and task.padded_dim > 64 and c.tile_m < 64 and c.tile_n >= 32
    if c.threads != NUM_THREADS and not twice:
        return (
            f"threads must be {NUM_THREADS}, or 256 where D is above 64, tile_m below 64 and "
            "tile_n above 16"
        )
    return None


def _chunk_refusal(c: DecodeConfig) -> str | None:
    if c.chunk > MAX_KEYS:
        return f"chunk must be at most {MAX_KEYS}"
    factor = c.chunk // c.min_chunk
    if c.min_chunk % c.tile_n or factor * c.min_chunk != c.chunk or factor & (factor - 1):
        return "chunk must be min_chunk, a multiple of tile_n, times a power of two"
    if CHUNKS_PER_GROUP % c.chunks_per_block and c.chunks_per_block % CHUNKS_PER_GROUP:
        return f"chunks_per_block must be 1, 2, 4 or a multiple of {CHUNKS_PER_GROUP}"
    return None


def _memory_refusal(c: DecodeConfig, task: DecodeTask, arch: str) -> str | None:
    needed = c.shared_bytes(task.padded_dim, task.dtype, task.cache_dtype)
    most = max_shared_bytes(arch)
    return f"it needs {needed} bytes of shared memory, of {most}" if needed > most else None


def _option_refusal(c: DecodeConfig, task: DecodeTask) -> str | None:
    """Why the config's tile has no kernel of general scores or of 8-bit caches; None: it has."""
    if c.has_merge_kernel or c.cluster > 1:
        if task.general:
            return "with windows, caps, slopes or sinks tile_m must be 8 or 16, and cluster 1"
        if task.cache_dtype:
            return "for caches of 8 bits tile_m must be 8 or 16, and cluster 1"
    if task.cache_dtype and c.tile_n < 32:
        return "for caches of 8 bits tile_n must be at least 32"
    return None


def _cluster_refusal(config: DecodeConfig, task: DecodeTask, arch: str) -> str | None:
    if config.cluster == 1:
        return None
    chunks = task.max_chunks(config)
    if max_cluster_size(arch) < 2:
        return f"{arch} has no clusters"
    one_group = config.chunks_per_block == CHUNKS_PER_GROUP
    if not one_group or not CHUNKS_PER_GROUP < chunks <= 2 * CHUNKS_PER_GROUP:
        return f"a cluster needs two groups of chunks, one a block; there are {chunks} chunks"
    if config.has_merge_kernel or task.rows > config.tile_m:
        return "a cluster needs a single row tile of 16 rows"
    return None


def variant(
    dtype: np.dtype,
    dim: int,
    config: DecodeConfig,
    general: bool = False,
    formulas: FormulaCode | None = None,
    cache_dtype: np.dtype | None = None,
) -> Variant:
    """The variant of `config` for heads padded to `dim`, for contiguous and paged caches.

    general: scores have options; required by formulas.  cache_dtype: an 8-bit dtype, or None.
    """
    constants = {
        "kTileM": config.tile_m,
        "kDim": dim,
        "kTileN": config.tile_n,
        "kStages": config.stages,
        "kMaxChunks": MAX_CHUNKS,
        "kChunksPerGroup": CHUNKS_PER_GROUP,
    }
    kernel = "decode_attention_general" if general else "decode_attention"
    if cache_dtype:
        kernel = "decode_attention_8bit"
        constants["kGeneral"] = bool(general)
    plain = Variant(
        kernel,
        _types(dtype, cache_dtype),
        tuple(constants.items()),
        config.threads,
        cluster_size=config.cluster,
        min_blocks=config.blocks_per_sm,
        # E4M3 with 256 dims spills up to 24 bytes on sm_80; with 128 dims and a formula 8 (32 on
        # sm_90a).
        tuned=not (cache_dtype and (dim == 256 or formulas)),
    )
    if formulas is None:
        return plain
    kernel = "decode_attention_8bit_formula" if cache_dtype else "decode_attention_formula"
    return formulas.variant(plain, kernel)


def _types(dtype: np.dtype, cache_dtype: np.dtype | None = None) -> tuple[tuple[str, str], ...]:
    names = dtypes.CPP_NAMES
    return (("Element", names[dtype]), ("CacheElement", names[cache_dtype or dtype]))


def merge_variant(dtype: np.dtype, dim: int, config: DecodeConfig) -> Variant:
    """The variant that merges the partial results of `config`, if it `has_merge_kernel`."""
    constants = {
        "kTileM": config.tile_m,
        "kDim": dim,
        "kMaxChunks": MAX_CHUNKS,
        "kChunksPerGroup": CHUNKS_PER_GROUP,
    }
    types = (("Element", dtypes.CPP_NAMES[dtype]),)
    return Variant("decode_merge", types, tuple(constants.items()), NUM_THREADS)


def variants(arch: str) -> tuple[Variant, ...]:
    """The variants of all tiles; with options of an 8-bit cache, each dtype in one pair."""
    kinds = [
        (t, dim, tile)
        for t in (dtypes.float16, dtypes.bfloat16)
        for dim in _PADDED_DIMS
        for tile in dict.fromkeys((*_tiles(arch, dim), *_full_sm_tiles(arch, dim, False)))
    ]
    pairs = [(t, dim) for t in DTYPES for dim in _PADDED_DIMS]
    general = [
        variant(t, dim, tile, general=True)
        for t, dim in pairs
        for tile in _tiles_of(arch, dim, is_8bit=False, general=True)
    ]
    of_8bit = [
        variant(t, dim, tile, options, cache_dtype=cache_dtype)
        for t, dim in pairs
        for options in (False, True)
        for tile in dict.fromkeys(
            (*_tiles_8bit(arch, dim), *(() if options else _full_sm_tiles(arch, dim, True)))
        )
        for cache_dtype in CACHE_DTYPES
        if not options or DTYPES.index(t) == CACHE_DTYPES.index(cache_dtype)
    ]
    found = (
        *(variant(*kind) for kind in kinds),
        *general,
        *of_8bit,
        *(merge_variant(*kind) for kind in kinds if kind[-1].has_merge_kernel),
    )
    return untuned_on_rdna(found, arch)


def untuned_on_rdna(found: tuple[Variant, ...], arch: str) -> tuple[Variant, ...]:
    """`found`, marked as not tuned on RDNA: nothing is measured there, and clang spills registers
    of some variants."""
    rdna = arch.startswith(("gfx11", "gfx12"))
    return tuple(replace(v, tuned=False) for v in found) if rdna else found


def _traits(task: DecodeTask) -> tuple[dict[str, int], dict[str, Any]]:
    t = task
    kinds = {
        "heads": t.num_kv_heads, "rows": t.rows, "dtype": t.dtype.name, "dim": t.dim,
        "dim_v": t.dim_v,
    }  # fmt: skip
    if t.general:
        kinds["general"] = True
    if t.cache_dtype:
        kinds["cache"] = t.cache_dtype.name
    if t.formulas:
        kinds["formulas"] = str(t.formulas)
    return {"batch": t.batch, "keys": t.max_keys}, kinds


FAMILY = Family(
    "decode_attention",
    (DecodeConfig,),
    lambda task, device: configs(task, device.arch, device.multiprocessors),
    lambda config, task, device: refusal(config, task, device.arch),
    lambda task, config: variant(
        *(task.dtype, task.padded_dim, config),
        general=task.general,
        formulas=task.formulas,
        cache_dtype=task.cache_dtype,
    ),
    _traits,
)
