"""Mixture of experts split over ranks (expert parallelism): rows are sent to experts and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import cupykern
from cupykern import arguments, arrays, dtypes
from cupykern.numerics import namespace, to_numpy

from ..arrays import take
from ..typing import Array
from .agreement import Facts, agree, agreed, described
from .collectives import consecutive, length
from .communicator import Communicator


def expert_parallel_moe(
    comm: Communicator,
    x: Array,
    experts: Array,
    gates: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
) -> Array:
    """Sum over a token's experts e of gate * (silu(x @ w_gate[e]) * (x @ w_up[e])) @ w_down[e].

    >>> x = np.ones((3, 8), np.float16)
    >>> w = np.ones((2, 8, 8), np.float16) / 8
    >>> experts = np.array([[0], [1], [0]])
    >>> gates = np.ones((3, 1), np.float32)
    >>> parallel.expert_parallel_moe(
    ...     parallel.SelfCommunicator(), x, experts, gates, w, w, w
    ... ).shape
    (3, 8)

    x: (tokens, n), float16 or bfloat16, this rank's tokens; their number may differ between ranks.
    experts: integers (tokens, k): the experts of each token, numbered over all ranks in rank order.
        A token may name the same expert twice.
    gates: float32 (tokens, k): the factor of each expert's result.
    w_gate, w_up: (experts of this rank, n, inner), of x's dtype; the number of experts may differ
        between ranks.
    w_down: (experts of this rank, inner, n), of x's dtype.

    Each token is sent to the ranks of its experts.  All rows of an expert are multiplied together
    (`dual_gemm_silu`, `matmul`).  Results of x's dtype are sent back and summed in FP32 in the
    order of `experts`, so that bits do not depend on the order of arrival.  Row counts are read on
    the host, which synchronises with the GPU.  Sends 2 n itemsize bytes in total for each token and
    expert on another rank.

    Returns (tokens, n) of x's dtype.  Raises TypeError and ValueError (shapes, an expert number out
    of range), the same on all ranks, NotImplementedError while a CUDA graph is captured, and
    CommunicationError.  Error bound: `reference.parallel.expert_parallel_moe_bound`.
    """

    def facts() -> Facts:
        if comm.size > 1 and not comm.agrees:
            raise NotImplementedError("numbers of rows are read on the host: no graph holds them")
        _check(comm, x, experts, gates, (w_gate, w_up, w_down))
        same = {"x": described(x, 0), "experts": described(experts, 0)}
        weights = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
        same |= {name: described(w, 0) for name, w in weights.items()}
        return Facts(same, (len(x), len(w_gate)))

    with agreed(comm, "expert_parallel_moe", facts) as own:
        chosen = to_numpy(experts).reshape(-1).astype(np.int64)
        parts = consecutive(own[:, 1].tolist())
        agree(comm, "expert_parallel_moe", lambda: _check_experts(chosen, parts[-1].stop))
        copies = np.argsort(chosen, kind="stable")  # sorted by expert; copy i is of token i // k
        counts = _gathered_counts(comm, np.bincount(chosen, minlength=parts[-1].stop))
        xp, k = namespace(x), experts.shape[1]
        sent = take(x, xp.asarray(copies // k))
        arrived = _exchanged(comm, sent, counts, parts)
        order = _by_expert(counts[:, parts[comm.rank]])
        rows = take(arrived, xp.asarray(order))
        done = _experts(rows, counts[:, parts[comm.rank]].sum(axis=0), w_gate, w_up, w_down)
        back = take(done, xp.asarray(np.argsort(order)))
        found = _returned(comm, back, counts, parts)
        return _combined(take(found, xp.asarray(np.argsort(copies))), gates, x)


def _check(
    comm: Communicator, x: Array, experts: Array, gates: Array, weights: tuple[Any, Any, Any]
) -> None:
    """Check the arguments.  Raises TypeError, ValueError and NotImplementedError."""
    arguments.target_of("x", x)
    comm.check_array("x", x)
    dtypes.resolve(x.dtype, "x's dtype", (dtypes.float16, dtypes.bfloat16))
    if x.ndim != 2:
        raise ValueError(f"x must have 2 dims; got shape {x.shape}")
    for name, one in (("experts", experts), ("gates", gates)):
        arguments.same_place(name, one, x)
        if one.ndim != 2 or len(one) != len(x) or one.shape[1] < 1:
            raise ValueError(f"{name} must have shape ({len(x)}, k); got {one.shape}")
    if experts.dtype.kind not in "iu":
        raise TypeError(f"experts must be integers; got {experts.dtype}")
    dtypes.resolve(gates.dtype, "gates' dtype", (dtypes.float32,))
    if gates.shape != experts.shape:
        raise ValueError(f"gates must have experts' shape {experts.shape}; got {gates.shape}")
    for name, w in zip(("w_gate", "w_up", "w_down"), weights, strict=True):
        arguments.same_place(name, w, x)
        if w.dtype != x.dtype:
            raise TypeError(f"{name} must have x's dtype {x.dtype}; got {w.dtype}")
        if w.ndim != 3:
            raise ValueError(f"{name} must have 3 dims; got shape {w.shape}")
    count, n, inner = weights[0].shape
    wanted = {"w_gate": (count, x.shape[1], inner), "w_up": (count, n, inner)}
    wanted["w_down"] = (count, inner, n)
    for (name, shape), w in zip(wanted.items(), weights, strict=True):
        if w.shape != shape:
            raise ValueError(f"{name} must have shape {shape}; got {w.shape}")


def _check_experts(chosen: np.ndarray, count: int) -> Facts:
    wrong = chosen[(chosen < 0) | (chosen >= count)]
    if wrong.size:
        raise ValueError(f"experts must be in [0, {count}); got {wrong[0]}")
    return Facts({})


def _gathered_counts(comm: Communicator, counts: np.ndarray) -> np.ndarray:
    """(size, experts): the number of rows that each rank sends to each expert."""
    data = counts.astype(np.int64).tobytes()
    found = comm.gather_bytes(data, [len(data)] * comm.size)
    return np.array([np.frombuffer(x, np.int64) for x in found])


def _exchanged(comm: Communicator, sent: Array, counts: np.ndarray, parts: Sequence[slice]) -> Any:
    """The rows for this rank's experts: by source rank, then by expert."""
    to = consecutive([int(counts[comm.rank, part].sum()) for part in parts])
    of = consecutive(counts[:, parts[comm.rank]].sum(axis=1).tolist())
    return _moved(comm, sent, to, of)


def _returned(comm: Communicator, done: Array, counts: np.ndarray, parts: Sequence[slice]) -> Any:
    """Send the experts' results back to the tokens' ranks."""
    to = consecutive(counts[:, parts[comm.rank]].sum(axis=1).tolist())
    of = consecutive([int(counts[comm.rank, part].sum()) for part in parts])
    return _moved(comm, done, to, of)


def _moved(comm: Communicator, x: Array, to: Sequence[slice], of: Sequence[slice]) -> Any:
    """All-to-all: rows to[r] of x go to rank r, rows of[r] of the result come from rank r."""
    found = arrays.empty_of(namespace(x), (of[-1].stop, *x.shape[1:]), x.dtype)
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    pending = comm.exchange(
        [(rank, x[to[rank]]) for rank in others], [(rank, found[of[rank]]) for rank in others]
    )
    arrays.assign(found[of[comm.rank]], x[to[comm.rank]])
    pending.wait()
    return found


def _by_expert(counts: np.ndarray) -> np.ndarray:
    """The permutation that sorts rows by expert, if they are ordered by rank, then by expert."""
    expert = np.arange(counts.shape[1])
    return np.argsort(np.concatenate([expert.repeat(of) for of in counts]), kind="stable")


def _experts(rows: Array, counts: np.ndarray, w_gate: Array, w_up: Array, w_down: Array) -> Any:
    found = arrays.empty_of(namespace(rows), rows.shape, rows.dtype)
    for expert, part in enumerate(consecutive(counts.tolist())):
        if length(part):
            inner = cupykern.dual_gemm_silu(rows[part], w_gate[expert], w_up[expert])
            cupykern.matmul(inner, w_down[expert], out=found[part])
    return found


def _combined(found: Array, gates: Array, x: Array) -> Any:
    """The gated sums over each token's experts: FP32, rounded to x's dtype."""
    tokens, k = gates.shape
    found = found.reshape(tokens, k, x.shape[1])
    with np.errstate(all="ignore"):
        total = gates[:, :1] * found[:, 0].astype(np.float32)
        for i in range(1, k):
            total += gates[:, i : i + 1] * found[:, i].astype(np.float32)
        return total.astype(x.dtype)
