"""quantize_nvfp4: e2m1 codes with an e4m3 scale for every 16 of a row and an FP32 scale of all."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kernels_cu import Variant

from .. import arguments, arrays, dtypes, inputs, plans, reference, workspace
from ..arrays import address_of
from ..choice import Family
from ..jit import get_kernel
from ..numerics import as_float64, namespace
from ..op import Call, Draw, Op, Work
from ..targets import Device, Target
from ..targets.limits import max_shared_bytes
from ..targets.repeated import Repeated
from . import nvfp4
from .nvfp4 import GROUP, NvFp4
from .product import Groups, Matrix, groups, matrix

_VECTOR_BYTES, _STATIC_BYTES = 16, 1024  # the kernel's static shared memory, at most
_E4M3 = dtypes.float8_e4m3fn
DTYPES = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
_PARAMS = np.dtype(  # quantize_nvfp4.cu: QuantizeParams
    [
        (name, np.int64)
        for name in (
            *("batch", "rows", "groups", "scale_rows", "scale_groups"),
            *("batch_stride", "row_stride", "col_stride"),
            *("block", "quarter", "row", "word", "matrix_scales"),
        )
    ]
)


@dataclass(frozen=True)
class NvFp4Config:
    """Blocks of num_threads threads, at most num_blocks on a multiprocessor, which walk through groups of
    16 numbers; each thread loads at_once of them before it goes on.  held: how many of its groups a thread
    keeps in shared memory from one pass to the other; a multiple of at_once."""

    num_threads: int = 256
    num_blocks: int = 4
    at_once: int = 1
    held: int = 0

    def shared_bytes(self, itemsize: int) -> int:
        """quantize_nvfp4.cu: HeldGroups"""
        return _VECTOR_BYTES * self.num_threads * max(1, self.held * itemsize)


@dataclass(frozen=True)
class NvFp4Task:
    """All that decides how an array is quantized.  Equal tasks have equal plans."""

    shape: tuple[int, ...]
    dtype: np.dtype
    x: Matrix  # of the array with one batch dim
    layout: str


def configs(dtype: np.dtype, arch: str) -> tuple[NvFp4Config, ...]:
    """Of inputs of `dtype`."""
    at_once = 2 if dtype.itemsize == 2 else 1
    if arch == "host":
        return (NvFp4Config(256, 1, at_once, held=2),)
    one = NvFp4Config(1024, 1, at_once)
    most = (max_shared_bytes(arch) - _STATIC_BYTES) // one.shared_bytes(1)
    if most < 8:  # vectors: little room
        return (NvFp4Config(256, 4, at_once),)
    return (replace(one, held=most // dtype.itemsize // at_once * at_once),)


def _refusal(config: NvFp4Config, task: NvFp4Task, device: Device) -> str | None:
    c, arch = config, device.arch
    if c.num_threads not in range(64, 1025, 64):
        return f"num_threads must be a multiple of 64 up to 1024; got {c.num_threads}"
    if c.num_blocks < 1:
        return f"num_blocks must be positive; got {c.num_blocks}"
    if c.at_once not in (1, 2, 4):
        return f"at_once must be 1, 2 or 4; got {c.at_once}"
    if c.held < 0 or c.held % c.at_once:
        return f"held must be a multiple of at_once; got {c.held}"
    needed, most = c.shared_bytes(task.dtype.itemsize), max_shared_bytes(arch) - _STATIC_BYTES
    if needed > most:
        return f"{needed} bytes of shared memory are more than {most}"
    return None


def _variant_of(dtype: np.dtype, config: NvFp4Config) -> Variant:
    types = (("Element", dtypes.CPP_NAMES[dtype]),)
    together = (1536 if dtype.itemsize == 2 else 1024) // config.num_threads
    blocks = max(1, min(config.num_blocks, together))
    constants = (("kAtOnce", config.at_once), ("kHeld", config.held))
    return Variant(
        "quantize_nvfp4", types, constants, config.num_threads, min_blocks=blocks, waits=True
    )


FAMILY = Family(
    "quantize_nvfp4",
    (NvFp4Config,),
    lambda task, device: configs(task.dtype, device.arch),
    _refusal,
    lambda task, config: _variant_of(task.dtype, config),
    lambda task: (
        {"size": math.prod(task.shape)},
        {"dtype": task.dtype.name, "layout": task.layout},
    ),
)


def quantize_nvfp4(x: Any, *, layout: str = "plain", config: NvFp4Config | None = None) -> NvFp4:
    """x as an NvFp4: x = code * scale * global_scale, but for rounding.

    x: float16, bfloat16 or float32 (..., rows, K), K a multiple of 16, of any strides.
    layout: of the scales, "plain" or "blocked" (`NvFp4`).
    config: an NvFp4Config; None: the default one.

    global_scale, a float32 array of shape (): the largest finite |x| over 2688 = 6 * 448, 1 where that is
    below 2^-126.  scale: the largest |x| of 16 over 6 * global_scale, NaN for a group with a NaN or an
    infinity, whose codes are 0.  All are rounded to nearest even, codes beyond 6 saturate.  (NVIDIA,
    "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, two-level scaling.)

    x is read twice; it is copied if its batch's dims do not merge to one stride.

    Raises TypeError (types, dtypes) and ValueError (shape, layout, config).  Error bound:
    `reference.quantize_nvfp4_bound`.
    """
    key, plan, places = _find(x, layout, config)
    if plan is not None:
        return plan.launch(x, places)
    target = arguments.target_of("x", x)
    dtypes.resolve(x.dtype, "x's dtype", DTYPES)
    if layout not in nvfp4.LAYOUTS:
        raise ValueError(f"layout must be 'plain' or 'blocked'; got {layout!r}")
    if x.ndim < 2 or x.shape[-1] % GROUP:
        raise ValueError(f"x must have shape (..., rows, K), K a multiple of 16; got {x.shape}")
    if config is not None:
        arguments.check_fields(config, NvFp4Config)
    xp, (*outer, rows, k) = target.xp, x.shape
    with arguments.on_device(target):
        scale_shape = nvfp4.scale_shape(x.shape, layout)
        if x.size == 0:
            data = arrays.empty_of(xp, (*outer, rows, k // 2), np.uint8)
            scale = arrays.empty_of(xp, scale_shape, dtypes.float8_e4m3fn)
            return NvFp4(data, scale, layout, xp.ones((), np.float32))
        batch = math.prod(outer)
        if batch * (rows + 127) >= 2**32:
            raise ValueError(f"x must have less than 2^32 rows; got {batch * rows}")
        # Rarely of a stride of some odd number of bytes.
        flat = (x if arrays.in_elements(x) else arrays.packed(x)).reshape(batch, rows, k)
        task = NvFp4Task(x.shape, x.dtype, matrix(flat, (batch,)), layout)
        plan = _plan(target, task, config)
        plans.remember(key if address_of(flat) == address_of(x) else None, plan)
        return plan.launch(flat, (address_of(flat),))


@plans.cached
def _plan(target: Target, task: NvFp4Task, given: NvFp4Config | None) -> _Plan:
    config, layout = FAMILY.config(task, target, given), task.layout
    *outer, rows, k = task.shape
    batch, scale_shape = math.prod(outer), nvfp4.scale_shape(task.shape, layout)
    steps = groups(task.x._replace(row=k // GROUP), k, layout == "blocked")
    params = _params(batch, rows, k, task.x, steps, math.prod(scale_shape) // batch, layout)
    threads = batch * int(params["scale_rows"] * params["scale_groups"])
    kernel = get_kernel(target, FAMILY.variant(task, config))
    shared = config.shared_bytes(task.dtype.itemsize)
    most = min(config.num_blocks * target.multiprocessors, workspace.MOST_BLOCKS)
    grid = min(-(-threads // config.num_threads), most, kernel.blocks_at_once(shared))
    shape = (*outer, rows, k // 2)
    struct = target.by_value(params)
    launch = Repeated(kernel, grid, shared, lambda *arrays: (*arrays, struct))
    xp = target.xp
    of_bytes = xp is not np and not arrays.takes_fp8(xp)
    scale_dtype = np.dtype(np.uint8) if of_bytes else _E4M3
    places = _places(shape, scale_shape)
    return _Plan(target, launch, 4 * grid, shape, scale_shape, layout, places, scale_dtype)


_find = plans.finder("quantize_nvfp4", arrays=1, options=2)


class _Plan(NamedTuple):
    """The launch of a call, as x's shape, strides and dtype and the config decide it."""

    target: Target
    repeated: Repeated
    partial_bytes: int
    shape: tuple[int, ...]
    scale_shape: tuple[int, ...]
    layout: str
    places: tuple[int, int, int]  # _places'
    scale_dtype: np.dtype  # which CuPy makes an array of

    def launch(self, x: Any, places: tuple[Any, ...]) -> NvFp4:
        """places: where x lies."""
        target = self.target
        xp = target.xp
        if xp is np:
            data = arrays.empty_of(np, self.shape, np.uint8)
            scale = arrays.empty_of(np, self.scale_shape, dtypes.float8_e4m3fn)
            global_scale = arrays.empty_of(np, (), np.float32)
            barrier = workspace.take_for_grid(target, self.partial_bytes)
            places = None
        else:  # in one piece of memory: they are used together
            first, second, size = self.places
            memory = xp.cuda.alloc(size)
            make = arrays.maker(xp)
            data = make(self.shape, np.uint8, memory)
            scale = make(self.scale_shape, self.scale_dtype, memory + first)
            if self.scale_dtype is not _E4M3:
                scale = scale.view(_E4M3)
            global_scale = make((), np.float32, memory + second)
            barrier = workspace.take_for_grid(target, self.partial_bytes)
            places = (*places, memory.ptr, barrier.data.ptr)
        self.repeated.launch_at(places, x, data, scale, global_scale, barrier)
        return NvFp4.unchecked(data, scale, self.layout, global_scale)


def _places(shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Where scales and the scale of all begin behind the codes, and the bytes of all."""
    codes, scales = (-(-math.prod(sizes) // 512) * 512 for sizes in (shape, scale_shape))
    return codes, codes + scales, codes + scales + 4


def _params(
    batch: int, rows: int, k: int, x: Any, steps: Groups, matrix_scales: int, layout: str
) -> np.ndarray:
    params = np.zeros((), _PARAMS)
    params["batch"], params["rows"], params["groups"] = batch, rows, k // GROUP
    padded = (-(-rows // 128) * 128, -(-k // 64) * 4) if layout == "blocked" else (rows, k // GROUP)
    params["scale_rows"], params["scale_groups"] = padded
    params["batch_stride"] = x.batch_strides[0]
    params["row_stride"], params["col_stride"] = x.row, x.col
    for name in ("block", "quarter", "row", "word"):
        params[name] = getattr(steps, name)
    params["matrix_scales"] = matrix_scales
    return params


# --- the op's record -----------------------------------------------------------------------------


@dataclass(frozen=True)
class NvFp4Problem:
    """One call, without its numbers.  memory: inputs.LAYOUTS."""

    shape: tuple[int, ...]
    dtype: str = "float16"
    layout: str = "plain"
    kind: str = "normal"
    memory: str = "C"

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dtype}, {self.layout}"


def _draw_problem(draw: Draw) -> NvFp4Problem:
    outer = draw.choice(((), (), (3,), (2, 3)))
    return NvFp4Problem(
        shape=(*outer, draw.choice((0, 1, 5, 32, 129)), draw.choice((0, 16, 48, 64, 80, 272))),
        dtype=draw.choice(OP.dtypes),
        layout=draw.choice(nvfp4.LAYOUTS),
        kind=draw.choice(inputs.KINDS),
        memory=draw.choice(("C", "C", *inputs.LAYOUTS)),
    )


def _bench_problem(shape: tuple[int, ...], dtype: str) -> NvFp4Problem:
    if len(shape) < 2 or shape[-1] % GROUP:
        raise ValueError(f"quantize_nvfp4 needs a shape (..., rows, K), K % 16 = 0; got {shape}")
    dtypes.resolve(dtype, "dtype", DTYPES)
    return NvFp4Problem(shape, dtype, "blocked", "bench")


def _bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    return ((1024, 1024),) if target == "host" else ((4096, 4096), (16384, 16384))


def _inputs(problem: NvFp4Problem, seed: int, xp: Any) -> Call:
    p, dtype = problem, dtypes.NAMES[problem.dtype]
    if p.kind == "bench":
        x = inputs.bench_values(p.shape, dtype, seed, xp)
    else:
        x = inputs.with_layout(inputs.values(p.kind, p.shape, dtype, seed), p.memory, xp)
    return Call((x,), {"layout": p.layout})


def _work(problem: NvFp4Problem) -> Work:
    size = math.prod(problem.shape)
    scales = math.prod(nvfp4.scale_shape(problem.shape, problem.layout))
    return Work(size * dtypes.NAMES[problem.dtype].itemsize, size // 2 + scales + 4)


def _sample(
    call: Call, outputs: tuple[Any, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Any, ...]]:
    """Some rows of one matrix, among them that with the largest number: it decides about every scale.

    outputs: NvFp4.outputs', which stand in plain order.
    """
    x = call.args[0]
    rows = inputs.sample_rows(x, max_elements, seed) if x.ndim == 2 and x.size else None
    if rows is None:
        return call, outputs
    y = as_float64(x)
    xp = namespace(y)
    largest = xp.argmax(xp.where(xp.isfinite(y), xp.abs(y), 0))
    rows = np.union1d(rows, int(largest) // x.shape[1])
    part = tuple(inputs.take_rows(y, rows) if y.ndim else y for y in outputs)
    return Call((inputs.take_rows(x, rows),), call.kwargs), part


OP = Op(
    name="quantize_nvfp4",
    run=quantize_nvfp4,
    reference=reference.quantize_nvfp4,
    bound=reference.quantize_nvfp4_bound,
    draw_problem=_draw_problem,
    bench_problem=_bench_problem,
    bench_shapes=_bench_shapes,
    inputs=_inputs,
    work=_work,
    variants=lambda arch: tuple(
        _variant_of(x, config) for x in DTYPES for config in configs(x, arch)
    ),
    configs=lambda problem, arch: configs(dtypes.NAMES[problem.dtype], arch),
    variant=lambda problem, config: _variant_of(dtypes.NAMES[problem.dtype], config),
    sample=_sample,
)
