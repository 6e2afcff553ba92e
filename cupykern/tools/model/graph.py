"""A function's launches as one CUDA graph; on NumPy arrays the function itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...targets import Target


class Graph:
    """Repeat the launches of `function()` with one launch.

    A graph keeps the launch arguments of its capture.  So inputs that change between calls must be
    in device arrays, and every call returns the same result array.
    """

    def __init__(self, function: Callable[[], Any], target: Target):
        self._function, self._graph = function, None
        if target.name == "host":
            return
        function()  # compiles and loads kernels, which a capture cannot do
        cuda = target.xp.cuda
        # A separate pool, so that nothing else gets the memory that the graph writes to.
        self._pool, stream = cuda.MemoryPool(), cuda.Stream(non_blocking=True)
        cuda.get_current_stream().synchronize()
        with cuda.using_allocator(self._pool.malloc), stream:
            stream.begin_capture()
            self._result = function()
            self._graph = stream.end_capture()

    def __call__(self) -> Any:
        """Return the function's result; run on the current stream."""
        if self._graph is None:
            return self._function()
        self._graph.launch()
        return self._result
