"""Problems and checks of attention's Hopper kernel."""

from __future__ import annotations

import numpy as np

import cupykern
from cupykern import check
from cupykern.attention import attention_hopper
from cupykern.attention.attention_hopper import AttentionHopperConfig
from cupykern.op import Call, as_tuple
from cupykern.ops.attention import OP
from cupykern.ops.attention_varlen import OP as VARLEN_OP
from cupykern.ops.problems.attention import AttentionProblem, ScoreChoice, hopper_kind
from cupykern.ops.problems.attention_varlen import VarlenProblem

STATS = {"lse": True, "row_stats": True}

# Head sizes between powers of two: the last box of 64 dims used in part, fewer dims of v than of q.
SIZES = (
    AttentionProblem(1, 2, 1, 200, 300, 72, 80, **STATS),
    AttentionProblem(1, 2, 2, 300, 300, 96, 96, "bfloat16", causal=True, input_pos=0, **STATS),
    AttentionProblem(1, 2, 1, 150, 300, 192, 128, "bfloat16", layout="bshd", **STATS),
    AttentionProblem(1, 2, 1, 300, 500, 104, 112, mask="block", causal=True, input_pos=100,
                     options=ScoreChoice((150, -1), 2.0, "h", True), **STATS),
    AttentionProblem(1, 2, 1, 200, 300, 160, 72, causal=True, causal_align="bottom_right",
                     mask="bool", **STATS),
    VarlenProblem(((70, 90), (0, 5), (300, 430), (1, 333)), 2, 1, 192, 128, causal=True, lse=True,
                  options=ScoreChoice((100, -1), None, "bh", True), page=48),
    VarlenProblem(((70, 90), (0, 5), (200, 330)), 2, 1, 80, 80, causal=True, lse=True),
)  # fmt: skip

PROBLEMS = (
    AttentionProblem(2, 4, 2, 200, 300, 64, 64, **STATS),
    AttentionProblem(1, 1, 1, 300, 130, 64, 40, causal=True, input_pos=0, kind="peaked", **STATS),
    AttentionProblem(
        1, 2, 1, 200, 300, 40, 64, causal=True, causal_align="bottom_right", layout="bshd", lse=True
    ),
    AttentionProblem(1, 2, 2, 130, 140, 64, 64, view="padded", kind="special"),
    AttentionProblem(2, 2, 1, 300, 1500, 64, 64, mask="block", **STATS),
    AttentionProblem(
        2, 2, 1, 500, 700, 64, 64, mask="block", blocks=(64, 128), causal=True, input_pos=0
    ),
    AttentionProblem(1, 2, 1, 500, 700, 64, 64, mask="block", blocks=(128, 128), **STATS),
    AttentionProblem(2, 4, 2, 200, 300, 64, 64, mask="bool", **STATS),
    AttentionProblem(
        1,
        2,
        1,
        200,
        300,
        40,
        64,
        causal=True,
        causal_align="bottom_right",
        mask="bias",
        layout="bshd",
        kind="special",
        lse=True,
    ),
    AttentionProblem(
        1, 2, 1, 130, 200, 64, 64, causal=True, input_pos=0, scale=-0.3, kind="special", **STATS
    ),
    # Tiles of queries without keys beside others: the first rows see none.
    AttentionProblem(1, 3, 1, 600, 200, 64, 64, causal=True, causal_align="bottom_right", lse=True),
    VarlenProblem(((70, 90), (0, 5), (300, 130), (65, 0), (200, 500)), 2, 1, 64, 40, lse=True),
    VarlenProblem(((270, 90), (1, 1), (140, 300)), 2, 2, 40, 64, causal=True, view="padded"),
    # Windows: tiles at both edges, rows of which some see no key, tiles without keys.
    AttentionProblem(1, 2, 1, 400, 700, 64, 64, causal=True, causal_align="bottom_right",
                     options=ScoreChoice((250, -1)), **STATS),
    AttentionProblem(1, 2, 2, 600, 300, 64, 40, causal_align="top_left",
                     options=ScoreChoice((40, 70)), **STATS),
    AttentionProblem(2, 2, 1, 200, 300, 64, 64, input_pos=0, scale=-0.3, kind="peaked",
                     options=ScoreChoice((200, -1), 5.0, "bh", True), **STATS),
    AttentionProblem(2, 4, 2, 200, 300, 64, 64, causal=True, causal_align="bottom_right",
                     options=ScoreChoice(None, None, "h", True), lens=(300, 129), **STATS),
    AttentionProblem(3, 2, 1, 130, 200, 40, 40, layout="bshd", input_pos=0,
                     options=ScoreChoice((30, 30), 2.0), lens=(0, 200, 77), **STATS),
    AttentionProblem(1, 2, 1, 200, 300, 64, 64, mask="bias", input_pos=30,
                     options=ScoreChoice((90, 40), 2.0, "h", True), **STATS),
    AttentionProblem(1, 2, 1, 300, 500, 64, 64, mask="block", causal=True, input_pos=100,
                     options=ScoreChoice((150, -1), None, "h", True), **STATS),
    AttentionProblem(1, 2, 1, 500, 700, 64, 64, mask="block", blocks=(128, 128), input_pos=100,
                     options=ScoreChoice((150, 90), 3.0), **STATS),
    VarlenProblem(((70, 90), (0, 5), (300, 430), (65, 0), (200, 500)), 2, 1, 64, 64, causal=True,
                  options=ScoreChoice((100, -1), 2.0, "bh", True), lse=True),
    AttentionProblem(2, 4, 2, 200, 300, 64, 64, causal=True, causal_align="bottom_right",
                     mask="bool", options=ScoreChoice((100, -1), 2.0, "bh", True), lens=(300, 129),
                     **STATS),
    AttentionProblem(2, 2, 1, 300, 700, 64, 64, mask="block", causal=True, input_pos=300,
                     options=ScoreChoice((150, -1), None, "bh", True), lens=(700, 333), **STATS),
    # Pages: boxes of 16, 48, 64 and 128 keys; sequences that decode, are new, or have too few keys.
    VarlenProblem(((70, 90), (0, 5), (300, 430), (65, 0), (200, 100), (1, 333)), 2, 1, 64, 40,
                  causal=True, lse=True, page=16),
    VarlenProblem(((270, 90), (1, 1), (140, 300)), 2, 2, 40, 64, view="padded", page=64,
                  layout="nhd"),
    VarlenProblem(((70, 90), (0, 5), (300, 430), (65, 0), (200, 500)), 4, 2, 64, 64, causal=True,
                  options=ScoreChoice((100, -1), 2.0, "bh", True), lse=True, page=48, layout="nhd"),
    VarlenProblem(((70, 90), (300, 430)), 4, 2, 64, 64, causal=True, scale=-0.3, lse=True,
                  page=256),
    *SIZES,
)  # fmt: skip


def hopper(problem: AttentionProblem | VarlenProblem) -> AttentionHopperConfig:
    dims = attention_hopper.padded(problem.d, problem.dv)
    return attention_hopper.configs(dims, hopper_kind(problem))[0]


def compare(target, problem, config) -> check.Comparison:
    op = VARLEN_OP if isinstance(problem, VarlenProblem) else OP
    call = op.inputs(problem, 1, target.xp)
    references = op.reference(*call.args, **call.kwargs)
    bounds = op.bound(*call.args, **call.kwargs, reference=references)
    like = as_tuple(op.run(*call.args, **call.kwargs))[0]
    outputs = check.guarded_run(op, Call(call.args, {**call.kwargs, "config": config}), like)
    return check.compare(outputs, references, bounds)


def check_scores_that_grow(target):
    """From the last keys to the first ones; by more and by less than products are rescaled for."""
    xp = target.xp
    rows = np.linspace(0.2, 2, 70).astype(np.float16)
    q = np.repeat(rows, 64).reshape(1, 1, 70, 64)
    k = np.repeat(np.arange(600)[::-1] // 100 / 8, 64).astype(np.float16).reshape(1, 1, 600, 64)
    v = np.random.default_rng(1).standard_normal((1, 1, 600, 64)).astype(np.float16)
    args, kwargs = tuple(map(xp.asarray, (q, k, v))), {"scale": 1.0, "return_row_stats": True}
    references = OP.reference(*args, **kwargs)
    bounds = OP.bound(*args, **kwargs, reference=references)
    outputs = cupykern.attention(*args, **kwargs, config=AttentionHopperConfig(128, 128))
    assert check.compare(outputs, references, bounds).ok
