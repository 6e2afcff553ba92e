"""Windows, soft caps, ALiBi, sinks and padded batches, beside the properties that hold for every
op."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from attention_checks import check_rows_beside_large_scores, normal, qkv

from cupykern import OPS, attention, attention_varlen, decode_attention
from cupykern.attention.attention_hopper import AttentionHopperConfig
from cupykern.attention.attention_plan import AttentionConfig
from cupykern.check import compare

FEW = np.array([0.3, -2.0], np.float32)
CONFIGS = (None, AttentionConfig(128, 32, 4), AttentionHopperConfig(128, 128))


@pytest.mark.parametrize("config", CONFIGS)
def test_tiles_outside_of_a_window_are_not_read(config):
    """Keys and values of tiles that no query of a tile of queries sees may be NaN."""
    q, k, v = qkv(128, 1000, 64)
    at = {"causal": True, "input_pos": 600, "config": config}  # sees keys 500 to 727
    y = attention(q, k, v, window=(100, 0), **at)
    k[:, :, :384] = v[:, :, :384] = np.nan
    k[:, :, 768:] = v[:, :, 768:] = np.nan
    assert np.isfinite(y).all() and (attention(q, k, v, window=(100, 0), **at) == y).all()


def test_a_window_that_reaches_all_keys_is_none():
    """The same variant, the same bits; right of it is causality."""
    q, k, v = qkv(50, 70, 24)
    causal = attention(q, k, v, causal=True, input_pos=20)
    for window in ((69, 0), (-1, 0), (10**12, -1)):
        kwargs = {"window": window, "input_pos": 20, "causal": window[1] != 0}
        assert (attention(q, k, v, **kwargs) == causal).all()
    moved = attention(q, k, v, window=(-1, 7), input_pos=13)
    assert (moved == causal).all()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("cap", [129.0, 1e4, 1e7, 1e18, 2.0**64])
def test_a_large_soft_cap_loses_nothing(cap, config):
    """Scores far below it stay as they are, to the precision of FP32."""
    q, k, v = qkv(70, 90, 64)
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2) / 8
    top = (cap * np.tanh(scores / cap)).max(-1)
    options = {"return_row_stats": True, "config": config}
    y, found, _ = attention(q, k, v, softcap=cap, **options)
    assert np.allclose(found, top, rtol=1e-5)
    if cap > 1e6:
        assert np.allclose(y, attention(q, k, v, **options)[0], atol=5e-4)


@pytest.mark.parametrize("cap", [200.0, 1e5, 1e12])
def test_large_soft_caps_of_decoding_and_of_large_scores(cap):
    """Of decoding, with and without a formula; and where scores reach the cap."""
    q, k, v = qkv(3, 90, 64)
    expected, top, _ = attention(q, k, v, softcap=cap, return_row_stats=True)
    for options in ({}, {"mask": "j >= 0"}):
        lengths = np.full(len(q), 90, np.int32)
        y = decode_attention(q, k, v, seq_lens=lengths, softcap=cap, causal=False, **options)
        assert np.allclose(y, expected, atol=5e-4)
    scale = cap / 4
    scores = scale * (q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2))
    _, top, _ = attention(q, k, v, softcap=cap, scale=scale, return_row_stats=True)
    assert np.allclose(top, (cap * np.tanh(scores / cap)).max(-1), rtol=1e-5)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_row_with_a_soft_cap_does_not_depend_on_the_others(config):
    check_rows_beside_large_scores(64, 200, 64, config=config)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("algorithm", ["flash", "naive"])
def test_a_row_without_keys_has_its_sink_alone(algorithm, config):
    if algorithm == "naive" and config is not None:
        return
    q, k, v = qkv(150, 100, 64)
    kwargs = {"return_lse": True, "return_row_stats": True, "algorithm": algorithm, "sinks": FEW}
    at = {"causal": True, "causal_align": "bottom_right", "config": config}
    y, lse, top, total = attention(q, k, v, **at, **kwargs)
    assert not y[:, :, :50].any() and y[:, :, 50:].any(axis=-1).all()
    assert np.allclose(lse[:, :, :50], FEW[:, None], rtol=1e-6)
    assert np.allclose(top[:, :, :50], FEW[:, None], rtol=1e-6)
    assert np.allclose(total[:, :, :50], 1, rtol=1e-6)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("scale", [1.2e-38, 1e-30, 1e-19])
def test_a_sink_over_a_tiny_scale_is_finite(scale, config):
    """All scores are 0."""
    q, k, v = qkv(20, 50, 64)
    sinks = np.array([3.0, 5.0], np.float32)
    y, top, total = attention(
        q, k, v, scale=scale, sinks=sinks, return_row_stats=True, config=config
    )
    weight = np.exp(-sinks.astype(np.float64))[:, None]
    expected = weight[..., None] * v.astype(np.float64).sum(2) / (1 + 50 * weight[..., None])
    assert np.allclose(y, expected, atol=2e-4)
    assert np.allclose(top, sinks[:, None]) and np.allclose(total, 1 + 50 * weight, rtol=1e-5)


def test_a_sink_of_minus_infinity_is_none():
    q, k, v = qkv(20, 30, 16)
    none = np.full(2, -np.inf, np.float32)
    assert (attention(q, k, v, sinks=none) == attention(q, k, v)).all()
    lens = np.array([30], np.int32)
    y = decode_attention(q[:, :, :1], k, v, seq_lens=lens)
    assert (decode_attention(q[:, :, :1], k, v, seq_lens=lens, sinks=none) == y).all()


@pytest.mark.parametrize("sink", [-np.inf, np.inf])
@pytest.mark.parametrize(
    ("name", "queries", "how"),
    [
        ("attention", 20, {"algorithm": "naive"}),
        *(("attention", 20, {"config": config}) for config in CONFIGS),
        ("decode_attention", 1, {}),
    ],
)
def test_infinite_sinks_are_those_of_the_reference(name, queries, how, sink):
    """One of -inf has a bound, one of +inf makes NaN."""
    op = next(op for op in OPS if op.name == name)
    sinks = {"sinks": np.array([0.3, sink], np.float32), "return_lse": True}
    arrays = qkv(queries, 50, 64)
    found = op.run(*arrays, **sinks, **how)
    references = op.reference(*arrays, **sinks)
    bounds = op.bound(*arrays, **sinks, reference=references)
    assert compare(found, references, bounds).ok
    assert all((np.isnan(x)[:, 1] == (sink > 0)).all() for x in found)
    of_numbers = slice(1 if sink > 0 else 2)
    assert all(np.isfinite(b.elementwise[:, of_numbers]).all() for b in bounds)


@pytest.mark.parametrize("config", CONFIGS)
def test_lengths_of_the_device_are_clamped(config, monkeypatch):
    """As the kernel meets them, unchecked."""
    q, k, v = (normal(3, 2, n, 64) for n in (40, 70, 70))
    module = sys.modules["cupykern.ops.attention"]
    monkeypatch.setattr(module, "check_lens", lambda lens, *rest: lens)
    wild, tame = (np.array(x, np.int32) for x in ((2**31 - 1, -7, 71), (70, 0, 70)))
    options = {"causal": True, "causal_align": "bottom_right", "config": config}
    y = attention(q, k, v, seq_lens=wild, **options)
    assert (y == attention(q, k, v, seq_lens=tame, **options)).all() and not y[1].any()


def test_a_padded_batch_is_its_sequences():
    """Each as in a call of its own, bit for bit."""
    q, k, v = (normal(3, 2, n, 24) for n in (40, 70, 70))
    lens, options = (70, 33, 1), {"causal": True, "causal_align": "bottom_right", "sinks": FEW}
    y = attention(q, k, v, seq_lens=np.array(lens), **options)
    for b, n in enumerate(lens):
        one = attention(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], **options)
        assert (one == y[b : b + 1]).all()


def test_keys_before_the_window_of_decoding_are_not_read(target):
    xp = target.xp
    q, k, v = (xp.asarray(normal(2, 2, n, 64)) for n in (2, 900, 900))
    options = {"seq_lens": xp.asarray(np.array([900, 650], np.int32)), "window": (300, -1)}
    y = decode_attention(q, k, v, **options)
    for b, begin in enumerate((900 - 302, 650 - 302)):
        k[b, :, :begin] = v[b, :, :begin] = np.nan
    assert bool(xp.isfinite(y).all()) and bool((decode_attention(q, k, v, **options) == y).all())


@pytest.mark.parametrize("left", [-1, 2**29])
def test_a_window_that_ends_at_the_query_is_causal(left):
    q, k, v = normal(2, 2, 3, 24), normal(2, 2, 70, 24), normal(2, 2, 70, 24)
    causal = decode_attention(q, k, v)
    assert (decode_attention(q, k, v, causal=False, window=(left, 0)) == causal).all()
    assert (decode_attention(q, k, v, causal=False) != causal).any()


def test_a_sequence_of_decoding_does_not_depend_on_the_batch_or_the_cache():
    """With options too: the chunks follow from its length and the window."""
    q, k, v = normal(3, 4, 1, 64), normal(3, 2, 800, 64), normal(3, 2, 800, 64)
    lens, slopes = np.array([800, 333, 40], np.int32), normal(3, 4).astype(np.float32)
    options = {"window": (500, 0), "softcap": 5.0, "sinks": normal(4).astype(np.float32)}
    y = decode_attention(q, k, v, seq_lens=lens, alibi_slopes=slopes, **options)
    pages = [x.reshape(3, 2, 50, 16, 64).swapaxes(1, 2).reshape(150, 2, 16, 64) for x in (k, v)]
    table = np.arange(150, dtype=np.int32).reshape(3, 50)
    paged = decode_attention(
        q, *pages, seq_lens=lens, block_table=table, alibi_slopes=slopes, **options
    )
    assert (paged == y).all()
    for b in range(3):
        one = [x[b : b + 1] for x in (q, k, v)]
        part = decode_attention(
            *one, seq_lens=lens[b : b + 1], alibi_slopes=slopes[b : b + 1], **options
        )
        assert (part == y[b : b + 1]).all()


@pytest.mark.parametrize("dims", [(1, 1), (3, 61), (100, 255)])
def test_any_head_size(dims):
    """Sizes that are no multiples of 8 are those that zeros pad."""
    d, dv = dims
    q, k, v = normal(1, 2, 20, d), normal(1, 1, 30, d), normal(1, 1, 30, dv)

    def padded(x):
        return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 8)])

    scale = {"scale": d**-0.5}
    assert (attention(q, k, v) == attention(*map(padded, (q, k, v)), **scale)[..., :dv]).all()
    one = q[:, :, :1]
    y = decode_attention(one, k, v)
    assert (y == decode_attention(*map(padded, (one, k, v)), **scale)[..., :dv]).all()
    packs = [x[0].swapaxes(0, 1) for x in (q, k, v)]
    cu = [np.array([0, n], np.int32) for n in (20, 30)]
    lengths = {"max_seqlen_q": 20, "max_seqlen_k": 30}
    y = attention_varlen(*packs, *cu, **lengths)
    whole = attention_varlen(*map(padded, packs), *cu, **lengths, **scale)
    assert y.shape == (20, 2, dv) and (y == whole[..., :dv]).all()
