"""Ops whose rows are walked by SpanRows, also where other configs are preferred."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cupykern import dtypes
from cupykern.op import Op
from cupykern.rows.configs import SpanRows
from cupykern.rows.softmax_heuristic import configs_of_any_length


def span_config(dtype: str, arch: str = "host") -> SpanRows:
    listed = configs_of_any_length(arch, dtypes.NAMES[dtype].itemsize)
    return next(config for config in listed if isinstance(config, SpanRows))


def on_spans(op: Op, problem: Any) -> Op:
    """`op` with the SpanRows of `problem`, or its preferred config where none fits."""
    spans = [c for c in op.configs(problem, "host") if isinstance(c, SpanRows)]

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return op.run(*args, **kwargs, config=spans[0])
        except ValueError as error:  # arrays that are not contiguous
            assert "config does not fit: SpanRows" in str(error)
            return op.run(*args, **kwargs)

    return replace(op, run=run) if spans else op
