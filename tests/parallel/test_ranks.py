"""`cupykern.parallel` on 2, 3 and 4 MPI ranks of numpy arrays (tests/support/parallel_checks)."""

from __future__ import annotations

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is missing: pip install -e '.[parallel]'")

from parallel_checks import CHECKS


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("check", CHECKS)
def test_check_holds_on_ranks_of_the_host(checked, check, ranks):
    failure = checked(ranks)[check]
    assert not failure, failure
