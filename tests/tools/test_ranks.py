"""bench --parallel where NCCL cannot be captured in a CUDA graph."""

from __future__ import annotations

from types import SimpleNamespace

from cupykern.tools.ranks import measure
from cupykern.tools.ranks.cases import Step


class Ranks:
    """other: whether another rank has a graph."""

    def __init__(self, other):
        self.comm, self.rank, self._other = "first", 0, other

    def all(self, found):
        return found and self._other

    def renew(self):
        self.comm = "second"


def captured(monkeypatch, graph, other=True):
    monkeypatch.setattr(measure, "Graph", graph)
    session = SimpleNamespace(world=Ranks(other), target=None, graphs=True)
    problem = SimpleNamespace(step=lambda comm: Step(lambda: comm, None))
    function, step = measure.captured(session, problem, problem.step("first"))
    return function(), step.function(), session.graphs


def test_steps_are_graphs(monkeypatch):
    found = captured(monkeypatch, lambda function, target: lambda: f"graph of {function()}")
    assert found == ("graph of first", "first", True)


def test_without_graphs_a_new_communicator_is_used(monkeypatch):
    """Also where only another rank failed; and no row tries again."""

    def fail(function, target):
        raise RuntimeError("operation not permitted when stream is capturing")

    assert captured(monkeypatch, fail) == ("second", "second", False)
    found = captured(monkeypatch, lambda function, target: function, other=False)
    assert found == ("second", "second", False)
