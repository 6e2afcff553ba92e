"""Other libraries' products give what ours give, where both are exact."""

from __future__ import annotations

import numpy as np
import pytest

import cupykern
from cupykern import BlockMask, dtypes
from cupykern.check import compare
from cupykern.op import Call
from cupykern.ops.problems.attention import BIAS_BY_DISTANCE
from cupykern.peers import flex_attention, torch_attention
from cupykern.peers import torch as peers
from cupykern.peers.torch_dual import steps_of_dual
from cupykern.peers.torch_product import steps_of_product

pytest.importorskip("torch")
BUILD = {peer.name: peer.build for peer in peers.PEERS}


def integers(shape, dtype: str, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtypes.NAMES[dtype])


def to_numpy(tensor) -> np.ndarray:
    return tensor.float().numpy().astype(np.float64)


def check(name: str, op: str, call: Call) -> None:
    ours = getattr(cupykern, op)(*call.args, **call.kwargs)
    theirs = BUILD[name](op, call)()
    assert str(theirs.dtype) == f"torch.{ours.dtype}"
    np.testing.assert_array_equal(to_numpy(theirs), ours.astype(np.float64))


def operands(dtype: str, dtype_b: str) -> tuple[np.ndarray, np.ndarray]:
    return integers((32, 64), dtype, 1), integers((48, 64), dtype_b, 2).T


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_torch_computes_our_product(dtype):
    check("torch", "matmul", Call(operands(dtype, dtype)))


@pytest.mark.parametrize("residual", [None, 3.0])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_torch_computes_our_linear_layer(activation, residual):
    a, b = operands("float16", "float16")
    kwargs = {"bias": np.arange(-24, 24, dtype=np.float16), "activation": activation}
    if residual is not None:
        kwargs["residual"] = np.full((32, 48), residual, np.float16)
    check("torch", "matmul", Call((a, b), kwargs))


@pytest.mark.parametrize("dtype_b", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_torch_computes_our_mixed_product(dtype_b):
    a, b = operands("float16", dtype_b)
    check("torch", "scaled_mm", Call((a, b, None, 0.5)))
    rows = 2.0 ** np.arange(32)[:, None] % 3 + 1
    columns = np.where(np.arange(48)[None] % 2, 0.5, -1.0)
    scales = (np.asarray(s, np.float32) for s in (rows, columns))
    check("torch", "scaled_mm", Call((a, b, *scales)))


def test_weights_cast_before():
    a, b = operands("float16", "float8_e4m3fn")
    bias = np.arange(-24, 24, dtype=np.float16)
    check("torch.cast", "scaled_mm", Call((a, b, None, 0.5), {"bias": bias}))
    columns = np.where(np.arange(48)[None] % 2, 0.5, -1.0).astype(np.float32)
    check("torch.cast", "scaled_mm", Call((a, b, None, columns)))
    rows = np.ones((32, 1), np.float32)
    assert BUILD["torch.cast"]("scaled_mm", Call((a, b, rows, None))) is None
    assert BUILD["torch.cast"]("matmul", Call((a, a.T))) is None


def test_nvfp4_decoded_before():
    codes = np.random.default_rng(1).integers(0, 256, (48, 32), np.uint8)
    scale = np.full((48, 4), 0.5, dtypes.float8_e4m3fn)
    call = Call((integers((32, 64), "float16", 1), cupykern.NvFp4(codes, scale)))
    check("torch.cast", "scaled_mm", call)
    assert BUILD["torch"]("scaled_mm", call) is BUILD["torch.fast"]("scaled_mm", call) is None


def test_int8_with_scales():
    check("torch", "scaled_mm", Call((*operands("int8", "int8"), np.float32(0.5), 2.0)))


@pytest.mark.parametrize("name", ["torch", "torch.fast"])
def test_fp8_by_tensor(name):
    call = Call((*operands("float8_e4m3fn", "float8_e4m3fn"), np.array(0.5, np.float32), None))
    check(name, "scaled_mm", call)


@pytest.mark.parametrize("name", ["torch", "torch.fast"])
def test_fp8_by_row_and_column(name):
    scales = np.full((32, 1), 0.5, np.float32), np.full((1, 48), -2, np.float32)
    try:
        check(name, "scaled_mm", Call((*operands("float8_e4m3fn", "float8_e4m3fn"), *scales)))
    except RuntimeError as error:
        if "per-tensor scaling for CPU" not in str(error):
            raise
        pytest.skip("this torch has none on a CPU")


@pytest.mark.parametrize("shape", [(1, 256, 256), (5, 256, 640), (130, 144, 272)])
def test_fp8_by_block(monkeypatch, shape):
    """torch's layout of scales: contiguous along the first dim, blocks along k padded to fours."""
    functional = pytest.importorskip("torch").nn.functional
    if not hasattr(functional, "scaled_mm"):
        pytest.skip("torch has it from 2.10 on")
    m, n, k = shape
    along_k, along_n = -(-k // 128), -(-n // 128)

    def scaled_mm(a, b, scale_a, kind_a, scale_b, kind_b, *, output_dtype):
        assert (kind_a.name, kind_b.name) == ("BlockWise1x128", "BlockWise128x128")
        rows = -(-along_k // 4) * 4
        assert scale_a.shape == (m, along_k) and scale_a.stride() == (1, m)
        assert scale_b.shape == (rows, along_n) and scale_b.stride() == (1, rows)
        wide_a = a.float() * scale_a.repeat_interleave(128, 1)[:, :k]
        of_b = scale_b.repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
        return (wide_a @ (b.float() * of_b)).to(output_dtype)

    monkeypatch.setattr(functional, "scaled_mm", scaled_mm)
    a, b = integers((m, k), "float8_e4m3fn", 1), integers((n, k), "float8_e4m3fn", 2).T
    rng = np.random.default_rng(3)
    scales = (
        rng.choice((0.5, 1.0, 2.0), size).astype(np.float32)
        for size in ((m, along_k), (along_k, along_n))
    )
    call = Call((a, b, *scales), {"out_dtype": "float32"})
    check("torch", "scaled_mm", call)
    assert BUILD["torch.fast"]("scaled_mm", call) is None
    monkeypatch.delattr(functional, "scaled_mm")
    assert BUILD["torch"]("scaled_mm", call) is None


@pytest.mark.parametrize("causal", [False, True])
def test_torch_flash_attention_is_within_our_bound(causal):
    """Both within the bound of the same reference."""
    op = next(op for op in cupykern.OPS if op.name == "attention")
    call = op.inputs(op.bench_problem((1, 2, 64, 64, int(causal)), "float16"), 1, np)
    references = op.reference(*call.args, **call.kwargs)
    bounds = op.bound(*call.args, **call.kwargs, reference=references)
    flash = {peer.name: peer.build for peer in torch_attention.PEERS}["torch.flash"]
    theirs = flash("attention", call)().numpy()
    assert compare((theirs,), references, bounds).ok
    assert flash("attention", Call(call.args, {"mask": None, "return_lse": True})) is None
    assert flash("softmax", call) is None


ATTENTION = next(op for op in cupykern.OPS if op.name == "attention")
_RNG = np.random.default_rng(5)
SLOPES, SINKS = (_RNG.uniform(-0.2, 1, shape).astype(np.float32) for shape in ((2, 4), 4))
RELATIVE = {
    "score": BIAS_BY_DISTANCE,
    "operands": {"bias": _RNG.standard_normal((4, 128)).astype(np.float32)},
}


def flex(monkeypatch, call: Call):
    """Without the compiler, which needs minutes."""
    monkeypatch.setattr(pytest.importorskip("torch"), "compile", lambda function, **_: function)
    (peer,) = flex_attention.PEERS
    return peer.build("attention", call)


def blocks_of(size: tuple[int, int], batch: tuple[int, int] = (1, 1)) -> BlockMask:
    """Of every type but partial ones."""
    shape = *batch, *(-(-300 // n) for n in size)
    types, none = np.random.default_rng(3).integers(0, 3, shape), np.zeros((0, *size), bool)
    numbers = np.full(shape, -1, np.int32)
    return BlockMask(types.astype(np.uint8), numbers, none, 300, 300, *size, causal_offset=7)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "scale": 0.3},
        {"causal": True, "window": (20, 0)},
        {"causal": True, "softcap": 2.0},
        {"causal": True, "alibi_slopes": SLOPES[0]},
        {"causal": True, "sinks": SINKS},
        {"causal": True, **RELATIVE},
        {"window": (20, 9)},
        {"window": (-1, 5)},
        {"window": (150, -1)},
        {"softcap": 0.5},
        {"alibi_slopes": SLOPES},
        {"sinks": SINKS},
        RELATIVE,
        {**RELATIVE, "softcap": 3.0, "alibi_slopes": SLOPES, "sinks": SINKS, "window": (90, 30)},
        {"mask": BlockMask.causal(300, 300, target="host")},
        {"mask": BlockMask.document(np.arange(300) // 128)},
        {"mask": BlockMask.interleaved(300, 300, 2, target="host"), "softcap": 3.0},
        {"mask": blocks_of((64, 128))},
        {"mask": blocks_of((128, 64), (2, 4)), "causal": True},
        {"mask": blocks_of((128, 128), (2, 1)), "window": (100, 100), "sinks": SINKS},
    ],
    ids=lambda options: "+".join(options),
)
def test_flex_attention_has_our_options(options, monkeypatch):
    """Within the bound; a result that a sink weights afterwards has been rounded once more."""
    q, k, v = (
        np.random.default_rng(i).standard_normal((2, heads, 300, 32)).astype(np.float16)
        for i, heads in enumerate((4, 2, 2))
    )
    theirs = flex(monkeypatch, Call((q, k, v), options))().numpy()
    references = ATTENTION.reference(q, k, v, **options)
    bound = ATTENTION.bound(q, k, v, **options, reference=references)[0].elementwise
    if "sinks" in options:
        bound = bound + 2.0**-11 * (abs(references[0]) + bound)
    assert (abs(theirs.astype(np.float64) - references[0]) <= bound).all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_has_the_rows_of_options(monkeypatch):
    for number in range(1, 10):
        call = ATTENTION.inputs(ATTENTION.bench_problem((1, 2, 1024, 16, number), "float16"), 1, np)
        ours = cupykern.attention(*call.args, **call.kwargs)
        np.testing.assert_allclose(flex(monkeypatch, call)().numpy(), ours, atol=4e-3)


def test_what_flex_attention_has_not(monkeypatch):
    x = np.ones((1, 2, 256, 16), np.float16)
    partial = BlockMask.from_dense(np.tri(256, dtype=bool) | np.eye(256, k=9, dtype=bool))
    for options in (
        {},  # torch_attention has it
        {"causal": True, "return_lse": True},
        {"causal": True, "seq_lens": np.array([9])},
        {"score": "s + 0.5", "causal": True},
        {"mask": np.ones((256, 256), bool)},
        {"mask": "j <= i"},
        {"mask": partial},
    ):
        assert flex(monkeypatch, Call((x, x, x), options)) is None
    (peer,) = flex_attention.PEERS
    assert peer.build("decode_attention", Call((x, x, x), {"softcap": 2.0})) is None


def test_what_torch_has_not():
    a, b = operands("float16", "float8_e4m3fn")
    blocks = np.ones((32, 1), np.float32), np.ones((1, 1), np.float32)
    assert BUILD["torch.fast"]("scaled_mm", Call((a, b, *blocks))) is None
    wide = Call(
        (
            integers((4, 256), "float16", 1),
            integers((256, 8), "int8", 2),
            np.ones((4, 2), np.float32),
        )
    )
    assert BUILD["torch"]("scaled_mm", wide) is None
    assert BUILD["torch"]("matmul", Call((a, a.T), {"config": None})) is None
    assert BUILD["torch.fast"]("softmax", Call((a,))) is None


@pytest.mark.parametrize("dtype_b", ["float8_e4m3fn", "int8"])
def test_the_steps_of_a_mixed_product(dtype_b):
    a, b = operands("float16", dtype_b)
    bias = np.arange(-24, 24, dtype=np.float16)
    call = Call((a, b, None, 0.5), {"bias": bias, "activation": "relu"})
    steps = steps_of_product("scaled_mm", call)
    assert list(steps) == ["cast", "product", "epilogue"]
    results = {name: function(*tensors) for name, (function, tensors) in steps.items()}
    ours = cupykern.scaled_mm(*call.args, **call.kwargs)
    np.testing.assert_array_equal(to_numpy(results["epilogue"]), ours.astype(np.float64))
    np.testing.assert_array_equal(to_numpy(results["cast"]), b.astype(np.float64))


def test_a_product_of_one_step_has_none():
    assert steps_of_product("matmul", Call(operands("float16", "float16"))) == {}
    int8 = Call((*operands("int8", "int8"), np.float32(0.5), 2.0))
    assert list(steps_of_product("scaled_mm", int8)) == ["product", "epilogue"]


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_two_products_side_by_side(dtype):
    op = next(op for op in cupykern.OPS if op.name == "dual_gemm_silu")
    call = op.inputs(op.bench_problem((32, 48, 64), dtype), 1, np)
    references = op.reference(*call.args, **call.kwargs)
    theirs = to_numpy(BUILD["torch"]("dual_gemm_silu", call)())
    np.testing.assert_allclose(theirs, references[0], rtol=0.02, atol=0.02)
    assert set(steps_of_dual(call)) == {"product", "epilogue"}
    assert not steps_of_dual(op.inputs(op.bench_problem((32, 48, 64), "float4_e2m1fn"), 1, np))
    blocks = np.ones((32, 1), np.float32)
    assert not steps_of_dual(Call(call.args, {"scale_a": blocks}))


def test_torch_computes_our_softmax_of_logits():
    op = next(op for op in cupykern.OPS if op.name == "dequant_softmax")
    call = op.inputs(op.bench_problem((4, 300, 64), "float16"), 1, np)
    references = op.reference(*call.args, **call.kwargs)
    theirs = to_numpy(BUILD["torch"]("dequant_softmax", call)())
    np.testing.assert_allclose(theirs, references[0], rtol=0.1, atol=1e-3)
    assert BUILD["torch"]("dequant_softmax", Call(call.args, {"dtype": "float32"})) is None
