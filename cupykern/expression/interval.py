"""Interval arithmetic on trees: the range of a formula over ranges of its names.

An interval contains every value of the formula, also as computed in FP32: each operation on reals
widens it by more than the rounding error.  An unbounded interval may contain NaN.
cpp_attention.py writes the same arithmetic for kernels (kernels_cu/expression/interval.cuh).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .tree import BOOLEAN, INTEGER, Node

_WIDER, _LEAST = 2.0**-20, 2.0**-120  # relative and absolute widening of reals
_LARGEST = float(np.finfo(np.float32).max) * (1 - 2.0**-20)
EXACT = 2.0**53  # integers beyond it get an unbounded interval


class Interval(NamedTuple):
    """[lo, hi], FP64 arrays or numbers; booleans are 0 and 1."""

    lo: Any
    hi: Any


Load = Callable[[Node, Sequence[Interval]], Interval]
UNKNOWN = Interval(-np.inf, np.inf)


def unknown(node: Node, indices: Sequence[Interval]) -> Interval:
    """The interval of array elements that are not read: unbounded."""
    return UNKNOWN


def evaluate(
    nodes: Sequence[Node],
    names: Mapping[str, Interval],
    load: Load = unknown,
    numbers: Sequence[float | None] = (),
) -> list[Interval]:
    """The interval of every node.  load: gives the interval of array elements.  numbers: values of
    operands, None for arrays."""
    found: list[Interval] = []
    with np.errstate(all="ignore"):
        for node in nodes:
            args = [found[arg] for arg in node.args]
            if node.op == "literal":
                exact = node.number
                number = float(exact) if node.kind == INTEGER else float(np.float32(exact))
                value = Interval(number, number)
            elif node.op == "name":
                value = names[node.value]
            elif node.op == "operand":
                known = numbers[int(node.value)] if numbers else None
                value = UNKNOWN if known is None else Interval(known, known)
            elif node.op == "load":
                value = load(node, args)
            elif node.kind == BOOLEAN:
                value = _boolean(node.op, args)
            elif node.kind == INTEGER:
                value = _checked(_integer(node, args), EXACT)
            else:
                value = _real(node.op, args)
            found.append(Interval(*(np.asarray(x, np.float64) for x in value)))
    return found


def _wild(x: Interval) -> Any:
    """Whether a real is unbounded on both sides: it can have any value, also NaN."""
    return ~((x.lo > -np.inf) | (x.hi < np.inf))


def _checked(x: Interval, most: float) -> Interval:
    """x, made unbounded where an end is NaN or reaches `most` in magnitude."""
    bad = ~((x.lo > -most) & (x.hi < most))
    return Interval(np.where(bad, -np.inf, x.lo), np.where(bad, np.inf, x.hi))


def _corners(function: Any, a: Interval, b: Interval) -> Interval:
    corners = [function(x, y) for x in a for y in b]
    lo, hi = corners[0], corners[0]
    for x in corners[1:]:  # np.minimum and np.maximum propagate NaN
        lo, hi = np.minimum(lo, x), np.maximum(hi, x)
    return Interval(lo, hi)


def _monotone(op: str, args: Sequence[Interval]) -> Interval | None:
    """The interval of an operation defined for both integers and reals; None for others."""
    a, b = args[0], args[-1]
    if op == "add":
        return Interval(a.lo + b.lo, a.hi + b.hi)
    if op == "subtract":
        return Interval(a.lo - b.hi, a.hi - b.lo)
    if op == "multiply":
        return _corners(np.multiply, a, b)
    if op == "negative":
        return Interval(-a.hi, -a.lo)
    if op == "abs":
        lo = np.where(a.lo > 0, a.lo, np.where(a.hi < 0, -a.hi, 0.0))
        return Interval(lo, np.maximum(-a.lo, a.hi))
    if op in ("minimum", "maximum"):
        choose = np.minimum if op == "minimum" else np.maximum
        return Interval(choose(a.lo, b.lo), choose(a.hi, b.hi))
    if op == "where":
        condition, a, b = args
        lo = np.where(
            condition.lo > 0, a.lo, np.where(condition.hi > 0, np.minimum(a.lo, b.lo), b.lo)
        )
        hi = np.where(
            condition.lo > 0, a.hi, np.where(condition.hi > 0, np.maximum(a.hi, b.hi), b.hi)
        )
        return Interval(lo, hi)
    return None


def _integer(node: Node, args: Sequence[Interval]) -> Interval:
    known = _monotone(node.op, args)
    if known is not None:
        return known
    a, by = args[0], args[1].lo  # a literal
    quotients = np.floor(a.lo / by), np.floor(a.hi / by)
    if node.op == "floor_divide":
        return Interval(np.minimum(*quotients), np.maximum(*quotients))
    same = quotients[0] == quotients[1]
    lo = np.where(same, a.lo - quotients[0] * by, np.where(by > 0, 0.0, by + 1))
    return Interval(lo, np.where(same, a.hi - quotients[0] * by, np.where(by > 0, by - 1, 0.0)))


def _real(op: str, args: Sequence[Interval]) -> Interval:
    if op == "where":
        chosen = _monotone(op, args)
        assert chosen is not None
        return chosen
    wild: Any = False
    for x in args:
        wild = wild | _wild(x)
    a, b = args[0], args[-1]
    if op == "real":
        found: Interval | None = a
    elif op == "floor":
        found = Interval(np.floor(a.lo), np.floor(a.hi))
    elif op == "divide":
        found = _corners(np.divide, a, b)
        wild = wild | ((b.lo <= 0) & (b.hi >= 0))
    else:
        found = _monotone(op, args)
    if found is None:
        return UNKNOWN
    if op not in ("negative", "abs", "minimum", "maximum", "floor"):
        lo = found.lo - (np.abs(found.lo) * _WIDER + _LEAST)
        hi = found.hi + (np.abs(found.hi) * _WIDER + _LEAST)
        found = Interval(np.where(lo < -_LARGEST, -np.inf, lo), np.where(hi > _LARGEST, np.inf, hi))
    wild = wild | np.isnan(found.lo) | np.isnan(found.hi)
    return Interval(np.where(wild, -np.inf, found.lo), np.where(wild, np.inf, found.hi))


def _boolean(op: str, args: Sequence[Interval]) -> Interval:
    """lo is 1 if certainly true, hi is 1 if possibly true."""
    a, b = args[0], args[-1]
    if op == "where":
        chosen = _monotone(op, args)
        assert chosen is not None
        return chosen
    if op == "not":
        return Interval(1.0 - a.hi, 1.0 - a.lo)
    if op in ("and", "or"):
        choose = np.minimum if op == "and" else np.maximum
        return Interval(choose(a.lo, b.lo), choose(a.hi, b.hi))
    if op == "isnan":
        return Interval(np.zeros_like(a.lo), np.where(_wild(a), 1.0, 0.0))
    wild = _wild(a) | _wild(b)  # NaN compares false, except that != is true
    if op == "less":
        sure, never = a.hi < b.lo, a.lo >= b.hi
    elif op == "less_equal":
        sure, never = a.hi <= b.lo, a.lo > b.hi
    else:
        point = (a.lo == a.hi) & (b.lo == b.hi) & (a.lo == b.lo)
        apart = (a.hi < b.lo) | (b.hi < a.lo)
        sure, never = (point, apart) if op == "equal" else (apart, point)
    sure, never = sure & ~wild, never & ~wild
    return Interval(np.where(sure, 1.0, 0.0), np.where(never, 0.0, 1.0))
