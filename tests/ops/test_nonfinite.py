"""What nonfinite_report alone promises."""

from __future__ import annotations

import mmap
import threading
from dataclasses import replace

import needs
import numpy as np
import pytest

import cupykern
from cupykern import check, dtypes, inputs
from cupykern.ops.nonfinite_report import OP, NonfiniteProblem, nonfinite_arrays
from cupykern.rows.nonfinite_walk import configs_of, make_walk
from cupykern.rows.row_layout import operand

DTYPES = OP.dtypes


def codes_of(dtype: str) -> np.dtype:
    return np.dtype(f"u{dtypes.NAMES[dtype].itemsize}")


def on(target, x: np.ndarray):
    """x on the target, by its codes: CuPy moves no FP8."""
    return target.xp.asarray(x.view(f"u{x.itemsize}")).view(x.dtype)


def expected_report(x: np.ndarray) -> tuple:
    """What numpy finds, but for the mean."""
    with np.errstate(invalid="ignore"):
        y = x.astype(np.float64)
    finite = np.isfinite(y)
    index = None
    if not finite.all():
        index = tuple(int(i) for i in np.unravel_index(np.argmin(finite.reshape(-1)), x.shape))
    kinds = np.isnan(y), y == np.inf, y == -np.inf
    rest = y[finite] if finite.any() else np.array([np.nan])
    return (x.size, *(int(kind.sum()) for kind in kinds), index, rest.min(), rest.max())


def compare(x_here, x: np.ndarray) -> cupykern.NonfiniteReport:
    """The report of x_here, after it was held against numpy's figures of x."""
    report = cupykern.nonfinite_report(x_here)
    got = (
        *(report.size, report.num_nan, report.num_posinf, report.num_neginf, report.first_index),
        *(report.min, report.max),
    )
    np.testing.assert_equal(got, expected_report(x))
    call_outputs = nonfinite_arrays(x_here)
    references = OP.reference(x_here)
    bounds = OP.bound(x_here, reference=references)
    comparison = check.compare(call_outputs, references, bounds)
    assert comparison.ok, comparison
    return report


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "float32"])
def test_every_code_is_classified(target, dtype):
    """All at once, and those of two codes together that a vector may mix up."""
    code = codes_of(dtype)
    all_codes = np.arange(2 ** (8 * code.itemsize), dtype=code)
    for order in (all_codes, all_codes[::-1], np.random.default_rng(1).permutation(all_codes)):
        x = np.ascontiguousarray(order).view(dtypes.NAMES[dtype])
        compare(on(target, x), x)
    for low in range(0, all_codes.size, max(all_codes.size // 64, 1)):
        x = all_codes[low : low + 1].repeat(33).view(dtypes.NAMES[dtype])
        report = compare(on(target, x), x)
        assert report.num_nonfinite in (0, 33)


def test_float32_codes_of_every_exponent_are_classified(target):
    """Every exponent, the first and the last mantissas, both signs."""
    mantissas = np.array([0, 1, 2, 0x3FFFFF, 0x400000, 0x7FFFFE, 0x7FFFFF], np.uint32)
    magnitudes = (np.arange(256, dtype=np.uint32)[:, None] << 23 | mantissas).reshape(-1)
    x = np.concatenate([magnitudes, magnitudes | np.uint32(1 << 31)]).view(np.float32)
    compare(on(target, x), x)
    for one in x[:: 2 * mantissas.size + 1]:
        compare(on(target, np.full(17, one)), np.full(17, one))


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormals_are_not_flushed(target, dtype):
    tiny = cupykern.finfo(dtype).min_subnormal
    for values in ([tiny, 3 * tiny], [-tiny, -3 * tiny], [0.0, tiny], [-0.0, -tiny]):
        x = np.array(values * 40).astype(dtypes.NAMES[dtype])
        report = compare(on(target, x), x)
        assert (report.min, report.max) == (min(values), max(values))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", inputs.LAYOUTS)
def test_every_layout_has_the_same_report(target, layout, dtype):
    for shape in ((3, 5, 67), (64, 48), (2, 40, 256), (100_003,), (1, 7, 1)):
        for kind in ("normal", "special"):
            problem = NonfiniteProblem(shape, dtype, kind, layout)
            (x,) = OP.inputs(problem, 3, target.xp).args
            (x_host,) = OP.inputs(problem, 3, np).args
            compare(x, x_host)


def test_views_are_read_where_they_lie(target):
    base = inputs.values("special", (6, 5, 4, 32), dtypes.float16, 5)
    here = on(target, base)
    views = (
        lambda x: x.transpose(3, 1, 0, 2),
        lambda x: x[::-1, :, ::-1],
        lambda x: x[:, ::-2, 1:, 8:24],  # vectors, of several dims
        lambda x: x[:, 1:4, :, 3:],
        lambda x: x.T[::3],
        lambda x: x[2:3, 4],
        lambda x: x.reshape(2, 3, 5, 2, 2, 4, 2, 2, 2)[::-1, ::2, 1:, :, ::-1, 1:, :, ::-1],
        lambda x: (
            np.broadcast_to(x, (3, *x.shape))
            if isinstance(x, np.ndarray)
            else target.xp.broadcast_to(x, (3, *x.shape))
        ),
    )
    for view in views:
        compare(view(here), view(base))


def test_vector_loads_are_used_where_rows_are_aligned():
    x = np.zeros((6, 5, 4, 32), np.float16)
    for view, plain, vectors in (
        (x, True, True),
        (x.T, True, True),
        (x[::-1].transpose(1, 0, 3, 2), True, True),
        (x[:, 1:], False, True),
        (x[..., 8:24], False, True),
        (x[..., 4:20], False, False),
        (x[..., ::2], False, False),
    ):
        start = view.ctypes.data - x.ctypes.data
        walk = make_walk(view.shape, operand(view)._replace(offset=start % 64))
        assert (walk.plain, walk.plain or walk.whole) == (plain, vectors), view.strides


def test_strides_that_no_kernel_walks_have_the_same_report(target):
    """Bytes of a record; more dims than a kernel takes."""
    if target.name == "host":
        records = np.zeros(50, np.dtype([("a", "u1"), ("x", np.float32)]))
        records["x"] = inputs.values("special", (50,), dtypes.float32, 2)
        compare(records["x"], records["x"].copy())
    x = inputs.values("special", (3,) * 10, dtypes.float16, 3)
    view = on(target, x)[(slice(None, None, 2),) * 10]
    compare(view, x[(slice(None, None, 2),) * 10])


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2, 5)])
def test_an_empty_array_has_an_empty_report(target, shape):
    for dtype in DTYPES:
        x = on(target, np.zeros(shape, dtypes.NAMES[dtype]))
        report = cupykern.nonfinite_report(x)
        assert (report.size, report.num_nonfinite, report.first_index) == (0, 0, None)
        assert np.isnan([report.min, report.max, report.mean]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_without_dims_has_the_index_of_no_dims(target, dtype):
    for value in (2.0, -0.0, np.nan, np.inf, -np.inf):
        x = np.array(value).astype(dtypes.NAMES[dtype])
        report = compare(on(target, x), x)
        assert report.first_index == (None if np.isfinite(x.astype(np.float32)) else ())


def test_statistics_of_no_finite_element_are_nan(target):
    x = np.full((3, 1000), -np.inf, np.float16)
    x[2, 999] = np.nan
    report = compare(on(target, x), x)
    assert (report.num_nan, report.num_neginf, report.first_index) == (1, 2999, (0, 0))
    assert np.isnan([report.min, report.max, report.mean]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_index_is_in_c_order(target, dtype, exhaustive):
    """In C order whatever the layout; wherever in a vector, a batch or a block."""
    number = dtypes.NAMES[dtype]
    nan = np.array(np.nan).astype(number)
    rng = np.random.default_rng(4)
    places = (0, 1, 15, 64, 8191, 8192, 99_999, *rng.integers(0, 100_000, 2))
    if exhaustive:
        places += (16, 63, 99_998, *rng.integers(0, 100_000, 4))
    for place in places:
        flat = np.ones(100_000, number)
        flat[place] = nan
        flat[min(place + 17, 99_999) :: 511] = nan
        for shape, axes in (((100_000,), (0,)), ((50, 2000), (1, 0)), ((40, 50, 50), (2, 0, 1))):
            x = np.ascontiguousarray(flat.reshape(shape).transpose(axes))
            x = x.transpose(np.argsort(axes))
            compare(on_strided(target, x), x)


def on_strided(target, x: np.ndarray):
    """As `on`, with x's strides."""
    order = np.argsort([-stride for stride in x.strides], kind="stable")
    return on(target, np.ascontiguousarray(x.transpose(order))).transpose(np.argsort(order))


def test_finite_sums_that_overflow_in_fp32(target):
    for value in (3e38, -3e38):
        x = np.full(5003, value, np.float32)
        assert compare(on(target, x), x).mean == pytest.approx(np.float32(value), rel=1e-12)
    x = np.tile(np.array([3e38, -3e38], np.float32), 3000)
    assert compare(on(target, x), x).mean == 0


def test_the_mean_of_many_is_accurate(target):
    """A plain FP32 sum of these is wrong by 3e-4; what is derived allows 4e-7."""
    x = np.full(2**22 + 5, 0.1, np.float32)
    report = compare(on(target, x), x)
    naive = float(np.cumsum(x, dtype=np.float32)[-1]) / x.size
    assert abs(naive / 0.1 - 1) > 1e-4
    assert report.mean == pytest.approx(float(np.float32(0.1)), rel=4 * 2.0**-24)


def test_every_config_has_the_same_report(target):
    for dtype in DTYPES:
        x = inputs.values("special", (64, 1600), dtypes.NAMES[dtype], 6)
        here = on(target, x)
        for config in configs_of(target.arch, x.itemsize):
            outputs = nonfinite_arrays(here, config=config)
            references = OP.reference(here)
            bounds = OP.bound(here, reference=references)
            comparison = check.compare(outputs, references, bounds)
            assert comparison.ok, f"{config}: {comparison}"


@pytest.mark.parametrize(
    ("view", "change", "says"),
    [
        (np.s_[:, :31], {"vector_width": 8, "plain": False}, "width 1$"),
        (np.s_[:, :31], {"vector_width": 1, "plain": True}, "one contiguous span"),
        (np.s_[0, :5], {"vector_width": 8, "plain": False}, "or 8, if it is plain"),
        (np.s_[:], {"vector_width": 4}, "width 1 or 8$"),
        (np.s_[:], {"num_threads": 1024}, "from 64 to 512"),
        (np.s_[:], {"num_threads": 96}, "power of two"),
        (np.s_[:], {"batch": 3}, "batch must be a power of two"),
        (np.s_[:], {"min_blocks": 33}, "from 1 to 32"),
    ],
)
def test_configs_that_do_not_fit_are_refused(view, change, says):
    x = np.ones((4, 32), np.float16)[view]
    config = replace(configs_of("host", 2)[0], **change)
    with pytest.raises(ValueError, match=says):
        cupykern.nonfinite_report(x, config=config)
    with pytest.raises(TypeError, match="config must be a NonfiniteConfig"):
        cupykern.nonfinite_report(x, config=256)


def test_repeated_calls_give_the_same_bits(target):
    x = on(target, inputs.values("wide", (700, 333), dtypes.bfloat16, 7))
    first = cupykern.nonfinite_report(x)
    assert all(cupykern.nonfinite_report(x) == first for _ in range(5))
    threads = []
    reports: list[cupykern.NonfiniteReport] = []
    for _ in range(4):
        thread = threading.Thread(target=lambda: reports.append(cupykern.nonfinite_report(x)))
        threads.append(thread)
        thread.start()
    for thread in threads:
        thread.join()
    if target.name != "host" or target.warp_size == 32:  # a thread has the default settings
        assert reports == [first] * 4


def test_the_input_is_not_written(target):
    x = inputs.values("special", (33, 100), dtypes.float16, 8)
    here = on(target, x)
    if target.name == "host":
        here.flags.writeable = False
    cupykern.nonfinite_report(here)
    back = here if target.name == "host" else here.get()
    np.testing.assert_array_equal(back.view(np.uint16), x.view(np.uint16))


@needs.host
def test_offsets_may_exceed_two_to_the_31(target):
    """Numbers far apart in a sparse map."""
    gap = 2**31 + 8
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = mmap.mmap(-1, 2 * (2 * gap + 1000), flags=flags)
    x = np.lib.stride_tricks.as_strided(
        np.frombuffer(memory, np.float16), (3, 1000), (2 * gap, 2), writeable=True
    )
    x[...] = inputs.values("normal", x.shape, dtypes.float16, 1)
    x[2, 500] = np.nan
    compare(x, x.copy())
    compare(x.T, x.T.copy())
    # Places are numbers of 64 bits, also where the elements repeat.
    many = np.broadcast_to(np.ones((), np.float32), (2**16, 2**16, 3))
    params = make_walk(many.shape, operand(many))
    assert params.num_elements == 3 * 2**32 and params.dims == ((3 * 2**32, 0, 1),)


@pytest.mark.parametrize("dtype", ["float16", "float8_e5m2"])
def test_arrays_may_have_more_than_two_to_the_31_elements(gpu, dtype):
    x = inputs.bench_values((2**21 + 1, 1025), dtypes.NAMES[dtype], 3, gpu.xp)
    codes = x.view(codes_of(dtype))
    codes[-1, -2] = int(np.array(np.nan).astype(x.dtype).view(codes.dtype))
    report = cupykern.nonfinite_report(x)
    assert (report.num_nan, report.first_index) == (1, (2**21, 1023))
    references = OP.reference(x)
    comparison = check.compare(nonfinite_arrays(x), references, OP.bound(x, reference=references))
    assert comparison.ok, comparison


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (1.0, TypeError, "x must be a cupy or numpy array"),
        ([1.0], TypeError, "x must be a cupy or numpy array"),
        (
            np.ones(3),
            NotImplementedError,
            "x's dtype must be one of float16, bfloat16, float32, float8_e4m3",
        ),
        (np.ones(3, np.int8), TypeError, "x's dtype must be one of"),
        (np.ma.ones(3, np.float32), TypeError, "x must be a cupy or numpy array"),
    ],
)
def test_illegal_arguments_are_refused(x, error, message):
    with pytest.raises(error, match=message):
        cupykern.nonfinite_report(x)
