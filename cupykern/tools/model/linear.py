"""Linear layers by weight format; each is called with activations (M, K)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

import cupykern
from cupykern.numerics import as_float64

BLOCK = 128  # elements of K, and columns, that share a scale


class Linear(Protocol):
    """x @ weight.T + bias.  weight: (N, K), as checkpoints store it."""

    @property
    def weight(self) -> Any: ...

    @property
    def bias(self) -> Any: ...

    def __call__(self, x: Any, **options: Any) -> Any:
        """options: those that `matmul` and `scaled_mm` share (out_dtype, epilogue, operands)."""

    def gated(self, x: Any, up: Any) -> Any:
        """Return silu(self(x)) * up(x), with up of the same class, both without a bias."""

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales."""


@dataclass(frozen=True)
class Dense:
    """Weights in the activations' dtype."""

    weight: Any
    bias: Any = None

    def __call__(self, x: Any, **options: Any) -> Any:
        return cupykern.matmul(x, self.weight.T, bias=self.bias, **options)

    def gated(self, x: Any, up: Any) -> Any:
        return cupykern.dual_gemm_silu(x, self.weight.T, up.weight.T)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


@dataclass(frozen=True)
class Weights8:
    """int8 or e4m3 weights for 16-bit activations, dequantised inside the product.

    scale: float32 (N, 1), or (ceil(N / 128), ceil(K / 128)) for blocks of 128 x 128.
    """

    weight: Any
    scale: Any
    bias: Any = None

    def __call__(self, x: Any, **options: Any) -> Any:
        return cupykern.scaled_mm(x, self.weight.T, scale_b=self.scale.T, bias=self.bias, **options)

    def gated(self, x: Any, up: Any) -> Any:
        return cupykern.dual_gemm_silu(
            x, self.weight.T, up.weight.T, scale_b1=self.scale.T, scale_b2=up.scale.T
        )

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scale.nbytes


class Quantized(NamedTuple):
    """e4m3 activations with a scale per 128 elements of a row.  dtype: of results."""

    codes: Any
    scale: Any
    dtype: Any

    @classmethod
    def of(cls, x: Any) -> Quantized:
        """x: an array, or activations that are Quantized already."""
        if isinstance(x, Quantized):
            return x
        codes, scale = cupykern.quantize(x, "e4m3", granularity="block", block=(1, BLOCK))
        return cls(codes, scale, x.dtype)


@dataclass(frozen=True)
class Fp8Blocks:
    """e4m3 weights with scales for blocks of 128 x 128 (DeepSeek-V3, Qwen3-FP8).

    Activations are Quantized, or are quantised first.
    """

    weight: Any
    scale: Any
    bias: Any = None

    def __call__(self, x: Any, **options: Any) -> Any:
        x = Quantized.of(x)
        options.setdefault("out_dtype", x.dtype)
        operands = x.codes, self.weight.T, x.scale, self.scale.T
        return cupykern.scaled_mm(*operands, bias=self.bias, **options)

    def gated(self, x: Any, up: Any) -> Any:
        x = Quantized.of(x)
        scales = {"scale_a": x.scale, "scale_b1": self.scale.T, "scale_b2": up.scale.T}
        operands = x.codes, self.weight.T, up.weight.T
        return cupykern.dual_gemm_silu(*operands, **scales, out_dtype=x.dtype)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scale.nbytes


def norm_for(linear: Linear, x: Any, weight: Any, **options: Any) -> Any:
    """Call `rms_norm`; for Fp8Blocks the first result is Quantized, in the same launch."""
    if not isinstance(linear, Fp8Blocks):
        return cupykern.rms_norm(x, weight, **options)
    codes, scale, *rest = cupykern.rms_norm(
        x, weight, quantize="e4m3", granularity="block", **options
    )
    y = Quantized(codes, scale, x.dtype)
    return (y, *rest) if rest else y


def _by_row(dtype: str) -> Callable[[Any, Any], Linear]:
    def make(weight: Any, bias: Any) -> Linear:
        codes, scale = cupykern.quantize(weight, dtype, granularity="row")
        return Weights8(codes, scale, bias)

    return make


def _by_block(kind: Callable[[Any, Any, Any], Linear]) -> Callable[[Any, Any], Linear]:
    def make(weight: Any, bias: Any) -> Linear:
        block = (BLOCK, BLOCK)
        codes, scale = cupykern.quantize(weight, "e4m3", granularity="block", block=block)
        return kind(codes, scale, bias)

    return make


FORMATS: dict[str, Callable[[Any, Any], Linear]] = {
    "16bit": Dense,
    "int8": _by_row("int8"),
    "e4m3": _by_row("e4m3"),
    "e4m3-blocks": _by_block(Weights8),
    "fp8": _by_block(Fp8Blocks),
}
"""Functions that make a Linear from 16-bit weights and a bias, by name of the format.

16bit: unchanged.  int8, e4m3: 8-bit weights with a scale per output.  e4m3-blocks: with a scale per
block of 128 x 128.  fp8: like e4m3-blocks, with FP8 activations too.
"""


def dequantized(linear: Linear) -> Any:
    """Return the weights as FP64 (N, K)."""
    weight = as_float64(linear.weight)
    if isinstance(linear, Dense):
        return weight
    assert isinstance(linear, (Weights8, Fp8Blocks))
    scale, (n, k) = linear.scale.astype(np.float64), weight.shape
    if scale.shape != (n, 1):
        scale = scale.repeat(BLOCK, 0)[:n].repeat(BLOCK, 1)[:, :k]
    weight *= scale
    return weight
