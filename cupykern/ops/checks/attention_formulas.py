"""Score and mask formulas of attention and their operands: read from arguments and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import arguments, dtypes
from ...arrays import in_elements, packed, steps_of
from ...attention.attention_task import ScoreOptions
from ...attention.formulas import MAX_OPERANDS, Formulas, OperandPlace, Ranges, check_indices
from ...expression import Expression, read
from ...expression.code import FormulaCode
from ...expression.cpp_attention import Code, FormulaOperand, source
from ...expression.parse import is_operand_name
from ...typing import Array, FormulaLike
from .formulas import DTYPES

CPP = {
    **{dtype: dtypes.CPP_NAMES[dtype] for dtype in DTYPES},
    np.dtype(np.int32): "int32_t",
    np.dtype(np.int64): "int64_t",
    np.dtype(np.bool_): "uint8_t",
}


class ReadFormulas(NamedTuple):
    """A score and a mask formula with their operands.

    key: what plans.find needs besides the arrays.  arrays: as given, in the order of `names`.
    names, numbers: name and value of each operand; the number is None for an array.
    """

    key: tuple[Any, ...] = ()
    arrays: tuple[Any, ...] = ()
    score: Expression | None = None
    mask: Expression | None = None
    names: tuple[str, ...] = ()
    numbers: tuple[float | None, ...] = ()

    @property
    def by_name(self) -> dict[str, Any]:
        """The operand arrays by name."""
        named = zip(self.names, self.numbers, strict=True)
        return dict(zip((n for n, number in named if number is None), self.arrays, strict=True))

    @property
    def needs_positions(self) -> str | None:
        """The formula, "score" or "mask", that uses the query's position i; None if neither."""
        for name, formula in (("score", self.score), ("mask", self.mask)):
            if formula and formula.uses("i"):
                return name
        return None


NONE = ReadFormulas()


def is_formula(mask: Any) -> bool:
    """Whether a mask is a formula, not an array or a BlockMask."""
    return isinstance(mask, (str, Expression)) or (
        callable(mask) and not hasattr(mask, "dtype") and not hasattr(mask, "block_mask_types")
    )


def read_formulas(score: FormulaLike | None, mask: Any, operands: Any, q: Array) -> ReadFormulas:
    """Read both formulas and their operands.  mask: None, or a formula.

    Raises SyntaxError, NameError, TypeError and ValueError.
    """
    if score is None and mask is None:
        if operands is None:
            return NONE
        raise ValueError("operands need a score or mask that is a formula")
    given = {} if operands is None else operands
    if not isinstance(given, dict):
        raise TypeError(f"operands must be a dict; got {type(operands).__name__}")
    for name in given:
        if not is_operand_name(name, "score"):
            raise ValueError(f"operands must have names that are free; got {name!r}")
    found = [
        None if x is None else read(x, scope) for x, scope in ((score, "score"), (mask, "mask"))
    ]
    names: dict[str, None] = {}
    for formula in found:
        if formula is not None:
            formula.check_names(given)
            names |= dict.fromkeys(formula.names)
    unused = ", ".join(repr(name) for name in given if name not in names)
    if unused:
        raise ValueError(f"score and mask do not name {unused}, which operands has")
    if len(names) > MAX_OPERANDS:
        raise ValueError(f"operands must be at most {MAX_OPERANDS}; got {len(names)}")
    numbers = tuple(
        arguments.number_of(f"operands[{name!r}]", given[name])
        if arguments.is_number(given[name], q)
        else None
        for name in names
    )
    arrays = tuple(given[n] for n, x in zip(names, numbers, strict=True) if x is None)
    digests = tuple(None if x is None else (x.digest, x.names) for x in found)
    of_score, of_mask = found
    return ReadFormulas((*digests, *numbers), arrays, of_score, of_mask, tuple(names), numbers)


def check_formulas(
    formulas: ReadFormulas, q: Array, ranges: Ranges, options: ScoreOptions
) -> tuple[Formulas | None, tuple[Any, ...]]:
    """Return (the Formulas of the task, the operand arrays as kernels take them).

    ranges: the sizes of the index variables.  options: the call's score options.
    Raises TypeError and ValueError.
    """
    if formulas is NONE:
        return None, ()
    by_name = formulas.by_name
    for name, x in by_name.items():
        arguments.same_place(f"operands[{name!r}]", x, q, "q")
        if x.dtype not in CPP:
            allowed = ", ".join(dtype.name for dtype in CPP)
            raise TypeError(f"operands[{name!r}]'s dtype must be {allowed}; got {x.dtype}")
    score, mask = (
        None if formula is None else _code(formula, formulas.names, by_name, ranges)
        for formula in (formulas.score, formulas.mask)
    )
    arrays: list[Any] = []
    places: list[float | OperandPlace] = []
    for name, number in zip(formulas.names, formulas.numbers, strict=True):
        if number is not None:
            places.append(number)
            continue
        x = by_name[name]
        x = x if in_elements(x) else packed(x)
        arrays.append(x)
        strides = tuple(step // x.dtype.itemsize for step in steps_of(x))
        sizes = tuple(min(size, 2**31 - 1) for size in x.shape)
        places.append(OperandPlace(strides, sizes))
    text = source(score, mask, options.softcap != 0, options.slopes is not None)
    formula = Formulas(FormulaCode(text), score is not None, mask is not None, tuple(places))
    return formula, tuple(arrays)


def _code(
    formula: Expression, names: Sequence[str], arrays: Mapping[str, Any], ranges: Ranges
) -> Code:
    """The formula as a Code.  Raises ValueError for indices outside an operand array."""
    check_indices(formula, arrays, ranges)
    operands = tuple(
        FormulaOperand(names.index(name), CPP[arrays[name].dtype] if name in arrays else None)
        for name in formula.names
    )
    return Code(formula.nodes, operands)
