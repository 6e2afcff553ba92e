"""Planted faults: one-line mutations of the kernels, each of which a check must catch."""

from __future__ import annotations

import mmap
import multiprocessing
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import kernels_cu
from cupykern import check, inputs, jit
from cupykern import softmax as softmax_function
from cupykern.softmax import LOG_OP, OP, SoftmaxProblem, _plan, _run
from cupykern.targets import host

FAULTS = {
    # name: (file, old, new, the check that catches it first)
    "no barrier between warps": ("parts/row.cuh", "        sync_block();\n", "\n", "axis"),
    "no barrier between blocks": (
        "parts/row.cuh",
        "        cluster_arrive();\n        cluster_wait();\n",
        "\n",
        "configs",
    ),
    "no wait for the copies": ("parts/row.cuh", "copy_async_wait<0>();", ";", "short rows"),
    "wait for all copies but one": (
        "parts/row.cuh",
        "copy_async_wait<0>()",
        "copy_async_wait<1>()",
        "short rows",
    ),
    "vector past the row's end": (
        "parts/row.cuh",
        "position + kVectorWidth <= high;",
        "position + kVectorWidth <= high + 1;",
        "short rows",
    ),
    "one element too many": (
        "parts/row.cuh",
        "position >= low && position < high;",
        "position >= low && position <= high;",
        "short rows",
    ),
    "head ignored": ("parts/row.cuh", "c.low = chunk == 0 ? head : 0;", "c.low = 0;", "short rows"),
    "chunks overlap": (
        "parts/row.cuh",
        "c.first_col = chunk * kChunk - head;",
        "c.first_col = chunk * (kChunk - 1) - head;",
        "configs",
    ),
    "rows past the end": (
        "parts/row.cuh",
        "c.live = row < num_rows;",
        "c.live = true;",
        "short rows",
    ),
    "32-bit row offset": (
        "parts/row.cuh",
        "return row * layout.outer_strides[operand][0];",
        "return int(row * layout.outer_strides[operand][0]);",
        "a crash",
    ),
    "outer dims in the wrong order": (
        "parts/row.cuh",
        "offset += int64_t(rest - next * size)",
        "offset += int64_t(next)",
        "axis",
    ),
    "half a butterfly": (
        "parts/row.cuh",
        "bit < kLastLaneBit; bit *= 2",
        "bit < kLastLaneBit / 2; bit *= 2",
        "below zero",
    ),
    "a warp's partial in another's place": (
        "parts/row.cuh",
        "by_warp[t.row_in_block][warp] = mine;",
        "by_warp[t.row_in_block][warp ^ (kWarpsPerRow - 1) & 1 & ~warp] = mine;",
        "warps",
    ),
    "a block's partial in the first slot": (
        "parts/row.cuh",
        "&by_block[t.row_in_block][t.rank]",
        "&by_block[t.row_in_block][0]",
        "configs",
    ),
    "identity 0 for the maximum": (
        "softmax.cu",
        "larger.fill(from_float<Element>(-kInfinity));",
        "larger.fill(from_float<Element>(0.0f));",
        "masks",
    ),
    "fill of the wrong sign": (
        "softmax.cu",
        "from_float<Element>(-sign * kInfinity)",
        "from_float<Element>(-kInfinity)",
        "below zero",
    ),
    "no rescaling of partial sums": (
        "parts/max_sum.cuh",
        "float sum = mine.sum * rescale(mine.max, max);",
        "float sum = mine.sum;",
        "warps",
    ),
    "chunks merged without rescaling": (
        "parts/max_sum.cuh",
        "a.sum * rescale(a.max, max) + b.sum",
        "a.sum + b.sum",
        "axis",
    ),
    "the scale before the subtraction": (
        "softmax.cu",
        "part += exp2_approx((x[j] - x_max) * exponent_scale);",
        "part += exp2_approx(x[j] * exponent_scale - x_max * exponent_scale);",
        "special",
    ),
    "log2 e left out": (
        "softmax.cu",
        "exponent_scale(scale * kLog2E)",
        "exponent_scale(scale)",
        "short rows",
    ),
    "the mask inverted": ("softmax.cu", "keep.element(j) != 0", "keep.element(j) == 0", "masks"),
    "the mask's stride ignored": (
        "softmax.cu",
        "mask[(position + j) * stride] != 0",
        "mask[position + j] != 0",
        "masks",
    ),
    "a hidden row is NaN": ("softmax.cu", "if (total.max == -kInfinity) return;", "", "masks"),
    "NaN is swallowed": (
        "softmax.cu",
        "factor = 1.0f / total.sum;",
        "factor = 1.0f / maximum(total.sum, 1.0f);",
        "special",
    ),
    "16-bit outputs swapped": (
        "softmax.cu",
        "params.dtype == kHalf",
        "params.dtype == kBf16",
        "below zero",
    ),
    "the logarithm of the reciprocal": (
        "softmax.cu",
        "log_accurate(total.sum)",
        "-log_accurate(total.sum)",
        "short rows",
    ),
    "the last chunk not merged": (
        "parts/row.cuh",
        "live && i < task.num_chunks;",
        "live && i < task.num_chunks - 1;",
        "configs",
    ),
}


def _forget() -> None:
    for cached in vars(kernels_cu).values():
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    jit.clear()
    _plan.cache_clear()


@contextmanager
def planted(file: str, old: str, new: str, tmp_path_factory) -> Iterator[None]:
    """Within the block, kernels are compiled from a copy of kernels_cu with one line changed."""
    root = tmp_path_factory.mktemp("kernels") / "kernels_cu"
    shutil.copytree(kernels_cu.ROOT, root)
    text = (root / file).read_text()
    assert old in text, f"{file} no longer has {old!r}"
    (root / file).write_text(text.replace(old, new))
    before = kernels_cu.ROOT
    kernels_cu.ROOT = root
    _forget()
    try:
        yield
    finally:
        kernels_cu.ROOT = before
        _forget()


def _problems() -> Iterator[tuple[str, object, SoftmaxProblem]]:
    for op in (OP, LOG_OP):
        yield "short rows", op, SoftmaxProblem((7, 9), dtype="float32", kind="same_sign")
        yield "short rows", op, SoftmaxProblem((70, 13), dtype="float16", kind="wide")
        yield "below zero", op, SoftmaxProblem((3, 1000), dtype="bfloat16", scale=-3.5)
        yield "warps", op, SoftmaxProblem((5, 4001), dtype="float16", layout="offset")
        yield "axis", op, SoftmaxProblem((2, 45, 3, 6), axis=1, dtype="float32")
        yield "axis", op, SoftmaxProblem((6, 5, 4, 33), axis=1, dtype="bfloat16", layout="sliced")
        yield "masks", op, SoftmaxProblem((6, 100), dtype="float32", mask_shape=(6, 100))
        yield "masks", op, SoftmaxProblem((6, 8, 33), axis=1, dtype="float16", mask_shape=(8, 1))
        yield "masks", op, SoftmaxProblem((9, 3), dtype="float32", mask_shape=(9, 1))
        yield "special", op, SoftmaxProblem((40, 8), dtype="float32", kind="special")
        yield "output dtypes", op, SoftmaxProblem((4, 64), dtype="float32", out_dtype="float16")
        yield "output dtypes", op, SoftmaxProblem((4, 64), dtype="float16", out_dtype="bfloat16")


def _check_configs() -> None:
    """Rows in clusters and in chunks, of which the first and the last hold the largest numbers."""
    x = inputs.values("normal", (2, 40_003), OP_DTYPE, 1)
    x[:, :64] += 9
    x[:, -64:] += 12
    problem = SoftmaxProblem(x.shape, dtype="float32")
    for config in OP.configs(problem, "host"):
        y = _run(x, -1, None, None, None, None, False, config)
        references = OP.reference(x)
        bounds = OP.bound(x, reference=references)
        comparison = check.compare((y,), references, bounds)
        assert comparison.ok, f"{config}: {comparison}"


OP_DTYPE = np.dtype(np.float32)


def _check_large_numbers() -> None:
    y = softmax_function(np.array([[3e38, -3e38, 3e38]], np.float32), scale=1.125)
    assert np.isfinite(y).all(), "a NaN from large numbers"


def _check_large_offsets() -> None:
    gap, flags = 2**31 + 8, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    maps = [mmap.mmap(-1, 2 * (2 * gap + 100), flags=flags) for _ in range(2)]
    x, y = (
        np.lib.stride_tricks.as_strided(np.frombuffer(m, np.float16), (3, 100), (2 * gap, 2))
        for m in maps
    )
    x[...] = np.arange(300).reshape(3, 100) % 7
    softmax_function(x, out=y)
    references = OP.reference(x)
    assert check.compare((y,), references, OP.bound(x, reference=references)).ok


def first_failure() -> str | None:
    """The name of the first check that fails, or None."""
    for schedule, warp_size in (("fifo", 32), ("sticky:1", 32), ("lifo", 64)):
        with host.use(schedule=schedule, warp_size=warp_size) as target:
            for name, op, problem in _problems():
                try:
                    ok = check.check_problem(op, problem, 1, target.xp).ok
                except (host.HostKernelError, check.Violation):
                    ok = False
                if not ok:
                    return name
            for test in (_check_configs, _check_large_numbers, _check_large_offsets):
                try:
                    test()
                except (AssertionError, host.HostKernelError):
                    return test.__name__.removeprefix("_check_")
    return None


def test_nothing_fails_without_a_fault():
    assert first_failure() is None


def _child(fault: tuple[str, ...], tmp_path_factory, results) -> None:
    with planted(*fault[:3], tmp_path_factory):
        results.put(first_failure() or "")


@pytest.mark.faults
@pytest.mark.parametrize("name", FAULTS)
def test_caught(name, tmp_path_factory):
    # In a process of its own, which a wild access may kill.
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=_child, args=(FAULTS[name], tmp_path_factory, results))
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode is None or process.exitcode <= 0, "the check itself failed"
    caught = results.get() if process.exitcode == 0 else "a crash"
    assert caught == FAULTS[name][3], f"{name!r} is caught by {caught or 'no check'}"
