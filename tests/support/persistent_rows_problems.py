"""Configs and problems of PersistentRows."""

from __future__ import annotations

from dataclasses import replace

from cupykern.op import Op
from cupykern.ops.norm import ADD_OP, LAYER_OP, RMS_OP
from cupykern.ops.problems.norm import NormProblem
from cupykern.rows.norm_configs import PersistentRows

SMALL = PersistentRows(128, 8, 2, stages=5)


CONFIGS = {  # few and small: each is compiled for every op and dtype that it meets
    "float16": SMALL,  # a row in registers
    "bfloat16": replace(SMALL, vectors_per_thread=3, cluster_size=4, stages=3),  # read again
    "float32": replace(SMALL, vector_width=4, cluster_size=2),
}


OPS = {op.name: op for op in (LAYER_OP, RMS_OP, ADD_OP)}


def problem_of(
    op: Op, shape: tuple[int, int], dtype: str, kind: str = "normal", return_stats: bool = False
):
    bias = dtype if op is LAYER_OP else None
    return NormProblem(
        shape,
        dtype,
        weight_dtype=dtype,
        bias_dtype=bias,
        residual=op is ADD_OP,
        kind=kind,
        return_stats=return_stats,
        mean=-2.0,
    )
