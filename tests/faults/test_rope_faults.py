"""Planted faults in rope_and_cache (tests/support/planted.py)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from planted import Fault, fault_tests
from products import compare

import cupykern
from cupykern.attention.rope_config import RopeConfig
from cupykern.op import Call, Op
from cupykern.ops.problems.rope import RopeProblem
from cupykern.ops.rope_and_cache import OP

KERNEL = "rope_and_cache.cu"
BLOCK = "rope/block.cuh"
HEAD = "rope/head_vector.cuh"
TOKEN = "rope/token.cuh"
PARAMS = "rope/params.cuh"
ANGLES = "rope/sine_cosine.cuh"
FAULTS = {
    "angles in FP32": Fault(HEAD, "double(position) * double(", "float(position) * float(",
        "large positions"),
    "a turn as its first part": Fault(ANGLES, "- multiple * kLow", "", "large positions"),
    "a quadrant further": Fault(
        ANGLES, "const bool swaps = quadrant & 1;", "const bool swaps = !(quadrant & 1);", "halves"
    ),
    "sines of the other half turn": Fault(ANGLES, "quadrant & 2 ?", "quadrant & 4 ?", "halves"),
    "clockwise": Fault(
        HEAD, "x * cosine[j] - y * sine[j]", "x * cosine[j] + y * sine[j]", "halves"
    ),
    "the turned number turns the other": Fault(
        HEAD, "const float turned = x * cosine[j] - y * sine[j];",
        "const float turned = x = x * cosine[j] - y * sine[j];", "halves",
    ),
    "no attention factor for sines": Fault(
        HEAD, "found.sine * p.attention_factor", "found.sine", "interleaved"
    ),
    "halves of the whole head": Fault(
        PARAMS, "p.half.divisor + pair", "p.dim / 2 + pair", "part of heads"
    ),
    "rotations beyond their end": Fault(
        HEAD, "if (at >= p.half.divisor) break;", "", "part of heads"
    ),
    "the next token's angles": Fault(
        HEAD, "tables.cosines(p, token) + at", "tables.cosines(p, token ^ 1) + at", "two tokens"
    ),
    "frequencies side by side": Fault(
        HEAD, "rotation + pair * p.rotation_strides[1]", "rotation + pair", "strided arguments"
    ),
    "cosines for sines": Fault(
        HEAD, "{cosine[p.half.divisor * p.rotation_strides[1]], cosine[0]}",
        "{cosine[0], cosine[0]}", "a table",
    ),
    "rows of the first token": Fault(
        HEAD, "from + row * p.rotation_strides[0]", "from", "a table"
    ),
    "rows after the last": Fault(
        HEAD, "position < 0 ? 0 : position < last ? position : last", "position % p.num_rows",
        "a table",
    ),
    "positions of one sequence for all": Fault(
        TOKEN, "positions[sequence * p.position_strides[0] +", "positions[", "pages"
    ),
    "tables that others still fill": Fault(
        KERNEL, "    sync_block();\n\n#pragma", "\n#pragma", "halves"
    ),
    "slots that nobody has found yet": Fault(
        TOKEN, "int(threadIdx.x) < num_tokens", "int(threadIdx.x) < 1", "pages"
    ),
    "no eps": Fault(HEAD, "sum * p.inv_dim + p.eps", "sum * p.inv_dim", "norms"),
    "the sum of one lane": Fault(HEAD, "sum += shuffle_xor(sum, bit);", ";", "norms"),
    "q's weights for k": Fault(HEAD, "(2 * of_k + number)", "number", "norms"),
    "weights in the order of numbers": Fault(
        HEAD, "columns.second * stride, dtype", "(2 * i + 1) * stride, dtype", "norms"
    ),
    "values are normalised": Fault(
        BLOCK, ": is_k && has_k_norm", ": has_k_norm", "8 bits"
    ),
    "values are rotated": Fault(BLOCK, "if (is_q || is_k) x.rotate", "x.rotate", "8 bits"),
    "the first page for all": Fault(TOKEN, "index * p.table_strides[1]", "0", "pages"),
    "pages that are not there": Fault(
        TOKEN, "exists = page >= 0 && page < p.num_pages;",
        "page = page >= 0 && page < p.num_pages ? page : 0;", "pages",
    ),
    "negative positions are written": Fault(
        TOKEN, "(position >= 0 && position < p.num_slots);",
        "position < p.num_slots; number = number < 0 ? 0 : number;", "contiguous",
    ),
    "a slot too many": Fault(
        TOKEN, "position < p.num_slots);",
        "position <= p.num_slots); number = number == p.num_slots ? 0 : number;", "contiguous",
    ),
    "values where keys go": Fault(BLOCK, "is_q ? out.q : is_k ? out.k : out.v",
        "is_q ? out.q : out.k", "contiguous"),
    "the scale multiplies": Fault(
        BLOCK, "return 1.0f / (scales ?", "return (scales ?", "8 bits"
    ),
    "one scale for all heads": Fault(
        BLOCK, "inner * stride(1) + head.index * stride(2);", "inner * stride(1);", "8 bits"
    ),
    "the largest of one lane": Fault(
        HEAD, "found.code = other > found.code ? other : found.code;", "(void)other;", "outputs"
    ),
    "every lane writes the scale": Fault(
        BLOCK, "if (lane == 0) scales[of_scale]", "scales[of_scale + lane]", "outputs"
    ),
    "the last tokens are left out": Fault(
        BLOCK, "head.number < p.num_heads && i < num_tokens;",
        "head.number < p.num_heads && i + 1 < num_tokens;", "halves"
    ),
    "tokens beyond the last": Fault(
        TOKEN, "left < kTokens ? left : kTokens", "kTokens", "two tokens"
    ),
    "a pass of the first heads alone": Fault(
        KERNEL, "if (!vote_any(head.number < p.num_heads)) break;", "break;", "many heads"
    ),
    "the next sequence's tokens in the last one": Fault(
        TOKEN, "is_last ? sequence + 1 : sequence", "sequence", "many heads"
    ),
    "numbers that are not there": Fault(
        PARAMS, "has_second = has_first && second < p.dim;", "has_second = has_first;", "odd heads"
    ),
    "keys rounded before they are codes": Fault(
        HEAD, "first[j] *= factor,", "first[j] = to_float(from_float<bf16>(first[j])) * factor,",
        "8 bits",
    ),
}  # fmt: skip


def _problems() -> Iterator[tuple[str, Op, RopeProblem]]:
    for name, problem in {
        "halves": RopeProblem(2, 5, 4, 2, 64, dtype="float32", first=3),
        "interleaved": RopeProblem(
            1, 5, 3, 1, 32, interleaved=True, attention_factor=1.25, first=9
        ),
        "part of heads": RopeProblem(1, 4, 2, 1, 64, half=16, first=2),
        "a table": RopeProblem(2, 5, 4, 2, 64, dtype="float32", first=3, rows=7),
        "large positions": RopeProblem(1, 3, 4, 1, 128, dtype="float32", first=131_072),
        "norms": RopeProblem(
            2, 3, 4, 2, 64, slots=12, weight_dtype="float32", eps=0.0625, kind="same_sign"
        ),
        "contiguous": RopeProblem(2, 16, 4, 2, 64, slots=24, strays=True),
        "pages": RopeProblem(3, 16, 4, 2, 64, slots=40, page=4, strays=True, layout="nhd"),
        "8 bits": RopeProblem(
            2, 5, 2, 3, 64, dtype="float32", slots=16, cache_dtype="float8_e4m3fn",
            scales="heads", weight_dtype="float32",
        ),
        "outputs": RopeProblem(2, 5, 2, 2, 64, slots=16, cache_dtype="int8", scales="outputs"),
        "one head": RopeProblem(1, 200, 0, 1, 16, first=1),
        "many heads": RopeProblem(8, 9, 20, 10, 128, slots=10),
        "odd heads": RopeProblem(1, 5, 2, 1, 5, slots=8, view="padded"),
    }.items():  # fmt: skip
        yield name, OP, problem


def _check_strided_arguments() -> None:
    call = OP.inputs(RopeProblem(1, 5, 2, 1, 32, slots=8), 1, np)
    expected = OP.run(*call.args, **call.kwargs)[0]
    inv_freq = np.repeat(call.kwargs["inv_freq"], 2)[::2]
    assert (cupykern.rope_and_cache(*call.args, inv_freq=inv_freq) == expected).all()


def _check_two_tokens() -> None:
    """Of a block: of one sequence or of two, and an odd one at the end."""
    for batch, count in ((1, 3), (3, 1)):
        call = OP.inputs(RopeProblem(batch, count, 20, 10, 128, slots=8, first=2), 1, np)
        q, *others = call.args
        around, memory = (f((4, 4, 20, 128), q.dtype) for f in (np.ones, np.zeros))
        around[:batch, :count] = q
        call = Call((around[:batch, :count], *others), call.kwargs)
        for passes in (1, 2):
            options = {**call.kwargs, "config": RopeConfig(2, passes)}
            found = OP.run(*call.args, **options, out=memory[:batch, :count])
            assert compare(OP, *call.args, outputs=found, **call.kwargs).ok
            assert not memory[batch:].any() and not memory[:, count:].any()


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS,
    _problems,
    {"strided arguments": _check_strided_arguments, "two tokens": _check_two_tokens},
)
