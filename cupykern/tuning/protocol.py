"""Conditions for comparable times: one benchmark at a time, an idle GPU, stable clocks."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..cache import BENCH_LOCK, folder
from ..targets import Target, UnavailableError

FALLEN = 0.95  # of a run's fastest clock; rows with slower clocks are marked
_FIELDS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
_PERIOD_MS = 100
_FRESH_S = 0.5


@contextmanager
def lock(wait: bool) -> Iterator[None]:
    """Hold the machine's benchmark lock.  Raises UnavailableError if another process holds it."""
    import filelock

    held = filelock.FileLock(lock_path(), timeout=-1 if wait else 0)
    try:
        held.acquire()
    except filelock.Timeout:
        raise UnavailableError(
            "another benchmark is running; times would disturb each other (--wait waits for it)"
        ) from None
    try:
        yield
    finally:
        held.release()


def lock_path() -> Path:
    """Return a path in the cache directory, else in the temporary directory, with the user's id."""
    try:
        place = folder()
        if os.access(place, os.W_OK):
            return place / BENCH_LOCK
    except OSError:
        pass
    return Path(tempfile.gettempdir()) / f"cupykern-bench-{os.geteuid()}.lock"


# --- other processes ---------------------------------------------------------------------------


def other_processes(target: Target) -> list[str]:
    """Return other processes on the target's GPU, as "python (pid 123, 500 MiB)".

    Empty on the host, and if nvidia-smi lists none.  Ancestors of this process are left out,
    because they wait for it.
    """
    if target.name != "cuda":
        return []
    command = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory"]
    command += ["--format=csv,noheader", "-i", target.xp.cuda.Device().pci_bus_id]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_processes(done.stdout, (os.getpid(), *ancestors()), process_exists)


def parse_processes(text: str, own: Sequence[int], exists: Any) -> list[str]:
    """Parse nvidia-smi's lines "pid, name, memory", without our own processes.

    own: pids of this process and its ancestors, this one first.  exists: (pid) -> whether the pid
    exists in this pid namespace.

    A container can see outer pids: then a single process that does not exist here is this one.
    """
    found = []
    for line in text.splitlines():
        pid, *rest = (cell.strip() for cell in line.split(",", 2))
        if pid.isdigit() and len(rest) == 2:
            found.append((int(pid), *rest))
    others = [process for process in found if process[0] not in own]
    foreign = [pid for pid, *_ in others if not exists(pid)]
    if len(foreign) == 1 and not any(pid == own[0] for pid, *_ in found):
        others = [process for process in others if process[0] != foreign[0]]
    return [f"{name} (pid {pid}, {memory})" for pid, name, memory in others]


def ancestors() -> Iterator[int]:
    """Yield the ancestors of this process, nearest first, as far as /proc shows them."""
    pid = os.getppid()
    while pid > 0:
        yield pid
        try:
            # "pid (name) state parent ..."; the name can contain any characters.
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return


def process_exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


# --- clocks --------------------------------------------------------------------------------------


class Monitor:
    """Samples a GPU's clocks, temperature and power during the block, every 100 ms by nvidia-smi.

    There are no samples on the host, or without nvidia-smi.
    """

    def __init__(self, target: Target):
        self._command = None
        if target.name == "cuda":
            self._command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}"]
            self._command += ["--format=csv,noheader,nounits", f"--loop-ms={_PERIOD_MS}"]
            self._command += ["-i", target.xp.cuda.Device().pci_bus_id]
        self._process: subprocess.Popen[str] | None = None
        self.samples: list[tuple[float, ...]] = []  # (time, *_FIELDS)

    def __enter__(self) -> Monitor:
        if self._command is not None:
            try:
                self._process = subprocess.Popen(
                    self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
            except OSError:
                return self
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        if self._process is None or self._process.stdout is None:
            return
        for line in self._process.stdout:
            try:
                values = tuple(float(cell) for cell in line.split(","))
            except ValueError:  # "[N/A]"
                continue
            if len(values) == len(_FIELDS):
                self.samples.append((time.monotonic(), *values))

    def between(self, start: float, end: float) -> dict[str, Any] | None:
        """Summarise the samples from `start` to `end` (time.monotonic), or return None.

        The summary has median clocks in MHz, the largest temperature in C and power in W, and
        whether the clocks fell.
        """
        return summarize_clocks(list(self.samples), start, end)


def summarize_clocks(
    samples: list[tuple[float, ...]], start: float, end: float
) -> dict[str, Any] | None:
    """Compute Monitor.between from (time, SM clock, memory clock, temperature, power)."""
    seen = [sample for sample in samples if start <= sample[0] <= end]
    # If no sample is within, take the one just before.
    seen = seen or [sample for sample in samples if end - _FRESH_S <= sample[0] <= end][-1:]
    if not seen:
        return None
    within = np.array([sample[1:] for sample in seen])
    sm, memory = (float(np.median(within[:, i])) for i in (0, 1))
    before = np.array([sample[1:3] for sample in samples if sample[0] <= end])
    best_sm, best_memory = before.max(axis=0)
    return {
        "sm_mhz": sm,
        "memory_mhz": memory,
        "temperature_c": float(within[:, 2].max()),
        "power_w": float(within[:, 3].max()),
        "best_sm_mhz": float(best_sm),
        "fell": bool(sm < FALLEN * best_sm or memory < FALLEN * best_memory),
    }
