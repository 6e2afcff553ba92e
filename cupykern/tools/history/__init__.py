"""Sequences of random calls: a call's result must not depend on the calls before it.

`rows`, `products`, `attention` and `rope` define how the arguments of these ops are drawn, `others`
those of all other ops.  `memory` places arguments in memory, `sequences` draws sequences of calls,
`run` compares each call with the same call alone.
"""

from .draws import Config
from .memory import Alias, Array, Blocks, Fp4, Integers, Operands
from .run import (
    Failure,
    Machine,
    Outcome,
    check_sequence,
    replay,
    run_sequences,
    shrink,
    variants_of,
)
from .sequences import FAMILIES, Call, call, draw_sequence, names_of

__all__ = [
    "FAMILIES",
    "Alias",
    "Array",
    "Blocks",
    "Call",
    "Config",
    "Failure",
    "Fp4",
    "Integers",
    "Machine",
    "Operands",
    "Outcome",
    "call",
    "check_sequence",
    "draw_sequence",
    "names_of",
    "replay",
    "run_sequences",
    "shrink",
    "variants_of",
]
