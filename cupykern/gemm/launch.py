"""Launch products whose arguments are checked: plan the first call, reuse its plan later."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np

from .. import arguments
from ..arrays import assign, maker, packed
from ..runtime import plans
from ..targets import Target
from ..typing import Array
from . import gemm, product
from .copied_plan import CopiedPlan, conversions, copies
from .gemm import AnyConfig, AnyPlan
from .product import Formula, Product
from .row_reductions import IDENTITIES


def launch_known(known: tuple[Any, ...], given: tuple[Any, ...], out: Array | None) -> Any:
    """Launch a call whose plan plans.find returned as `known`, and return its result.

    given: the arrays, in the order of `run`'s argument `given`.
    """
    target, plan, pick, shape, out_dtype, more = known
    y = maker(target.xp)(shape, out_dtype) if out is None else out
    if more:
        others = [maker(target.xp)(*one) for one in more]
        plan.launch(target.xp, pick((*given, *others, None, y)))
        return (y, *others)
    plan.launch(target.xp, pick((*given, None, y)))
    return y


def run_step(
    target: Target,
    operands: dict[str, Any],
    shape: tuple[int, ...],
    out_dtype: np.dtype,
    out: Array | None,
    config: AnyConfig | None,
    key: Any,
    **options: Any,
) -> Any:
    """`run` for a product that is one step of a call with several launches.

    key: the key of plans.find together with the step's name; later calls with an equal key reuse
    the plan.  None: nothing is reused, because the call's arrays do not determine the step's.
    """
    known = plans.recall(key)
    if known is not None:
        with arguments.on_device(target):
            return launch_known(known, tuple(operands.values()), out)
    names = tuple(operands)
    return run(target, operands, shape, out_dtype, out, config, key, names, **options)


def _picker(
    names: tuple[str, ...], given: tuple[str, ...], arrays: dict[str, Any]
) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that picks the kernel's arrays `names` from (*given, None, result)."""
    places = {name: i for i, name in enumerate(given) if arrays.get(name) is not None}
    places["out"] = len(given) + 1
    return itemgetter(*(places.get(name, len(given)) for name in names))


def run(
    target: Target,
    operands: dict[str, Any],
    shape: tuple[int, ...],
    out_dtype: np.dtype,
    out: Array | None,
    config: AnyConfig | None,
    key: Any = None,
    given: tuple[str, ...] = (),
    more: tuple[np.dtype, ...] = (),
    **options: Any,
) -> Any:
    """Launch a product whose arguments are checked.

    operands: the arrays of `product.ARRAYS` by name; missing or None if absent.
    key: the key of plans.find, if it was given these arrays or arrays that begin at their
        addresses; else None.
    given: the names of the arrays, in the order in which `launch_known` will get them.
    more: the dtypes of the formula's results after the first; if not empty, all results are
        returned as a tuple.
    options: the other fields of Product (`formula` has None for each array in `operands`), and
        `blocked`: the names of scale operands in blocked layout;
        `k`: K, if a does not have K columns;
        `complete`: (product, config) -> (complete product, further kernel arrays by name).
    """
    if out is not None:
        arguments.check_new_out(out, shape, out_dtype, operands)
    with arguments.on_device(target):
        y = maker(target.xp)(shape, out_dtype) if out is None else out
        formula: Formula | None = options.get("formula")
        shapes = formula.shapes(shape) if formula is not None and more else ()
        results = tuple(zip(shapes, more, strict=True))
        others = [maker(target.xp)(*one) for one in results]
        result = (y, *others) if more else y
        if y.size == 0:
            _fill_rows(formula, others)
            return result
        if formula is not None and more:
            names = product.OPERANDS[len(formula.operands) - len(more) :]
            named = dict(zip(names, others, strict=False))
            operands, given = operands | named, (*given, *named)
        arrays = {name: x for name, x in operands.items() if x is not None}
        matrices: dict[str, Any] = {
            name: product.matrix(x, shape[:-2]) for name, x in arrays.items()
        }
        fields: dict[str, Any] = {"alpha": 1.0, "activation": None, "bias": None, "residual": None}
        fields |= {"scale_a": None, "scale_b": None, **options}
        k, blocked = fields.pop("k", None), fields.pop("blocked", ())
        complete = fields.pop("complete", None)
        k = arrays["a"].shape[-1] if k is None else k
        for name, found in reversed(matrices.items()):  # b before a
            # Rare: strides that are not multiples of the itemsize, or an a that needs a copy
            # because b is NVFP4.
            if found is None or (
                name == "a" and product.must_be_copied(found, matrices["b"], k, shape[-2])
            ):
                key = None
                arrays[name] = packed(arrays[name])
                matrices[name] = product.matrix(arrays[name], shape[:-2])
        place = product.matrix(y, shape[:-2])
        if place is None:
            assign(y, run(target, operands, shape, out_dtype, None, config, **options))
            return result
        if "formula" in fields:
            fields["formula"] = fields["formula"].of(matrices)
        for name, found in matrices.items():
            if name in product.OPERANDS:
                continue
            if name in product.GROUPS:
                found = product.groups(found, k, name in blocked)
            fields[name] = found
        call = Product(batch=shape[:-2], m=shape[-2], n=shape[-1], k=k, out=place, **fields)
        copied = conversions(arrays, matrices)
        if copied:
            converted: dict[str, Any] = {copy.name: copy.matrix(shape[:-2]) for copy in copied}
            call = call._replace(stored=(call.a.dtype, call.b.dtype), **converted)
        elif config is None:
            kinds = (options.get(name, False) for name in ("block_scales", "fp16_accumulate"))
            all_copied = copies(arrays, matrices, shape[-2], shape[-1], k, *kinds)
            for copied in ((), all_copied[:1], all_copied):
                found = {copy.name: copy.matrix(shape[:-2]) for copy in copied}
                if copied == all_copied or gemm.runs_skinny(target, call._replace(**found)):
                    call = call._replace(**found)
                    break
        extra = {}
        if complete is not None:
            config = gemm.FAMILY.config(gemm.task_of(call), target, config)
            call, extra = complete(call, config)
        plan = _plan(target, call, config)
        if plan is None:  # rare: too many batch dims that do not merge
            for i in range(shape[0]):
                part = {
                    name: x[i if x.shape[0] > 1 else 0] if x.ndim == len(shape) else x
                    for name, x in arrays.items()
                }
                if call.formula is not None:
                    first = call.formula.first_matrix + i * math.prod(shape[1:-2])
                    options["formula"] = options["formula"]._replace(first_matrix=first)
                run(target, part, shape[1:], out_dtype, y[i], config, **options)
            return result
        arrays |= {"out": y, **extra}
        names = call.array_names
        if copied:
            copiers = ((names.index(copy.name), copy.copier(target)) for copy in copied)
            plan = CopiedPlan(tuple(copiers), plan)
        plans.remember(
            key, (target, plan, _picker(names, given, arrays), shape, out_dtype, results)
        )
        plan.launch(target.xp, tuple(map(arrays.get, names)))
    return result


def _fill_rows(formula: Formula | None, others: list[Any]) -> None:
    """Fill the row reductions among `others` with their identities, for rows without columns."""
    if formula is None or not others:
        return
    first = len(formula.operands) - len(others)
    for k, reduction in formula.reductions:
        others[k - first].fill(IDENTITIES[reduction])


@plans.cached
def _plan(target: Target, call: Product, config: AnyConfig | None) -> AnyPlan | None:
    return gemm.gemm_plan(target, call, config)
