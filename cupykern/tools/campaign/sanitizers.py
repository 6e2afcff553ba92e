"""Run NVIDIA's compute-sanitizer over a variant of each kernel: four tools, in few processes.

A tool's process first selects problems, without launching anything, until their launches cover
every kernel that the ops have on this GPU.  CuPy's memory pool is off for memcheck and initcheck,
which then see one allocation per array.  racecheck runs kernels that are compiled with
CUPYKERN_CUDA_CHECKED=1.

initcheck does not track TMA stores.  So nothing reads results under initcheck, the kernel that
reads another kernel's TMA stores is excluded, and results, which CuPy copies, start as zeros.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ... import arrays, check
from ...kernels import Variant
from ...op import Call, Op, RandomDraw
from ...runtime import jit, plans
from ...targets import Target
from . import shapes
from .tally import Tally, Task, find_op

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
GROUPS = 4  # groups of ops, each in a separate process
_DRAWN = 1000  # drawn problems that are searched for kernels that SHAPES do not reach
_FEWEST = 4  # problems of an op, if it has that many variants
_SECONDS = 240  # per process
_REPORT = 9  # exit code
_VECTOR = 16  # bytes
_PACKAGE = __name__.partition(".")[0]
_READS_TMA_STORES = "reduce_split_k"


def tasks(ops: Sequence[Op], count: int, seed: int, chunk: int) -> list[Task]:
    """Tasks that run together have different groups, so that they compile different variants."""
    groups = [" ".join(op.name for op in ops[i::GROUPS]) for i in range(GROUPS)]
    return [
        Task("sanitizers", f"{tool} {groups[(i + turn) % GROUPS]}", 0, 1, seed)
        for turn in range(GROUPS)
        for i, tool in enumerate(TOOLS)
        if groups[(i + turn) % GROUPS] and count
    ]


def run(task: Task, target: Target) -> Tally:
    tool, *names = task.subject.split()
    tally = Tally()
    sanitizer = shutil.which("compute-sanitizer")
    if target.name != "cuda" or sanitizer is None:
        reason = "no compute-sanitizer" if target.name == "cuda" else f"it is not for {target.name}"
        tally.note(f"compute-sanitizer: not run, {reason}")
        return tally
    code, text = _run_tool(sanitizer, tool, names, task.seed)
    if "Device not supported" in text:
        tally.note("compute-sanitizer: not run, it does not support this GPU here")
        return tally
    for line in text.splitlines():
        if line.startswith("checked "):
            tally.add(line.split()[1], tool)
    if code is None:
        tally.note(f"{task.subject}: not finished in {_SECONDS} s")
    elif code:
        unfinished = next((n for n in names if f"finished {n}\n" not in text), names[-1])
        tally.add(unfinished, tool)
        tally.fail(unfinished, tool, task.seed, " ".join(names), report(code, text))
    return tally


def _run_tool(sanitizer: str, tool: str, names: Sequence[str], seed: int) -> tuple[int | None, str]:
    """Return (exit code, output); the code is None on a timeout.  Kills the tool's processes."""
    call = f"sanitizers.calls({tool!r}, {names!r}, {seed})"
    program = f"from cupykern.tools.campaign import sanitizers; {call}"
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(_REPORT)]
    if tool == "initcheck":
        command += ["--kernel-name-exclude", f"kernel_substring={_READS_TMA_STORES}"]
    child = subprocess.Popen(
        [*command, sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONUNBUFFERED": "1",
            "CUPYKERN_CUDA_CHECKED": "1" if tool == "racecheck" else "0",
        },
    )
    try:
        text = child.communicate(timeout=_SECONDS)[0]
        return child.returncode, text
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        return None, child.communicate()[0]
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)


def report(code: int, text: str) -> str:
    """Return the tool's first errors, the call that caused them, and the end of the output."""
    lines = text.splitlines()
    told = [i for i, line in enumerate(lines) if _is_told(line)]
    first = told[0] if told else len(lines)
    calls = [(i, line) for i, line in enumerate(lines) if line.startswith("checked ")]
    where = next((f" in {line[8:]}" for i, line in calls if i > first), "")
    if calls and not where:
        where = f" after {calls[-1][1][8:]}"
    return "\n".join([f"exit code {code}{where}", *(lines[i] for i in told[:12]), *lines[-5:]])


def _is_told(line: str) -> bool:
    return line.startswith("=========") and "COMPUTE-SANITIZER" not in line


# --- in the checked process ---------------------------------------------------------------------


def calls(tool: str, names: Sequence[str], seed: int) -> None:
    """Run the selected calls of these ops and print one line for each."""
    from ... import targets

    target = targets.get("cuda")
    if tool in ("memcheck", "initcheck"):
        target.xp.cuda.set_allocator(partial(_allocate, target.xp.cuda))
    if tool == "initcheck":
        for name, module in list(sys.modules.items()):
            own = name.startswith(f"{_PACKAGE}.") and module is not arrays
            if own and vars(module).get("maker") is arrays.maker:
                vars(module)["maker"] = _maker_of_zeros
    for op in map(find_op, names):
        for problem in select(op, target, seed):
            if tool == "memcheck":
                comparison = check.check_problem(op, problem, seed, target.xp)
                assert comparison.ok, f"{problem!r}: {comparison}"
            else:
                _launch(op, op.inputs(problem, seed, target.xp))
            target.xp.cuda.Device().synchronize()
            print("checked", op.name, repr(problem))
        print("finished", op.name)


def _maker_of_zeros(xp: Any) -> Callable[..., Any]:
    """Return an arrays.maker that fills new memory with zeros.

    It makes results and zero-padded copies of operands.  cp.async reads a row's last vector with
    its size in bytes, which the tools ignore.
    """

    def make(shape: Any, dtype: Any, memory: Any = None, strides: Any = None) -> Any:
        if memory is not None:
            return arrays.maker(xp)(shape, dtype, memory, strides)
        return xp.zeros(shape, dtype)

    return make


def _allocate(cuda: Any, size: int) -> Any:
    """Allocate `size` bytes, rounded up to whole vectors; zero the rest, see `_maker_of_zeros`."""
    whole = -(-size // _VECTOR) * _VECTOR
    memory = cuda.MemoryPointer(cuda.Memory(whole), 0)
    if whole > size:
        cuda.runtime.memset(memory.ptr + size, 0, whole - size)
    return memory


def _launch(op: Op, call: Call) -> None:
    op.run(*call.args, **call.kwargs)


def select(op: Op, target: Target, seed: int) -> list[Any]:
    """Return problems that launch every kernel of the op, at least _FEWEST with new variants."""
    wanted = {variant.kernel for variant in op.variants(target.arch)}
    found: list[Any] = []
    launched: set[Variant] = set()
    kernels: set[str] = set()
    for problem in _candidates(op, seed):
        new = launches(op, problem, seed, target) - launched
        if new and (len(found) < _FEWEST or {v.kernel for v in new} - kernels):
            found.append(problem)
            launched |= new
            kernels |= {v.kernel for v in new}
        if kernels >= wanted and len(found) >= _FEWEST:
            break
    return found


def _candidates(op: Op, seed: int) -> Iterator[Any]:
    yield from shapes.large(op)
    yield from (op.draw_problem(RandomDraw(seed + i)) for i in range(_DRAWN))


def launches(op: Op, problem: Any, seed: int, target: Target) -> set[Variant]:
    """Return the variants that a problem launches; empty if it raises."""
    try:
        call = op.inputs(problem, seed, target.xp)
        with jit.recording() as variants:
            _launch(op, call)
        return set(variants)
    except Exception:
        return set()
    finally:
        plans.clear()
