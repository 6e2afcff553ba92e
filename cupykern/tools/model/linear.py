"""Linear layers by the format of their weights: each is called with activations (M, K)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

import cupykern
from cupykern.numerics import as_float64

BLOCK = 128  # of k, and of columns, that share a scale


class Linear(Protocol):
    """x @ weight.T + bias.  weight: (N, K), as checkpoints store it."""

    @property
    def weight(self) -> Any: ...

    @property
    def bias(self) -> Any: ...

    def __call__(self, x: Any, **options: Any) -> Any:
        """options: of `matmul` and `scaled_mm` alike (out_dtype, epilogue, operands)."""

    def gated(self, x: Any, up: Any) -> Any:
        """silu(self(x)) * up(x), up of the same class, both without a bias."""

    @property
    def nbytes(self) -> int:
        """Of weights and scales."""


@dataclass(frozen=True)
class Dense:
    """Weights of the activations' dtype."""

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
    """int8 or e4m3 weights of 16-bit activations: decoded inside the product.

    scale: float32 (N, 1), or (ceil(N / 128), ceil(K / 128)) of blocks of 128 x 128.
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
    """Activations in e4m3 with a scale for every 128 of a row.  dtype: that of results."""

    codes: Any
    scale: Any
    dtype: Any

    @classmethod
    def of(cls, x: Any) -> Quantized:
        """x: an array, or such activations already."""
        if isinstance(x, Quantized):
            return x
        found = cupykern.quantize(x, "e4m3", granularity="block", block=(1, BLOCK))
        return cls(*found, x.dtype)


@dataclass(frozen=True)
class Fp8Blocks:
    """e4m3 weights with scales of blocks of 128 x 128; activations are Quantized, or become it
    (DeepSeek-V3, Qwen3-FP8)."""

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
    """The results of `rms_norm`, the first as `linear` takes it: Quantized in the same launch."""
    if not isinstance(linear, Fp8Blocks):
        return cupykern.rms_norm(x, weight, **options)
    codes, scale, *rest = cupykern.rms_norm(
        x, weight, quantize="e4m3", granularity="block", **options
    )
    y = Quantized(codes, scale, x.dtype)
    return (y, *rest) if rest else y


def _by_row(dtype: str) -> Callable[[Any, Any], Linear]:
    def make(weight: Any, bias: Any) -> Linear:
        return Weights8(*cupykern.quantize(weight, dtype, granularity="row"), bias)

    return make


def _by_block(kind: Callable[[Any, Any, Any], Linear]) -> Callable[[Any, Any], Linear]:
    def make(weight: Any, bias: Any) -> Linear:
        block = (BLOCK, BLOCK)
        return kind(*cupykern.quantize(weight, "e4m3", granularity="block", block=block), bias)

    return make


FORMATS: dict[str, Callable[[Any, Any], Linear]] = {
    "16bit": Dense,
    "int8": _by_row("int8"),
    "e4m3": _by_row("e4m3"),
    "e4m3-blocks": _by_block(Weights8),
    "fp8": _by_block(Fp8Blocks),
}
"""What makes a Linear of 16-bit weights and a bias, by the name of the format.

16bit: as they are.  int8, e4m3: 8-bit weights with a scale for each output.  e4m3-blocks: with one
for each block of 128 x 128.  fp8: these, and activations in FP8 too.
"""


def dequantized(linear: Linear) -> Any:
    """The weights as FP64 (N, K)."""
    weight = as_float64(linear.weight)
    if isinstance(linear, Dense):
        return weight
    assert isinstance(linear, (Weights8, Fp8Blocks))
    scale, (n, k) = linear.scale.astype(np.float64), weight.shape
    if scale.shape != (n, 1):
        scale = scale.repeat(BLOCK, 0)[:n].repeat(BLOCK, 1)[:, :k]
    weight *= scale
    return weight
