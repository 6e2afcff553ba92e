"""`cupykern.parallel` over NCCL on 2 and 4 GPUs, of cupy arrays (tests/support/on_gpu.py)."""

from __future__ import annotations

import needs
import pytest

pytest.importorskip("mpi4py", reason="mpi4py is missing: pip install -e '.[parallel]'")

from parallel_checks import ON_GPUS


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [pytest.param(n, marks=needs.gpus(n)) for n in (2, 4)])
@pytest.mark.parametrize("check", ON_GPUS)
def test_check_holds_on_ranks_with_a_gpu_each(checked, check, ranks):
    failure = checked(ranks, "nccl")[check]
    assert not failure, failure
