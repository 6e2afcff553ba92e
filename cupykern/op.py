"""Op: the description of an operation that check, bench, compile, tune and the tests use."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from .kernels import Variant
from .typing import Factor, Namespace


class Draw(Protocol):
    """A source of choices: a seeded generator for `check`, hypothesis for the tests."""

    def integer(self, low: int, high: int) -> int:
        """low <= result <= high"""

    def choice(self, options: Sequence[Any]) -> Any: ...


class RandomDraw:
    """Draw from a numpy generator."""

    def __init__(self, seed: int):
        self._rng = np.random.default_rng(seed)

    def integer(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high, endpoint=True))

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.integer(0, len(options) - 1)]


@dataclass(frozen=True)
class Call:
    """The arguments of one call of an op's function."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


class Bound(NamedTuple):
    """The allowed and the expected errors of an output against its FP64 reference.

    >>> x = np.array([[1.0, 2.0, 3.0]], np.float32)
    >>> (exact,) = reference.softmax(x)
    >>> (bound,) = reference.softmax_bound(x, reference=(exact,))
    >>> float((abs(cupykern.softmax(x) - exact) / bound.elementwise).max()) < 1  # error over bound
    True

    elementwise: array like the output: the largest |error| that the derivation allows.  For complex
        outputs all arrays are like as_real(output).
    rms: like elementwise: the expected root mean square error of each element, on the least exact
        target; 0: none is expected, and only `elementwise` limits the error.
    shared: like rms, or a number: the part of `rms` that all elements along `axis` (one axis or
        several) have in common, such as the error of a row's sum.  The rest is independent.
    bias: like rms, or a number: the largest |mean error|; an error is positive where |result| is
        too large.  inf: no limit is derived.
    common: like shared: the part that all elements have in common, such as the error of an
        approximation at nearly equal arguments.
    known: like elementwise, but signed: the error that follows from the operands on targets that
        split FP32 operands; `bias` excludes it.
    free: True where nothing is guaranteed, and the result can be NaN: past a pole or an overflow of
        an expression.
    """

    elementwise: Factor
    rms: Factor
    shared: Factor = 0.0
    bias: Factor = math.inf
    axis: int | tuple[int, ...] = -1
    common: Any = 0.0
    free: Any = False
    known: Any = 0.0


class Work(NamedTuple):
    """The least traffic and arithmetic of a task with any kernel: the lower bound of its time."""

    bytes_read: int
    bytes_written: int
    flops: int = 0


@dataclass(frozen=True)
class Op:
    """One public function and how to exercise it.

    A *problem* is the op's own frozen dataclass: shapes, dtypes and options, no data; its str() is
    a short label, its repr() rebuilds it.
    """

    name: str
    run: Callable[..., Any]
    """The public function.  `config=` replaces the config that choice.Family.config chooses."""
    reference: Callable[..., tuple[Any, ...]]
    """FP64 outputs (always a tuple) for the arguments of `run`, in their array namespace."""
    bound: Callable[..., tuple[Bound, ...]]
    """A Bound per output, for the arguments of `run` followed by the keyword `reference`."""
    draw_problem: Callable[[Draw], Any]
    """A small problem: every dtype, layout, option and kind of values that the op allows."""
    bench_problem: Callable[[tuple[int, ...], str], Any]
    """The problem of a bench row, from a shape and a dtype name; raises ValueError."""
    bench_shapes: Callable[[str], tuple[tuple[int, ...], ...]]
    """The default shapes of `bench` on a target ("cuda", "hip", "host")."""
    inputs: Callable[[Any, int, Namespace], Call]
    """(problem, seed, xp) -> a Call whose arrays belong to the namespace xp."""
    work: Callable[[Any], Work]
    variants: Callable[[str], tuple[Variant, ...]]
    """Every variant that the op can launch on an architecture ("sm_90a", "gfx942", "host")."""
    configs: Callable[[Any, str], tuple[Any, ...]]
    """The configs that a problem admits on an architecture, the default first."""
    variant: Callable[[Any, Any], Variant]
    """(problem, config) -> the variant that launches (the first, if there are several)."""
    sample: Callable[[Call, tuple[Any, ...], int, int], tuple[Call, tuple[Any, ...]]]
    """(call, outputs, max_elements, seed) -> a seeded part of both that can be verified alone.
    outputs may be (): the part of the call does not depend on them."""
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32")
    """The input dtypes of `bench`, by name; for products see products.bench_product."""


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    """An op's result as a tuple: from an array, a tuple, or an object with `outputs()`."""
    if hasattr(outputs, "outputs"):
        return outputs.outputs()
    return outputs if isinstance(outputs, tuple) else (outputs,)
