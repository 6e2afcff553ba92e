"""The compile gate: compile every variant of every op for every architecture, without a GPU."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from ..kernels import Variant
from ..op import Op
from ..targets import CompileError
from ..targets.offline import UnknownArchError, compile_offline, compiler_name
from ..tuning.compile_ahead import processes

_MAX_LDS_BYTES = 64 * 1024
_MAX_STATIC_SHARED_BYTES = 48 * 1024


@dataclass(frozen=True)
class Row:
    """One variant on one architecture; figures are None if it did not compile.

    error: the compiler's message.  skipped: why this compiler cannot try.  compiler: name and
        version.
    code: digest of the machine code (offline.Usage).
    """

    variant: Variant
    arch: str
    seconds: float
    registers: int | None = None
    sgprs: int | None = None
    local_bytes: int | None = None
    shared_bytes: int | None = None
    warnings: tuple[str, ...] = ()
    error: str | None = None
    skipped: str | None = None
    compiler: str | None = None
    code: str | None = None


def failure(row: Row) -> str | None:
    """Return why a row fails the gate; None: it passes, or was skipped."""
    if row.error is not None:
        return row.error
    if row.skipped is not None:
        return None
    if row.variant.tuned and row.local_bytes:
        return f"{row.local_bytes} bytes of local memory: spills, or an array indexed at run time"
    limit = _MAX_LDS_BYTES if row.arch.startswith("gfx") else _MAX_STATIC_SHARED_BYTES
    if (row.shared_bytes or 0) > limit:
        return f"{row.shared_bytes} bytes of static shared memory, of {limit}"
    return "; ".join(row.warnings) or None


def compile_row(variant: Variant, arch: str) -> Row:
    """Compile one variant.  Raises UnavailableError if there is no compiler for `arch`."""
    start = time.perf_counter()
    try:
        usage = compile_offline(variant, arch)
    except CompileError as error:
        return Row(variant, arch, time.perf_counter() - start, error=str(error))
    except UnknownArchError as error:
        return Row(variant, arch, time.perf_counter() - start, skipped=str(error))
    seconds = time.perf_counter() - start
    return Row(
        variant,
        arch,
        seconds,
        usage.registers,
        usage.sgprs,
        usage.local_bytes,
        usage.shared_bytes,
        usage.warnings,
        compiler=compiler(arch),
        code=usage.code,
    )


def compiler(arch: str) -> str:
    """Return name and version.  Raises UnavailableError if there is no compiler for `arch`."""
    return _compiler("gfx" if arch.startswith("gfx") else "sm")


@cache
def _compiler(kind: str) -> str:
    return compiler_name(kind)


def tasks(ops: Iterable[Op], archs: Sequence[str]) -> list[tuple[Variant, str]]:
    """Return every variant and architecture; ops that share a variant share its task."""
    ops = list(ops)
    return [
        (variant, arch)
        for arch in archs
        for variant in dict.fromkeys(variant for op in ops for variant in op.variants(arch))
    ]


def compile_all(todo: Sequence[tuple[Variant, str]], jobs: int) -> Generator[Row, None, None]:
    """Yield a Row per task, in the order of the tasks.

    Raises UnavailableError if there is no compiler for one of the architectures.
    """
    if not todo:
        return
    with processes(jobs) as pool:
        # Not pool.map: it cancels pending tasks, and a pool that is closing then raises an error.
        for row in [pool.submit(compile_row, *task) for task in todo]:
            yield row.result()
