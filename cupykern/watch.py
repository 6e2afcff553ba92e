"""watch: find the first op whose output holds NaN or infinity."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import arguments
from .nvfp4 import NvFp4
from .op import as_tuple
from .ops.nonfinite_report import NonfiniteReport, is_capturing, nonfinite_report
from .rows.nonfinite_plan import DTYPES
from .targets import is_cupy, of_array
from .typing import Array

_log = logging.getLogger("cupykern")


@dataclass(frozen=True)
class WatchRecord:
    """An output with NaN or infinities in it.

    >>> with cupykern.watch() as watched:
    ...     y = cupykern.matmul(np.full((1, 1), np.inf, np.float32), np.ones((1, 1), np.float32))
    >>> record = watched.records[0]
    >>> record.op, record.output, record.shape, list(record.inputs)
    ('matmul', 0, (1, 1), ['a'])

    op: the function's name.  output: which of its outputs, from 0.  shape, dtype: the output's.
    report: what it holds.  inputs: reports of the array arguments that hold NaN or infinities too,
    by name; overwritten: of those that the call wrote to, which can't be told any more.
    """

    op: str
    output: int
    shape: tuple[int, ...]
    dtype: str
    report: NonfiniteReport
    inputs: dict[str, NonfiniteReport]
    overwritten: tuple[str, ...]

    def __str__(self) -> str:
        words = [f"{self.op}: output {self.output}, {self.shape} {self.dtype}, has {self.report}"]
        for name, report in self.inputs.items():
            words.append(f"its input {name} has {report}")
        words += [f"its input {name} is overwritten" for name in self.overwritten]
        if not self.inputs and not self.overwritten:
            words.append("its inputs are finite")
        return "; ".join(words)


active: ContextVar[tuple[Watch, ...]] = ContextVar("cupykern_watch", default=())


class Watch:
    """What `watch` returns: a context manager with the `records` of what was found.

    >>> with cupykern.watch() as watched:
    ...     y = cupykern.softmax(np.zeros((1, 4), np.float32))
    >>> type(watched).__name__, watched.records
    ('Watch', [])
    """

    def __init__(self, callback: Callable[[WatchRecord], Any] | None = None):
        if callback is not None and not callable(callback):
            raise TypeError(f"callback must be callable; got {type(callback).__name__}")
        self.records: list[WatchRecord] = []
        self._callback = callback
        self._token: Token[tuple[Watch, ...]] | None = None
        self._warned = False

    def __enter__(self) -> Watch:
        if self._token is not None:
            raise RuntimeError("this watch is active already; make another one")
        self._token = active.set((*active.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        token, self._token = self._token, None
        if token is not None:
            active.reset(token)

    def _take(self, record: WatchRecord) -> None:
        self.records.append(record)
        if len(self.records) == 1:
            _log.warning("%s", record)
        if self._callback is not None:
            token = active.set(())
            try:
                self._callback(record)
            finally:
                active.reset(token)

    def _cannot_look(self, name: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"watch cannot look at the output of {name}: the stream is being captured, and to "
                f"look is to wait for it",
                RuntimeWarning,
                stacklevel=4,
            )


def watch(callback: Callable[[WatchRecord], Any] | None = None) -> Watch:
    """Within `with watch() as w:`, look for NaN and infinities in every output of cupykern's ops.

    >>> with cupykern.watch() as watched:
    ...     y = cupykern.softmax(np.array([[1.0, np.nan]], np.float32))
    >>> watched.records[0].op, watched.records[0].report.num_nan
    ('softmax', 2)

    callback: called with each WatchRecord, while this and outer watches look at nothing; what it
        raises ends the call of the op.

    The first output that holds one is logged, as a warning of the logger "cupykern"; `w.records`
    has all of them.  Outputs of the formats that nonfinite_report takes are looked at (not int8);
    arrays given as arguments only once an output holds something.  That -inf may be right, as
    log_softmax's of what a mask hides, is not known here.

    Every look synchronises.  A stream under capture can't be waited for: calls that are captured
    are not looked at, and the first one in a watch gives a RuntimeWarning.

    Watches nest: each looks, logs and records by itself.  One belongs to the thread, or the task of
    asyncio, that entered it.  Entering one that is active raises RuntimeError.
    """
    return Watch(callback)


def look(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of a call, after all active watches have looked at them."""
    outputs = function(*args, **kwargs)
    for number, output in enumerate(as_tuple(outputs)):
        if not _is_array(output):
            continue
        if is_capturing(of_array(output)):
            for w in active.get():
                w._cannot_look(function.__name__)
            break
        report = nonfinite_report(output)
        if report.num_nonfinite:
            record = _record(function, args, kwargs, number, output, report, as_tuple(outputs))
            for w in active.get():
                w._take(record)
    return outputs


def _record(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    number: int,
    output: Array,
    report: NonfiniteReport,
    outputs: tuple[Any, ...],
) -> WatchRecord:
    found, overwritten = {}, []
    for name, array in _arrays(inspect.signature(function).bind(*args, **kwargs).arguments):
        if any(array is result for result in outputs) and name == "out":
            continue
        if any(arguments.overlap(array, result) for result in outputs if _is_array(result)):
            overwritten.append(name)
            continue
        its_report = nonfinite_report(array)
        if its_report.num_nonfinite:
            found[name] = its_report
    return WatchRecord(
        function.__name__,
        number,
        output.shape,
        str(output.dtype),
        report,
        found,
        tuple(overwritten),
    )


def _arrays(named: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arrays that can be looked at, by the name of their argument; of an NvFp4, its scales."""
    for name, value in named.items():
        if isinstance(value, NvFp4):
            value = value.scale
        if _is_array(value):
            yield name, value


def _is_array(value: Any) -> bool:
    return (isinstance(value, np.ndarray) or is_cupy(value)) and value.dtype in DTYPES
