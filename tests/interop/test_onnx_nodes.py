"""ONNX's own tests of the operators that this library has, by a small adapter.

float32 cases of Attention are those of the FP64 reference; the kernels compute them in float16,
and are compared with the reference of that.  Its 16-bit cases, and all cases of the other
operators, run the kernels themselves.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest

import cupykern
from cupykern import check, numerics, reference

onnx = pytest.importorskip("onnx")

OPERATORS = {
    *("Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization", "MatMul", "Gemm"),
    *("Attention", "RotaryEmbedding"),
}


def cases() -> list[Any]:
    """Of the modules that have the operators' names: all modules take seconds to import."""
    from onnx.backend.test.case import node as package

    def import_some(package: Any) -> None:
        for operator in sorted(OPERATORS):  # in one order in all processes
            import_module(f"{package.__name__}.{operator.lower()}")

    with warnings.catch_warnings(), patch.object(package, "import_recursive", import_some):
        warnings.simplefilter("ignore")  # of casts that overflow
        found = package.collect_testcases(None)
    nodes = [(case, case.model.graph.node) for case in found]
    return [case for case, node in nodes if len(node) == 1 and node[0].op_type in OPERATORS]


CASES = cases()


def along_last(x: Any, axis: int, call: Any) -> tuple[Any, ...]:
    """`call` of x with the dims from `axis` on as one."""
    rows = int(np.prod(x.shape[: axis % x.ndim]))
    outputs = call(x.reshape(rows, -1))
    y, *statistics = outputs if isinstance(outputs, tuple) else (outputs,)
    kept = (*x.shape[: axis % x.ndim], *[1] * (x.ndim - axis % x.ndim))
    return (y.reshape(x.shape), *(s.reshape(kept) for s in statistics))


def _layer_normalization(a: dict[str, Any], x: Any, scale: Any, bias: Any = None) -> Any:
    flat = [None if w is None else w.ravel() for w in (scale, bias)]
    eps = a.get("epsilon", 1e-5)
    y, mean, rstd = along_last(
        x,
        a.get("axis", -1),
        lambda rows: cupykern.layer_norm(rows, *flat, eps=eps, return_stats=True),
    )
    return y, mean, rstd


def _rms_normalization(a: dict[str, Any], x: Any, scale: Any) -> Any:
    eps = a.get("epsilon", 1e-5)
    return along_last(
        x, a.get("axis", -1), lambda rows: cupykern.rms_norm(rows, scale.ravel(), eps=eps)
    )


def _matmul(a: dict[str, Any], x: Any, y: Any) -> Any:
    return (cupykern.matmul(x, y),)


def _gemm(a: dict[str, Any], x: Any, y: Any, c: Any = None) -> Any:
    x, y = x.T if a.get("transA") else x, y.T if a.get("transB") else y
    if c is not None:
        shape = x.shape[0], y.shape[1]
        c = np.broadcast_to(np.float32(a.get("beta", 1.0)) * c, shape)
    return (cupykern.matmul(x, y, alpha=a.get("alpha", 1.0), residual=c),)


def attention_arguments(a: dict[str, Any], given: tuple[Any, ...]) -> tuple[tuple, dict[str, Any]]:
    """(q, k, v) with heads before rows, and the options of `cupykern.attention`."""
    q, k, v, mask, past_k, past_v, lens = (*given, *[None] * (7 - len(given)))
    if q.ndim == 3:
        heads = a["q_num_heads"], a["kv_num_heads"], a["kv_num_heads"]
        q, k, v = (
            x.reshape(*x.shape[:2], n, -1).swapaxes(1, 2)
            for x, n in zip((q, k, v), heads, strict=True)
        )
    if past_k is not None:
        k, v = (np.concatenate(pair, axis=2) for pair in ((past_k, k), (past_v, v)))
    left, right = (a.get(f"{side}_window_size", -1) for side in ("left", "right"))
    options: dict[str, Any] = {
        "causal": bool(a.get("is_causal", 0)),
        "window": (left, right) if (left, right) != (-1, -1) else None,
        "softcap": a.get("softcap") or None,
        "scale": a.get("scale"),
    }
    if lens is None:
        options["input_pos"] = 0 if past_k is None else past_k.shape[2]
    else:
        options |= {"seq_lens": lens, "causal_align": "bottom_right"}
    if mask is not None:
        short = k.shape[2] - mask.shape[-1]  # keys after the mask's are masked
        if short > 0 and mask.shape[-1] > 1:
            hidden = False if mask.dtype == np.bool_ else -np.inf
            widths = [(0, 0)] * (mask.ndim - 1) + [(0, short)]
            mask = np.pad(mask.astype(np.float32) if mask.dtype.kind == "V" else mask, widths,
                          constant_values=hidden)  # fmt: skip
        options["mask"] = mask
    return (q, k, v), options


def check_in_16_bits(*args: Any, **options: Any) -> None:
    references = reference.attention(*args, **options)
    bounds = reference.attention_bound(*args, reference=references, **options)
    outputs = (cupykern.attention(*args, **options),)
    assert check.compare(outputs, references, bounds).ok


def scores(mode: int, q: Any, k: Any, options: dict[str, Any]) -> Any:
    """qk_matmul_output: 0 products, 1 capped, 2 with mask and causality, 3 probabilities.

    attention has no scores in memory; matmul, with a formula, and softmax make them.
    """
    k = k.repeat(q.shape[1] // k.shape[1], axis=1)
    scale = options["scale"] or q.shape[-1] ** -0.5
    formula, operands = "acc * scale", {"scale": scale}
    if mode >= 1 and options["softcap"]:
        formula, operands = "cap * tanh(acc * scale / cap)", {**operands, "cap": options["softcap"]}
    found = cupykern.matmul(q, k.swapaxes(2, 3), epilogue=formula, operands=operands)
    if mode < 2:
        return found
    rows, cols = np.arange(q.shape[2])[:, None] + options["input_pos"], np.arange(k.shape[2])
    left, right = options["window"] or (-1, -1)
    hidden = (options["causal"] & (cols > rows)) | ((left >= 0) & (rows - cols > left))
    hidden |= (right >= 0) & (cols - rows > right)
    bias, mask = np.where(hidden, -np.inf, 0), options.get("mask", np.zeros(()))
    bias = bias + (np.where(mask, 0, -np.inf) if mask.dtype == np.bool_ else mask)
    found = (found + bias).astype(q.dtype)
    return found if mode == 2 else cupykern.softmax(found, mask=found > -np.inf)


def _attention(a: dict[str, Any], *given: Any) -> Any:
    (q, k, v), options = attention_arguments(a, given)
    if q.dtype == np.float32:
        y = reference.attention(q, k, v, **options)[0]
        check_in_16_bits(*(x.astype(np.float16) for x in (q, k, v)), **options)
    else:
        y = cupykern.attention(q, k, v, **options)
    if given[0].ndim == 3:
        y = y.swapaxes(1, 2).reshape(*given[0].shape[:2], -1)
    mode = a.get("qk_matmul_output_mode", 0)
    return y, k, v, lambda: scores(mode, q, k, options)


def _rotary_embedding(
    a: dict[str, Any], x: Any, cosines: Any, sines: Any, positions: Any = None
) -> Any:
    """The tables' rows are of positions or, without these, of tokens."""
    flat = x.ndim == 3
    x = x.reshape(*x.shape[:2], a["num_heads"], -1) if flat else x.swapaxes(1, 2)
    table = np.concatenate((cosines, sines), axis=-1)
    if positions is None:
        positions = np.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2])
        table = table.reshape(-1, table.shape[-1])
    no_keys = x[:, :, :0]
    y, _ = cupykern.rope_and_cache(
        *(x, no_keys, no_keys, positions.astype(np.int32)),
        cos_sin=table,
        interleaved=bool(a.get("interleaved", 0)),
    )
    return (y.reshape(*y.shape[:2], -1) if flat else y.swapaxes(1, 2),)


ADAPTERS = {
    "Softmax": lambda a, x: (cupykern.softmax(x, a.get("axis", -1)),),
    "LogSoftmax": lambda a, x: (cupykern.log_softmax(x, a.get("axis", -1)),),
    "LayerNormalization": _layer_normalization,
    "RMSNormalization": _rms_normalization,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Attention": _attention,
    "RotaryEmbedding": _rotary_embedding,
}


def as_array(x: Any, kind: int) -> Any:
    """ONNX gives bfloat16 as its bits."""
    if kind == onnx.TensorProto.BFLOAT16:
        return np.asarray(x).view(ml_dtypes.bfloat16)
    return np.asarray(x)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.removeprefix("test_"))
def test_onnx_test_vectors_hold_within_the_bound(case):
    (node,) = case.model.graph.node
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    for given, expected in case.data_sets:
        kinds = [x.type.tensor_type.elem_type for x in case.model.graph.input]
        arrays = iter(map(as_array, given, kinds))
        inputs = [next(arrays) if name else None for name in node.input]
        kinds = [x.type.tensor_type.elem_type for x in case.model.graph.output]
        wanted = iter(map(as_array, expected, kinds))
        outputs = ADAPTERS[node.op_type](attributes, *inputs)
        assert len(node.output) <= len(outputs)
        for name, y in zip(node.output, outputs, strict=False):
            if not name:
                continue
            exact, y = next(wanted), y() if callable(y) else y
            assert y.shape == exact.shape
            exact_dtype = exact.dtype
            rtol = case.rtol
            if exact_dtype in (np.float16, ml_dtypes.bfloat16):  # ONNX's own is rounded, too
                rtol = max(rtol, 4 * numerics.finfo(exact_dtype).unit_roundoff)
            np.testing.assert_allclose(
                y.astype(np.float64), exact.astype(np.float64), rtol=rtol, atol=case.atol
            )


def test_there_are_cases_of_every_operator():
    assert {case.model.graph.node[0].op_type for case in CASES} == OPERATORS
