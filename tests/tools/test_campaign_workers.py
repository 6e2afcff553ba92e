"""The campaign's processes: what ends them, and what of it is a failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

from cupykern import targets
from cupykern.tools.campaign import workers
from cupykern.tools.campaign.tally import Task


def test_a_process_that_ends_is_a_failure():
    worker = workers.Worker("host")
    try:
        worker.give(Task("cases", "quantize_nvfp4", 0, 1000, 0))
        os.kill(worker.process.pid, signal.SIGKILL)
        found = worker.take()
    finally:
        workers.end([worker])
    assert found.context_lost and "exit code -9" in found.failures[0]["error"]


def test_what_a_part_raises_is_a_failure():
    found = workers.run_task(Task("cases", "nonsense", 0, 1, 0), targets.get("host"))
    assert found.failed == 1 and "StopIteration" in found.failures[0]["error"]


class FakeProcess:
    """One that does not end before it is killed."""

    def __init__(self, calls):
        self.calls, self.alive = calls, True

    def start(self):
        pass

    def terminate(self):
        self.calls.append("terminate")

    def join(self, seconds=None):
        assert seconds is not None or not self.alive
        self.calls.append("join")

    def kill(self):
        self.alive = False
        self.calls.append("kill")


def test_processes_end_at_once_not_one_after_the_other(monkeypatch):
    calls = []
    pipe = SimpleNamespace(close=lambda: None)
    context = SimpleNamespace(Pipe=lambda: (pipe, pipe), Process=lambda **_: FakeProcess(calls))
    monkeypatch.setattr(workers, "get_context", lambda method: context)
    workers.end([workers.Worker("host") for _ in range(2)])
    assert calls == ["terminate"] * 2 + ["join"] * 2 + ["kill"] * 2 + ["join"] * 2


_KILLED = """
import os, signal
from cupykern.tools.campaign.tally import Task
from cupykern.tools.campaign.workers import Worker
if __name__ == "__main__":
    worker = Worker("host")
    worker.give(Task("cases", "quantize_nvfp4", 0, 1, 0))
    worker.take()
    worker.give(Task("cases", "quantize_nvfp4", 0, 10**7, 0))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_ends_with_the_one_that_began_it(tmp_path):
    """Its task would take days, and its stdout is open until it ends."""
    program = tmp_path / "killed.py"
    program.write_text(_KILLED)
    done = subprocess.run([sys.executable, program], stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == -signal.SIGKILL
