"""Any array of any op may have strides, and an address, of some odd number of bytes."""

from __future__ import annotations

import numpy as np
import pytest

import cupykern
from cupykern import check
from cupykern.op import Op, RandomDraw, as_tuple
from cupykern.targets import host


def by_odd_bytes(x):
    """x's elements, each with a byte before it."""
    fields = {"names": ["x"], "formats": [x.dtype], "offsets": [1], "itemsize": x.itemsize + 1}
    made = np.empty(x.shape, np.dtype(fields))["x"]
    made[...] = x
    return made


def arrays_of(op: Op, cases: int):
    """(call, arguments, the keyword or place of one that is an array of wide elements), of seeded problems."""
    found: dict[str | int, int] = {}
    for seed in range(40):
        problem = op.draw_problem(RandomDraw(seed))
        call = op.inputs(problem, seed, np)
        arguments = {**dict(enumerate(call.args)), **call.kwargs}
        for name, x in arguments.items():
            wide = isinstance(x, np.ndarray) and x.itemsize > 1 and x.size
            if wide and "special" not in repr(problem) and found.get(name, 0) < cases:
                found[name] = found.get(name, 0) + 1
                yield call, arguments, name


@pytest.mark.parametrize("op", cupykern.OPS, ids=lambda op: op.name)
def test_elements_at_odd_bytes(op):
    with host.use(warp_size=32):
        for call, arguments, name in arrays_of(op, 2):
            given = arguments | {name: by_odd_bytes(arguments[name])}
            args = [given.pop(i) for i in range(len(call.args))]
            references = op.reference(*args, **given)
            bounds = op.bound(*args, **given, reference=references)
            outputs = as_tuple(op.run(*args, **given))
            assert check.compare(outputs, references, bounds).ok, name
            if check.accepts_out(op):
                y = by_odd_bytes(np.zeros_like(outputs[0]))
                outputs = as_tuple(op.run(*args, **given, out=y))
                assert outputs[0] is y
                assert check.compare(outputs, references, bounds).ok, name
