"""Problems of cascade_attention, as those of an op."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import cupykern
from cupykern import dtypes, inputs, reference
from cupykern.op import Call, Draw, Op, Work
from cupykern.ops.problems import decode_attention as decode
from cupykern.ops.problems.attention import NO_OPTIONS
from cupykern.ops.problems.decode_attention import DecodeProblem


@dataclass(frozen=True)
class CascadeProblem:
    """own: of the sequences' own keys.  shared: keys before them."""

    own: DecodeProblem
    shared: int
    softcap: float | None = None

    @property
    def dtype(self) -> str:
        return self.own.dtype


def draw_problem(draw: Draw) -> CascadeProblem:
    own = replace(decode.draw_problem(draw), options=NO_OPTIONS, causal=True)
    own = replace(own, queries=min(own.queries, draw.choice((1, 4, 33, 64))))
    return CascadeProblem(own, draw.choice((0, 1, 33, 200, 520)), draw.choice((None, None, 3.0)))


def make_inputs(problem: CascadeProblem, seed: int, xp: Any) -> Call:
    p, dtype = problem.own, dtypes.NAMES[problem.own.dtype]
    call = decode.make_inputs(p, seed, xp)
    shared = []
    for i, dim in enumerate((p.dim, p.dim_v or p.dim)):
        x = inputs.values(p.kind, (1, p.kv_heads, problem.shared, dim), dtype, seed + 10 + i)
        if p.layout == "nhd":
            x = np.ascontiguousarray(x.swapaxes(1, 2))
        shared.append(decode.stored(x, p.view, xp))
    kwargs = call.kwargs if problem.softcap is None else {**call.kwargs, "softcap": problem.softcap}
    return Call((call.args[0], *shared, *call.args[1:]), kwargs)


def _nothing(*_: Any) -> Any:
    raise NotImplementedError


OP = Op(
    name="cascade_attention",
    run=cupykern.cascade_attention,
    reference=reference.cascade_attention,
    bound=reference.cascade_attention_bound,
    draw_problem=draw_problem,
    bench_problem=_nothing,
    bench_shapes=_nothing,
    inputs=make_inputs,
    work=lambda problem: Work(0, 0),
    variants=_nothing,
    configs=_nothing,
    variant=_nothing,
    sample=_nothing,
)
