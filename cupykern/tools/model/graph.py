"""A function's launches as one CUDA graph; on numpy arrays the function itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...targets import Target


class Graph:
    """Repeats the launches of `function()` with one launch.

    A graph keeps the arguments of the launches that it was captured with.  So what differs from
    call to call must lie in arrays on the device, and the result is the same array each time.
    """

    def __init__(self, function: Callable[[], Any], target: Target):
        self._function, self._graph = function, None
        if target.name == "host":
            return
        function()  # compiles and loads kernels, which no capture may do
        cuda = target.xp.cuda
        # A pool of its own: nobody else may get the memory that the graph writes to.
        self._pool, stream = cuda.MemoryPool(), cuda.Stream(non_blocking=True)
        cuda.get_current_stream().synchronize()
        with cuda.using_allocator(self._pool.malloc), stream:
            stream.begin_capture()
            self._result = function()
            self._graph = stream.end_capture()

    def __call__(self) -> Any:
        """The function's result, on the current stream."""
        if self._graph is None:
            return self._function()
        self._graph.launch()
        return self._result
