"""tiny_llama whose decode step is a CUDA graph: one launch a token, not dozens a layer.

    python examples/tiny_llama_graph.py --random 1024,8,16,4,32000 --tokens 64

A graph repeats the launches that were made while it was captured, with the same arguments.  So what
differs from token to token must lie on the GPU: here the positions, which Cache.lengths holds.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
from tiny_llama import Cache, Llama, main


class Step(NamedTuple):
    """A captured decode step.

    tokens, logits: where it reads and writes; pool: of what lies between.
    """

    graph: Any
    tokens: Any
    logits: Any
    pool: Any


class GraphLlama(Llama):
    """A Llama that captures its second decode step with a cache, and then replays it; on numpy
    arrays, where there are no graphs, it is a Llama."""

    def __call__(self, tokens: Any, cache: Cache, every: bool = False) -> Any:
        if tokens.shape[1] > 1 or every or self.xp is np:
            return super().__call__(tokens, cache, every)
        known = getattr(cache, "step", None)
        if known is None:  # the first step compiles and loads kernels, which no capture may do
            cache.step = "loaded"
            return super().__call__(tokens, cache)
        if known == "loaded":
            cache.step = self._capture(tokens.shape, tokens.dtype, cache)
        elif cache.length == cache.keys[0].shape[2]:
            raise ValueError(f"the cache has room for {cache.length} tokens, not for one more")
        else:
            cache.length += 1
        cache.step.tokens[...] = tokens
        cache.step.graph.launch()
        return cache.step.logits.copy()

    def _capture(self, shape: tuple[int, ...], dtype: Any, cache: Cache) -> Step:
        """One step; it counts in cache.length, but nothing runs before the graph is launched."""
        cuda = self.xp.cuda
        tokens = self.xp.empty(shape, dtype)
        # A pool of its own: nobody else may get the memory that the graph writes to.
        pool, stream = cuda.MemoryPool(), cuda.Stream(non_blocking=True)
        with cuda.using_allocator(pool.malloc), stream:
            stream.begin_capture()
            logits = super().__call__(tokens, cache)
            graph = stream.end_capture()
        return Step(graph, tokens, logits, pool)


if __name__ == "__main__":
    sys.exit(main(make=GraphLlama))
