"""An op in numpy alone, right or wrong in a chosen way, to test the tools that go through ops."""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupykern import dtypes, targets
from cupykern.kernels import Variant
from cupykern.numerics import finfo
from cupykern.op import Bound, Call, Op, Work
from cupykern.runtime import choice


@dataclass(frozen=True)
class Problem:
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


@dataclass(frozen=True)
class Config:
    """How the fake op runs: its block size, and what goes wrong with it."""

    block: int
    fault: str | None = None


def make_op(
    fault: str | None = None, flops: int = 0, configs: tuple[Config, ...] = (Config(1),)
) -> Op:
    """y = x / 3.  fault: "value" (one element is off), "unwritten" (the last one), "guard" (writes
    past the end), "elsewhere" (returns another array than `out`), "input" (changes x), "raises",
    "interrupt", "crash", "slow" or "hang".  A config has its own.
    """
    op_fault = fault

    def run(x: Any, *, out: Any = None, config: Config | None = None) -> Any:
        if config is None:
            config = family.config(x.size, targets.get("host"))
        fault = op_fault or config.fault
        y = np.empty_like(x) if out is None else out
        y[...] = (x.astype(np.float64) / 3).astype(x.dtype)
        if fault == "value" and y.size:
            y.reshape(-1)[0] += 1
        elif fault == "unwritten" and y.size:
            y.reshape(-1)[-1] = np.nan if out is None else out.base.view(x.dtype)[-1]
        elif fault == "guard" and out is not None:
            address = out.__array_interface__["data"][0] + out.nbytes
            np.ctypeslib.as_array(_bytes_at(address), (1,))[0] = 0
        elif fault == "elsewhere":
            return y.copy()
        elif fault == "input":
            x += 1
        elif fault == "raises":
            raise RuntimeError("no such luck")
        elif fault == "interrupt":
            raise KeyboardInterrupt
        elif fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif fault == "slow":
            end = time.process_time() + 0.002
            while time.process_time() < end:
                pass
        elif fault == "hang":
            time.sleep(600)
        return y

    def variant(config: Config) -> Variant:
        text = "KERNEL void third(float* y) {}\n"
        if config.fault == "compile":
            text = "KERNEL void third(float* y) { nothing; }\n"
        return Variant("third", (), (), 32, text=text)

    family = choice.Family(
        "third",
        (Config,),
        lambda size, device: configs,
        lambda config, size, device: None if config in configs else "no such config",
        lambda size, config: variant(config),
        lambda size: ({"size": size}, {"of": str(configs)}),
    )

    def bound(x: Any, *, reference: tuple[Any]) -> tuple[Bound]:
        info = finfo(x.dtype)
        worst = np.abs(reference[0]) * info.unit_roundoff + info.underflow_error
        return (Bound(worst, worst / math.sqrt(3)),)

    def inputs(problem: Problem, seed: int, xp: Any) -> Call:
        x = np.random.default_rng(seed).standard_normal(problem.shape)
        return Call((xp.asarray(x.astype(dtypes.NAMES[problem.dtype])),))

    def bench_problem(shape: tuple[int, ...], dtype: str) -> Problem:
        if len(shape) != 2:
            raise ValueError(f"third needs 2 dims; got {shape}")
        return Problem(shape, dtype)

    def work(problem: Problem) -> Work:
        nbytes = math.prod(problem.shape) * dtypes.NAMES[problem.dtype].itemsize
        return Work(nbytes, nbytes, flops)

    return Op(
        name="third",
        run=run,
        reference=lambda x: (x.astype(np.float64) / 3,),
        bound=bound,
        draw_problem=lambda draw: Problem((draw.integer(1, 5), draw.integer(0, 9)), "float32"),
        bench_problem=bench_problem,
        bench_shapes=lambda target: ((8, 16), (4, 4)),
        inputs=inputs,
        work=work,
        variants=lambda arch: (),
        configs=lambda problem, arch: configs,
        variant=lambda problem, config: variant(config),
        sample=lambda call, outputs, max_elements, seed: (call, outputs),
    )


def _bytes_at(address: int) -> Any:
    import ctypes

    return ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))
