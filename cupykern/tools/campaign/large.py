"""Calls on arrays of more than 2^31 elements; a seeded sample of each result is compared with FP64.

Samples contain the first and the last rows (columns, heads, sequences), 2^31 elements apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from ... import check
from ...op import Op, as_tuple
from ...targets import Target
from .bits import to_host
from .large_calls import Large, calls
from .tally import Tally, Task, find_op

_ELEMENTS = {"host": 2**13}  # small in NumPy, where the tests run them
_ELEMENTS_ON_GPU = 2**31 + 2**13
_SAMPLED = 1 << 18  # elements


def tasks(ops: Sequence[Op], count: int, seed: int, chunk: int) -> list[Task]:
    """count: repeats of each call, each with other values."""
    return [
        Task("large", f"{op.name} {label}", i, 1, seed)
        for i in range(count)
        for op in ops
        for label in calls(op)
    ]


def run(task: Task, target: Target) -> Tally:
    name, label = task.subject.split()
    op, seed, tally = find_op(name), task.seeds[0], Tally()
    elements = _ELEMENTS.get(target.name, _ELEMENTS_ON_GPU)
    try:
        made = calls(op)[label](op, elements, seed, target.xp)
        comparison = _compare(op, made, seed)
    except MemoryError as error:
        tally.note(f"{task.subject}: not run, {error}")
        return tally
    finally:
        if target.name != "host":
            target.xp.get_default_memory_pool().free_all_blocks()
    tally.add(name, made.dtype, comparison)
    if not comparison.ok:
        tally.fail(name, made.dtype, seed, f"{task.subject}, {made.shapes()}", str(comparison))
    return tally


def _compare(op: Op, made: Large, seed: int) -> check.Comparison:
    result = op.run(*made.call.args, **made.call.kwargs)
    if made.sample is not None:
        part, outputs = made.sample(made.call, result)
    else:
        part, outputs = op.sample(made.call, as_tuple(result), _SAMPLED, seed)
    if not made.on_device:
        part, outputs = to_host(part), to_host(outputs)
    references = op.reference(*part.args, **part.kwargs)
    bounds = op.bound(*part.args, **part.kwargs, reference=references)
    return check.compare(outputs, references, bounds)
