"""examples/llama.py: reading what Hugging Face's folders hold, and continuous batching.

tests/interop/test_llama.py compares with transformers."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_llama import CONFIG, tensors_of

import cupykern
from cupykern.check import RMS_LIMIT
from cupykern.numerics import to_numpy
from cupykern.tools.model import cache as caches
from cupykern.tools.model.hugging_face import config_of, decoder_of
from cupykern.tools.model.linear import Dense, Fp8Blocks, Weights8, dequantized
from cupykern.tools.model.reference import Expected

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import llama


@pytest.fixture(scope="module")
def decoder():
    return decoder_of(config_of(CONFIG), "llama", tensors_of(CONFIG), target="host")


@pytest.mark.parametrize("weights", [None, "int8"])
def test_logits_are_as_exact_as_rounding_allows(weights, target):
    found = decoder_of(
        config_of(CONFIG), "llama", tensors_of(CONFIG), "bfloat16", weights, target.name
    )
    tokens = target.xp.asarray(np.random.default_rng(7).integers(0, 96, (1, 9)))
    cache = caches.contiguous(found.config, 1, 16, "bfloat16", target.name)
    expected = Expected.of(found, tokens, cache, [0])
    assert expected.error_over_limit(found.prefill(tokens, cache)) <= 1


def fp8(config):
    """The tensors with weights of all linear layers but the last two in FP8, by blocks."""
    tensors = tensors_of(config)
    for name in [name for name in tensors if "_proj" in name and "layers.1.mlp" not in name]:
        weight = tensors[name].astype(np.float32)
        values, scale = cupykern.quantize(weight, "e4m3", granularity="block", block=(128, 128))
        tensors[name], tensors[f"{name}_scale_inv"] = values, scale
    return tensors


@pytest.mark.parametrize(("weights", "kind"), [(None, Fp8Blocks), ("e4m3-blocks", Weights8)])
def test_fp8_checkpoints_are_read_with_their_block_scales(weights, kind):
    config = {**CONFIG, "hidden_size": 256, "head_dim": 128, "num_key_value_heads": 1}
    config["num_attention_heads"] = 2
    tensors = fp8(config)
    found = decoder_of(config_of(config), "llama", tensors, weights=weights, target="host")
    assert type(found.layers[0].qkv) is kind
    assert type(found.layers[1].down) is (Dense if weights is None else Weights8)
    name = "model.layers.0.self_attn.v_proj.weight"
    scale = tensors[f"{name}_scale_inv"].repeat(128, 0).repeat(128, 1)
    np.testing.assert_array_equal(
        dequantized(found.layers[0].qkv)[-128:], tensors[name].astype(float) * scale
    )
    tokens = np.random.default_rng(7).integers(0, 96, (1, 5))
    cache = caches.contiguous(found.config, 1, 8, "bfloat16", "host")
    expected = Expected.of(found, tokens, cache, [0])
    assert expected.error_over_limit(found.prefill(tokens, cache)) <= 1


def test_fp8_that_does_not_fit_is_refused():
    narrow = {**CONFIG, "num_hidden_layers": 1}  # KV heads of 32 rows
    for weights, message in ((None, "multiples of 128"), ("int8", "fp8 or e4m3-blocks")):
        with pytest.raises(ValueError, match=message):
            decoder_of(config_of(narrow), "llama", fp8(narrow), weights=weights, target="host")


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_weights_that_do_not_fit_are_refused(name):
    for wrong in ({}, {name: np.zeros((3, 5), np.float16)}):
        others = {key: x for key, x in tensors_of(CONFIG).items() if key != name}
        with pytest.raises(ValueError, match=name):
            decoder_of(config_of(CONFIG), "llama", others | wrong, target="host")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type must be one of llama, mistral"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"vocab_size": None}, None),
        ({"layer_types": ["full_attention"]}, "2 layers"),
        ({"layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        ({"num_attention_heads": 3}, "multiple"),
    ],
)
def test_other_models_are_refused(changes, message):
    found = {**CONFIG, **changes}
    if message is None:
        del found["vocab_size"]
    with pytest.raises(ValueError, match=message or "vocab_size"):
        config_of(found)


def test_windows_by_layer():
    mistral = config_of({**CONFIG, "model_type": "mistral", "sliding_window": 8})
    assert [kind.window for kind in mistral.kinds] == [8, 8]
    qwen = {**CONFIG, "model_type": "qwen2", "sliding_window": 8, "max_window_layers": 1}
    assert [kind.window for kind in config_of(qwen).kinds] == [None, None]
    used = config_of({**qwen, "use_sliding_window": True})
    assert [kind.window for kind in used.kinds] == [None, 8]
    gemma = {**CONFIG, "model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 8}
    found = config_of({**gemma, "rope_theta": 1e6, "rope_local_base_freq": 1e4}).kinds
    assert [kind.window for kind in found] == [8] * 5 + [None]
    assert [kind.positions.theta for kind in found] == [1e4] * 5 + [1e6]


# --- generation --------------------------------------------------------------------------------

PROMPTS = ([1, 2, 3], [5, 6, 7, 8, 9], [10], [11, 12])


def generated(decoder, prompts, count=5, target="host", **options):
    engine = llama.Engine(decoder, target, **{"slots": 2, "room": 12, "page": 4, **options})
    found = [[] for _ in prompts]
    for number, token in engine.generate(prompts, count):
        found[number].append(token)
    return found


@pytest.mark.parametrize("cache", caches.FORMATS)
def test_tokens_are_the_likeliest_ones(cache, target):
    """Sequences of different lengths, more than slots, that come and go."""
    decoder = decoder_of(config_of(CONFIG), "llama", tensors_of(CONFIG), target=target.name)
    found = generated(decoder, PROMPTS, target=target.name, cache=cache)
    dtype = caches.dtype_of(cache, decoder.embedding.dtype)
    empty = caches.contiguous(decoder.config, 1, 16, dtype, target.name)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        assert len(tokens) == 5
        for i, token in enumerate(tokens):
            before = target.xp.asarray(np.array([prompt + tokens[:i]]))
            expected = Expected.of(decoder, before, empty, [0])
            exact = to_numpy(expected.exact)[0]
            # Two logits may be off by six standard deviations each.
            assert exact[token] >= exact.max() - 12 * RMS_LIMIT * expected.rms


def test_a_sequence_does_not_depend_on_others(decoder):
    """Each alone gives the same tokens; so do few pages, for which others wait."""
    together = generated(decoder, PROMPTS)
    assert together == [generated(decoder, [prompt])[0] for prompt in PROMPTS]
    assert together == generated(decoder, PROMPTS, pages=3)


def test_texts_end_early(decoder):
    (tokens,) = generated(decoder, [[1, 2, 3]])
    end = tokens[2]
    engine = llama.Engine(decoder, "host", slots=2, room=12, page=4)
    found = [token for _, token in engine.generate([[1, 2, 3]], 5, {end})]
    assert found == tokens[: tokens.index(end)]


def test_prompts_that_do_not_fit_are_refused(decoder):
    engine = llama.Engine(decoder, "host", slots=1, room=8, page=4)
    for prompt in ([], [1] * 6):
        with pytest.raises(ValueError, match="1 to 5 tokens"):
            list(engine.generate([prompt], 3))


def test_tokens_are_drawn_as_likely_as_they_are():
    rng = np.random.default_rng(1)
    x = np.log(np.array([[0.5, 0.0, 0.2, 0.3]], np.float32) + 1e-30).repeat(4000, axis=0)
    for temperature, p in ((1.0, [0.5, 0, 0.2, 0.3]), (0.5, np.square([0.5, 0, 0.2, 0.3]) / 0.38)):
        drawn = llama.choose(np, x, temperature, rng)
        shares = np.bincount(drawn, minlength=4) / 4000
        assert np.all(np.abs(shares - p) <= 5 * np.sqrt(np.multiply(p, 1 - np.array(p)) / 4000))
    assert (llama.choose(np, x, 0, rng) == 0).all()


class Bytes:
    """A tokenizer whose tokens are UTF-8's bytes."""

    def decode(self, tokens):
        return bytes(tokens).decode(errors="replace")


def test_characters_of_several_tokens_come_whole():
    texts = llama.Texts(Bytes(), 2)
    assert [texts.add(1, byte) for byte in "aé!".encode()] == ["a", "", "é", "!"]
    assert texts.texts == ["", "aé!"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "No such file"),
        ({"config.json": "[1]"}, "must hold a JSON object; got list"),
        ({"config.json": "{"}, "error: "),
        ({"tokenizer.json": None}, "No such file"),
        ({"tokenizer.json": "{}"}, "is not a tokenizer"),
    ],
    ids=["empty", "a list", "no JSON", "no tokenizer", "another tokenizer"],
)
def test_the_command_says_what_a_folder_lacks(files, said, capsys, tmp_path, monkeypatch):
    if "tokenizer.json" in files:  # which is read after the model
        pytest.importorskip("tokenizers")
        monkeypatch.setattr(llama, "load", lambda *_: None)
    for name, text in files.items():
        if text is not None:
            (tmp_path / name).write_text(text)
    assert llama.main([str(tmp_path), "--prompt", "a", "--target", "host"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error
