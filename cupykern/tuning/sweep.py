"""Sweeps: compile, verify and time every config of a problem; each outcome is a Trial."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..arguments import field_kinds
from ..kernels import Variant
from ..op import Call, Op
from ..runtime import choice, jit, plans
from ..targets import Target, UnavailableError
from .compile_ahead import compile_ahead
from .contender import Contender, Verifier, our_contender
from .protocol import Monitor
from .timing import Clock, summarize, time_rounds
from .trials import Trial

OUTLIER = 4.0  # times the default's time: slower configs get no more rounds
SLOW_US = 1e5  # on the host target: loading the kernel does not dominate a slower first run


class ContextLost(RuntimeError):
    """The GPU context is unusable; remaining configs need a new process."""


@dataclass(frozen=True)
class Settings:
    """rep_ms, warmup_ms: for the first timing of each config; finalists get four times the rep_ms.

    top: how many of the best are timed again, in turns.  seed: of the inputs.
    """

    rep_ms: float = 25.0
    warmup_ms: float = 5.0
    top: int = 5
    seed: int = 0
    jobs: int = os.cpu_count() or 1


@dataclass(frozen=True)
class Candidate:
    config: Any
    variant: Variant | None


@dataclass(frozen=True)
class Subject:
    """What is swept: a call of an op, its legal configs (the default first), and the target.

    key, digest: choice.Request's; "" if the op does not request tuned configs.
    """

    op: Op
    shape: tuple[int, ...]
    dtype: str
    call: Call
    target: Target
    candidates: tuple[Candidate, ...]
    key: str = ""
    digest: str = ""

    def trial(self, candidate: Candidate) -> Trial:
        first = candidate is self.candidates[0]
        variant = None if candidate.variant is None else str(candidate.variant)
        name = repr(candidate.config)
        return Trial(
            self.op.name, self.shape, self.dtype, name, first, self.key, self.digest, variant
        )


def subject(
    op: Op,
    shape: tuple[int, ...],
    dtype: str,
    problem: Any,
    target: Target,
    seed: int,
    grid: dict[str, tuple[Any, ...]] | None = None,
) -> Subject:
    """Return the sweep of a problem's configs, and of variations of these in the fields of `grid`.

    Raises ValueError for a field that no config has, and what the op raises.
    """
    call = op.inputs(problem, seed, target.xp)
    configs = expand(op.configs(problem, target.arch), grid or {})
    candidates = tuple(Candidate(c, _variant(op, problem, c)) for c in configs)
    request = first_request(op, call)
    key, digest = ("", "") if request is None else (request.key, request.digest)
    return Subject(op, shape, dtype, call, target, candidates, key, digest)


def _variant(op: Op, problem: Any, config: Any) -> Variant | None:
    try:
        return op.variant(problem, config)
    except (ValueError, ZeroDivisionError):  # from a grid; the launch reports it
        return None


def first_request(op: Op, call: Call) -> choice.Request | None:
    """Run a call; return its first request for a tuned config, or None.  Clears all plans."""
    plans.clear()
    with choice.recording() as requests:
        op.run(*call.args, **call.kwargs)
    return requests[0] if requests else None


def expand(configs: Sequence[Any], grid: dict[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return `configs`, then each with all combinations of the grid's values for its fields.

    Fields of nested configs count too.  Values of a wrong type for a field are left out.  Raises
    ValueError for a field that no config has.
    """
    found = dict.fromkeys(configs)
    configs = [config for config in configs if dataclasses.is_dataclass(config)]
    known = {name for config in configs for name in _field_names(config)}
    if unknown := grid.keys() - known:
        raise ValueError(
            f"no config has a field {min(unknown)!r}; fields are {', '.join(sorted(known))}"
        )
    for config in configs:
        found.update(dict.fromkeys(_with_values(config, grid)))
    return tuple(found)


@dataclass(frozen=True)
class Made:
    """A grid value that is itself a config, by the name of its type: SplitK(2)."""

    name: str
    args: tuple[Any, ...]


def _field_names(config: Any) -> Iterator[str]:
    for name in field_kinds(config.__class__):
        yield name
        if dataclasses.is_dataclass(getattr(config, name)):
            yield from _field_names(getattr(config, name))


def _with_values(config: Any, grid: dict[str, tuple[Any, ...]]) -> Iterator[Any]:
    options = {}
    for name, kinds in field_kinds(config.__class__).items():
        value = getattr(config, name)
        if name in grid:
            made = {kind.__name__: kind for kind in kinds}
            options[name] = [
                made[x.name](*x.args) if isinstance(x, Made) else x
                for x in grid[name]
                if (x.name in made if isinstance(x, Made) else type(x) in kinds)
            ]
        elif dataclasses.is_dataclass(value):
            options[name] = list(_with_values(value, grid))
    for values in itertools.product(*options.values()):
        yield dataclasses.replace(config, **dict(zip(options, values, strict=True)))


# --- one problem ---------------------------------------------------------------------------------


def sweep(
    subject: Subject,
    clock: Clock,
    settings: Settings,
    known: Sequence[Trial] = (),
    starts: Callable[[Trial], None] = lambda trial: None,
    monitor: Monitor | None = None,
) -> Iterator[Trial]:
    """Yield a Trial for every config that `known` lacks, as it finishes, then the finalists'.

    starts: called with each trial before it runs.  monitor: of the GPU's clocks, entered.  Raises
    ContextLost and UnavailableError; other errors are the reason of the config's trial.
    """
    done = {trial.name: trial for trial in known}
    todo = [c for c in subject.candidates if subject.trial(c).name not in done]
    compiled: dict[Variant, float] = {}
    failed: set[int] = set()
    variants = list(dict.fromkeys(c.variant for c in todo if c.variant is not None))
    for variant, seconds, error in compile_ahead(subject.target, variants, settings.jobs):
        compiled[variant] = seconds
        if error is not None:
            for candidate in todo:
                if candidate.variant == variant:
                    trial = subject.trial(candidate)
                    trial.compile_s, trial.reason = seconds, error
                    failed.add(id(candidate))
                    done[trial.name] = trial
                    yield trial
    runner = _Runner(subject, clock, settings, monitor)
    for candidate in todo:
        if id(candidate) in failed:
            continue
        trial = subject.trial(candidate)
        trial.compile_s = compiled.get(candidate.variant) if candidate.variant else None
        starts(trial)
        lost = runner.first(candidate, trial)
        done[trial.name] = trial
        yield trial
        if lost:
            raise ContextLost(trial.reason)
    names = {subject.trial(c).name: c for c in subject.candidates}
    trials = [done[name] for name in names]
    if len(trials) > 1 and (todo or not any(trial.final for trial in trials)):
        best = sorted((t for t in trials if t.ratio is not None), key=lambda t: t.ratio or 0.0)
        best = [t for t in best if t.runs > 1] or best[:1]  # drop those timed by _first_run
        yield from runner.finals([(names[t.name], t) for t in best[: settings.top]])


class _Runner:
    """Times the configs of one subject beside the default config."""

    def __init__(self, subject: Subject, clock: Clock, settings: Settings, monitor: Monitor | None):
        self._subject, self._clock, self._settings = subject, clock, settings
        self._monitor = monitor
        self._verifier = Verifier(subject.op, subject.call, settings.seed)
        self._like: Any = None  # an array like the first output
        self._default: Contender | None = self._contender(subject.candidates[0])
        if self._default is not None:
            self._like = self._default.outputs()[0]

    def _contender(self, candidate: Candidate) -> Contender | None:
        """Return a verified contender, or None if it is wrong or cannot run."""
        s = self._subject
        try:
            contender = our_contender(s.op, s.call, s.target.xp, candidate.config, self._like)
            contender()
            return contender if contender.verify(self._verifier) else None
        except UnavailableError:
            raise
        except Exception:
            return None

    def first(self, candidate: Candidate, trial: Trial) -> bool:
        """Verify and time one config; return whether the GPU context is lost."""
        s, settings = self._subject, self._settings
        try:
            contender = our_contender(s.op, s.call, s.target.xp, candidate.config, self._like)
            once = self._first_run(contender)
            right = contender.verify(self._verifier)
            self._take(trial, contender)
            if candidate.variant is not None:
                usage = jit.get_kernel(s.target, candidate.variant).usage
                if usage is not None:
                    trial.registers, trial.local_bytes, trial.shared_bytes = usage
            if right and once is not None:
                trial.median_us, trial.q20_us, trial.q80_us, trial.runs = summarize(once[:1])
                trial.default_us = once[1]
            elif right:
                self._time([(trial, contender)], settings.rep_ms, settings.warmup_ms)
        except UnavailableError:
            raise
        except Exception as error:
            trial.verified, trial.reason = False, f"{type(error).__name__}: {error}"
            return context_lost(s.target)
        return False

    def _first_run(self, contender: Contender) -> tuple[float, float] | None:
        """Run the config; return microseconds (its run, a run of the default), or None.

        Only very slow configs on the host target return times; they get no more rounds.  A run of
        clusters with thousands of threads takes 20 s.
        """
        if not self._clock.is_emulation or self._default is None:
            contender()
            return None
        (fast,) = self._clock.round([self._default])
        (slow,) = self._clock.round([contender])
        return (slow, fast) if slow > max(OUTLIER * fast, SLOW_US) else None

    def finals(self, chosen: list[tuple[Candidate, Trial]]) -> Iterator[Trial]:
        """Time the best configs again, all in turns, and yield their new trials."""
        pairs = []
        for candidate, trial in chosen:
            contender = self._contender(candidate)
            if contender is not None:
                pairs.append((dataclasses.replace(trial, final=True), contender))
        if pairs:
            settings = self._settings
            self._time(pairs, 4 * settings.rep_ms, settings.warmup_ms)
        for trial, _ in pairs:
            yield trial

    def _time(
        self, pairs: Sequence[tuple[Trial, Contender]], rep_ms: float, warmup_ms: float
    ) -> None:
        """Poison the outputs, time in turns with the default, then verify again."""
        contenders = [contender for _, contender in pairs]
        for contender in contenders:
            if contender.guarded is not None:
                contender.guarded.poison()
        beside = [self._default] if self._default is not None else []
        if beside and len(pairs) == 1:  # slow configs get the minimum number of rounds
            slow, fast = self._clock.round([*contenders, *beside])
            if slow > OUTLIER * fast:
                rep_ms, warmup_ms = 0.0, 0.0
        start = time.monotonic()
        timings = time_rounds(self._clock, [*contenders, *beside], warmup_ms, rep_ms)
        end = time.monotonic()
        clocks = None if self._monitor is None else self._monitor.between(start, end)
        for (trial, contender), timing in zip(pairs, timings, strict=False):
            trial.median_us, trial.q20_us, trial.q80_us, trial.runs = timing
            trial.default_us = timings[-1].median if beside else None
            trial.clocks = clocks
            contender.verify(self._verifier)
            self._take(trial, contender)

    def _take(self, trial: Trial, contender: Contender) -> None:
        result = contender.result
        trial.error_over_bound, trial.rms_ratio = result.error_over_bound, result.rms_ratio
        trial.verified, trial.reason = result.note is None, result.note


def context_lost(target: Target) -> bool:
    """Return whether the GPU context fails every call, for example after an illegal address."""
    if target.name == "host":
        return False
    try:
        target.xp.cuda.runtime.deviceSynchronize()
        return False
    except Exception:
        return True
