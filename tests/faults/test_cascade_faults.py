"""Planted faults in what cascade_attention makes of three calls: a comparison must fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupykern import check
from cupykern.op import RandomDraw
from cupykern.ops import cascade_attention as cascade
from cupykern.ops.cascade_attention import OP

pytestmark = pytest.mark.faults

_DECODE, _ATTENTION, _MERGE = cascade.decode_attention, cascade.attention, cascade.merge_attention
_CASES = 60


def swapped_log_sum_exps(out1, lse1, out2, lse2, out):
    return _MERGE(out1, lse2, out2, lse1, out=out)


def equal_shares(out1, lse1, out2, lse2, out):
    return _MERGE(out1, np.zeros_like(lse1), out2, np.zeros_like(lse2), out=out)


def own_keys_alone(out1, lse1, out2, lse2, out):
    return _MERGE(out1, np.full_like(lse1, -np.inf), out2, lse2, out=out)


def changed(**changes: Any) -> Any:
    """decode_attention over the shared keys, with changed options."""

    def decode(*args: Any, **options: Any) -> Any:
        return _DECODE(*args, **(options if options.get("causal", True) else options | changes))

    return decode


def changed_own(**changes: Any) -> Any:
    def decode(*args: Any, **options: Any) -> Any:
        return _DECODE(*args, **(options | changes if options.get("causal", True) else options))

    return decode


def no_scale(*args, **options):
    return _ATTENTION(*args, **options | {"scale": None})


def no_softcap(*args, **options):
    return _ATTENTION(*args, **options | {"softcap": None})


def query_after_query(by_head):
    heads, batch, count, dim = by_head.shape
    return by_head.swapaxes(1, 2).reshape(1, heads, batch * count, dim)


def other_heads(q, k, v, *args, _plain=cascade._check_shared):
    keys, values = _plain(q, k, v, *args)
    return keys[:, ::-1], values


FAULTS = {
    "swapped log-sum-exps": ("merge_attention", swapped_log_sum_exps),
    "equal shares": ("merge_attention", equal_shares),
    "own keys alone": ("merge_attention", own_keys_alone),
    "shared keys are causal": ("decode_attention", changed(causal=True)),
    "no scale of the shared keys": ("decode_attention", changed(scale=None)),
    "no softcap of the shared keys": ("decode_attention", changed(softcap=None)),
    "own keys are not causal": ("decode_attention", changed_own(causal=False)),
    "all own keys": ("decode_attention", changed_own(seq_lens=None)),
    "no scale of many rows": ("attention", no_scale),
    "no softcap of many rows": ("attention", no_softcap),
    "rows of another order": ("_as_rows", query_after_query),
    "shared keys of other heads": ("_check_shared", other_heads),
}


def first_wrong() -> int | None:
    """The first drawn problem that is not within its bound."""
    for seed in range(_CASES):
        if not check.check_problem(OP, OP.draw_problem(RandomDraw(seed)), seed, np).ok:
            return seed
    return None


def test_nothing_is_found_without_a_fault():
    assert first_wrong() is None


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name, monkeypatch):
    monkeypatch.setattr(cascade, *FAULTS[name])
    assert first_wrong() is not None
