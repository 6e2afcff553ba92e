"""Where a fault is planted: the quoted place, also after a rename."""

from __future__ import annotations

import pytest
from planted import Fault, changed

from cupykern import kernels

OLD, NEW = "full[at.stage].wait(at.phase);", "full[0].wait(at.phase);"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a; full[at.stage]\n    .wait(at.phase); b;", "a; full[0].wait(at.phase); b;"),
        ("full[to.stage].wait(to.phase);", "full[0].wait(to.phase);"),
        ("ready[at.stage].wait(at.phase);", "ready[0].wait(at.phase);"),
        (f"{OLD} ready[at.stage].wait(at.phase);", f"{NEW} ready[at.stage].wait(at.phase);"),
        # The place that keeps more of the names.
        (
            "a[b.c].wait(b.e); full[to.stage].wait(to.phase);",
            "a[b.c].wait(b.e); full[0].wait(to.phase);",
        ),
        # Another shape, a longer name, one of two names for one, two places, too few names.
        ("full[at.stage].wait(at.phase ^ 1);", None),
        ("to.full[to.stage].wait(to.phase);", None),
        ("full[at.stage].wait(to.phase);", None),
        ("full[to.stage].wait(to.phase); ready[at.stage].wait(at.phase);", None),
        ("a[b.c].wait(b.e);", None),
    ],
)
def test_a_fault_survives_a_rename(text, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "ROOT", tmp_path)
    (tmp_path / "a.cuh").write_text(text)
    fault = Fault("a.cuh", OLD, NEW, "check")
    if expected is None:
        with pytest.raises(LookupError, match="no longer has"):
            changed(fault)
    else:
        assert changed(fault) == expected
