"""matmul of complex64, beside the properties that hold for every op."""

from __future__ import annotations

import needs
import numpy as np
import pytest
from products import compare

import cupykern
from cupykern import OPS, reference
from cupykern.gemm import complex64
from cupykern.numerics import to_numpy
from cupykern.ops.complex_matmul import ComplexProblem

OP = next(op for op in OPS if op.name == "complex_matmul")


def complex_values(target, shape, seed):
    parts = np.random.default_rng(seed).standard_normal((2, *shape), np.float32)
    return target.xp.asarray(parts[0] + 1j * parts[1])


@needs.hopper
@pytest.mark.parametrize("precision", ["tf32", "fp16x3", "bf16x6"])
@pytest.mark.parametrize("layouts", ["CC", "FF"])
def test_parts_on_tensor_cores(target, precision, layouts):
    problem = ComplexProblem(
        70, 72, 100, batch_a=(2,), layout_a=layouts[0], layout_b=layouts[1], bias=(72,),
        precision=precision,
    )  # fmt: skip
    call = OP.inputs(problem, 1, target.xp)
    assert compare(OP, *call.args, **call.kwargs).ok


def test_the_imaginary_unit_squared(target):
    i = target.xp.asarray([[1j]], np.complex64)
    assert to_numpy(cupykern.matmul(i, i)).tolist() == [[-1.0]]


def test_numbers_near_both_ends_of_fp32(target):
    a = target.xp.asarray([[2.0**100]], np.complex64)
    b = target.xp.asarray([[2.0**-120 - 2.0**-110 * 1j]], np.complex64)
    assert to_numpy(cupykern.matmul(a, b)).tolist() == [[2.0**-20 - 2.0**-10 * 1j]]


def test_out_in_columns_and_views_of_larger_arrays(target):
    a, b = (complex_values(target, s, n) for n, s in enumerate(((6, 10), (10, 8))))
    expected = to_numpy(cupykern.matmul(a, b))
    large = target.xp.zeros((6, 20), np.complex64)
    for out in (target.xp.zeros((8, 6), np.complex64).T, large[:, 3:11], large[:, ::2][:, :8]):
        assert cupykern.matmul(a, b, out=out) is out
        np.testing.assert_array_equal(to_numpy(out), expected)


def test_illegal_arguments_are_refused(target):
    a, b = (complex_values(target, s, n) for n, s in enumerate(((6, 10), (10, 8))))
    real = target.xp.ones(8, np.float32)
    for error, message, options in (
        (ValueError, "activation must be None", {"activation": "relu"}),
        (ValueError, "epilogue must be None", {"epilogue": "acc + 1"}),
        (ValueError, "accumulate must be", {"accumulate": "float16"}),
        (TypeError, "alpha", {"alpha": 1j}),
        (TypeError, "out_dtype must be one of complex64", {"out_dtype": "float32"}),
        (TypeError, "bias must be complex64", {"bias": real}),
        (ValueError, "residual must broadcast", {"residual": a}),
        (ValueError, "precision must be one of", {"precision": "tf64"}),
        (ValueError, "out must not overlap a", {"out": a[:, :8]}),
    ):
        with pytest.raises(error, match=message):
            cupykern.matmul(a, b, **options)
    with pytest.raises(TypeError, match="must both be complex64"):
        cupykern.matmul(a, b.real)
    with pytest.raises(ValueError, match="a's columns must be b's rows"):
        cupykern.matmul(a, a)


def test_the_reference_of_real_products_refuses_complex_numbers():
    z = np.ones((2, 2), np.complex64)
    with pytest.raises(TypeError, match=r"reference\.complex_matmul"):
        reference.matmul(z, z)
    with pytest.raises(TypeError, match=r"reference\.complex_matmul_bound"):
        reference.matmul_bound(z, z, reference=(z,))


@pytest.mark.parametrize("shape", [(4096, 1), (1, 4096)])
def test_vectors_are_embedded_in_as_many_elements_as_they_have(shape, monkeypatch):
    """As rows, not as columns: those would be padded to 16 times as many."""
    made = []
    known = complex64.embedding_of
    monkeypatch.setattr(
        complex64, "embedding_of", lambda *given: made.append(known(*given)) or made[-1]
    )
    a, b = np.ones((2, shape[0]), np.complex64), np.ones(shape, np.complex64)
    cupykern.matmul(a, b)
    assert made and all(np.prod(one.shape) == 4 * b.size for one in made)
