"""Configs, variants and launches of attention on Hopper.

The Python half of kernels_cu/attention_hopper.cu.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes, tuned
from ..arguments import config_class
from ..expression.code import FormulaCode
from ..kernels import Variant
from ..runtime import workspace
from ..targets import Kernel, Target
from ..targets.limits import max_shared_bytes
from ..targets.map_plan import MapPlan, encoded_maps
from ..targets.repeated import Repeated
from ..typing import Namespace
from .attention_task import AttentionTask, MaskType, SequencesType


class HeadDims(NamedTuple):
    """Head sizes of q and k, and of v and out."""

    qk: int
    v: int


# Head sizes are padded to the first pair that holds both.  v is padded to whole boxes of 64 dims:
# wgmma with an MN-major B that ends within a swizzled box is untested on a GPU.
HEAD_DIMS = (
    *(HeadDims(64, 64), *(HeadDims(size, 128) for size in (80, 96, 112, 128))),
    *(HeadDims(192, 128), HeadDims(256, 256)),
)
_LINE_ELEMENTS = 64  # elements of a 128-byte row of a swizzled box
_STORED_ROWS = 16  # rows that a warp stores
_C = tuned.constants("sm_90a", "attention")
_SHORTER = 0.97  # small tiles must take less than this share of the large tiles' duration
_MAX_SCHEDULED = 1 << 14  # tiles; with more, every block has many
MOST_SEQUENCES = 384  # attention/scheduler_sm90.cuh: kMaxSequences
_STEP_BYTES, _TILES_BYTES = 16, 4 * 56  # KeyTileInfo, kTiles QueryTile
_SEQUENCES_BYTES = 16 + 6 * MOST_SEQUENCES  # SequenceOrder
_RAGGED = 1 << 30  # attention/storage_sm90.cuh: kRagged
_RAGGED_BYTES = 1 << 35  # _RAGGED of them are 0 modulo 2**64
_MANY = 0x7FFF0000  # more than any coordinate
_PAGE_STEP = 16  # smallest number of keys in a box; attention/kv_sm90.cuh


class Kind(NamedTuple):
    """The types that distinguish variants.

    general: scores have options (GeneralScore).  formulas: code of the score's and the mask's
        expressions; such variants are general.
    """

    mask: MaskType = MaskType.NONE
    sequences: SequencesType = SequencesType.BATCHED
    general: bool = False
    formulas: FormulaCode | None = None

    @property
    def varlen(self) -> bool:
        return self.sequences is not SequencesType.BATCHED

    @property
    def paged(self) -> bool:
        return self.sequences is SequencesType.PAGED

    @property
    def counts_tiles(self) -> bool:
        """Whether blocks take tiles of queries by a counter."""
        return self.varlen or self.mask.empties_tiles


class Queries(NamedTuple):
    """The sizes that determine in how many waves tiles of queries run on `num_sms` SMs.

    heads: query heads of all sequences.  sq, sk: queries and keys per head.
    offset: causal query i keeps keys j <= i + offset; None: not causal.
    """

    num_sms: int
    heads: int
    sq: int
    sk: int
    offset: int | None = None


# Compiled ahead.  General variants with masks, and most variants with head sizes between powers of
# two, are compiled when they are called.
KINDS = (
    *(Kind(mask) for mask in MaskType if mask is not MaskType.FORMULA),
    Kind(sequences=SequencesType.VARLEN),
    *(Kind(general=True), Kind(sequences=SequencesType.VARLEN, general=True)),
    *(Kind(sequences=SequencesType.PAGED, general=general) for general in (False, True)),
)
VARIANTS = (
    *((HeadDims(size, size), kind) for size in (64, 128, 256) for kind in KINDS),
    *((dims, Kind()) for dims in (HeadDims(96, 128), HeadDims(192, 128))),
)


@config_class
class AttentionHopperConfig:
    """A block computes tile_m queries against tiles of tile_n keys, `stages` of which are in shared
    memory.  Each consumer warpgroup has 64 queries; one producer warpgroup loads."""

    tile_m: int
    tile_n: int
    stages: int = 2

    def query_tiles(self, dims: HeadDims) -> int:
        """Tiles of queries in shared memory; with two, the next one is prefetched."""
        return 2 if self._shared_bytes(dims, 2) <= max_shared_bytes("sm_90a") else 1

    def shared_bytes(self, dims: HeadDims) -> int:
        """Dynamic shared memory (attention/storage_sm90.cuh: SharedStorage)."""
        return self._shared_bytes(dims, self.query_tiles(dims))

    def _shared_bytes(self, dims: HeadDims, query_tiles: int) -> int:
        consumers = self.tile_m // 64
        qk, v = (2 * _LINE_ELEMENTS * -(-dim // _LINE_ELEMENTS) for dim in dims)  # bytes of a row
        tiles = query_tiles * self.tile_m * qk + self.stages * self.tile_n * (qk + v)
        steps = _STEP_BYTES * self.stages * consumers
        barriers = 8 * (2 * query_tiles + 4 * self.stages)
        return tiles + steps + barriers + _TILES_BYTES + _SEQUENCES_BYTES

    @property
    def num_threads(self) -> int:
        return 2 * self.tile_m + 128


def padded(head_dim: int, head_dim_v: int) -> HeadDims:
    """The head sizes after padding, in shared memory and in the accumulators."""
    return next(dims for dims in HEAD_DIMS if head_dim <= dims.qk and head_dim_v <= dims.v)


def refusal(config: AttentionHopperConfig, dims: HeadDims, arch: str) -> str | None:
    """Why `config` does not fit heads that are padded to `dims`; None if it does."""
    c = config
    if arch not in ("sm_90a", "host"):
        return f"it needs Hopper's TMA and wgmma, not {arch}"
    if c.tile_m not in (128, 192):
        return f"tile_m must be 128 or 192; got {c.tile_m}"
    if c.tile_n % 16 or not 16 <= c.tile_n <= 256:
        return f"tile_n must be a multiple of 16 up to 256; got {c.tile_n}"
    if not 2 <= c.stages <= 4:
        return f"stages must be 2 to 4; got {c.stages}"
    # Registers of a thread: outputs, scores, 16-bit probabilities.
    registers = dims.v // 2 + c.tile_n // 2 + c.tile_n // 4
    limit = 200 if c.tile_m == 128 else 128
    if registers > limit:
        return f"a thread's {registers} accumulators are more than {limit}"
    needed, limit = c.shared_bytes(dims), max_shared_bytes(arch)
    if needed > limit:
        return f"{needed} bytes of shared memory are more than the {limit} of {arch}"
    return None


def configs(
    dims: HeadDims, kind: Kind, queries: Queries | None = None
) -> tuple[AttentionHopperConfig, ...]:
    """The configs for `dims` and `kind`, the default first; `queries` can change the order.

    With a block mask, a tile of keys never spans two blocks.
    """
    large = dims.v == 256
    if kind.mask is MaskType.ARRAY:
        return (AttentionHopperConfig(128, 32, 3) if large else AttentionHopperConfig(128, 64),)
    if kind.mask is MaskType.BLOCKS:
        return (AttentionHopperConfig(128, 32 if large else 64, 3),)
    if kind.mask is MaskType.UNIFORM_BLOCKS:
        return (AttentionHopperConfig(128, 64 if large else 128),)
    if large:  # a box of keys belongs to one page
        return (AttentionHopperConfig(128, 64 if kind.paged else 80),)
    if dims.qk == 64 and not (kind.varlen or kind.general):
        large_tiles, small_tiles = (
            AttentionHopperConfig(192, 128, 3),
            AttentionHopperConfig(128, 128, 3),
        )
        if queries:
            of_small, of_large = (_duration(c, queries) for c in (small_tiles, large_tiles))
            if of_small < _SHORTER * of_large:
                return small_tiles, large_tiles
        return large_tiles, small_tiles
    return (AttentionHopperConfig(128, 128),)


def _duration(config: AttentionHopperConfig, queries: Queries) -> float:
    """Estimated duration of the launch, in units of one row of a 192-row tile against 128 keys.

    Tiles of equal length run in waves.  Causal tiles run longest first, so the duration is that of
    the longest tile or the average load per SM, whichever is longer.
    """
    q, rows = queries, config.tile_m * (_C["small_tile"] if config.tile_m < 192 else 1.0)
    share = config.tile_n / 128
    last = np.minimum(np.arange(config.tile_m, q.sq + config.tile_m, config.tile_m), q.sq)
    if q.offset is None:
        rounds = -(-q.heads * len(last) // q.num_sms)
        return rounds * rows * (-(-q.sk // config.tile_n) * share + _C["tile_cost"])
    keys = np.clip(last + q.offset, 0, q.sk)
    tiles = rows * (-(-keys // config.tile_n) * share + _C["tile_cost"])
    return max(float(tiles.max(initial=0.0)), float(tiles.sum()) * q.heads / q.num_sms)


def kind_of(task: AttentionTask) -> Kind:
    queries, keys = (2**log2 for log2 in task.mask.blocks[:2])
    # General variants scale scores first without a mask's help.
    mask = MaskType.of(task.mask.kind, None if task.general else task.scale, (queries, keys))
    sequences = SequencesType.BATCHED
    if task.totals is not None or task.lengths:
        sequences = SequencesType.PAGED if task.pages else SequencesType.VARLEN
    if task.formulas is None:
        return Kind(mask, sequences, task.general)
    mask = MaskType.FORMULA if task.formulas.mask else mask
    return Kind(mask, sequences, True, task.formulas.code)


def unfit(task: AttentionTask, config: AttentionHopperConfig | None = None) -> str | None:
    """Why TMA and this kernel, or its config `config`, cannot compute `task`; None if they can."""
    kind = kind_of(task)
    of_config = config and _unfit_config(config, kind)
    return of_config or _unfit_kernel(task, kind) or _unfit_rows(task) or _unfit_strides(task, kind)


def _unfit_config(config: AttentionHopperConfig, kind: Kind) -> str | None:
    if kind.counts_tiles and config.tile_m != 128:
        return "with masks of blocks and varlen sequences tile_m is 128"
    block_keys = 128 if kind.mask is MaskType.UNIFORM_BLOCKS else 64
    if kind.mask.has_blocks and block_keys % config.tile_n:
        return "a tile of keys lies in one block of a mask"
    return None


def _unfit_kernel(task: AttentionTask, kind: Kind) -> str | None:
    """Why its dtypes or options exclude the kernel for Hopper; None: they do not."""
    if task.codes is not None:
        return "caches of 8 bits are the portable kernel's"
    if task.naive or task.half_scores:
        return "FP16 accumulators are the portable kernel's"
    if task.prescale and not kind.general and (kind.varlen or kind.mask.has_blocks):
        return "scales below 2^-64 are the portable kernel's beside varlen sequences or block masks"
    if kind.varlen and task.batch > MOST_SEQUENCES:
        return f"more than {MOST_SEQUENCES} varlen sequences are the portable kernel's"
    return None


def _unfit_rows(task: AttentionTask) -> str | None:
    """Why no tensor map covers the arrays, or addresses pages and sequences by rows; None: one
    does."""
    if 0 in (n for size in _sizes(task) for n in size):
        return "TMA has no arrays without elements"
    if task.pages and task.pages.size % _PAGE_STEP:
        return f"pages are of a multiple of {_PAGE_STEP} keys"
    if task.pages and page_rows(task) is None:
        return "pages are whole rows apart, and there are fewer than 2**31 rows"
    if task.lengths and rows_of_elements(task) is None:
        return "padded batches are whole rows apart, the same number in k and v, and in q and out"
    return None


def _unfit_strides(task: AttentionTask, kind: Kind) -> str | None:
    strides = [s for operand in (task.q, task.k, task.v, task.out) for s in operand]
    steps = zip([n for size in _sizes(task) for n in size[:3]], strides, strict=True)
    if any(step <= 0 for size, step in steps if size > 1):
        return "TMA walks positive strides only"
    if max(strides) * task.dtype.itemsize >= (_RAGGED_BYTES if kind.varlen else 2**40):
        return "TMA's strides are below 2**40 bytes, those of varlen sequences below 2**35"
    return None


def variant(dtype: np.dtype, dims: HeadDims, kind: Kind, config: AttentionHopperConfig) -> Variant:
    c, stages = config, f"attention::Stages<{config.stages}, {config.query_tiles(dims)}>"
    of_values = f", {dims.v}" if dims.v != dims.qk else ""
    score = ", GeneralScore" if kind.general else ""
    includes: tuple[str, ...] = ("attention/policies_sm90.cuh",)
    if kind.formulas is not None:
        score, includes = ", FormulaScore<Formulas>", (*includes, "attention/formula.cuh")
    traits = (
        f"attention::TraitsSm90<{dtypes.CPP_NAMES[dtype]}, "
        f"attention::Tile<{dims.qk}, {c.tile_m}, {c.tile_n}{of_values}>, {stages}, "
        f"attention::{kind.mask.value}, attention::{kind.sequences.value}{score}>"
    )
    name = "attention_hopper_paged" if kind.paged else "attention_hopper"
    plain = Variant(
        "attention_hopper_general" if kind.general and not kind.paged else name,
        (("Traits", traits),),
        (),
        c.num_threads,
        includes=includes,
    )
    return kind.formulas.variant(plain, f"{name}_formula") if kind.formulas else plain


def rows_of_elements(task: AttentionTask) -> tuple[int, int] | None:
    """Batch strides of a padded batch in rows: (of q and out, of k and v).

    None if a stride is not a multiple of the row stride, or if they differ within a pair.
    """
    if task.batch == 1:
        return 0, 0
    rows = []
    for length, *operands in ((task.sq, task.q, task.out), (task.sk, task.k, task.v)):
        apart = {divmod(batch, row) if row > 0 else (0, 1) for batch, _, row in operands}
        (count, rest), *others = apart
        if length == 1 or rest or others:
            return None
        rows.append(count)
    return rows[0], rows[1]


def page_rows(task: AttentionTask) -> tuple[int, int] | None:
    """Page strides of k and of v in rows; None if they are not multiples of the row strides, or
    too large."""
    rows = []
    for page, _, row in (task.k, task.v):
        count, rest = divmod(page, row) if row > 0 else (0, page)
        if rest or page < 0 or (task.pages and count * task.pages.number > _MANY):
            return None
        rows.append(count)
    return rows[0], rows[1]


def key_rows(task: AttentionTask, config: AttentionHopperConfig) -> int:
    """Rows of a TMA box of keys: a tile; with pages the most that always fit one page."""
    return math.gcd(config.tile_n, task.pages.size) if task.pages else config.tile_n


def _sizes(t: AttentionTask) -> tuple[tuple[int, int, int, int], ...]:
    """(batch, heads, rows, dim) of q, k, v and out."""
    batch, sq, sk = (1, *t.totals) if t.totals else (t.batch, t.sq, t.sk)
    batch = 1 if t.lengths else batch  # a padded batch is addressed by rows, like varlen sequences
    sk = t.pages.number * t.pages.size if t.pages else sk
    return (
        (batch, t.heads, sq, t.head_dim),
        (batch, t.kv_heads, sk, t.head_dim),
        (batch, t.kv_heads, sk, t.head_dim_v),
        (batch, t.heads, sq, t.head_dim_v),
    )


def maps(task: AttentionTask, config: AttentionHopperConfig) -> tuple[MapPlan, ...]:
    """The tensor maps of q, k, v and out."""
    keys = key_rows(task, config)
    rows = config.tile_m, keys, keys, _STORED_ROWS
    make = _ragged_map if kind_of(task).varlen else _map
    return tuple(
        make(task.dtype, shape, tuple(s * task.dtype.itemsize for s in steps), n)
        for shape, steps, n in zip(
            _sizes(task), (task.q, task.k, task.v, task.out), rows, strict=True
        )
    )


def _map(dtype: np.dtype, shape: tuple[int, ...], steps: tuple[int, ...], rows: int) -> MapPlan:
    return MapPlan(dtype, shape, (*steps, dtype.itemsize), (1, 1, rows, _LINE_ELEMENTS))


def _ragged_map(
    dtype: np.dtype, shape: tuple[int, ...], steps: tuple[int, ...], rows: int
) -> MapPlan:
    """A tensor map of varlen sequences.  Its first two dims shift the rows of one sequence so that
    those past its end are out of bounds (attention/storage_sm90.cuh: kRagged)."""
    _, heads, total, dim = shape
    _, head, row = steps
    row = row if total > 1 else 16
    return MapPlan(
        dtype, (_MANY, _MANY, heads, _RAGGED, dim),
        (_RAGGED_BYTES - row, row, head, row, dtype.itemsize), (1, 1, 1, rows, _LINE_ELEMENTS),
    )  # fmt: skip


def is_scheduled(task: AttentionTask, num_tiles: int, blocks: int) -> bool:
    """Whether `schedule` computes an order for the task's tiles."""
    kind = kind_of(task)
    bounded = task.options[:2] != (-1, -1) if task.general else task.offset is not None
    plain = bounded and kind.mask is MaskType.NONE and not kind.varlen
    return plain and blocks < num_tiles <= _MAX_SCHEDULED


def schedule(task: AttentionTask, config: AttentionHopperConfig, order: Any, blocks: int) -> Any:
    """The tiles of queries of each block, int32 (rounds, blocks), -1 for none.

    None: block i computes every `blocks`-th tile.  Later causal tiles take longer.  So each tile,
    in the order of attention/work_tile.cuh, goes to the block with the smallest load so far.
    order: the tiles' indices along sq, in that order.
    """
    if not is_scheduled(task, len(order), blocks):
        return None
    rows = np.minimum((order + 1) * config.tile_m, task.sq) + task.offset
    left, right = task.options[:2] if task.general else (-1, 0)
    ends = np.clip(rows + right, 0, task.sk) if right >= 0 else task.sk
    tiles_of_keys = -(-ends // config.tile_n)
    if left >= 0:
        first = np.maximum(order * config.tile_m + task.offset - left, 0) // config.tile_n
        tiles_of_keys = np.maximum(tiles_of_keys - first, 0)
    costs = tiles_of_keys + np.zeros(len(order)) + _C["tile_cost"]
    heap = [(0.0, block) for block in range(blocks)]
    tiles: list[list[int]] = [[] for _ in range(blocks)]
    for tile, cost in enumerate(costs.tolist()):
        load, block = heap[0]
        tiles[block].append(tile)
        heapq.heapreplace(heap, (load + cost, block))
    made = np.full((max(map(len, tiles)) + 1, blocks), -1, np.int32)
    for block, own in enumerate(tiles):
        made[: len(own), block] = own
    return made


class AttentionHopperPlan(NamedTuple):
    """The launch of a task."""

    target: Target
    num_counters: int  # atomic counters from which blocks take tiles
    repeated: Repeated

    def launch(self, xp: Namespace, arrays: tuple[Any, ...], places: Any = None) -> None:
        """See AttentionPlan.launch."""
        if self.num_counters:
            counter = workspace.take_counters(self.target, self.num_counters)
            arrays = (*arrays, counter)
            places = places and (*places, counter.data.ptr)
        self.repeated.launch(arrays, places)

    def launcher(
        self, xp: Namespace, arrays: Callable[..., tuple[Any, ...]]
    ) -> Callable[..., None]:
        """A function launch(places, *given) that launches the kernel on arrays(*given).

        places: a key that determines the arrays' addresses; `arrays` is called only for new keys.
        """
        if not self.num_counters:
            return self.repeated.of(arrays).launch_at

        def with_counter(counter: Any, *given: Any) -> tuple[Any, ...]:
            return (*arrays(*given), counter)

        target, launch_at = self.target, self.repeated.of(with_counter).launch_at

        def launch(places: tuple[Any, ...], *given: Any) -> None:
            counter = workspace.take_counters(target, self.num_counters)
            launch_at((*places, counter.data.ptr), counter, *given)

        return launch


def hopper_plan(
    target: Target,
    task: AttentionTask,
    config: AttentionHopperConfig,
    kernel: Kernel,
    sizes: tuple[int, int],
    planned: Any,
    params: tuple[Any, ...],
) -> AttentionHopperPlan:
    """The plan of attention_hopper.cu.

    sizes: (blocks, bytes of shared memory per block).  planned: the result of `schedule`, in the
    target's memory.  params: the kernel's structs.
    """
    plans = maps(task, config)

    def arguments(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        own, counter = (arrays[:-1], arrays[-1]) if num_counters else (arrays, None)
        if task.pages:
            return (*encoded_maps(target, plans, arrays), *own[4:], counter, *params)
        given, options = (*own[4:14], *[None] * (14 - len(own))), own[14:]
        return (*encoded_maps(target, plans, arrays), *given, planned, counter, *options, *params)

    num_counters = int(kind_of(task).counts_tiles)
    return AttentionHopperPlan(target, num_counters, Repeated(kernel, *sizes, arguments))
