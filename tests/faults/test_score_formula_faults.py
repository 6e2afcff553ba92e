"""Planted faults in the kernels' part of formulas of scores and masks: a check must catch each."""

from __future__ import annotations

import numpy as np
from attention_checks import normal
from planted import Fault, fault_tests

from cupykern import attention, check, decode_attention, reference
from cupykern.attention.attention_hopper import AttentionHopperConfig
from cupykern.targets import host

FORMULA, OPERANDS, INTERVAL, DECODE, DECODE_8BIT, MASK = (
    *("attention/formula.cuh", "expression/operands.cuh", "expression/interval.cuh"),
    *("attention/decode/formula.cuh", "decode_attention_8bit_formula.cu"),
    "attention/mask_sm90.cuh",
)
FAULTS = {
    "partial tiles count as full": Fault(
        FORMULA, "keeps.lo ? kFullBlock", "keeps.hi ? kFullBlock", "portable"
    ),
    "tiles without the last row": Fault(
        FORMULA, "last_row + head.offset}", "row + head.offset}", "portable"
    ),
    "rows without their offset": Fault(
        FORMULA,
        "Interval<int>{row + head.offset, last_row + head.offset}",
        "Interval<int>{row, last_row}",
        "portable",
    ),
    "strides of the first index for all": Fault(
        OPERANDS, "params.strides[k][d]", "params.strides[k][0]", "portable"
    ),
    "indices are not clamped below": Fault(OPERANDS, "below > 0 ? below : 0", "below", "before"),
    "key pairs of a lane exchanged": Fault(
        MASK, "key + 8 * n + i / 2", "key + 8 * n + i % 2", "hopper"
    ),
    "rows of a lane exchanged": Fault(
        MASK, "position + i % 2 * 8, key", "position + i / 2 * 8, key", "hopper"
    ),
    "the first head of a row tile for all": Fault(
        DECODE, "Interval<int>{head + first, head + last}", "point(head + first)", "decode"
    ),
    "a choice has its first branch alone": Fault(
        INTERVAL,
        "return {least(a.lo, b.lo), most(a.hi, b.hi)};\n}\n\n// NaN",
        "return a;\n}\n\n// NaN",
        "cases",
    ),
    "a bool array's bytes as their codes": Fault(
        "expression/operand.cuh",
        "operand_to_float(uint8_t x) { return float(x); }",
        "operand_to_float(uint8_t x) { return bit_cast<float>(uint32_t(x)); }",
        "cases",
    ),
    "unscaled scores": Fault(
        "attention/decode/formula.cuh", "x *= params.score_scale;", "x *= 1.0f;", "decode"
    ),
    "scales of keys and values exchanged": Fault(
        DECODE_8BIT,
        "KvScales(scale_params, k_scale, v_scale, kv_head)",
        "KvScales(scale_params, v_scale, k_scale, kv_head)",
        "decode, int8",
    ),
}

OPTIONS = {
    "score": "s + t[h, j] - 0.01 * i",
    "mask": "(j <= i) & (i - j < 40 + 120 * h) | (j == 203)",
    "operands": {"t": np.arange(480, dtype=np.float32).reshape(2, 240) % 7 / 4},
}


def compared(run, exact, bound, q, k, v, options, **config) -> None:
    y = run(q, k, v, **options, **config)
    found = exact(q, k, v, **options)
    assert check.compare((y,), found, bound(q, k, v, reference=found, **options)).ok


def check_portable() -> None:
    q, k, v = normal(1, 2, 150, 32), normal(1, 2, 240, 32), normal(1, 2, 240, 32)
    options = OPTIONS | {"causal_align": "bottom_right"}
    compared(attention, reference.attention, reference.attention_bound, q, k, v, options)


def check_hopper() -> None:
    if host.current().warp_size == 32:
        q, k, v = normal(1, 2, 150, 64), normal(1, 2, 240, 64), normal(1, 2, 240, 64)
        functions = attention, reference.attention, reference.attention_bound
        options = OPTIONS | {"causal_align": "bottom_right"}
        compared(*functions, q, k, v, options, config=AttentionHopperConfig(128, 128))


def check_cases() -> None:
    """Branches that are masks, of which one empties a tile and the other does not; a bool array."""
    q, k, v = normal(1, 2, 150, 32), normal(1, 2, 240, 32), normal(1, 2, 240, 32)
    keep = np.arange(150 * 240).reshape(150, 240) % 3 > 0
    options = {"mask": "j < 20 if i < 40 else m[i, j]", "operands": {"m": keep}, "input_pos": 0}
    compared(attention, reference.attention, reference.attention_bound, q, k, v, options)


def check_before() -> None:
    """Queries before the first key read the first element."""
    q, k, v = normal(1, 2, 60, 32), normal(1, 2, 40, 32), normal(1, 2, 40, 32)
    rows = np.full(80, 1e9, np.float32)
    rows[20:] = np.arange(60) / 9
    options = {"score": "s * r[i]", "operands": {"r": rows[20:]}, "causal_align": "bottom_right"}
    compared(attention, reference.attention, reference.attention_bound, q, k, v, options)


def check_decode() -> None:
    q, k, v = normal(1, 2, 2, 32), normal(1, 1, 240, 32), normal(1, 1, 240, 32)
    functions = decode_attention, reference.decode_attention, reference.decode_attention_bound
    compared(*functions, q, k, v, OPTIONS)


def check_decode_8bit() -> None:
    q, k, v = normal(1, 2, 2, 32), normal(1, 1, 240, 32), normal(1, 1, 240, 32)
    k, v = ((9 * x.astype(np.float32)).astype(np.int8) for x in (k, v))
    scales = {"k_scale": np.float32([1 / 9]), "v_scale": np.float32([1 / 16])}
    functions = decode_attention, reference.decode_attention, reference.decode_attention_bound
    compared(*functions, q, k, v, OPTIONS | scales)


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS,
    checks={
        "portable": check_portable,
        "hopper": check_hopper,
        "before": check_before,
        "cases": check_cases,
        "decode": check_decode,
        "decode, int8": check_decode_8bit,
    },
)
