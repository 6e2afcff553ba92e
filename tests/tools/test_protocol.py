"""What makes times comparable: who else is on the GPU, clocks that fall."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cupykern import targets
from cupykern.tuning import protocol

PROCESSES = "123, /usr/bin/python3, 500 MiB\n4711, train, 70000 MiB\n"


@pytest.mark.parametrize(
    "text, own, here, found",
    [
        ("", 123, {123}, []),
        (PROCESSES, 123, {123, 4711}, ["train (pid 4711, 70000 MiB)"]),
        ("123, /usr/bin/python3, 500 MiB\n", 123, {123}, []),
        # Pids of outside: one process is this one, of several nobody can say which.
        ("900123, python3, 500 MiB\n", 7, {7}, []),
        (
            "900123, python3, 500 MiB\n900124, train, 1 MiB\n",
            *(7, {7}),
            ["python3 (pid 900123, 500 MiB)", "train (pid 900124, 1 MiB)"],
        ),
        ("No running processes found\n", 7, {7}, []),
    ],
)
def test_other_processes_are_those_that_are_not_ours(text, own, here, found):
    assert protocol.parse_processes(text, (own,), here.__contains__) == found


def test_those_who_started_this_process_do_not_count():
    assert protocol.parse_processes(PROCESSES, (7, 123, 4711), {7, 123, 4711}.__contains__) == []
    parents = list(protocol.ancestors())
    assert parents[0] == os.getppid() and os.getpid() not in parents
    code = "from cupykern.tuning.protocol import ancestors; print(*ancestors())"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert list(map(int, done.stdout.split())) == [os.getpid(), *parents]


def _samples(*clocks: float) -> list[tuple[float, ...]]:
    return [(float(i), sm, 3201.0, 40.0 + i, 100.0 * i) for i, sm in enumerate(clocks)]


def test_clocks_that_fell_are_marked():
    steady = protocol.summarize_clocks(_samples(345, 1980, 1975, 1980), 1, 3)
    assert (steady["sm_mhz"], steady["temperature_c"], steady["fell"]) == (1980, 43, False)
    fallen = protocol.summarize_clocks(_samples(1980, 1500, 1500, 1980), 1, 2)
    assert (fallen["sm_mhz"], fallen["best_sm_mhz"], fallen["fell"]) == (1500, 1980, True)
    assert protocol.summarize_clocks(_samples(1980), 5, 6) is None
    memory = [(0.0, 1980.0, 3201.0, 40.0, 100.0), (1.0, 1980.0, 2619.0, 40.0, 100.0)]
    assert protocol.summarize_clocks(memory, 1, 1)["fell"]


class _Cuda:
    """As much of a CUDA target as the protocol asks for."""

    name = "cuda"

    class xp:  # noqa: N801
        class cuda:  # noqa: N801
            class Device:
                pci_bus_id = "0000:1B:00.0"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A stand-in: prints its processes, or a sample of the clocks every 5 ms."""
    path = tmp_path / "nvidia-smi"
    path.write_text(
        f"#!{sys.executable}\nimport sys, time\nassert '0000:1B:00.0' in sys.argv\n"
        f"if 'compute-apps' in sys.argv[1]:\n    print({PROCESSES!r}, end='')\n"
        "else:\n    print('[N/A], 3201, 40, 100', flush=True)\n"
        "    while True:\n        print('1980, 3201, 40, 100.5', flush=True)\n        "
        "time.sleep(0.005)\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_nvidia_smi_is_asked(nvidia_smi, monkeypatch):
    monkeypatch.setattr(protocol, "process_exists", lambda pid: True)
    assert len(protocol.other_processes(_Cuda)) == 2
    monkeypatch.setattr(protocol, "ancestors", lambda: iter((4711,)))
    (other,) = protocol.other_processes(_Cuda)
    assert "pid 123," in other
    start = time.monotonic()
    with protocol.Monitor(_Cuda) as monitor:
        while len(monitor.samples) < 2:
            assert time.monotonic() < start + 30
            time.sleep(0.01)
        found = monitor.between(start, time.monotonic())
    assert found["sm_mhz"] == 1980 and found["power_w"] == 100.5 and not found["fell"]
    assert monitor._process.poll() is not None


def test_without_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert protocol.other_processes(_Cuda) == []
    with protocol.Monitor(_Cuda) as monitor:
        assert monitor.between(0, 1e9) is None


def test_the_host_has_no_clocks():
    host = targets.get("host")
    assert protocol.other_processes(host) == []
    with protocol.Monitor(host) as monitor:
        assert monitor.between(0, 1e9) is None
