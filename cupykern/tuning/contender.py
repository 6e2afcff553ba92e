"""Contenders: an implementation on a problem, with its results and output check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ..check import Comparison, GuardedArray, Violation, accepts_out, compare
from ..op import Call, Op, Work, as_tuple
from ..typing import Array
from .timing import Function, Timing

OURS = "cupykern"
NO_SUCH_FUNCTION = "has no such function"  # the note of a library without the op
ERRORS = ("error_over_bound", "rms_ratio", "max_abs", "max_rel", "ulps", "relative_l2")


@dataclass
class Result:
    """One implementation on one problem; times in microseconds, None if not timed.

    speed_percent: speed relative to the plain copy (or read) of the same bytes in the same rounds.
    verified: before and after timing.  note: why it failed, or was not measured.  parts_us: median
    times of its steps, if it has several.
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
        """Add the figures of a comparison; each keeps the worst value so far.

        Peers are held only to the bound: expected errors follow from our order of operations.
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
    """Compares outputs with their reference."""

    def compare(self, outputs: tuple[Any, ...]) -> Comparison: ...


MAX_SAMPLE = 2**22  # elements of large outputs that are verified


class Verifier:
    """The FP64 reference of a seeded part of a call, to compare outputs with.

    It is made before anything runs, so that a kernel that writes to its inputs is found.
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
    """An implementation on a problem; a call keeps its output for verification."""

    def __init__(self, name: str, function: Function, guarded: GuardedArray | None = None):
        self.result = Result(name)
        self.guarded = guarded
        self._function = function
        self._output: Any = None

    def __call__(self) -> None:
        self._output = self._function()

    def outputs(self) -> tuple[Any, ...]:
        """Return the latest output, as arrays of the call's namespace."""
        return as_tuple(self._output)

    def verify(self, verifier: Comparer) -> bool:
        """Compare the latest output; store the figures and the reason of a failure in `result`."""
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
    """Make the op's contender, with `out` if it takes one, so that timing includes no allocation.

    config: None for the op's own choice.  like: an array of the first output's shape and dtype;
    None: the op runs once to find these.
    """
    kwargs = call.kwargs if config is None else {**call.kwargs, "config": config}
    if not accepts_out(op):
        return Contender(OURS, lambda: op.run(*call.args, **kwargs))
    if like is None:
        like = as_tuple(op.run(*call.args, **kwargs))[0]
    guarded = GuardedArray(xp, like.shape, like.dtype)
    kwargs = {**kwargs, "out": guarded.array}
    return Contender(OURS, lambda: op.run(*call.args, **kwargs), guarded)
