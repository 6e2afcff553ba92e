"""The platform's number types against numpy on each target: all codes, pairs, bytes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from platform_kernels import F32, FORMATS, U32, run

from cupykern import dtypes, nvfp4


def decoded(target, cpp):
    number, code = FORMATS[cpp]
    codes = np.arange(2 ** (8 * np.dtype(code).itemsize), dtype=code)
    text = (
        "KERNEL void word(const Code* x, float* y) {\n"
        "    const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "    y[i] = to_float(bit_cast<Number>(x[i]));\n}\n"
    )
    types = (("Number", cpp), ("Code", f"uint{8 * np.dtype(code).itemsize}_t"))
    y = np.zeros(codes.size, F32)
    _, y = run(target, text, codes, y, types=types, grid=codes.size // 64)
    return codes.view(number), y


@pytest.mark.parametrize("cpp", FORMATS)
def test_to_float_of_every_code(target, cpp):
    numbers, y = decoded(target, cpp)
    expected = numbers.astype(F32)
    nan = np.isnan(expected)
    assert (np.isnan(y) == nan).all()
    assert (y[~nan].view(U32) == expected[~nan].view(U32)).all()


@pytest.mark.parametrize("cpp", FORMATS)
def test_from_float_rounds_to_nearest_even(target, cpp):
    number, code = FORMATS[cpp]
    exact = np.arange(2 ** (8 * np.dtype(code).itemsize), dtype=code).view(number).astype(F32)
    exact = np.sort(exact[np.isfinite(exact)])
    between = (exact[1:].astype(np.float64) + exact[:-1]) / 2
    x = np.concatenate(
        [
            exact,
            between.astype(F32),  # ties
            np.nextafter(between.astype(F32), F32(np.inf)),
            np.nextafter(between.astype(F32), F32(-np.inf)),
            np.random.default_rng(1).standard_normal(4096).astype(F32),
            np.array([np.nan, np.inf, -np.inf, 1e38, -1e38, 0.0, -0.0], F32),
        ]
    )
    # FP32 subnormals are flushed on every target.
    x = np.where(np.abs(x) < 2.0**-126, np.copysign(F32(0), x), x)
    x = np.resize(x, -(-x.size // 64) * 64).astype(F32)
    with np.errstate(over="ignore"):
        expected = x.astype(number)
    if code == np.uint8:  # these saturate, infinities too
        largest = float(ml_dtypes.finfo(number).max)
        expected = np.where(np.isnan(x), x, np.clip(x, -largest, largest)).astype(number)
    text = (
        "KERNEL void word(const float* x, Code* y) {\n"
        "    const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "    y[i] = bit_cast<Code>(from_float<Number>(x[i]));\n}\n"
    )
    types = (("Number", cpp), ("Code", f"uint{8 * np.dtype(code).itemsize}_t"))
    _, y = run(target, text, x, np.zeros(x.size, code), types=types, grid=x.size // 64)
    nan = np.isnan(expected.astype(F32))
    assert (np.isnan(y.view(number).astype(F32)) == nan).all()
    assert (y[~nan] == expected.view(code)[~nan]).all()


@pytest.mark.parametrize("cpp", ["half", "bf16"])
def test_pack_and_maximum_pair(target, cpp):
    number, _ = FORMATS[cpp]
    a, b = np.random.default_rng(2).standard_normal((2, 64)).astype(F32)
    text = (
        "KERNEL void word(const float* a, const float* b, uint32_t* y) {\n"
        "    const int i = threadIdx.x;\n"
        "    y[i] = pack<Number>(a[i], b[i]);\n"
        "    y[64 + i] = maximum_pair<Number>(pack<Number>(a[i], b[i]), pack<Number>(b[i], "
        "a[i]));\n"
        "}\n"
    )
    *_, y = run(target, text, a, b, np.zeros(128, U32), types=(("Number", cpp),))
    pairs = np.stack([a, b], 1).astype(number)
    assert (y[:64].view(number).reshape(64, 2) == pairs).all()
    larger = np.maximum(pairs, pairs[:, ::-1])
    assert (y[64:].view(number).reshape(64, 2) == larger).all()


@pytest.mark.parametrize("cpp", FORMATS)
def test_unpack_of_every_code(target, cpp):
    number, code = FORMATS[cpp]
    codes = np.arange(2 ** (8 * np.dtype(code).itemsize), dtype=code)
    text = (
        "KERNEL void word(const Pair* x, float* y) {\n"
        "    const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "    unpack<Number>(x[i], y[2 * i], y[2 * i + 1]);\n}\n"
    )
    pair = np.dtype(f"u{2 * codes.itemsize}")
    types = (("Number", cpp), ("Pair", f"uint{16 * codes.itemsize}_t"))
    for shift in (0, 3):
        x = np.roll(codes, shift)
        y = np.zeros(codes.size, F32)
        _, y = run(target, text, x.view(pair), y, types=types, grid=codes.size // 128)
        expected = x.view(number).astype(F32)
        nan = np.isnan(expected)
        assert (np.isnan(y) == nan).all()
        assert (y[~nan].view(U32) == expected[~nan].view(U32)).all()


def test_extremes_of_integer_pairs(target):
    edges = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0xFF00, 0x00FF], np.uint16)
    a = np.repeat(edges, 32)
    b = np.tile(np.repeat(edges, 2), 16)
    text = (
        "KERNEL void word(const uint32_t* a, const uint32_t* b, uint32_t* y) {\n"
        "    const int i = threadIdx.x;\n"
        "    y[i] = max_unsigned_pair(a[i], b[i]);\n    y[128 + i] = min_unsigned_pair(a[i], "
        "b[i]);\n"
        "    y[256 + i] = max_signed_pair(a[i], b[i]);\n}\n"
    )
    *_, y = run(target, text, a.view(U32), b.view(U32), np.zeros(384, U32), threads=128)
    got = y.view(np.uint16).reshape(3, -1)
    np.testing.assert_array_equal(got[0], np.maximum(a, b))
    np.testing.assert_array_equal(got[1], np.minimum(a, b))
    signed = np.maximum(a.view(np.int16), b.view(np.int16))
    np.testing.assert_array_equal(got[2].view(np.int16), signed)


def test_pick_bytes_selects_from_both_operands(target):
    rng = np.random.default_rng(1)
    (a, b), digits = rng.integers(0, 2**32, (2, 64), np.uint32), rng.integers(0, 8, (64, 4))
    select = (digits << 4 * np.arange(4)).sum(1).astype(U32)
    text = (
        "KERNEL void word(const uint32_t* a, const uint32_t* b, const uint32_t* select, uint32_t* "
        "y) {\n"
        "    const int i = threadIdx.x;\n"
        "    y[i] = pick_bytes(a[i], b[i], select[i]);\n    y[64 + i] = pick_bytes(a[i], b[i], "
        "0x7342);\n}\n"
    )
    *_, y = run(target, text, a, b, select, np.zeros(128, U32), threads=64)
    both = np.concatenate([a.view(np.uint8).reshape(64, 4), b.view(np.uint8).reshape(64, 4)], 1)
    expected = np.concatenate([np.take_along_axis(both, digits, 1), both[:, [2, 4, 3, 7]]])
    np.testing.assert_array_equal(y.view(np.uint8).reshape(128, 4), expected)


@pytest.mark.parametrize("number", ["half", "bf16"])
def test_every_e2m1_code_times_every_scale_is_decoded_exactly(target, number):
    """Eight e2m1 numbers, every code at every place, times every e4m3 scale."""
    text = (
        '#include "platform/nvfp4.cuh"\n'
        "KERNEL void word(const uint32_t* codes, T* y) {\n"
        "    for (int i = threadIdx.x; i < 16 * 256; i += 64) {\n"
        "        uint32_t pairs[4];\n"
        "        decode_scaled<T>(codes[i % 16], bit_cast<e4m3>(uint8_t(i / 16)), pairs);\n"
        "        memcpy(y + 8 * i, pairs, 16);\n    }\n}\n"
    )
    places = (np.arange(16)[:, None] + np.arange(8)) % 16
    codes = (places << 4 * np.arange(8)).sum(1).astype(U32)
    dtype = dtypes.float16 if number == "half" else dtypes.bfloat16
    y = np.zeros((256, 16, 8), dtype)
    *_, y = run(target, text, codes, y, threads=64, types=(("T", number),))
    of_codes = np.array([*nvfp4.NUMBERS, *(-x for x in nvfp4.NUMBERS)], F32)[places]
    scales = np.arange(256, dtype=np.uint8).view(dtypes.float8_e4m3fn).astype(F32)
    np.testing.assert_array_equal(y.astype(F32), scales[:, None, None] * of_codes)
