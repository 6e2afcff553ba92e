"""Contenders: an implementation on a problem, with its figures and the check of its outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ..check import Comparison, GuardedArray, Violation, accepts_out, compare
from ..op import Call, Op, Work, as_tuple
from ..typing import Array
from .timing import Function, Timing

OURS = "cupykern"
NO_SUCH_FUNCTION = "has no such function"  # the note of a library that lacks the op
ERRORS = ("error_over_bound", "rms_ratio", "max_abs", "max_rel", "ulps", "relative_l2")


@dataclass
class Result:
    """One implementation on one problem; times in microseconds, None where not timed.

    speed_percent: of the plain copy (or read) of the same bytes in the same rounds.
    verified: before and after timing.  note: why it failed, or was not measured.  parts_us: the
    medians of the steps that it takes one after another, if it does.
    """

    name: str
    median_us: float | None = None
    q20_us: float | None = None
    q80_us: float | None = None
    runs: int = 0
    gbps: float | None = None
    tflops: float | None = None
    speed_percent: float | None = None
    verified: bool = False
    error_over_bound: float | None = None
    rms_ratio: float | None = None
    max_abs: float | None = None
    max_rel: float | None = None
    ulps: float | None = None
    relative_l2: float | None = None
    note: str | None = None
    parts_us: dict[str, float] | None = None

    def compared(self, comparison: Comparison) -> None:
        """Take over the figures of a comparison, the worse of all so far.

        Peers are held to the bound alone: what is expected follows from our order of operations.
        """
        for name in ERRORS:
            value = getattr(comparison, name)
            setattr(self, name, max(getattr(self, name) or 0.0, value))
        ours = self.name.partition(",")[0] == OURS
        if not (comparison.ok if ours else comparison.within_bound):
            self.note = str(comparison)

    def timed(self, timing: Timing, work: Work, plain: Timing | None) -> None:
        self.median_us, self.q20_us, self.q80_us, self.runs = timing
        self.gbps = (work.bytes_read + work.bytes_written) / timing.median / 1e3
        self.tflops = work.flops / timing.median / 1e6 if work.flops else None
        self.speed_percent = 100 * plain.median / timing.median if plain else None


class Comparer(Protocol):
    """What says how far outputs are from their reference."""

    def compare(self, outputs: tuple[Any, ...]) -> Comparison: ...


MAX_SAMPLE = 2**22  # elements that are verified of large outputs


class Verifier:
    """The FP64 reference of a seeded part of a call, against which outputs are compared.

    Made before anything runs, so that a kernel that writes to its inputs is found.
    """

    def __init__(self, op: Op, call: Call, seed: int):
        self._op, self._call, self._seed = op, call, seed
        part, _ = op.sample(call, (), MAX_SAMPLE, seed)
        self._references = op.reference(*part.args, **part.kwargs)
        self._bounds = op.bound(*part.args, **part.kwargs, reference=self._references)

    def compare(self, outputs: tuple[Any, ...]) -> Comparison:
        _, part = self._op.sample(self._call, outputs, MAX_SAMPLE, self._seed)
        return compare(part, self._references, self._bounds)


class Contender:
    """An implementation on a problem; calling it keeps its output, so that it can be verified."""

    def __init__(self, name: str, function: Function, guarded: GuardedArray | None = None):
        self.result = Result(name)
        self.guarded = guarded
        self._function = function
        self._output: Any = None

    def __call__(self) -> None:
        self._output = self._function()

    def outputs(self) -> tuple[Any, ...]:
        """The latest output, as arrays of the call's namespace."""
        return as_tuple(self._output)

    def verify(self, verifier: Comparer) -> bool:
        """Compare the latest output; the result takes the figures and the reason of a failure."""
        try:
            if self.guarded is not None:
                self.guarded.check()
            self.result.compared(verifier.compare(self.outputs()))
        except Violation as violation:
            self.result.note = str(violation)
        return self.result.note is None


def our_contender(
    op: Op, call: Call, xp: Any, config: Any = None, like: Array | None = None
) -> Contender:
    """The op itself, with `out` if it takes one: nothing is allocated while it is timed.

    config: None for the op's own choice.  like: an array of the first output's shape and dtype;
    None: the op runs once to tell.
    """
    kwargs = call.kwargs if config is None else {**call.kwargs, "config": config}
    if not accepts_out(op):
        return Contender(OURS, lambda: op.run(*call.args, **kwargs))
    if like is None:
        like = as_tuple(op.run(*call.args, **kwargs))[0]
    guarded = GuardedArray(xp, like.shape, like.dtype)
    kwargs = {**kwargs, "out": guarded.array}
    return Contender(OURS, lambda: op.run(*call.args, **kwargs), guarded)
