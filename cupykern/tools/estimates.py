"""How long commands will take, said before they begin.  Rough: of machines like those of 2026."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..op import Call, Op
from ..runtime import jit
from ..tuning.sweep import OUTLIER

_COMPILE_S = {"host": 0.9}  # of one core for a kernel; of NVRTC and hiprtc _GPU_COMPILE_S
_GPU_COMPILE_S = 2.0
_KERNELS_OF_AN_OP = 30  # that random cases of one op come to, most of them in the first 20
_CASE_S, _OP_S = 0.015, 0.7  # of a case, of an op, whose kernels are compiled
_TRIAL_S = 0.3  # of a config on a GPU: inputs are verified, then timed in turns with the default
# On the host: calls of the default config and of the finalists, and for each config those of the
# default beside it and its own, of which a slow one has a single one (tuning/sweep.py).
_CALLS, _CALLS_BESIDE, _CALLS_OF_A_CONFIG = 50, 9, 10
_CLUSTER = 6.0  # a thread's time in a cluster over that in a block: its fibers outgrow the caches


def spelt(seconds: float) -> str:
    """As "40 s", "3 min" or "2 h", rounded up."""
    if seconds < 60:
        return f"{max(5, -(-int(seconds) // 5) * 5)} s"
    if seconds < 3600:
        return f"{-(-int(seconds) // 60)} min"
    return f"{-(-int(seconds) // 3600)} h"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def of_check(ops: int, cases: int, target: str, jobs: int) -> str:
    ready = ops * (_OP_S + cases * _CASE_S)
    kernels = _KERNELS_OF_AN_OP * min(1.0, cases / 20)
    compiling = ops * kernels * _COMPILE_S.get(target, _GPU_COMPILE_S) / jobs
    return (
        f"{_count(ops, 'op')}, {_count(cases, 'case')} each: about {spelt(ready)} if the kernels "
        f"are compiled, {spelt(ready + compiling)} if none is ({jobs} at once)"
    )


def of_tune(
    configs: int,
    target: str,
    jobs: int,
    rep_ms: float,
    call_s: float = 0.0,
    slowdowns: Sequence[float] = (),
) -> str:
    """call_s: of the default config on the host target, once compiled.  slowdowns: of each config
    there, the time of a call over call_s (`slowdowns`)."""
    seconds = configs * _COMPILE_S.get(target, _GPU_COMPILE_S) / jobs
    if target == "host":
        calls = (
            _CALLS_BESIDE + _CALLS_OF_A_CONFIG * slow if slow <= OUTLIER else slow
            for slow in slowdowns
        )
        seconds += call_s * (_CALLS + sum(calls))
    else:
        seconds += configs * (_TRIAL_S + 4 * rep_ms / 1e3)
    return f"{_count(configs, 'config')}, about {spelt(seconds)}"


def slowdowns(op: Op, call: Call, configs: Sequence[Any]) -> list[float]:
    """The host target's time of a call with each config over that with the first, by the threads
    that are launched: each is a fiber, and switching fibers takes most of the time."""
    times = [_fibers(op, call, config) for config in configs]
    return [max(1.0, time / max(times[0], 1.0)) for time in times]


def _fibers(op: Op, call: Call, config: Any) -> float:
    """The threads of a call's launches, those in clusters by their weight; 0 if it cannot run."""
    with jit.recording() as threads:
        try:
            op.run(*call.args, **{**call.kwargs, "config": config})
        except Exception:  # the trial says why
            return 0.0
    return sum(n * (_CLUSTER if v.launch_sizes[1] > 1 else 1.0) for v, n in threads.items())
