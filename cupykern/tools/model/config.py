"""ModelConfig: dimensions and options of a decoder-only model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..suite.models import MODELS, Model

GATES = ("silu", "gelu_tanh")


@dataclass(frozen=True)
class Positions:
    """Rotary positions of a layer: arguments of `rope_inv_freq`."""

    theta: float = 10000.0
    scaling: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class LayerKind:
    """The options that differ between layers.

    window: keys that a query attends to, including its own; None: all.
    """

    positions: Positions = Positions()
    window: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A decoder with grouped-query attention, rotary positions and a gated MLP.

    kinds: one per layer.  gate: activation of the gated MLP, one of GATES.
    qkv_bias: whether the packed qkv product has a bias.
    head_norms: whether the heads of q and k have RMS norms.
    post_norms: whether the results of attention and MLP have norms too (Gemma 2).
    embedding_scale: factor of the embedded tokens.
    attention_scale: factor of the scores; None: 1 / sqrt(head_dim).
    softcap, logit_softcap: of scores and of logits; None: no cap.
    tied: the head shares the embedding's weights.
    """

    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    kinds: tuple[LayerKind, ...]
    norm_eps: float = 1e-5
    gate: str = "silu"
    qkv_bias: bool = False
    head_norms: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    softcap: float | None = None
    logit_softcap: float | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown gate or heads that KV heads do not divide."""
        if self.gate not in GATES:
            raise ValueError(f"gate must be one of {', '.join(GATES)}; got {self.gate!r}")
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads are not a multiple of {self.kv_heads} KV heads")

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attention_options(self) -> dict[str, Any]:
        """Options that all attention ops take."""
        return {"scale": self.attention_scale, "softcap": self.softcap}


def public_names() -> tuple[str, ...]:
    """Return the names that `public` accepts."""
    return tuple(dict.fromkeys(model.suite for model in MODELS if _is_decoder(model)))


def public(name: str, layers: int) -> ModelConfig:
    """Return a public model's shape with `layers` layers.  Raises ValueError for unknown names."""
    for model in MODELS:
        if model.suite == name and _is_decoder(model):
            return _of(model, layers)
    raise ValueError(f"unknown model {name!r}; models are {', '.join(public_names())}")


def _is_decoder(model: Model) -> bool:
    """Return whether this package's layers implement the model."""
    plain = model.plain_attention and not (model.bias or model.experts or model.sequences)
    return plain and model.norm == "rms_norm" and model.gate in GATES and bool(model.caches)


def _of(model: Model, layers: int) -> ModelConfig:
    """For Gemma 2 and 3, which have windows in some layers, take layers without windows."""
    window = model.window if model.only_windows else None
    return ModelConfig(
        *(model.vocab, model.hidden, model.intermediate),
        *(model.heads, model.kv_heads, model.head_dim),
        kinds=(LayerKind(Positions(500000.0), window),) * layers,
        gate=model.gate or "silu",
        qkv_bias=model.qkv_bias,
        head_norms=(model.heads, model.head_dim) in model.norms,
        post_norms=model.suite.startswith(("gemma2", "gemma3")),
    )
