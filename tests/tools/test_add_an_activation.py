""" "Add an activation" of docs/kernels.md: in a copy of the package its lines make one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from package_copy import ROOT, blocks, copied, insert, replace, run

from cupykern.gemm import product
from cupykern.reference import activations

_KERNEL = "kernels_cu/gemm/epilogue/linear_combination.cuh"
_CHECK = """
import numpy as np
from cupykern import OPS, check
from cupykern.ops.problems.products import MatmulProblem
from cupykern.tools import history
from cupykern.tools.suite import choice

matmul = next(op for op in OPS if op.name == "matmul")
for dtype in ("float16", "float32", "int8"):
    for bias, out_dtype in (((24,), None), ((20, 1), "float32")):
        problem = MatmulProblem(
            20, 24, 40, dtype, bias=bias, activation="leaky_relu", out_dtype=out_dtype
        )
        found = check.check_problem(matmul, problem, 1, np)
        assert found.ok, (problem, str(found))
assert matmul.bench_problem((8, 16, 32), "bfloat16:leaky_relu").activation == "leaky_relu"
assert choice.group("bfloat16:bias+leaky_relu") == "bfloat16"
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """Of the package, with leaky_relu."""
    folder = copied(tmp_path_factory.mktemp("copy"), ("cupykern", "kernels_cu"))
    for name, text in blocks("Add an activation").items():
        lines = text.partition("\n")[2].rstrip()
        if name == _KERNEL:
            replace(folder / name, "sigmoid(x) * x)\n", f"sigmoid(x) * x) \\\n{lines}\n")
        else:
            insert(folder / name, '    "silu": ', lines)
    return folder


def test_the_page_has_a_line_in_three_places():
    assert list(blocks("Add an activation")) == [
        "cupykern/gemm/product.py",
        "cupykern/reference/activations.py",
        _KERNEL,
    ]


def test_the_three_places_have_the_same_activations():
    names = re.findall(r"^    X\(k(\w+), ", (ROOT / _KERNEL).read_text(), re.MULTILINE)
    names = [re.sub("(?!^)([A-Z])", r"_\1", name).lower() for name in names]
    assert [None, *names] == list(product.ACTIVATIONS) == list(activations.ACTIVATIONS)
    codes = [x.code for x in product.ACTIVATIONS.values()]
    assert codes == list(range(len(codes)))


def test_it_is_within_its_bound(copy):
    run(copy, "-c", _CHECK)


def test_a_wrong_kernel_is_found(copy):
    replace(copy / _KERNEL, "0.01f * x", "0.0101f * x")
    try:
        with pytest.raises(AssertionError, match="leaky_relu"):
            run(copy, "-c", _CHECK)
    finally:
        replace(copy / _KERNEL, "0.0101f * x", "0.01f * x")
