"""A decoder split over ranks by KV heads with their queries, MLP columns, and vocabulary.

The qkv and gate products need no communication; the `out` and `down` products are summed over
ranks.  Each rank returns logits of its share of the vocabulary:
`parallel.vocabulary_parallel_argmax` and `vocabulary_parallel_sample` find tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupykern import arrays, parallel
from cupykern.numerics import namespace

from .config import ModelConfig
from .decoder import Decoder, Layer
from .hugging_face import decoder_of
from .linear import BLOCK, Dense, Linear


@dataclass(frozen=True)
class RowParallel:
    """Sum the ranks' partial products in FP32, in rank order, and round once."""

    comm: parallel.Communicator
    local: Linear

    @property
    def weight(self) -> Any:
        return self.local.weight

    @property
    def bias(self) -> Any:
        return self.local.bias

    def __call__(self, x: Any, **options: Any) -> Any:
        """options: only out_dtype."""
        partial = self.local(x, **{**options, "out_dtype": np.float32})
        return parallel.all_reduce(self.comm, partial, dtype=options.get("out_dtype", x.dtype))

    def gated(self, x: Any, up: Any) -> Any:
        raise NotImplementedError("gates are split by columns")

    @property
    def nbytes(self) -> int:
        return self.local.nbytes


def decoder_of_rank(
    comm: parallel.Communicator,
    config: ModelConfig,
    model_type: str,
    tensors: Mapping[str, np.ndarray],
    dtype: str = "bfloat16",
    weights: str | None = None,
    target: str | None = None,
) -> Decoder:
    """Like `decoder_of`, for this rank's part of the weights, which is cut out on loading.

    Raises ValueError also if there are fewer KV heads than ranks or FP8 blocks would be cut.
    """
    if config.kv_heads < comm.size:
        raise ValueError(f"{comm.size} ranks share only {config.kv_heads} KV heads")
    cut = Cut.of(config, comm)
    found = decoder_of(cut.config(config), model_type, cut.tensors(tensors), dtype, weights, target)
    layers = tuple(
        replace(x, out=RowParallel(comm, x.out), down=RowParallel(comm, x.down))
        for x in found.layers
    )
    rows = found.head.weight[parallel.shares(config.vocab, comm.size)[comm.rank]]
    return replace(found, layers=layers, head=Dense(rows if config.tied else arrays.packed(rows)))


def part_of_rank(comm: parallel.Communicator, whole: Decoder) -> Decoder:
    """Cut this rank's part out of a complete decoder with `Dense` weights.

    Raises ValueError for other weights, and for fewer KV heads than ranks.
    """
    config = whole.config
    if config.kv_heads < comm.size:
        raise ValueError(f"{comm.size} ranks share only {config.kv_heads} KV heads")
    cut = Cut.of(config, comm)
    head = parallel.shares(config.vocab, comm.size)[comm.rank]
    return replace(
        whole,
        config=cut.config(config),
        layers=tuple(_layer_of_rank(comm, cut, config, layer) for layer in whole.layers),
        head=_rows(whole.head, [head]),
    )


def _layer_of_rank(
    comm: parallel.Communicator, cut: Cut, config: ModelConfig, layer: Layer
) -> Layer:
    q, k = config.q_width, config.q_width + config.kv_width
    keys, values = (slice(at + cut.kv.start, at + cut.kv.stop) for at in (q, k))
    return replace(
        layer,
        qkv=_rows(layer.qkv, [cut.q, keys, values]),
        out=_summed(comm, layer.out, cut.q),
        gate=_rows(layer.gate, [cut.inner]),
        up=_rows(layer.up, [cut.inner]),
        down=_summed(comm, layer.down, cut.inner),
    )


def _rows(linear: Linear, parts: Sequence[slice]) -> Dense:
    bias, xp = linear.bias, namespace(linear.weight)
    found = xp.concatenate([_dense(linear).weight[part] for part in parts])
    return Dense(found, None if bias is None else xp.concatenate([bias[part] for part in parts]))


def _summed(comm: parallel.Communicator, linear: Linear, part: slice) -> RowParallel:
    """Only rank 0 adds the bias."""
    bias = linear.bias if comm.rank == 0 else None
    return RowParallel(comm, Dense(arrays.packed(_dense(linear).weight[:, part]), bias))


def _dense(linear: Linear) -> Dense:
    if not isinstance(linear, Dense):
        raise ValueError("only 16-bit weights can be split when they are made")
    return linear


@dataclass(frozen=True)
class Cut:
    """A rank's slices of the rows of q, of k and v, and of the MLP.  first: rank 0."""

    q: slice
    kv: slice
    inner: slice
    head_dim: int
    first: bool

    @classmethod
    def of(cls, config: ModelConfig, comm: parallel.Communicator) -> Cut:
        return cls.of_rank(config, comm.size, comm.rank)

    @classmethod
    def of_rank(cls, config: ModelConfig, size: int, rank: int) -> Cut:
        heads = parallel.shares(config.kv_heads, size)[rank]
        width, group = config.head_dim, config.heads // config.kv_heads
        q, kv = (slice(heads.start * n, heads.stop * n) for n in (group * width, width))
        inner = parallel.shares(config.intermediate, size)[rank]
        return cls(q, kv, inner, width, rank == 0)

    def config(self, config: ModelConfig) -> ModelConfig:
        """Return the rank's own config."""
        q, kv, inner = (part.stop - part.start for part in (self.q, self.kv, self.inner))
        return replace(
            config, heads=q // self.head_dim, kv_heads=kv // self.head_dim, intermediate=inner
        )

    def tensors(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return views of this rank's parts.  Only rank 0 gets biases of sums over ranks."""
        rows = {"q_proj": self.q, "k_proj": self.kv, "v_proj": self.kv}
        rows |= {"gate_proj": self.inner, "up_proj": self.inner}
        columns = {"o_proj": self.q, "down_proj": self.inner}
        found = {}
        for name, x in tensors.items():
            layer, kind = ["", *name.split(".")][-2:]
            if layer in rows:
                found[name] = x[_numbers(name, rows[layer], kind)]
            elif layer in columns and kind != "bias":
                found[name] = x[:, _numbers(name, columns[layer], kind)]
            elif layer not in columns or self.first:
                found[name] = x
        return found


def _numbers(name: str, part: slice, kind: str) -> slice:
    """Return `part`, or for block scales the slice of its blocks.  Raises ValueError."""
    if kind != "weight_scale_inv":
        return part
    if part.start % BLOCK or part.stop % BLOCK:
        raise ValueError(
            f"a rank's part of {name}, {part.start} to {part.stop}, would cut blocks of {BLOCK}"
        )
    return slice(part.start // BLOCK, part.stop // BLOCK)
