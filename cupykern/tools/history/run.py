"""Run sequences of calls, and each call alone: both must give the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from ... import targets
from ...arrays import empty_of
from ...kernels import Variant
from ...nvfp4 import NvFp4
from ...op import RandomDraw, as_tuple
from ...runtime import jit, plans, workspace
from ...targets import Target
from .draws import Config
from .memory import Array, Image, Place, make_image
from .sequences import FAMILIES, Call, defaults_of, draw_sequence

_MOST_TRIES = 400  # to shrink a sequence
_TOGETHER = 100  # sequences
LEGAL_ERRORS = (TypeError, ValueError, NotImplementedError, NameError)
_MOST_LAST_CALLS = 20  # of a sequence that broke the device


class DeviceBroken(RuntimeError):
    """A kernel failed, and this process can launch no more kernels."""


class Outcome(NamedTuple):
    """The result of a call.

    error: a legal one.  outputs: (shape, strides, dtype, digest).  memory: digest of the arguments'
    memory.  launches: if the machine records them.  fault: an illegal effect.
    """

    error: str | None = None
    outputs: tuple[Any, ...] = ()
    memory: str = ""
    launches: tuple[Any, ...] = ()
    fault: str | None = None

    def difference(self, other: Outcome) -> str | None:
        """Describe how this outcome differs from that of the call alone, or return None."""
        if self.error != other.error:
            return f"{self.error or 'no error'}; alone {other.error or 'no error'}"
        for kind, mine, theirs in (
            ("output", self.outputs, other.outputs),
            ("launch", self.launches, other.launches),
        ):
            for number, (one, another) in enumerate(zip_longest(mine, theirs)):
                if one != another:
                    return f"{kind} {number} is {one}; alone {another}"
        return None if self == other else "other bytes in the memory of the arguments"


class Machine:
    """A target with memory for arguments.  broken: true after DeviceBroken."""

    def __init__(self, target: Target):
        self.target, self.broken = target, False
        self._arenas: dict[int, Any] = {}
        self._alone: dict[Call, Outcome] = {}

    def outcomes(self) -> tuple[tuple[Call, Outcome], ...]:
        """Return (call, outcome) of all calls that ran alone."""
        return tuple(self._alone.items())

    def forget(self) -> None:
        """Empty every cache that a call reads, except that of loaded kernels."""
        plans.clear()
        workspace.forget()

    def alone(self, call: Call) -> Outcome:
        """Return the outcome of `call` with empty caches."""
        if call not in self._alone:
            self.forget()
            self._alone[call] = self.run(call)
        return self._alone[call]

    def run(self, call: Call) -> Outcome:
        image = make_image(call.arguments)
        before = image.content()
        arena = self._arena(call.place, image.size)
        self._write(arena[: image.size], before)
        arguments = image.build(lambda place: array_in(arena, place))
        family = FAMILIES[call.name]
        try:
            outputs = as_arrays(family.run(**self.with_config(call.name, arguments)))
        except LEGAL_ERRORS as error:
            return Outcome(f"{type(error).__name__}: {error}")
        except Exception as error:  # inconsistent caches, or a kernel that fails
            return Outcome(fault=f"{type(error).__name__}: {error}")
        try:
            numbers = [to_host(y) for y in outputs]
            after = to_host(arena)
        except Exception as error:
            self.broken = True
            raise DeviceBroken(f"{type(error).__name__}: {error}") from error
        found = tuple(
            (y.shape, y.strides, str(y.dtype), _digest(x))
            for y, x in zip(outputs, numbers, strict=True)
        )
        fault = _written_elsewhere(image, family.written, before, after[: image.size])
        return Outcome(outputs=found, memory=_digest(after[: image.size]), fault=fault)

    def with_config(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return `arguments`, with a Config replaced by the family's config of its number."""
        config = arguments.get("config")
        if not isinstance(config, Config):
            return arguments
        configs = _configs(name, self.target.arch)
        return {**arguments, "config": configs[config.number % len(configs)]}

    def _arena(self, place: int, size: int) -> Any:
        """Return at least `size` bytes, aligned to ALIGNMENT; places 0 and 1 do not overlap."""
        if place not in self._arenas or self._arenas[place].size < size:
            self._arenas[place] = empty_of(self.target.xp, max(size, 1 << 22), np.uint8)
        return self._arenas[place]

    def _write(self, memory: Any, content: np.ndarray) -> None:
        if isinstance(memory, np.ndarray):
            memory[...] = content
        else:
            memory.set(content)


def as_arrays(outputs: Any) -> tuple[Any, ...]:
    """Return the arrays of a function's result."""
    if isinstance(outputs, NvFp4):
        outputs = outputs.data, outputs.scale, outputs.global_scale
    return as_tuple(outputs)


def array_in(arena: Any, place: Place) -> Any:
    """Return the array at `place` in the arena's memory."""
    offset, shape, strides, dtype = place
    if isinstance(arena, np.ndarray):
        return np.ndarray(shape, dtype, arena, offset, strides)
    bits = np.dtype(np.uint8) if dtype.itemsize == 1 else dtype  # CuPy cannot make FP8 arrays
    return type(arena)(shape, bits, arena.data + offset, strides).view(dtype)


def to_host(x: Any) -> np.ndarray:
    """Return x, or a copy of a CuPy array (FP8 as bytes)."""
    if isinstance(x, np.ndarray):
        return x
    return x.view(np.uint8).get() if x.dtype.itemsize == 1 else x.get()


def _digest(x: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(x).tobytes(), digest_size=8).hexdigest()


def _written_elsewhere(
    image: Image, written: tuple[str, ...], before: np.ndarray, after: np.ndarray
) -> str | None:
    """Describe the bytes that changed outside of the arguments `written`, or return None."""
    changed = before != after
    for out in map(image.arguments.get, written):
        if isinstance(out, Place):
            bytes_of_out = np.ndarray(
                (*out.shape, out.dtype.itemsize), np.bool_, changed, out.offset, (*out.strides, 1)
            )
            bytes_of_out[...] = False
    if not changed.any():
        return None
    return f"{int(changed.sum())} bytes changed outside of {', '.join(written)}"


@cache
def _configs(name: str, arch: str) -> tuple[Any, ...]:
    return FAMILIES[name].configs(arch)


# --- sequences -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """A sequence whose last call has another outcome than alone."""

    calls: tuple[Call, ...]
    reason: str

    def __str__(self) -> str:
        calls = "".join(f"    {call},\n" for call in self.calls)
        return (
            f"{self.reason}\nafter the calls before it; reproduce it by\n"
            f"  from cupykern.tools.history import *\n  replay(\n{calls}  )"
        )


def check_sequence(machine: Machine, calls: tuple[Call, ...]) -> Failure | None:
    """Return the first call whose outcome depends on the calls before it, as a Failure."""
    machine.forget()
    number, outcomes = 0, []
    try:
        while number < len(calls):
            number += 1
            outcomes.append(machine.run(calls[number - 1]))
        for number, (call, found) in enumerate(zip(calls, outcomes, strict=True), 1):
            reason = found.fault or machine.alone(call).fault
            reason = reason or found.difference(machine.alone(call))
            if reason:
                return Failure(calls[:number], reason)
    except DeviceBroken as error:
        return Failure(calls[max(0, number - _MOST_LAST_CALLS) : number], str(error))
    return None


def shrink(machine: Machine, failure: Failure) -> Failure:
    """Return a failure with fewer and simpler calls."""
    *earlier, last = failure.calls
    for one in sorted(earlier, key=lambda call: call.name != last.name):
        found = check_sequence(machine, (one, last))
        if found is not None:
            failure = found
            break
    tries = 0
    while True:
        for calls in _simpler(failure.calls):
            tries += 1
            found = check_sequence(machine, calls) if tries < _MOST_TRIES else None
            if found is not None:
                failure = found
                break
        else:
            return failure


def _simpler(calls: tuple[Call, ...]) -> Iterator[tuple[Call, ...]]:
    """Yield the calls without one call, or with a simpler argument in all calls or in one."""
    for i in range(len(calls) - 1):
        yield (*calls[:i], *calls[i + 1 :])
    ways: list[tuple[Any, Callable[[Call, Any], Call]]] = [(None, _at_place_0)]
    for name in dict(one for call in calls for one in call.arguments):
        ways += [(name, _drop), (name, _in_c_order), (name, _aligned)]
    for name, way in ways:
        changed = tuple(way(call, name) for call in calls)
        if changed != calls:
            yield changed
            for i, one in enumerate(changed):
                if one != calls[i]:
                    yield (*calls[:i], one, *calls[i + 1 :])


def _at_place_0(call: Call, name: Any) -> Call:
    return replace(call, place=0)


def _drop(call: Call, name: str) -> Call:
    if name not in defaults_of(call.name):
        return call
    return replace(call, arguments=tuple(one for one in call.arguments if one[0] != name))


def _in_c_order(call: Call, name: str) -> Call:
    return _with_array(call, name, layout="C")


def _aligned(call: Call, name: str) -> Call:
    return _with_array(call, name, begin=0)


def _with_array(call: Call, name: str, **fields: Any) -> Call:
    return replace(
        call,
        arguments=tuple(
            (one, replace(value, **fields) if one == name and isinstance(value, Array) else value)
            for one, value in call.arguments
        ),
    )


def replay(*calls: Call, target: str | None = None) -> None:
    """Raise AssertionError if a call's outcome depends on the calls before it.

    target: "cuda", "hip", "host" or None, the GPU if there is one.
    """
    failure = check_sequence(Machine(targets.get(target)), calls)
    if failure is not None:
        raise AssertionError(failure.reason)


def variants_of(machine: Machine, call: Call) -> frozenset[Variant]:
    """Return the variants that a call launches, without compiling them."""
    with jit.recording() as variants:
        machine.run(call)
    return frozenset(variants)


class Run(NamedTuple):
    """Consecutive sequences, the number of their calls, and their first failure, shrunk."""

    sequences: int
    calls: int
    failure: Failure | None


def run_sequences(
    machine: Machine, names: tuple[str, ...], sequences: int, seed: int, large: bool
) -> Iterator[Run]:
    """Draw sequence i from seed + i alone, run the sequences, and yield their results.

    Caches stay filled for `_TOGETHER` sequences, so that later calls have a long history.
    """
    for first in range(0, sequences, _TOGETHER):
        numbers = range(first, min(first + _TOGETHER, sequences))
        drawn = (draw_sequence(RandomDraw(seed + number), names, large) for number in numbers)
        calls = tuple(call for sequence in drawn for call in sequence)
        failure = check_sequence(machine, calls)
        if failure is not None and not machine.broken:
            failure = shrink(machine, failure)
        yield Run(len(numbers), len(calls), failure)
        if machine.broken:
            return
