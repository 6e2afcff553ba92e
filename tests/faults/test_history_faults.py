"""Planted faults: caches whose keys lack something.  Histories of calls find each of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from earlier_calls import PAIRS
from fake_gpu import fake_gpu
from fake_machine import SIZE, FakeMachine

from cupykern import targets
from cupykern.nvfp4 import scale_shape
from cupykern.op import RandomDraw
from cupykern.runtime import plans
from cupykern.tools.history import (
    FAMILIES,
    Array,
    Blocks,
    Call,
    Config,
    Fp4,
    Integers,
    call,
    check_sequence,
    draw_sequence,
)
from cupykern.tools.history.sequences import PLAIN, call_of

pytestmark = pytest.mark.faults

_SEQUENCES = (10, 40, 150, 300, 600)  # together, until a fault is found
_PRODUCTS = ("matmul", "scaled_mm", "dual_gemm_silu", "dequant_softmax")
# What plans.find is told of functions, whose calls are looked up alike.
CALLS = {
    "softmax": ("softmax", "log_softmax"),
    "norm": ("layer_norm",),
    "norm of squares": ("rms_norm",),
    "quantize": ("quantize",),
    "nonfinite_report": ("nonfinite_report",),
    "quantize_nvfp4": ("quantize_nvfp4",),
    "matmul": ("matmul",),
    "scaled_mm": ("scaled_mm",),
    "dual_gemm_silu": ("dual_gemm_silu",),
    "dequant_softmax": ("dequant_softmax",),
    "attention": ("attention",),
    "attention with blocks": ("attention",),
    "attention_varlen": ("attention_varlen",),
    "decode_attention": ("decode_attention",),
    "cascade_attention": ("cascade_attention",),
    "cascade_attention with scales": ("cascade_attention",),
    "merge_attention": ("merge_attention",),
    "rope_and_cache": ("rope_and_cache",),
    "rope_and_cache with options": ("rope_and_cache",),
}
# The modules that have a cache of plans, and the functions that use it.
PLANS = {
    ("rows.softmax_plan", "plan"): ("softmax", "log_softmax"),
    ("rows.quantize_rows", "_plan"): ("quantize",),
    ("rows.quantize_columns", "_plan"): ("quantize",),
    ("rows.quantize_tiles", "_plan"): ("quantize",),
    ("rows.nonfinite_plan", "plan"): ("nonfinite_report",),
    ("gemm.quantize_nvfp4_plan", "plan"): ("quantize_nvfp4",),
    ("gemm.launch", "_plan"): _PRODUCTS,
    ("attention.attention_plan", "attention_plan"): ("attention", "attention_varlen"),
    ("attention.decode_plan", "plan"): ("decode_attention",),
    ("attention.merge_plan", "plan"): ("merge_attention",),
    ("attention.rope_plan", "plan"): ("rope_and_cache",),
}


COLUMNS = {"x": Array((16, 1024)), "dtype": "int8", "granularity": "column"}
TILES = {**COLUMNS, "granularity": "block"}
PAGES = Array((40, 2, 16, 64))
PAGED = {"q": Array((1, 4, 1, 64)), "k_cache": PAGES, "v_cache": PAGES}
ONE = Array((2, 4, 1, 64))
KEYS = Array((1, 2, 128, 64))
CAUSAL = {"q": Array((1, 2, 64, 64)), "k": KEYS, "v": KEYS, "mask": Blocks((1, 1), 64, 128, 64, 64),
          "causal": True}  # fmt: skip
ONE_CACHE = Array((1, 2, 16, 64))
ONE_ROW = {"positions": Integers((5,)), "inv_freq": Array((32,), "float32")}


def in_cache(
    cache: Array, pages: int = 0, dtype: str = "float16", v_cache: Array | None = None
) -> Call:
    table = {"block_table": Integers((tuple(range(pages)),))} if pages else {}
    q, k = (Array((1, 1, heads, 64), dtype) for heads in (4, 2))
    arrays = {"q": q, "k": k, "v": k, "k_cache": cache, "v_cache": v_cache or cache}
    return call("rope_and_cache", **ONE_ROW, **arrays, **table)


def of_heads(heads: int) -> dict[str, Array]:
    """Queries and results of the same strides."""
    q, cache = Array((1, heads, 1, 64), layout="corner"), Array((1, 2, 40, 64))
    return {"q": q, "out": q, "k_cache": cache, "v_cache": cache}


def cascade(prefix: int, length: int) -> dict[str, Any]:
    shared, own = Array((1, 2, prefix, 64)), Array((2, 2, length, 64), "int8")
    caches = {"k_cache": own, "v_cache": own, "k_scale": 0.5}
    return {"q": ONE, "shared_k": shared, "shared_v": shared, **caches}


SHARED, SQUARE = cascade(33, 16), cascade(2, 2)
LENGTHS = tuple(Integers((5, 16), layout=layout) for layout in ("C", "every other"))
RARE = (
    (call("quantize", **COLUMNS), call("quantize", **COLUMNS, config=Config(3))),
    (call("quantize", **TILES), call("quantize", **TILES, config=Config(5))),
    tuple(call("scaled_mm", a=Fp4((64, 256), x), b=Fp4((64, 256))) for x in ("plain", "blocked")),
    tuple(
        call("decode_attention", **PAGED, block_table=Integers((tuple(range(pages)),)))
        for pages in (19, 10)
    ),
    tuple(call("decode_attention", **of_heads(heads)) for heads in (4, 6)),
    tuple(call("decode_attention", **of_heads(4), score=x) for x in (None, "s * 2")),
    tuple(call("cascade_attention", **SHARED, seq_lens=one) for one in LENGTHS),
    tuple(call("cascade_attention", **SHARED, softcap=x) for x in (None, 2.0)),
    tuple(call("cascade_attention", **{**SHARED, "q": replace(ONE, begin=x)}) for x in (0, 1)),
    tuple(call("cascade_attention", **SQUARE, layout=x) for x in ("hnd", "nhd")),
    tuple(call("attention", **CAUSAL, score=x) for x in (None, "s * 2")),
    tuple(call("attention", **CAUSAL, causal_align=x) for x in ("top_left", "bottom_right")),
    tuple(in_cache(Array((1, 2, 16, 64), x)) for x in ("int8", "float8_e4m3fn")),
    tuple(in_cache(Array((1, 2, 16, 64), "int8"), 0, x) for x in ("float16", "bfloat16")),
    tuple(in_cache(Array((1, 2, slots, 64), layout="corner")) for slots in (9, 10)),
    tuple(in_cache(Array((pages, 2, 16, 64)), 8) for pages in (8, 9)),
    tuple(in_cache(ONE_CACHE, v_cache=replace(ONE_CACHE, layout=x)) for x in ("C", "corner")),
    tuple(in_cache(Array((16, 2, page, 64), layout="corner"), 90 // page) for page in (9, 10)),
)


def module_of(name: str) -> Any:
    return importlib.import_module(f"cupykern.{name}")


def found(monkeypatch, names: tuple[str, ...]) -> bool:
    """Whether histories of these functions find the fault that is planted."""
    pytest.importorskip("cupy")
    if targets.get().name != "host":
        pytest.skip("there is a GPU")
    with fake_gpu(monkeypatch, SIZE) as gpu:
        machine = FakeMachine(gpu, monkeypatch)
        if any(check_sequence(machine, calls) for calls in histories(names)):
            return True
    return False


def histories(names: tuple[str, ...]) -> Iterator[tuple[Call, ...]]:
    """Short ones first."""
    yield from (calls for calls in (*PAIRS.values(), *RARE) if calls[0].name in names)
    for count in _SEQUENCES:
        drawn = (draw_sequence(RandomDraw(seed), names, large=True) for seed in range(count))
        yield tuple(call for calls in drawn for call in calls)
        if count == _SEQUENCES[1]:
            for name in names:
                yield from of_two_sizes(name)


def of_two_sizes(name: str) -> Iterator[tuple[Call, Call]]:
    """Calls on arrays of the same strides, one size of which differs."""
    family = FAMILIES[name]
    for setting in family.settings[:: max(1, len(family.settings) // 8)]:
        for key, size in setting.items():
            first, *rest = size if isinstance(size, tuple) and size else (size,)
            if "nvfp4" in setting.values() or not isinstance(first, int):
                continue
            for other in (first - 2, first - 1, first + 1, first + 8 * (first >= 8)):
                changed = (max(other, 1), *rest) if isinstance(size, tuple) else max(other, 1)
                yield corners(name, setting), corners(name, {**setting, key: changed})


def corners(name: str, setting: Any) -> Call:
    """A plain call on corners of larger arrays, its result too."""
    options = FAMILIES[name].options
    arguments = {option: draw_value(PLAIN, setting) for option, draw_value in options.items()}
    if "out" in options:
        drawn = (options["out"](RandomDraw(seed), setting) for seed in range(100))
        arguments["out"] = next(out for out in drawn if isinstance(out, Array))
    if "return_lse" in options:
        arguments["scale"] = 0.5  # which does not follow from D
    arrays = {
        option: replace(value, layout="corner")
        for option, value in arguments.items()
        if isinstance(value, Array)
    }
    return call_of(name, arguments | arrays, 0)


def draw_masks_of_blocks(monkeypatch) -> None:
    """In every call of attention."""

    def draw_blocks(draw: Any, s: Any) -> Blocks:
        sizes = draw.choice(((64, 64), (64, 64), (128, 128)))
        batch, offset = draw.choice(((1, 1), (s["b"], s["h"]))), draw.choice((0, 3, 5))
        return Blocks(batch, s["sq"], s["sk"], *sizes, offset)

    monkeypatch.setitem(FAMILIES["attention"].options, "mask", draw_blocks)


# --- the keys of calls ---------------------------------------------------------------------------


# How many arrays and other arguments plans.find is given by calls without formulas.
GIVEN = {
    "softmax": (2, 5),
    "norm": (4, 7),
    "norm of squares": (4, 8),
    "quantize": (1, 4),
    "nonfinite_report": (1, 1),
    "quantize_nvfp4": (1, 2),
    "matmul": (4, 6),
    "scaled_mm": (5, 5),
    "dual_gemm_silu": (6, 7),
    "dequant_softmax": (4, 3),
    "attention": (4, 13),
    "attention with blocks": (5, 13),
    "attention_varlen": (5, 12),
    "decode_attention": (5, 7),
    "cascade_attention": (7, 5),
    "cascade_attention with scales": (9, 7),
    "merge_attention": (4, 2),
    "rope_and_cache": (7, 9),
    "rope_and_cache with options": (13, 9),
}
# Arguments that a warm call does not take from its plan: return_lse and return_row_stats, which it
# reads, what every call of a norm gives alike, the tiles of a mask of blocks, and the sizes of a
# mask of blocks where there is none; the distances of caches and of their scales and whether there
# is a block table, which decide only what is refused (test_rope_and_cache.py, test_plans.py).
NOT_OF_PLANS = {
    "norm": ("option 0", "option 3"),
    "norm of squares": ("array 2", "option 0", "option 1"),
    "attention": ("option 6", "option 7", "option 10"),
    "attention with blocks": ("array 4", "option 6", "option 7"),
    "attention_varlen": ("option 5", "option 11"),
    "decode_attention": ("option 3",),
    "cascade_attention": ("option 3",),
    "cascade_attention with scales": ("option 3",),
    "rope_and_cache": ("option 7", "option 8"),
    "rope_and_cache with options": ("option 7", "option 8"),
}
# Nor does quantize_nvfp4 ask where an array begins.
NOT_ALIGNED = ("quantize_nvfp4",)


def lacking_arguments() -> Iterator[Any]:
    for name, (arrays, options) in GIVEN.items():
        for kind, places in (("array", range(1, arrays)), ("option", range(options))):
            for place in places:  # but the first array, and out
                if f"{kind} {place}" not in NOT_OF_PLANS.get(name, ()):
                    yield pytest.param(name, kind, place, id=f"{name}-{kind}{place}")


def patch_find(monkeypatch, name: str, forgetful: Callable[..., Any]) -> set[tuple[int, int]]:
    """Make plans.find `forgetful` for the calls of CALLS[name], with their block masks.  Returns
    what these are given: GIVEN[name], or the numbers are wrong."""
    find, seen = plans.find, set()
    if name == "attention with blocks":
        draw_masks_of_blocks(monkeypatch)

    def patched(call: tuple[Any, ...], out: Any, *arrays: Any) -> Any:
        function, *options = call
        kind = ""
        if function == "norm" and len(options) == GIVEN["norm of squares"][1]:
            kind = " of squares"
        if function == "attention" and options[10] is not None:
            kind = " with blocks"
        if function == "rope_and_cache" and len(arrays) > GIVEN["rope_and_cache"][0]:
            kind = " with options"
        if function == "cascade_attention" and len(arrays) > GIVEN["cascade_attention"][0]:
            kind = " with scales"
        if function + kind != name or isinstance(options[0], tuple):  # the names of NvFp4's arrays
            return find(call, out, *arrays)
        if (len(arrays), len(options)) != GIVEN[name]:  # with a formula, or pages
            return find(call, out, *arrays)
        seen.add(GIVEN[name])
        return forgetful(find, call, out, *arrays)

    monkeypatch.setattr(plans, "find", patched)
    return seen


def forget_argument(monkeypatch, name: str, kind: str, place: int) -> set[tuple[int, int]]:
    def forgetful(find: Callable[..., Any], call: tuple[Any, ...], out: Any, *arrays: Any) -> Any:
        if kind == "array":
            arrays = (*arrays[:place], None, *arrays[place + 1 :])
        else:
            call = (*call[: place + 1], None, *call[place + 2 :])
        return find(call, out, *arrays)

    return patch_find(monkeypatch, name, forgetful)


@pytest.mark.thinned(16)
@pytest.mark.parametrize(("name", "kind", "place"), list(lacking_arguments()))
def test_key_of_calls_without_an_argument(name, kind, place, monkeypatch):
    seen = forget_argument(monkeypatch, name, kind, place)
    assert found(monkeypatch, CALLS[name]) and seen


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param("softmax", 3, id="softmax's log"),
        pytest.param("norm", 4, id="norm's eps"),
        pytest.param("quantize", 2, id="quantize's block"),
        pytest.param("quantize_nvfp4", 0, id="quantize_nvfp4's layout"),
        pytest.param("matmul", 3, id="matmul's accumulate"),
    ],
)
def test_key_of_calls_without_an_option(name, place, monkeypatch):
    seen = forget_argument(monkeypatch, name, "option", place)
    assert found(monkeypatch, CALLS[name]) and seen


@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", [name for name in CALLS if name not in NOT_ALIGNED])
def test_key_of_calls_without_alignment(name, monkeypatch):
    def without_alignment(find: Callable[..., Any], call: Any, out: Any, *arrays: Any) -> Any:
        key, _, places = find(call, out, *arrays)
        if key is None:
            return key, None, places
        key = tuple((*one[:3], 0, *one[4:]) if isinstance(one, tuple) else one for one in key)
        return key, plans.recall(key), places

    seen = patch_find(monkeypatch, name, without_alignment)
    assert found(monkeypatch, CALLS[name]) and seen


@pytest.mark.parametrize("shape", [(16, 16), (128, 64), (3, 5, 32), (2, 3, 1, 16)])
def test_the_shape_of_scales_says_the_layout_of_nvfp4(shape):
    """So the layout need not be part of a call's key; plans have the scales' strides."""
    plain, blocked = (scale_shape(shape, layout) for layout in ("plain", "blocked"))
    assert len(plain) == len(blocked) + 1


# --- the keys of plans ----------------------------------------------------------------------------

# Fields of tasks that follow from others, or that a warm call does not take from its plan.
FOLLOWS = {
    ("rows.quantize_columns", "y"): "a new array of x's shape",
    ("rows.quantize_tiles", "y"): "a new array of x's shape",
    ("gemm.quantize_nvfp4_plan", "dtype"): "it is x's",
    ("gemm.launch", "block_scales"): "the scales' strides: 0 along the columns of one per row",
    ("gemm.launch", "kernel"): "the operands: b2 of dual_gemm, logits of dequant_softmax",
    ("gemm.launch", "logits"): "the result's strides and dtype",
    ("gemm.launch", "num_sets"): "the config and n",
    ("gemm.launch", "num_parts"): "parts are made within a plan",
    ("gemm.launch", "part_steps"): "parts are made within a plan",
    ("attention.merge_plan", "swaps"): "the strides of log-sum-exps, unless these are broadcast",
    ("attention.rope_plan", "scales_per_token"): "the strides of scales",
}


def names_of_fields(task: type) -> tuple[str, ...]:
    return task._fields if issubclass(task, tuple) else tuple(f.name for f in fields(task))


def lacking_fields() -> Iterator[Any]:
    for (module, name), functions in PLANS.items():
        plan = getattr(module_of(module), name).__wrapped__
        home = importlib.import_module(plan.__module__)
        task = getattr(home, list(plan.__annotations__.values())[1])
        for field in (*names_of_fields(task), "the config"):
            if (module, field) in FOLLOWS:
                continue
            yield pytest.param(module, name, field, functions, id=f"{module}.{name}-{field}")


def forget_field(monkeypatch, module: str, name: str, field: str) -> None:
    """Let the plans' key lack a field of the task, or "the config"."""
    plan, kept = getattr(module_of(module), name), {}

    def forgetful(target: Any, task: Any, given: Any) -> Any:
        others = tuple(getattr(task, one) for one in names_of_fields(type(task)) if one != field)
        key = others, None if field == "the config" else given
        return kept.setdefault(key, plan(target, task, given))

    monkeypatch.setattr(module_of(module), name, forgetful)
    monkeypatch.setattr(plans, "_clears", [*plans._clears, kept.clear])


@pytest.mark.thinned(8)
@pytest.mark.parametrize(("module", "name", "field", "functions"), list(lacking_fields()))
def test_key_of_plans_without_a_field(module, name, field, functions, monkeypatch):
    forget_field(monkeypatch, module, name, field)
    assert found(monkeypatch, functions)


@pytest.mark.parametrize(
    ("module", "name", "field", "functions"),
    [
        pytest.param(
            "rows.softmax_plan", "plan", "log", ("softmax", "log_softmax"), id="softmax's log"
        ),
        pytest.param("rows.softmax_plan", "plan", "masked", ("softmax",), id="softmax's mask"),
        pytest.param(
            "rows.softmax_plan", "plan", "layout", ("softmax",), id="softmax's strides, alignment"
        ),
        pytest.param("rows.quantize_tiles", "_plan", "block", ("quantize",), id="quantize's block"),
        pytest.param(
            "gemm.quantize_nvfp4_plan", "plan", "layout", ("quantize_nvfp4",), id="scales' layout"
        ),
        pytest.param(
            "gemm.launch", "_plan", "fp16_accumulate", ("matmul",), id="matmul's accumulate"
        ),
        pytest.param("gemm.launch", "_plan", "groups_b", ("scaled_mm",), id="NvFp4.layout"),
    ],
)
def test_key_of_plans_without_an_option(module, name, field, functions, monkeypatch):
    forget_field(monkeypatch, module, name, field)
    assert found(monkeypatch, functions)
