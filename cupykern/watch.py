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
    """An output that holds NaN or infinities.

    >>> with cupykern.watch() as watched:
    ...     y = cupykern.matmul(np.full((1, 1), np.inf, np.float32), np.ones((1, 1), np.float32))
    >>> record = watched.records[0]
    >>> record.op, record.output, record.shape, list(record.inputs)
    ('matmul', 0, (1, 1), ['a'])

    op: the function's name.  output: which of its outputs, from 0.  shape, dtype: the output's.
    report: the output's NonfiniteReport.
    inputs: reports of the array arguments that hold NaN or infinities too, by name.
    overwritten: names of the arguments that the call wrote to: their earlier contents are unknown.
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
    """The context manager that `watch` returns; `records` is a list of WatchRecord.

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
    """Within `with watch() as w:`, check every output of cupykern's ops for NaN and infinities.

    >>> with cupykern.watch() as watched:
    ...     y = cupykern.softmax(np.array([[1.0, np.nan]], np.float32))
    >>> watched.records[0].op, watched.records[0].report.num_nan
    ('softmax', 2)

    callback: called with each WatchRecord, while no watch is active; its exceptions end the call of
        the op.

    The first such output is logged, as a warning of the logger "cupykern"; `w.records` has all of
    them.  Outputs of the dtypes that nonfinite_report takes are checked (not int8).  Array
    arguments are checked only if an output holds NaN or infinities.  A correct -inf, such as
    log_softmax of a masked element, is recorded too.

    Every check synchronises, which a stream under capture does not allow.  Captured calls are not
    checked, and the first one in a watch gives a RuntimeWarning.

    Watches nest: each logs and records by itself.  A watch belongs to the thread, or asyncio task,
    that entered it.  Entering an active watch raises RuntimeError.
    """
    return Watch(callback)


def look(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function`, check its outputs for all active watches, and return them."""
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
    """Yield (argument name, array) for arrays that can be checked; for an NvFp4, its scales."""
    for name, value in named.items():
        if isinstance(value, NvFp4):
            value = value.scale
        if _is_array(value):
            yield name, value


def _is_array(value: Any) -> bool:
    return (isinstance(value, np.ndarray) or is_cupy(value)) and value.dtype in DTYPES
