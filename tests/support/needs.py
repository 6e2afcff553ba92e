"""Marks that say what a test needs of its target; on others it is deselected (tests/conftest.py).

`@needs.hopper` before a test, or `pytestmark = needs.hopper` for a module.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cupykern.targets import Target
from cupykern.targets.limits import max_cluster_size


def _mark(what: str, has: Callable[[Target], bool]) -> pytest.MarkDecorator:
    return pytest.mark.needs(what, has)


# A test that puts a fake GPU in the place of CuPy's.
no_gpu = pytest.mark.usefixtures("no_gpu")
host = _mark("the host target", lambda target: target.name == "host")
bulk_copies = _mark("bulk copies", lambda target: target.arch in ("sm_90a", "host"))
hopper = _mark(
    "Hopper's instructions: warps of 32 lanes",
    lambda target: target.arch in ("sm_90a", "host") and target.warp_size == 32,
)
fp16_accumulators = _mark("FP16 accumulators", lambda target: target.name != "hip")
fp8_products = _mark(
    "FP8 tensor cores",
    lambda target: target.name != "hip" and target.arch not in ("sm_80", "sm_86", "sm_87"),
)
cuda = _mark("CUDA", lambda target: target.name == "cuda")
named_barriers = _mark("named barriers", lambda target: target.name != "hip")
narrow_fragments = _mark("fragments of 8 columns", lambda target: target.name != "hip")


def gpus(count: int) -> pytest.MarkDecorator:
    return _mark(f"{count} GPUs", lambda target: _count(target) >= count)


def _count(target: Target) -> int:
    return 0 if target.name == "host" else target.xp.cuda.runtime.getDeviceCount()


def clusters(size: int) -> pytest.MarkDecorator:
    return _mark(f"clusters of {size} blocks", lambda target: max_cluster_size(target.arch) >= size)
