"""Arrays larger than the memory of two workers: `python dask_larger_than_memory.py FOLDER`.

Processes of dask start others: a program of its own, which cannot be hindered by what a process of
the tests has loaded, and which a test can end.
"""

from __future__ import annotations

import sys
from pathlib import Path

import dask
import dask.array as da
import numpy as np
from distributed import Client, LocalCluster

import cupykern
import cupykern.dask
from cupykern import reference
from cupykern.check import compare

LIMIT = 192 << 20  # bytes of a worker, of which Python and libraries are 90 MiB
ROWS, COLUMNS, STEP = 208 << 10, 512, 4 << 10
# A worker whose memory is full is ended, and its task fails.  Paused, it would wait for ever.
CONFIG = {"distributed.worker.memory.pause": False, "distributed.scheduler.allowed-failures": 0}


def numbers(begin: int, end: int, columns: int) -> np.ndarray:
    """Rows of the numbers from 0 to 255, in a fixed pattern."""
    rows = np.arange(begin, end, dtype=np.uint32)[:, None] * np.uint32(2654435761)
    steps = np.arange(columns, dtype=np.uint32) * np.uint32(40503)
    return (rows + steps >> 16 & 255).astype(np.float32)


def block(block_info) -> np.ndarray:
    (begin, end), (_, columns) = block_info[None]["array-location"]
    return numbers(begin, end, columns)


class File:
    """An array in a file, which each worker opens by itself: pickle would copy an np.memmap."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: np.dtype):
        self.path, self.shape, self.dtype = path, shape, np.dtype(dtype)
        np.memmap(path, dtype, "w+", shape=shape)

    def array(self) -> np.memmap:
        return np.memmap(self.path, self.dtype, "r+", shape=self.shape)

    def __setitem__(self, index, value) -> None:
        self.array()[index] = value


def main(folder: Path) -> None:
    chunks = (STEP,) * (ROWS // STEP), (COLUMNS,)
    x = da.map_blocks(block, chunks=chunks, dtype=np.float32, meta=np.empty((0, 0), np.float32))
    assert x.nbytes > 2 * LIMIT
    y = cupykern.dask.softmax(x, scale=0.1, dtype="float16")
    file = File(folder / "y", y.shape, y.dtype)
    cluster = LocalCluster(
        n_workers=2, threads_per_worker=1, memory_limit=LIMIT, dashboard_address=None,
        local_directory=str(folder),
    )  # fmt: skip
    with cluster, Client(cluster) as client:
        assert len(client.scheduler_info()["workers"]) == 2
        stored = da.store(y, file, lock=False, compute=False)
        report, gram = cupykern.dask.nonfinite_report(x), cupykern.dask.matmul(x[:, :8].T, x[:, :8])
        # One after the other.
        _, report, gram = (client.compute(each).result() for each in (stored, report, gram))
    for begin in (0, 100_000, ROWS - 3):
        plain = cupykern.softmax(numbers(begin, begin + 3, COLUMNS), scale=0.1, dtype="float16")
        assert file.array()[begin : begin + 3].tobytes() == plain.tobytes()
    assert (report.size, report.num_nonfinite, report.min, report.max) == (x.size, 0, 0, 255)
    few = numbers(0, ROWS, 8)
    exact = reference.matmul(few.T, few)
    bound = reference.chunked_matmul_bound(
        few.T, few, k_chunks=chunks[0], split_every=8, reference=exact
    )
    found = compare((gram,), exact, bound)
    assert found.ok, found


if __name__ == "__main__":
    with dask.config.set(CONFIG):
        main(Path(sys.argv[1]))
