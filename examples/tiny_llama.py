"""A small Llama on cupykern: loads Hugging Face's safetensors, fills a KV cache, decodes.

    python examples/tiny_llama.py --random 1024,8,16,4,32000 --tokens 64
    python examples/tiny_llama.py path/to/a/llama --prompt 128000,9906 --tokens 64 --temperature 0.7

The folder holds config.json and *.safetensors of a LlamaForCausalLM.  Tokens are numbers: there is
no tokenizer.  The model runs on the GPU, or with --target host on the CPU, where times are those of
an emulation.

A decoder layer is eight calls of cupykern: each norm adds the residual, the projections of queries,
keys and values are one product, `rope_and_cache` rotates them and fills the cache, gate and up are
one `dual_gemm_silu`.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import cupykern
from cupykern import targets

# --- files -------------------------------------------------------------------------------------

_DTYPES = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file, as views of it: nothing is read before it is used.

    The format: 8 bytes with the header's length, a JSON header {name: {dtype, shape,
    data_offsets}}, the data (https://github.com/huggingface/safetensors).  Raises ValueError for
    another file and for dtypes other than F16, BF16 and F32.
    """
    try:
        with open(path, "rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        (length,) = struct.unpack("<Q", data[:8])
        tensors = {}
        for name, entry in json.loads(bytes(data[8 : 8 + length])).items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _DTYPES:
                raise ValueError(f"{name} is {entry['dtype']}, not one of {', '.join(_DTYPES)}")
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            flat = np.frombuffer(data[begin:end], _DTYPES[entry["dtype"]])
            tensors[name] = flat.reshape(entry["shape"])
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path} is not to be read: {error}") from None
    return tensors


@dataclass(frozen=True)
class LlamaConfig:
    """The numbers of config.json that matter, by Hugging Face's names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False

    @classmethod
    def of(cls, found: dict[str, Any]) -> LlamaConfig:
        """Of what config.json holds.  Raises ValueError for models that this one is not."""
        rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
        given = {"rope_type": rope.get("type", "default"), **rope}
        given |= {name: value for name, value in found.items() if value is not None}
        wanted = {"model_type": "llama", "hidden_act": "silu", "rope_type": "default"}
        for name, value in {**wanted, "attention_bias": False, "mlp_bias": False}.items():
            if given.get(name, value) != value:
                raise ValueError(f"{name} must be {value!r}; got {given[name]!r}")
        try:
            heads = given["num_attention_heads"]
            implied = {"num_key_value_heads": heads, "head_dim": given["hidden_size"] // heads}
            names = [field.name for field in fields(cls)]
            return cls(**{n: v for n, v in {**implied, **given}.items() if n in names})
        except (KeyError, TypeError) as error:
            raise ValueError(f"config.json is no Llama's: {error}") from None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight, (out, in), by Hugging Face's name."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = (n * self.head_dim for n in (self.num_attention_heads, self.num_key_value_heads))
        layer = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        layer |= {f"self_attn.{name}_proj": (kv, hidden) for name in "kv"}
        layer |= {"self_attn.q_proj": (q, hidden), "self_attn.o_proj": (hidden, q)}
        layer |= {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        layer |= {"mlp.down_proj": (hidden, inner)}
        found = {"model.embed_tokens": (self.vocab_size, hidden), "model.norm": (hidden,)}
        for i in range(self.num_hidden_layers):
            found |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        if not self.tie_word_embeddings:
            found["lm_head"] = (self.vocab_size, hidden)
        return {f"{name}.weight": shape for name, shape in found.items()}


def load(folder: Path) -> tuple[LlamaConfig, dict[str, np.ndarray]]:
    """config.json and all *.safetensors of a folder.  Raises OSError and ValueError."""
    config = LlamaConfig.of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    files = [read_safetensors(path) for path in sorted(folder.glob("*.safetensors"))]
    return config, {name: x for tensors in files for name, x in tensors.items()}


def random_weights(config: LlamaConfig, dtype: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Norms near 1, the rest so that every layer keeps the size of what it gets."""
    rng, weights = np.random.default_rng(seed), {}
    for name, shape in config.shapes().items():
        x = rng.standard_normal(shape, np.float32)
        if "embed" not in name:
            x = 1 + 0.1 * x if len(shape) == 1 else x / math.sqrt(shape[1])
        weights[name] = x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return weights


# --- the model ---------------------------------------------------------------------------------


@dataclass
class Cache:
    """Keys and values of what was read so far: per layer (batch, KV heads, room, head_dim).

    lengths: int32 (batch,) on the device: the tokens that are there; length: the same number
    here."""

    keys: list[Any]
    values: list[Any]
    lengths: Any
    length: int = 0


class Llama:
    """A LlamaForCausalLM for one batch of sequences of one length.

    weights: by Hugging Face's names.  Raises ValueError where one is missing or has another shape.
    dtype: "float16" or "bfloat16", of weights, activations and cache.  target: "cuda", "hip",
    "host" or None, the GPU if there is one.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: dict[str, Any],
        dtype: str = "bfloat16",
        target: str | None = None,
    ):
        for name, shape in config.shapes().items():
            if name not in weights or weights[name].shape != shape:
                got = weights[name].shape if name in weights else "none"
                raise ValueError(f"{name} must have shape {shape}; got {got}")

        def put(*names: str) -> Any:
            whole = np.concatenate([np.asarray(weights[f"{name}.weight"]) for name in names])
            return cupykern.asarray(whole, dtype, target)

        self.config, self.dtype, self._target = config, dtype, target
        self.xp = targets.get(target).xp  # cupy or numpy
        self._embedding = put("model.embed_tokens")
        self._norm = put("model.norm")
        self._head = self._embedding if config.tie_word_embeddings else put("lm_head")
        self._inv_freq, _ = cupykern.rope_inv_freq(
            config.head_dim, config.rope_theta, target=target
        )
        self._layers = []
        for i in range(config.num_hidden_layers):
            layer = f"model.layers.{i}."
            weights_of = {name: put(f"{layer}mlp.{name}_proj") for name in ("gate", "up", "down")}
            weights_of["qkv"] = put(*(f"{layer}self_attn.{name}_proj" for name in "qkv"))
            weights_of["out"] = put(layer + "self_attn.o_proj")
            weights_of["norm"] = put(layer + "input_layernorm")
            weights_of["mlp_norm"] = put(layer + "post_attention_layernorm")
            self._layers.append(weights_of)

    def new_cache(self, batch: int, room: int) -> Cache:
        """An empty cache for `room` tokens of each sequence."""
        c, layers = self.config, len(self._layers)
        shape = batch, c.num_key_value_heads, room, c.head_dim
        arrays = [cupykern.empty(shape, self.dtype, self._target) for _ in range(2 * layers)]
        return Cache(arrays[:layers], arrays[layers:], self.xp.zeros(batch, np.int32))

    def __call__(self, tokens: Any, cache: Cache, every: bool = False) -> Any:
        """Read tokens (batch, n), integers, after those in the cache, which takes them up.

        Returns the logits after the last one, float32 (batch, vocab); with `every` after each,
        (batch, n, vocab).  Waits for nothing.  Raises ValueError where the cache has no room.
        """
        (batch, n), eps, room = tokens.shape, self.config.rms_norm_eps, cache.keys[0].shape[2]
        if cache.length + n > room:
            raise ValueError(f"the cache has room for {room} tokens, not for {cache.length + n}")
        positions = cache.lengths[:, None] + self.xp.arange(n, dtype=np.int32)
        cache.lengths += np.int32(n)
        # Products take all tokens of the batch as the rows of one matrix.
        x, change = self._embedding[tokens.reshape(-1)], None
        for number, layer in enumerate(self._layers):
            y, x = _add_norm(x, change, layer["norm"], eps)
            qkv = cupykern.matmul(y, layer["qkv"].T).reshape(batch, n, -1, self.config.head_dim)
            mixed = self._attend(qkv, positions, cache, number).reshape(batch * n, -1)
            y, x = _add_norm(x, cupykern.matmul(mixed, layer["out"].T), layer["mlp_norm"], eps)
            inner = cupykern.dual_gemm_silu(y, layer["gate"].T, layer["up"].T)
            change = cupykern.matmul(inner, layer["down"].T)
        cache.length += n
        if not every:
            x, change = (a.reshape(batch, n, -1)[:, -1] for a in (x, change))
        y, _ = _add_norm(x, change, self._norm, eps)
        logits = cupykern.matmul(y, self._head.T, out_dtype="float32")
        return logits.reshape(batch, n, -1) if every else logits

    def _attend(self, qkv: Any, positions: Any, cache: Cache, number: int) -> Any:
        """Attention of one layer: (batch, n, heads, head_dim), or (batch, heads, 1, head_dim).

        qkv: its queries, keys and values, (batch, n, heads + 2 * KV heads, head_dim).
        """
        heads, n = self.config.num_attention_heads, qkv.shape[1]
        both = heads + self.config.num_key_value_heads
        q, k, v = qkv[:, :, :heads], qkv[:, :, heads:both], qkv[:, :, both:]
        keys, values = cache.keys[number], cache.values[number]
        q = cupykern.rope_and_cache(q, k, v, positions, keys, values, inv_freq=self._inv_freq)
        if n == 1:
            q = q.transpose(0, 2, 1, 3)
            return cupykern.decode_attention(q, keys, values, seq_lens=cache.lengths)
        seen = (x[:, :, : cache.length + n].transpose(0, 2, 1, 3) for x in (keys, values))
        return cupykern.attention(q, *seen, causal=True, causal_align="bottom_right", layout="bshd")


def _add_norm(x: Any, change: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    """(the norm of x + change, x + change), in one kernel; change None: of x alone."""
    if change is None:
        return cupykern.rms_norm(x, weight, eps=eps), x
    return cupykern.rms_norm(change, weight, eps=eps, residual=x)


# --- generation --------------------------------------------------------------------------------


def choose(xp: Any, logits: Any, temperature: float, rng: np.random.Generator) -> Any:
    """The next tokens, (batch, 1): the likeliest ones for temperature 0, else drawn."""
    if temperature == 0:
        return logits.argmax(axis=-1)[:, None]
    sums = cupykern.softmax(logits, scale=1 / temperature).cumsum(axis=-1)
    # In (0, 1], so that what is drawn has a probability.
    draws = xp.asarray(1 - rng.random((len(logits), 1), np.float32))
    return (sums < draws * sums[:, -1:]).sum(axis=-1)[:, None]


def generate(
    model: Llama, prompt: np.ndarray, count: int, temperature: float = 0.0, seed: int = 0
) -> Iterator[Any]:
    """Yield `count` times the next tokens, (batch, 1) where the model is.  prompt: (batch, n)."""
    rng = np.random.default_rng(seed)
    cache, tokens = model.new_cache(len(prompt), prompt.shape[1] + count), model.xp.asarray(prompt)
    for _ in range(count):
        tokens = choose(model.xp, model(tokens, cache), temperature, rng)
        yield tokens


def main(arguments: Sequence[str] | None = None, make: type[Llama] = Llama) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="config.json and *.safetensors")
    parser.add_argument("--random", metavar="HIDDEN,LAYERS,HEADS,KV_HEADS,VOCAB",
                        help="random weights instead, of this size")  # fmt: skip
    parser.add_argument("--prompt", default="1,2,3,4,5,6,7,8", help="tokens, with commas")
    parser.add_argument("--batch", type=int, default=1, help="copies of the prompt")
    parser.add_argument("--tokens", type=int, default=32, help="how many to generate")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    parser.add_argument("--seed", type=int, default=0, help="of weights and draws")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--target", choices=("cuda", "hip", "host"), help="default: the GPU")
    args = parser.parse_args(arguments)
    if (args.folder is None) == (args.random is None):
        parser.error("either a folder or --random")
    try:
        if args.random:
            hidden, layers, heads, kv_heads, vocab = map(int, args.random.split(","))
            inner = 11 * hidden // 32 * 8  # about 8/3, as in Llama 2
            config = LlamaConfig(vocab, hidden, inner, layers, heads, kv_heads, hidden // heads)
            weights = random_weights(config, args.dtype, args.seed)
        else:
            config, weights = load(args.folder)
        model = make(config, weights, args.dtype, args.target)
        prompt = np.array([[int(word) for word in args.prompt.split(",")]] * args.batch)
        if not (prompt.size and args.tokens > 0 and args.temperature >= 0):
            raise ValueError("--batch and --tokens must be at least 1, --temperature at least 0")
        if not 0 <= prompt.min() <= prompt.max() < config.vocab_size:
            raise ValueError(f"--prompt must hold tokens from 0 to {config.vocab_size - 1}")
        run(model, prompt, min(args.tokens, 4), args.temperature, args.seed)  # compiles the kernels
    except (OSError, ValueError, targets.UnavailableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    tokens, first, seconds = run(model, prompt, args.tokens, args.temperature, args.seed)
    for row in tokens:
        print(*row, sep=",")
    where = "  (host emulation)" if model.xp is np else ""
    rate = args.batch * (args.tokens - 1) / seconds
    print(f"{prompt.size} tokens read in {1000 * first:.1f} ms", file=sys.stderr)
    print(f"then {rate:.1f} tokens/s in a batch of {args.batch}{where}", file=sys.stderr)
    return 0


def run(
    model: Llama, prompt: np.ndarray, count: int, temperature: float, seed: int
) -> tuple[list[list[int]], float, float]:
    """(the new tokens of each sequence, seconds until the first ones, seconds of the others)"""
    begun = time.perf_counter()
    tokens = generate(model, prompt, count, temperature, seed)
    found = [next(tokens).tolist()]  # waits for the GPU
    first = time.perf_counter()
    found += [x.tolist() for x in list(tokens)]  # and here, when all steps are under way
    seconds = time.perf_counter() - first
    return np.concatenate(found, axis=1).tolist(), first - begun, seconds


if __name__ == "__main__":
    sys.exit(main())
