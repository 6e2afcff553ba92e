"""Compare outputs with the FP64 reference and the derived bound, for check, bench and tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from .error_statistics import statistics
from .numerics import as_float64, as_real, finfo, gap, namespace, to_numpy
from .op import Bound, Call, Op, RandomDraw, as_tuple
from .targets import Target, UnavailableError
from .typing import Array, Namespace

RMS_LIMIT = 1.5
"""The largest `rms_ratio`.  The ratio allows for chance; this is the error models' margin."""

GUARD_BYTES = 4096
_GUARD, _POISON = 0xA5, 0xFF  # 0xFF... is NaN in every floating format
# Elements of a call's arrays.  Up to this size the FP64 reference runs on the CPU.  CuPy would
# compile each of its operations for every dtype and stride order, 0.25 s each.
SMALL = 1 << 24
REPEATS = 2  # runs with other inputs of a problem whose errors are biased
_FAR = 1 << 20  # between the seeds of these runs


class Violation(Exception):
    """An op broke its contract in a way that no error ratio describes."""


@dataclass(frozen=True)
class Comparison:
    """Errors of outputs against their references, with the worst element of all outputs.

    error_over_bound: the largest |error| / bound; inf where NaN or an infinity is out of place.
    output, index: that element: the output's number and the index in it.  got, expected: its value
        and its reference.
    rms_ratio: the largest sqrt(mean((error / expected rms)^2)) of an output, divided by the limit
        that chance sets for its number of independent errors (error_statistics.py).
    bias_ratio: the largest |mean(error / expected rms)| of an output, over its limit.
    max_abs, max_rel: the largest |error| and |error / reference|, of finite elements.
    ulps: the largest |error| in units of the output's last place at the reference.
    relative_l2: the largest ratio of the L2 norms of error and reference of an output, over finite
        elements.
    """

    error_over_bound: float = 0.0
    rms_ratio: float = 0.0
    bias_ratio: float = 0.0
    max_abs: float = 0.0
    max_rel: float = 0.0
    ulps: float = 0.0
    relative_l2: float = 0.0
    output: int = 0
    index: tuple[int, ...] = ()
    got: float = 0.0
    expected: float = 0.0

    @property
    def ok(self) -> bool:
        return self.within_bound and self.rms_ratio <= RMS_LIMIT and self.bias_ratio <= 1

    @property
    def within_bound(self) -> bool:
        """Whether the bound holds: the criterion for arithmetic other than cupykern's."""
        return self.error_over_bound <= 1

    def __str__(self) -> str:
        return (
            f"error/bound {self.error_over_bound:.3g}, rms/expected {self.rms_ratio:.3g}, "
            f"bias/limit {self.bias_ratio:.3g}; worst at output {self.output}{list(self.index)}: "
            f"got {self.got!r}, expected {self.expected!r}"
        )

    def merge(self, other: Comparison) -> Comparison:
        """The worse of the two for every figure."""
        worst = self if self.error_over_bound >= other.error_over_bound else other
        names = ("rms_ratio", "bias_ratio", "max_abs", "max_rel", "ulps", "relative_l2")
        return replace(worst, **{n: max(getattr(self, n), getattr(other, n)) for n in names})


def compare(
    outputs: Sequence[Array], references: Sequence[Array], bounds: Sequence[Bound]
) -> Comparison:
    """Compare elementwise: |error| <= bound where finite; NaN and infinities must match.

    An infinite output is also right if the reference, moved towards it by the bound, rounds to it.
    Raises Violation if an output and its reference differ in shape.
    """
    if not len(outputs) == len(references) == len(bounds):
        raise Violation(f"{len(outputs)} outputs, but {len(references)} references")
    result = Comparison()
    triples = zip(outputs, references, bounds, strict=True)
    for number, (output, reference, bound) in enumerate(triples):
        if output.shape != reference.shape:
            raise Violation(
                f"output {number} has shape {output.shape}, its reference {reference.shape}"
            )
        if output.size:
            output, reference = in_parts(output, reference)
            y = as_float64(output)
            found = compare_numbers(y, output.dtype, reference, bound)
            result = result.merge(replace(found, output=number))
    return result


def compare_numbers(y: Array, dtype: np.dtype, reference: Array, bound: Bound) -> Comparison:
    """Compare one output y, converted to FP64 from `dtype`, with its reference."""
    xp = namespace(reference)
    with np.errstate(all="ignore"):
        both = xp.isfinite(y) & xp.isfinite(reference)
        signed = xp.where(both, y - reference, 0.0)
        error = xp.abs(signed)
        in_place = (xp.isnan(y) & xp.isnan(reference)) | (y == reference)
        furthest = xp.sign(y) * reference + bound.elementwise  # towards y
        in_place |= xp.isinf(y) & (furthest >= _overflow_threshold(dtype))
        ratio = xp.where(error == 0, 0.0, error / bound.elementwise)
        # A negative or NaN bound counts as violated.
        ratio = xp.where(both, xp.where(bound.elementwise >= 0, ratio, np.inf), np.inf)
        ratio = xp.where((~both & in_place) | bound.free, 0.0, ratio)

        relative = xp.where(both & (reference != 0), error / xp.abs(reference), 0.0)
        ulps = error / _ulp(xp, reference, dtype)
        length = xp.sqrt(xp.sum(xp.where(both, reference, 0.0) ** 2))
    found = statistics(signed, reference, bound, dtype)
    worst = int(xp.argmax(ratio))
    return Comparison(
        error_over_bound=float(ratio.reshape(-1)[worst]),
        rms_ratio=found.rms_ratio,
        bias_ratio=found.bias_ratio,
        max_abs=float(xp.max(error)),
        max_rel=float(xp.max(relative)),
        ulps=float(xp.max(xp.where(both, ulps, 0.0))),
        relative_l2=float(xp.sqrt(xp.sum(error**2)) / length) if length else 0.0,
        index=tuple(int(i) for i in np.unravel_index(worst, reference.shape)),
        got=float(y.reshape(-1)[worst]),
        expected=float(reference.reshape(-1)[worst]),
    )


def in_parts(output: Array, reference: Array) -> tuple[Array, Array]:
    """Both arrays; complex ones with interleaved real and imaginary parts, like their bounds."""
    if output.dtype.kind != "c":
        return output, reference
    return as_real(output), as_real(reference)


def ulp_errors(output: Array, reference: Array, bound: Bound) -> tuple[Array, Array]:
    """(|error|, the bound) in units of the output's last place at the reference.

    Only elements that are finite in both arrays and not 0 in both, as masked elements are.
    """
    xp = namespace(reference)
    output, reference = in_parts(output, reference)
    y = as_float64(output)
    both = xp.isfinite(y) & xp.isfinite(reference) & ((y != 0) | (reference != 0))
    with np.errstate(all="ignore"):
        ulp = _ulp(xp, reference, output.dtype)
        errors = xp.abs(y - reference) / ulp
        bounds = xp.broadcast_to(bound.elementwise / ulp, errors.shape)
    return errors[both], bounds[both]


def _is_integer(dtype: np.dtype) -> bool:
    return dtype.kind in "iub"


def _overflow_threshold(dtype: np.dtype) -> float:
    """The smallest magnitude that rounds to infinity: half a unit in the last place above max."""
    if _is_integer(dtype):
        return np.inf
    info = finfo(dtype)
    return info.max * (1 + info.eps / 4)


def _ulp(xp: Namespace, reference: Array, dtype: np.dtype) -> Array:
    """The output's unit in the last place at `reference`, at least twice the underflow error."""
    ulp = gap(xp.where(xp.isfinite(reference), reference, 1.0), dtype)
    return ulp if _is_integer(dtype) else xp.maximum(ulp, 2 * finfo(dtype).underflow_error)


class GuardedArray:
    """A C-contiguous array full of NaN with guard bytes on both sides, to pass as `out`."""

    def __init__(self, xp: Namespace, shape: tuple[int, ...], dtype: np.dtype):
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._buffer = xp.full(nbytes + 2 * GUARD_BYTES, _GUARD, np.uint8)
        self._content = self._buffer[GUARD_BYTES : GUARD_BYTES + nbytes]
        self.array = self._content.view(dtype).reshape(shape)
        self.poison()

    def poison(self) -> None:
        """Fill the array with NaN, which reveals elements that are not written."""
        self._content.fill(_POISON)

    def check(self) -> None:
        """Raise Violation if a guard byte was written."""
        for side, guard in (
            ("before", self._buffer[:GUARD_BYTES]),
            ("after", self._buffer[-GUARD_BYTES:]),
        ):
            if not bool((guard == _GUARD).all()):
                raise Violation(f"memory {side} the output was overwritten")


def accepts_out(op: Op) -> bool:
    return "out" in inspect.signature(op.run).parameters


def guarded_run(op: Op, call: Call, like: Array) -> tuple[Array, ...]:
    """Run `call` with a poisoned, guarded `out` of like's shape and dtype; return its outputs.

    Raises Violation if memory outside of `out` was written or `out` was not returned.
    """
    guarded = GuardedArray(namespace(like), like.shape, like.dtype)
    outputs = as_tuple(op.run(*call.args, **{**call.kwargs, "out": guarded.array}))
    if outputs[0] is not guarded.array:
        raise Violation("out was given, but something else was returned")
    guarded.check()
    return outputs


Observer = Callable[[Op, Any, Sequence[Array], Sequence[Array], Sequence[Bound]], None]


def check_problem(
    op: Op, problem: Any, seed: int, xp: Namespace, observe: Observer | None = None
) -> Comparison:
    """Run a problem, with and without a guarded `out`, and compare both with the reference.

    A bias above its limit must recur with other inputs: a fault is systematic, chance is not.
    Errors beyond the bound, or larger than expected, fail at once.

    observe: called with (op, problem, outputs, references, bounds).  Raises Violation, and the op's
        exceptions.
    """
    result = check_once(op, problem, seed, xp, observe)
    for other in range(1, REPEATS + 1):
        if result.bias_ratio <= 1 or not result.within_bound or result.rms_ratio > RMS_LIMIT:
            break
        again = check_once(op, problem, seed + other * _FAR, xp, None)
        bias = min(result.bias_ratio, again.bias_ratio)
        result = replace(result.merge(again), bias_ratio=bias)
    return result


def check_once(
    op: Op, problem: Any, seed: int, xp: Namespace, observe: Observer | None
) -> Comparison:
    """Run `check_problem` with the inputs of one seed."""
    call = op.inputs(problem, seed, xp)
    arrays = (*call.args, *call.kwargs.values())
    small = xp is not np and sum(getattr(x, "size", 0) for x in arrays) <= SMALL
    known = op.inputs(problem, seed, np) if small else call
    # Before the runs, to detect a kernel that writes to its inputs.
    references = op.reference(*known.args, **known.kwargs)
    bounds = op.bound(*known.args, **known.kwargs, reference=references)

    outputs = as_tuple(op.run(*call.args, **call.kwargs))
    seen: Sequence[Array]
    seen = [to_numpy(output) for output in outputs] if small else outputs
    if observe is not None:
        observe(op, problem, seen, references, bounds)
    result = compare(seen, references, bounds)
    if accepts_out(op) and "out" not in call.kwargs:
        again = guarded_run(op, call, outputs[0])
        seen_again: Sequence[Array]
        seen_again = [to_numpy(output) for output in again] if small else again
        if not all(map(same_bits, seen, seen_again)):
            result = result.merge(compare(seen_again, references, bounds))
    return result


def same_bits(x: Array, y: Array) -> bool:
    """Return whether shapes, dtypes and all bits are equal."""
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return False
    return bool((x.view(f"u{x.itemsize}") == y.view(f"u{x.itemsize}")).all())


@dataclass(frozen=True)
class Case:
    """One seeded problem and its result; error is None if it passed."""

    op: str
    dtype: str
    seed: int
    problem: str
    comparison: Comparison | None
    error: str | None

    def reproduce(self, target: str) -> str:
        return f"cupykern check {self.op} --target {target} --seed {self.seed} --cases 1"


def run_cases(
    ops: Iterable[Op], target: Target, cases: int, seed: int, observe: Observer | None = None
) -> Iterator[Case]:
    """Check `cases` problems of each op; case i is drawn from seed + i alone.

    Raises UnavailableError; any other exception of an op becomes its case's error.
    """
    for op in ops:
        for case_seed in range(seed, seed + cases):
            problem = op.draw_problem(RandomDraw(case_seed))
            comparison = error = None
            try:
                comparison = check_problem(op, problem, case_seed, target.xp, observe)
                if not comparison.ok:
                    error = str(comparison)
            except UnavailableError:
                raise
            except Exception as exception:
                error = f"{type(exception).__name__}: {exception}"
            dtype = getattr(problem, "dtype", "")
            yield Case(op.name, str(dtype), case_seed, repr(problem), comparison, error)


_OF_ELEMENT = ("output", "index", "got", "expected")


@dataclass
class Summary:
    """All cases of one op and dtype."""

    op: str
    dtype: str
    cases: int = 0
    failed: int = 0
    worst: Comparison | None = None  # None: no case could be compared


def summarize(cases: Iterable[Case]) -> list[Summary]:
    summaries: dict[tuple[str, str], Summary] = {}
    for case in cases:
        key = case.op, case.dtype
        summary = summaries.setdefault(key, Summary(*key))
        summary.cases += 1
        summary.failed += case.error is not None
        if case.comparison is not None:
            summary.worst = (summary.worst or Comparison()).merge(case.comparison)
    return list(summaries.values())


def document(cases: Sequence[Case], seed: int, precision: Sequence[Any] = ()) -> dict[str, Any]:
    """The results of a run, for --json.  precision: rows of precision.Row."""
    summary = [asdict(x) for x in summarize(cases)]
    for of in summary:  # without the position of the worst element: each failure has its own
        of["worst"] = of["worst"] and {k: v for k, v in of["worst"].items() if k not in _OF_ELEMENT}
    return {
        "seed": seed,
        "rms_limit": RMS_LIMIT,
        "precision": [asdict(row) for row in precision],
        "summary": summary,
        "failures": [asdict(case) for case in cases if case.error is not None],
    }
