"""Profile one kernel with Nsight Compute or rocprofv3, and summarise its hardware counters."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..targets import UnavailableError
from . import stored
from .processes import environment
from .tables import number, print_table

FOLDERS = ("/usr/local/cuda/bin", "/opt/rocm/bin")  # besides PATH
WARMUPS = 2  # launches before the profiled one: the first ones also load code
MAX_STALLS = 5  # stall reasons that are shown
INSTALL = {
    "ncu": "Nsight Compute (ncu) is missing.  It comes with the CUDA toolkit; alone: conda install "
    "-c nvidia nsight-compute, or the package nsight-compute of NVIDIA's apt and dnf "
    "repositories.  Counters may need root, or the driver's option "
    "NVreg_RestrictProfilingToAdminUsers=0",
    "rocprofv3": "rocprofv3 is missing.  It comes with ROCm (package rocprofiler-sdk of AMD's apt "
    "and dnf repositories)",
}


@dataclass(frozen=True)
class Figure:
    """One line of a profile.  names: the counter's names; the first one found is used."""

    label: str
    names: tuple[str, ...]
    unit: str = "%"
    scale: float = 1.0


STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
_STALLS = {
    "long_scoreboard": "loads from global or local memory",
    "short_scoreboard": "shared memory, special functions",
    "mio_throttle": "the queue to shared memory is full",
    "lg_throttle": "the queue to global memory is full",
    "math_pipe_throttle": "the arithmetic pipe is busy",
    "barrier": "a barrier of the block",
    "membar": "a memory fence",
    "gmma": "wgmma",
    "wait": "the fixed latency of the instruction before",
    "not_selected": "another warp was chosen (none the worse)",
    "no_instruction": "instructions to arrive",
    "branch_resolving": "a branch",
    "dispatch_stall": "the dispatcher",
    "drain": "stores at the kernel's end",
    "imc_miss": "constants to arrive",
    "sleeping": "nanosleep",
    "tex_throttle": "the texture queue is full",
    "warpgroup_arrive": "the other warps of a warpgroup",
}
NCU = (
    Figure("time", ("gpu__time_duration.sum",), "us", 1e-3),
    Figure(
        "memory throughput", ("gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",)
    ),
    Figure(
        "DRAM throughput",
        (
            "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
            "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        ),
    ),
    Figure("DRAM read", ("dram__bytes_read.sum",), "MB", 1e-6),
    Figure("DRAM written", ("dram__bytes_write.sum",), "MB", 1e-6),
    Figure("L2 hits", ("lts__t_sector_hit_rate.pct",)),
    Figure("L2 throughput", ("lts__throughput.avg.pct_of_peak_sustained_elapsed",)),
    Figure(
        "L1 and shared memory throughput",
        ("l1tex__throughput.avg.pct_of_peak_sustained_elapsed",),
    ),
    Figure("arithmetic throughput", ("sm__throughput.avg.pct_of_peak_sustained_elapsed",)),
    Figure(
        "tensor cores busy",
        (
            "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
            "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
        ),
    ),
    Figure("issue slots used", ("sm__issue_active.avg.pct_of_peak_sustained_elapsed",)),
    Figure("occupancy", ("sm__warps_active.avg.pct_of_peak_sustained_active",)),
    Figure("shared-memory conflicts", ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",), ""),
    Figure(
        "shared-memory wavefronts", ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",), ""
    ),
    Figure("registers of a thread", ("launch__registers_per_thread",), ""),
    Figure("shared memory of a block", ("launch__shared_mem_per_block",), "bytes"),
    Figure("blocks", ("launch__grid_size",), ""),
    Figure("threads of a block", ("launch__block_size",), ""),
)  # fmt: skip
ROCM = (
    Figure("memory unit busy", ("MemUnitBusy",)),
    Figure("memory unit stalled", ("MemUnitStalled",)),
    Figure("vector ALU busy", ("VALUBusy",)),
    Figure("matrix cores busy", ("MfmaUtil",)),
    Figure("occupancy", ("OccupancyPercent",)),
    Figure("L2 hits", ("L2CacheHit",)),
    Figure("shared-memory conflicts", ("LDSBankConflict",)),
    Figure("registers of a thread", ("VGPR_Count",), ""),
    Figure("scratch of a thread", ("Scratch_Size",), "bytes"),
    Figure("shared memory of a block", ("LDS_Block_Size",), "bytes"),
    Figure("threads of a block", ("Workgroup_Size",), ""),
)
_ROCM_COUNTERS = 7  # of ROCM; the other figures are columns of every CSV line


@dataclass(frozen=True)
class Profile:
    """A launch.  figures: (label, value, unit).  stalls: (reason, share), largest first."""

    kernel: str
    figures: tuple[tuple[str, float, str], ...]
    stalls: tuple[tuple[str, float], ...] = ()


def parse_ncu(text: str) -> list[Profile]:
    """Parse the launches in the output of `ncu --csv --page raw --print-units base`.

    The table is a line of names, a line of units, and a line per launch, between ncu's messages.
    Raises ValueError if there is no such table.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    table = list(csv.reader(io.StringIO("\n".join(lines))))
    if len(table) < 3 or "Kernel Name" not in table[0]:
        said = next((line for line in text.splitlines() if line.startswith("==ERROR==")), "")
        raise ValueError(f"no table of Nsight Compute's raw page: {said or 'no launch in it'}")
    names = table[0]
    return [_from_values(dict(zip(names, row, strict=False))) for row in table[2:]]


def _from_values(cells: dict[str, str]) -> Profile:
    values = {name: value for name, cell in cells.items() if (value := _number(cell)) is not None}
    stalls = {
        reason: values[name]
        for kind, reason in _STALLS.items()
        if (name := STALL.format(kind)) in values
    }
    total = sum(stalls.values())
    ranked = sorted(stalls.items(), key=lambda item: -item[1])
    return Profile(
        cells["Kernel Name"],
        _figures(NCU, values),
        tuple((reason, value / total) for reason, value in ranked if total and value),
    )


def _number(cell: str) -> float | None:
    try:
        return float(cell.replace(",", ""))  # "1,234.5"
    except ValueError:
        return None


def _figures(
    wanted: Iterable[Figure], values: dict[str, float]
) -> tuple[tuple[str, float, str], ...]:
    found = []
    for figure in wanted:
        name = next((name for name in figure.names if name in values), None)
        if name is not None:
            found.append((figure.label, values[name] * figure.scale, figure.unit))
    return tuple(found)


def parse_rocprof(texts: Iterable[str], kernel: str) -> list[Profile]:
    """Parse the launch of `kernel` in rocprofv3's counter_collection.csv, one run per counter.

    The launch after WARMUPS others is used.  Raises ValueError if there is none.
    """
    values: dict[str, float] = {}
    for text in texts:
        rows = [
            row for row in csv.DictReader(io.StringIO(text)) if row.get("Kernel_Name") == kernel
        ]
        counted: dict[str, list[dict[str, str]]] = {}
        for row in rows:
            counted.setdefault(row["Counter_Name"], []).append(row)
        for counter, launches in counted.items():
            row = launches[min(WARMUPS, len(launches) - 1)]
            found = {counter: row["Counter_Value"], **row}
            values |= {name: v for name, cell in found.items() if (v := _number(cell)) is not None}
    if not values:
        raise ValueError(f"rocprofv3 saw no launch of {kernel}")
    return [Profile(kernel, _figures(ROCM, values))]


def document(
    header: dict[str, Any],
    call: dict[str, Any],
    launches: Sequence[Profile],
    path: Path | None = None,
) -> dict[str, Any]:
    """Return the --json document: the call's record, after other calls' on its device in `path`."""
    others = []
    if path is not None and path.exists():
        known = stored.read(path)
        if known.get("kind") == "profile" and _device(known) == _device(header):
            names = "op", "shape", "dtype"
            others = [p for p in known["profiles"] if any(p[name] != call[name] for name in names)]
    found = [
        {"kernel": launch.kernel, "figures": launch.figures, "stalls": launch.stalls[:MAX_STALLS]}
        for launch in launches
    ]
    record = {**call, "date": header.get("date"), "launches": found}
    return {**header, "profiles": [*others, record]}


def _device(document: dict[str, Any]) -> Any:
    return document.get("machine", {}).get("device")


def show(launches: Sequence[Profile]) -> None:
    for launch in launches:
        print_table(
            ("", "value", ""),
            ((label, number(value), unit) for label, value, unit in launch.figures),
            launch.kernel,
        )
        for reason, share in launch.stalls[:MAX_STALLS]:
            click.echo(f"{100 * share:.0f}% of the waiting is for {reason}")


# --- running --------------------------------------------------------------------------------------


def run(
    target: str,
    kernel: str,
    op: str,
    shape: Sequence[int],
    dtype: str,
    seed: int,
    config: str | None,
) -> list[Profile]:
    """Profile one launch of `kernel` in a call of `op`.

    Raises UnavailableError if the profiler fails or is missing; it says how to install it.
    """
    code = (
        f"from cupykern.tools.profile import call; call{(op, tuple(shape), dtype, seed, config)!r}"
    )
    program = [sys.executable, "-c", code]
    if target == "host":
        raise UnavailableError("profiling needs a GPU: the host target has no counters")
    return (_run_ncu if target == "cuda" else _run_rocprof)(kernel, program)


def _find(name: str) -> str:
    found = shutil.which(name)
    for folder in FOLDERS:
        if found is None and Path(folder, name).exists():
            found = str(Path(folder, name))
    if found is None:
        raise UnavailableError(INSTALL[name])
    return found


def _run_ncu(kernel: str, program: list[str]) -> list[Profile]:
    metrics = [name for figure in NCU for name in figure.names]
    metrics += [STALL.format(kind) for kind in _STALLS]
    command = [_find("ncu"), "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--kernel-name", kernel, "--launch-skip", str(WARMUPS), "--launch-count", "1"]
    command += ["--metrics", ",".join(metrics), *program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    try:
        return parse_ncu(done.stdout)
    except ValueError as error:
        raise UnavailableError(f"ncu: {error} {_last_line(done.stderr)}") from None


def _run_rocprof(kernel: str, program: list[str]) -> list[Profile]:
    """Run once per counter: some GPUs support few counters at once, and lack some."""
    texts = []
    said = ""
    for figure in ROCM[:_ROCM_COUNTERS]:
        with tempfile.TemporaryDirectory() as folder:
            command = [_find("rocprofv3"), "--pmc", figure.names[0], "--output-format", "csv"]
            command += ["--kernel-include-regex", f"^{kernel}$", "-d", folder, "--", *program]
            done = subprocess.run(command, capture_output=True, text=True, env=environment())
            texts += [path.read_text() for path in Path(folder).rglob("*counter_collection.csv")]
            said = _last_line(done.stderr) or said
    try:
        return parse_rocprof(texts, kernel)
    except ValueError as error:
        raise UnavailableError(f"{error}. {said}") from None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def call(op: str, shape: tuple[int, ...], dtype: str, seed: int, config: str | None) -> None:
    """Run an op's bench problem WARMUPS + 1 times, under a profiler."""
    from .. import OPS, targets

    found = next(known for known in OPS if known.name == op)
    target = targets.get()
    problem = found.bench_problem(shape, dtype)
    inputs = found.inputs(problem, seed, target.xp)
    configs = {repr(c): c for c in found.configs(problem, target.arch)}
    kwargs: dict[str, Any] = dict(inputs.kwargs)
    if config is not None:
        kwargs["config"] = configs[config]
    for _ in range(WARMUPS + 1):
        found.run(*inputs.args, **kwargs)
    if target.name != "host":
        target.xp.cuda.get_current_stream().synchronize()
