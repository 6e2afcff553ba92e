"""Choose the Hopper config of a task: the estimated fastest.

The model: time = launches before and after + waves x (us x k / 4096 + tile_us).  us is the time of
a tile's mainloop; tile_us is the time of its prologue and epilogue, a part of which ping-pong hides
behind the next tile.  The mainloops take at least the time that memory needs for the operands.  The
constants are data: cupykern/tuned/sm_90a.json says what each one means and what it was measured on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter
from typing import Any, cast

from .. import dtypes, tuned
from ..targets import Device
from ..targets.limits import device as device_named
from ..targets.limits import multiprocessors
from .decode_first import DecodeFirst
from .gemm_task import GemmTask
from .portable_config import GemmConfig
from .product import FLOAT16S, FP4, FP8, K_MAJOR
from .sm90_config import Sm90Config
from .sm90_dual_config import Sm90DualGemmConfig, Sm90Fp8DualGemmConfig, Sm90MixedDualGemmConfig
from .sm90_gemm_config import Sm90Fp8GemmConfig, Sm90GemmConfig, Sm90MixedGemmConfig
from .sm90_logits_config import SkinnyLogitsConfig, Sm90LogitsConfig
from .sm90_policies import Cooperative, Multicast, PingPong, SlicedK, SplitK
from .split_plan import SplitConfig, SplitKWorkspace

ARCH = "sm_90a"
CONFIGS = (
    *(Sm90GemmConfig, Sm90Fp8GemmConfig, Sm90MixedGemmConfig, Sm90DualGemmConfig),
    *(Sm90Fp8DualGemmConfig, Sm90MixedDualGemmConfig, Sm90LogitsConfig, SkinnyLogitsConfig),
    *(SplitKWorkspace, DecodeFirst),
)
Sm90AnyConfig = Sm90Config | SkinnyLogitsConfig | SplitKWorkspace | DecodeFirst
_NAMED = {
    kind.__name__: kind for kind in (*CONFIGS, Cooperative, PingPong, SlicedK, Multicast, SplitK)
}
_C = tuned.constants(ARCH, "gemm")
_SMS = multiprocessors(ARCH)
FEW_ROWS = _C["few_rows"]
_K = 4096  # k that a tile's us refers to
_ACCUMULATORS = 128 * 256  # tile size that the activation's us refers to


@dataclass(frozen=True)
class Tile:
    """A config and the times of its tile on one SM.

    us: the mainloop's time for k = 4096.
    tile_us: the time of prologue and epilogue, for any k.  None if it is not known apart from `us`;
        then _slices_k decides about sliced-K.
    epilogues: "general" if it can be chosen for tasks with the general epilogue, "tma_store" if for
        all others.
    rows: the file's rows of these times ("16-bit[0]") and their shares; two if interpolated.
    on_call: it is one of many widths, and compiled only when it is chosen; of most families the
        widest is compiled ahead.
    cold_us: added once for the general epilogue, whose code is fetched from memory.
    """

    config: Sm90AnyConfig
    us: float
    tile_us: float | None = None
    epilogues: tuple[str, ...] = ("tma_store", "general")
    rows: tuple[tuple[str, float], ...] = ()
    on_call: bool = False
    cold_us: float = 0.0

    @property
    def kernel(self) -> Any:  # the config tells which fields it has
        """The config of the product's own launch."""
        return self.config.config if isinstance(self.config, DecodeFirst) else self.config


def from_json(value: Any) -> Any:
    """Convert JSON: {"PingPong": {}} to PingPong(), lists to tuples; other values stay."""
    if isinstance(value, dict):
        ((name, fields),) = value.items()
        return _NAMED[name](**{field: from_json(x) for field, x in fields.items()})
    return tuple(map(from_json, value)) if isinstance(value, list) else value


@cache
def table(name: str) -> tuple[Tile, ...]:
    """A table of gemm_tiles in tuned/sm_90a.json, with interpolated widths between its rows."""
    entry = tuned.load(ARCH)["gemm_tiles"][name]
    rows = entry["tiles"]
    made = [_from_row(row, f"{name}[{i}]") for i, row in enumerate(rows)]
    found = list(made)
    for i, row in enumerate(rows):
        for field, step in row.get("step_to_next", {}).items():
            kinds = (dtypes.NAMES[dtype] for dtype in entry["operands"])
            bits = tuple(4 if kind == FP4 else 8 * kind.itemsize for kind in kinds)
            found += _between(made[i], made[i + 1], field, step, bits)
    return tuple(found)


def _from_row(row: Mapping[str, Any], name: str) -> Tile:
    fields = {field: from_json(x) for field, x in row.items() if field != "step_to_next"}
    return Tile(**{"on_call": "step_to_next" in row, **fields}, rows=((name, 1.0),))


def _between(
    narrow: Tile, wide: Tile, field: str, step: int, bits: tuple[int, ...]
) -> Iterator[Tile]:
    """Tiles between `narrow` and `wide`, every `step` of `field` (tile_m or tile_n): interpolated
    times, and as many stages as fit the larger of the two pipelines.  bits: per element of A and B.
    """

    def stage(config: Any) -> int:
        return config.tile_m * bits[0] + config.tile_n * bits[1]

    first, last = (getattr(tile.config, field) for tile in (narrow, wide))
    ((low, _),), ((high, _),) = narrow.rows, wide.rows
    held = max(tile.kernel.stages * stage(tile.config) for tile in (narrow, wide))
    for size in range(first + step, last, step):
        share = (size - first) / (last - first)
        config: Any = replace(cast(Any, wide.config), **{field: size})
        stages = held // stage(config)
        if isinstance(config.schedule, SlicedK):  # each warpgroup takes every second stage
            stages -= stages % 2
        config = replace(config, stages=stages)
        us, tile_us = (
            (1 - share) * getattr(narrow, time) + share * getattr(wide, time)
            for time in ("us", "tile_us")
        )
        rows = (low, 1 - share), (high, share)
        yield Tile(config, us, tile_us, wide.epilogues, rows, on_call=True)


@cache
def _decoded_first(name: str) -> tuple[Tile, ...]:
    """The tiles of a table of 16-bit operands, for NVFP4 weights that are decoded first."""
    return tuple(replace(tile, config=DecodeFirst(cast(Any, tile.config))) for tile in table(name))


def tiles_of(task: GemmTask) -> tuple[Tile, ...]:
    """The tiles of a task's tables; for an NVFP4 b also those of 16-bit operands decoded first."""
    own = tuple(tile for name in tables_of(task) for tile in table(name))
    if task.kernel != "gemm" or task.b != FP4:
        return own
    return own + tuple(x for name in tables_of(task.decoded) for x in _decoded_first(name))


def compiled_ahead(task: GemmTask, configs: Iterable[Any]) -> Iterator[Any]:
    """Those of `configs` that are compiled ahead, not when they are chosen.

    For the compile gates FP32 results, results with an activation or a residual and
    SplitKWorkspace's first launch, that of (512, 512, 16384), have one variant for each mainloop;
    of BF16, E4M3 and NVFP4 alone.
    The general epilogue has no variants with an FP16 a, and with a BF16 a by 8-bit weights those
    of E4M3.
    """
    k_major = task.layout_a == task.layout_b == K_MAJOR
    kinds = dtypes.bfloat16, dtypes.float8_e4m3fn, FP4
    covers = k_major and task.kernel == "gemm" and task.a_decoded.a in kinds and task.b in kinds
    if task.epilogue in ("activated", "floats", "residual"):
        covers &= task.epilogue == "floats" or not task.block_scales
        covers &= task.epilogue != "activated" or task.a_decoded.a in FLOAT16S
        yield from [x for x in configs if covers and isinstance(x, Sm90Config)][:1]
        return
    a = task.a_decoded.a
    others = a == dtypes.float16 or task.b in (dtypes.int8, dtypes.float8_e5m2)
    if task.epilogue == "general" and task.kernel == "gemm" and a in FLOAT16S and others:
        return
    on_call = {tile.config for tile in tiles_of(task) if tile.on_call and has_epilogue(tile, task)}
    ahead = [x for x in configs if x not in on_call and not isinstance(x, SplitKWorkspace)]
    yield from ahead
    if not any(isinstance(x, Sm90Config) for x in ahead):  # another architecture's
        return
    if covers and task.epilogue == "tma_store" and task.aligned_128:
        split = replace(task, m=512, n=512, k=16384)
        yield from _with_workspace(split, device_named(ARCH), math.inf)


def tables_of(task: GemmTask) -> tuple[str, ...]:
    """The names of the tables for a task.  Rare tasks share tables or have none."""
    a, b = task.a, task.b
    k_major = (task.layout_a, task.layout_b) == (K_MAJOR, K_MAJOR)
    if task.kernel == "dequant_softmax":
        return ("logits, few rows",) if task.m <= FEW_ROWS and k_major else ("logits",)
    if task.kernel == "dual_gemm":
        return _dual_tables(task)
    if b == FP4:
        return ("nvfp4",)
    if a in FP8 and b in FP8:
        e4m3 = "e4m3, blocks" if task.block_scales else "e4m3"
        return (e4m3,) if a == b == dtypes.float8_e4m3fn else ("e5m2",)
    if a == b and a in FLOAT16S:
        if task.layout_a != K_MAJOR:
            return ("16-bit, a MN-major",)
        if not task.aligned_128:
            return ("16-bit, misaligned",)
        return ("16-bit",) if task.layout_b == K_MAJOR else ("16-bit, b MN-major",)
    if a == b:
        return ("int8",) if a == dtypes.int8 else ()
    if task.block_scales:
        blocks = "mixed, blocks" if b == dtypes.float8_e4m3fn else "mixed, int8 blocks"
        return (blocks,) if k_major else ()
    if b == dtypes.float8_e5m2:
        return ("mixed, e5m2",) if k_major else ()
    return ("mixed",) if task.layout_b == K_MAJOR else ("mixed, b MN-major",)


def _dual_tables(task: GemmTask) -> tuple[str, ...]:
    a, b = task.a, task.b
    if b == FP4:
        return ("dual nvfp4",)
    if task.layout_a != K_MAJOR:
        return ()
    if a in FLOAT16S and b in (dtypes.float8_e4m3fn, dtypes.int8):
        mixed = "dual mixed, blocks" if task.block_scales else "dual mixed"
        return (mixed,) if task.layout_b == K_MAJOR else ()
    if a != b:
        return ()
    if a in FLOAT16S:
        return ("dual 16-bit",) if task.layout_b == K_MAJOR else ("dual 16-bit, b MN-major",)
    if a != dtypes.float8_e4m3fn:
        return ()
    return ("dual e4m3, blocks",) if task.block_scales else ("dual e4m3",)


def configs(task: GemmTask, device: Device) -> tuple[Sm90AnyConfig, ...]:
    """The legal configs of `task` on `device`, the estimated fastest first.

    Sliced-K, SplitK and SplitKWorkspace change the order of accumulation.  So the task alone
    decides about them, not the number of SMs.
    """
    fitting = [
        tile
        for tile in tiles_of(task)
        if tile.config.refusal(task, device) is None and has_epilogue(tile, task)
    ]
    few = None if is_modelled(task) else _slices_k(task)

    def order(tile: Tile, blocks: int) -> tuple[bool, float]:
        """Tiles that do not suit the task come last."""
        other = few is not None and _is_for_few_rows(tile.kernel) != few
        return other or not _splits_few_tiles(tile, task), estimate(tile, task, blocks)

    timed = sorted(((order(tile, _SMS), tile) for tile in fitting), key=itemgetter(0))
    if not timed:
        return _accumulators_first(task, device)
    (_, fastest_us), first = timed[0]

    def same_bits_first(of: tuple[tuple[bool, float], Tile]) -> tuple[bool, bool, float]:
        usual, tile = of
        is_usual = device.multiprocessors == _SMS
        other, us = usual if is_usual else order(tile, device.multiprocessors)
        return other, _accumulation(tile.kernel) != _accumulation(first.kernel), us

    split = _with_workspace(task, device, fastest_us)
    return (*split, *(tile.config for _, tile in sorted(timed, key=same_bits_first)))


def _accumulators_first(task: GemmTask, device: Device) -> tuple[SplitKWorkspace, ...]:
    """Configs for a formula that reduces rows if all others use swap-AB, as mixed input does:
    SplitKWorkspace's second launch evaluates the formula on accumulators in memory."""
    if task.formula is None or not task.formula.reduces_rows:
        return ()
    configs = (
        (tile, SplitKWorkspace(tile.config, 1))
        for tile in tiles_of(task)
        if isinstance(tile.config, SplitConfig)
    )
    times = {
        config: estimate(tile, config.split(task), _SMS)
        for tile, config in configs
        if config.refusal(task, device) is None
    }
    return tuple(sorted(times, key=times.__getitem__))


def _splits_few_tiles(tile: Tile, task: GemmTask) -> bool:
    """False for cluster split-K in several waves.  It is not persistent: a wave's loads wait for
    the previous epilogue.  BF16 (128, 7168, 16384): two waves 78.8 us, without split-K 66.6."""
    c = tile.kernel
    return isinstance(c, SkinnyLogitsConfig) or c.split_k == 1 or _num_tiles(tile, task) <= _SMS


def is_modelled(task: GemmTask) -> bool:
    """Whether the estimates alone decide between the configs of `task`."""
    return all(tile.tile_us is not None for tile in tiles_of(task))


def _is_for_few_rows(config: Sm90Config | SkinnyLogitsConfig) -> bool:
    if isinstance(config, SkinnyLogitsConfig):
        return False
    split = config.split_k > 1 and config.tile_m <= 64
    return isinstance(config.schedule, SlicedK) or split


def _accumulation(config: Sm90Config | SkinnyLogitsConfig) -> tuple[bool, int, int]:
    """(sliced-K, split_k, tile_k where a stage decides who adds it): the order of accumulation
    depends on these."""
    if isinstance(config, SkinnyLogitsConfig):
        return False, 1, 0
    sliced = isinstance(config.schedule, SlicedK)
    return sliced, config.split_k, config.tile_k if sliced or config.split_k > 1 else 0


def _with_workspace(task: GemmTask, device: Device, whole: float) -> tuple[SplitKWorkspace, ...]:
    """The fastest split-K config with a workspace if it is faster than `whole`, the us without it.

    Tiles times splits do not exceed the SMs.
    """
    if not task.aligned_128 or task.batch > 1:
        return ()
    best: SplitKWorkspace | None = None
    least = _C["split_gain"] * whole
    for tile in tiles_of(task):
        c = tile.config
        if not isinstance(c, SplitConfig) or c.split_k > 1 or not has_epilogue(tile, task, 2):
            continue
        most = min(_SMS // max(1, _num_tiles(tile, task)), task.k // _C["split_least_k"])
        for splits in _C["splits"]:
            if splits > most:
                break
            us = estimate(tile, task, _SMS, splits)
            if us < least:
                config = SplitKWorkspace(c, splits)
                if config.refusal(task, device) is None:
                    best, least = config, us
    return () if best is None else (best,)


def _slices_k(task: GemmTask) -> bool:
    """Whether a task that is not modelled uses sliced-K: few rows, or at most one wave of 64 x 64
    tiles.  (128, 4096, 7168) of int8 then takes 20.7 us instead of 24.2 (H200)."""
    if task.kernel == "dual_gemm":
        return False
    if task.m <= _C["sliced_k_rows"]:
        return True
    if task.kernel != "gemm" or task.a in FP8 or not task.aligned_128:
        return False
    return task.batch * math.ceil(task.m / 64) * math.ceil(task.n / 64) <= _SMS


def has_epilogue(tile: Tile, task: GemmTask, splits: int = 1) -> bool:
    """Whether `tile` has the task's epilogue; with splits > 1, that of partial accumulators.

    Each kernel has one epilogue.  The general one is rare and slow, so few configs have it:
    ping-pong, which hides it, and one for few rows.  Every config has variants for formulas.
    """
    if splits > 1:
        return "tma_store" in tile.epilogues
    if isinstance(tile.config, DecodeFirst):
        task = task.decoded
    if task.formula is not None:
        return True
    return ("general" if task.epilogue == "general" else "tma_store") in tile.epilogues


def _num_tiles(tile: Tile, task: GemmTask) -> int:
    """Number of block tiles of the task."""
    c = tile.kernel
    if isinstance(c, SkinnyLogitsConfig):
        return task.batch * math.ceil(task.n / c.tile_n)
    return c.cluster.size * task.batch * math.prod(c.cluster_tiles(task.m, task.n))


def estimate(
    tile: Tile, task: GemmTask, blocks: int, splits: int = 1, constants: Mapping[str, Any] = _C
) -> float:
    """Estimated us until the busiest of `blocks` SMs is done.

    splits > 1: of a SplitKWorkspace, its reduction included.  Where memory does not bind, the
    estimate is linear in the tile's times and the constants, so that tools/fit.py can fit them.
    """
    if splits > 1:
        part = SplitKWorkspace(cast(SplitConfig, tile.config), splits).split(task)
        first = estimate(tile, part, blocks, 1, constants)
        adds = splits * task.m * task.n * constants["split_element"]
        return float(first + constants["split_launch"] + adds)
    c, before, num_tiles = tile.kernel, decode_a_us(task, constants), _num_tiles(tile, task)
    if isinstance(tile.config, DecodeFirst):
        per_element = constants["decode_element"][task.kernel]
        size = task.batch * task.products * task.n * task.k
        before += constants["decode"][task.kernel] + size * per_element
        task = task.decoded
    if tile.cold_us and task.epilogue == "general":
        before += tile.cold_us
    if isinstance(c, SkinnyLogitsConfig):
        return math.ceil(num_tiles / blocks) * tile.us * task.k / _K
    if c.cluster.size == 4:  # not every GPC has a multiple of 4 SMs
        blocks = max(1, int(blocks * constants["cluster_of_4_sms"]))
    waves = math.ceil(num_tiles / blocks)
    k = task.k
    if tile.tile_us is not None:  # k of one block, in whole stages
        k = math.ceil(math.ceil(k / c.tile_k) / c.split_k) * c.tile_k
    us = waves * tile.us * k / _K
    if tile.tile_us is None:
        return before + us
    reads = read_us(task, constants)
    us = max(us, reads) + constants["memory_exposed"] * min(us, reads)
    # Ping-pong exposes tile_us fully once and partly in later waves, and two activations in all.
    ping_pong = isinstance(c.schedule, PingPong)
    exposed = 1 + constants["ping_pong_exposed"] * (waves - 1) if ping_pong else waves
    us += exposed * tile.tile_us
    if task.epilogue == "residual" and not ping_pong:
        us += waves * max(0, c.boxes - 2) * constants["residual_box"]
    if task.slow_activation:
        part = c.tile_m * c.tile_n / _ACCUMULATORS
        factor = constants["swap_ab_activation"] if c.swap_ab else 1
        us += constants["activation"] * part * factor * (2 if ping_pong else waves)
    return before + us


def read_us(task: GemmTask, constants: Mapping[str, Any] = _C) -> float:
    """Estimated us to read the operands from memory once."""
    bits_a, bits_b = (4 if x == FP4 else 8 * x.itemsize for x in (task.a, task.b))
    bits = task.batch * task.k * (task.m * bits_a + task.products * task.n * bits_b)
    return float(bits / 8 / constants["memory_bytes"])


def decode_a_us(task: GemmTask, constants: Mapping[str, Any] = _C) -> float:
    """Estimated us to decode an NVFP4 a, which every config does first."""
    if task.a != FP4:
        return 0.0
    return float(task.batch * task.m * task.k * constants["decode_element"][task.kernel])


def estimate_config(config: Sm90AnyConfig, task: GemmTask) -> float:
    """`estimate` for a config of a tile, or of its SplitKWorkspace, on the usual SM count."""
    splits = config.splits if isinstance(config, SplitKWorkspace) else 1
    of_tile = config.config if isinstance(config, SplitKWorkspace) else config
    tiles = (tile for tile in tiles_of(task) if has_epilogue(tile, task, splits))
    tile = next(tile for tile in tiles if tile.config == of_tile)
    return estimate(tile, task, _SMS, splits)


def is_profitable(task: GemmTask, best: Sm90AnyConfig, portable: GemmConfig) -> bool:
    """Whether `best` is faster than `portable`, a config that reads by vectors.

    It mostly is if the task is modelled (then some configs suit few tiles), or if its tiles occupy
    at least half of the SMs.
    """
    if isinstance(best, SplitKWorkspace):  # replaces the portable mainloop's split-K
        return True
    if task.kernel == "gemm" and task.b == FP4:
        return estimate_config(best, task) < portable_nvfp4_estimate(task, portable)
    mn_major_logits = task.kernel == "dequant_softmax" and task.layout_b != K_MAJOR
    streams_weights = mn_major_logits or (task.b == FP4 and task.kernel == "dual_gemm")
    if streams_weights and task.m <= FEW_ROWS:
        return False
    if task.kernel == "gemm" and is_modelled(task) and task.layout_a == K_MAJOR:
        return True
    if task.kernel == "dual_gemm" and task.block_scales:
        return True
    return 2 * max(_num_tiles(tile, task) for tile in tiles_of(task)) >= _SMS


def portable_nvfp4_estimate(task: GemmTask, config: GemmConfig) -> float:
    """`estimate` for the portable mainloop with NVFP4 weights."""
    times, c = _C["portable_nvfp4"], config
    tiles = task.batch * c.splits * math.ceil(task.m / c.tile_m) * math.ceil(task.n / c.tile_n)
    k = math.ceil(task.k / (c.splits * c.tile_k)) * c.tile_k
    return times["besides"] + math.ceil(tiles / _SMS) * times["us"] * k / _K
