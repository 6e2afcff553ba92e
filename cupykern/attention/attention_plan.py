"""Configs, variants and plans of attention.

The Python half of kernels_cu/attention.cu, attention_paged.cu and attention_naive.cu, and of their
general variants.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..arguments import config_class
from ..arrays import maker
from ..expression.code import FormulaCode
from ..kernels import Variant
from ..param_structs import fast_divmod, zeros
from ..runtime import plans
from ..runtime.choice import Family
from ..runtime.jit import get_kernel
from ..targets import Device, Kernel, Target
from ..targets.limits import is_measured, max_shared_bytes
from ..targets.repeated import Repeated
from ..typing import Namespace
from . import attention_hopper
from .attention_hopper import AttentionHopperConfig, AttentionHopperPlan, Queries
from .attention_task import BLOCK_MASK, HEAD_DIMS, AttentionTask, Scores, padded_head_dim
from .cache_scales import scale_params
from .decode_config import CACHE_DTYPES

DTYPES = (dtypes.float16, dtypes.bfloat16)
_LOG2_E = math.log2(math.e)
L2_BYTES = 24 * 2**20  # bytes of keys and values that fit in half of an H200's L2 cache
_NAIVE_THREADS = 256
_MANY = 2**31  # queries
_HOPPER = ("sm_90a", "host")  # architectures with TMA and wgmma


@config_class
class AttentionConfig:
    """A block of num_warps warps (of 32 lanes) computes tile_m queries against tiles of tile_n
    keys."""

    tile_m: int
    tile_n: int
    num_warps: int

    def shared_bytes(self, head_dim: int, scaled: bool = False) -> int:
        """Dynamic shared memory (attention/products.cuh: AttentionStorage; scaled:
        attention/kv_8bit.cuh: ScaledStorage)."""
        scales = 8 * self.tile_n if scaled else 0
        return 2 * head_dim * (self.tile_m + 2 * self.tile_n) + 4 * self.tile_m + scales


def refusal(
    config: AttentionConfig | AttentionHopperConfig,
    dims: tuple[int, int],
    scores: Scores,
    arch: str,
    scaled: bool = False,
) -> str | None:
    """Why `config` does not fit head sizes `dims` (of q and k, of v) and `scores` on `arch`; None
    if it does.  scaled: caches are 8-bit."""
    if isinstance(config, AttentionHopperConfig):
        return attention_hopper.refusal(config, attention_hopper.padded(*dims), arch)
    c = config
    if min(c.tile_m, c.tile_n, c.num_warps) < 1:
        return "tiles and num_warps must be positive"
    if c.num_warps > 32:
        return f"{c.num_warps} warps are more than 32"
    if c.tile_m not in (16, 32, 64, 128) or c.tile_n not in (16, 32, 64, 128):
        return (
            "tile_m must be 16 to 128 and tile_n 16 to 128, powers of two; "
            f"got {c.tile_m}, {c.tile_n}"
        )
    if scores is not Scores.PLAIN and c.tile_n > 64:
        return f"tile_n must divide a mask's block of 64 keys; got {c.tile_n}"
    if c.tile_m % (16 * c.num_warps) or c.tile_m // c.num_warps > 32 or c.num_warps % 2:
        return (
            f"an even number of warps must share {c.tile_m} queries, 16 or 32 each; "
            f"got {c.num_warps}"
        )
    needed, limit = c.shared_bytes(padded_head_dim(*dims), scaled), max_shared_bytes(arch)
    if needed > limit:
        return f"{needed} bytes of shared memory are more than the {limit} of {arch}"
    return None


def choose_config(
    head_dim: int, scores: Scores, arch: str, scaled: bool = False
) -> AttentionConfig:
    """The portable kernel's config for heads padded to head_dim.  scaled: caches are 8-bit.

    Warps of 32 queries read keys and values from shared memory half as often as warps of 16.  If
    registers or shared memory do not suffice, tiles are smaller.
    """
    less, least = AttentionConfig(64, 32, 4), AttentionConfig(64, 16, 4)
    plain = scores is Scores.PLAIN
    if arch == "host":
        return less
    if arch.startswith("gfx"):
        if head_dim == 64:
            return AttentionConfig(128, 64, 4) if arch.startswith("gfx9") and plain else less
        return less if head_dim == 128 and arch.startswith("gfx9") else least
    if scores is Scores.GENERAL and head_dim == 256:
        return least if scaled and arch != "sm_90a" else less
    if not plain and (head_dim == 256 or arch != "sm_90a"):
        return less
    if not plain or head_dim == 256 or arch == "sm_90a":  # Hopper's kernel computes large tasks
        return AttentionConfig(64, 64, 4)
    return AttentionConfig(128, 64 if head_dim == 64 else 32, 4)


def configs(
    dims: tuple[int, int],
    scores: Scores,
    arch: str,
    queries: Queries | None = None,
    hopper: attention_hopper.Kind | None = None,
    scaled: bool = False,
) -> tuple[AttentionConfig | AttentionHopperConfig, ...]:
    """The configs for head sizes `dims` (of q and k, of v), the default first.

    queries: None: many.  hopper: the kind of attention_hopper.cu's variant; None: TMA or that
    kernel cannot compute it.  scaled: caches are 8-bit.
    """
    sq = queries.sq if queries else _MANY
    large = choose_config(padded_head_dim(*dims), scores, arch, scaled)
    small = AttentionConfig(64, 64, 4)
    found: tuple[AttentionConfig, ...]
    if arch == "host":
        found = large, AttentionConfig(128, 32, 4)
    elif scores is not Scores.PLAIN or not is_measured(arch):
        found = (large,)
    else:
        found = (small, large) if sq <= small.tile_m else (large, small)
    fast: tuple[AttentionHopperConfig, ...] = ()
    if hopper and arch in _HOPPER:
        fast = attention_hopper.configs(attention_hopper.padded(*dims), hopper, queries)
    first = arch != "host" and sq > small.tile_m
    return tuple(dict.fromkeys((*fast, *found) if first else (*found, *fast)))


def flash_variant(
    dtype: np.dtype,
    dims: tuple[int, int],
    scores: Scores,
    half_scores: bool,
    config: AttentionConfig | AttentionHopperConfig,
    hopper: attention_hopper.Kind | None = None,
    formulas: FormulaCode | None = None,
    paged: bool = False,
    codes: np.dtype | None = None,
) -> Variant:
    """The variant of the "flash" algorithm.

    hopper: the kind of attention_hopper.cu's variant; an AttentionHopperConfig without it raises
    TypeError.  formulas, codes (dtype of 8-bit pages): only with general scores.
    """
    if isinstance(config, AttentionHopperConfig):
        if hopper is None:
            raise TypeError("an AttentionHopperConfig needs a kind of attention_hopper.cu")
        return attention_hopper.variant(dtype, attention_hopper.padded(*dims), hopper, config)
    general = scores is Scores.GENERAL
    name = "attention_general" if general else "attention"
    types: tuple[tuple[str, str], ...] = (("Element", dtypes.CPP_NAMES[dtype]),)
    with_formula = "attention_formula"
    if paged:
        name, with_formula = "attention_paged", "attention_paged_formula"
    if codes is not None:
        types += (("CacheElement", dtypes.CPP_NAMES[codes]),)
        name, with_formula = "attention_paged_8bit", "attention_paged_8bit_formula"
    variant = Variant(
        name,
        types,
        (
            ("kHeadDim", padded_head_dim(*dims)),
            ("kTileM", config.tile_m),
            ("kTileN", config.tile_n),
            ("kMasked", scores is not Scores.PLAIN),
            ("kHalfScores", half_scores),
            ("kGeneral", general),
        ),
        32 * config.num_warps,
    )
    return formulas.variant(variant, with_formula) if formulas else variant


def naive_variant(
    dtype: np.dtype, general: bool = False, formulas: FormulaCode | None = None
) -> Variant:
    variant = Variant(
        "attention_naive_general" if general else "attention_naive",
        (("Element", dtypes.CPP_NAMES[dtype]),), (("kGeneral", general),), _NAIVE_THREADS,
    )  # fmt: skip
    return formulas.variant(variant, "attention_naive_formula") if formulas else variant


def variants(arch: str) -> tuple[Variant, ...]:
    """All variants that are compiled ahead on `arch`.  Missing are general ones with FP16 scores;
    on Hopper also general naive ones, general ones with masks, and most head sizes between powers
    of two."""
    flash = [
        flash_variant(dtype, (head_dim, head_dim), scores, half_scores, config)
        for dtype in DTYPES
        for head_dim in HEAD_DIMS
        for scores in Scores
        for half_scores in ((False, True) if has_half_scores(dtype, arch) else (False,))
        if scores is Scores.MASKED or not half_scores
        for config in configs((head_dim, head_dim), scores, arch)
    ]
    paged = [
        flash_variant(dtype, (head_dim, head_dim), scores, False, config, paged=True, codes=codes)
        for dtype in DTYPES
        for head_dim in HEAD_DIMS
        for scores, codes in (
            (Scores.PLAIN, None),
            *((Scores.GENERAL, x) for x in (None, *CACHE_DTYPES)),
        )
        for config in configs((head_dim, head_dim), Scores.GENERAL, arch, scaled=codes is not None)
    ]
    fast = [
        attention_hopper.variant(dtype, dims, kind, config)
        for dtype in DTYPES
        for dims, kind in (attention_hopper.VARIANTS if arch in _HOPPER else ())
        for config in attention_hopper.configs(dims, kind)
    ]
    naive = [
        naive_variant(dtype, general)
        for dtype in DTYPES
        for general in ((False,) if arch == "sm_90a" else (False, True))
    ]
    return tuple(dict.fromkeys((*flash, *paged, *fast, *naive)))


def has_half_scores(dtype: np.dtype, arch: str) -> bool:
    """Whether q k^T can be accumulated in FP16."""
    return dtype == dtypes.float16 and not arch.startswith("gfx")


AnyConfig = AttentionConfig | AttentionHopperConfig


def _configs(task: AttentionTask, device: Device) -> tuple[AnyConfig, ...]:
    """The legal configs, the fastest measured first."""
    t, arch = task, device.arch
    if t.naive:
        return (choose_config(padded_head_dim(*t.head_dims), t.scores, arch),)
    fits = device.warp_size == 32 and attention_hopper.unfit(t) is None
    kind = attention_hopper.kind_of(t) if fits else None
    # Page addresses need registers, so paged tasks use the tiles of general variants.
    scores = Scores.GENERAL if t.pages else t.scores
    queries = Queries(device.multiprocessors, t.batch * t.heads, t.sq, t.sk, t.offset)
    return configs(t.head_dims, scores, arch, queries, kind, t.codes is not None)


def _refusal(config: AnyConfig, task: AttentionTask, device: Device) -> str | None:
    scaled = task.codes is not None
    reason = refusal(config, task.head_dims, task.scores, device.arch, scaled)
    if reason or not isinstance(config, AttentionHopperConfig):
        return reason
    if device.warp_size != 32:
        return f"Hopper's mainloop needs warps of 32 lanes; got {device.warp_size}"
    return attention_hopper.unfit(task, config)


def _variant(task: AttentionTask, config: AnyConfig) -> Variant:
    t, kind = task, attention_hopper.kind_of(task)
    code = t.formulas.code if t.formulas else None
    return flash_variant(
        *(t.dtype, t.head_dims, t.scores, t.half_scores, config, kind, code),
        *(t.pages is not None, t.codes),
    )


def _traits(task: AttentionTask) -> tuple[dict[str, int], dict[str, Any]]:
    t = task
    kinds = {
        "dtype": t.dtype.name, "d": t.head_dim, "dv": t.head_dim_v, "causal": t.offset is not None,
        "mask": t.mask.kind, "blocks": t.mask.blocks[:2], "varlen": t.totals is not None,
        "half_scores": t.half_scores, "prescale": t.prescale,
    }  # fmt: skip
    if t.general:
        kinds |= {"options": t.options, "lengths": t.lengths}
    if t.formulas:
        kinds["formulas"] = str(t.formulas.code)
    if t.pages:
        kinds["page"] = t.pages.size
    if t.codes is not None:
        kinds["codes"] = t.codes.name
    return {"heads": t.batch * t.heads, "sq": t.sq, "sk": t.sk}, kinds


FAMILY: Family[AttentionTask, AttentionConfig | AttentionHopperConfig] = Family(
    "attention",
    (AttentionConfig, AttentionHopperConfig),
    _configs,
    _refusal,
    _variant,
    _traits,
)


# --- plans -------------------------------------------------------------------------------------


class AttentionPlan(NamedTuple):
    """The launches of a task."""

    steps: tuple[Repeated, ...]  # one; three for the naive algorithm
    scores: int = 0  # FP32 scores and row sums of the naive algorithm

    def launch(self, xp: Namespace, arrays: tuple[Any, ...], places: Any = None) -> None:
        """Launch the kernels.

        arrays: q, k, v, out, optionally followed by lse, row_max, row_sum, the mask's five arrays
        and both cu_seqlens (for padded batches the lengths replace the second); then slopes and
        sinks of general tasks, and eight pointers of formulas.  None where absent.
        Paged tasks: q, k and v caches, out, lse, cu_seqlens_q, lengths, block table, slopes, sinks,
        both scales of 8-bit pages, pointers.
        places: a key that determines the addresses of all CuPy arrays; None: their addresses.
        """
        if self.scores:
            scores = maker(xp)((self.scores,), np.float32)
            arrays, places = (scores, *arrays), places and (*places, scores.data.ptr)
        for step in self.steps:
            step.launch(arrays, places)

    def launcher(
        self, xp: Namespace, arrays: Callable[..., tuple[Any, ...]]
    ) -> Callable[..., None]:
        """A function launch(places, *given) that launches the kernel on arrays(*given).

        places: a key that determines the arrays' addresses; `arrays` is called only for new keys.
        """
        return self.steps[0].of(arrays).launch_at


@plans.cached
def attention_plan(
    target: Target, task: AttentionTask, given: AttentionConfig | AttentionHopperConfig | None
) -> AttentionPlan | AttentionHopperPlan:
    """The plan of `task`.  Raises TypeError or ValueError if `given` does not fit, ValueError if
    the grid is too large."""
    t, config = task, FAMILY.config(task, target, given)
    tiles = -(-t.sq // config.tile_m)
    grid = tiles * t.heads * t.batch
    if grid >= 2**31:
        raise ValueError(f"attention has {grid} tiles, more than 2^31 - 1")

    struct = "GeneralParams" if t.general else "AttentionParams"
    params = zeros("attention/work_tile.cuh", struct)
    if t.formulas:
        params = zeros("attention/formula.cuh", "FormulaParams")
        t.formulas.fill(params["operands"])
    for name in ("q", "k", "v", "out"):
        params[name] = getattr(t, name)
    params["stats"] = (0, t.totals[0], 1) if t.totals else (t.heads * t.sq, t.sq, 1)
    if t.lengths and isinstance(config, AttentionHopperConfig):  # its rows include the batch's
        params["stats"]["batch"] -= (attention_hopper.rows_of_elements(t) or (0, 0))[0]
    for name in ("batch", "sq", "sk", "head_dim", "head_dim_v"):
        params[name] = getattr(t, name)
    params["heads"], params["group"] = fast_divmod(t.heads), fast_divmod(t.heads // t.kv_heads)
    per_section = heads_per_section(t)
    _fill_order(params["order"], t.batch * t.heads, tiles, per_section)
    if t.totals:
        params["total_q"], params["total_k"] = t.totals
    m = t.mask
    mask = params["mask"]
    mask["strides"], mask["kind"] = m.strides, m.kind
    mask["dtype"] = dtypes.CODES.get(m.dtype, 0)
    for name, value in zip(("q_shift", "kv_shift", "kv_blocks"), m.blocks, strict=True):
        mask[name] = value
    mask["block_stride_b"], mask["block_stride_h"] = m.block_strides
    mask["causal_offset"] = m.causal_offset
    capped = t.options.softcap != 0  # the cap scales scores itself
    params["prescale"] = t.prescale and not capped
    params["score_scale"] = t.scale if t.prescale else 1.0
    params["exponent_scale"] = (1.0 if t.prescale else t.scale) * _LOG2_E
    params["unit"] = 1.0 if t.prescale else t.scale
    if t.general:
        _set_options(params["options"], t, config)
    params["causal"] = t.options.right >= 0 if t.general else t.offset is not None
    params["offset"] = t.offset or 0
    params["bottom_right"] = t.bottom_right
    values: tuple[Any, ...] = (target.by_value(params),)
    if t.pages:
        values += (target.by_value(_page_params(t, config)),)
    if t.scales:
        values += (target.by_value(scale_params(t.scales)),)
    if t.naive:
        rows = t.batch * t.heads * t.sq
        counts = rows * t.sk, rows * 32, rows * t.head_dim_v
        grids = tuple(max(1, -(-count // _NAIVE_THREADS)) for count in counts)
        if max(grids) >= 2**31:
            raise ValueError(f"the naive algorithm has {rows * t.sk} scores, too many for it")
        kernel = get_kernel(
            target, naive_variant(t.dtype, t.general, t.formulas and t.formulas.code)
        )
        steps = (_naive_step(kernel, size, values, step) for step, size in enumerate(grids))
        return AttentionPlan(tuple(steps), rows * (t.sk + 1))
    kernel = get_kernel(target, FAMILY.variant(t, config))
    if isinstance(config, AttentionHopperConfig):
        dims = attention_hopper.padded(*t.head_dims)
        blocks, needed = min(grid, target.multiprocessors), config.shared_bytes(dims)
        planned = None
        if attention_hopper.is_scheduled(t, grid, blocks):
            order = order_of_tiles(t.batch * t.heads, tiles, per_section)
            planned = target.xp.asarray(attention_hopper.schedule(t, config, order, blocks))
        return attention_hopper.hopper_plan(
            target, t, config, kernel, (blocks, needed), planned, values
        )
    needed = config.shared_bytes(padded_head_dim(*t.head_dims), t.codes is not None)
    absent = (None,) * 10

    def arguments(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*arrays, *(absent if len(arrays) == 4 else ()), *values)

    return AttentionPlan((Repeated(kernel, grid, needed, arguments),))


def _naive_step(kernel: Kernel, grid: int, values: tuple[Any, ...], number: int) -> Repeated:
    def arguments(given: tuple[Any, ...]) -> tuple[Any, ...]:
        scores, *arrays = given
        options = arrays[13:] if len(arrays) > 14 else ()  # lengths, slopes, sinks, operands
        own = (*arrays, *(None,) * 8)[:12]
        return (*own, *options, scores, *values, np.int64(number))

    return Repeated(kernel, grid, 0, arguments)


def _page_params(task: AttentionTask, config: AnyConfig) -> np.ndarray:
    """The PageParams of a paged task."""
    pages = task.pages
    assert pages is not None
    params = zeros("attention/pages.cuh", "PageParams")
    params["table_stride"], params["last"] = pages.table_stride, max(pages.number - 1, 0)
    params["size"] = fast_divmod(max(pages.size, 1))
    if isinstance(config, AttentionHopperConfig):
        params["box_rows"] = attention_hopper.key_rows(task, config)
        params["k_rows"], params["v_rows"] = attention_hopper.page_rows(task) or (0, 0)
    return params


def _set_options(params: np.ndarray, task: AttentionTask, config: AnyConfig) -> None:
    """Fill the ScoreParams of a general task."""
    options = task.options
    params["left"], params["right"] = options.left, options.right
    params["slope_batch"], params["slope_head"] = options.slopes or (0, 0)
    if options.softcap:
        params["softcap"] = options.softcap
        params["softcap_exponent"] = 2 * _LOG2_E * task.scale / options.softcap
    if task.lengths and isinstance(config, AttentionHopperConfig):
        params["q_rows"], params["k_rows"] = attention_hopper.rows_of_elements(task) or (0, 0)


def _fill_order(order: np.ndarray, heads: int, tiles: int, heads_per_section: int) -> None:
    """order: a zeroed QueryTileOrder.  heads: of all batches."""
    whole, rest = divmod(heads, heads_per_section)
    order["tiles"], order["whole_sections"] = tiles, whole
    order["section"] = fast_divmod(heads_per_section * tiles)
    order["heads"], order["last_heads"] = fast_divmod(heads_per_section), fast_divmod(rest)


def order_of_tiles(heads: int, tiles: int, heads_per_section: int) -> np.ndarray:
    """The tiles of queries of a causal task, in the order of attention/work_tile.cuh."""
    long_first = np.arange(tiles)[::-1]
    whole, rest = divmod(heads, heads_per_section)
    sections = np.tile(np.repeat(long_first, heads_per_section), whole)
    return np.concatenate([sections, np.repeat(long_first, rest)])


def heads_per_section(task: AttentionTask) -> int:
    """Number of heads in a section of the tile order; within a section long tiles come first.

    If tiles differ in length (causal, block masks), about as many heads as have their keys and
    values in L2; else 1.
    """
    if task.offset is None and task.mask.kind != BLOCK_MASK:
        return 1
    bytes_of_head = max(1, task.sk * (task.head_dim + task.head_dim_v) * task.dtype.itemsize)
    fit = max(1, L2_BYTES // bytes_of_head)
    group = task.heads // task.kv_heads
    return group * _even_part(task.batch * task.kv_heads, fit)


def _even_part(count: int, most: int) -> int:
    """The size, from most / 2 to `most`, of the sections of `count` heads whose last section is the
    fullest; `count` if that is smaller than `most`.

    Blocks take tiles in order, and the long tiles of the last section come late.  If there are few
    of them, some blocks end with one and others with none.  With sections of 6 of 32 heads (4096
    queries, heads of 256) the longest block has 15% more work than the mean; with 4, 0.3%.
    """
    if count <= most:
        return count
    return min(range((most + 1) // 2, most + 1), key=lambda size: (-count % size / size, -size))
