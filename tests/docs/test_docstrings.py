"""Every public docstring has an example, which runs on the host target with numpy arrays."""

from __future__ import annotations

import doctest
import inspect

import numpy as np
import pytest

import cupykern
from cupykern import parallel

try:
    import dask.array as da

    import cupykern.dask
except ImportError:
    da = None

_FUNCTIONS = {name: getattr(cupykern, name) for name in cupykern.__all__ if name != "OPS"}
_METHODS = {
    f"{name}.{method}": getattr(getattr(cupykern, name), method)
    for name, methods in {
        "BlockMask": ("from_dense", "causal", "document", "interleaved", "to_dense"),
        "NvFp4": ("to", "dequantize"),
    }.items()
    for method in methods
}
_OF_DASK = (
    {f"dask.{name}": getattr(cupykern.dask, name) for name in cupykern.dask.__all__} if da else {}
)
_OF_RANKS = {
    f"parallel.{name}": getattr(parallel, name)
    for name in parallel.__all__
    if inspect.isfunction(getattr(parallel, name)) or name == "SelfCommunicator"
}
PUBLIC = {**_FUNCTIONS, **_METHODS, **_OF_DASK, **_OF_RANKS}


_NAMES = {
    "np": np,
    "cupykern": cupykern,
    "da": da,
    "parallel": parallel,
}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_example(name, tmp_path, monkeypatch):
    if name == "tune":  # it writes to the store
        monkeypatch.setenv("CUPYKERN_CACHE_DIR", str(tmp_path))
    text = inspect.getdoc(PUBLIC[name]) or ""
    found = doctest.DocTestParser().get_doctest(text, _NAMES, name, None, None)
    assert any(not example.options.get(doctest.SKIP) for example in found.examples), "no example"
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(found, out=report.append)
    assert not runner.failures, "".join(report)
