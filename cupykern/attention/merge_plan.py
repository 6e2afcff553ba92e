"""Configs and plans of merge_attention.

The Python half of kernels_cu/merge_attention.cu.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import dtypes
from ..arguments import config_class
from ..kernels import Variant
from ..param_structs import fast_divmod, zeros
from ..rows.row_layout import VECTOR_BYTES, Operand
from ..runtime import plans
from ..runtime.choice import Family
from ..runtime.jit import get_kernel
from ..targets import Device, Target
from ..targets.limits import is_measured
from ..targets.repeated import Repeated

DTYPES = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
_THREADS = 128
_LANES = 32  # the most threads per row
# Launch bounds by rows, without spills.  (16384, 32, 128) of BF16 takes 113 us, with two rows per
# thread, instead of 116 (H200).
_MIN_BLOCKS = {1: 10, 2: 9}
_WAVES = 4  # the fewest waves of blocks for several rows per thread


@config_class
class MergeConfig:
    """rows: rows per thread; a thread loads its elements of all of them before it merges them."""

    rows: int


class MergeTask(NamedTuple):
    """A call without its arrays.

    shape: shape of out.  The operands have their dims in the order of out's; log-sum-exps have the
        first three.  The resulting log-sum-exp is contiguous.
    swaps: the resulting log-sum-exp has heads and rows in the opposite order to out.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    out1: Operand
    out2: Operand
    out: Operand
    lse1: Operand
    lse2: Operand
    swaps: bool

    @property
    def num_rows(self) -> int:
        return self.shape[0] * self.shape[1] * self.shape[2]

    @property
    def width(self) -> int:
        """kWidth: elements per load."""
        width = VECTOR_BYTES // self.dtype.itemsize
        by_vectors = self.shape[3] % width == 0 and all(
            x.strides[3] == x.itemsize
            and not any(n % VECTOR_BYTES for n in (x.offset, *x.strides[:3]))
            for x in (self.out1, self.out2, self.out)
        )
        return width if by_vectors else 1

    @property
    def lanes(self) -> int:
        return lanes_of(self.shape[3], self.width)

    def num_blocks(self, config: MergeConfig) -> int:
        return _num_blocks(self.num_rows, self.lanes, config)


def lanes_of(dim: int, width: int) -> int:
    """Threads per row, a power of two."""
    return 1 << (min(-(-dim // width), _LANES) - 1).bit_length()


def _num_blocks(num_rows: int, lanes: int, config: MergeConfig) -> int:
    return -(-num_rows // (_THREADS // lanes * config.rows))


def configs_on(arch: str, width: int) -> tuple[MergeConfig, ...]:
    return tuple(map(MergeConfig, (1, 2) if width > 1 and is_measured(arch) else (1,)))


def configs(num_rows: int, dim: int, width: int, device: Device) -> tuple[MergeConfig, ...]:
    """The legal configs, the default first.

    Two rows per thread keep more loads in flight: (16384, 32, 128) of BF16 took 116 us instead of
    124, both without launch bounds (H200).  Too few blocks would leave SMs idle.
    """
    found, lanes = configs_on(device.arch, width), lanes_of(dim, width)
    least = _WAVES * device.multiprocessors
    full = [c for c in found if _num_blocks(num_rows, lanes, c) >= least]
    best = full[-1] if full else found[0]
    return (best, *(c for c in found if c != best))


def _configs(task: MergeTask, device: Device) -> tuple[MergeConfig, ...]:
    return configs(task.num_rows, task.shape[3], task.width, device)


def _refusal(config: MergeConfig, task: MergeTask, device: Device) -> str | None:
    allowed = [c.rows for c in configs_on(device.arch, task.width)]
    if config.rows in allowed:
        return None
    return f"rows must be one of {', '.join(map(str, allowed))} for these arrays; got {config.rows}"


def variant_of(dtype: np.dtype, width: int, config: MergeConfig) -> Variant:
    types = (("Element", dtypes.CPP_NAMES[dtype]),)
    constants = ("kWidth", width), ("kRows", config.rows)
    least = _MIN_BLOCKS[config.rows] if width > 1 else 1
    return Variant("merge_attention", types, constants, _THREADS, min_blocks=least)


def variants(arch: str) -> tuple[Variant, ...]:
    return tuple(
        variant_of(dtype, width, config)
        for dtype in DTYPES
        for width in (VECTOR_BYTES // dtype.itemsize, 1)
        for config in configs_on(arch, width)
    )


FAMILY: Family[MergeTask, MergeConfig] = Family(
    "merge_attention",
    (MergeConfig,),
    _configs,
    _refusal,
    lambda task, config: variant_of(task.dtype, task.width, config),
    lambda task: (
        {"rows": task.num_rows, "dim": task.shape[3]},
        {"dtype": task.dtype.name, "width": task.width},
    ),
)


@plans.cached
def plan(target: Target, task: MergeTask, config: MergeConfig | None) -> Repeated:
    """The launch of `task`.  Raises TypeError or ValueError if `config` does not fit, ValueError
    for 2^31 rows or more."""
    t, chosen = task, FAMILY.config(task, target, config)
    if t.num_rows >= 2**31:
        raise ValueError(f"merge_attention takes less than 2^31 rows; got {t.num_rows}")
    params = zeros("attention/merge_rows.cuh", "MergeParams")
    outs = t.out1, t.out2, t.out
    for name, x in (
        *zip(("strides1", "strides2", "out_strides"), outs, strict=True),
        *(("lse1_strides", t.lse1), ("lse2_strides", t.lse2)),
    ):
        params[name] = [step // x.itemsize for step in x.strides[:3]]
    _, first, second, _ = t.shape
    params["lse_strides"] = first * second, *((1, first) if t.swaps else (second, 1))
    params["steps"] = [x.strides[3] // x.itemsize for x in outs]
    for name, size in (("second", t.shape[1]), ("third", t.shape[2])):
        params[name] = fast_divmod(size)
    params["num_rows"] = t.num_rows
    params["num_vectors"] = t.shape[3] // t.width
    params["lanes_log2"] = t.lanes.bit_length() - 1
    kernel, struct = get_kernel(target, FAMILY.variant(t, chosen)), target.by_value(params)
    return Repeated(kernel, t.num_blocks(chosen), 0, lambda arrays: (*arrays, struct))
