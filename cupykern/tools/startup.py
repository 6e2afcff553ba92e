"""Time an op's first call in a new process, without and with compiled kernels.

What a user waits for beside CuPy's own import and context, which are not timed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..targets import Target
from . import records
from .bench import Task
from .options import Failure, write_json
from .processes import environment
from .tables import number, print_table, progress

_CHILD = Path(__file__).with_name("startup_child.py")
_TIMEOUT_S = 600


@dataclass(frozen=True)
class FirstCall:
    """Medians in ms.

    import_ms: `import cupykern`, whose modules are compiled to bytecode.  cold_ms: the first call
    with an empty cache of kernels.  warm_ms: the first call of a process that finds its kernels in
    the cache.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str
    import_ms: float
    cold_ms: float
    warm_ms: float


HEAD = ("op", "shape", "dtype", "empty cache, ms", "warm cache, ms")


def cells(row: FirstCall) -> tuple[str, ...]:
    """The cells of a table with the columns HEAD."""
    times = (number(x, 3) for x in (row.cold_ms, row.warm_ms))
    return (row.op, " x ".join(map(str, row.shape)), row.dtype, *times)


def child(task: Task, target: str, cache: Path) -> dict[str, float]:
    """Run one first call in a new process with this cache.  Raises Failure."""
    of_child = environment(
        CUPYKERN_CACHE_DIR=str(cache),
        CUPY_CACHE_DIR=str(cache / "cupy"),
        PYTHONPYCACHEPREFIX=str(cache / "pycache"),  # an installed package has compiled modules
        PYTHONDONTWRITEBYTECODE="",
    )
    # -P: the folder of the script, which has a profile.py, is not searched for modules.
    what = target, task.op.name, task.dtype, *map(str, task.shape)
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(_CHILD), *what],
            env=of_child,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise Failure(f"{task.op.name}: no result after {_TIMEOUT_S} s") from None
    if done.returncode:
        raise Failure(f"{task.op.name}: {(done.stderr.strip().splitlines() or ['killed'])[-1]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(task: Task, target: str, repeats: int) -> FirstCall:
    """Time the first call of `task`, `repeats` times with an empty cache and then a warm one."""
    cold, warm = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(child(task, target, Path(folder)))
            warm.append(child(task, target, Path(folder)))
    return FirstCall(
        *(task.op.name, task.shape, task.dtype),
        import_ms=statistics.median(x["import_ms"] for x in warm),
        cold_ms=statistics.median(x["call_ms"] for x in cold),
        warm_ms=statistics.median(x["call_ms"] for x in warm),
    )


def run(tasks: Sequence[Task], target: Target, repeats: int, json_path: str | None) -> int:
    """Measure, print and write all tasks; return the exit code."""
    rows = []
    with progress(len(tasks), "startup") as advance:
        for task in tasks:
            rows.append(measure(task, target.name, repeats))
            advance(task.op.name)
    imported = statistics.median(row.import_ms for row in rows)
    print_table(HEAD, map(cells, rows), f"import cupykern: {number(imported, 3)} ms")
    write_json(
        json_path, {**records.header("startup", target), "rows": [asdict(row) for row in rows]}
    )
    return 0
