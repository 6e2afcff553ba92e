"""Problems of `bench --parallel`: a step on all ranks, and the whole problem on one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ... import arrays, inputs, parallel, reference
from ...check import Comparison, compare
from ...dtypes import bfloat16
from ...op import Work
from ...parallel import Communicator
from ...reference import parallel as of_ranks
from ...tuning.contender import Comparer
from ...tuning.timing import Function

_SAMPLE = 4  # rows that are verified with FP64


@dataclass(frozen=True)
class Step:
    """The timed function and the comparer of its outputs; all ranks run both together."""

    function: Function
    comparer: Comparer


class Problem(Protocol):
    """A whole problem, the same on all ranks; each rank cuts out its part."""

    @property
    def work(self) -> Work: ...

    @property
    def size(self) -> tuple[int, ...]: ...

    def step(self, comm: Communicator) -> Step:
        """Return the step of a rank's part; for a SelfCommunicator, of the whole."""


def _sample(count: int, seed: int) -> np.ndarray:
    """Draw up to _SAMPLE of `count` rows, sorted, including the first and the last."""
    drawn = np.random.default_rng(seed).integers(0, count, _SAMPLE - 2)
    return np.unique([0, *drawn, count - 1])


def _values(shape: tuple[int, ...], seed: int, xp: Any, deviation: float = 1.0) -> Any:
    return inputs.bench_values(shape, bfloat16, seed, xp, bfloat16.type(deviation))


class Mlp:
    """A gated MLP: gate and up split by columns, down by rows, then a sum over ranks."""

    def __init__(self, size: tuple[int, int, int], seed: int, xp: Any):
        """size: tokens, hidden, inner."""
        tokens, hidden, inner = self.size = size
        self.x = _values((tokens, hidden), seed, xp)
        self.gate = _values((inner, hidden), seed + 1, xp, hidden**-0.5)
        self.up = _values((inner, hidden), seed + 2, xp, hidden**-0.5)
        self.down = _values((hidden, inner), seed + 3, xp, inner**-0.5)
        weights = self.gate, self.up, self.down
        read = self.x.nbytes + sum(w.nbytes for w in weights)
        self.work = Work(read, self.x.nbytes, 6 * tokens * hidden * inner)
        self.rows = _sample(tokens, seed)

    def parts(self, comm: Communicator) -> tuple[Any, Any, Any]:
        """Return this rank's gate, up and down, in the layout of checkpoints."""
        part = parallel.shares(self.size[2], comm.size)[comm.rank]
        return self.gate[part], self.up[part], arrays.packed(self.down[:, part])

    def step(self, comm: Communicator) -> Step:
        gate, up, down = self.parts(comm)

        def run() -> tuple[Any, Any]:
            inner = parallel.column_parallel_dual_gemm_silu(comm, self.x, gate.T, up.T)
            return parallel.row_parallel_matmul(comm, inner, down.T), inner

        return Step(run, _MlpComparer(self, comm, gate, up))


class _MlpComparer:
    """Compare the MLP's inner values with FP64, and the sum with FP64 on those inner values."""

    def __init__(self, mlp: Mlp, comm: Communicator, gate: Any, up: Any):
        self._mlp, self._comm = mlp, comm
        given = mlp.x[mlp.rows], gate.T, up.T
        self._inner = reference.dual_gemm_silu(*given)
        self._inner_bound = reference.dual_gemm_silu_bound(*given, reference=self._inner)

    def compare(self, outputs: tuple[Any, ...]) -> Comparison:
        mlp, (y, inner) = self._mlp, (x[self._mlp.rows] for x in outputs)
        found = compare((inner,), self._inner, self._inner_bound)
        every = parallel.all_gather(self._comm, arrays.packed(inner.T)).T
        parts = parallel.shares(mlp.size[2], self._comm.size)
        given = [every[:, part] for part in parts], [mlp.down[:, part].T for part in parts]
        exact = of_ranks.row_parallel_matmul(*given)
        bound = of_ranks.row_parallel_matmul_bound(*given, reference=exact)
        return found.merge(compare((y,), exact, bound))


class Ring:
    """Causal attention over a long sequence whose tokens `zigzag` splits."""

    def __init__(self, size: tuple[int, int, int, int], seed: int, xp: Any):
        """size: tokens, heads, KV heads, head dim."""
        tokens, heads, kv_heads, width = self.size = size
        self.q, self.k, self.v = (
            _values((1, of, tokens, width), seed + i, xp)
            for i, of in enumerate((heads, kv_heads, kv_heads))
        )
        read = self.q.nbytes + self.k.nbytes + self.v.nbytes
        self.work = Work(read, self.q.nbytes, 2 * heads * width * tokens * (tokens + 1))
        self.xp, self._seed = xp, seed

    def cut(self, x: Any, size: int) -> list[Any]:
        """Return each rank's tokens of x."""
        pieces = parallel.zigzag(self.size[0], size)
        return [self.xp.concatenate([x[:, :, a], x[:, :, b]], axis=2) for a, b in pieces]

    def step(self, comm: Communicator) -> Step:
        own = [self.cut(x, comm.size)[comm.rank] for x in (self.q, self.k, self.v)]

        def run() -> Any:
            return parallel.ring_attention(comm, *own, causal=True)

        return Step(run, _RingComparer(self, comm, _sample(own[0].shape[2], self._seed)))


class _RingComparer:
    def __init__(self, ring: Ring, comm: Communicator, queries: np.ndarray):
        self._queries = queries
        if comm.size == 1:
            mask = queries[:, None] >= np.arange(ring.size[0])[None, :]
            given: tuple[Any, ...] = (ring.q[:, :, queries], ring.k, ring.v)
            options: dict[str, Any] = {"mask": ring.xp.asarray(mask)}
            exact = reference.attention(*given, **options)
            bound = reference.attention_bound(*given, **options, reference=exact)
        else:
            given = *(ring.cut(x, comm.size) for x in (ring.q, ring.k, ring.v)), comm.rank
            options = {"causal": True, "queries": queries}
            exact = of_ranks.ring_attention(*given, **options)
            bound = of_ranks.ring_attention_bound(*given, **options, reference=exact)
        self._exact, self._bound = exact[:1], bound[:1]

    def compare(self, outputs: tuple[Any, ...]) -> Comparison:
        return compare((outputs[0][:, :, self._queries],), self._exact, self._bound)
