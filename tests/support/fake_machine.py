"""A history machine of the fake GPU: the outcome of a call is what it launches."""

from __future__ import annotations

import ctypes
import re
from typing import Any

from fake_copies import MOST_COPIED
from fake_gpu import FakeGpu, Launch

from cupykern.runtime import workspace
from cupykern.tools.history import FAMILIES, Call, run
from cupykern.tools.history.memory import make_image

_ARENA = 1 << 25  # bytes for the arguments of a call
_CALL = 4 * _ARENA  # for its arguments, results and temporary arrays
_WORKSPACE = 2 * _CALL  # where that begins
SIZE = _WORKSPACE + 2 * _ARENA
_MAP = re.compile(rb"(.*) at (\d+)", re.DOTALL)  # fake_gpu's tensor maps


class FakeMachine(run.Machine):
    """Arguments and results of a call at one place always lie at the same addresses, so that
    launches come again; a workspace lies apart."""

    def __init__(self, gpu: FakeGpu, monkeypatch: Any):
        super().__init__(gpu)
        self._begin = gpu.begin
        self._workspace_next = _WORKSPACE
        for name in ("take", "take_counters", "take_for_grid"):
            monkeypatch.setattr(workspace, name, self._apart(getattr(workspace, name)))

    def run(self, call: Call) -> run.Outcome:
        gpu, image = self.target, make_image(call.arguments)
        assert image.size <= _ARENA, call
        offset = _CALL * call.place
        gpu.offset = offset
        arena = gpu.array((image.size,), "uint8")
        for place, part in image.parts(MOST_COPIED):
            ctypes.memmove(arena.data.ptr + place, part.ctypes.data, part.size)
        gpu.offset = offset + _ARENA
        gpu.launches.clear()
        gpu.copies.clear()
        arguments = image.build(lambda place: run.array_in(arena, place))
        names = _Names(arena.data.ptr, arena.data.ptr + image.size, self._begin + _WORKSPACE)
        try:
            function = FAMILIES[call.name].run
            outputs = run.as_arrays(function(**self.with_config(call.name, arguments)))
        except run.LEGAL_ERRORS as error:
            return run.Outcome(f"{type(error).__name__}: {error}")
        except Exception as error:
            return run.Outcome(fault=f"{type(error).__name__}: {error}")
        assert gpu.offset <= offset + _CALL, call
        launches = tuple(names.of_launch(launch) for launch in gpu.launches)
        found = tuple((y.shape, y.strides, str(y.dtype), names.of(y.data.ptr)) for y in outputs)
        return run.Outcome(outputs=found, launches=(*launches, *gpu.copies))

    def _apart(self, function: Any) -> Any:
        def take(*args: Any) -> Any:
            gpu = self.target
            saved, gpu.offset = gpu.offset, self._workspace_next
            try:
                return function(*args)
            finally:
                # A new one at each take, until the memory for them ends.
                self._workspace_next, gpu.offset = gpu.offset, saved
                if self._workspace_next > SIZE - _ARENA:
                    self._workspace_next = _WORKSPACE

        return take


class _Names:
    """Addresses by what lies there: offsets from the arguments' memory, "workspace", or the number
    of a new array, in the order in which launches name them."""

    def __init__(self, begin: int, end: int, workspace: int):
        self._begin, self._end, self._workspace = begin, end, workspace
        self._new: dict[int, int] = {}

    def of(self, address: int) -> tuple[Any, ...]:
        if self._begin <= address < self._end:
            return "argument", address - self._begin
        if address >= self._workspace:
            return "workspace", address % 512
        return "new", self._new.setdefault(address, len(self._new)), address % 512

    def of_launch(self, launch: Launch) -> tuple[Any, ...]:
        args = tuple(map(self._argument, launch.args))
        return launch.variant, launch.grid, launch.shared_bytes, args

    def _argument(self, value: Any) -> Any:
        if isinstance(value, int):
            return self.of(value)
        found = _MAP.fullmatch(value) if value is not None else None
        return value if found is None else (found[1], self.of(int(found[2])))
