"""NVFP4: codes, scales, the blocked order, quantisation, and what products make of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import ml_dtypes
import needs
import numpy as np
import pytest
from fake_gpu import fake_gpu
from nvfp4_checks import check_global_scales_of_one

import cupykern
from cupykern import OPS, arrays, check, dtypes, inputs, nvfp4
from cupykern.gemm import gemm, sm90_heuristic
from cupykern.gemm.decode_first import DecodeFirst
from cupykern.gemm.gemm_task import GemmTask, make_task
from cupykern.gemm.product import FP4, K_MAJOR, STRIDED, matrix
from cupykern.gemm.quantize_nvfp4_plan import NvFp4Config
from cupykern.gemm.sm90_config import ARCHS
from cupykern.gemm.sm90_epilogue import epilogue_of
from cupykern.gemm.sm90_gemm_config import Sm90GemmConfig, Sm90MixedGemmConfig
from cupykern.gemm.sm90_plan import sm90_plan
from cupykern.gemm.sm90_policies import Multicast, PingPong
from cupykern.numerics import as_float64
from cupykern.nvfp4 import NUMBERS, NvFp4
from cupykern.op import Call, as_tuple
from cupykern.ops.problems.products import NVFP4
from cupykern.ops.problems.scaled import nvfp4_variants

SCALED = next(op for op in OPS if op.name == "scaled_mm")
E4M3 = dtypes.float8_e4m3fn
CODES = np.array([*NUMBERS, *(-x for x in NUMBERS)])


def to_numpy(x) -> np.ndarray:
    x = as_float64(x)
    return x if isinstance(x, np.ndarray) else x.get()


def raw(x) -> np.ndarray:
    x = x.view(np.uint8)
    return x if isinstance(x, np.ndarray) else x.get()


def here(target, x: np.ndarray):
    """x in the target's namespace; FP8 as CuPy takes it."""
    if x.dtype == E4M3:
        return target.xp.asarray(np.ascontiguousarray(x).view(np.uint8)).view(E4M3)
    return target.xp.asarray(x)


def place(i: int, j: int, k: int) -> int:
    """Where the scale of (i, j) is, from the format's definition."""
    return ((i // 128) * -(-k // 64) + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4


# --- packing and order ---------------------------------------------------------------------------


def test_codes_are_those_of_ml_dtypes():
    packed = np.arange(256, dtype=np.uint8)[None]
    low, high = packed & 0xF, packed >> 4
    expected = np.stack([low, high], -1).reshape(1, 512).view(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(nvfp4.unpack_e2m1(packed), expected.astype(np.float32))


def test_packing_rounds_to_nearest_even_and_saturates():
    x = np.concatenate(
        [np.linspace(-7, 7, 1024), np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.5])]
    )
    x = np.concatenate([x, -x, [0.0, -0.0, 1e30, -np.inf]])
    expected = x.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    numbers = nvfp4.unpack_e2m1(nvfp4.pack_e2m1(x[None]))[0]
    np.testing.assert_array_equal(numbers, expected)
    assert nvfp4.pack_e2m1(np.array([np.nan, 6.0])) == 0x70
    with pytest.raises(ValueError, match="an even number of columns"):
        nvfp4.pack_e2m1(np.zeros((2, 3)))


@pytest.mark.parametrize(("rows", "k"), [(128, 64), (1, 16), (130, 208), (300, 64)])
def test_the_blocked_order_holds_each_scale_once(target, rows, k):
    rng = np.random.default_rng(1)
    scale = rng.integers(1, 255, (2, rows, k // 16), np.uint8).view(E4M3)
    flat = nvfp4.blocked_scales(here(target, scale))
    expected = np.zeros((2, -(-rows // 128) * -(-k // 64) * 512), np.uint8)
    for i, j in itertools.product(range(rows), range(k // 16)):
        expected[:, place(i, j, k)] = scale.view(np.uint8)[:, i, j]
    np.testing.assert_array_equal(raw(flat), expected)
    np.testing.assert_array_equal(raw(nvfp4.plain_scales(flat, rows, k)), scale.view(np.uint8))
    with pytest.raises(ValueError, match="scales; got"):
        nvfp4.plain_scales(flat[:, 1:], rows, k)


# --- products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["nvfp4", "float16", "bfloat16"])
def test_every_code_times_every_scale_is_exact(target, other):
    """All 16 codes with all 256 scales, zero and NaN too, exact; one group of K = 256 counts."""
    rows, k = 256, 64
    scale = np.zeros((rows, k // 16), np.uint8)
    scale[:, 1] = np.arange(256)
    codes = np.zeros((rows, k // 2), np.uint8)
    codes[:, 8:16] = np.arange(0, 16, 2) | np.arange(1, 17, 2) << 4  # group 1 has every code
    b = NvFp4(here(target, codes), here(target, scale.view(E4M3)))
    picks = np.eye(16, k, 16)
    if other == "nvfp4":
        ones = np.full((16, k // 16), 0x38, np.uint8).view(E4M3)  # 1
        a = NvFp4(here(target, nvfp4.pack_e2m1(picks)), here(target, ones))
    else:
        a = here(target, picks.astype(dtypes.NAMES[other]))
    expected = CODES[:, None] * scale[:, 1].view(E4M3).astype(np.float64)
    hopper = target.warp_size == 32 and target.arch in ARCHS
    calls = [(a, b, None), (b, a, None) if other != "nvfp4" else (a, b.to("blocked"), None)]
    if hopper:  # decoded in registers, and before
        calls += [(a, b, Sm90MixedGemmConfig(64, 128, 128, 3))]
        calls += [(a, b, DecodeFirst(Sm90GemmConfig(128, 64, 64, 8)))]
    for x, y, config in calls:
        y = y.T if x is b else y
        product = to_numpy(cupykern.scaled_mm(x, y, out_dtype="float32", config=config))
        product = product.T if x is b else product
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(product), nan)
        np.testing.assert_array_equal(product[~nan], expected[~nan])


def test_every_scale_counts_where_it_should(target):
    """128 x 64, each group with its own scale and one number of its own place, in both orders."""
    rows, k = 130, 128
    rng = np.random.default_rng(3)
    scale = (2.0 ** rng.integers(-6, 8, (rows, k // 16))).astype(E4M3)
    data = nvfp4.pack_e2m1(np.ones((rows, k)))
    x = NvFp4(here(target, data), here(target, scale), "plain", 0.5)
    groups = np.repeat(np.eye(k // 16), 16, 0)  # the sum of every group
    expected = 8 * scale.astype(np.float64)
    for y in (x, x.to("blocked"), x.to("blocked").to("plain")):
        product = cupykern.scaled_mm(
            here(target, groups.T.astype(np.float16)), y, out_dtype="float32"
        )
        np.testing.assert_array_equal(to_numpy(product).T, expected)


@pytest.mark.in_turn
def test_integers_are_exact(target):
    """Integer codes and power-of-two scales: any K and layout, bit for bit."""
    rng = np.random.default_rng(5)
    whole = np.array([0, 1, 2, 3, 4, 6])
    for m, n, k in ((70, 33, 208), (5, 130, 1040), (129, 64, 512), (1, 200, 48)):
        numbers = [rng.choice(whole, (r, k)) * rng.choice((-1, 1), (r, k)) for r in (m, n)]
        scales = [2.0 ** rng.integers(0, 3, (r, k // 16)) for r in (m, n)]
        operands = [
            NvFp4(here(target, nvfp4.pack_e2m1(x)), here(target, s.astype(E4M3)), "plain", 0.25)
            for x, s in zip(numbers, scales, strict=True)
        ]
        a, b = (x * np.repeat(s, 16, 1) for x, s in zip(numbers, scales, strict=True))
        task = GemmTask(
            *(1, m, n, k, FP4, FP4, K_MAJOR, K_MAJOR),
            nvfp4_tma=k % 32 == 0,
            epilogue="general",
            epilogue_decoded="general",
        )
        for config in gemm.configs(task, target.arch):
            if isinstance(config, sm90_heuristic.CONFIGS) and target.warp_size != 32:
                continue
            product = cupykern.scaled_mm(
                operands[0], operands[1].to("blocked"), out_dtype="float32", config=config
            )
            np.testing.assert_array_equal(to_numpy(product), a @ b.T / 16)


def test_scales_may_have_a_stride(target):
    x = nvfp4.random("normal", (20, 48), 3, np, "C").to("plain")
    stepped = np.zeros((20, 6), np.uint8)
    stepped[:, ::2] = raw(x.scale)
    scale = here(target, stepped).view(E4M3)[:, ::2]
    a = here(target, np.random.default_rng(1).standard_normal((7, 48)).astype(np.float16))
    number = here(target, np.asarray(x.global_scale))
    products = [
        to_numpy(cupykern.scaled_mm(a, NvFp4(here(target, x.data), s, "plain", number)))
        for s in (here(target, x.scale), scale)
    ]
    np.testing.assert_array_equal(*products)


def test_what_lies_behind_codes_and_scales_is_not_read(target):
    """Rows at multiples of 8 bytes; strided bytes; padding of NaN; another matrix behind."""
    x = nvfp4.random("normal", (20, 48), 3, np, "C")
    dense = x.to("plain")
    wide = np.full((20, 64), 0xFF, np.uint8)
    wide[:, :24] = dense.data
    padded = raw(dense.to("blocked").scale).copy()
    padded[padded == 0] = 0x7F  # no scale of this one is zero: all of these are padding
    stepped = np.empty((20, 48), np.uint8)
    stepped[:, ::2] = dense.data
    a = np.random.default_rng(1).standard_normal((7, 48)).astype(np.float16)
    expected = None
    for data, scale, layout in (
        (dense.data, dense.scale, "plain"),
        (wide[:, :24], dense.scale, "plain"),
        (stepped[:, ::2], dense.scale, "plain"),
        (dense.data, padded.view(E4M3), "blocked"),
    ):
        data = (
            here(target, data)
            if data.flags.c_contiguous
            else here(target, data.base)[:, : data.base.shape[1]]
        )
        if data.shape[1] != 24:
            data = data[:, :24] if data.shape[1] == 64 else data[:, ::2]
        b = NvFp4(data, here(target, scale), layout, here(target, np.asarray(dense.global_scale)))
        product = to_numpy(cupykern.scaled_mm(here(target, a), b))
        expected = product if expected is None else expected
        np.testing.assert_array_equal(product, expected)


def test_nvfp4_may_be_on_either_side(target):
    """NvFp4 on the left is the transposed product; bias, activation and out go along."""
    xp = target.xp
    rng = np.random.default_rng(2)
    a = nvfp4.random("normal", (2, 20, 64), 4, xp, "C")
    b = xp.asarray(rng.standard_normal((64, 30)).astype(np.float16))
    columns = xp.asarray(rng.uniform(0.5, 2, (1, 30)).astype(np.float32))
    for bias in (
        rng.standard_normal(30),
        rng.standard_normal((20, 30)),
        rng.standard_normal((20, 1)),
    ):
        call = {"bias": xp.asarray(bias, np.float32), "activation": "silu", "out_dtype": "bfloat16"}
        out = xp.empty((2, 20, 30), dtypes.bfloat16)
        assert cupykern.scaled_mm(a, b, None, columns, out=out, **call) is out
        references = SCALED.reference(a, b, None, columns, **call)
        bounds = SCALED.bound(a, b, None, columns, **call, reference=references)
        assert check.compare((out,), references, bounds).ok


# Of a, its scale's and NvFp4 b's columns; what else the call has.
DECODED = (
    (NVFP4, (300,), {}),
    (NVFP4, (300,), {"out_dtype": "float16", "bias": (200,), "activation": "gelu"}),
    ("bfloat16", (140,), {"bias": (200,), "activation": "silu"}),
    ("float16", (2, 140), {"out_dtype": "float32", "bias": (200,)}),
    ("float16", (3, 1), {}),  # each matrix has a scale of its own
)


@needs.hopper
@pytest.mark.parametrize(("dtype", "rows", "options"), DECODED)
def test_decoded_operands_take_their_scales_in_the_epilogue(target, dtype, rows, options):
    """Each in an array, by the short end of a tile where the other ones are."""
    xp, rng = target.xp, np.random.default_rng(4)
    b = nvfp4.random("normal", (200, 208), 5, xp, "C")
    a = nvfp4.random("normal", (*rows, 208), 3, xp, "C")
    scales = ()
    if dtype != NVFP4:
        a = cupykern.asarray(rng.standard_normal((*rows, 208)), dtypes.NAMES[dtype], target.name)
        shape = (3, 1, 1) if rows == (3, 1) else (1,)
        scales = (xp.asarray(rng.uniform(-2, -0.5, shape), np.float32),)
    options = dict(options)
    if "bias" in options:
        options["bias"] = xp.asarray(rng.standard_normal(options["bias"]), np.float16)
    config = DecodeFirst(Sm90GemmConfig(128, 128, 64, 3, PingPong(), Multicast(2)))
    y = cupykern.scaled_mm(a, b, *scales, **options, config=config)
    references = SCALED.reference(a, b, *scales, **options)
    bounds = SCALED.bound(a, b, *scales, **options, reference=references)
    assert check.compare((y,), references, bounds).ok


def test_the_default_dtype_of_a_product(target):
    xp = target.xp
    x = nvfp4.random("normal", (16, 32), 1, xp, "C")
    half = xp.ones((16, 32), np.float16)
    assert cupykern.scaled_mm(x, x).dtype == np.float32
    assert cupykern.scaled_mm(half, x).dtype == np.float16
    assert cupykern.scaled_mm(x, half.T).dtype == np.float32


def test_every_variant_is_chosen_by_some_product():
    for arch in ("sm_80", "sm_90a", "gfx942", "gfx1100"):
        chosen = set()
        for a in (FP4, dtypes.float16, dtypes.bfloat16):
            for m, k in ((1, 4096), (1, 4112), (64, 4096), (4096, 4096)):
                for epilogue in ("tma_store", "general"):
                    for tma in (True, False):
                        task = GemmTask(
                            *(1, m, 4096, k, a, FP4, K_MAJOR, K_MAJOR),
                            tma=tma, nvfp4_tma=tma, epilogue=epilogue,
                        )  # fmt: skip
                        config = gemm.choose_config(task, arch)
                        if config in sm90_heuristic.compiled_ahead(task, (config,)):
                            chosen.add(gemm.variant(task, config))
        portable = {v for v in nvfp4_variants(arch) if v.kernel == "gemm"}
        assert portable <= chosen <= set(nvfp4_variants(arch)) and len(portable) <= 8


@pytest.mark.parametrize("of_a", [FP4, dtypes.float16, dtypes.bfloat16])
@needs.no_gpu
def test_tasks_have_the_epilogues_that_are_launched(monkeypatch, of_a):
    """Times are estimated of the task: an NVFP4 `a`, decoded to 16 bits, allows a TMA store."""
    pytest.importorskip("cupy")
    launched = []

    def plan_of(target, product, task, config):
        launched.append((task.epilogue, epilogue_of(product, config.swap_ab)))
        return sm90_plan(target, product, task, config)

    monkeypatch.setattr(gemm, "sm90_plan", plan_of)
    with fake_gpu(monkeypatch) as gpu:
        b = NvFp4(gpu.array((512, 256), "uint8"), gpu.array((512, 32), "uint8").view(E4M3))
        c = NvFp4(gpu.array((128, 256), "uint8"), gpu.array((128, 32), "uint8").view(E4M3))
        a = c if of_a == FP4 else gpu.array((128, 512), of_a)
        for options in ({}, {"activation": "silu"}, {"activation": "gelu"}, {"bias": True}):
            if "bias" in options:
                options = {"bias": gpu.array((512,), "float16")}
            for out_dtype in ("float16", "float32"):
                config = Sm90MixedGemmConfig(64, 128, 128, 3)
                cupykern.scaled_mm(a, b, out_dtype=out_dtype, config=config, **options)
    assert len(launched) == 8 and len({of_product for _, of_product in launched}) == 4
    assert all(of_task == of_product for of_task, of_product in launched)


@needs.hopper
@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize("general", [False, True])
def test_a_global_scale_in_memory_scales_decoded_products(target, swap_ab, general):
    """With the general epilogue too, which a bias per row takes."""
    codes = here(target, np.full((136, 144), 0x22, np.uint8))  # ones
    scales = here(target, np.ones((136, 18), np.float32).astype(E4M3))
    b = NvFp4(codes, scales, "plain", here(target, np.full(1, 0.5, np.float32)))
    config = DecodeFirst(Sm90GemmConfig(128, 128, 64, 3, swap_ab=swap_ab))
    a = target.xp.ones((40, 288), np.float16)
    bias = target.xp.zeros((40, 1), np.float16) if general else None
    for out_dtype in ("float16", "float32"):
        product = cupykern.scaled_mm(a, b, bias=bias, config=config, out_dtype=out_dtype)
        assert bool((product == 144).all())


# --- quantisation --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_numbers_that_the_format_has_are_kept(target, dtype):
    rng = np.random.default_rng(1)
    scale = rng.choice([0.5, 1.0, 2.0, 448.0], (40, 8))
    scale[0, 0] = 448.0
    x = rng.choice(CODES, (40, 128))
    x[:, ::16] = 6.0  # so that the scale is what it was
    x = (x * np.repeat(scale, 16, 1)).astype(dtypes.NAMES[dtype])
    for layout in nvfp4.LAYOUTS:
        config = NvFp4Config(64) if layout == "blocked" and dtype == "float32" else None
        q = cupykern.quantize_nvfp4(target.xp.asarray(x), layout=layout, config=config)
        assert to_numpy(q.global_scale) == 1 and q.shape == x.shape and q.layout == layout
        np.testing.assert_array_equal(to_numpy(q.dequantize()), x.astype(np.float64))
        np.testing.assert_array_equal(to_numpy(q.to("plain").scale), scale)


def test_codes_are_the_nearest_of_their_scales(target):
    x = np.random.default_rng(1).standard_normal((33, 160)).astype(np.float32)
    q = cupykern.quantize_nvfp4(target.xp.asarray(x))
    factor = np.repeat(to_numpy(q.scale), 16, 1) * to_numpy(q.global_scale)
    got = to_numpy(q.dequantize())
    nearest = np.min(np.abs(x[..., None] - factor[..., None] * CODES), axis=-1)
    assert (np.abs(x - got) <= nearest * (1 + 1e-5)).all()


def test_a_global_scale_below_the_least_normal_number_is_one(target):
    check_global_scales_of_one(target.xp)


def test_what_is_not_finite_spoils_its_group_alone(target):
    x = np.ones((4, 64), np.float32)
    x[1, 20], x[2, 5], x[3, 63] = np.nan, np.inf, -np.inf
    q = cupykern.quantize_nvfp4(target.xp.asarray(x), layout="blocked")
    spoiled = np.isnan(to_numpy(q.dequantize())).reshape(4, 4, 16)
    expected = np.zeros((4, 4), bool)
    expected[[1, 2, 3], [1, 0, 3]] = True
    np.testing.assert_array_equal(spoiled, np.broadcast_to(expected[..., None], (4, 4, 16)))
    np.testing.assert_allclose(to_numpy(q.dequantize())[0], 1, rtol=0.05)


def test_products_of_quantised_weights_are_within_the_bound(target):
    xp = target.xp
    x = np.random.default_rng(1).standard_normal((2, 40, 96)).astype(np.float16)
    q = cupykern.quantize_nvfp4(xp.asarray(x), layout="blocked")
    a = xp.asarray(np.random.default_rng(2).standard_normal((30, 96)).astype(np.float16))
    references = SCALED.reference(a, q)
    bounds = SCALED.bound(a, q, reference=references)
    assert check.compare((cupykern.scaled_mm(a, q),), references, bounds).ok


def test_watch_finds_a_nan_in_an_nvfp4_operand(target):
    x = np.ones((4, 32), np.float16)
    x[2, 20] = np.nan
    q = cupykern.quantize_nvfp4(target.xp.asarray(x))
    with cupykern.watch() as w:
        cupykern.scaled_mm(target.xp.ones((1, 32), np.float16), q)
    (record,) = w.records
    assert list(record.inputs) == ["b"] and record.report.first_index == (0, 2)


def test_configs_that_hoppers_mainloop_cannot_take_are_refused():
    task = GemmTask(1, 256, 4096, 4096, dtypes.float16, FP4, K_MAJOR, K_MAJOR)
    decode = DecodeFirst(Sm90GemmConfig(128, 128, 64, 4))
    for config, changes, says in (
        (Sm90MixedGemmConfig(64, 128, 320, 3), {}, "tile_k at most 256"),
        (Sm90MixedGemmConfig(64, 128, 128, 8), {"nvfp4_tma": False}, "strides that TMA walks"),
        (decode, {"scale_vectors": True}, "one scale of all"),
        (decode, {"b": dtypes.float16}, "DecodeFirst is for NVFP4 weights"),
        (Sm90MixedGemmConfig(64, 128, 128, 4), {"layout_a": STRIDED}, "TMA takes K-major"),
    ):
        assert says in gemm.refusal(config, replace(task, **changes), "sm_90a")


def test_rows_that_tma_does_not_walk_are_within_the_bound(target):
    """K = 48 has rows of 24 bytes: decoded before, or by the portable main loop."""
    x = nvfp4.random("normal", (200, 48), 3, np, "C")
    place = matrix(x.data.swapaxes(-1, -2), ())
    task = make_task(matrix(np.ones((200, 48), np.float16), ()), place, 1, 200, 200, 48)
    assert not task.nvfp4_tma
    configs = gemm.configs(task, "sm_90a")
    hopper = [config for config in configs if isinstance(config, sm90_heuristic.CONFIGS)]
    assert hopper and all(isinstance(config, DecodeFirst) for config in hopper)


# --- errors --------------------------------------------------------------------------------------

DATA, SCALE = np.zeros((4, 16), np.uint8), np.zeros((4, 2), E4M3)
X = NvFp4(DATA, SCALE)
HALF = np.ones((4, 32), np.float16)


@pytest.mark.parametrize(
    ("error", "says", "call"),
    [
        (TypeError, "data must be a cupy or numpy array", lambda: NvFp4([1], SCALE)),
        (TypeError, "data must be uint8", lambda: NvFp4(DATA.astype(np.int8), SCALE)),
        (TypeError, "scale must be float8_e4m3fn", lambda: NvFp4(DATA, DATA[:, :2])),
        (
            TypeError, "global_scale must be a number or float32",
            lambda: NvFp4(DATA, SCALE, "plain", np.ones(1))
        ),
        (
            ValueError, "global_scale must have one element",
            lambda: NvFp4(DATA, SCALE, "plain", np.ones(2, np.float32))
        ),
        (ValueError, "global_scale must be finite", lambda: NvFp4(DATA, SCALE, "plain", np.inf)),
        (ValueError, "layout must be", lambda: NvFp4(DATA, SCALE, "tiled")),
        (ValueError, "layout must be", lambda: X.to("tiled")),
        (ValueError, "K a multiple of 16", lambda: NvFp4(DATA[:, :12], SCALE)),
        (ValueError, r"scale must have shape \(4, 2\)", lambda: NvFp4(DATA, SCALE[:3])),
        (ValueError, r"scale must have shape \(512,\)", lambda: NvFp4(DATA, SCALE, "blocked")),
        (ValueError, "scale_b must be None", lambda: cupykern.scaled_mm(HALF, X, None, 2.0)),
        (ValueError, "scale_a must be None", lambda: cupykern.scaled_mm(X, X, 2.0)),
        (ValueError, "scales by tensor, row or column", lambda: cupykern.scaled_mm(
            np.ones((4, 256), np.float16),
            NvFp4(np.zeros((4, 128), np.uint8), np.zeros((4, 16), E4M3)),
            np.ones((4, 2), np.float32))),
        (ValueError, "a's columns must be b's rows", lambda: cupykern.scaled_mm(HALF[:, :16], X)),
        (ValueError, "a's columns must be b's rows", lambda: cupykern.scaled_mm(X, HALF)),
        (ValueError, r"shape \(4, 3\); got \(3, 4\)", lambda: cupykern.scaled_mm(
            X, HALF.T[:, :3], out=np.zeros((3, 4), np.float32))),
        (ValueError, "scale_a must be None", lambda: cupykern.scaled_mm(X, HALF.T, 2.0)),
        (TypeError, "scale_b must be a real", lambda: cupykern.scaled_mm(X, HALF.T, scale_b="x")),
        (ValueError, r"scale_b must have one element or shape \(..., 1, 4\)", lambda: (
            cupykern.scaled_mm(X, HALF.T, scale_b=np.ones((4, 1), np.float32)))),
        (ValueError, r"bias must broadcast to \(4, 4\)", lambda: cupykern.scaled_mm(
            X, HALF.T, bias=np.ones(5, np.float32))),
        (ValueError, r"operands\['t'\] must broadcast to \(4, 4\)", lambda: cupykern.scaled_mm(
            X, HALF.T, epilogue="acc + t", operands={"t": np.ones((4, 3), np.float32)})),
        (
            TypeError, "b must be NvFp4, float16 or bfloat16",
            lambda: cupykern.scaled_mm(X, HALF.T.astype(E4M3))
        ),
        (TypeError, "a and b must both be", lambda: cupykern.scaled_mm(HALF.astype(E4M3), X)),
        (
            TypeError, "a's dtype must be one of",
            lambda: cupykern.scaled_mm(HALF.astype(ml_dtypes.float4_e2m1fn), X)
        ),
        (
            TypeError, "a's dtype must be one of",
            lambda: cupykern.matmul(HALF.astype(ml_dtypes.float4_e2m1fn), HALF.T)
        ),
        (TypeError, "b must be a cupy or numpy array", lambda: cupykern.matmul(HALF, X)),
        (TypeError, "global_scale must be a number", lambda: NvFp4(DATA, SCALE, "plain", None)),
        (TypeError, "x's dtype must be one of", lambda: cupykern.quantize_nvfp4(DATA)),
        (ValueError, "K a multiple of 16", lambda: cupykern.quantize_nvfp4(HALF[:, :20])),
        (ValueError, "layout must be", lambda: cupykern.quantize_nvfp4(HALF, layout="tiled")),
        (
            TypeError, "config must be a NvFp4Config",
            lambda: cupykern.quantize_nvfp4(HALF, config=256)
        ),
        (
            ValueError, "multiple of 64",
            lambda: cupykern.quantize_nvfp4(HALF, config=NvFp4Config(96))
        ),
        (
            ValueError, "num_blocks must be",
            lambda: cupykern.quantize_nvfp4(HALF, config=NvFp4Config(64, 0))
        ),
    ],
)  # fmt: skip
def test_illegal_arguments_are_refused(error, says, call):
    with pytest.raises(error, match=says):
        call()


def test_empty_arrays_give_empty_results(target):
    for shape in ((0, 32), (5, 0), (0, 4, 16)):
        q = cupykern.quantize_nvfp4(target.xp.ones(shape, np.float16), layout="blocked")
        assert q.shape == shape
    a = arrays.empty_of(target.xp, (3, 0), dtypes.float16)
    q = cupykern.quantize_nvfp4(target.xp.ones((5, 0), np.float16))
    assert (to_numpy(cupykern.scaled_mm(a, q)) == 0).all()


def test_bench_refuses_a_k_that_is_no_multiple_of_16():
    with pytest.raises(ValueError, match="multiple of 16"):
        SCALED.bench_problem((4, 4, 40), NVFP4)


@pytest.mark.parametrize("kind", ["normal", "special"])
def test_sampled_rows_are_verified_as_the_whole(kind):
    """The rows of a sample hold the number that decides about every scale, so that their reference
    is that of the whole."""
    op = next(op for op in OPS if op.name == "quantize_nvfp4")
    x = inputs.values(kind, (300, 64), dtypes.float16, 3)
    largest = np.unravel_index(np.argmax(np.where(np.isfinite(x), np.abs(x), 0)), x.shape)[0]
    call = Call((x,), {"layout": "blocked"})
    outputs = as_tuple(op.run(*call.args, **call.kwargs))
    part, some = op.sample(call, outputs, 10 * 64, 1)
    assert (part.args[0] == x[largest]).sum(axis=1).max() >= 60 and len(part.args[0]) <= 11
    assert [y.shape for y in some] == [part.args[0].shape, (len(part.args[0]), 4), ()]
    references = op.reference(*part.args, **part.kwargs)
    assert references[2] == op.reference(x)[2]
    bounds = op.bound(*part.args, **part.kwargs, reference=references)
    assert check.compare(some, references, bounds).ok
    wrong = some[0].copy()
    at = tuple(np.argwhere(np.isfinite(references[0]))[0])
    wrong[at] = references[0][at] + 2 * bounds[0].elementwise[at]
    assert not check.compare((wrong, *some[1:]), references, bounds).ok
    assert op.sample(call, outputs, x.size, 1) == (call, outputs)
