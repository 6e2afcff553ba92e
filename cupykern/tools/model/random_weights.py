"""A decoder with random weights, made on its target."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from ... import asarray, dtypes, inputs, rope_inv_freq, targets
from .config import ModelConfig
from .decoder import Decoder, Layer
from .linear import FORMATS, Dense, Linear

_SMALL, _BLOCKS = 2**18, 8


def random_decoder(
    config: ModelConfig,
    dtype: str,
    weights: str = "16bit",
    target: str | None = None,
    seed: int = 0,
) -> Decoder:
    """Draw norms near 1 and weights with which each layer keeps the scale of its input.

    dtype: float16 or bfloat16.  weights: a name of `linear.FORMATS`.
    """
    xp, element = targets.get(target).xp, dtypes.NAMES[dtype]
    count = itertools.count()

    def small(*shape: int, deviation: float, mean: float = 0.0) -> Any:
        rng = np.random.default_rng((seed, next(count)))
        return xp.asarray((mean + deviation * rng.standard_normal(shape)).astype(element))

    def large(*shape: int, deviation: float = 1.0) -> Any:
        if math.prod(shape) < _SMALL:
            return small(*shape, deviation=deviation)
        # Made on the target, from few blocks of random numbers.
        number = seed * _BLOCKS + next(count) % _BLOCKS
        return inputs.bench_values(shape, element, number, xp, element.type(deviation))

    def norm(width: int) -> Any:
        return small(width, deviation=0.1, mean=1.0)

    def linear(n: int, k: int, bias: bool = False) -> Linear:
        weight = large(n, k, deviation=1 / math.sqrt(k))
        return FORMATS[weights](weight, small(n, deviation=0.1) if bias else None)

    c = config
    layers = []
    for _ in c.kinds:
        hidden_norms = [norm(c.hidden) for _ in range(4 if c.post_norms else 2)]
        head_norms = [norm(c.head_dim) if c.head_norms else None for _ in range(2)]
        layers.append(
            Layer(
                *(hidden_norms[0], linear(c.q_width + 2 * c.kv_width, c.hidden, c.qkv_bias)),
                *(linear(c.hidden, c.q_width), hidden_norms[1]),
                *(linear(c.intermediate, c.hidden), linear(c.intermediate, c.hidden)),
                *(linear(c.hidden, c.intermediate), *head_norms, *hidden_norms[2:]),
            )
        )
    embedding = large(c.vocab, c.hidden)
    head = large(c.vocab, c.hidden, deviation=1 / math.sqrt(c.hidden))
    rotations = rotations_of(c, target)
    scale = scale_of(c, dtype, target)
    return Decoder(c, embedding, tuple(layers), norm(c.hidden), Dense(head), rotations, scale)


def scale_of(config: ModelConfig, dtype: str, target: str | None) -> Any:
    """Return Decoder.scale."""
    if config.embedding_scale == 1:
        return None
    return asarray(np.float32(config.embedding_scale), dtype, target)


def rotations_of(config: ModelConfig, target: str | None) -> tuple[tuple[Any, float], ...]:
    """Return rope_inv_freq's results per layer; equal layers share an array."""
    known: list[tuple[Any, tuple[Any, float]]] = []
    found = []
    for kind in config.kinds:
        at = kind.positions
        same = next((rotation for other, rotation in known if other == at), None)
        if same is None:
            same = rope_inv_freq(config.head_dim, at.theta, at.scaling, target=target)
            known.append((at, same))
        found.append(same)
    return tuple(found)
