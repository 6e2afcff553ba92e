"""Operands of large products that could be read element by element only are copied before."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from copy_checks import check_copy
from hypothesis import given, settings
from hypothesis import strategies as st

import cupykern
from cupykern.gemm import copied_plan
from cupykern.gemm.portable_config import GemmConfig

E4M3 = ml_dtypes.float8_e4m3fn


@pytest.fixture
def made(monkeypatch):
    """The copies that calls make, of all products with as many multiplications as two."""
    made = []

    def copier(copy, target):
        def make(x):
            made.append((copy.name, copied(x)))
            return made[-1][1]

        copied = original(copy, target)
        return make

    original = copied_plan.Copy.copier
    monkeypatch.setattr(copied_plan.Copy, "copier", copier)
    monkeypatch.setattr(copied_plan, "MANY", 2)
    monkeypatch.setattr(copied_plan, "FEW_ROWS", 2)
    return made


def numbers(shape, dtype, order, seed=1):
    x = np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)
    return np.asarray(x.astype(dtype), order=order)


def check(a, b):
    found = cupykern.matmul(a, b, out_dtype=np.float32)
    np.testing.assert_array_equal(found, a.astype(np.float64) @ b.astype(np.float64))


@settings(max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 200)),
    dtype=st.sampled_from((np.float16, np.float32, np.int8)),
    gap=st.integers(0, 20),
    first=st.integers(0, 20),
    columns=st.booleans(),
)
def test_misaligned_rows_are_copied(target, shape, dtype, gap, first, columns):
    check_copy(target, shape if shape[0] > 1 else shape[1:], dtype, gap, first, columns)


@pytest.mark.parametrize(
    ("dtypes", "orders", "shape", "copied"),
    [
        ((np.float16, np.float16), "CC", (25, 9, 16), "b"),
        ((np.float16, np.float16), "CC", (25, 8, 17), "a"),
        ((np.float16, np.float16), "CC", (5, 9, 17), "a"),
        ((np.float16, np.float16), "FF", (16, 7, 24), ""),
        ((np.float16, np.float16), "FC", (9, 11, 13), "ab"),
        ((ml_dtypes.bfloat16, E4M3), "CF", (4, 5, 17), "ab"),
        ((ml_dtypes.bfloat16, np.int8), "FC", (16, 16, 16), "a"),
        ((E4M3, E4M3), "CC", (16, 16, 16), "b"),
        ((np.int8, np.int8), "FF", (16, 16, 16), "a"),
        ((np.float32, np.float32), "CF", (3, 4, 5), ""),
    ],
)
def test_what_vectors_do_not_read_is_copied(made, dtypes, orders, shape, copied):
    m, n, k = shape
    a, b = numbers((m, k), dtypes[0], orders[0]), numbers((k, n), dtypes[1], orders[1], 2)
    for _ in range(2):  # a warm call too
        check(a, b)
        assert "".join(name for name, _ in made) == copied
        for _, x in made:
            assert x.shape[-1] * x.itemsize % 128 == 0
        made.clear()


def test_few_rows_steps_that_are_not_positive_and_half_sums(made, monkeypatch):
    # More rows than are streamed from where they lie.
    a, b = numbers((24, 24), np.float16, "C"), numbers((24, 16), np.float16, "F", 2)
    check(np.asfortranarray(a), b)
    assert not made
    monkeypatch.setattr(copied_plan, "FEW_ROWS", 24)
    check(np.asfortranarray(a), b)
    check(a[::-1], b)
    check(np.broadcast_to(a[3], (24, 24)), b)
    check(np.stack([a, 2 * a])[::-1], b)
    check(a, b[:, ::-1])
    assert [name for name, _ in made] == ["a", "a", "a", "a", "b"]
    made.clear()
    for order, copied in (("F", []), ("C", ["b"])):
        found = cupykern.matmul(a, np.asarray(b, order=order), accumulate="float16")
        np.testing.assert_array_equal(found, a.astype(np.float64) @ b.astype(np.float64))
        assert [name for name, _ in made] == copied


def test_batches_views_and_products_of_two(made):
    a = numbers((3, 6, 40), np.float16, "C")[:, ::2, 1:34]
    b = numbers((33, 8), np.float16, "C", 2)
    check(a, b)
    check(a[:1], b)
    check(a[0], numbers((5, 33, 8), np.float16, "C", 2))
    assert [(name, x.shape) for name, x in made] == [("a", (n, 3, 64)) for n in (3, 1)] + [
        ("a", (3, 64))
    ]
    made.clear()
    check(np.broadcast_to(a[0], (5, 3, 33)), numbers((5, 33, 8), np.float16, "C", 2))
    assert [x.shape for _, x in made] == [(1, 3, 64)]
    made.clear()
    x, w = numbers((4, 17), np.float16, "C"), numbers((17, 5), np.float16, "C", 3)
    found = cupykern.dual_gemm_silu(x, w, w)
    assert [name for name, _ in made] == ["a", "b", "b2"]
    wide = x.astype(np.float64) @ w.astype(np.float64)
    np.testing.assert_allclose(found, wide / (1 + np.exp(-wide)) * wide, rtol=2e-3, atol=1e-3)


def test_scaled_products_too(made):
    a, b = numbers((16, 32), E4M3, "C"), numbers((32, 16), E4M3, "C", 2)
    rows, columns = (np.arange(1, 17, dtype=np.float32).reshape(s) for s in ((16, 1), (1, 16)))
    found = cupykern.scaled_mm(a, b, rows, columns, out_dtype=np.float32)
    wide = (a.astype(np.float64) * rows) @ (b.astype(np.float64) * columns)
    np.testing.assert_allclose(found, wide, rtol=1e-6)
    assert [name for name, _ in made] == ["b"]


def test_a_small_product_and_a_given_config_copy_nothing(made, monkeypatch):
    a, b = numbers((5, 9), np.float16, "C"), numbers((9, 7), np.float16, "C", 2)
    cupykern.matmul(a, b, config=GemmConfig(64, 64, 64, 2, 2, stages=2))
    monkeypatch.setattr(copied_plan, "MANY", 2**24)
    check(a, b)
    assert not made


def test_misaligned_operands_of_logits_are_copied(made):
    x, w = numbers((5, 17), np.float16, "C"), numbers((17, 9), np.int8, "C", 2)
    wide = 0.25 * (x.astype(np.float64) @ w.astype(np.float64))
    wide = np.exp(wide - wide.max(1, keepdims=True))
    for _ in range(2):
        found = cupykern.dequant_softmax(x, w, 0.25)
        np.testing.assert_allclose(found, wide / wide.sum(1, keepdims=True), rtol=2e-3, atol=1e-3)
    assert [name for name, _ in made] == ["a", "b"] * 2
