"""Any array of any op may have strides, and an address, of some odd number of bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from small_problems import is_small

import cupykern
from cupykern import arrays, check, inputs
from cupykern.numerics import to_numpy
from cupykern.op import Op, RandomDraw, as_tuple


def by_odd_bytes(x, before):
    """x's elements side by side at an odd address, or each with a byte `before` it."""
    if not before:
        made = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    else:
        fields = {"names": ["x"], "formats": [x.dtype], "offsets": [1], "itemsize": x.itemsize + 1}
        made = np.zeros(x.shape, np.dtype(fields))["x"]
    made[...] = x
    return made


def by_wide_strides(x):
    """x's elements, of which those of a row stay side by side, and every dim has a gap; of one dim
    every second element."""
    if x.ndim == 1:
        made = np.zeros(2 * x.size, x.dtype)[::2]
    else:
        *outer, last = x.shape
        wide = *(n + 1 for n in outer), last + 64 // x.itemsize
        made = np.zeros(wide, x.dtype)[tuple(map(slice, x.shape))]
    made[...] = x
    return made


def by_an_odd_stride(x):
    """x's elements, of which those of an entry of the first dim stay side by side, and entries
    begin an element late."""
    if x.ndim == 1:
        return by_wide_strides(x)
    step = (x[0].size + 1) * x.itemsize
    strides = step, *np.zeros(x.shape, np.dtype(f"V{x.itemsize}")).strides[1:]
    made = np.ndarray(x.shape, x.dtype, np.zeros(len(x) * step, np.uint8), 0, strides)
    made[...] = x
    return made


def by_an_odd_start(x):
    """x's elements side by side, an element after an aligned address."""
    made = np.zeros(x.size + 65, x.dtype)
    first = -made.ctypes.data % 64 // x.itemsize + 1
    made = made[first : first + x.size].reshape(x.shape)
    made[...] = x
    return made


PLACES = by_wide_strides, by_an_odd_stride, by_an_odd_start


def arrays_of(op: Op, cases: int, least: int = 2):
    """(arguments, keyword or place of an array with dims, of elements of at least `least` bytes,
    references and bounds of the results), of seeded problems."""
    found: dict[str | int, int] = {}
    for seed in range(40):
        problem = op.draw_problem(RandomDraw(seed))
        if not is_small(op, problem):
            continue
        call = op.inputs(problem, seed, np)
        arguments = {**dict(enumerate(call.args)), **call.kwargs}
        expected = None
        simple = not any(isinstance(x, cupykern.NvFp4 | cupykern.BlockMask) for x in call.args)
        full = all(getattr(x, "size", 1) for x in arguments.values())
        for name, x in arguments.items():
            wide = isinstance(x, np.ndarray) and x.itemsize >= least
            usual = simple and full and "special" not in repr(problem)
            if wide and usual and found.get(name, 0) < cases:
                found[name] = found.get(name, 0) + 1
                if expected is None:
                    references = op.reference(*call.args, **call.kwargs)
                    bounds = op.bound(*call.args, **call.kwargs, reference=references)
                    expected = references, bounds
                yield arguments, name, expected


def split(arguments):
    """Positional arguments and others."""
    return (
        [x for name, x in arguments.items() if isinstance(name, int)],
        {name: x for name, x in arguments.items() if isinstance(name, str)},
    )


@pytest.mark.thinned(4)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("op", cupykern.OPS, ids=lambda op: op.name)
def test_elements_may_lie_at_odd_bytes(target, op, before):
    xp = target.xp

    def move(x):
        return inputs.upload(x, xp) if xp is not np and isinstance(x, np.ndarray) else x

    for arguments, name, expected in arrays_of(op, 2):
        changed = arguments | {name: by_odd_bytes(arguments[name], before)}
        args, options = split({key: move(x) for key, x in changed.items()})
        for _ in range(2):  # a warm call too
            outputs = [to_numpy(y) for y in as_tuple(op.run(*args, **options))]
            assert check.compare(outputs, *expected).ok, name
        if check.accepts_out(op) and outputs[0].size and outputs[0].itemsize > 1:
            y = move(by_odd_bytes(np.zeros_like(outputs[0]), before))
            first, *rest = as_tuple(op.run(*args, **options, out=y))
            assert first is y
            outputs = [to_numpy(x) for x in (arrays.packed(y), *rest)]
            assert check.compare(outputs, *expected).ok, name


@pytest.mark.thinned(2)
@pytest.mark.parametrize("op", cupykern.OPS, ids=lambda op: op.name)
def test_an_array_has_strides_and_an_alignment_of_its_own(target, op):
    """One array at a time: those of no other array take their place."""
    xp, places = target.xp, itertools.cycle(PLACES)

    def move(x):
        return inputs.upload(x, xp) if xp is not np and isinstance(x, np.ndarray) else x

    def holds(arguments, expected, out=None):
        args, options = split({key: move(x) for key, x in arguments.items()})
        options |= {} if out is None else {"out": out}
        outputs = as_tuple(op.run(*args, **options))
        assert out is None or outputs[0] is out
        outputs = [to_numpy(arrays.packed(y)) for y in outputs]
        return check.compare(outputs, *expected).ok, outputs[0]

    for arguments, name, expected in arrays_of(op, len(PLACES), 1):
        if not arguments[name].ndim:
            continue
        place = next(places)
        ok, y = holds(arguments | {name: place(arguments[name])}, expected)
        assert ok, (name, place)
        if check.accepts_out(op) and y.ndim and "out" not in arguments:
            assert holds(arguments, expected, move(place(np.zeros_like(y))))[0], ("out", place)


def test_an_empty_result_may_have_any_strides():
    x = np.zeros((3, 0), np.float32)
    out = np.lib.stride_tricks.as_strided(x, strides=(0, 0))
    assert cupykern.softmax(x, out=out) is out
