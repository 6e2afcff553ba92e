"""merge_attention, beside the properties that hold for every op."""

import numpy as np
import pytest

import cupykern
from cupykern.attention.merge_plan import MergeConfig

RNG = np.random.default_rng(3)
OUT1, OUT2 = RNG.standard_normal((2, 1, 2, 5, 16)).astype(np.float32)
LSE1, LSE2 = RNG.standard_normal((2, 1, 2, 5)).astype(np.float32)


def merged(out1=OUT1, lse1=LSE1, out2=OUT2, lse2=LSE2, **options):
    return cupykern.merge_attention(out1, lse1, out2, lse2, **options)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_keys_in_two_sets_are_as_keys_in_one(layout):
    q, k, v = RNG.standard_normal((3, 2, 4, 40, 64)).astype(np.float16)
    if layout == "bshd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    axis = 2 if layout == "bhsd" else 1
    parts = [
        cupykern.attention(q, k.take(keys, axis), v.take(keys, axis), layout=layout,
                           return_lse=True)
        for keys in (range(13), range(13, 40))
    ]  # fmt: skip
    whole, lse = cupykern.attention(q, k, v, layout=layout, return_lse=True)
    y, y_lse = cupykern.merge_attention(*parts[0], *parts[1], layout=layout)
    assert np.abs(y.astype(np.float32) - whole).max() < 2e-3
    assert np.abs(y_lse - lse).max() < 1e-5


@pytest.mark.parametrize("first", [True, False])
def test_what_has_no_keys_is_not_used(first):
    nan, none = np.full_like(OUT1, np.nan), np.full_like(LSE1, -np.inf)
    y, lse = merged(out1=nan, lse1=none) if first else merged(out2=nan, lse2=none)
    assert (y == (OUT2 if first else OUT1)).all() and (lse == (LSE2 if first else LSE1)).all()


def test_no_keys_at_all_give_zeros():
    nan, none = np.full_like(OUT1, np.nan), np.full_like(LSE1, -np.inf)
    y, lse = merged(nan, none, nan, none)
    assert (y == 0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_rows_without_elements_have_a_log_sum_exp(rows):
    lse1, lse2 = RNG.standard_normal((2, 1, 2, rows)).astype(np.float32)
    for dtype in (np.float16, np.float32):
        out = np.zeros((1, 2, rows, 0), dtype)
        y, lse = merged(out, lse1, out, lse2)
        assert y.shape == out.shape
        np.testing.assert_allclose(lse, np.logaddexp(lse1, lse2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_log_sum_exp_that_is_no_number_makes_its_row_nan(bad):
    lse1 = LSE1.copy()
    lse1[0, 1, 2] = bad
    y, lse = merged(lse1=lse1)
    where = np.zeros(LSE1.shape, bool)
    where[0, 1, 2] = True
    assert (np.isnan(y).all(axis=-1) == where).all() and (np.isnan(lse) == where).all()


def test_infinities_of_small_shares_stay():
    out2 = OUT2.copy()
    out2[0, 0, 0, 0], out2[0, 0, 0, 1] = np.inf, np.nan
    y, _ = merged(out2=out2, lse2=LSE1 - 1e5)
    assert y[0, 0, 0, 0] == np.inf and np.isnan(y[0, 0, 0, 1])
    assert (y[0, 0, 0, 2:] == OUT1[0, 0, 0, 2:]).all()


@pytest.mark.parametrize("name", ["out1", "out2"])
def test_out_may_be_either_operand(name):
    expected, expected_lse = merged()
    given = {"out1": OUT1.copy(), "out2": OUT2.copy()}
    y, lse = merged(**given, out=given[name])
    assert y is given[name] and (y == expected).all() and (lse == expected_lse).all()


@pytest.mark.parametrize(
    "error, message, given",
    [
        (NotImplementedError, "out1's dtype", {"out1": OUT1.astype(np.float64)}),
        (TypeError, "out2 must have dtype float32", {"out2": OUT2.astype(np.float16)}),
        (TypeError, "lse1 must have dtype float32", {"lse1": LSE1.astype(np.float16)}),
        (ValueError, "out2 must have out1's shape", {"out2": OUT2[..., :8]}),
        (ValueError, "must have 3 or 4 dims", {"out1": OUT1[0, 0], "out2": OUT2[0, 0]}),
        (ValueError, r"lse1 must have shape \(1, 5, 2\)", {"layout": "bshd"}),
        (ValueError, r"lse1 must have shape \(5, 2\)", {"out1": OUT1[0], "out2": OUT2[0]}),
        (ValueError, "layout must be", {"layout": "hnd"}),
        (ValueError, "rows must be one of 1", {"config": MergeConfig(3)}),
        (ValueError, "exactly in place", {"out": OUT1[..., ::-1]}),
    ],
)
def test_wrong_arguments_are_named(error, message, given):
    with pytest.raises(error, match=message):
        merged(**given)
