"""Planted faults of `cupykern.parallel`, on two ranks that are threads: a check must fail."""

from __future__ import annotations

import numpy as np
import pytest
from fake_nccl import fake_cupy
from parallel_checks import attention, linear, moe, norms, vocabulary

import cupykern.parallel.attention as ring
import cupykern.parallel.moe as experts
import cupykern.parallel.norms as sums
import cupykern.parallel.row_products as products
import cupykern.parallel.vocabulary as logits
from cupykern import parallel
from cupykern.parallel import collectives

pytestmark = pytest.mark.faults


def bias_on_every_rank(comm, a, b, bias, product, *rest, _plain=products._sum_of_products):
    return _plain(comm, a, b, None, lambda rows, _: product(rows, bias), *rest)


def residual_of_the_first_rows(residual, rows, output):
    return residual if residual is None else residual[: rows.stop - rows.start]


def sum_of_16_bits(comm, parts, partial, _plain=collectives.reduce_rows):
    return _plain(comm, parts, lambda rows: partial(rows).astype(np.float16).astype(np.float32))


def whole_in_16_bits(comm, parts, x, _plain=collectives.add_rows):
    return _plain(comm, parts, x.astype(np.float16))


def backwards(addends):
    return sum(addends[rank] for rank in reversed(range(len(addends))))


class LargerShares(ring._Merged):
    def add(self, found, queries):
        super().add((found[0], found[1] + np.float32(0.01)), queries)


class EveryQuery(ring._Block):
    @classmethod
    def of(cls, rank, source, own, causal):
        return cls(slice(None), slice(None), causal and rank == source)


def total_of_this_rank(lses):
    return lses[0]


def shares_in_16_bits(self, total, _plain=logits._Rows.share):
    return _plain(self, total).astype(np.float16).astype(np.float64)


def combined_in_16_bits(found, gates, x):
    found = found.reshape(*gates.shape, x.shape[1]).astype(np.float32) * gates[..., None]
    total = found[:, 0].astype(x.dtype)
    for i in range(1, gates.shape[1]):
        total = (total + found[:, i].astype(x.dtype)).astype(x.dtype)
    return total + np.float32(2**-9) * abs(total)


def rows_as_they_come(counts):
    return np.arange(counts.sum())


FAULTS = [
    (products, "_sum_of_products", bias_on_every_rank, linear.integers_are_exact),
    (products, "_own_rows", residual_of_the_first_rows, linear.k_is_summed_over_ranks),
    (products, "reduce_rows", sum_of_16_bits, linear.k_is_summed_over_ranks),
    (sums, "add_rows", whole_in_16_bits, norms.sums_are_normalised_unrounded),
    (ring, "_Merged", LargerShares, attention.results_are_those_of_the_whole_sequence),
    (ring, "_Block", EveryQuery, attention.results_are_those_of_the_whole_sequence),
    (logits, "_total", total_of_this_rank, vocabulary.losses_are_those_of_all_columns),
    (logits._Rows, "share", shares_in_16_bits, vocabulary.probabilities_are_those_of_all_columns),
    (experts, "_combined", combined_in_16_bits, moe.results_are_those_of_all_experts),
    (experts, "_by_expert", rows_as_they_come, moe.results_are_those_of_all_experts),
]


def failures(monkeypatch, check, ranks=2):
    """Of each rank: the error, or None."""

    def run(raw):
        try:
            check(parallel.NcclCommunicator(raw))
        except AssertionError as error:
            return error
        return None

    with fake_cupy(monkeypatch) as cupy:
        return cupy.on_ranks(ranks, run)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[2].__name__)
def test_a_fault_is_found(fault, monkeypatch):
    where, name, wrong, check = fault
    monkeypatch.setattr(where, name, wrong)
    assert any(failures(monkeypatch, check))


def test_another_order_of_sums_is_found(monkeypatch):
    check = linear.sums_are_in_the_order_of_ranks
    assert not any(failures(monkeypatch, check, 3))
    monkeypatch.setattr(collectives, "in_order", backwards)
    assert any(failures(monkeypatch, check, 3))
