"""cupykern/tools/model: a decoder of the ops against the same in FP64."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from cupykern import targets
from cupykern.numerics import to_numpy
from cupykern.runtime import jit
from cupykern.tools.model import cache as caches
from cupykern.tools.model import linear, reference
from cupykern.tools.model.config import LayerKind, ModelConfig, Positions, public, public_names
from cupykern.tools.model.graph import Graph
from cupykern.tools.model.measure import Step, made_cache, tokens_of
from cupykern.tools.model.random_weights import random_decoder
from cupykern.tools.model.reference import Expected

PLAIN = ModelConfig(96, 64, 176, 4, 2, 16, (LayerKind(), LayerKind(Positions(500.0), 4)))
QWEN = replace(PLAIN, head_norms=True, qkv_bias=True, tied=True)
GEMMA = replace(
    PLAIN, gate="gelu_tanh", post_norms=True, embedding_scale=8.0, softcap=20.0, logit_softcap=5.0,
    attention_scale=0.3,
)  # fmt: skip
WIDE = replace(PLAIN, hidden=192, intermediate=144)  # more than one block of scales, not all whole
CASES = {
    "plain": (PLAIN, "bfloat16", "16bit"),
    "float16": (PLAIN, "float16", "16bit"),
    "qwen": (QWEN, "bfloat16", "16bit"),
    "gemma": (GEMMA, "bfloat16", "16bit"),
    "int8": (WIDE, "bfloat16", "int8"),
    "e4m3": (WIDE, "float16", "e4m3"),
    "e4m3-blocks": (WIDE, "bfloat16", "e4m3-blocks"),
    "fp8": (WIDE, "bfloat16", "fp8"),
}
CACHES = {
    "e4m3": (PLAIN, "bfloat16", "float8_e4m3fn"),
    "int8": (GEMMA, "float16", "int8"),
    "int8-qwen": (QWEN, "float16", "int8"),
}
TOKENS = np.random.default_rng(7).integers(0, 96, (2, 9))
PREFILLED = 6


def nan_cache(paged, config, dtype, target):
    """For 16 tokens of 2 sequences, NaN where nothing is kept; pages in random order."""
    if paged:
        cache = caches.paged(config, 2, 20, dtype, target.name, page=4, room=16)
        table = np.random.default_rng(0).permutation(20)[:8].reshape(2, 4).astype(np.int32)
        cache.block_table[...] = target.xp.asarray(table)
    else:
        cache = caches.contiguous(config, 2, 16, dtype, target.name)
    for array in (*cache.keys, *cache.values):
        array.view(f"u{array.itemsize}").fill(0xFFFF if array.itemsize == 2 else 0x7F)
    for scale in (x for pair in cache.scales or () for x in pair):
        scale.fill(np.nan)
    return cache


def steps(decoder, cache, target):
    """Logits after PREFILLED tokens, and after all of them, of which the others came singly."""
    tokens = target.xp.asarray(TOKENS)
    first = decoder.prefill(tokens[:, :4], cache)
    first = decoder.prefill(tokens[:, 4:PREFILLED], cache, start=4)
    cache.set_lengths([PREFILLED, PREFILLED])
    following = target.xp.zeros(2, np.int64)
    step = Graph(lambda: decoder.decode(following, cache), target)
    cache.set_lengths([PREFILLED, PREFILLED])  # capturing may have run a step
    for i in range(PREFILLED, TOKENS.shape[1]):
        following[...] = tokens[:, i]
        last = step()
    return to_numpy(first), to_numpy(last)


def expected(decoder, target, count, dtype="float16"):
    """dtype: of a cache that has nothing yet."""
    empty = caches.contiguous(decoder.config, 2, 16, dtype, target.name)
    return Expected.of(decoder, target.xp.asarray(TOKENS[:, :count]), empty, [0, 0])


@pytest.mark.in_turn("name", "paged")
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_as_exact_as_rounding_allows(name, paged, target):
    """Prefilled in two parts, then token by token."""
    config, dtype, weights = CASES[name]
    decoder = random_decoder(config, dtype, weights, target.name)
    found = steps(decoder, nan_cache(paged, config, dtype, target), target)
    for logits, count in zip(found, (PREFILLED, TOKENS.shape[1]), strict=True):
        assert logits.shape == (2, 96) and logits.dtype == np.float32
        assert expected(decoder, target, count).error_over_limit(target.xp.asarray(logits)) <= 1


@pytest.mark.in_turn("name", "paged")
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", CACHES)
def test_logits_with_caches_of_8_bits(name, paged, target):
    """Prefilled in two parts, then token by token; what 16 bits are allowed would not do."""
    config, dtype, cache_dtype = CACHES[name]
    decoder = random_decoder(config, dtype, target=target.name)
    found = steps(decoder, nan_cache(paged, config, cache_dtype, target), target)
    for logits, count in zip(map(target.xp.asarray, found), (PREFILLED, 9), strict=True):
        assert expected(decoder, target, count, cache_dtype).error_over_limit(logits) <= 1
        assert expected(decoder, target, count).error_over_limit(logits) > 1


@pytest.mark.parametrize("cache", ["e4m3", "int8"])
def test_codes_that_a_cache_has_count_as_they_are(cache):
    """Of a decode step over stored codes only the new token is rounded; a wrong scale shows."""
    host, decoder = targets.get("host"), random_decoder(PLAIN, "bfloat16", target="host")
    step = Step("decode", 2, 40, cache)
    tokens, made = tokens_of(PLAIN, step, 0), made_cache(decoder, step, host)
    logits = decoder.decode(tokens[:, 0], made)
    exact = Expected.of(decoder, tokens, made, [39, 39])
    assert exact.error_over_limit(logits) <= 1
    in_16_bits = made_cache(decoder, Step("decode", 2, 40), host)
    assert exact.rms < 2 * Expected.of(decoder, tokens, in_16_bits, [39, 39]).rms
    for part in (0, 1):
        wrong = replace(made, scales=[tuple(map(np.copy, pair)) for pair in made.scales])
        for pair in wrong.scales:
            pair[part][:, 1, :20] *= 1.2
        assert Expected.of(decoder, tokens, wrong, [39, 39]).error_over_limit(logits) > 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8"])
def test_bytes_of_a_token_in_a_cache(dtype):
    """Of 2 layers with 2 KV heads of 16, and of 8 bits a scale for each head."""
    contiguous = caches.contiguous(PLAIN, 3, 8, dtype, "host")
    paged = caches.paged(PLAIN, 3, 5, dtype, "host", page=4, room=8)
    bytes_of_head = 32 if dtype == "bfloat16" else 16 + 4
    for cache in (contiguous, paged):
        assert cache.nbytes_per_token == 2 * 2 * 2 * bytes_of_head
        assert (cache.scales is None) == (dtype == "bfloat16")
        whole = [*cache.keys, *cache.values, *(x for pair in cache.scales or () for x in pair)]
        tokens = 24 if cache is contiguous else 20
        assert sum(x.nbytes for x in whole) == tokens * cache.nbytes_per_token


def test_a_sequence_of_a_cache_of_8_bits_is_a_view():
    for cache in (
        caches.contiguous(PLAIN, 2, 8, "int8", "host"),
        caches.paged(PLAIN, 2, 4, "int8", "host", page=4, room=8),
    ):
        one = cache.sequence(1)
        for whole, part in zip(cache.scales, one.scales, strict=True):
            assert all(map(np.shares_memory, whole, part))
        if cache.block_table is None:
            assert one.scales[0][0].shape == (1, 2, 8) == one.keys[0].shape[:3]
            pages = cache.as_pages()
            assert pages.room == cache.room and np.shares_memory(pages.keys[0], cache.keys[0])
            assert pages.scales[0][0].shape == pages.keys[0].shape[:3] == (2, 8, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"norm_eps": 0.1},
        {"kinds": (LayerKind(),) * 2},
        {"kinds": (LayerKind(), LayerKind(Positions(500.0), 5))},
        {"gate": "silu"},
        {"embedding_scale": 7.0},
        {"softcap": 2.0},
        {"logit_softcap": 4.0},
        {"attention_scale": 0.25},
    ],
    ids=lambda change: "-".join(change),
)
def test_mistakes_would_show(change):
    host = targets.get("host")
    decoder = random_decoder(GEMMA, "bfloat16", target="host")
    _, last = steps(decoder, nan_cache(False, GEMMA, "bfloat16", host), host)
    wrong = random_decoder(replace(GEMMA, **change), "bfloat16", target="host")
    assert expected(decoder, host, 9).error_over_limit(last) <= 1
    assert expected(wrong, host, 9).error_over_limit(last) > 1


def test_sequences_that_are_not_there_change_nothing():
    """A decode step of a batch in which one slot is free: the others' bits are the same."""
    host = targets.get("host")
    decoder = random_decoder(PLAIN, "bfloat16", target="host")
    results = []
    for lengths in ([3, 3], [3, 0]):
        cache = nan_cache(True, PLAIN, "bfloat16", host)
        decoder.prefill(TOKENS[:1, :3], cache.sequence(0))
        if lengths[1]:
            decoder.prefill(TOKENS[1:, :3], cache.sequence(1))
        cache.set_lengths(lengths)
        results.append(decoder.decode(TOKENS[:, 3], cache)[0])
        assert cache.counters.tolist() == ([[3, 3], [4, 4]] if lengths[1] else [[3, -1], [4, 0]])
        keys = [cache.keys[0][page].view(np.uint16) for page in cache.block_table[1]]
        assert (np.array(keys) == 0xFFFF).all() == (lengths[1] == 0)
    assert (results[0] == results[1]).all()


def test_chunks_beside_single_tokens():
    """Sequences at different places, one of them with no new token."""
    host = targets.get("host")
    decoder = random_decoder(PLAIN, "bfloat16", target="host")
    cache = nan_cache(True, PLAIN, "bfloat16", host)
    first, second = TOKENS
    decoder.append(first[:5], [5, 0], [0, 0], cache)
    decoder.append(np.concatenate((first[5:6], second[:4])), [1, 4], [5, 0], cache)
    decoder.append(second[4:8], [0, 4], [6, 4], cache)
    found = decoder.append(np.concatenate((first[6:], second[8:])), [3, 1], [6, 8], cache)
    assert expected(decoder, host, 9).error_over_limit(found) <= 1
    with pytest.raises(ValueError, match="add up to 4 tokens; got 5"):
        decoder.append(first[:4], [3, 2], [0, 0], cache)
    with pytest.raises(ValueError, match="room for 16 tokens, not for 18"):
        decoder.append(first[:4], [2, 2], [0, 16], cache)


def test_a_cache_has_only_the_room_it_has():
    decoder = random_decoder(PLAIN, "float16", target="host")
    cache = caches.contiguous(PLAIN, 2, 4, "float16", "host")
    with pytest.raises(ValueError, match="room for 4 tokens, not for 9"):
        decoder.prefill(TOKENS, cache)


def test_public_models_are_known_and_wrong_configs_refused():
    assert {"llama3-8b", "llama3-70b", "qwen3-8b", "mistral-7b"} <= set(public_names())
    assert public("qwen3-8b", 3).head_norms and len(public("qwen3-8b", 3).kinds) == 3
    with pytest.raises(ValueError, match="llama3-8b"):
        public("llama", 1)
    with pytest.raises(ValueError, match="gelu_tanh"):
        replace(PLAIN, gate="relu")
    with pytest.raises(ValueError, match="multiple"):
        replace(PLAIN, heads=3)


def test_dequantized_weights_are_near():
    weight = np.random.default_rng(0).standard_normal((200, 300)).astype(ml_dtypes.bfloat16)
    for name, make in linear.FORMATS.items():
        found = linear.dequantized(make(weight, None))
        error = np.linalg.norm(found - weight.astype(float)) / np.linalg.norm(weight.astype(float))
        assert error < {"16bit": 1e-9, "int8": 0.01}.get(name, 0.04)


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_layer_is_eight_launches(cache_dtype):
    """And two more for the logits: norm and head."""
    decoder = random_decoder(PLAIN, "bfloat16", target="host")
    cache = nan_cache(False, PLAIN, cache_dtype, targets.get("host"))
    decoder.prefill(TOKENS[:, :3], cache)
    cache.set_lengths([3, 3])
    with jit.logging_launches() as launches:
        decoder.decode(TOKENS[:, 3], cache)
    kernels = [launch.kernel for launch in launches]
    assert len(kernels) == 8 * len(PLAIN.kinds) + 2, kernels


def test_numbers_are_rounded_to_e4m3_as_ml_dtypes_does():
    x = np.random.default_rng(0).uniform(-448, 448, 4000) * 2.0 ** -(np.arange(4000) ** 0.4)
    x = np.concatenate((x, np.array([0.0, 448.0, 2.0**-6, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 17.0])))
    expected = x.astype(ml_dtypes.float8_e4m3fn).astype(float)
    np.testing.assert_array_equal(reference.to_e4m3(x), expected)
