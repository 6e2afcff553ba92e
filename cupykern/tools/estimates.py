"""Rough estimates of how long commands take, printed first.  For machines like those of 2026."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..op import Call, Op
from ..runtime import jit
from ..tuning.sweep import OUTLIER

_COMPILE_S = {"host": 0.9}  # per kernel on one core; with NVRTC and hiprtc _GPU_COMPILE_S
_GPU_COMPILE_S = 2.0
_KERNELS_OF_AN_OP = 30  # launched by an op's random cases, most of them by the first 20
_CASE_S, _OP_S = 0.015, 0.7  # per case, per op, with compiled kernels
_TRIAL_S = 0.3  # per config on a GPU: verify, then time in turns with the default
# Calls on the host: of the default config and the finalists; for each config, of the default
# beside it and of the config itself, which runs once if it is slow (tuning/sweep.py).
_CALLS, _CALLS_BESIDE, _CALLS_OF_A_CONFIG = 50, 9, 10
_CLUSTER = 6.0  # a thread's time in a cluster over that in a block: its fibers exceed the caches


def spelt(seconds: float) -> str:
    """Format as "40 s", "3 min" or "2 h", rounded up."""
    if seconds <= 60:
        return f"{5 * max(1, math.ceil(seconds / 5))} s"
    if seconds <= 3600:
        return f"{math.ceil(seconds / 60)} min"
    return f"{math.ceil(seconds / 3600)} h"


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
    """Estimate a tuning run.

    call_s: time of the default config on the host target, compiled.  slowdowns: for the host, each
    config's time per call over call_s (see `slowdowns`).
    """
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
    """Estimate, for the host target, each config's time per call over that of the first config.

    The estimate counts launched threads: each is a fiber, and switching fibers takes most of the
    time.
    """
    times = [_fibers(op, call, config) for config in configs]
    return [max(1.0, time / max(times[0], 1.0)) for time in times]


def _fibers(op: Op, call: Call, config: Any) -> float:
    """Return a call's launched threads, weighted if in clusters; 0 if the call cannot run."""
    with jit.recording() as threads:
        try:
            op.run(*call.args, **{**call.kwargs, "config": config})
        except Exception:  # the trial reports it
            return 0.0
    return sum(n * (_CLUSTER if v.launch_sizes[1] > 1 else 1.0) for v, n in threads.items())
