"""What matmul alone promises: sizes and layouts, numbers, epilogues, out."""

from __future__ import annotations

import mmap
from dataclasses import replace

import needs
import numpy as np
import pytest
from products import (
    FP8,
    MATMUL,
    SIXTEEN,
    array,
    check_problem,
    compare,
    random,
    to_numpy,
)

import cupykern
from cupykern import OPS, check, dtypes, inputs
from cupykern.gemm import gemm
from cupykern.gemm.fma_config import FmaGemmConfig
from cupykern.gemm.gemm import GemmConfig
from cupykern.gemm.gemm_task import GemmTask
from cupykern.gemm.product import ACTIVATIONS, K_MAJOR, MN_MAJOR, STRIDED
from cupykern.numerics import finfo
from cupykern.ops.problems.products import PAIRS, MatmulProblem, task_of, with_layout
from cupykern.targets import host

# --- sizes, layouts, dtypes ----------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "dtype_b"), PAIRS)
def test_every_config_of_every_pair_is_within_the_bound(target, dtype, dtype_b, exhaustive):
    """Tails in all three sizes; vectors of both orders and element by element; split k.  Of the
    configs but the first, layouts have every second in turn."""
    seen = {}
    layouts = ("C", "C", 16), ("C", "F", 16), ("F", "C", 16), ("C", "C", 1)
    for number, (layout_a, layout_b, pad) in enumerate(layouts):
        problem = MatmulProblem(70, 150, 272 if pad == 16 else 261, dtype, dtype_b,
                                layout_a=layout_a, layout_b=layout_b, kind="same_sign")  # fmt: skip
        if pad == 16:  # aligned columns and rows, and a tail
            problem = replace(problem, m=80, n=144)
        task = task_of(problem)
        for i, config in enumerate(gemm.configs(task, target.arch)):
            variant = gemm.variant(task, config)
            if variant in seen or not isinstance(config, (GemmConfig, FmaGemmConfig)):
                continue
            if i and (i + number) % 2 and not exhaustive:
                continue
            seen[variant] = config
            call = MATMUL.inputs(problem, 1, target.xp)
            config = replace(config, splits=1 + len(seen) % 3)
            comparison = compare(MATMUL, *call.args, config=config)
            assert comparison.ok, f"{problem!r} {config}: {comparison}"
    # Or one with scalar loads of the operands of all layouts.
    assert len(seen) > 1 or ("kLayoutA", STRIDED) in next(iter(seen)).constants


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
@pytest.mark.parametrize("m", [1, 15, 16, 17, 65])
@pytest.mark.parametrize("n", [1, 9, 130])
def test_sizes_that_do_not_divide_by_tiles_are_within_the_bound(target, m, n, dtype):
    for k in (1, 8, 63, 130):
        check_problem(MATMUL, MatmulProblem(m, n, k, dtype, kind="same_sign"), target)


@pytest.mark.parametrize("layout_b", ["C", "F"])
@pytest.mark.parametrize(("dtype", "dtype_b"), PAIRS)
def test_what_lies_behind_rows_is_not_read(target, dtype, dtype_b, layout_b):
    """Rows at multiples of 16 bytes with something else behind each: NaN, or the largest number."""
    a = padded(random(target, (19, 37), dtype, 1), target)
    b = random(target, (37, 29), dtype_b or dtype, 2)
    b = padded(b, target) if layout_b == "C" else padded(bytes_of(b).T, target).T
    assert compare(MATMUL, a, b).ok


def bytes_of(x):
    """x as a numpy array, FP8 too, which CuPy cannot copy."""
    return x if isinstance(x, np.ndarray) else x.view(np.uint8).get().view(x.dtype)


def padded(x, target):
    """x as a view of a larger array, whose other bytes are 0x7F."""
    frame = np.full((x.shape[0] + 2, x.shape[1] // 64 * 64 + 64), 0, x.dtype)
    frame.view(np.uint8)[...] = 0x7F
    frame[: x.shape[0], : x.shape[1]] = bytes_of(x)
    return with_layout(frame, "C", target.xp)[: x.shape[0], : x.shape[1]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", *FP8])
def test_a_k_of_zero_gives_the_epilogue_of_zeros(target, dtype):
    xp = target.xp
    a, b = array(target, np.zeros((3, 0)), dtype), array(target, np.zeros((0, 5)), dtype)
    assert (to_numpy(cupykern.matmul(a, b)) == 0).all()
    bias = xp.arange(5, dtype=np.float32)
    y = to_numpy(cupykern.matmul(a, b, bias=bias, residual=xp.ones((3, 5), np.float32)))
    np.testing.assert_array_equal(y, np.tile(np.arange(5) + 1.0, (3, 1)))


@pytest.mark.parametrize(
    ("m", "n", "batch"), [(0, 5, ()), (5, 0, ()), (3, 3, (0,)), (3, 3, (2, 0))]
)
def test_empty_arrays_give_empty_results(target, m, n, batch):
    a = target.xp.ones((*batch, m, 4), np.float16)
    b = target.xp.ones((4, n), np.float16)
    assert cupykern.matmul(a, b).shape == (*batch, m, n)


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_batch_dims_broadcast(target, dtype):
    for batch_a, batch_b in (
        ((3,), ()),
        ((), (3,)),
        ((2, 1), (3,)),
        ((1, 3), (2, 1)),
        ((2, 1, 2), (1, 3, 1)),
    ):
        problem = MatmulProblem(5, 9, 24, dtype, None, batch_a, batch_b, bias=(9,))
        check_problem(MATMUL, problem, target)


def test_batch_dims_need_not_merge(target):
    xp = target.xp
    shape = (2, 2, 2, 2, 2, 3, 8)
    a = xp.asarray(inputs.values("normal", tuple(2 * n for n in shape), dtypes.float16, 1))
    a = a[tuple(slice(None, None, 2) for _ in shape)]
    b = xp.asarray(inputs.values("normal", (8, 5), dtypes.float16, 2))
    assert compare(MATMUL, a, b).ok


@pytest.mark.parametrize(
    ("dtype", "dtype_b"), [("float16", None), ("bfloat16", "float8_e4m3fn"), ("int8", None)]
)
def test_operands_may_have_any_strides(target, dtype, dtype_b):
    """Sliced, reversed, offset, broadcast and transposed operands are read as they lie."""
    for layout_a in inputs.LAYOUTS:
        for layout_b in inputs.LAYOUTS:
            problem = MatmulProblem(
                17, 24, 40, dtype, dtype_b, layout_a=layout_a, layout_b=layout_b
            )
            check_problem(MATMUL, problem, target)


def test_strides_need_not_be_multiples_of_the_itemsize():
    packed = np.zeros((6, 8), np.dtype([("byte", np.uint8), ("x", np.float16)]))
    packed["x"] = inputs.values("normal", (6, 8), dtypes.float16, 1)
    b = inputs.values("normal", (8, 5), dtypes.float16, 2)
    assert packed["x"].strides[1] % 2
    assert compare(MATMUL, packed["x"], b).ok
    out = np.zeros((6, 5), packed.dtype)
    cupykern.matmul(packed["x"], b, out=out["x"])
    assert compare(MATMUL, packed["x"], b, outputs=out["x"]).ok and not out["byte"].any()


def test_arrays_may_have_more_than_two_to_the_31_elements():
    """Offsets of rows, columns, batches and outputs need 64 bits."""
    gap, flags = 2**31 + 16, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE

    def far(shape):
        memory = np.frombuffer(mmap.mmap(-1, 2 * (2 * gap + 200), flags=flags), np.float16)
        return np.lib.stride_tricks.as_strided(memory, shape, (2 * gap, 2))

    a, out = far((3, 32)), far((3, 8))
    a[...] = inputs.values("normal", (3, 32), dtypes.float16, 1)
    b = inputs.values("normal", (32, 8), dtypes.float16, 2)
    cupykern.matmul(a, b, out=out)
    assert compare(MATMUL, a, b, outputs=out).ok
    b = far((3, 32)).T
    b[...] = inputs.values("normal", (32, 3), dtypes.float16, 2)
    assert compare(MATMUL, a, b).ok
    batch = far((3, 64)).reshape(3, 2, 32)
    batch[...] = inputs.values("normal", (3, 2, 32), dtypes.float16, 3)
    assert batch.strides[0] == 2 * gap and compare(MATMUL, batch, b).ok


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["C", "F"])
@pytest.mark.parametrize("dtype_b", [*FP8, "int8"])
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_every_code_converts_exactly(target, dtype, dtype_b, layout):
    """The identity times every code, as the narrow operand of a mixed product."""
    codes = np.arange(256, dtype=np.uint8).view(dtypes.NAMES[dtype_b])
    finite = np.isfinite(codes.astype(np.float64))
    b = np.zeros((16, 256), codes.dtype)
    b[3] = codes
    a = np.zeros((16, 16), np.float32)
    a[5, 3] = 1
    x, y = array(target, a, dtype), with_layout(b, layout, target.xp)
    product = to_numpy(cupykern.matmul(x, y, out_dtype="float32"))
    np.testing.assert_array_equal(product[5, finite], codes.astype(np.float64)[finite])
    if not finite.all():
        with np.errstate(invalid="ignore"):
            expected = np.where(
                np.isnan(codes.astype(np.float64)), np.nan, codes.astype(np.float64)
            )
        np.testing.assert_array_equal(product[5, ~finite], expected[~finite])


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("dtype_b", FP8)
def test_products_of_all_fp8_codes_are_exact(target, dtype, dtype_b):
    codes = np.arange(256, dtype=np.uint8)
    a, b = np.zeros((256, 16), np.uint8), np.zeros((16, 256), np.uint8)
    a, b = a.view(dtypes.NAMES[dtype]), b.view(dtypes.NAMES[dtype_b])
    a[:, 7], b[7] = codes.view(a.dtype), codes.view(b.dtype)
    x, y = with_layout(a, "C", target.xp), with_layout(b, "F", target.xp)
    for config in gemm.configs(
        GemmTask(1, 256, 256, 16, a.dtype, b.dtype, K_MAJOR, K_MAJOR, epilogue="general"),
        target.arch,
    ):
        if isinstance(config, GemmConfig):
            config = replace(config, splits=1)
        elif target.warp_size != 32:
            continue
        product = to_numpy(cupykern.matmul(x, y, out_dtype="float32", config=config))
        with np.errstate(all="ignore"):
            expected = a.astype(np.float64) @ b.astype(np.float64)
        np.testing.assert_array_equal(product, expected)


def integers(rng, shape, dtype: str, largest: int) -> np.ndarray:
    return rng.integers(-largest, largest + 1, shape).astype(dtypes.NAMES[dtype])


EXACT = {  # largest magnitudes such that sum |a b| < 2^24 (FP8: 2^13 per 128 of k)
    ("float16", None): (100, 100), ("bfloat16", None): (100, 100), ("float32", None): (100, 100),
    ("int8", None): (127, 127), ("float16", "float8_e4m3fn"): (200, 16),
    ("bfloat16", "int8"): (90, 127),
    ("float16", "int8"): (90, 127), ("float16", "float8_e5m2"): (200, 8),
    ("float8_e4m3fn", None): (8, 8), ("float8_e5m2", "float8_e4m3fn"): (8, 8),
}  # fmt: skip


@pytest.mark.parametrize("pair", EXACT, ids=lambda pair: f"{pair[0]} x {pair[1] or pair[0]}")
def test_integers_are_exact(target, pair):
    """Random shapes, layouts, batches and splits, bit-equal to int64 arithmetic: 1,000 on the host,
    where each warp size has its own."""
    (dtype, dtype_b), (largest_a, largest_b) = pair, EXACT[pair]
    rng = np.random.default_rng((7, list(EXACT).index(pair), target.warp_size))
    for _ in range(50):
        m, n, k = (
            int(rng.integers(1, top)) for top in (90, 150, 1000 if rng.random() < 0.3 else 200)
        )
        batch = (2,) if rng.random() < 0.2 else ()
        a = integers(rng, (*batch, m, k), dtype, largest_a)
        b = integers(rng, (k, n), dtype_b or dtype, largest_b)
        expected = a.astype(np.int64) @ b.astype(np.int64)
        layouts = rng.choice(inputs.LAYOUTS[:3], 2)
        x, y = (with_layout(v, w, target.xp) for v, w in zip((a, b), layouts, strict=True))
        out_dtype = "int32" if dtype == "int8" else "float32"
        product = to_numpy(cupykern.matmul(x, y, out_dtype=out_dtype))
        assert (product.astype(np.int64) == expected).all(), (m, n, k, layouts)


def test_int8_accumulators_are_exact_at_the_extremes(target):
    a = array(target, np.full((2, 4096), -128), "int8")
    assert (to_numpy(cupykern.matmul(a, a.T)) == 128 * 128 * 4096).all()
    b = array(target, np.full((2, 4096), 127), "int8")
    assert (to_numpy(cupykern.matmul(a, b.T)) == -128 * 127 * 4096).all()


@pytest.mark.parametrize(
    ("dtype", "dtype_b"), [("float16", None), ("float8_e4m3fn", None), ("bfloat16", "int8")]
)
@pytest.mark.parametrize("kind", ["normal", "same_sign"])
def test_long_sums_are_within_the_bound_and_the_expected_error(target, dtype, dtype_b, kind):
    """Within the bound, and within the error that is expected, where the sum is long."""
    problem = MatmulProblem(
        33, 40, 4096, dtype, dtype_b, layout_b="F", kind=kind, out_dtype="float32"
    )
    check_problem(MATMUL, problem, target)


def test_non_finite_operands_stay_in_their_row_or_column(target):
    """An infinite or NaN operand stays in its row or column; FP16 results overflow to infinity."""
    a, b = np.ones((20, 40), np.float16), np.ones((40, 24), np.float16)
    a[3, 5], a[4, 6], b[7, 9] = np.inf, np.nan, -np.inf
    a[10], b[:, 11] = 300, 300
    x, y = (target.xp.asarray(v) for v in (a, b))
    assert compare(MATMUL, x, y).ok
    product = to_numpy(cupykern.matmul(x, y))
    assert np.isinf(product[10, 11]) and np.isnan(product[3, 9]) and np.isnan(product[4]).all()


def test_accumulators_beyond_fp32_overflow(target):
    """Where FP64 would come back: the edge of what is promised."""
    large = target.xp.asarray([[3e38, 3e38, -3e38, -3e38]], np.float32)
    assert not np.isfinite(to_numpy(cupykern.matmul(large, target.xp.ones((4, 1), np.float32))))


def test_split_k_gives_the_same_bits_again(target):
    a, b = random(target, (20, 3000), "float16", 1), random(target, (3000, 70), "float16", 2)
    task = GemmTask(1, 20, 70, 3000, dtypes.float16, dtypes.float16, K_MAJOR, MN_MAJOR)
    configs = gemm.configs(task, target.arch)
    config = replace(next(c for c in configs if isinstance(c, GemmConfig)), splits=7)
    first = to_numpy(cupykern.matmul(a, b, out_dtype="float32", config=config))
    for schedule in ("fifo", "lifo", "sticky:3"):
        if target.name == "host":
            with host.use(schedule=schedule, warp_size=target.warp_size):
                again = to_numpy(cupykern.matmul(a, b, out_dtype="float32", config=config))
        else:
            again = to_numpy(cupykern.matmul(a, b, out_dtype="float32", config=config))
        np.testing.assert_array_equal(again, first)


def test_a_rows_bits_do_not_depend_on_the_other_rows(target):
    """The same config: rows of one product are the rows of a smaller one, bit for bit."""
    a, b = random(target, (40, 512), "float16", 1), random(target, (512, 64), "float16", 2)
    config = GemmConfig(16, 64, 128, 1, 1, 4, stages=2, splits=2)
    whole = to_numpy(cupykern.matmul(a, b, config=config))
    part = to_numpy(cupykern.matmul(a[5:9], b, config=config))
    np.testing.assert_array_equal(part, whole[5:9])


# --- the epilogue --------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_every_epilogue_is_within_the_bound(target, activation, dtype):
    for alpha, bias, residual, out_dtype in (
        (1.0, (24,), None, None),
        (-0.25, (20, 1), (20, 24), "float32"),
        (0.125, (20, 24), (24,), "bfloat16"),
        (3.0, None, (1, 24), "float16"),
    ):
        problem = MatmulProblem(20, 24, 40, dtype, None, alpha=alpha, bias=bias, residual=residual,
                                activation=activation, out_dtype=out_dtype)  # fmt: skip
        for seed in range(3):  # which picks the dtypes of bias and residual
            check_problem(MATMUL, problem, target, seed)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_extreme_numbers_are_within_the_bound(target, activation):
    x = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 60000, -60000, 88, -88, -104, 10, -10, 1e-6],
        np.float32,
    )
    bias = target.xp.asarray(x)
    a, b = target.xp.zeros((2, 8), np.float16), target.xp.zeros((8, x.size), np.float16)
    assert compare(MATMUL, a, b, bias=bias, activation=activation, out_dtype="float32").ok


def test_the_result_is_rounded_once(target):
    """A sum halfway between two FP16 numbers: rounding before the bias would give another."""
    a, b = (
        array(target, np.full((1, 8), 256), "float16"),
        array(target, np.full((8, 1), 1), "float16"),
    )
    bias = target.xp.full((1,), 1.0009765625, np.float32)  # 2048 + 1 + 2^-10: above the tie
    assert to_numpy(cupykern.matmul(a, b, bias=bias))[0, 0] == 2050
    residual = target.xp.full((1, 1), -2049, np.float32)
    assert to_numpy(cupykern.matmul(a, b, bias=bias, residual=residual))[0, 0] == 2.0**-10


# --- out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("layout", ["F", "sliced", "negative", "offset"])
def test_out_may_have_any_layout(target, dtype, layout):
    xp = target.xp
    a, b = random(target, (20, 40), dtype, 1), random(target, (40, 24), dtype, 2)
    frame = xp.full((26, 60), 7, a.dtype)
    out = {
        "F": xp.full((24, 20), 7, a.dtype).T,
        "sliced": frame[3:23, 5:53:2],
        "negative": frame[22:2:-1, 40:16:-1],
        "offset": frame[3:23, 5:29],
    }[layout]
    expected = to_numpy(cupykern.matmul(a, b))
    assert cupykern.matmul(a, b, out=out) is out
    np.testing.assert_array_equal(to_numpy(out), expected)
    out[...] = 7
    assert (to_numpy(frame) == 7).all()


def test_out_may_be_a_batch_with_its_axes_swapped(target):
    a, b = random(target, (3, 20, 40), "float16", 1), random(target, (40, 24), "float16", 2)
    out = target.xp.empty((20, 3, 24), np.float16).transpose(1, 0, 2)
    assert compare(MATMUL, a, b, outputs=cupykern.matmul(a, b, out=out)).ok


def test_out_may_interleave_with_an_operand(target):
    """Interleaved memory is no overlap."""
    frame = random(target, (16, 32), "float16", 1)
    a, out = frame[:, ::2], frame[:, 1::2]
    b = random(target, (16, 16), "float16", 2)
    expected = to_numpy(cupykern.matmul(a, b))
    np.testing.assert_array_equal(to_numpy(cupykern.matmul(a, b, out=out)), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_subnormal_operands_count_as_themselves_or_as_zero(target, dtype):
    """Each counts as itself or as zero, of float16 as itself."""
    for k, residual in ((40, None), (500, (33, 40))):
        problem = MatmulProblem(33, 40, k, dtype, kind="subnormal", residual=residual)
        check_problem(MATMUL, problem, target)
    a = np.full((16, 16), finfo(dtype).min_subnormal, dtypes.NAMES[dtype])
    b = np.full((16, 16), 2.0**120 if dtype != "float16" else 1.0, dtypes.NAMES[dtype])
    y = to_numpy(cupykern.matmul(*map(target.xp.asarray, (a, b)), out_dtype="float32"))
    exact = 16 * float(a[0, 0]) * float(b[0, 0])
    assert np.isin(y, (0.0, exact) if dtype != "float16" else (exact,)).all()


# --- FP16 accumulators ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout_a", "layout_b", "kind", "k"),
    [
        ("C", "F", "normal", 512),
        ("C", "F", "exact", 257),
        ("negative", "C", "uniform", 400),
        ("F", "C", "same_sign", 512),
        ("C", "F", "same_sign", 2048),
    ],
)
def test_fp16_accumulation_is_within_its_bound_and_differs(target, layout_a, layout_b, kind, k):
    """Within their bound, and other results than in FP32."""
    problem = MatmulProblem(130, 65, k, layout_a=layout_a, layout_b=layout_b, kind=kind, bias=(65,))
    call = MATMUL.inputs(problem, 3, target.xp)
    kwargs = {**call.kwargs, "accumulate": "float16", "out_dtype": "float32"}
    if target.name == "hip":
        with pytest.raises(NotImplementedError, match="AMD"):
            cupykern.matmul(*call.args, **kwargs)
        return
    y = cupykern.matmul(*call.args, **kwargs)
    references = MATMUL.reference(*call.args, **kwargs)
    bounds = MATMUL.bound(*call.args, **kwargs, reference=references)
    comparison = check.compare((y,), references, bounds)
    assert comparison.ok, comparison
    plain = cupykern.matmul(*call.args, **{**kwargs, "accumulate": "float32"})
    assert bool((y == plain).all()) == (kind == "exact")


@needs.fp16_accumulators
def test_accumulate_is_each_calls_own(target):
    """0.5 is lost when it is added to 2048 in FP16, in whichever order the calls come."""
    a, b = np.zeros((16, 64), np.float16), np.ones((64, 16), np.float16)
    a[:, 0], a[:, 16::16] = 2048, 0.5
    a, b = map(target.xp.asarray, (a, b))
    expected = {"float16": 2048.0, "float32": 2049.5}
    for accumulate in ("float16", "float32", "float16", "float32"):
        y = cupykern.matmul(a, b, accumulate=accumulate, out_dtype="float32")
        assert (to_numpy(y) == expected[accumulate]).all(), accumulate


@needs.fp16_accumulators
def test_fp16_accumulation_overflows_to_infinity(target):
    a = target.xp.full((16, 128), 100, np.float16)
    assert bool(np.isposinf(to_numpy(cupykern.matmul(a, a.T, accumulate="float16"))).all())
    assert to_numpy(cupykern.matmul(a, a.T, out_dtype="float32")).max() == 1.28e6


# --- vectors --------------------------------------------------------------------------------------


def _on_host(x):
    return x.get() if hasattr(x, "get") else x


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "complex64"])
@pytest.mark.parametrize(
    ("shape_a", "shape_b"),
    [((5,), (5, 7)), ((3, 5), (5,)), ((5,), (5,)), ((5,), (2, 5, 7)), ((2, 3, 5), (5,))],
)
def test_vectors_are_rows_and_columns_as_in_numpy(target, dtype, shape_a, shape_b):
    xp, rng = target.xp, np.random.default_rng(1)
    kind = np.dtype(dtype)
    a, b = (rng.integers(-4, 5, shape).astype(kind) for shape in (shape_a, shape_b))
    expected = np.matmul(a.astype(np.complex128), b.astype(np.complex128))
    x, y = xp.asarray(a), xp.asarray(b)
    bias = np.array(3, np.complex64 if dtype == "complex64" else np.float32)
    for options, added in (({}, 0), ({"bias": xp.asarray(bias)}, 3)):
        found = cupykern.matmul(x, y, **options)
        assert found.shape == expected.shape
        np.testing.assert_array_equal(_on_host(found), expected + added)
    out = xp.zeros(expected.shape, found.dtype)
    assert cupykern.matmul(x, y, **options, out=out) is out
    np.testing.assert_array_equal(_on_host(out), expected + 3)


def test_formulas_and_addends_of_vectors_have_the_results_shape(target):
    xp = target.xp
    a, b = xp.asarray(np.arange(4, dtype=np.float16)), xp.asarray(np.eye(4, 3, dtype=np.float16))
    r = xp.asarray(np.array([1, 2, 3], np.float32))
    np.testing.assert_array_equal(to_numpy(cupykern.matmul(a, b, residual=r)), [1, 3, 5])
    y, z = cupykern.matmul(a, b, epilogue="acc * r + i, acc + j", operands={"r": r})
    np.testing.assert_array_equal(to_numpy(y), [0, 2, 6])
    np.testing.assert_array_equal(to_numpy(z), [0, 2, 4])
    for options, says in (
        ({"residual": xp.ones((1, 3), np.float32)}, r"residual must broadcast to \(3,\)"),
        ({"out": xp.ones((1, 3), np.float16)}, r"out must have shape \(3,\)"),
    ):
        with pytest.raises(ValueError, match=says):
            cupykern.matmul(a, b, **options)
    with pytest.raises(ValueError, match=r"operands\['r'\] must broadcast to \(3,\)"):
        cupykern.matmul(a, b, epilogue="acc + r", operands={"r": xp.ones((1, 3), np.float32)})
    with pytest.raises(ValueError, match="a's columns must be b's rows"):
        cupykern.matmul(a, xp.ones(3, np.float16))
    with pytest.raises(ValueError, match="a must have at least 2 dims"):
        cupykern.matmul(xp.asarray(np.float16(1)), b)


@pytest.mark.parametrize(
    ("shape_a", "shape_b", "shape"),
    [
        ((130,), (130, 37), (37,)),
        ((33, 130), (130,), (33,)),
        ((130,), (130,), ()),
        ((130,), (3, 130, 20), (3, 20)),
        ((4, 9, 130), (130,), (4, 9)),
        ((0,), (0, 5), (5,)),
        ((130,), (130, 0), (0,)),
    ],
)
def test_products_of_vectors_are_within_the_bound(target, shape_a, shape_b, shape):
    """Of a reference that takes vectors, with all that broadcasts to the result."""
    (complex_matmul,) = (op for op in OPS if op.name == "complex_matmul")
    r = random(target, shape[-1:], "float32", 3)
    formula = {"epilogue": "acc * r + s, acc - i", "operands": {"r": r, "s": np.float16(3)}}
    for dtype in ("float16", "float32", "int8"):
        a, b = random(target, shape_a, dtype, 1), random(target, shape_b, dtype, 2)
        for options in (
            {},
            {"alpha": 0.3, "bias": r, "activation": "silu", "residual": r},
            {"bias": target.xp.asarray(np.float32(3)), "out_dtype": "float32"},
        ):
            (y,) = MATMUL.reference(a, b, **options)
            assert y.shape == shape
            assert compare(MATMUL, a, b, **options).ok
        references = MATMUL.reference(a, b, **formula)
        bounds = MATMUL.bound(a, b, **formula, reference=references)
        assert check.compare(cupykern.matmul(a, b, **formula), references, bounds).ok
    a, b, r = (
        random(target, (*of[:-1], 2 * of[-1]) if of else (2,), "float32", seed).view(np.complex64)
        for seed, of in enumerate((shape_a, shape_b, shape[-1:]))
    )
    r = r.reshape(shape[-1:])
    assert complex_matmul.reference(a, b)[0].shape == shape
    assert compare(complex_matmul, a, b, bias=r, alpha=0.3).ok
