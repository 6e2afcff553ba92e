"""Planted faults: caches whose keys lack something.  Histories of calls find each of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
from fake_gpu import fake_gpu
from fake_machine import SIZE, FakeMachine

from cupykern import plans, targets
from cupykern.gemm import scaled_mm
from cupykern.op import RandomDraw
from cupykern.tools.history import FAMILIES, Blocks, check_sequence, draw_sequence

pytestmark = pytest.mark.faults

_SEQUENCES = (10, 40, 150, 300)  # together, until a fault is found
_PRODUCTS = ("matmul", "scaled_mm", "dual_gemm_silu", "dequant_softmax")
# The modules that have a cache of calls or of plans, and the functions that use it.
CALLS = {
    ("rows.softmax", "_find"): ("softmax", "log_softmax"),
    ("rows.norm", "_find"): ("layer_norm", "rms_norm"),
    ("rows.quantize", "_find"): ("quantize",),
    ("rows.nonfinite", "_find"): ("nonfinite_report",),
    ("gemm.quantize_nvfp4", "_find"): ("quantize_nvfp4",),
    ("gemm.matmul", "_find"): ("matmul",),
    ("gemm.scaled_mm", "_find"): ("scaled_mm",),
    ("gemm.dual_gemm", "_find"): ("dual_gemm_silu",),
    ("gemm.dequant_softmax", "_find"): ("dequant_softmax",),
    ("attention.attention", "_find"): ("attention",),
    ("attention.attention", "_find_blocks"): ("attention",),
    ("attention.attention", "_find_varlen"): ("attention_varlen",),
    ("attention.decode_attention", "_find"): ("decode_attention",),
}
PLANS = {
    ("rows.softmax", "_plan"): ("softmax", "log_softmax"),
    ("rows.quantize_rows", "_plan"): ("quantize",),
    ("rows.quantize_columns", "_plan"): ("quantize",),
    ("rows.quantize_tiles", "_plan"): ("quantize",),
    ("rows.nonfinite", "_plan"): ("nonfinite_report",),
    ("gemm.quantize_nvfp4", "_plan"): ("quantize_nvfp4",),
    ("gemm.matmul", "_plan"): _PRODUCTS,
    ("attention.attention", "attention_plan"): ("attention", "attention_varlen"),
    ("attention.decode_attention", "_plan"): ("decode_attention",),
}


def module_of(name: str) -> Any:
    return importlib.import_module(f"cupykern.{name}")


def found(monkeypatch, names: tuple[str, ...]) -> bool:
    """Whether histories of these functions find the fault that is planted."""
    pytest.importorskip("cupy")
    if targets.get().name != "host":
        pytest.skip("there is a GPU")
    with fake_gpu(monkeypatch, SIZE) as gpu:
        machine = FakeMachine(gpu, monkeypatch)
        for count in _SEQUENCES:
            drawn = (draw_sequence(RandomDraw(seed), names, large=True) for seed in range(count))
            if check_sequence(machine, tuple(call for calls in drawn for call in calls)):
                return True
    return False


def draw_masks_of_blocks(monkeypatch) -> None:
    """In every call of attention."""

    def draw_blocks(draw: Any, s: Any) -> Blocks:
        sizes = draw.choice((64, 128)), draw.choice((64, 128)), draw.choice((0, 0, 3))
        return Blocks(draw.choice(((1, 1), (s["b"], s["h"]))), s["sq"], s["sk"], *sizes)

    monkeypatch.setitem(FAMILIES["attention"].options, "mask", draw_blocks)


# --- the keys of calls ---------------------------------------------------------------------------


def arguments_of(find: Callable[..., Any]) -> tuple[str, ...]:
    """Of a finder: x0, x1, ... are arrays, o0, o1, ... are options."""
    return find.__code__.co_varnames[: find.__code__.co_argcount]


def lacking_arguments() -> Iterator[Any]:
    for (module, name), functions in CALLS.items():
        arguments = arguments_of(getattr(module_of(module), name))
        for place, argument in enumerate(arguments[1:-1], 1):  # not the first array, and not out
            if (name, argument) != ("_find", "o10"):  # attention's sizes of blocks: None there
                yield pytest.param(module, name, place, functions, id=f"{module}.{name}-{argument}")


@pytest.mark.parametrize(("module", "name", "place", "functions"), lacking_arguments())
def test_key_of_calls_without_an_argument(module, name, place, functions, monkeypatch):
    module = module_of(module)
    find = getattr(module, name)
    if name == "_find_blocks":
        draw_masks_of_blocks(monkeypatch)
    monkeypatch.setattr(module, name, lambda *args: find(*args[:place], None, *args[place + 1 :]))
    assert found(monkeypatch, functions)


@pytest.mark.parametrize(("where", "functions"), CALLS.items(), ids=lambda x: ".".join(x))
def test_key_of_calls_without_alignment(where, functions, monkeypatch):
    module = module_of(where[0])
    find = getattr(module, where[1])
    arguments = arguments_of(find)[:-1]
    of_out = 1 + sum(1 if name[0] == "x" else 2 for name in arguments) + 3

    def without_alignment(*args: Any) -> Any:
        key, _, places = find(*args)
        if key is None:
            return key, None, places
        key = tuple(
            (*one[:3], 0, *one[4:])
            if isinstance(one, tuple) and len(one) == 6
            else 0
            if place == of_out
            else one
            for place, one in enumerate(key)
        )
        return key, plans.recall(key), places

    monkeypatch.setattr(module, where[1], without_alignment)
    assert found(monkeypatch, functions)


def test_key_of_calls_without_the_layout_of_nvfp4(monkeypatch):
    arrays_and_numbers = scaled_mm.arrays_and_numbers

    def without_layout(**operands: Any) -> Any:
        arrays, numbers = arrays_and_numbers(**operands)
        return arrays, tuple(None if isinstance(one, str) else one for one in numbers)

    monkeypatch.setattr(scaled_mm, "arrays_and_numbers", without_layout)
    assert found(monkeypatch, ("scaled_mm",))


# --- the keys of plans -----------------------------------------------------------------------------

# Fields of tasks that follow from others.
FOLLOWS: dict[str, str] = {}


def names_of_fields(task: type) -> tuple[str, ...]:
    return task._fields if issubclass(task, tuple) else tuple(f.name for f in fields(task))


def lacking_fields() -> Iterator[Any]:
    for (module, name), functions in PLANS.items():
        plan = getattr(module_of(module), name).__wrapped__
        home = importlib.import_module(plan.__module__)
        task = getattr(home, list(plan.__annotations__.values())[1])
        for field in (*names_of_fields(task), "the config"):
            yield pytest.param(module, name, field, functions, id=f"{module}.{name}-{field}")


@pytest.mark.parametrize(("module", "name", "field", "functions"), lacking_fields())
def test_key_of_plans_without_a_field(module, name, field, functions, monkeypatch):
    module = module_of(module)
    plan, kept = getattr(module, name), {}

    def forgetful(target: Any, task: Any, given: Any) -> Any:
        others = tuple(getattr(task, one) for one in names_of_fields(type(task)) if one != field)
        key = others, None if field == "the config" else given
        return kept.setdefault(key, plan(target, task, given))

    monkeypatch.setattr(module, name, forgetful)
    monkeypatch.setattr(plans, "_clears", [*plans._clears, kept.clear])
    assert found(monkeypatch, functions)
