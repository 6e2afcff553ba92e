"""How attention is launched on Hopper: the Python half of kernels_cu/attention_hopper.cu."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kernels_cu import Variant

from .. import dtypes
from ..gemm.gemm_hopper import MapPlan, encoded_maps
from ..targets import Kernel, Target
from ..targets.limits import max_shared_bytes

if TYPE_CHECKING:
    from .attention_plan import AttentionTask

_LINE_ELEMENTS = 64  # of 128 bytes, by which tiles in shared memory are swizzled
_STORED_ROWS = 16  # a warp's
_TILE_COST = 1.5  # of a tile of queries beside its tiles of keys, in theirs
_MAX_SCHEDULED = 1 << 14  # tiles: of more, every block has many


@dataclass(frozen=True)
class AttentionHopperConfig:
    """Warpgroups of 64 queries, and one that loads, compute tile_m queries by tiles of tile_n keys, of
    which `stages` are in shared memory."""

    tile_m: int
    tile_n: int
    stages: int = 2

    def outputs_apart(self, head_dim: int) -> bool:
        """Whether shared memory has room for a tile's outputs beside the next one's queries."""
        return self._shared_bytes(head_dim, 2) <= max_shared_bytes("sm_90a")

    def shared_bytes(self, head_dim: int) -> int:
        """Dynamic shared memory (attention_hopper.cu: HopperAttention)."""
        return self._shared_bytes(head_dim, 1 + self.outputs_apart(head_dim))

    def _shared_bytes(self, head_dim: int, query_tiles: int) -> int:
        tiles = 2 * head_dim * (query_tiles * self.tile_m + 2 * self.stages * self.tile_n)
        return tiles + 8 * (2 + 4 * self.stages + self.tile_m // 64 + 1)  # barriers, a number

    @property
    def num_threads(self) -> int:
        return 2 * self.tile_m + 128


def refusal(config: AttentionHopperConfig, head_dim: int, arch: str) -> str | None:
    """Why `config` does not fit heads that are padded to head_dim; None: it does."""
    c = config
    if arch not in ("sm_90a", "host"):
        return f"it needs Hopper's TMA and wgmma, not {arch}"
    if c.tile_m not in (128, 192):
        return f"tile_m must be 128 or 192; got {c.tile_m}"
    if c.tile_n % 16 or not 16 <= c.tile_n <= 256:
        return f"tile_n must be a multiple of 16 up to 256; got {c.tile_n}"
    if not 2 <= c.stages <= 3:
        return f"stages must be 2 or 3; got {c.stages}"
    # Of a thread: outputs, scores, probabilities of 16 bits.
    registers = head_dim // 2 + c.tile_n // 2 + c.tile_n // 4
    limit = 200 if c.tile_m == 128 else 128
    if registers > limit:
        return f"a thread's {registers} sums are more than {limit}"
    needed, limit = c.shared_bytes(head_dim), max_shared_bytes(arch)
    if needed > limit:
        return f"{needed} bytes of shared memory are more than the {limit} of {arch}"
    return None


def configs(head_dim: int, mode: int) -> tuple[AttentionHopperConfig, ...]:
    """The default first; mode: attention_plan.mask_mode's.  Tiles of blocks lie in one."""
    if mode == 1:
        return ()
    if mode == 2:
        return (AttentionHopperConfig(128, 32 if head_dim == 256 else 64, 3),)
    return {
        64: (AttentionHopperConfig(192, 128),),
        128: (AttentionHopperConfig(128, 128),),
        256: (AttentionHopperConfig(128, 80),),
    }[head_dim]


def unfit(task: AttentionTask, config: AttentionHopperConfig | None = None) -> str | None:
    """Why TMA and this kernel, or this config of it, cannot do a task; None: they can."""
    if task.mode == 2 and config is not None and (64 % config.tile_n or config.tile_m != 128):
        return "with masks of blocks tile_m is 128 and a tile of keys lies in one block"
    if task.naive or task.half_scores or task.mode == 1 or task.prescale:
        return "masks that are arrays, FP16 sums and scales up to 0 are the portable kernel's"
    if task.totals is not None:
        return "packed sequences are the portable kernel's"
    strides = [s for operand in (task.q, task.k, task.v, task.out) for s in operand]
    sizes = _sizes(task)
    steps = zip([n for size in sizes for n in size[:3]], strides, strict=True)
    if any(step <= 0 for size, step in steps if size > 1):
        return "TMA walks positive strides only"
    if max(strides) * task.dtype.itemsize >= 2**40:
        return "TMA's strides are below 2**40 bytes"
    return None


def variant(dtype: np.dtype, head_dim: int, mode: int, config: AttentionHopperConfig) -> Variant:
    return Variant(
        "attention_hopper",
        (("Element", dtypes.CPP_NAMES[dtype]),),
        (
            ("kHeadDim", head_dim),
            ("kTileN", config.tile_n),
            ("kStages", config.stages),
            ("kMaskMode", mode),
            ("kOutputsApart", config.outputs_apart(head_dim)),
        ),
        config.num_threads,
    )


def _sizes(t: AttentionTask) -> tuple[tuple[int, int, int, int], ...]:
    return (
        (t.batch, t.heads, t.sq, t.head_dim),
        (t.batch, t.kv_heads, t.sk, t.head_dim),
        (t.batch, t.kv_heads, t.sk, t.head_dim_v),
        (t.batch, t.heads, t.sq, t.head_dim_v),
    )


def maps(task: AttentionTask, config: AttentionHopperConfig) -> tuple[MapPlan, ...]:
    """Of q, k, v and out."""
    rows = config.tile_m, config.tile_n, config.tile_n, _STORED_ROWS
    size = task.dtype.itemsize
    return tuple(
        MapPlan(task.dtype, shape, (*(s * size for s in steps), size), (1, 1, n, _LINE_ELEMENTS))
        for shape, steps, n in zip(
            _sizes(task), (task.q, task.k, task.v, task.out), rows, strict=True
        )
    )


def schedule(task: AttentionTask, config: AttentionHopperConfig, order: Any, blocks: int) -> Any:
    """Which block computes which tiles of queries, as int32 (rounds, blocks), -1 for none; None: every
    `blocks`-th one.

    Causal tiles take longer the later they come: each one goes, in the order of attention_task.cuh, to
    the block that has the least to do so far.  order: the tiles' numbers of queries, in that order.
    """
    if task.offset is None or task.mode != 0 or not blocks < len(order) <= _MAX_SCHEDULED:
        return None
    rows = np.minimum((order + 1) * config.tile_m, task.sq)
    keys = np.clip(rows + task.offset, 0, task.sk)
    costs = -(-keys // config.tile_n) + _TILE_COST
    heap = [(0.0, block) for block in range(blocks)]
    tiles: list[list[int]] = [[] for _ in range(blocks)]
    for tile, cost in enumerate(costs):
        load, block = heap[0]
        tiles[block].append(tile)
        heapq.heapreplace(heap, (load + float(cost), block))
    made = np.full((max(map(len, tiles)) + 1, blocks), -1, np.int32)
    for block, own in enumerate(tiles):
        made[: len(own), block] = own
    return made


class AttentionHopperPlan(NamedTuple):
    """The launch of a task."""

    target: Target
    kernel: Kernel
    grid: int
    shared_bytes: int
    maps: tuple[MapPlan, ...]
    schedule: Any
    params: Any
    encoded: dict[tuple[int | None, ...], tuple[Any, ...]]  # maps by the arrays' addresses

    def launch(self, xp: Any, arrays: tuple[Any, ...]) -> None:
        """arrays: as AttentionPlan.launch takes them."""
        made = encoded_maps(self.target, self.maps, arrays, self.encoded)
        self.kernel(
            self.grid, (*made, *arrays[4:12], self.schedule, self.params), self.shared_bytes
        )
