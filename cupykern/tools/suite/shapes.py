"""Calls of each op for a model and a number of tokens; and calls of random sizes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .models import Linear, Model, feed_forward, linears


class Entry(NamedTuple):
    """A row of a suite: `op.bench_problem(shape, dtype)` with some fields changed."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    changes: tuple[tuple[str, Any], ...] = ()


# Powers of two, values between them, and odd numbers.
TOKENS = (
    *(
        1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 100, 128, 160, 192, 255, 256,
        300
    ),
    *(384, 500, 512, 768, 777, 1000, 1024, 1536, 2000, 2048, 3000, 3072, 4096, 5000, 6144, 8192),
    *(10000, 12288, 16384, 20011, 24576, 32768),
)  # fmt: skip
_MOST_TOKENS = 32768
_BATCHES = (1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_MOST_DECODED = 256  # sequences per decode step
_LEAST_PREFILLED = 16
_LENGTHS = (512, 1024, 2048, 4096)  # of sequences in a prefill batch
_NVFP4_GROUP = 16
_FP8, _INT8, _NVFP4 = "float8_e4m3fn", "int8", "float4_e2m1fn"
_SCALED = (_FP8, f"{_FP8}:rows", f"{_FP8}:blocks", _INT8, _NVFP4)  # both operands quantised


def token_counts(model: Model) -> tuple[int, ...]:
    """Return counts from 1 to 32768; fixed-length models that do not decode get whole sequences."""
    counts = {batch * length for batch in _BATCHES for length in model.sequences}
    counts = {count for count in counts if count <= _MOST_TOKENS}
    if model.caches or not model.sequences:
        counts |= set(TOKENS)
    return tuple(sorted(counts))


def entries(model: Model, tokens: int) -> Iterator[Entry]:
    """Yield the calls of a forward pass of `tokens` tokens, for every quantisation and in float32.

    Some calls come twice.
    """
    hidden, dtype = model.hidden, model.dtype
    for layer in linears(model):
        yield from _products(tokens, layer, dtype)
        yield from _quantized(tokens, layer.inputs, dtype)
    width = model.shared if model.experts else model.intermediate
    yield from _gated(model, tokens, width)
    if model.experts:
        yield Entry("matmul", (tokens, model.experts, hidden), dtype)
        yield Entry("softmax", (tokens, model.experts), "float32")
        # The average number of tokens per expert.
        rows = -(-tokens * model.experts_per_token // model.experts)
        for layer in feed_forward(model):
            yield from _products(rows, layer, dtype)
        yield from _gated(model, rows, model.intermediate)
    if model.vocab:
        yield from _products(tokens, Linear(model.vocab, hidden), dtype)
        yield Entry("dequant_softmax", (tokens, model.vocab, hidden), dtype)
        yield Entry("softmax", (tokens, model.vocab), "float32")
        yield Entry("log_softmax", (tokens, model.vocab), "float32")
    yield Entry(model.norm, (tokens, hidden), dtype)
    if model.norm == "rms_norm":
        yield Entry("add_rms_norm", (tokens, hidden), dtype)
    for count, width in model.norms:
        yield Entry("rms_norm", (tokens * count, width), dtype)
    yield from _attention(model, tokens)


def _products(tokens: int, layer: Linear, dtype: str) -> Iterator[Entry]:
    shape = tokens, layer.outputs, layer.inputs
    options = [*(["bias"] if layer.bias else []), *([layer.activation] if layer.activation else [])]
    after = ":" + "+".join(options) if options else ""
    for whole in (dtype, "float32"):
        yield Entry("matmul", shape, whole + after)
    for weights in (_FP8, _INT8):
        yield Entry("scaled_mm", shape, f"{dtype}*{weights}{after}")
    for pair in (*_SCALED, f"{dtype}*{_NVFP4}"):
        if _NVFP4 not in pair or layer.inputs % _NVFP4_GROUP == 0:
            yield Entry("scaled_mm", shape, pair)


def _gated(model: Model, tokens: int, width: int) -> Iterator[Entry]:
    if model.gate == "silu" and width:
        for dtype in (model.dtype, "float32", _FP8, _NVFP4):
            if dtype != _NVFP4 or model.hidden % _NVFP4_GROUP == 0:
                yield Entry("dual_gemm_silu", (tokens, width, model.hidden), dtype)


def _quantized(tokens: int, width: int, dtype: str) -> Iterator[Entry]:
    yield Entry("quantize", (tokens, width), dtype)
    yield Entry("quantize", (tokens, width), f"{dtype}:block")
    if width % _NVFP4_GROUP == 0:
        yield Entry("quantize_nvfp4", (tokens, width), dtype)


def _attention(model: Model, tokens: int) -> Iterator[Entry]:
    heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
    changes = () if model.value_dim is None else (("dv", model.value_dim),)
    for length in model.sequences:
        if tokens % length == 0:
            shape = tokens // length, heads, length, dim, 0, kv_heads
            yield Entry("attention", shape, model.dtype, changes)
    if not model.sequences and tokens >= _LEAST_PREFILLED:
        lengths = (tokens, *(n for n in _LENGTHS if n < tokens and tokens % n == 0))
        for length in lengths:
            # A window as long as the sequence masks nothing.
            if not model.only_windows or length <= model.window:
                shape = tokens // length, heads, length, dim, 1, kv_heads
                yield Entry("attention", shape, model.dtype, changes)
    if tokens <= _MOST_DECODED:
        caches = set() if model.only_windows else set(model.caches)
        if model.window:
            caches |= {min(cache, model.window) for cache in model.caches}
        for cache in sorted(caches):
            yield Entry("decode_attention", (tokens, heads, kv_heads, cache, dim), model.dtype)


# --- random sizes --------------------------------------------------------------------------------


class Draw:
    """Draws sizes that are the same on every machine: no logarithm or power is rounded.

    most: the largest exponent of 2 of a size, in every draw.
    """

    def __init__(self, seed: str, most: int):
        self._random, self._most = random.Random(seed), most

    def choice(self, options: tuple[Any, ...]) -> Any:
        return options[int(self._random.random() * len(options))]

    def size(self, low: int, high: int, multiple: int | None = None) -> int:
        """Draw from 2^low to 2^high, each octave with equal probability.

        The size is a multiple of `multiple`.  For None it is a multiple of 1 (with odd sizes), 8,
        16, 64 or 128, if it is large enough.
        """
        high = max(low + 1, min(high, self._most))
        octave = low + int(self._random.random() * (high - low))
        size = int((1 + self._random.random()) * 2**octave)
        if multiple is not None:
            return max(1, size // multiple) * multiple
        step = self.choice((1, 1, 8, 16, 64, 128))
        return size // step * step or size


Shape = tuple[int, ...]


def _product_shape(draw: Draw, dtype: str) -> Shape:
    multiple = _NVFP4_GROUP if _NVFP4 in dtype else None
    return draw.size(0, 15), draw.size(4, 17), draw.size(4, 15, multiple)


def _rows_shape(draw: Draw, dtype: str) -> Shape:
    return draw.size(0, 15), draw.size(5, 17)


def _attention_shape(draw: Draw, dtype: str) -> Shape:
    kv_heads = draw.choice((1, 2, 3, 4, 8, 16))
    heads, dim = kv_heads * draw.choice((1, 1, 2, 3, 4, 8)), draw.choice(_DIMS)
    return draw.size(0, 5), heads, draw.size(4, 15), dim, draw.choice((0, 1)), kv_heads


def _decode_shape(draw: Draw, dtype: str) -> Shape:
    kv_heads = draw.choice((1, 2, 3, 4, 8, 16))
    heads, dim = kv_heads * draw.choice((1, 2, 4, 5, 8)), draw.choice(_DIMS)
    return draw.size(0, 8), heads, kv_heads, draw.size(4, 17), dim


_DIMS = (32, 64, 72, 80, 96, 128, 128, 160, 192, 256)
_HALVES = ("float16", "bfloat16")
_Maker = Callable[[Draw, str], Shape]
# The ops of a random suite: their dtypes, and the function that draws their shapes.
RANDOM: dict[str, tuple[tuple[str, ...], _Maker]] = {
    **dict.fromkeys(
        ("softmax", "log_softmax", "layer_norm", "rms_norm", "add_rms_norm"),
        ((*_HALVES, "float32"), _rows_shape),
    ),
    "quantize": (("bfloat16", "bfloat16:block"), _rows_shape),
    "quantize_nvfp4": (
        ("bfloat16",),
        lambda draw, dtype: (draw.size(0, 15), draw.size(4, 17, _NVFP4_GROUP)),
    ),
    "matmul": ((*_HALVES, "float32"), _product_shape),
    "scaled_mm": (
        (*_SCALED, *(f"bfloat16*{weights}" for weights in (_FP8, _INT8, _NVFP4))),
        _product_shape,
    ),
    "dual_gemm_silu": (("bfloat16", "float32", _FP8, _NVFP4), _product_shape),
    "dequant_softmax": (("bfloat16",), _product_shape),
    "attention": (_HALVES, _attention_shape),
    "decode_attention": (_HALVES, _decode_shape),
}


def random_entries(op: str, dtype: str, seed: int, most: int) -> Iterator[Entry]:
    """Yield entries without end; some come twice.  most: see Draw."""
    draw, make = Draw(f"{seed} {op} {dtype}", most), RANDOM[op][1]
    while True:
        yield Entry(op, make(draw, dtype), dtype)
