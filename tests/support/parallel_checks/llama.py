"""A decoder over ranks.  Each function is a check, on every rank."""

from __future__ import annotations

import io
import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from tiny_llama import CONFIG, tensors_of

import cupykern
from cupykern import parallel
from cupykern.tools.model import cache as caches
from cupykern.tools.model.hugging_face import config_of, decoder_of
from cupykern.tools.model.reference import Expected
from cupykern.tools.model.tensor_parallel import decoder_of_rank, part_of_rank

from .common import raises

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import llama

_CONFIG = {**CONFIG, "num_key_value_heads": 4, "num_attention_heads": 8, "head_dim": 16}
PROMPTS = ([1, 2, 3], [5, 6, 7, 8], [10])


def _decoder(comm, weights=None, config=_CONFIG, tensors=None):
    tensors = tensors_of(config) if tensors is None else tensors
    return decoder_of_rank(
        comm, config_of(config), "llama", tensors, weights=weights, target="host"
    )


def logits_are_as_exact_as_rounding_allows(comm):
    """Also with heads, columns and a vocabulary that ranks cannot have as many of."""
    for weights in (None, "int8"):
        mine = _decoder(comm, weights)
        whole = decoder_of(
            config_of(_CONFIG), "llama", tensors_of(_CONFIG), "bfloat16", weights, "host"
        )
        assert mine.nbytes < 0.7 * whole.nbytes or weights
        tokens = np.random.default_rng(7).integers(0, 96, (1, 9))
        cache = caches.contiguous(mine.config, 1, 16, "bfloat16", "host")
        logits = mine.prefill(tokens, cache)
        logits = parallel.all_gather(comm, np.ascontiguousarray(logits.T)).T
        empty = caches.contiguous(whole.config, 1, 16, "bfloat16", "host")
        if weights is None:  # 8-bit weights of `out` and `down` have scales of each rank
            assert Expected.of(whole, tokens, empty, [0]).error_over_limit(logits) <= 1
        else:
            assert np.abs(logits - whole.prefill(tokens, empty)).max() < 0.2


def biases_are_added_once_and_the_embedding_may_be_the_head(comm):
    config = {**_CONFIG, "attention_bias": True, "tie_word_embeddings": True}
    tensors, rng = tensors_of(config), np.random.default_rng(5)
    del tensors["lm_head.weight"]
    for name, weight in list(tensors.items()):
        if "self_attn" in name:
            bias = rng.standard_normal(len(weight), np.float32) / 4
            tensors[name.replace("weight", "bias")] = bias.astype(weight.dtype)
    mine = _decoder(comm, None, config, tensors)
    whole = decoder_of(config_of(config), "llama", tensors, target="host")
    tokens = np.random.default_rng(7).integers(0, 96, (1, 9))
    cache = caches.contiguous(mine.config, 1, 16, "bfloat16", "host")
    logits = parallel.all_gather(comm, np.ascontiguousarray(mine.prefill(tokens, cache).T)).T
    empty = caches.contiguous(whole.config, 1, 16, "bfloat16", "host")
    assert Expected.of(whole, tokens, empty, [0]).error_over_limit(logits) <= 1
    later = part_of_rank(comm, whole)  # cut after it was loaded
    assert later.config == mine.config
    linears = [[*x.layers[0].linears, *x.layers[-1].linears, x.head] for x in (later, mine)]
    for a, b in zip(*linears, strict=True):
        np.testing.assert_array_equal(a.weight, b.weight)
        assert (a.bias is None) == (b.bias is None)
        assert a.bias is None or (a.bias == b.bias).all()


def generated(comm, decoder, temperature):
    choose = llama.chooser_of(comm)
    engine = llama.Engine(decoder, "host", slots=2, room=12, page=4, choose=choose)
    found = [[] for _ in PROMPTS]
    for number, token in engine.generate(PROMPTS, 2, temperature=temperature, seed=3):
        found[number].append(token)
    return found


def all_ranks_generate_the_same_texts(comm):
    decoder = _decoder(comm)
    for temperature in (0.0, 0.8):
        found = np.array(generated(comm, decoder, temperature), np.int64)
        data = found.tobytes()
        assert set(comm.gather_bytes(data, [len(data)] * comm.size)) == {data}
        assert found.shape == (3, 2) and found.min() >= 0 and found.max() < 96


class _Tokenizer:
    """Of letters."""

    def encode(self, text):
        return SimpleNamespace(ids=list(text.encode()))

    def decode(self, tokens):
        return "".join(chr(48 + token % 64) for token in tokens)


def the_command_prints_on_rank_0(comm):
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(printed):
        Path(folder, "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
        with (
            mock.patch.object(llama, "read_tokenizer", lambda folder: _Tokenizer()),
            mock.patch.object(llama, "read_tensors", lambda path: tensors_of(_CONFIG)),
        ):
            options = ["--prompt", "AB", "--tokens", "2", "--room", "8", "--target", "host"]
            assert llama.main([folder, *options, "--parallel", "tensor"]) == 0
    assert len(printed.getvalue().strip()) == 2 * (comm.rank == 0), printed.getvalue()


def fp8_blocks_are_not_cut(comm):
    config = {**_CONFIG, "head_dim": 128, "intermediate_size": 128 * comm.size}
    tensors = tensors_of(config)
    for name in [name for name in tensors if "_proj" in name]:
        weight = tensors[name].astype(np.float32)
        values, scale = cupykern.quantize(weight, "e4m3", granularity="block", block=(128, 128))
        tensors[name], tensors[f"{name}_scale_inv"] = values, scale
    mine = _decoder(comm, None, config, tensors)
    whole = decoder_of(config_of(config), "llama", tensors, target="host")
    tokens = np.arange(5)[None]
    logits = [
        x.prefill(tokens, caches.contiguous(x.config, 1, 8, "bfloat16", "host"))
        for x in (mine, whole)
    ]
    part = parallel.shares(96, comm.size)[comm.rank]
    assert np.abs(logits[0] - logits[1][:, part]).max() < 0.2
    wrong = {**config, "intermediate_size": 176}
    message = raises(ValueError, lambda: _decoder(comm, None, wrong, tensors))
    assert "would cut blocks of 128" in message, message


def fewer_heads_than_ranks_are_refused(comm):
    few = {**CONFIG, "num_key_value_heads": 1}
    message = raises(ValueError, lambda: _decoder(comm, None, few))
    assert message == f"{comm.size} ranks share only 1 KV heads", message
