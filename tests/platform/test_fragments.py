"""Fragments of matrices and their products, against numpy, on each target."""

from __future__ import annotations

import ml_dtypes
import needs
import numpy as np
import pytest
import tensor_core
from platform_kernels import F32, FORMATS, U32, run

from cupykern.kernels import Variant

MATRIX_FORMATS = {
    **{cpp: number for cpp, (number, _) in FORMATS.items()},
    "int8_t": np.int8,
}
_MATRICES = """
// Rows of kBytes from global memory on; chunk c of row i.
template <int kRows, int kBytes> struct Rows {
    Bytes<16> chunks[kRows][kBytes / 16];
    DEVICE const void* operator()(int row, int chunk) const { return &chunks[row][chunk]; }
    DEVICE void fill(const void* from) {
        const Bytes<16>* p = static_cast<const Bytes<16>*>(from);
        for (int i = threadIdx.x; i < kRows * kBytes / 16; i += kNumThreads) {
            chunks[i / (kBytes / 16)][i % (kBytes / 16)] = p[i];
        }
    }
};
"""


def multiply(target, body, a, b, out, types, constants=()):
    """One warp's `body`, with a and b (32 rows of k, or k rows of 32) in shared memory."""
    k = a.shape[1]

    def storage(x):
        rows, elements = x.T.shape if not x.flags.c_contiguous else x.shape
        return f"Rows<{rows}, {elements * x.itemsize}>"

    text = (
        f"{_MATRICES}struct Storage {{ {storage(a)} a; {storage(b)} b; }};\n"
        "KERNEL void word(const uint8_t* a, const uint8_t* b, Out* y) {\n"
        "    SHARED_STORAGE(Storage, s);\n    s.a.fill(a);\n    s.b.fill(b);\n    sync_block();\n"
        f"    constexpr int kDepth = {k};\n{body}}}\n"
    )
    as_bytes = [
        np.ascontiguousarray(x if x.flags.c_contiguous else x.T).view(np.uint8) for x in (a, b)
    ]
    shared = sum(x.nbytes for x in as_bytes)
    variant = Variant("word", types, constants, target.warp_size, text=text)
    here = [target.xp.asarray(x) for x in (*as_bytes, out)]
    here[-1] = here[-1].copy()
    target.compile(variant)(1, tuple(here), shared)
    return here[-1] if isinstance(here[-1], np.ndarray) else here[-1].get()


def integers(shape, cpp, mn_major, seed):
    """Small integers: (mn, k), in memory by k if mn_major."""
    x = np.random.default_rng(seed).integers(-8, 9, shape).astype(MATRIX_FORMATS[cpp])
    return np.asfortranarray(x) if mn_major else x


_STORE = """
    for (int m = 0; m < 2; ++m) for (int n = 0; n < 2; ++n) {
        for (int i = 0; i < Accumulator<A>::kCount; ++i) {
            const int row = Accumulator<A>::row(lane_id(), i);
            const int col = Accumulator<A>::col(lane_id(), i);
            y[(m * 16 + row) * 32 + n * 16 + COLUMN] = acc[m][n].values[i];
        }
    }
"""


@pytest.mark.parametrize(
    ("a", "b", "mn_major"),
    [
        *((c, c, (i, j)) for c in ("half", "bf16") for i in (0, 1) for j in (0, 1)),
        ("int8_t", "int8_t", (0, 0)),  # bytes lie along k
        *(
            pytest.param(a, b, (0, 0), marks=needs.fp8_products)
            for a in ("e4m3", "e5m2")
            for b in ("e4m3", "e5m2")
        ),
    ],
)
def test_products_of_fragments(target, a, b, mn_major):
    """Every element of the product, each in one place, added to what the accumulator held."""
    size = np.dtype(MATRIX_FORMATS[a]).itemsize
    depth = 2 * 32 // size
    body = """
    Accumulator<A> acc[2][2] = {};
    for (int m = 0; m < 2; ++m) for (int n = 0; n < 2; ++n) {
        for (int i = 0; i < Accumulator<A>::kCount; ++i) acc[m][n].values[i] = m * 2 + n;
    }
    for (int k = 0; k < kDepth; k += kFragmentK<A>) {
        FragmentA<A> f[2];
        FragmentB<B> g[2];
        for (int i = 0; i < 2; ++i) {
            load_fragment<kMnMajorA != 0>(f[i], s.a, 16 * i, k);
            load_fragment<kMnMajorB != 0>(g[i], s.b, 16 * i, k);
        }
        mma(acc, f, g);
    }
""" + _STORE.replace("COLUMN", "col")
    out = "int" if a == "int8_t" else "float"
    x, y = (
        integers((32, depth), c, o, i)
        for i, (c, o) in enumerate(zip((a, b), mn_major, strict=True))
    )
    poison = np.full((32, 32), -(2**20), np.int32 if a == "int8_t" else F32)
    product = multiply(
        target, body, x, y, poison, (("A", a), ("B", b), ("Out", out)),
        (("kMnMajorA", mn_major[0]), ("kMnMajorB", mn_major[1])),
    )  # fmt: skip
    expected = x.astype(np.float64) @ y.astype(np.float64).T
    expected += np.kron([[0, 1], [2, 3]], np.ones((16, 16)))
    np.testing.assert_array_equal(product, expected)


@needs.host
@pytest.mark.parametrize("a", ["half", "bf16", "e4m3", "e5m2"])
def test_products_are_added_as_tensor_cores_do(target, a):
    """Truncated after alignment, bit for bit.  Other matrix units than the host's align to other
    bits, and some multiply FP8 as FP16."""
    body = """
    Accumulator<A> acc[2][2] = {};
    for (int k = 0; k < kDepth; k += kFragmentK<A>) {
        FragmentA<A> f[2];
        FragmentB<A> g[2];
        for (int i = 0; i < 2; ++i) {
            load_fragment<false>(f[i], s.a, 16 * i, k);
            load_fragment<false>(g[i], s.b, 16 * i, k);
        }
        mma(acc, f, g);
    }
""" + _STORE.replace("COLUMN", "col")
    depth = 128 // np.dtype(MATRIX_FORMATS[a]).itemsize
    rng = np.random.default_rng(3)
    sizes = np.exp2(rng.uniform(-5, 5, (2, 32, depth)))
    x, y = (sizes * rng.choice((-1, 1, 1), sizes.shape)).astype(MATRIX_FORMATS[a])
    product = multiply(target, body, x, y, np.full((32, 32), -1, F32), (("A", a), ("Out", "float")))
    expected = tensor_core.product(x.astype(np.float64), y.astype(np.float64), (a, a))
    np.testing.assert_array_equal(product, expected)


@pytest.mark.parametrize("side", ["kSideA", "kSideB"])
@pytest.mark.parametrize("number", ["half", "bf16"])
def test_fragments_of_single_elements(target, number, side):
    """What load_fragment makes of a tile, when each lane asks for its elements."""
    text = f"""{_MATRICES}
struct Storage {{ Rows<32, 64> tile; }};
KERNEL void word(const T* x, uint32_t* y) {{
    SHARED_STORAGE(Storage, s);
    s.tile.fill(x);
    sync_block();
    for (int first = 0; first < 32; first += 16) for (int k = 0; k < 32; k += 16) {{
        Fragment<T, {side}> f, g;
        collect_fragment(f, [&](int mn, int i) {{ return x[(first + mn) * 32 + k + i]; }});
        load_fragment<false>(g, s.tile, first, k);
        uint32_t a[sizeof(f) / 4], b[sizeof(f) / 4];
        memcpy(a, &f, sizeof(f));
        memcpy(b, &g, sizeof(g));
        for (int i = 0; i < int(sizeof(f) / 4); ++i) y[threadIdx.x] += a[i] == b[i];
    }}
}}
"""
    x, y = np.arange(1024, dtype=np.uint16), np.zeros(target.warp_size, U32)
    variant = Variant("word", (("T", number),), (), target.warp_size, text=text)
    here = [target.xp.asarray(a) for a in (x, y)]
    target.compile(variant)(1, tuple(here), x.nbytes)
    same = here[1] if target.name == "host" else here[1].get()
    assert (same == same[0]).all() and same[0] >= 4 * 2 and same[0] % 4 == 0


@pytest.mark.parametrize("mn_major", [0, 1])
@pytest.mark.parametrize("chunks", [8, 16])
def test_loaders_load_fragments(target, chunks, mn_major):
    """What load_fragment does, of a tile of 64 rows from row 16 (or the first element) on."""
    text = """
#include "common/shared_tile.cuh"
using Tile = SharedTile<64, 16 * kChunks>;
struct Storage { Tile tile; };
KERNEL void word(const half* x, uint32_t* y) {
    SHARED_STORAGE(Storage, s);
    TileCopier<half, Tile>(x, 8 * kChunks, 8 * kChunks).start<false>(s.tile, 0, 64);
    copy_async_commit();
    copy_async_wait<0>();
    sync_block();
    constexpr int kFirst = kMnMajor ? 0 : 16;
    FragmentLoader<kMnMajor != 0, half, kSideB, Tile> loader(kFirst);
    loader.forget();
    for (int mn = 0; mn < 32; mn += 16) for (int k = 0; k < 48; k += 16) {
        Fragment<half, kSideB> f, g;
        loader.load(f, s.tile, mn, k);
        load_fragment<kMnMajor != 0>(g, s.tile, kFirst + mn, k);
        uint32_t a[sizeof(f) / 4], b[sizeof(f) / 4];
        memcpy(a, &f, sizeof(f));
        memcpy(b, &g, sizeof(g));
        for (int i = 0; i < int(sizeof(f) / 4); ++i) y[threadIdx.x] += a[i] == b[i];
    }
}
"""
    x = np.arange(64 * 8 * chunks, dtype=np.uint16).view(np.float16)
    y = np.zeros(target.warp_size, U32)
    constants = (("kChunks", chunks), ("kMnMajor", mn_major))
    variant = Variant("word", (), constants, target.warp_size, text=text)
    here = [target.xp.asarray(a) for a in (x, y)]
    target.compile(variant)(1, tuple(here), 64 * 16 * chunks)
    same = here[1] if target.name == "host" else here[1].get()
    assert (same == same[0]).all() and same[0] >= 6 * 2 and same[0] % 6 == 0


@pytest.mark.parametrize("number", ["half", "bf16"])
def test_sums_become_an_operand(target, number):
    """(a b^T) b, the first accumulator in registers; transposed where columns stay columns."""
    body = """
    constexpr bool kRowsStay = kAccumulatorSide == kSideA;
    Accumulator<A> product[2][2] = {}, acc[2][2] = {};
    for (int k = 0; k < kDepth; k += 16) {
        FragmentA<A> f[2];
        FragmentB<A> g[2];
        for (int i = 0; i < 2; ++i) {
            if constexpr (kRowsStay) load_fragment<false>(f[i], s.a, 16 * i, k);
            else load_fragment<false>(f[i], s.b, 16 * i, k);
            if constexpr (kRowsStay) load_fragment<false>(g[i], s.b, 16 * i, k);
            else load_fragment<false>(g[i], s.a, 16 * i, k);
        }
        mma(product, f, g);
    }
    for (int k = 0; k < 2; ++k) {
        Fragment<A, kAccumulatorSide> f[2];
        Fragment<A, kRowsStay ? kSideB : kSideA> g[2];
        for (int i = 0; i < 2; ++i) {
            accumulator_to_fragment<A>(f[i], kRowsStay ? product[i][k] : product[k][i]);
            load_fragment<true>(g[i], s.b, 16 * i, 16 * k);
        }
        const auto multiply = [&](const auto& product, const auto& other) {
            if constexpr (kRowsStay) mma(acc, product, other);
            else mma(acc, other, product);
        };
        multiply(f, g);
    }
    for (int m = 0; m < 2; ++m) for (int n = 0; n < 2; ++n) {
        for (int i = 0; i < Accumulator<A>::kCount; ++i) {
            const int row = m * 16 + Accumulator<A>::row(lane_id(), i);
            const int col = n * 16 + Accumulator<A>::col(lane_id(), i);
            y[kRowsStay ? row * 32 + col : col * 32 + row] = acc[m][n].values[i];
        }
    }
"""
    x, y = (np.sign(integers((32, 32), number, False, i)) for i in range(2))
    product = multiply(
        target, body, x, y, np.full((32, 32), -1, F32), (("A", number), ("Out", "float"))
    )
    x, y = x.astype(np.float64), y.astype(np.float64)
    np.testing.assert_array_equal(product, x @ y.T @ y)


@needs.fp16_accumulators
def test_products_summed_in_fp16(target):
    body = """
    HalfAccumulator acc[2][2] = {};
    for (int k = 0; k < kDepth; k += 16) {
        FragmentA<half> f[2];
        FragmentB<half> g[2];
        for (int i = 0; i < 2; ++i) {
            load_fragment<false>(f[i], s.a, 16 * i, k);
            load_fragment<false>(g[i], s.b, 16 * i, k);
        }
        mma(acc, f, g);
    }
    for (int m = 0; m < 2; ++m) for (int n = 0; n < 2; ++n) {
        for (int i = 0; i < HalfAccumulator::kCount; ++i) {
            const int row = m * 16 + Accumulator<half>::row(lane_id(), i);
            const int col = n * 16 + Accumulator<half>::col(lane_id(), i);
            y[row * 32 + col] = acc[m][n].value(i);
        }
    }
"""
    x, y = (integers((32, 48), "half", False, i) for i in range(2))
    x[:, 0], y[0, 0], x[:, 16:], y[0, 16:] = 64, 64, 0, 0  # 4096 and more is a multiple of 4
    out = multiply(target, body, x, y, np.full((32, 32), -1, F32), (("Out", "float"),))
    exact = x.astype(np.float64) @ y.astype(np.float64).T
    assert (np.abs(exact[:, 0]) > 2048).any()
    np.testing.assert_array_equal(out, exact.astype(np.float16).astype(F32))


@pytest.mark.parametrize("mn_major", [0, 1])
@pytest.mark.parametrize("stored", ["e4m3", "e5m2", "int8_t"])
@pytest.mark.parametrize("a", ["half", "bf16"])
def test_mixed_input_fragments_multiply_converted_bytes_exactly(target, a, stored, mn_major):
    """B is stored in bytes and multiplied as A's numbers: 32 of k at once, in whichever order."""
    body = f"""
    constexpr bool kMnMajor = {mn_major};
    constexpr LaneOrder kOrder = kMnMajor ? LaneOrder::kPairs : LaneOrder::kFours;
    Accumulator<A> acc[2][2] = {{}};
    for (int k = 0; k < kDepth; k += 32) {{
        FragmentA<A> f[2][2];
        FragmentB<A> g[2][2];
        for (int i = 0; i < 2; ++i) {{
            load_mixed_input<A, false, kOrder>(f[0][i], f[1][i], s.a, 16 * i, k);
            load_mixed_input<Stored, kMnMajor, kOrder>(g[0][i], g[1][i], s.b, 16 * i, k);
        }}
        mma(acc, f[0], g[0]);
        mma(acc, f[1], g[1]);
    }}
""" + _STORE.replace("COLUMN", "stored_column<Stored, A, kMnMajor>(col)")
    x, y = integers((32, 64), a, False, 1), integers((32, 64), stored, mn_major, 2)
    product = multiply(
        target,
        body,
        x,
        y,
        np.full((32, 32), np.nan, F32),
        (("A", a), ("Stored", stored), ("Out", "float")),
    )
    np.testing.assert_array_equal(product, x.astype(np.float64) @ y.astype(np.float64).T)


@needs.narrow_fragments
@pytest.mark.parametrize(
    ("a", "stored"), [(a, b) for a in ("half", "bf16") for b in (a, "e4m3", "int8_t")]
)
def test_products_with_8_columns(target, a, stored):
    """Columns 8 to 15 of B; then the product's first rows as an operand, times B's as rows."""
    loads = (
        """
        load_fragment<false>(f[0][i], s.a, 16 * i, k);
        load_fragment<false>(f[1][i], s.a, 16 * i, k + 16);
""",
        """
        load_mixed_input<Stored, false, LaneOrder::kFours>(f[0][i], f[1][i], s.a, 16 * i, k);
""",
    )
    columns = (
        "load_fragment(g[0][0], s.b, 8, k); load_fragment(g[1][0], s.b, 8, k + 16);",
        "load_mixed_input<A, false, LaneOrder::kFours>(g[0][0], g[1][0], s.b, 8, k);",
    )
    mixed = stored != a
    body = f"""
    NarrowAccumulator<A> acc[2][1] = {{}}, squares[2][1] = {{}};
    for (int k = 0; k < kDepth; k += 32) {{
        FragmentA<A> f[2][2];
        NarrowFragment<A> g[2][1];
        for (int i = 0; i < 2; ++i) {{{loads[mixed]}}}
        {columns[mixed]}
        mma(acc, f[0], g[0]);
        mma(acc, f[1], g[1]);
    }}
    FragmentA<A> first[2];
    NarrowFragment<A> product[1];
    accumulator_to_fragment(product[0], acc[0][0]);
    for (int i = 0; i < 2; ++i) load_fragment<false>(first[i], s.b, 16 * i, 0);
    mma(squares, first, product);
    for (int m = 0; m < 2; ++m) for (int i = 0; i < NarrowAccumulator<A>::kCount; ++i) {{
        const int row = m * 16 + NarrowAccumulator<A>::row(lane_id(), i);
        const int col = NarrowAccumulator<A>::col(lane_id(), i);
        y[row * 16 + col] = acc[m][0].values[i];
        y[row * 16 + 8 + col] = squares[m][0].values[i];
    }}
"""
    x, y = integers((32, 64), stored, False, 1), integers((32, 64), a, False, 2)
    x, y = np.sign(x).astype(x.dtype), np.sign(y).astype(y.dtype)  # BF16 holds the product
    types = (("A", a), ("Stored", stored), ("Out", "float"))
    found = multiply(target, body, x, y, np.full((32, 16), np.nan, F32), types)
    x, y = x.astype(np.float64), y.astype(np.float64)
    product = x @ y[8:16].T
    np.testing.assert_array_equal(found[:, :8], product)
    np.testing.assert_array_equal(found[:, 8:], y[:, :16] @ product[:16])


@pytest.mark.parametrize(("a", "b"), [("e4m3", "e5m2"), ("e5m2", "e4m3")])
def test_both_operands_converted(target, a, b):
    body = """
    Accumulator<A> acc[2][2] = {};
    for (int k = 0; k < kDepth; k += 32) {
        FragmentA<A> f[2][2];
        FragmentB<A> g[2][2];
        for (int i = 0; i < 2; ++i) {
            load_mixed_input<StoredA, false, LaneOrder::kFours>(f[0][i], f[1][i], s.a, 16 * i, k);
            load_mixed_input<StoredB, false, LaneOrder::kFours>(g[0][i], g[1][i], s.b, 16 * i, k);
        }
        mma(acc, f[0], g[0]);
        mma(acc, f[1], g[1]);
    }
""" + _STORE.replace("COLUMN", "col")
    x, y = integers((32, 64), a, False, 1), integers((32, 64), b, False, 2)
    types = (("A", "half"), ("StoredA", a), ("StoredB", b), ("Out", "float"))
    product = multiply(target, body, x, y, np.full((32, 32), np.nan, F32), types)
    np.testing.assert_array_equal(product, x.astype(np.float64) @ y.astype(np.float64).T)


@pytest.mark.parametrize("first", ["scaled", "plain"])
@pytest.mark.parametrize("a", ["half", "bf16"])
def test_nvfp4_fragments_multiply_scaled_codes_exactly(target, a, first):
    """e2m1 numbers, two to a byte, with e4m3 scales, times each other or A's numbers."""
    body = """
    struct Scaled {
        const unsigned char* bytes;
        const e4m3* scales;
        DEVICE const void* codes(int row, int chunk) const { return bytes + row * 32 + chunk * 16; }
        DEVICE e4m3 scale(int row, int group) const { return scales[row * 4 + group]; }
    };
    const Scaled ours{s.codes, s.scales}, theirs{s.codes + 1024, s.scales + 128};
    Accumulator<A> acc[2][2] = {};
    for (int k = 0; k < 64; k += 32) {
        FragmentA<A> f[2][2];
        FragmentB<A> g[2][2];
        for (int i = 0; i < 2; ++i) {
            if (kPlain)
                load_mixed_input<A, false, LaneOrder::kEights>(f[0][i], f[1][i], s.a, 16 * i, k);
            else load_scaled(f[0][i], f[1][i], ours, 16 * i, k);
            load_scaled(g[0][i], g[1][i], theirs, 16 * i, k);
        }
        mma(acc, f[0], g[0]);
        mma(acc, f[1], g[1]);
    }
    for (int m = 0; m < 2; ++m) for (int n = 0; n < 2; ++n) {
        for (int i = 0; i < Accumulator<A>::kCount; ++i) {
            const int row = Accumulator<A>::row(lane_id(), i);
            const int col = Accumulator<A>::col(lane_id(), i);
            y[(m * 16 + row) * 32 + n * 16 + col] =
                acc[m][n].values[i] / kScaledUnit<A> / (kPlain ? 1.0f : kScaledUnit<A>);
        }
    }
"""
    text = """
#include "platform/nvfp4.cuh"
struct alignas(16) Storage {
    unsigned char codes[2048];
    e4m3 scales[256];
    struct {
        alignas(16) A numbers[32 * 64];
        DEVICE const void* operator()(int row, int chunk) const {
            return numbers + row * 64 + chunk * 8;
        }
    } a;
};
KERNEL void word(const unsigned char* codes, const unsigned char* scales,
                 const unsigned short* a, float* y) {
    SHARED_STORAGE(Storage, s);
    for (int i = threadIdx.x; i < 2048; i += kWarpSize) s.codes[i] = codes[i];
    for (int i = threadIdx.x; i < 256; i += kWarpSize) s.scales[i] = bit_cast<e4m3>(scales[i]);
    for (int i = threadIdx.x; i < 2048; i += kWarpSize) s.a.numbers[i] = bit_cast<A>(a[i]);
    sync_block();
    constexpr bool kPlain = PLAIN;
BODY}
""".replace("BODY", body).replace("PLAIN", "true" if first == "plain" else "false")
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (2, 32, 32), np.uint8)
    scales = (2.0 ** rng.integers(-3, 4, (2, 32, 4))).astype(ml_dtypes.float8_e4m3fn)
    plain = integers((32, 64), a, False, 1)
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.stack([codes & 15, codes >> 4], -1).reshape(2, 32, 64)
    values = (
        np.where(values > 7, -1, 1)
        * numbers[values % 8]
        * np.repeat(scales.astype(np.float64), 16, -1)
    )
    x = values[0] if first == "scaled" else plain.astype(np.float64)
    *_, y = run(
        target, text, codes.reshape(-1), scales.view(np.uint8).reshape(-1), plain.view(np.uint16),
        np.zeros((32, 32), F32), types=(("A", a),), threads=target.warp_size,
        shared=2048 + 256 + 4096,
    )  # fmt: skip
    np.testing.assert_array_equal(y, x @ values[1].T)
