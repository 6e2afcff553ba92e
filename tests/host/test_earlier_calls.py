"""Calls that once had other results, or wrote elsewhere, after certain other calls."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from earlier_calls import PAIRS, SMALL
from fake_gpu import fake_gpu
from fake_machine import SIZE, FakeMachine

import cupykern
from cupykern import arrays, targets
from cupykern.runtime import plans
from cupykern.tools.history import Machine, check_sequence


@pytest.mark.parametrize("order", [1, -1], ids=["as named", "in the other order"])
@pytest.mark.parametrize("name", SMALL)
def test_bits_on_the_host(name, order):
    failure = check_sequence(Machine(targets.get("host")), PAIRS[name][::order])
    assert failure is None, str(failure)


@pytest.mark.parametrize("order", [1, -1], ids=["as named", "in the other order"])
@pytest.mark.parametrize("name", PAIRS)
def test_launches_on_a_fake_gpu(name, order, monkeypatch):
    pytest.importorskip("cupy")
    with fake_gpu(monkeypatch, SIZE) as gpu:
        failure = check_sequence(FakeMachine(gpu, monkeypatch), PAIRS[name][::order])
    assert failure is None, str(failure)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PAIRS)
def test_bits_on_a_gpu(name, gpu):
    for order in 1, -1:
        failure = check_sequence(Machine(gpu), PAIRS[name][::order])
        assert failure is None, str(failure)


def test_rows_of_two_dims_then_of_three():
    """(2, 3) rows at two strides have no kernel of one stride, however many rows there are."""
    memory = np.random.default_rng(0).standard_normal((2, 4, 1512)).astype(np.float16)

    def results(functions):
        plans.clear()
        found = {}
        for name, view in functions:
            x = view(arrays.packed(memory))  # aligned: bits depend on where rows begin
            found[name] = cupykern.softmax(x, out=x).copy()
        return found

    views = {
        "2-d": lambda m: m.reshape(8, 1512)[:6, :1501],
        "3-d": lambda m: m[:, :3, :1501],
    }
    alone = {name: results([(name, view)])[name] for name, view in views.items()}
    for order in itertools.permutations(views.items()):
        for name, y in results(order).items():
            assert (y.view(np.uint16) == alone[name].view(np.uint16)).all(), name


def test_a_slice_is_written_up_to_its_end():
    x = np.random.default_rng(0).standard_normal((4, 50304)).astype(np.float32)[:, :50257]
    cupykern.softmax(x, out=np.empty((4, 50304), np.float32)[:, :50257])
    memory = np.full((12, 50304), 7.0, np.float16)
    out = memory[:4, :50257]
    cupykern.softmax(x, dtype="float16", out=out)
    assert (memory[4:] == 7).all() and (memory[:4, 50257:] == 7).all()
    assert (np.abs(out.astype(np.float64).sum(1) - 1) < 2e-2).all()


@pytest.mark.parametrize("first", [False, True], ids=["alone", "after an aligned cache"])
def test_an_empty_cache_may_begin_anywhere(first):
    q = np.ones((1, 2, 1, 16), np.float16)
    memory = np.zeros((1, 2, 4, 24), np.float16)
    if first:
        cupykern.decode_attention(q, memory[:, :, :0, :16], memory[:, :, :0, :16])
    cache = memory[:, :, :0, 1:17]
    y, lse = cupykern.decode_attention(q, cache, cache, return_lse=True)
    assert (y == 0).all() and (lse == -np.inf).all()
