"""Build decoders from Hugging Face's folders: config.json and named tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import cupykern

from .config import LayerKind, ModelConfig, Positions
from .decoder import Decoder, Layer
from .linear import BLOCK, FORMATS, Dense, Fp8Blocks, Linear, Weights8
from .random_weights import rotations_of, scale_of

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
_GATES = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_GEMMA3_PATTERN = 6  # every sixth layer attends to all keys


def config_of(found: Mapping[str, Any]) -> ModelConfig:
    """Read config.json's dict.  Raises ValueError for models that the ops do not support."""
    kind = found.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"model_type must be one of {', '.join(MODEL_TYPES)}; got {kind!r}")
    gemma = kind.startswith("gemma")
    gate = found.get("hidden_activation") or found.get("hidden_act") or "silu"
    gate = "gelu_pytorch_tanh" if gemma and gate == "gelu" else gate  # as Gemma was trained
    if gate not in _GATES:
        raise ValueError(f"hidden_act must be one of {', '.join(_GATES)}; got {gate!r}")
    if found.get("mlp_bias"):
        raise ValueError("mlp_bias must be false; got true")
    try:
        heads, hidden = found["num_attention_heads"], found["hidden_size"]
        scalar = found.get("query_pre_attn_scalar") if gemma else None
        return ModelConfig(
            vocab=found["vocab_size"],
            hidden=hidden,
            intermediate=found["intermediate_size"],
            heads=heads,
            kv_heads=found.get("num_key_value_heads") or heads,
            head_dim=found.get("head_dim") or hidden // heads,
            kinds=_kinds(found, kind),
            norm_eps=found.get("rms_norm_eps", 1e-6),
            gate=_GATES[gate],
            qkv_bias=kind == "qwen2" or bool(found.get("attention_bias")),
            head_norms=kind in ("qwen3", "gemma3_text"),
            post_norms=kind in ("gemma2", "gemma3_text"),
            embedding_scale=hidden**0.5 if gemma else 1.0,
            attention_scale=None if scalar is None else scalar**-0.5,
            softcap=found.get("attn_logit_softcapping"),
            logit_softcap=found.get("final_logit_softcapping"),
            tied=found.get("tie_word_embeddings", gemma),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"config.json lacks or misnames a figure: {error}") from None


def _kinds(found: Mapping[str, Any], kind: str) -> tuple[LayerKind, ...]:
    """Return the kind of each layer."""
    window, count = found.get("sliding_window"), found["num_hidden_layers"]
    types = found.get("layer_types") or [_type(found, kind, i) for i in range(count)]
    if unknown := set(types) - {_FULL, _SLIDING}:
        raise ValueError(f"unknown layer_types {', '.join(sorted(unknown))}")
    if len(types) != count:
        raise ValueError(f"layer_types must name {count} layers; got {len(types)}")
    of = {name: LayerKind(_positions(found, name)) for name in set(types)}
    if _SLIDING in of:
        if window is None:
            raise ValueError("layer_types has windows, but sliding_window is missing")
        of[_SLIDING] = LayerKind(_positions(found, _SLIDING), window)
    return tuple(of[name] for name in types)


def _type(found: Mapping[str, Any], kind: str, layer: int) -> str:
    """Return a layer's type if layer_types is missing."""
    if kind == "mistral":
        slides = found.get("sliding_window") is not None
    elif kind in ("qwen2", "qwen3"):
        slides = bool(found.get("use_sliding_window")) and layer >= found["max_window_layers"]
    elif kind == "gemma2":
        slides = layer % 2 == 0
    elif kind == "gemma3_text":
        slides = (layer + 1) % found.get("sliding_window_pattern", _GEMMA3_PATTERN) != 0
    else:
        slides = False
    return _SLIDING if slides else _FULL


def _positions(found: Mapping[str, Any], layer_type: str) -> Positions:
    """Read rope_parameters (for all layers or per layer type), or rope_theta and rope_scaling."""
    rope = found.get("rope_parameters")
    if rope is not None:
        rope = rope.get(layer_type, rope)
        return Positions(rope["rope_theta"], rope)
    if layer_type == _SLIDING and (local := found.get("rope_local_base_freq")):
        return Positions(local)  # Gemma 3 scales only the positions of the other layers
    return Positions(found.get("rope_theta", 10000.0), found.get("rope_scaling"))


def decoder_of(
    config: ModelConfig,
    model_type: str,
    tensors: Mapping[str, np.ndarray],
    dtype: str = "bfloat16",
    weights: str | None = None,
    target: str | None = None,
) -> Decoder:
    """Build a decoder from named tensors.

    model_type: config.json's.  tensors: NumPy arrays by Hugging Face's names.  FP8 weights have
        scales for blocks of 128 x 128, named weight_scale_inv.
    dtype: float16 or bfloat16, for activations, cache and all weights that are not in 8 bits.
    weights: a name of `linear.FORMATS`; None: as stored, with FP8 activations for FP8 weights.
        FP8 weights can be "fp8" or "e4m3-blocks".
    Raises ValueError if a tensor is missing or has a wrong shape.
    """
    reader = _Reader(tensors, dtype, weights, target, norm_offset=model_type.startswith("gemma"))
    c, layers = config, []
    gemma = ("pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
    for i in range(len(c.kinds)):
        name = f"model.layers.{i}."
        attention, mlp = f"{name}self_attn.", f"{name}mlp."
        before_mlp, *after = gemma if c.post_norms else ("post_attention_layernorm",)
        of_head = [
            reader.norm(f"{attention}{x}_norm", c.head_dim) if c.head_norms else None for x in "qk"
        ]
        wide = {f"{attention}q_proj": c.q_width}
        wide |= {f"{attention}{x}_proj": c.kv_width for x in "kv"}
        layers.append(
            Layer(
                reader.norm(f"{name}input_layernorm", c.hidden),
                reader.linear(wide, c.hidden),
                reader.linear({f"{attention}o_proj": c.hidden}, c.q_width),
                reader.norm(f"{name}{before_mlp}", c.hidden),
                reader.linear({f"{mlp}gate_proj": c.intermediate}, c.hidden),
                reader.linear({f"{mlp}up_proj": c.intermediate}, c.hidden),
                reader.linear({f"{mlp}down_proj": c.hidden}, c.intermediate),
                *of_head,
                *(reader.norm(f"{name}{x}", c.hidden) for x in after),
            )
        )
    embedding = reader.put(reader.take("model.embed_tokens.weight", (c.vocab, c.hidden)))
    head = embedding
    if not c.tied:
        head = reader.put(reader.take("lm_head.weight", (c.vocab, c.hidden)))
    rotations = rotations_of(c, target)
    norm = reader.norm("model.norm", c.hidden)
    scale = scale_of(c, dtype, target)
    return Decoder(c, embedding, tuple(layers), norm, Dense(head), rotations, scale)


class _Reader:
    """Reads tensors by name, in the decoder's formats."""

    def __init__(
        self,
        tensors: Mapping[str, np.ndarray],
        dtype: str,
        weights: str | None,
        target: str | None,
        norm_offset: bool,
    ):
        self._tensors, self._dtype, self._target = tensors, dtype, target
        self._weights, self._norm_offset = weights, norm_offset

    def take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        found = self._tensors.get(name)
        if found is None or found.shape != shape:
            got = "none" if found is None else found.shape
            raise ValueError(f"{name} must have shape {shape}; got {got}")
        return found

    def put(self, x: np.ndarray) -> Any:
        return cupykern.asarray(x, self._dtype, self._target)

    def norm(self, name: str, width: int) -> Any:
        """Gemma stores its norm weights minus 1; the sum is kept in FP32."""
        weight = self.take(f"{name}.weight", (width,))
        if not self._norm_offset:
            return self.put(weight)
        return cupykern.asarray(1 + weight.astype(np.float32), "float32", self._target)

    def linear(self, widths: dict[str, int], k: int) -> Linear:
        """Concatenate the rows of layers with the same input.  widths: rows by name."""
        parts = [self.take(f"{name}.weight", (n, k)) for name, n in widths.items()]
        weight = np.concatenate(parts)
        bias = None
        if any(f"{name}.bias" in self._tensors for name in widths):
            biases = [self.take(f"{name}.bias", (n,)) for name, n in widths.items()]
            bias = self.put(np.concatenate(biases))
        if weight.itemsize > 1:
            return FORMATS[self._weights or "16bit"](self.put(weight), bias)
        kinds: dict[str | None, Callable[..., Linear]] = {
            None: Fp8Blocks,
            "fp8": Fp8Blocks,
            "e4m3-blocks": Weights8,
        }
        if self._weights not in kinds:
            raise ValueError(f"weights in FP8 are fp8 or e4m3-blocks, not {self._weights}")
        if len(widths) > 1 and any(n % BLOCK for n in widths.values()):
            raise ValueError(f"{', '.join(widths)} must have multiples of {BLOCK} rows in FP8")
        scales = [
            self.take(f"{name}.weight_scale_inv", (-(-n // BLOCK), -(-k // BLOCK)))
            for name, n in widths.items()
        ]
        scale = cupykern.asarray(np.concatenate(scales), "float32", self._target)
        values = cupykern.asarray(weight, weight.dtype, self._target)
        return kinds[self._weights](values, scale, bias)
