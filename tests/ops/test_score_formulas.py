"""Formulas of scores and masks in attention, beside the properties that hold for every op."""

from __future__ import annotations

import numpy as np
import pytest
from attention_checks import normal, qkv

import cupykern
from cupykern import (
    BlockMask,
    attention,
    attention_varlen,
    check,
    decode_attention,
    reference,
)
from cupykern.attention.attention_hopper import AttentionHopperConfig
from cupykern.attention.attention_plan import AttentionConfig

SLOPES = np.array([0.1, 0.7], np.float32)
CONFIGS = (None, AttentionConfig(128, 32, 4), AttentionHopperConfig(128, 128))
WINDOW = "(j <= i) & (i - j <= 100)"


@pytest.mark.parametrize("config", CONFIGS)
def test_formulas_of_named_options_have_their_bits(config):
    q, k, v = qkv(150, 200, 64)
    at = {"input_pos": 50, "config": config, "return_lse": True}
    at |= {"alibi_slopes": SLOPES, "softcap": 20.0}
    named = attention(q, k, v, causal=True, window=(100, -1), **at)
    formed = attention(q, k, v, score="s", mask=WINDOW, **at)
    for x, y in zip(named, formed, strict=True):
        assert (x == y).all()


@pytest.mark.parametrize("config", CONFIGS)
def test_tiles_that_a_mask_empties_are_not_read(config):
    """Keys and values of such tiles may be NaN; the formula is not one of a window alone."""
    q, k, v = qkv(128, 1000, 64)
    mask = f"({WINDOW}) | (j < 3)"
    y = attention(q, k, v, mask=mask, input_pos=600, config=config)  # sees 0, 500 to 727
    k[:, :, 128:384] = v[:, :, 128:384] = np.nan
    k[:, :, 768:] = v[:, :, 768:] = np.nan
    again = attention(q, k, v, mask=mask, input_pos=600, config=config)
    assert np.isfinite(y).all() and (again == y).all()


def test_tiles_that_a_mask_empties_are_not_read_in_decoding():
    q, k, v = normal(2, 4, 1, 64), normal(2, 2, 2000, 64), normal(2, 2, 2000, 64)
    lens, pre = np.array([2000, 1500], np.int32), np.array([40, 100], np.int32)
    options = {"mask": "(j < pre[b]) | (i - j < 200)", "operands": {"pre": pre}, "seq_lens": lens}
    y = decode_attention(q, k, v, **options)
    for b, n in enumerate(lens):
        k[b, :, 256 : n - 400] = v[b, :, 256 : n - 400] = np.nan
    assert np.isfinite(y).all() and (decode_attention(q, k, v, **options) == y).all()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("algorithm", ["flash", "naive"])
def test_a_row_that_the_mask_empties_gives_zeros(algorithm, config):
    if algorithm == "naive" and config is not None:
        return
    q, k, v = qkv(150, 150, 64)
    options = {"mask": "(i >= 70) & (j != 3)", "algorithm": algorithm, "config": config}
    y, lse, top, total = attention(q, k, v, return_lse=True, return_row_stats=True, **options)
    assert not y[:, :, :70].any() and y[:, :, 70:].any(axis=-1).all()
    assert (lse[:, :, :70] == -np.inf).all() and (top[:, :, :70] == -np.inf).all()
    assert not total[:, :, :70].any() and np.isfinite(lse[:, :, 70:]).all()


def test_operands_of_all_dtypes_and_strides():
    q, k, v = qkv(20, 40, 16)
    table = np.arange(80).reshape(2, 40)[:, ::-1] % 5
    expected = None
    for dtype in (np.float16, np.float32, np.int32, np.int64, np.int8):
        y = attention(q, k, v, score="s + t[h, j]", operands={"t": table.astype(dtype)})
        expected = y if expected is None else expected
        assert (y == expected).all(), dtype
    keep = table > 2
    for text in ("keep[h, j] > 0", "keep[h, j]", "keep[h, j] if i < 7 else keep[h, j] & (j >= 0)"):
        y = attention(q, k, v, mask=text, operands={"keep": keep}, input_pos=0)
        assert (y == attention(q, k, v, mask=keep[None, :, None])).all()


def test_large_integers_are_rounded_to_fp32():
    q, k, v = qkv(40, 40, 16)
    table = (np.arange(40, dtype=np.int64) * 7919 + 2**40 + 1) * 12345
    options = {"score": "s + t[j] * 1e-16", "operands": {"t": table}}
    exact = reference.attention(q, k, v, **options)
    bounds = reference.attention_bound(q, k, v, **options, reference=exact)
    assert check.compare((attention(q, k, v, **options),), exact, bounds).ok


@pytest.mark.parametrize("config", CONFIGS)
def test_a_mask_by_cases(config):
    """Boolean branches, and a bool array; tiles that either branch empties are not read."""
    q, k, v = qkv(150, 400, 64)
    allowed = np.arange(150 * 400).reshape(150, 400) % 3 > 0
    i, j = np.ogrid[:150, :400]
    dense = np.where(i < 100, j <= i, (j >= 290) & allowed)
    text = "j <= i if i < 100 else (j >= 290) & m[i, j]"
    options = {"mask": text, "operands": {"m": allowed}, "input_pos": 0}
    y = attention(q, k, v, **options, config=config)
    exact = reference.attention(q, k, v, mask=dense[None, None])
    assert (exact[0] == reference.attention(q, k, v, **options)[0]).all()
    bounds = reference.attention_bound(q, k, v, **options, reference=exact)
    assert check.compare((y,), exact, bounds).ok
    k[:, :, 128:] = v[:, :, 128:] = np.nan
    again = attention(q[:, :, :100], k, v, **options, config=config)
    assert (again == y[:, :, :100]).all()


def test_callables_and_expressions_are_formulas():
    q, k, v = qkv(20, 40, 16)
    options = {"operands": {"a": SLOPES}, "input_pos": 20}
    text = "s * 2 - a[h] * j"
    y = attention(q, k, v, score=text, mask="j < i", **options)
    formed = cupykern.expression(lambda s, a, h, j: s * 2 - a[h] * j, "score")
    assert formed == cupykern.expression(text, "score")
    assert "a[h]" in str(formed) and "e(s)" in str(formed)
    assert (attention(q, k, v, score=formed, mask=lambda i, j: j < i, **options) == y).all()


def test_sequences_have_their_own_numbers_and_positions():
    """Each as in a call of its own, but for b."""
    lengths, cu = (40, 0, 90), np.array([0, 40, 40, 130], np.int32)
    q, k, v = normal(130, 4, 64), normal(130, 2, 64), normal(130, 2, 64)
    bias = normal(3, 90)
    options = {"score": "s + t[b, j] - 0.1 * (i - j)", "mask": "(i // 8 >= j // 8)"}
    y = attention_varlen(
        *(q, k, v, cu, cu), max_seqlen_q=90, max_seqlen_k=90, operands={"t": bias}, **options
    )
    for b, n in enumerate(lengths):
        rows = slice(cu[b], cu[b] + n)
        one = [x[None, rows].transpose(0, 2, 1, 3) for x in (q, k, v)]
        alone = attention(*one, operands={"t": bias[b : b + 1]}, **options)
        assert (alone[0].transpose(1, 0, 2) == y[rows]).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"score": "s + k[h"}, SyntaxError, "never closed"),
        ({"score": "s + acc"}, NameError, "acc"),
        ({"score": "s + a[h]"}, NameError, "'a'"),
        ({"mask": "i - j"}, SyntaxError, "a mask is boolean"),
        ({"mask": "s < 3"}, NameError, "'s'"),
        ({"score": "i[h]"}, SyntaxError, "without indices"),
        ({"score": "exp[h]"}, SyntaxError, "only operands"),
        ({"score": "a[s]", "operands": {"a": SLOPES}}, SyntaxError, "indices are integers"),
        ({"score": "a[h] + a", "operands": {"a": SLOPES}}, SyntaxError, "same number of indices"),
        ({"score": "a + s", "operands": {"a": SLOPES}}, ValueError, "must have 0 dims"),
        ({"score": "a[h, j]", "operands": {"a": SLOPES}}, ValueError, "must have 2 dims"),
        ({"score": "a[j]", "operands": {"a": SLOPES}}, ValueError, "goes from 0 to 39"),
        ({"score": "a[h - 1]", "operands": {"a": SLOPES}}, ValueError, "goes from -1 to 0"),
        ({"score": "a[h]", "operands": {"a": 2.0}}, ValueError, "must be an array"),
        ({"mask": "j < a", "operands": {"a": None}}, TypeError, "or an array; got None"),
        ({"score": "s", "operands": {"a": SLOPES}}, ValueError, "do not name 'a'"),
        ({"score": "a[h]", "operands": {"a": SLOPES.astype("f8")}}, TypeError, "dtype"),
        ({"operands": {"a": SLOPES}}, ValueError, "score or mask that is a formula"),
        ({"score": 3}, TypeError, "a score is"),
        ({"score": cupykern.expression("acc")}, TypeError, "kind 'score'"),
        ({"mask": "j <= i"}, ValueError, "Sq == Sk|causal_align|input_pos"),
    ],
)
def test_mistakes_are_told(options, error, message):
    q, k, v = qkv(20, 40, 16)
    with pytest.raises(error, match=message):
        attention(q, k, v, **options)


def test_a_syntax_error_has_its_place():
    q, k, v = qkv(4, 4, 16)
    with pytest.raises(SyntaxError) as found:
        attention(q, k, v, score="s + foo(h)")
    assert found.value.offset == 5


MASKS = (
    ("j <= i", {}),
    ("(j <= i) & (i - j < 100) | (j < 5)", {}),
    ("(i // 64 + j // 64 + h) % 2 == b", {}),
    ("d[b, i] == d[b, j]", {"d": np.sort(np.arange(600).reshape(2, 300) % 4)}),
    ("i < 0", {}),
    ("j <= i if i < 90 else j > 170", {}),
    ("m[i, j] if i < 90 else j > 170", {"m": np.arange(60000).reshape(200, 300) % 3 > 0}),
)


@pytest.mark.parametrize(("text", "operands"), MASKS)
@pytest.mark.parametrize("blocks", [(128, 128), (64, 128)])
def test_a_block_mask_of_a_formula_is_that_of_its_elements(text, operands, blocks):
    sizes = {"batch": 2, "heads": 2, "q_block": blocks[0], "kv_block": blocks[1]}
    made = BlockMask.from_expression(text, 200, 300, operands=operands, target="host", **sizes)
    b, h, i, j = np.ogrid[:2, :2, :200, :300]
    d = operands.get("d")
    names = {"b": b, "h": h, "i": i, "j": j}
    if d is not None:
        dense = d[b, i] == d[b, j]
    elif "if" in text:
        m = operands.get("m")
        dense = np.where(i < 90, j <= i if m is None else m[i, j], j > 170)
    else:
        dense = eval(text, {}, names)
    dense = np.broadcast_to(dense, (2, 2, 200, 300))
    expected = BlockMask.from_dense(np.ascontiguousarray(dense), *blocks)
    shape = expected.block_mask_types.shape
    assert (np.broadcast_to(made.block_mask_types, shape) == expected.block_mask_types).all()
    assert (np.broadcast_to(made.to_dense(), dense.shape) == dense).all()


def test_formulas_without_positions_need_no_alignment():
    q, k = np.ones((1, 1, 2, 8), np.float16), np.ones((1, 1, 3, 8), np.float16)
    for options in ({"score": "s + j"}, {"mask": "j < 2"}):
        exact = reference.attention(q, k, k, **options)
        assert np.abs(cupykern.attention(q, k, k, **options) - exact[0]).max() < 1e-3
    for call in (cupykern.attention, reference.attention):
        with pytest.raises(ValueError, match=r"needs? causal_align or input_pos"):
            call(q, k, k, score="s + i")
