"""The modules that a call walks through, on a fake GPU: few, and none calls a higher layer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fake_gpu import fake_gpu
from layers import layer_of

import cupykern
from cupykern.runtime import plans

ROOT = Path(cupykern.__file__).parent


class Way(NamedTuple):
    modules: tuple[str, ...]  # in the order of the first visits
    climbs: tuple[tuple[str, str], ...]  # from a module to one of a layer above


def module_of(frame: Any) -> str | None:
    """The module of cupykern whose code runs, or None."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT):
        return None
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def way_of(call: Callable[[], Any]) -> Way:
    modules: dict[str, None] = {}
    climbs: dict[tuple[str, str], None] = {}

    def see(frame: Any, event: str, argument: Any) -> None:
        module = module_of(frame) if event == "call" else None
        if module is None:
            return
        modules[module] = None
        caller = frame.f_back
        while caller is not None and module_of(caller) is None:
            caller = caller.f_back
        if caller is not None and layer_of(module) > layer_of(module_of(caller)):
            climbs[module_of(caller), module] = None

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Way(tuple(modules), tuple(climbs))


@pytest.fixture
def fake(monkeypatch, no_gpu):
    pytest.importorskip("cupy")
    with fake_gpu(monkeypatch) as fake:
        yield fake


def calls_of(fake) -> dict[str, Callable[[], Any]]:
    x, w = (fake.array(shape, "float16") for shape in ((64, 1024), (1024, 1024)))
    q, k, v = (fake.array((1, 4, 128, 64), "float16") for _ in range(3))
    return {
        "softmax": lambda: cupykern.softmax(x),
        "matmul": lambda: cupykern.matmul(x, w),
        "attention": lambda: cupykern.attention(q, k, v, causal=True),
    }


@pytest.mark.parametrize(("name", "most"), [("softmax", 6), ("matmul", 7), ("attention", 6)])
def test_way_of_a_warm_call(fake, name, most):
    """Results lie where earlier ones lay: the launch is packed."""
    call, place = calls_of(fake)[name], fake.offset
    for _ in range(4):
        call()
        fake.offset = place
    way = way_of(call)
    assert len(way.modules) <= most, way.modules
    assert way.climbs == ()


@pytest.mark.parametrize(("name", "most"), [("softmax", 20), ("matmul", 34), ("attention", 20)])
def test_way_of_a_cold_call(fake, name, most):
    """Two callbacks lead up: a family's own functions, and the order of a kernel's arguments."""
    call = calls_of(fake)[name]
    call()  # what is kept for a stream is there
    plans.clear()
    way = way_of(call)
    assert len(way.modules) <= most, way.modules
    assert {caller for caller, _ in way.climbs} <= {
        "cupykern.runtime.choice",
        "cupykern.targets.repeated",
    }


def test_a_climb_is_seen(fake, monkeypatch):
    from cupykern.rows import rows

    find = plans.find

    def climbs(*given: Any) -> Any:
        rows.bench_shapes("host")
        return find(*given)

    code = climbs.__code__.replace(co_filename=str(ROOT / "runtime/plans.py"))
    monkeypatch.setattr(plans, "find", type(climbs)(code, globals(), closure=climbs.__closure__))
    assert ("cupykern.runtime.plans", "cupykern.rows.rows") in way_of(
        calls_of(fake)["softmax"]
    ).climbs
