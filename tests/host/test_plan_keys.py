"""A call with another option is planned anew, on a fake GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from fake_gpu import fake_gpu
from fake_machine import SIZE, FakeMachine

from cupykern import arguments
from cupykern.op import RandomDraw
from cupykern.tools.history import FAMILIES, Call, check_sequence
from cupykern.tools.history.sequences import PLAIN, call_of

_SEQUENCES, _MOST_SEQUENCES = 600, 3000  # most: until there are two values whose plans are kept
_TRIES = 60  # of values of two kinds that may all be illegal
OPTIONS = [
    pytest.param(name, option, id=f"{name}-{option}")
    for name, family in FAMILIES.items()
    for option in family.options
]


@pytest.fixture
def machine(monkeypatch, no_gpu):
    pytest.importorskip("cupy")
    with fake_gpu(monkeypatch, SIZE) as gpu:
        yield FakeMachine(gpu, monkeypatch)


def pairs(name: str, option: str) -> Iterator[tuple[int, Call, Call]]:
    """Numbered calls that differ in one option alone."""
    family = FAMILIES[name]
    for seed in range(_MOST_SEQUENCES):
        draw, setting = RandomDraw(seed), family.settings[seed % len(family.settings)]
        value = family.options[option](draw, setting)
        arguments = {
            one: draw_value(draw if draw.choice((True, False)) else PLAIN, setting)
            for one, draw_value in family.options.items()
        }
        first = call_of(name, arguments, 0)
        second = call_of(name, {**arguments, option: value}, 0)
        if first != second:
            yield seed, first, second


def kinds(option: str, *calls: Call) -> tuple[str, ...]:
    """Of the values that calls have: one is as good as another of its kind."""
    values = (dict(call.arguments).get(option) for call in calls)
    return tuple(sorted("number" if type(x) in (int, float) else type(x).__name__ for x in values))


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_another_value_of_an_option_is_planned_anew(machine, name, option, monkeypatch):
    """Two legal values of any two kinds, where they decide what is launched: no option does nothing
    at all.  Of calls whose plans are kept, but for options that never are."""
    checked = []
    target_of = arguments.target_of
    monkeypatch.setattr(
        arguments, "target_of", lambda *args: checked.append(args) or target_of(*args)
    )

    def finds_a_plan(call: Call) -> bool:
        checked.clear()
        machine.run(call)
        return not checked

    def keeps_its_plan(call: Call) -> bool:
        machine.forget()
        return not finds_a_plan(call) and finds_a_plan(call)

    tries: Counter[tuple[str, ...]] = Counter()
    found, differs = set(), False
    for number, first, second in pairs(name, option):
        if found and number >= _SEQUENCES:
            break
        of_both = kinds(option, first, second)
        if of_both in found or (found and tries[of_both] >= _TRIES):
            continue
        tries[of_both] += 1
        alone = [machine.alone(call) for call in (first, second)]
        if any(outcome.error for outcome in alone) or alone[0] == alone[1]:
            continue
        differs = True
        if not all(map(keeps_its_plan, (first, second))):
            continue
        found.add(of_both)
        assert check_sequence(machine, (first, second, first)) is None
        for both in (first, second), (second, first):
            machine.forget()
            for call in both:
                assert not finds_a_plan(call), f"{call} found the plan of the other one of {both}"
    assert differs, f"no two values of {option} give other launches"
