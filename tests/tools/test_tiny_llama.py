"""examples/tiny_llama.py against the model in FP64, and Hugging Face's where it is installed."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupykern import targets
from cupykern.check import RMS_LIMIT
from cupykern.numerics import to_numpy

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import tiny_llama
import tiny_llama_graph

CONFIG = tiny_llama.LlamaConfig(96, 64, 176, 2, 4, 2, 16)
STEPS = ((0, 2), (2, 5), (5, 6), (6, 7), (7, 8), (8, 9))  # the first and last tokens of each call
HUGGING_FACE = {  # CONFIG by the names of config.json
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
TOKENS = np.random.default_rng(7).integers(0, CONFIG.vocab_size, (2, 9))


def forward(config, weights, tokens, keep=lambda x: x, fault=""):
    """Logits (batch, n, vocab) in FP64.  keep: applied to each result that a kernel would round.
    fault: a mistake, for the tests of the tests."""
    w = {name: np.asarray(x, np.float64) for name, x in weights.items()}
    batch, n = tokens.shape
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    eps = 0.1 if fault == "eps" else config.rms_norm_eps

    def norm(x, name):
        return keep(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"])

    def split(x, count):
        return x.reshape(batch, n, count, dim).transpose(0, 2, 1, 3)

    angles = np.arange(n)[:, None] / config.rope_theta ** (np.arange(0, dim, 2) / dim)
    if fault == "theta":
        angles = np.arange(n)[:, None] / 1e6 ** (np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angles), np.sin(angles)

    def turn(x):
        if fault == "neighbours":
            a, b = x[..., ::2], x[..., 1::2]
            return keep(np.stack((a * cos - b * sin, b * cos + a * sin), -1).reshape(x.shape))
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return keep(np.concatenate((a * cos - b * sin, b * cos + a * sin), -1))

    x, change = w["model.embed_tokens.weight"][tokens], 0.0
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."
        x = keep(x + change)
        y = norm(x, layer + "input_layernorm")
        q, k, v = (keep(y @ w[f"{layer}self_attn.{name}_proj.weight"].T) for name in "qkv")
        q, k, v = turn(split(q, heads)), turn(split(k, kv_heads)), split(v, kv_heads)
        group = heads // kv_heads
        if fault == "groups":
            k, v = np.tile(k, (1, group, 1, 1)), np.tile(v, (1, group, 1, 1))
        else:
            k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(dim)
        seen = np.tril(np.ones((n, n), bool), 1 if fault == "causal" else 0)
        p = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
        mixed = keep(p @ v / p.sum(-1, keepdims=True)).transpose(0, 2, 1, 3).reshape(batch, n, -1)
        x = keep(x + keep(mixed @ w[layer + "self_attn.o_proj.weight"].T))
        y = norm(x, layer + "post_attention_layernorm")
        gate, up = (y @ w[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        if fault == "gate":
            gate, up = up, gate
        inner = keep(gate / (1 + np.exp(-gate)) * up)
        change = keep(inner @ w[layer + "mlp.down_proj.weight"].T)
    y = norm(x + change, "model.norm")
    return y @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def errors_over_expected(logits, config, weights, tokens, dtype, positions=slice(None), fault=""):
    """For each position, the rms error of logits over that of rounding each op's results once.

    By its contract an op's rms error is at most RMS_LIMIT times what rounding once makes expected,
    and to first order later ops are linear in the errors of earlier ones; so this must not exceed
    RMS_LIMIT.
    """
    exact = forward(config, weights, tokens)
    rounded = forward(config, weights, tokens, lambda x: x.astype(dtype).astype(np.float64))
    expected = np.sqrt(np.mean((rounded - exact) ** 2, axis=(0, 2)))
    wanted = forward(config, weights, tokens, fault=fault) if fault else exact
    errors = np.sqrt(np.mean((logits - wanted[:, positions]) ** 2, axis=(0, 2)))
    return errors / expected[positions]


def read(dtype, target, make=tiny_llama.Llama):
    """(weights, numpy's dtype, logits of all tokens at once, logits of several steps)"""
    weights = tiny_llama.random_weights(CONFIG, dtype, seed=3)
    model = make(CONFIG, weights, dtype, target.name)
    tokens = model.xp.asarray(TOKENS)
    whole = model(tokens, model.new_cache(2, 9), every=True)
    cache = model.new_cache(2, 16)
    for array in (*cache.keys, *cache.values):
        array.view(np.uint16).fill(0xFFFF)  # NaN where nothing is kept yet
    steps = [to_numpy(model(tokens[:, i:j], cache)) for i, j in STEPS]
    numbers = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    return weights, numbers, to_numpy(whole), np.stack(steps, axis=1)


@pytest.mark.in_turn("dtype")
@pytest.mark.parametrize("make", [tiny_llama.Llama, tiny_llama_graph.GraphLlama])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_are_as_exact_as_rounding_allows(dtype, make, target):
    """All tokens at once; and some, some more, then one by one."""
    weights, numbers, whole, steps = read(dtype, target, make)
    assert whole.shape == (2, 9, CONFIG.vocab_size) and whole.dtype == np.float32
    call = CONFIG, weights, TOKENS, numbers
    assert errors_over_expected(whole, *call).max() <= RMS_LIMIT
    last = [end - 1 for _, end in STEPS]
    assert errors_over_expected(steps, *call, last).max() <= RMS_LIMIT


@pytest.mark.parametrize("fault", ["eps", "theta", "neighbours", "groups", "causal", "gate"])
def test_mistakes_would_show(fault):
    weights, numbers, whole, _ = read("bfloat16", targets.get("host"))
    ratios = errors_over_expected(whole, CONFIG, weights, TOKENS, numbers, fault=fault)
    assert ratios.max() > RMS_LIMIT


def test_a_cache_has_only_the_room_it_has():
    weights = tiny_llama.random_weights(CONFIG, "float16")
    model = tiny_llama.Llama(CONFIG, weights, "float16", "host")
    with pytest.raises(ValueError, match="room for 4 tokens, not for 9"):
        model(TOKENS, model.new_cache(2, 4))


# --- files -------------------------------------------------------------------------------------


def write_safetensors(path, tensors):
    """The format as its README says it, with metadata and padded by spaces as the package does."""
    names = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "int64": "I64"}
    header, data = {"__metadata__": {"format": "np"}}, b""
    for name, x in tensors.items():
        offsets = [len(data), len(data) + x.nbytes]
        entry = {"dtype": names[str(x.dtype)], "shape": list(x.shape), "data_offsets": offsets}
        header[name], data = entry, data + x.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_tensors_are_read_as_they_were_written(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        str(dtype): rng.standard_normal((3, 5)).astype(dtype)
        for dtype in (np.float16, ml_dtypes.bfloat16, np.float32)
    }
    tensors |= {"none": np.zeros((0, 4), np.float16), "scalar": np.array(2, np.float32)}
    write_safetensors(tmp_path / "a.safetensors", tensors)
    found = tiny_llama.read_safetensors(tmp_path / "a.safetensors")
    assert list(found) == list(tensors)
    for name, x in tensors.items():
        assert found[name].dtype == x.dtype and found[name].shape == x.shape
        assert found[name].tobytes() == x.tobytes()


@pytest.mark.parametrize("data", [b"", b"\0" * 4, b"\xff" * 64, struct.pack("<Q", 2) + b"[]"])
def test_what_is_no_safetensors_file_is_refused(data, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.safetensors"):
        tiny_llama.read_safetensors(path)


def test_other_dtypes_are_refused(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", {"x": np.zeros(2, np.int64)})
    with pytest.raises(ValueError, match="x is I64"):
        tiny_llama.read_safetensors(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_other_models_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_llama.LlamaConfig.of({**HUGGING_FACE, **changes})


def test_weights_that_do_not_fit_are_refused():
    weights = tiny_llama.random_weights(CONFIG, "float16")
    name = "model.layers.1.mlp.up_proj.weight"
    for wrong in ({}, {name: weights[name].T}):
        others = {key: x for key, x in weights.items() if key != name}
        with pytest.raises(ValueError, match=name):
            tiny_llama.Llama(CONFIG, others | wrong, "float16", "host")


def test_hugging_faces_model_gives_the_same_logits(tmp_path):
    """Its files and its logits, in FP64, of a model with tied embeddings and another theta."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = transformers.LlamaConfig(
        **{**HUGGING_FACE, "tie_word_embeddings": True}, rope_theta=500.0, initializer_range=0.2
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(theirs).to(torch.bfloat16).save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    with torch.no_grad():
        wanted = model(torch.from_numpy(TOKENS)).logits.numpy()
    config, weights = tiny_llama.load(tmp_path)
    assert config.tie_word_embeddings and config.rope_theta == 500.0
    exact = forward(config, weights, TOKENS)
    np.testing.assert_allclose(exact, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    ours = tiny_llama.Llama(config, weights, "bfloat16", "host")
    logits = ours(TOKENS, ours.new_cache(2, 9), every=True)
    call = config, weights, TOKENS, ml_dtypes.bfloat16
    assert errors_over_expected(logits, *call).max() <= RMS_LIMIT


# --- generation --------------------------------------------------------------------------------


def test_tokens_are_drawn_as_likely_as_they_are():
    rng = np.random.default_rng(1)
    logits = np.log(np.array([[0.5, 0.0, 0.2, 0.3]], np.float32) + 1e-30).repeat(4000, axis=0)
    for temperature, p in ((1.0, [0.5, 0, 0.2, 0.3]), (0.5, np.square([0.5, 0, 0.2, 0.3]) / 0.38)):
        drawn = tiny_llama.choose(np, logits, temperature, rng)
        assert drawn.shape == (4000, 1)
        shares = np.bincount(drawn[:, 0], minlength=4) / 4000
        assert np.all(np.abs(shares - p) <= 5 * np.sqrt(np.multiply(p, 1 - np.array(p)) / 4000))
    assert (tiny_llama.choose(np, logits, 0, rng) == 0).all()


def test_the_command(capsys, tmp_path):
    command = ["--random", "64,2,4,2,96", "--target", "host", "--tokens", "3", "--prompt", "1,2"]
    printed = []
    for extra in ([], [], ["--batch", "2", "--temperature", "1.5"]):
        assert tiny_llama.main([*command, *extra]) == 0
        out, err = capsys.readouterr()
        assert "tokens/s" in err and "host emulation" in err
        printed.append([[int(word) for word in line.split(",")] for line in out.splitlines()])
    assert printed[0] == printed[1] and [len(x) for x in printed] == [1, 1, 2]
    assert all(len(row) == 3 and 0 <= min(row) <= max(row) < 96 for x in printed for row in x)
    for wrong in (
        *(["--prompt", "96"], ["--prompt", "x"], ["--tokens", "0"], ["--random", "1,2"]),
        *(["--random", "60,1,4,2,96"], ["--random", "64,1,4,3,96"]),  # heads of 15, groups of 4 / 3
    ):
        assert tiny_llama.main([*command, *wrong]) == 1
        assert capsys.readouterr().err.startswith("error: ")
    assert tiny_llama.main([str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err
