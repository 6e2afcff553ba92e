"""Wrong arguments of one rank or of all: every rank raises the same error, and the communicator
stays usable.  The function is a check, on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

import cupykern
from cupykern import parallel

from .agreement import same_on_all_ranks
from .common import numbers

_NOTHING = "nope", 1j, [1], object(), np.ones(2)
"""Wrong for every argument: no array, number, name, flag or dtype that a function takes."""
_ERRORS = TypeError, ValueError, NotImplementedError


class Call(NamedTuple):
    """A call that is right.  given: its arguments.  alone: dims of arguments that may differ
    between ranks without another argument changing.  wrong: further wrong values of arguments."""

    name: str
    given: dict[str, Any]
    alone: Mapping[str, int] = {}
    wrong: Mapping[str, tuple[Any, ...]] = {}


def wrong_values(call: Call, name: str) -> Iterator[Any]:
    """Values of an argument that are wrong if the other ranks' are right."""
    good = call.given[name]
    yield from call.wrong.get(name, ())
    yield from _NOTHING
    if not isinstance(good, np.ndarray):
        return
    yield None
    yield good.astype(np.complex64)
    yield good.astype(np.float64 if good.dtype != np.float64 else np.float32)
    yield good.astype(good.dtype.newbyteorder()) if good.dtype.kind in "fi" else good.tolist()
    yield np.ma.masked_array(good.astype(np.float32))
    yield good[None]
    yield good[..., 0]
    yield np.array(1.0, np.float32)
    for axis in range(good.ndim):
        if axis != call.alone.get(name):
            yield np.concatenate((good, good.take([0], axis)), axis)


def calls(rank: int, size: int) -> Iterator[Call]:
    """Each function, with every argument."""
    yield from _row_products(rank, size)
    yield from _column_products(rank, size)
    yield from _norms(rank, size)
    yield from _sums(size)
    yield from _vocabulary(size)
    yield from _attention()
    yield from _experts(size)


M, K, N = 2, 256, 8
"""Rows of each rank; K of each rank, so that scales can be by block; columns."""


def _row_products(rank: int, size: int) -> Iterator[Call]:
    m, a, b, bias = M * size, numbers(1, M * size, K), numbers(2, K, N), numbers(3, N)
    qa, qb = (cupykern.quantize(x.astype(np.float32), "e4m3")[0] for x in (a, b))
    options = {"activation": "gelu", "alpha": 2.0, "out_dtype": "float32", "precision": "float32"}
    blocks_a, blocks_b = np.ones((m, 2), np.float32), np.ones((2, 1), np.float32)
    by_row, by_column = np.ones((m, 1), np.float32), np.ones((1, N), np.float32)
    for output in ("rows", "replicated"):
        residual = numbers(4, M if output == "rows" else m, N)
        added = {"bias": bias, "residual": residual, "output": output}
        wrong = {"alpha": (float("nan"), 1e39), "residual": (residual[:1],)}
        yield Call("row_parallel_matmul", {"a": a, "b": b, **options, **added}, wrong=wrong)
    yield Call(
        "row_parallel_scaled_mm",
        {
            "a": qa,
            "b": qb,
            "scale_a": blocks_a,
            "scale_b": blocks_b,
            **added,
            "activation": "silu",
            "out_dtype": "float16",
        },
        wrong={"scale_a": (by_row, np.ones((m, 3), np.float32)), "scale_b": (by_column, 1e39)},
    )
    not_one = np.ones(5, np.float32), float("nan"), 1e39, by_row
    yield Call(
        "row_parallel_scaled_mm",
        {"a": qa, "b": qb, "scale_a": 0.5, "scale_b": 2.0, "output": "rows"},
        wrong={"scale_a": not_one, "scale_b": not_one},
    )
    options = {"out_dtype": "float32", "precision": "float32", "output": "replicated"}
    gated = {"a": a, "b1": b, "b2": b, **options}
    yield Call("row_parallel_dual_gemm_silu", gated, wrong={"b2": (qb,)})


def _column_products(rank: int, size: int) -> Iterator[Call]:
    m, a, b, bias = M * size, numbers(1, M * size, K), numbers(2, K, N), numbers(3, N)
    qa, by_row = cupykern.quantize(a.astype(np.float32), "e4m3", granularity="row")
    qb, by_column = cupykern.quantize(b.astype(np.float32), "e4m3", granularity="column")
    blocks_a, blocks_b = np.ones((m, 2), np.float32), np.ones((2, 1), np.float32)
    options = {"activation": "gelu", "alpha": 2.0, "out_dtype": "float32", "precision": "float32"}
    for input, output in (("rows", "replicated"), ("replicated", "columns")):
        own = slice(None) if input == "replicated" else slice(M * rank, M * rank + M)
        where, residual = {"input": input, "output": output}, numbers(4, m, N)
        yield Call(
            "column_parallel_matmul",
            {"a": a[own], "b": b, "bias": bias, "residual": residual, **options, **where},
            alone={"a": 0} if input == "rows" else {},
            wrong={"residual": (residual[:3], residual[:, :3])},
        )
        scales = {"scale_a": by_row[own], "scale_b": by_column}
        added = {"bias": bias, "activation": "silu", "out_dtype": "float16"}
        yield Call(
            "column_parallel_scaled_mm",
            {"a": qa[own], "b": qb, **scales, **added, **where},
            wrong={"scale_a": (blocks_a[own],), "scale_b": (blocks_b, by_column[:, :3])},
        )
        scales = {"scale_a": by_row[own], "scale_b1": by_column, "scale_b2": by_column}
        policy = {"policy": "hybrid", "out_dtype": "float16"}
        yield Call(
            "column_parallel_dual_gemm_silu",
            {"a": qa[own], "b1": qb, "b2": qb, **scales, **policy, **where},
            wrong={"b2": (b,), "scale_b1": (blocks_b,), "scale_b2": (by_column[:, :3],)},
        )


def _norms(rank: int, size: int) -> Iterator[Call]:
    x, weight, residual = numbers(5, M * size, N), numbers(6, N), numbers(4, M * size, N)
    wrong = {"eps": (-1.0, float("nan"))}
    for name, output in (("sequence_parallel", "replicated"), ("all_reduce", "rows")):
        part = residual[M * rank : M * rank + M] if output == "rows" else residual
        options = {"weight": weight, "eps": 1e-5, "residual": part, "output": output}
        yield Call(f"{name}_rms_norm", {"x": x, **options}, wrong=wrong)
        yield Call(f"{name}_layer_norm", {"x": x, "bias": weight, **options}, wrong=wrong)


def _sums(size: int) -> Iterator[Call]:
    x = numbers(5, M * size, N)
    yield Call("all_gather", {"x": x}, alone={"x": 0})
    yield Call("reduce_scatter", {"x": x})
    yield Call("all_reduce", {"x": x, "dtype": "float32"}, wrong={"dtype": ("int8", "float64")})


def _vocabulary(size: int) -> Iterator[Call]:
    m, x = M * size, numbers(5, M * size, N)
    options = {"alone": {"x": 1}, "wrong": {"x": (x[:, :0],), "scale": (1e39, float("nan"))}}
    for name in ("softmax", "log_softmax"):
        given = {"x": x, "scale": 0.5, "dtype": "float32"}
        yield Call(f"vocabulary_parallel_{name}", given, **options)
    entropy = {"x": x, "targets": np.arange(m), "scale": 0.5}
    yield Call("vocabulary_parallel_cross_entropy", entropy, **options)
    yield Call("vocabulary_parallel_argmax", {"x": x}, **options)
    sample = {"x": x, "draws": np.full(m, 0.5), "temperature": 0.5}
    wrong = {"temperature": (0.0, -1.0, 3e38, float("nan"), np.float32(2), np.array(0.25))}
    yield Call("vocabulary_parallel_sample", sample, {"x": 1}, wrong)


def _attention() -> Iterator[Call]:
    q, kv = numbers(7, 1, 4, 2, 16), numbers(8, 1, 2, 2, 16)
    given = {"q": q, "k": kv, "v": kv, "scale": 0.5, "softcap": 3.0}
    given |= {"layout": "bhsd", "return_lse": True}
    wrong = {"scale": (float("nan"), 3.4e38), "softcap": (0.0, -1.0), "layout": ("bshd",)}
    wrong["q"] = q[:, :3], q[..., :8], numbers(7, 1, 4, 2, 300)
    for causal in (False, True):
        alone = {} if causal else {"q": 2}
        yield Call("ring_attention", {**given, "causal": causal}, alone, wrong)


def _experts(size: int) -> Iterator[Call]:
    m, x = M * size, numbers(5, M * size, N)
    weights = {name: numbers(9, 2, N, N) for name in ("w_gate", "w_up", "w_down")}
    experts, gates = np.arange(2 * m).reshape(m, 2) % (2 * size), np.ones((m, 2), np.float32)
    given = {"x": x, "experts": experts, "gates": gates, **weights}
    yield Call("expert_parallel_moe", given, wrong={"experts": (experts - 1, experts + 1)})


def _outcome(comm: parallel.Communicator, call: Call, **changed: Any) -> Exception | None:
    try:
        getattr(parallel, call.name)(comm, **{**call.given, **changed})
    except Exception as error:
        return error
    return None


def every_argument_raises_the_same_error_on_all_ranks(comm):
    """A value that the last rank's own check accepts, it being only unlike the others', may be
    wrong nevertheless, and is then given to all ranks.  Every value on two ranks, every third on
    more, which wait for each other longer."""
    alone, last = parallel.SelfCommunicator(), comm.size - 1
    comm.timeout = 5.0
    for call in calls(comm.rank, comm.size):
        assert _outcome(comm, call) is None, call.name
        said = []
        for name in call.given:
            for number, value in enumerate(wrong_values(call, name)):
                if comm.size > 2 and (number + comm.size) % 3:
                    continue
                error = _outcome(comm, call, **({name: value} if comm.rank == last else {}))
                said.append(_text(error, call, name, value, _ERRORS))
                if f"{call.name}: rank {last}: " not in str(error):
                    error = _outcome(comm, call, **{name: value})
                    said.append(_text(error, call, name, value, (*_ERRORS, type(None))))
                elif comm.rank == 0:
                    error = _outcome(alone, call, **{name: value})
                    _text(error, call, name, value, (*_ERRORS, type(None)))
        same_on_all_ranks(comm, "\n".join(said))
        assert _outcome(comm, call) is None, call.name


def _text(error: Any, call: Call, name: str, value: Any, allowed: tuple[type, ...]) -> str:
    """The error's type and message; it must be of an allowed type."""
    assert type(error) in allowed, f"{call.name}({name}={value!r:.200}): {error!r}"
    return f"{type(error).__name__}: {error}"
