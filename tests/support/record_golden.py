"""What a Hopper GPU makes of TMA's swizzles and wgmma's descriptors, to hold the host to.

    PYTHONPATH=. python tests/support/record_golden.py tests/support/golden/hopper.npz

One swizzle function serves TMA and wgmma on the host, so that an error in it would cancel out:
these vectors are from hardware.  tests/platform/test_hopper_words.py compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from hopper_kernels import BOXES, NUMBERS, launch_all, tma_image, variant

from cupykern import targets
from cupykern.targets import Target

FILE = Path(__file__).parent / "golden" / "hopper.npz"

# Products of tiles anywhere in an image of small numbers, whose descriptors come from an array.
_PRODUCTS = """
constexpr int kN = 64, kBytes = 1 << 16;
struct Storage { alignas(1024) uint32_t image[kBytes / 4]; };

KERNEL void word(const uint32_t* image, const uint64_t* tiles, const int* weights, int* y,
                 int count) {
    SHARED_STORAGE(Storage, s);
    const int t = threadIdx.x;
    for (int i = t; i < kBytes / 4; i += 128) s.image[i] = image[i];
    fence_async_proxy();
    sync_block();
    const uint64_t start = matrix_descriptor<0>(s.image, 0, 0);
    for (int i = 0; i < count; ++i) {
        D d[kN / 2];
        uint32_t registers[4];
        // Rows of 32 bytes from anywhere on.
        const uint32_t* a = image + int(tiles[2 * i] & 0x3fff);
        for (int j = 0; j < 4; ++j)
            registers[j] = a[wgmma_row(t, j % 2 * 2) * 8 + t % 4 + j / 2 * 4];
        wgmma_fence(d);
        const uint64_t b_tile = start + tiles[2 * i + 1];
        if (kInRegisters) wgmma<A, B, kMajorK, kMajorB>(d, registers, b_tile, false);
        else wgmma<A, B, kMajorA, kMajorB>(d, start + tiles[2 * i], b_tile, false);
        wgmma_commit();
        wgmma_wait<0>(d);
        // Of each row, the sum weighted by column.
        for (int half = 0; half < 2; ++half) {
            int sum = 0;
            for (int j = 0; j < kN / 2; ++j) {
                if (j / 2 % 2 == half) sum += int(d[j]) * weights[wgmma_col(t, j)];
            }
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            y[i * 64 + wgmma_row(t, 2 * half)] = sum;
        }
    }
}
"""
# Products of A's 64 rows of 128 bytes and B's in a tensor core: 32 bytes of k after the other, each
# a tile without swizzle.
CUT = """
struct Storage { alignas(1024) unsigned char a[4][64 * 32], b[4][64 * 32]; };

KERNEL void word(const uint32_t* a, const uint32_t* b, float* y) {
    SHARED_STORAGE(Storage, s);
    const int t = threadIdx.x;
    for (int i = t; i < 4 * 64 * 8; i += 128) {
        reinterpret_cast<uint32_t*>(s.a)[i] = a[i];
        reinterpret_cast<uint32_t*>(s.b)[i] = b[i];
    }
    fence_async_proxy();
    sync_block();
    float d[32];
    wgmma_fence(d);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        wgmma<A, B>(d, matrix_descriptor<0>(s.a[k], 1024, 128),
                    matrix_descriptor<0>(s.b[k], 1024, 128),
                    k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>(d);
    for (int i = 0; i < 32; ++i) y[wgmma_row(t, i) * 64 + wgmma_col(t, i)] = d[i];
}
"""
_MODES = {0: 0, 128: 1, 64: 2, 32: 3}
KINDS = [
    *(("half", "half", a, b) for a in ("K", "MN") for b in ("K", "MN")),
    ("bf16", "bf16", "MN", "K"),
    ("e4m3", "e5m2", "K", "K"),
    ("int8_t", "int8_t", "K", "K"),
    *((a, b, "R", "K") for a, b in (("half", "half"), ("bf16", "bf16"), ("e5m2", "e4m3"))),
    ("half", "half", "R", "MN"),
    ("int8_t", "int8_t", "R", "K"),
]
"""Types and majors of A and B; R: A is in registers."""


def _tile(rng: np.random.Generator, span: int, strides: str) -> int:
    """A descriptor's bits, without the image's address.

    strides "whole": whole swizzle patterns apart, and the start on a line of one; "any": multiples
    of 16 bytes, and the start too.
    """
    if strides == "whole":
        unit = 8 * (span or 16)
        leading, stride = (unit * int(rng.integers(1, 4096 // unit + 1)) for _ in range(2))
        start = unit * int(rng.integers(0, 8)) + 16 * int(rng.integers(0, max(span // 16 - 1, 1)))
    else:
        leading, stride, start = (16 * int(rng.integers(1, 256)) for _ in range(3))
    return _MODES[span] << 62 | (stride >> 4) << 32 | (leading >> 4) << 16 | start >> 4


def products(
    target: Target, a: str, b: str, major_a: str, major_b: str, strides: str
) -> np.ndarray:
    """(products, 64): 16 products' rows, for each of A's and B's swizzles."""
    rng = np.random.default_rng(7)
    code = {"half": np.float16, "int8_t": np.int8}.get(a)
    if code is not None:
        image = rng.integers(-4, 5, (1 << 16) // np.dtype(code).itemsize).astype(code)
    elif a == "bf16":
        image = (rng.integers(-4, 5, 1 << 15).astype(np.float32).view(np.uint32) >> 16).astype(
            np.uint16
        )
    else:  # codes of small integers in e4m3 and in e5m2
        image = rng.choice(np.array([0, 0x40, 0x48, 0xC0, 0xC8], np.uint8), 1 << 16)
    spans = [(x, y) for x in _MODES for y in _MODES]
    tiles = np.array([[_tile(rng, span, strides) for span in pair] for pair in spans], np.uint64)
    weights = rng.integers(-9, 10, 64).astype(np.int32)
    arrays = {
        "image": image,
        "tiles": tiles,
        "weights": weights,
        "y": np.zeros((len(spans), 64), np.int32),
    }
    text = (
        f"constexpr bool kInRegisters = {'true' if major_a == 'R' else 'false'};\n"
        f"constexpr Major kMajorA = kMajor{major_a.replace('R', 'K')}, kMajorB = kMajor{major_b};\n"
    )
    text += _PRODUCTS
    kernel = variant(text, A=a, B=b, D="int" if a == "int8_t" else "float")
    args = ("image", "tiles", "weights", "y", np.int32(len(spans)))
    return launch_all(target, kernel, arrays, args, shared=1 << 16)["y"]


def cut_operand(name: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(bytes of CUT's tiles, the matrix (64, k) in FP64): many exponents, FP8 of one sign."""
    if NUMBERS[name].itemsize == 1:
        tiles = rng.integers(0x20, 0x50, (4, 2, 8, 8, 16)).astype(np.uint8).view(NUMBERS[name])
    else:
        sizes = np.exp2(rng.uniform(-9, 5, (4, 2, 8, 8, 8)))
        tiles = (sizes * rng.choice((-1, 1, 1), sizes.shape)).astype(NUMBERS[name])
    matrix = tiles.transpose(2, 3, 0, 1, 4).reshape(64, -1).astype(np.float64)
    return tiles.view(np.uint8).reshape(-1), matrix


def cut_sums(target: Target, a: str, b: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(a's matrix, b's, their product (64, 64) from four steps of wgmma)."""
    rng = np.random.default_rng(9)
    (a_tiles, a_matrix), (b_tiles, b_matrix) = cut_operand(a, rng), cut_operand(b, rng)
    arrays = {"a": a_tiles, "b": b_tiles, "y": np.zeros((64, 64), np.float32)}
    kernel = variant(CUT, A=a, B=b)
    y = launch_all(target, kernel, arrays, ("a", "b", "y"), shared=16384)["y"]
    return a_matrix, b_matrix, y


def vectors(target: Target) -> dict[str, np.ndarray]:
    """Everything that is recorded, by name."""
    found = {f"box{i}": tma_image(target, *box) for i, box in enumerate(BOXES)}
    for kind in KINDS:
        for strides in ("whole", "any"):
            found["_".join((*kind, strides))] = products(target, *kind, strides)
    for a, b in (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2")):
        found[f"cut_{a}_{b}"] = cut_sums(target, a, b)[2]
    return found


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **vectors(targets.get("cuda")))
    print(f"{path}: {path.stat().st_size} bytes")
