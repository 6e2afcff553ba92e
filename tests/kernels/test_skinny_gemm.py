"""Skinny GEMM, few rows (kernels_cu/skinny_gemm.cu)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from products import MATMUL, SCALED, compare, random, to_numpy
from skinny_gemm_checks import (
    CONFIG,
    E4M3,
    FP32,
    FP32_4,
    MISALIGNED,
    NVFP4,
    WIDE,
    check_dual,
    check_misaligned_epilogue,
    holds,
    misaligned_rows,
)

import cupykern
from cupykern import dtypes
from cupykern.gemm import gemm, product, skinny_heuristic, sm90_heuristic
from cupykern.gemm.gemm_task import GemmTask
from cupykern.gemm.product import ACTIVATIONS, FP4, K_MAJOR, MN_MAJOR, STRIDED
from cupykern.gemm.skinny_gemm import SkinnyGemmConfig
from cupykern.ops.problems.products import MatmulProblem
from cupykern.ops.problems.scaled import ScaledProblem
from cupykern.targets import host
from cupykern.targets.limits import device, is_measured
from cupykern.tools import gate

NARROW = SkinnyGemmConfig(16, 128, 8, 4)
FLOAT16 = "float16", "bfloat16"
PAIRS = (  # of dtypes, how b lies in memory, and a config
    *(
        ("float16", E4M3, "F", CONFIG), ("float16", E4M3, "C", WIDE),
        ("bfloat16", "int8", "F", CONFIG)
    ),
    *(("bfloat16", None, "F", replace(CONFIG, tile_k=64)), ("bfloat16", None, "C", WIDE)),
    *((E4M3, E4M3, "F", CONFIG), ("int8", None, "F", CONFIG)),
    *(("float16", NVFP4, "F", NARROW), (NVFP4, NVFP4, "F", replace(CONFIG, stages=2))),
    ("float16", None, "F", replace(NARROW, tile_k=64)),
)  # fmt: skip


@settings(max_examples=30)
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_any_problem_of_fp32(target, data, seed):
    """Few rows, few columns, which are a vector; tails, epilogues, results of other layouts."""
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    config = pick(FP32, FP32_4, replace(FP32, tile_k=64, warps=2, stages=2))
    few, many = data.draw(st.integers(1, config.rows)), 4 * data.draw(st.integers(1, 40))
    k, layout = 4 * data.draw(st.integers(1, 150)), pick(*"CF")
    swap_ab = pick(False, True)
    sizes, layouts = ((many, few), layout + "F") if swap_ab else ((few, many), "C" + layout)
    m, n = sizes
    problem = MatmulProblem(
        *(m, n, k, "float32"),
        layout_a=layouts[0],
        layout_b=layouts[1],
        alpha=pick(1.0, -0.3),
        bias=pick(None, (n,), (m, 1), (m, n)),
        residual=pick(None, (m, n), (1, n)),
        activation=pick(None, "relu", "gelu"),
        out_dtype=pick(None, "float16"),
        kind=pick("normal", "same_sign", "exact", "special"),
    )
    call = MATMUL.inputs(problem, seed, target.xp)
    config = replace(config, swap_ab=swap_ab)
    comparison = compare(MATMUL, *call.args, **call.kwargs, config=config)
    assert comparison.ok, f"{problem!r} {config}: {comparison}"


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_120a", "host"])
@pytest.mark.parametrize("few", [1, 4, 5, 16])
def test_few_rows_and_columns_of_fp32_are_streamed(arch, few):
    f32 = dtypes.float32
    row = GemmTask(1, few, 8192, 8192, f32, f32, K_MAJOR, K_MAJOR)
    for task in (row, replace(row, layout_b=MN_MAJOR), row.swapped):
        config = gemm.choose_config(replace(task, precision="fma"), arch)
        assert isinstance(config, SkinnyGemmConfig)
        assert config.swap_ab == (task.n == few) and config.rows == (4 if few <= 4 else 16)
        for change in ({"aligned_16": False}, {"batch": 2}, {"k": 8190}):
            other = gemm.choose_config(replace(task, **change), arch)
            assert not isinstance(other, SkinnyGemmConfig)


@settings(max_examples=30)
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_any_problem_is_within_the_bound(target, data, seed):
    """Columns and rows that do not exist; k that is shared unevenly, and by fewer than there are;
    epilogues; scales of rows and columns."""
    dtype, dtype_b, layout_b, config = data.draw(st.sampled_from(PAIRS))
    narrow = dtype in FLOAT16 and dtype_b is not None and layout_b == "F"
    m, n = data.draw(st.integers(1, 64 if narrow else 16)), data.draw(st.integers(1, 150))
    if m <= 8 and data.draw(st.booleans()):
        config = replace(config, rows=8)
    if m > 16:
        tile_k = 128 if dtype_b == NVFP4 else 64
        config = replace(config, rows=16 * -(-m // 16), tile_k=tile_k, warps=2, stages=2)
    n = -(-n // 16) * 16 if layout_b == "C" else n
    k = 16 * data.draw(st.sampled_from((1, 3, 4, 15, 16, 17, 33, 64, 67)))
    k = -(-k // 64) * 64 if dtype_b == NVFP4 else k
    problem = MatmulProblem(
        *(m, n, k, dtype, dtype_b),
        layout_b=layout_b,
        bias=data.draw(st.sampled_from((None, (n,), (m, 1), (m, n)))),
        activation=data.draw(st.sampled_from(tuple(ACTIVATIONS))),
        out_dtype=data.draw(st.sampled_from((None, "float16", "bfloat16", "float32"))),
        kind=data.draw(st.sampled_from(("normal", "same_sign", "exact"))),
    )
    if dtype_b and (dtype_b == NVFP4 or data.draw(st.booleans())):
        blocks = ("blocks",) if dtype_b == E4M3 and layout_b == "F" else ()
        scales = data.draw(st.sampled_from(("numbers", "rows", *blocks)))
        scales = "none" if NVFP4 in (dtype, dtype_b) else scales
        op, problem = SCALED, ScaledProblem(problem, scales)
    else:
        residual = data.draw(st.sampled_from((None, (m, n), (1, n))))
        op = MATMUL
        problem = replace(problem, residual=residual, alpha=data.draw(st.sampled_from((1.0, -0.3))))
    comparison = holds(op, problem, config, target, seed)
    assert comparison.ok, f"{problem!r} {config}: {comparison}"


@pytest.mark.parametrize("name", ["bias", "residual"])
def test_every_column_of_misaligned_b_has_its_own_bias_and_residual(name):
    with host.use():
        check_misaligned_epilogue(name)


@settings(max_examples=60)
@given(
    sizes=st.tuples(st.integers(1, 16), st.integers(2, 150), st.integers(2, 700)),
    gaps=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    dtype=st.sampled_from(("float16", "bfloat16")),
    layout_b=st.sampled_from("CF"),
)
def test_misaligned_rows_of_any_length(target, sizes, gaps, dtype, layout_b):
    """Rows of every alignment to 16 bytes; what is before, between and behind them is not
    multiplied."""
    m, n, k = sizes
    k_major = layout_b == "F"
    a = misaligned_rows(target.xp, (m, k), dtype, gaps[0] if k_major else -k % 8, 1)
    shape = (n, k) if k_major else (k, n)
    b = misaligned_rows(target.xp, shape, dtype, gaps[1] + ((shape[1] + gaps[1]) % 8 == 0), 2)
    b = b.T if k_major else b
    outputs = cupykern.matmul(a, b, out_dtype="float32", config=MISALIGNED if k_major else WIDE)
    assert compare(MATMUL, a, b, outputs=outputs, out_dtype="float32").ok


@pytest.mark.parametrize("layout", ["F", "sliced", "negative"])
def test_out_in_other_layouts(target, layout):
    a, b = random(target, (5, 144), "bfloat16", 1), random(target, (40, 144), "bfloat16", 2).T
    frame = target.xp.full((11, 90), 7, a.dtype)
    out = {
        "F": target.xp.full((40, 5), 7, a.dtype).T,
        "sliced": frame[3:8, 5:85:2],
        "negative": frame[7:2:-1, 45:5:-1],
    }[layout]
    config = replace(CONFIG, tile_k=64)
    expected = to_numpy(cupykern.matmul(a, b, config=config))
    cupykern.matmul(a, b, out=out, config=config)
    np.testing.assert_array_equal(to_numpy(out), expected)
    out[...] = 7
    assert (to_numpy(frame) == 7).all()


def test_rows_do_not_touch_each_other(target):
    """NaN stays in its row and column; a row's bits do not depend on the other rows."""
    config = replace(CONFIG, tile_k=64)
    a, b = random(target, (11, 320), "bfloat16", 1), random(target, (40, 320), "bfloat16", 2).T
    whole = to_numpy(cupykern.matmul(a, b, config=config))
    for first, last, rows in ((0, 1, 8), (3, 9, 8), (3, 9, 16), (8, 11, 8)):
        part = cupykern.matmul(a[first:last], b, config=replace(config, rows=rows))
        np.testing.assert_array_equal(to_numpy(part), whole[first:last])
    a[4], b[7, 9] = np.nan, np.inf
    bad = np.zeros((11, 40), bool)
    bad[4], bad[:, 9] = True, True
    seen = to_numpy(cupykern.matmul(a, b, config=config))
    np.testing.assert_array_equal(np.isfinite(seen), ~bad)
    np.testing.assert_array_equal(seen[~bad], whole[~bad])
    assert compare(MATMUL, a, b, outputs=cupykern.matmul(a, b, config=config)).ok


@pytest.mark.parametrize("dtype_b", ["int8", NVFP4])
def test_bits_do_not_depend_on_the_number_of_rows(target, dtype_b):
    problem = MatmulProblem(50, 40, 320, "bfloat16", dtype_b, layout_b="F")
    op, problem = (
        (SCALED, ScaledProblem(problem, "none")) if dtype_b == NVFP4 else (MATMUL, problem)
    )
    a, b = op.inputs(problem, 1, target.xp).args
    config = SkinnyGemmConfig(16, 128, 2, 2, rows=64)
    whole = to_numpy(op.run(a, b, config=config))
    for first, last, rows in ((0, 1, 8), (3, 19, 16), (16, 33, 32), (30, 50, 32), (2, 50, 48)):
        part = op.run(a[first:last], b, config=replace(config, rows=rows))
        np.testing.assert_array_equal(to_numpy(part), whole[first:last])


@pytest.mark.parametrize("scales", ["rows", "blocks"])
@pytest.mark.parametrize("m", [29, 50])
def test_dual_gemm_of_many_rows(target, m, scales):
    """The second fragments of rows, of both products, with both kinds of scales."""
    check_dual(m, scales, target)


def test_the_order_of_warps_does_not_show():
    """Warps that never meet before the end: the same bits under every schedule."""
    a, b = (
        np.random.default_rng(i).standard_normal(shape).astype(dtypes.bfloat16)
        for i, shape in enumerate(((3, 1040), (40, 1040)))
    )
    config = replace(CONFIG, tile_k=64)
    with host.use():
        first = cupykern.matmul(a, b.T, out_dtype="float32", config=config)
    for schedule in ("lifo", "sticky:1", "sticky:5"):
        with host.use(schedule=schedule):
            again = cupykern.matmul(a, b.T, out_dtype="float32", config=config)
        np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a", "host"])
@pytest.mark.parametrize(("dtype", "dtype_b", "layout_b", "_"), PAIRS)
def test_few_rows_are_streamed(arch, dtype, dtype_b, layout_b, _):
    a, b = dtypes.NAMES[dtype], dtypes.NAMES[dtype_b or dtype]
    task = GemmTask(1, 16, 8192, 8192, a, b, K_MAJOR, K_MAJOR if layout_b == "F" else MN_MAJOR)
    chosen = gemm.choose_config(task, arch)
    if layout_b == "C" and b == dtypes.int8 and is_measured(arch):
        assert not isinstance(chosen, SkinnyGemmConfig)
        return
    assert isinstance(chosen, SkinnyGemmConfig)
    assert chosen.rows == 16
    if is_measured(arch) and layout_b == "F" and b != FP4 and b.itemsize == 1:
        return  # test_8bit_weights_take_the_least_estimate
    few = gemm.choose_config(replace(task, m=8), arch)
    nvfp4 = dtype_b == NVFP4
    halves = layout_b == "F" and (
        (nvfp4 and is_measured(arch)) or (b.itemsize == 2 and arch == "sm_90a")
    )
    assert few.rows == (8 if halves else 16) and few.stages >= chosen.stages
    few = replace(few, tile_n=chosen.tile_n)  # of 16 bits half as many
    assert replace(few, rows=16, stages=chosen.stages) == chosen  # the same order of accumulation
    for m in (8, 16):
        narrow = gemm.choose_config(replace(task, m=m, n=1024), arch)
        assert isinstance(narrow, SkinnyGemmConfig)
        more_warps = layout_b == "F" and (b.itemsize == 2 or (m == 8 and nvfp4))
        assert narrow.warps == (8 if more_warps and arch == "sm_90a" else 4)
    most = 32 if is_measured(arch) and dtype_b == NVFP4 else 16
    for change in ({"m": most + 1}, {"batch": 2}, {"k": 8200 if a.itemsize == 1 else 8196}):
        assert not isinstance(gemm.choose_config(replace(task, **change), arch), SkinnyGemmConfig)


@pytest.mark.parametrize("kernel", ["gemm", "dual_gemm"])
@pytest.mark.parametrize("a", ["bfloat16", "int8"])
@pytest.mark.parametrize("m", [1, 8, 9, 16, 17, 32, 33, 64, 65])
def test_8bit_weights_take_the_least_estimate(m, a, kernel):
    """Up to 16 rows; 16-bit activations up to 32, in a dual GEMM up to 64."""
    task = GemmTask(
        *(1, m, 2112, 7168, dtypes.NAMES[a], dtypes.int8, K_MAJOR, K_MAJOR), kernel=kernel
    )
    of_16_bits = a == "bfloat16"
    most = (32 if kernel == "gemm" else 64) if of_16_bits else 16
    hopper = device("sm_90a")
    found = skinny_heuristic.configs(task, hopper)
    if m > most:
        assert found == ()
        return
    us = [skinny_heuristic.estimate(config, task, hopper.multiprocessors) for config in found]
    read = task.products * task.n * task.k / 4.8e6  # H200: 4.8 TB/s
    assert read < us[0] == min(us) < 20 * read
    rows = 8 if m <= 8 and of_16_bits else 64 if m > 32 else -(-m // 16) * 16
    assert {config.rows for config in found} == {rows}


@pytest.mark.parametrize("kernel", ["gemm", "dual_gemm"])
def test_the_sm_count_does_not_change_the_order_of_accumulation(kernel):
    rng, kinds = np.random.default_rng(3), (dtypes.int8, dtypes.float8_e4m3fn, FP4)
    bf16, tasks = dtypes.bfloat16, []
    for i in range(90):
        b, m = kinds[i % (3 if kernel == "gemm" else 2)], int(rng.integers(17, 65))
        n, k = (int(2 ** rng.uniform(*x)) // 64 * 64 for x in ((9, 15), (9, 14)))
        tasks.append(GemmTask(1, m, n, k, bf16, b, K_MAJOR, K_MAJOR, kernel=kernel))
    example = GemmTask(1, 29, 7632, 11840, bf16, dtypes.int8, K_MAJOR, K_MAJOR, kernel="dual_gemm")
    for task in (*tasks, example):
        chosen = [gemm.configs(task, "sm_90a", sms)[0] for sms in (132, 114, 66)]
        skinny = [isinstance(config, SkinnyGemmConfig) for config in chosen]
        assert all(skinny) or not any(skinny), task
        assert not any(skinny) or len(set(chosen)) == 1, task


@pytest.mark.parametrize("kernel", ["gemm", "dual_gemm"])
def test_more_than_16_rows_take_hopper_mainloop_where_it_is_estimated_faster(kernel):
    bf16, e4m3 = dtypes.bfloat16, dtypes.float8_e4m3fn
    chosen = set()
    for n in (512, 4096, 28672):
        task = GemmTask(1, 24, n, 4096, bf16, e4m3, K_MAJOR, K_MAJOR, kernel=kernel)
        config = gemm.choose_config(task, "sm_90a")
        skinny = skinny_heuristic.configs(task, device("sm_90a"))[0]
        hopper = sm90_heuristic.configs(task, device("sm_90a"))[0]
        slower = skinny_heuristic.is_slower(skinny, task, hopper, device("sm_90a"))
        assert config == (hopper if slower else skinny)
        chosen.add(slower)
        few = replace(task, m=16)
        assert not skinny_heuristic.is_slower(skinny, few, hopper, device("sm_90a"))
    assert chosen == {False, True}


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_120a", "host"])
@pytest.mark.parametrize("layout_b", [K_MAJOR, MN_MAJOR])
def test_few_rows_of_any_length_are_streamed(arch, layout_b):
    half = dtypes.float16
    task = GemmTask(1, 16, 4095, 4097, half, half, STRIDED, STRIDED, misaligned_b=layout_b)
    assert isinstance(gemm.choose_config(task, arch), SkinnyGemmConfig)
    for change in ({"m": 17}, {"batch": 2}, {"fp16_accumulate": True}, {"misaligned_b": STRIDED}):
        assert not isinstance(gemm.choose_config(replace(task, **change), arch), SkinnyGemmConfig)


def test_misaligned_layouts_that_are_read_in_place(target):
    """Operands that begin at a multiple of 16 bytes."""

    def layout_of(a, b):
        (m, k), n = a.shape, b.shape[1]
        return product.misaligned_layout(*(product.matrix(x, ()) for x in (a, b)), m, n, k)

    a, b = (misaligned_rows(target.xp, shape, "float16", 0, 1) for shape in ((5, 33), (9, 33)))
    even, wide = (
        misaligned_rows(target.xp, shape, "float16", 0, 1) for shape in ((5, 32), (32, 9))
    )
    assert layout_of(a, b.T) == layout_of(even, b[:, :32].T) == layout_of(a[:1], b[:1].T) == K_MAJOR
    assert layout_of(even, wide) == MN_MAJOR
    assert layout_of(a[:, :32], wide) == STRIDED  # of a by vectors alone
    for x, y in ((a[:, ::2], b[:, :17].T), (a[1:], b.T), (a, b[1:].T), (a[::-1][:, ::-1], b.T)):
        assert layout_of(x, y) == STRIDED


@pytest.mark.compile
@pytest.mark.thinned(4)
@pytest.mark.parametrize(("dtype", "dtype_b", "layout_b", "_"), PAIRS)
@pytest.mark.parametrize("m", [1, 16])
def test_variants_of_every_kind_compile(m, dtype, dtype_b, layout_b, _):
    a, b = dtypes.NAMES[dtype], dtypes.NAMES[dtype_b or dtype]
    task = GemmTask(1, m, 8192, 8192, a, b, K_MAJOR, K_MAJOR if layout_b == "F" else MN_MAJOR)
    config = gemm.choose_config(task, "sm_90a")
    row = gate.compile_row(gemm.variant(task, config), "sm_90a")
    assert gate.failure(row) is None


TASK = GemmTask(1, 5, 64, 1024, dtypes.float16, dtypes.float8_e4m3fn, K_MAJOR, K_MAJOR)


@pytest.mark.parametrize(
    ("change", "of_task", "says"),
    [
        ({}, {"kernel": "dequant_softmax"}, "a product or a dual GEMM"),
        ({}, {"kernel": "dual_gemm", "layout_b": MN_MAJOR}, "K-major b1 and b2"),
        ({"swap_ab": True}, {}, "of FP32"),
        ({}, {"b": FP4, "k": 1056}, "four scales at once"),
        ({}, {"b": FP4, "nvfp4_tma": False}, "codes by vectors"),
        ({}, {"b": dtypes.float16, "fp16_accumulate": True}, "accumulates in FP32"),
        ({}, {"block_scales": True, "b": dtypes.int8}, "of K-major e4m3 weights"),
        ({}, {"block_scales": True, "layout_b": MN_MAJOR}, "of K-major e4m3 weights"),
        ({"tile_k": 256, "stages": 2}, {"block_scales": True}, "of one block of 128"),
        ({}, {"m": 17}, "up to 16 rows; got 17"),
        ({"rows": 32, "tile_k": 64}, {"m": 33}, "up to 32 rows; got 33"),
        ({"rows": 8}, {"m": 9}, "up to 8 rows; got 9"),
        ({"rows": 12}, {}, "one of 8, 16, 32, 48, 64; got 12"),
        ({"rows": 32}, {"b": dtypes.float16}, "one of 8, 16; got 32"),
        ({}, {"batch": 3}, "3 of them"),
        ({}, {"layout_a": MN_MAJOR}, "reads K-major a"),
        ({}, {"layout_b": STRIDED}, "by vectors"),
        ({}, {"k": 1032}, "multiples of"),
        ({}, {"k": 0}, "multiples of"),
        ({}, {"k": 2**31 - 64}, "32 bits"),
        ({"tile_n": 64, "tile_k": 64}, {"layout_b": MN_MAJOR, "n": 72}, "multiples of"),
        ({"stages": 1}, {}, "at least 2"),
        ({"min_blocks": 17}, {}, "an SM has 2048 threads; got 17 x 128"),
        ({"warps": 3}, {}, "even number of warps"),
        ({"tile_n": 40}, {}, "fragments have 16 columns"),
        ({"tile_k": 96}, {}, "a row of 192 bytes"),
        ({"stages": 9}, {}, "bytes of shared memory"),
    ],
)
def test_configs_that_do_not_fit(change, of_task, says):
    reason = gemm.refusal(replace(CONFIG, **change), replace(TASK, **of_task), "sm_90a")
    assert reason is not None and says in reason
    assert gemm.refusal(CONFIG, TASK, "sm_90a") is None
    if not of_task:
        a = np.ones((5, 1024), np.float16)
        b = np.ones((64, 1024), dtypes.float8_e4m3fn)
        with pytest.raises(ValueError, match=f"config does not fit: .*{says}"):
            cupykern.matmul(a, b.T, config=replace(CONFIG, **change))
