"""Configs that callers give: what does not fit is refused with its reason, all else is right."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import cupykern
from cupykern import check, dtypes, inputs
from cupykern.op import as_tuple
from cupykern.ops.problems.norm import NormProblem
from cupykern.ops.softmax import SoftmaxProblem
from cupykern.rows.configs import Rows, SharedRows, row_traits
from cupykern.rows.nonfinite_walk import NonfiniteConfig
from cupykern.rows.norm_configs import (
    NormRegisterRows,
    NormRows,
    NormSharedRows,
    PersistentRows,
)
from cupykern.rows.norm_heuristic import norm_configs_of
from cupykern.rows.norm_plan import norm_variant
from cupykern.rows.quantize_columns import SharedColumns
from cupykern.rows.quantize_rows import EvenRows
from cupykern.rows.quantize_tiles import GlobalTiles, RegisterTiles
from cupykern.rows.row_layout import Operand, RowLayout, contiguous_operand, row_layout
from cupykern.rows.rows import set_cache_hints
from cupykern.rows.softmax_configs import RegisterRows
from cupykern.rows.softmax_heuristic import softmax_configs_of
from cupykern.targets import offline

X = inputs.values("normal", (37, 200), np.dtype(np.float16), 1)
ACROSS = np.asfortranarray(X)  # softmax over the last axis: neighbouring rows are neighbours
GOOD = SharedRows(64, 32, 8, 1)
OPS = {op.name: op for op in cupykern.OPS}


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"num_threads": 0}, "positive"),
        ({"num_threads": 2048}, "at most 1024"),
        ({"threads_per_row": 128}, "multiple of threads_per_row"),
        ({"num_threads": 96, "threads_per_row": 48}, "powers of two"),
        ({"vectors_per_thread": -1}, "positive"),
        ({"vector_width": 4}, "vector_width must be 8"),
        ({"threads_per_row": 16}, "128 elements are fewer than a row's 200"),
        ({"cluster_size": 2}, "share one row"),
        ({"cluster_size": 32, "threads_per_row": 64}, "up to 16 blocks"),
        ({"cluster_size": 2, "threads_per_row": 64, "chunked": True}, "not for clusters"),
        ({"lanes_across_rows": True}, "lanes_across_rows must be False"),
        ({"vectors_per_thread": 512}, "shared memory"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_with_the_reason(changes, says):
    with pytest.raises(ValueError, match=f"config does not fit: .*{says}"):
        cupykern.softmax(X, config=replace(GOOD, **changes))


def test_even_rows_are_of_calls_without_options():
    for name in ("softmax", "log_softmax"):
        with pytest.raises(ValueError, match="RegisterRows is for calls without options"):
            getattr(cupykern, name)(X, scale=-0.5, config=RegisterRows(64, 32, 8, 1))
    for family in (NormRegisterRows, NormSharedRows):
        with pytest.raises(ValueError, match="is for calls without options"):
            cupykern.layer_norm(X, compensated=True, config=family(64, 32, 8, 1))


@pytest.mark.parametrize(
    "name, config",
    [
        ("softmax", NormRegisterRows(64, 32, 8, 1)),
        ("layer_norm", RegisterRows(64, 32, 8, 1)),
        ("rms_norm", EvenRows(64, 32, 8, 1)),
    ],
)
def test_configs_of_another_op_are_refused(name, config):
    with pytest.raises(TypeError, match=f"got {type(config).__name__}"):
        getattr(cupykern, name)(X, config=config)


def test_more_rows_than_a_warp_has_lanes():
    with pytest.raises(ValueError, match="up to 32 neighbouring rows; got 64"):
        cupykern.softmax(ACROSS, config=SharedRows(512, 8, 1, 32, lanes_across_rows=True))


@pytest.mark.parametrize(
    "name, x, config",
    [
        ("softmax", X, GOOD),
        ("softmax", ACROSS, SharedRows(64, 8, 1, 32, lanes_across_rows=True)),
        ("rms_norm", X, GOOD),
    ],
)
def test_a_config_of_ones_own(name, x, config):
    op = OPS[name]
    references = op.reference(x)
    bounds = op.bound(x, reference=references)
    assert check.compare(as_tuple(op.run(x, config=config)), references, bounds).ok


@pytest.mark.parametrize("config", [GOOD, replace(GOOD, threads_per_row=16, chunked=True), "even"])
@pytest.mark.parametrize(
    "name, options",
    [
        *((name, {}) for name in ("softmax", "layer_norm", "rms_norm")),
        ("quantize", {"granularity": "row"}),
        *((name, {"residual": X[::-1].copy()}) for name in ("layer_norm", "rms_norm")),
    ],
)
def test_variants_that_calls_of_several_kinds_share(name, options, config):
    op, args = OPS[name], (X, "int8") if name == "quantize" else (X,)
    if config == "even":
        family = {"softmax": RegisterRows, "quantize": EvenRows}.get(name, NormSharedRows)
        config = family(64, 32, 8, 1)
        if family is NormSharedRows:
            config = replace(config, generic=True)
    references = op.reference(*args, **options)
    bounds = op.bound(*args, **options, reference=references)
    outputs = as_tuple(op.run(*args, **options, config=config))
    assert check.compare(outputs, references, bounds).ok


def test_tuned_configs_of_other_vectors_or_options_have_other_keys():
    """A config for vectors of 8 is illegal for vectors of 2, and options have other kernels."""
    layout = RowLayout(
        *(8, 1000, (), (1, 1)), vectors=True, max_head=0, lanes_across_rows=False, even=True,
        contiguous=True, width=8,
    )  # fmt: skip
    dtype = np.dtype(np.float16)
    traits = [
        row_traits(layout, dtype, False),
        row_traits(replace(layout, width=2, even=False), dtype, False),
        row_traits(layout, dtype, True),
    ]
    assert traits[0] == row_traits(layout, dtype, False)
    assert all(traits.count(x) == 1 for x in traits)


def test_tiles_and_nonfinite_reports():
    q, scale = cupykern.quantize(X, "int8", granularity="block", block=(1, 32))
    again = cupykern.quantize(
        *(X, "int8"), granularity="block", block=(1, 32), config=GlobalTiles(128, 16, 8)
    )
    assert (q == again[0]).all() and (scale == again[1]).all()
    held = RegisterTiles(128, 4, 8, 1)
    again = cupykern.quantize(X, "int8", granularity="block", block=(1, 32), config=held)
    assert (q == again[0]).all() and (scale == again[1]).all()
    for block, says in (((3, 32), "fewer than a tile's 12"), ((1, 20), "vector_width must be 1")):
        with pytest.raises(ValueError, match=says):
            cupykern.quantize(X, "int8", granularity="block", block=block, config=held)
    scalar = RegisterTiles(128, 4, 1, 1)
    with pytest.raises(ValueError, match="rows of aligned vectors"):
        cupykern.quantize(X[:, :60], "int8", granularity="block", block=(1, 32), config=scalar)
    for config, says in (
        (GlobalTiles(128, 16, 4), "vector_width"),
        (GlobalTiles(96, 16, 8), "powers of two"),
        (GlobalTiles(32, 64, 8), "multiple"),
        (GlobalTiles(16, 16, 8), "num_threads must be 32 to 1024"),
        (GlobalTiles(128, 0, 8), "positive"),
        (RegisterTiles(128, 2, 8, 2), "must divide threads_per_tile"),
        (RegisterTiles(128, 4, 8, 17), "vectors_per_thread must be at most 16"),
    ):
        with pytest.raises(ValueError, match=says):
            cupykern.quantize(X, "int8", granularity="block", block=(1, 32), config=config)
    columns = SharedColumns(256, 32, 8, 16)
    with pytest.raises(TypeError, match="got SharedColumns"):
        cupykern.quantize(X, "int8", granularity="block", block=(1, 32), config=columns)
    with pytest.raises(ValueError, match="columns of matrices in C order"):
        cupykern.quantize(ACROSS, "int8", granularity="column", config=columns)
    op = OPS["nonfinite_report"]
    references = op.reference(X)
    bounds = op.bound(X, reference=references)
    outputs = op.run(X, config=NonfiniteConfig(128, 4, 8, True, 2))
    assert check.compare(outputs, references, bounds).ok
    for config in (NonfiniteConfig(100, 4, 8, True, 2), NonfiniteConfig(128, 4, 4, True, 2)):
        with pytest.raises(ValueError, match="config does not fit"):
            cupykern.nonfinite_report(X, config=config)


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "rms_norm", "nonfinite_report"])
@pytest.mark.parametrize("config", ["fast", 3, {}])
def test_what_is_no_config(name, config):
    with pytest.raises(TypeError):
        getattr(cupykern, name)(X, config=config)


def _places(num_rows: int, num_cols: int, itemsize: int):
    """Rows as they lie: contiguous, at odd strides, off a vector, with strided columns, across."""
    n = num_cols * itemsize
    yield Operand((n, itemsize), 0, itemsize)
    yield Operand((n + itemsize, itemsize), 0, itemsize)
    yield Operand((n, itemsize), itemsize, itemsize)
    yield Operand((2 * n, 2 * itemsize), 0, itemsize)
    yield Operand((itemsize, num_rows * itemsize), 0, itemsize)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a", "gfx942", "gfx1201"])
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "rms_norm"])
def test_every_variant_is_some_rows_choice(name, arch):
    """Where nothing is measured none is kept for sweeps alone."""
    chosen = set()
    centered = name == "layer_norm"
    lengths = [length for n in range(20) for length in (2**n, 3 * 2**n, 2**n + 1)]
    for dtype in map(dtypes.NAMES.get, ("float16", "float32")):
        size = dtype.itemsize
        for num_cols, has_options in itertools.product(lengths, (False, True)):
            for place in _places(4096, num_cols, size):
                if name == "softmax":
                    layout = row_layout((4096, num_cols), 1, (place,) * 3, (1,))
                    config = softmax_configs_of(Rows(arch, size, layout, has_options))[0]
                    problem = OPS[name].bench_problem((4, 4), dtype.name)
                    chosen.add(OPS[name].variant(problem, config))
                    continue
                layout = row_layout((4096, num_cols), 1, (place,) * 5, (1, 2, 3))
                if layout.lanes_across_rows:  # copied
                    continue
                for held, quantized in ((1, False), (2, False), (1, True))[: 2 if centered else 3]:
                    rows = NormRows(arch, size, layout, has_options, held, centered, quantized)
                    config = norm_configs_of(rows)[0]
                    chosen.add(norm_variant(dtype, centered, config, quantized, held == 2))
    listed = set(OPS[name].variants(arch))
    assert {v for v in listed if ("Element", "bf16") not in v.types} <= chosen <= listed


@pytest.mark.parametrize("shape, whole", [((64, 256), 1), ((63, 256), 0), ((64, 248), 0)])
def test_rows_of_whole_tiles_are_unpredicated(shape, whole):
    layout = row_layout(shape, 1, (contiguous_operand(shape, 2),) * 3, (1,))
    assert GOOD.is_unpredicated(layout) == whole


@pytest.mark.parametrize(
    "megabytes, loads, stores_from",
    [(47, 0, 47), (48, 0, 0), (95, 0, 47), (96, 1, 48), (4096, 1, 4048)],
)
def test_what_is_evicted_last(megabytes, loads, stores_from):
    """Rows of one MB."""
    layout = row_layout(
        (megabytes, 2**18), 1, (contiguous_operand((megabytes, 2**18), 4),) * 2, (1,)
    )
    params = np.zeros((), [("loads_last", np.int32), ("stores_last_from", np.int64)])
    set_cache_hints(params, layout, 4, 4)
    assert params.item() == (loads, stores_from)


def test_persistent_rows_have_no_more_stages_than_the_kernel_counts():
    """row_stream.cuh: kMaxRows rows on their way, however much shared memory there is."""
    config = PersistentRows(128, 8, 1)
    assert config.num_stages("sm_90a", 2048) == 6
    assert replace(config, vectors_per_thread=4).num_stages("sm_90a", 2048) == 24
    assert replace(config, stages=4).num_stages("sm_90a", 2048) == 4
    assert config.num_stages("sm_90a", 100 * 1024) == 2


@pytest.mark.parametrize("vectors", [16, 18])
def test_scalars_of_a_thread_stay_in_its_memory(vectors):
    """Loads are in batches of eight."""
    x, residual = (
        inputs.values("normal", (3, 8180), np.dtype(np.float32), seed)[:, ::-1] for seed in (1, 2)
    )
    op, kwargs = OPS["add_rms_norm"], {"residual": residual}
    y = op.run(x, **kwargs, config=SharedRows(512, 512, 1, vectors))
    references = op.reference(x, **kwargs)
    assert check.compare(y, references, op.bound(x, **kwargs, reference=references)).ok


@pytest.mark.compile
@pytest.mark.parametrize(("num_cols", "dtype"), [(256, "bfloat16"), (5376, "float32")])
def test_kernels_made_for_a_row_length_do_not_spill(num_cols, dtype):
    """The blocks per SM that cap their registers are estimated, not listed."""
    shape = 2**15, num_cols
    problems = [("softmax", SoftmaxProblem(shape, dtype=dtype, scale=s)) for s in (None, 0.5)]
    problems += [
        (name, NormProblem(shape, dtype, weight_dtype=dtype, bias_dtype=bias, residual=residual))
        for name, bias in (("rms_norm", None), ("layer_norm", dtype))
        for residual in (False, True)
    ]
    problems += [("rms_norm", NormProblem(shape, dtype, weight_dtype=dtype, quantize="e4m3"))]
    for name, problem in problems:
        config = OPS[name].configs(problem, "sm_90a")[0]
        usage = offline.compile_offline(OPS[name].variant(problem, config), "sm_90a")
        assert usage.local_bytes == 0, (problem, config)
