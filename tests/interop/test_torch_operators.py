"""The ops as torch's custom operators: fake kernels, torch.compile, what breaks its graph."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from foreign_twins import CALLED, calls

import cupykern
import cupykern.torch
from cupykern.interop.foreign import native
from cupykern.interop.tensors import TENSORS

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(4, 64, generator=GENERATOR).half()
W = torch.linspace(0.5, 1.5, 64).half()
NAMES = sorted(TENSORS.operators)


def _tensor(x: np.ndarray) -> torch.Tensor:
    return TENSORS.back(np.array(x, order="C"), None)


FORMULA = {"epilogue", "operands", "score"}  # calls with a formula are not traced
MASKS = {"attention_varlen", "decode_attention"}  # whose masks are formulas alone


def _is_operators(call) -> bool:
    """Whether an operator takes the arguments."""
    values = (*call.args, *call.kwargs.values())
    if FORMULA & set(call.kwargs) or isinstance(call.kwargs.get("mask"), str):
        return False
    return not any(hasattr(x, "arrays") or isinstance(x, np.dtype) for x in values)


def test_every_op_of_arrays_is_an_operator():
    """Others break the graph."""
    without = {"quantize_nvfp4", "nonfinite_report"}
    assert {op.run.__name__ for op in CALLED} - without <= set(NAMES)
    assert not without & set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_operators_have_the_arguments_of_functions(name):
    function, operator = getattr(cupykern, name), getattr(cupykern.torch, name)
    parameters = dict(inspect.signature(function).parameters)
    parameters.pop("out", None), parameters.pop("config", None)
    assert dict(inspect.signature(operator).parameters) == parameters
    for formula in (*FORMULA, *(("mask",) if name in MASKS else ())):
        parameters.pop(formula, None)
    schema = getattr(torch.ops.cupykern, name).default._schema
    assert [argument.name for argument in schema.arguments] == list(parameters)
    for argument in schema.arguments:
        default = parameters[argument.name].default
        if argument.has_default_value():
            there = argument.default_value
            assert (tuple(there) if isinstance(there, list) else there) == default
        else:
            # What has no default follows.
            names = "k_cache", "v_cache", "cu_seqlens_k"
            assert default is inspect.Parameter.empty or argument.name in names


@pytest.mark.parametrize("op", CALLED, ids=lambda op: op.name)
@pytest.mark.parametrize("seed", range(6))
def test_operators_and_their_fakes_agree_with_functions(op, seed):
    call, _ = calls(op, seed, _tensor)
    operator = TENSORS.operators.get(op.run.__name__)
    if operator is None or not _is_operators(call):
        return
    expected = getattr(cupykern, op.run.__name__)(*call.args, **call.kwargs)
    expected = expected if isinstance(expected, tuple) else (expected,)

    def run(*args, **kwargs):
        found = operator(*args, **kwargs)
        return found if isinstance(found, tuple) else (found,)

    found = run(*call.args, **call.kwargs)
    mode = torch._subclasses.FakeTensorMode()
    fake = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in call.args]
    options = {
        name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
        for name, x in call.kwargs.items()
    }
    with mode:
        faked = run(*fake, **options)
    for y, x, z in zip(expected, found, faked, strict=True):
        assert x.shape == y.shape == z.shape and x.dtype == y.dtype == z.dtype
        assert x.is_contiguous() and z.is_contiguous()
        assert native("x", x).tobytes() == native("y", y).tobytes()


@pytest.mark.parametrize(
    "name, args, kwargs",
    [
        ("softmax", (X,), {"scale": 2.0, "dtype": torch.float32}),
        ("rms_norm", (X, W), {"residual": X + 1, "return_stats": True, "quantize": "int8"}),
        ("quantize", (X, "e4m3"), {"granularity": "block", "block": (2, 32)}),
        ("matmul", (X, X.t()), {"activation": "silu"}),
        ("attention", (X.view(1, 2, 2, 64),) * 3, {"causal": True, "return_lse": True}),
        (
            "cascade_attention",
            (X.view(4, 1, 1, 64), *[X.view(1, 1, 4, 64)] * 2, *[X.view(4, 1, 1, 64)] * 2),
            {"softcap": 3.0, "return_lse": True},
        ),
        (
            "attention",
            (X.view(1, 2, 2, 64),) * 3,
            {"window": (0, 1), "softcap": 3.0, "sinks": torch.ones(2)},
        ),
    ],
)
def test_operators_pass_torchs_opcheck(name, args, kwargs):
    torch.library.opcheck(getattr(torch.ops.cupykern, name).default, args, kwargs)


def _heads_and_caches(dtype=torch.float16):
    q, k, v = torch.randn(2, 3, 8, 64, generator=GENERATOR).half().split((4, 2, 2), dim=2)
    positions = torch.arange(3, dtype=torch.int32)
    caches = [torch.zeros(2, 2, 8, 64, dtype=dtype) for _ in range(2)]
    return q, k, v, positions, *caches


INV_FREQ = torch.linspace(1, 0.01, 32)


def test_opcheck_of_what_is_written():
    options = {"inv_freq": INV_FREQ, "q_weight": W}
    operator = torch.ops.cupykern.rope_and_cache.default
    torch.library.opcheck(operator, tuple(_heads_and_caches()), options)
    scales = {"k_scale": torch.zeros(2, 2, 8), "v_scale": torch.zeros(2, 2, 8)}
    torch.library.opcheck(operator, _heads_and_caches(torch.int8), {**options, **scales})
    torch.library.opcheck(operator, (*_heads_and_caches()[:4], None, None), options)


@pytest.mark.parametrize("functions", [cupykern.torch, cupykern], ids=lambda m: m.__name__)
@pytest.mark.parametrize("scale", [None, 0.5])
def test_compiled_graphs_write_to_caches(functions, scale):
    def step(q, k, v, positions, k_cache, v_cache, functions=functions):
        options = {} if scale is None else {"k_scale": scale, "v_scale": scale}
        heads = q * 2, k * 2, v * 2
        y = functions.rope_and_cache(
            *heads, positions, k_cache, v_cache, inv_freq=INV_FREQ, **options
        )
        return y + 1

    given = _heads_and_caches(torch.float16 if scale is None else torch.int8)
    copies = [x.clone() for x in given]
    torch.compiler.reset()
    y = torch.compile(step, fullgraph=True, backend="aot_eager")(*given)
    assert torch.equal(y, step(*copies, functions=cupykern))
    assert all(map(torch.equal, given, copies)) and given[5].any()


def _block(x, w, functions):
    y, s = functions.rms_norm(x + 1, w, residual=x)
    z = functions.matmul(y, x.t(), activation="gelu", out_dtype=torch.float32)
    values, scale = functions.quantize(y, "e4m3", granularity="row")
    c = functions.scaled_mm(values, values.t(), scale, 0.5)
    return functions.softmax(z * 2, scale=0.5), s, values, scale, c


def test_outputs_that_share_an_allocation_become_storages_of_their_own():
    """On a GPU small outputs share one allocation, which torch refuses from an operator."""
    memory = torch.arange(8.0)
    first, second = cupykern.torch.apart([memory[:4], memory[4:]])
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert torch.equal(torch.cat([first, second]), memory)


@pytest.mark.parametrize("functions", [cupykern.torch, cupykern], ids=lambda m: m.__name__)
def test_compile_keeps_one_graph(functions):
    torch.compiler.reset()
    compiled = torch.compile(_block, fullgraph=True, backend="aot_eager")
    for rows in (4, 7):  # the second one with shapes that are symbols
        x = torch.randn(rows, 64, generator=GENERATOR).half()
        for found, expected in zip(compiled(x, W, functions), _block(x, W, cupykern), strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_what_is_no_operator_breaks_the_graph_alone():
    def written(x):
        return cupykern.softmax(x + 1, out=torch.empty_like(x)) * 2

    def reported(x):
        return cupykern.nonfinite_report(x + 1).size + cupykern.softmax(x).sum()

    for function in (written, reported):
        torch.compiler.reset()
        assert torch.equal(torch.compile(function, backend="eager")(X), function(X))


def test_formulas_break_the_graph():
    """No operator has them: the call runs untraced, with its operands."""
    a, s = torch.linspace(-1, 1, 128, dtype=torch.float16).reshape(8, 16), torch.arange(8.0)

    def product(a, s):
        return cupykern.matmul(a, a.T, epilogue="acc * s", operands={"s": s}) * 2

    torch.testing.assert_close(torch.compile(product, backend="eager")(a, s), product(a, s))


def test_gradients_are_refused():
    x = X.float().requires_grad_()
    with pytest.raises(RuntimeError, match=r"x requires grad.*torch\.no_grad\(\)"):
        cupykern.torch.softmax(x)
    torch.compiler.reset()
    compiled = torch.compile(cupykern.torch.softmax, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="x requires grad"):
        compiled(x)
    with torch.no_grad():
        assert torch.equal(compiled(x), cupykern.softmax(x.detach()))
