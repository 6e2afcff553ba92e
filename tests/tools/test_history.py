"""What a call computes and launches does not depend on the calls before it."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import pkgutil
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from fake_gpu import fake_gpu
from fake_machine import SIZE, FakeMachine
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from hypothesis_draw import HypothesisDraw

import cupykern
from cupykern import OPS, cli, targets
from cupykern.op import RandomDraw
from cupykern.rows import softmax_plan
from cupykern.runtime import choice, plans
from cupykern.targets import host
from cupykern.tools import history
from cupykern.tools.history import FAMILIES, Alias, Array, Machine, call, check_sequence
from cupykern.tools.history import run as history_run
from cupykern.tools.history.others import family_of
from cupykern.tools.history.sequences import draw_sequence

_SEQUENCES = 110  # of each function on the fake GPU; of all mixed as many as make 2,000
_HOST_SEQUENCES = 20  # of each function
_FEW_VARIANTS = 4  # of each function, where kernels are compiled


@pytest.fixture
def machine(monkeypatch, no_gpu):
    pytest.importorskip("cupy")
    with fake_gpu(monkeypatch, SIZE) as gpu:
        yield FakeMachine(gpu, monkeypatch)


# --- what is drawn -------------------------------------------------------------------------------


def test_every_op_has_histories():
    assert {FAMILIES[name].op.run for name in history.names_of(OPS)} == {op.run for op in OPS}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_argument_is_drawn(name):
    """A new option belongs in cupykern/tools/history, that of an op without a family of its own
    among the op's problems."""
    family = FAMILIES[name]
    assert set(family.options) == set(inspect.signature(family.run).parameters)
    settings = family.settings + family.large
    draw, drawn = RandomDraw(1), {option: set() for option in family.options}
    for number in range(300):
        for option, draw_value in family.options.items():
            drawn[option].add(repr(draw_value(draw, settings[number % len(settings)])))
    assert min(map(len, drawn.values())) > 1, drawn


@pytest.mark.parametrize("name", ["softmax", "quantize", "merge_attention", "rms_norm"])
def test_ops_without_a_family_of_their_own_have_that_of_their_problems(machine, name, monkeypatch):
    monkeypatch.setitem(FAMILIES, name, family_of(FAMILIES[name].op))
    test_every_argument_is_drawn(name)
    test_most_calls_are_legal(machine, name)
    run(machine, (name,), 20, large=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_most_calls_are_legal(machine, name):
    calls = [c for seed in range(20) for c in draw_sequence(RandomDraw(seed), (name,), large=True)]
    legal = sum(machine.alone(one).error is None for one in calls)
    assert 0.55 * len(calls) < legal < len(calls) or name == "quantize_nvfp4"


# --- histories -----------------------------------------------------------------------------------


def run(machine: Machine, names: tuple[str, ...], sequences: int, large: bool) -> None:
    for found in history.run_sequences(machine, names, sequences, 0, large):
        assert found.failure is None, str(found.failure)


@pytest.mark.parametrize("name", [*FAMILIES, "all"])
def test_launches_do_not_depend_on_earlier_calls(machine, name):
    """2,000 sequences: variants, grids, shared memory, parameters, results and errors."""
    mixed = max(100, 2000 - _SEQUENCES * len(FAMILIES))
    names, sequences = (tuple(FAMILIES), mixed) if name == "all" else ((name,), _SEQUENCES)
    run(machine, names, sequences, large=True)


def run_states(machine: Machine, names: tuple[str, ...], **options: Any) -> None:
    """Sequences one after the other, drawn by hypothesis: a state is what they leave in caches."""

    class Histories(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.calls = ()

        @rule(data=st.data())
        def call_some(self, data):
            self.calls += draw_sequence(HypothesisDraw(data), names, large=True)

        def teardown(self):
            failure = check_sequence(machine, self.calls)
            assert failure is None, str(failure)

    asked = settings(max_examples=40, stateful_step_count=4, **options)
    run_state_machine_as_test(Histories, settings=asked)


def test_launches_do_not_depend_on_the_state(machine):
    run_states(machine, tuple(FAMILIES))


@pytest.mark.parametrize("name", FAMILIES)
def test_bits_do_not_depend_on_earlier_calls_on_the_host(name):
    run_few_variants(Machine(targets.get("host")), name, _HOST_SEQUENCES, large=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_bits_do_not_depend_on_earlier_calls_on_a_gpu(gpu, name):
    run_few_variants(Machine(gpu), name, 3 * _HOST_SEQUENCES, large=True)


def run_few_variants(machine: Machine, name: str, sequences: int, large: bool) -> None:
    """Of random sequences the calls of the most frequent variants: compiling takes longest."""
    drawn = [draw_sequence(RandomDraw(seed), (name,), large) for seed in range(sequences)]
    variants = lru_cache(maxsize=None)(lambda one: history.variants_of(machine, one))
    count = Counter(variant for calls in drawn for one in calls for variant in variants(one))
    allowed = {variant for variant, _ in count.most_common(_FEW_VARIANTS)}
    calls = tuple(one for calls in drawn for one in calls if variants(one) <= allowed)
    assert len(set(calls)) > sequences // 2
    failure = check_sequence(machine, calls)
    assert failure is None, str(history.shrink(machine, failure))


# --- that histories see what they are for --------------------------------------------------------


def forgets_scale(monkeypatch) -> None:
    """Softmax's first cache without the scale."""
    find = plans.find

    def forgetful(call: tuple[Any, ...], *arrays: Any) -> Any:
        name, axis, _, *rest = call
        return find((name, axis, None, *rest), *arrays)

    monkeypatch.setattr(plans, "find", forgetful)


def test_states_show_a_key_that_lacks_an_option(machine, monkeypatch):
    forgets_scale(monkeypatch)
    with pytest.raises(AssertionError, match=r"call\('softmax'.*scale="):
        run_states(machine, ("softmax",), phases=(Phase.generate,))  # without shrinking it


def test_a_failure_is_shrunk_to_a_reproducer(machine, monkeypatch):
    forgets_scale(monkeypatch)
    found = next(history.run_sequences(machine, ("softmax",), 40, 0, False))
    first, last = (dict(one.arguments) for one in found.failure.calls)
    different = {name for name in first | last if first.get(name) != last.get(name)}
    assert different == {"scale"} and set(first) | set(last) <= {"x", "scale", "dtype"}
    text = str(found.failure)
    names = vars(history) | {"replay": lambda *calls: calls}
    code = text[text.index("replay(") :]
    assert eval(code, names) == found.failure.calls
    assert check_sequence(machine, found.failure.calls) is not None


def forget_scales(monkeypatch) -> None:
    """Softmax's cache of plans without the scale: the host target's calls have no other."""
    plan = softmax_plan.plan

    @plans.cached
    def kept(target: Any, task: Any, config: Any) -> list[Any]:
        return []

    def forgetful(target: Any, task: Any, config: Any) -> Any:
        unscaled = replace(task, scale=1.0, layout=task.layout.for_options())
        plans_of_any_scale = kept(target, unscaled, config)
        if not plans_of_any_scale:
            plans_of_any_scale.append(plan(target, task, config))
        return plans_of_any_scale[0]

    monkeypatch.setattr(softmax_plan, "plan", forgetful)


def test_replay_raises_where_an_earlier_call_changes_a_result(monkeypatch):
    calls = (
        call("softmax", x=Array((2, 64), "float32")),
        call("softmax", x=Array((2, 64), "float32"), scale=4.0),
    )
    history.replay(*calls, target="host")
    forget_scales(monkeypatch)
    with pytest.raises(AssertionError, match="output 0 is"):
        history.replay(*calls, target="host")


@pytest.mark.parametrize("faulty", [False, True])
def test_the_command_says_what_it_found(faulty, monkeypatch, tmp_path, capsys):
    if faulty:
        forget_scales(monkeypatch)
    path = tmp_path / "history.json"
    args = ["check", "softmax", "--target", "host", "--history", "20"]
    assert cli.main([*args, "--seed", "3", "--jobs", "1", "--json", str(path)]) == faulty
    document, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert document["kind"] == "history" and document["sequences"] == 20
    assert document["calls"] >= document["different"] > document["refused"]
    assert bool(document["failures"]) == faulty == ("replay(" in printed)
    assert f"20 sequences of {document['calls']} calls" in printed


def test_a_write_beyond_out_is_seen(monkeypatch):
    """Also where it is the same each time."""
    softmax = FAMILIES["softmax"].run

    def longer(x, *, out):
        wider = np.ndarray(
            (out.size + 3,), out.dtype, out.base, out.ctypes.data - address(out.base)
        )
        wider[-1] = 0
        return softmax(x, out=out)

    def address(x):
        return x.ctypes.data

    family = FAMILIES["softmax"]
    monkeypatch.setitem(FAMILIES, "softmax", replace(family, run=longer))
    x = Array((2, 64), "float32")
    failure = check_sequence(Machine(targets.get("host")), (call("softmax", x=x, out=x),))
    assert failure is not None and "bytes changed outside of out" in failure.reason


def test_an_internal_error_is_a_failure(machine, monkeypatch):
    def refuse(*_):
        raise choice.InternalError("a defect")

    monkeypatch.setattr(softmax_plan, "plan", refuse)
    failure = check_sequence(machine, (call("softmax", x=Array((2, 64))),))
    assert failure is not None and "InternalError: a defect" in failure.reason


# Caches that `Machine.forget` leaves: of functions of an architecture, a dtype or a task alone, of
# the environment and the machine, and of loaded code.
KEPT = {
    "arguments": {"field_kinds"},
    "arrays": {"maker"},
    "attention.decode_config": {"_tiles"},
    "cache": {"_private"},
    "environment": {"_cache_dir"},
    "expression.expression": {"_of_text"},
    "gemm.portable_heuristic": {"_tiles", "_dual_tiles"},
    "gemm.sm90_heuristic": {"_decoded_first", "table"},
    "inputs": {"_normal_block"},
    "numerics": {"_finfo", "_widen"},
    "param_structs": {"struct_dtype"},
    "rows.nonfinite_plan": {"_max_blocks"},
    "rows.nonfinite_walk": {"configs_of"},
    "rows.heuristic": {"row_tiles", "shared_configs"},
    "kernels": {"files_of", "overlaps", "resolve"},  # the kernels' source files
    "runtime.jit": {"_kernels"},
    "runtime.store": {"_path", "built_in", "digest"},
    "targets": {"device_name", "gpu_target"},
    "targets.base": {"_launch_pointer"},
    "tuned": {"load"},
    "targets.host": {"_target", "runtimes"},
    "targets.host_compiler": {
        *("_own_compiler", "_find_compiler", "_flags", "has_x86_64_v3", "_sanitizer_library")
    },
    "targets.launches": {"driver"},
    "targets.map_plan": {"_no_map"},
    "targets.tensor_map": {"_driver"},
}


def caches_of(module: Any) -> dict[str, Any]:
    """The module's functions with a cache, and its dictionaries."""
    return {
        name: value
        for name, value in vars(module).items()
        if (hasattr(value, "cache_clear") and value.__module__ == module.__name__)
        or (isinstance(value, dict) and name.islower() and not name.startswith("__"))
    }


MARK = object()


def mark(cache: Any) -> None:
    """Leave an entry in a dictionary, a call that was not known in a function's cache."""
    if isinstance(cache, dict):
        cache[MARK] = MARK
    else:
        with contextlib.suppress(TypeError):
            cache(*[MARK] * 30)  # more arguments than any function takes
        assert is_marked(cache)


def is_marked(cache: Any) -> bool:
    return MARK in cache if isinstance(cache, dict) else cache.cache_info().misses > 0


def test_every_cache_of_calls_is_forgotten():
    """Or a history would not see that a result comes from it."""
    caches = {}
    for info in pkgutil.walk_packages(cupykern.__path__, "cupykern."):
        place = info.name.removeprefix("cupykern.")
        if place.split(".")[0] in ("tools", "reference", "peers", "cli", "interop"):
            continue
        if place in ("torch", "transformers"):  # what they keep decides nothing about a call
            continue
        caches[place] = caches_of(importlib.import_module(info.name))
    everything = [cache for found in caches.values() for cache in found.values()]
    try:
        for cache in everything:
            mark(cache)
        Machine(targets.get("host")).forget()
        marked = {
            place: {name for name, cache in found.items() if is_marked(cache)}
            for place, found in caches.items()
        }
    finally:
        for cache in everything:
            if isinstance(cache, dict):
                cache.pop(MARK, None)
    assert {place: names for place, names in marked.items() if names} == KEPT


def test_in_place_is_one_array():
    image = history.run.make_image((("x", Array((2, 3))), ("out", Alias("x"))))
    made = image.build(lambda place: object())
    assert made["x"] is made["out"]


def test_a_kernel_that_breaks_the_device_is_named(monkeypatch):
    """No other call of the process can tell anything."""
    calls = tuple(draw_sequence(RandomDraw(1), ("softmax",), False))
    broken = Machine(host.current())
    reads = []

    def read(x: Any) -> Any:
        reads.append(x)
        if len(reads) > 4:
            raise RuntimeError("an illegal instruction was encountered")
        return x

    monkeypatch.setattr(history_run, "to_host", read)
    (found,) = history.run_sequences(broken, ("softmax",), 300, 1, False)
    assert broken.broken and "RuntimeError: an illegal instruction" in found.failure.reason
    assert found.failure.calls[0] == calls[0] and len(found.failure.calls) <= 3
