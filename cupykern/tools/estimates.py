"""How long commands will take, said before they begin.  Rough: of machines like those of 2026."""

from __future__ import annotations

_COMPILE_S = {"host": 0.9}  # of one core for a kernel; of NVRTC and hiprtc _GPU_COMPILE_S
_GPU_COMPILE_S = 2.0
_KERNELS_OF_AN_OP = 30  # that random cases of one op come to, most of them in the first 20
_CASE_S, _OP_S = 0.015, 0.7  # of a case, of an op, whose kernels are compiled
_TRIAL_S = 0.3  # of a config on a GPU: inputs are verified, then timed in turns with the default
_CALLS = 50  # of the default config on the host, whose other configs are slower


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


def of_tune(configs: int, target: str, jobs: int, call_s: float, rep_ms: float) -> str:
    """call_s: of the default config on the host target, once compiled."""
    compiling = configs * _COMPILE_S.get(target, _GPU_COMPILE_S) / jobs
    trial = _CALLS * call_s if target == "host" else _TRIAL_S + 4 * rep_ms / 1e3
    said = f"{_count(configs, 'config')}, about {spelt(compiling + configs * trial)}"
    slow = "; configs of many threads take minutes on the host target" if target == "host" else ""
    return said + slow
