"""Every public docstring has an example, which runs on the host target with numpy arrays."""

from __future__ import annotations

import doctest
import inspect

import numpy as np
import pytest

import cupykern
from cupykern import nvfp4, parallel, reference, targets
from cupykern.expression.expression import Expression, read
from cupykern.op import Bound
from cupykern.reference import parallel as reference_of_ranks
from cupykern.typing import Array

try:
    import dask
    import dask.array as da

    import cupykern.dask
except ImportError:
    dask = da = None

_FUNCTIONS = {name: getattr(cupykern, name) for name in cupykern.__all__ if name != "OPS"}
_METHODS = {
    f"{name}.{method}": getattr(getattr(cupykern, name), method)
    for name, methods in {
        "BlockMask": (
            "from_dense",
            "from_expression",
            "causal",
            "document",
            "interleaved",
            "to_dense",
        ),
        "NvFp4": ("to", "dequantize"),
    }.items()
    for method in methods
}
_OF_DASK = (
    {f"dask.{name}": getattr(cupykern.dask, name) for name in cupykern.dask.__all__} if da else {}
)
_NEEDS_GPUS = {"NcclCommunicator"}
_OF_RANKS = {
    f"parallel.{name}": getattr(parallel, name)
    for name in parallel.__all__
    if callable(getattr(parallel, name)) and name not in _NEEDS_GPUS
}
_OF_TARGETS = {f"targets.{name}": getattr(targets, name) for name in targets.__all__}
_OF_REFERENCE = {
    f"{prefix}.{name}": getattr(module, name)
    for prefix, module in (("reference", reference), ("reference.parallel", reference_of_ranks))
    for name in module.__all__
}
_OTHERS = {
    "expression.Expression": Expression,
    "op.Bound": Bound,
    "expression.read": read,
    "typing.Array": Array,
    **{
        f"nvfp4.{name}": getattr(nvfp4, name)
        for name in ("pack_e2m1", "unpack_e2m1", "scale_shape", "blocked_scales", "plain_scales")
    },
}
PUBLIC = {
    **_FUNCTIONS,
    **_METHODS,
    **_OF_DASK,
    **_OF_RANKS,
    **_OF_TARGETS,
    **_OF_REFERENCE,
    **_OTHERS,
}


_NAMES = {
    "np": np,
    "cupykern": cupykern,
    "dask": dask,
    "da": da,
    "parallel": parallel,
    "reference": reference,
    "nvfp4": nvfp4,
    "targets": targets,
}


def run_examples(name, documented, names):
    text = inspect.getdoc(documented) or ""
    found = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    assert any(not example.options.get(doctest.SKIP) for example in found.examples), "no example"
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(found, out=report.append)
    assert not runner.failures, "".join(report)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_example_of_a_public_name_runs(name, tmp_path, monkeypatch):
    if name == "tune":  # it writes to the store
        monkeypatch.setenv("CUPYKERN_CACHE_DIR", str(tmp_path))
    if name == "parallel.MpiCommunicator":
        pytest.importorskip("mpi4py")
    run_examples(name, PUBLIC[name], _NAMES)


def test_examples_of_torch():
    torch = pytest.importorskip("torch")
    operators = pytest.importorskip("cupykern.torch")
    run_examples("torch", operators, {"cupykern": cupykern, "torch": torch})


def test_examples_of_transformers():
    pytest.importorskip("transformers")
    module = pytest.importorskip("cupykern.transformers")
    run_examples("transformers", module.attention_forward, vars(module).copy())
