"""Benchmark shapes with names of their dimensions: "B 4, H 16, S 4096, D 128, causal"."""

from __future__ import annotations

from collections.abc import Sequence

_PRODUCTS = ("matmul", "complex_matmul", "scaled_mm", "dual_gemm_silu", "dequant_softmax")
_NAMES = {
    **dict.fromkeys(_PRODUCTS, ("M", "N", "K")),
    "decode_attention": ("B", "H", "Hkv", "Sk", "D"),
    "cascade_attention": ("B", "H", "Hkv", "S", "Sk", "D"),
    "rope_and_cache": ("B", "S", "H", "Hkv", "D"),
}
_ATTENTION = ("attention", "attention_varlen")
_MASKS = {1: "causal", 2: "causal blocks", 3: "document blocks", 4: "interleaved blocks",
          5: "causal, soft cap", 6: "causal, ALiBi", 7: "causal, sinks",
          8: "causal, bias by distance", 9: "window 4096, sinks"}  # fmt: skip


def spelt(op: str, shape: Sequence[int]) -> str:
    """Format a bench shape of `op`; for unknown ops like "4096 x 1024"."""
    if op in _ATTENTION and 4 <= len(shape) <= 7:
        return _of_attention(op, shape)
    names = _NAMES.get(op, ())
    if op == "merge_attention":
        names = ("B", "H", "S", "Dv") if len(shape) == 4 else ("rows", "H", "Dv")
    if len(names) != len(shape):
        return " x ".join(map(str, shape))
    return ", ".join(f"{name} {n}" for name, n in zip(names, shape, strict=True))


def _of_attention(op: str, shape: Sequence[int]) -> str:
    """Format (B, H, S, D[, mask[, Hkv[, page]]]).

    Masks that _MASKS lacks are causal windows of that many keys.
    """
    b, h, s, d, mask, h_kv, page = (*shape, *(0, shape[1], 0)[len(shape) - 4 :])
    parts = [f"B {b}", f"H {h}", *([f"Hkv {h_kv}"] if h_kv != h else [])]
    parts += [f"S {s}" if op == "attention" else f"mean S {s}", f"D {d}"]
    if mask:
        parts.append(_MASKS.get(mask, f"window {mask}"))
    return ", ".join((*parts, *([f"pages of {page}"] if page else [])))
