"""The ops as custom operators of torch, which torch.compile keeps in one graph (fullgraph=True).

    import cupykern.torch

    @torch.compile(fullgraph=True)
    def block(x, weight):
        return cupykern.torch.rms_norm(x, weight) * 2

    >>> x = torch.ones(2, 8, dtype=torch.bfloat16)
    >>> cupykern.torch.softmax(x)[0, 0].item()
    0.125

The functions take tensors, and have the names and arguments of cupykern's, without `out`, `config`
and formulas (`epilogue`, `score`, a formula as `mask`, `operands`).  Their results are
C-contiguous.  There is no backward pass: a tensor that requires grad raises RuntimeError unless
grad mode is off.

In eager mode cupykern's own functions take tensors too, with less overhead.  Where torch.compile
traces them with a tensor as first, positional argument, they become these operators.  The graph
breaks at functions without an operator (quantize_nvfp4, nonfinite_report), and at calls with `out`,
`config`, a formula or a BlockMask.  Put calls with an NvFp4 into a function with
torch.compiler.disable.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

import cupykern

from . import dtypes
from .interop import foreign
from .interop.tensors import DTYPES, TENSORS, TORCH
from .op import as_tuple
from .rows.norm_plan import Options
from .rows.quantize_rows import scale_shape

_Fake = Callable[..., list[Tensor]]
_LEFT_OUT = ("out", "config")
_SHORT_NAMES = {TORCH[dtype]: name for name, dtype in dtypes.QUANTIZED.items()}
_FLOAT16S = (torch.float16, torch.bfloat16)
_SCALES = ("scale_a", "scale_b", "scale_b1", "scale_b2", "scale_w", "k_scale", "v_scale")


def _register(schema: str, fake: _Fake, written: Sequence[str] = ()) -> Callable[..., Any]:
    """Register a function of cupykern as an operator, and return the function that calls it.

    schema: `name(arguments) -> Tensor[]`.
    fake: returns the results for arguments without contents; all arguments are passed by name.
    written: arguments that the operator writes to.  The schema is then `name(arguments) -> (Tensor,
        Tensor)`, because functionalization does not support lists; the second is empty if there is
        one result.
    """
    name = schema.partition("(")[0]
    function = getattr(cupykern, name)
    parameters = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in _LEFT_OUT
    ]
    names = tuple(parameter.name for parameter in parameters)
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    placed: list[str] = []  # the schema's arguments, without formulas

    def run(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(placed, args, strict=False)), **kwargs}
        # Options are looked up by hash, and lists have none.
        given = {key: tuple(x) if isinstance(x, list) else x for key, x in given.items()}
        return results(apart([y.contiguous() for y in as_tuple(function(**given))]))

    def fake_run(*args: Any, **kwargs: Any) -> Any:
        return results(fake(**{**defaults, **dict(zip(placed, args, strict=False)), **kwargs}))

    def results(outputs: list[Tensor]) -> Any:
        missing = [_new(outputs[0], (0,))] * (2 - len(outputs))
        return (*outputs, *missing) if written else outputs

    operator = torch.library.custom_op(
        f"cupykern::{name}", run, mutates_args=written, schema=schema.removeprefix(name)
    )
    operator.register_fake(fake_run)
    arguments = operator._opoverload._schema.arguments
    placed += [argument.name for argument in arguments]

    # Defaults that are not in the schema.
    needed = {
        argument.name: defaults[argument.name]
        for argument in arguments
        if argument.name in defaults and not argument.has_default_value()
    }

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**needed, **dict(zip(names, args, strict=False)), **kwargs}
        for key, x in given.items():
            if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"{key} requires grad, and cupykern has no backward pass: call it within "
                    f"torch.no_grad(), or with {key}.detach()"
                )
            given[key] = _option(name, key, x)
        outputs = operator(**given)
        if written and outputs[1].ndim == 1:
            return outputs[0]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = (
        f"`cupykern.{name}` of tensors, as the operator cupykern::{name}.  Arguments and errors: "
        f"help(cupykern.{name})."
    )
    signature = inspect.Signature(parameters)
    call.__signature__ = signature  # type: ignore[attr-defined]  # read by inspect
    TENSORS.operators[name] = call
    return call


def apart(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Give each output of an operator its own storage, as torch requires.

    Small outputs of one call share an allocation.
    """
    found: list[Tensor] = []
    storages: set[int] = set()
    for y in outputs:
        storage = y.untyped_storage().data_ptr()
        found.append(y.clone() if storage in storages else y)
        storages.add(storage)
    return found


def _option(name: str, key: str, x: Any) -> Any:
    """Convert the argument `key` of the function `name` to a type that its operator takes."""
    if key in _SCALES and isinstance(x, (int, float)):
        return torch.tensor(x, dtype=torch.float64)
    if name == "quantize" and key == "dtype":
        return _SHORT_NAMES.get(x, x)
    if key in ("dtype", "out_dtype") and isinstance(x, str):
        return getattr(torch, x)
    return x


def _untraced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


TENSORS.untraced = torch.compiler.disable(_untraced)
for kind in (Tensor, torch.nn.Parameter):  # registered before anything is traced
    foreign.register(kind, TENSORS)


def _new(x: Tensor, shape: Sequence[Any], dtype: torch.dtype | None = torch.float32) -> Tensor:
    return x.new_empty(tuple(shape), dtype=dtype)


# --- the results' shapes and dtypes --------------------------------------------------------------


def _softmax(x: Tensor, dtype: torch.dtype | None, **_: Any) -> list[Tensor]:
    return [_new(x, x.shape, dtype or x.dtype)]


def _norm(
    x: Tensor,
    residual: Tensor | None,
    return_stats: bool,
    dtype: torch.dtype | None,
    quantize: str | None = None,
    granularity: str = "row",
    **options: Any,
) -> list[Tensor]:
    if quantize is None:
        made = [_new(x, x.shape, dtype or x.dtype)]
    else:
        scales = Options(False, False, False, quantize, granularity).scale_shape(tuple(x.shape))
        made = [_new(x, x.shape, TORCH[dtypes.QUANTIZED[quantize]]), _new(x, scales)]
    if residual is not None:
        made.append(_new(x, x.shape, x.dtype))
    num_stats = 2 if "compensated" in options else 1
    return made + [_new(x, x.shape[:-1]) for _ in range(num_stats if return_stats else 0)]


def _quantize(
    x: Tensor, dtype: str, granularity: str, block: Sequence[int], **_: Any
) -> list[Tensor]:
    shape = scale_shape(tuple(x.shape), granularity, cast(tuple[int, int], tuple(block)))
    return [_new(x, x.shape, TORCH[dtypes.QUANTIZED[dtype]]), _new(x, shape)]


def _product_shape(a: Tensor, b: Tensor) -> tuple[Any, ...]:
    return (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])


def _product(
    a: Tensor, b: Tensor, out_dtype: torch.dtype | None, plain: bool, **_: Any
) -> list[Tensor]:
    if out_dtype is None and a.dtype.is_complex:
        out_dtype = a.dtype
    elif out_dtype is None:
        out_dtype = TORCH[dtypes.of_product(DTYPES[a.dtype], DTYPES[b.dtype], plain)]
    return [_new(a, _product_shape(a, b), out_dtype)]


def _matmul(bias: Any, residual: Any, activation: Any, alpha: float, **rest: Any) -> list[Tensor]:
    plain = bias is None and residual is None and activation is None and alpha == 1.0
    return _product(plain=plain, **rest)


def _scaled_mm(scale_a: Any, scale_b: Any, bias: Any, activation: Any, **rest: Any) -> list[Tensor]:
    plain = all(x is None for x in (scale_a, scale_b, bias, activation))
    return _product(plain=plain, **rest)


def _dual(a: Tensor, b1: Tensor, out_dtype: torch.dtype | None, **_: Any) -> list[Tensor]:
    default = a.dtype if a.dtype in (*_FLOAT16S, torch.float32) else torch.float16
    return [_new(a, _product_shape(a, b1), out_dtype or default)]


def _logits(a: Tensor, w: Tensor, dtype: torch.dtype | None, **_: Any) -> list[Tensor]:
    return [_new(a, _product_shape(a, w), dtype or a.dtype)]


def _attention(
    q: Tensor,
    v: Tensor,
    layout: str,
    return_lse: bool,
    return_row_stats: bool = False,
    **_: Any,
) -> list[Tensor]:
    batch, heads, sq = q.shape[:3]
    if layout == "bshd":
        heads, sq = sq, heads
    stats = (1 if return_lse else 0) + (2 if return_row_stats else 0)
    made = [_new(q, (*q.shape[:3], v.shape[-1]), q.dtype)]
    return made + [_new(q, (batch, heads, sq)) for _ in range(stats)]


def _varlen(q: Tensor, v: Tensor, return_lse: bool, **_: Any) -> list[Tensor]:
    rows, heads = q.shape[:2]
    made = [_new(q, (rows, heads, v.shape[-1]), q.dtype)]
    return made + ([_new(q, (heads, rows))] if return_lse else [])


def _rope(q: Tensor, k: Tensor, k_cache: Tensor | None, **_: Any) -> list[Tensor]:
    rotated = (q,) if k_cache is not None else (q, k)
    return [_new(x, x.shape, x.dtype) for x in rotated]


# --- the operators -------------------------------------------------------------------------------

_SOFTMAX = (
    "(Tensor x, SymInt axis=-1, Tensor? mask=None, float? scale=None, ScalarType? dtype=None)"
    " -> Tensor[]"
)
softmax = _register(f"softmax{_SOFTMAX}", _softmax)
log_softmax = _register(f"log_softmax{_SOFTMAX}", _softmax)
layer_norm = _register(
    "layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, float? eps=1e-5, "
    "Tensor? residual=None, bool compensated=False, bool return_stats=False, "
    "ScalarType? dtype=None) -> Tensor[]",
    _norm,
)
rms_norm = _register(
    "rms_norm(Tensor x, Tensor? weight=None, float? eps=None, Tensor? residual=None, "
    'str? quantize=None, str granularity="row", bool return_stats=False, '
    "ScalarType? dtype=None) -> Tensor[]",
    _norm,
)
quantize = _register(
    'quantize(Tensor x, str dtype, str granularity="tensor", SymInt[2] block=[1, 128]) -> Tensor[]',
    _quantize,
)
matmul = _register(
    "matmul(Tensor a, Tensor b, Tensor? bias=None, str? activation=None, Tensor? residual=None, "
    'float alpha=1.0, ScalarType? out_dtype=None, str accumulate="float32", '
    'str precision="float32") -> Tensor[]',
    _matmul,
)
scaled_mm = _register(
    "scaled_mm(Tensor a, Tensor b, Tensor? scale_a=None, Tensor? scale_b=None, "
    "Tensor? bias=None, str? activation=None, ScalarType? out_dtype=None) -> Tensor[]",
    _scaled_mm,
)
dual_gemm_silu = _register(
    "dual_gemm_silu(Tensor a, Tensor b1, Tensor b2, Tensor? scale_a=None, "
    'Tensor? scale_b1=None, Tensor? scale_b2=None, str policy="fp32", '
    'ScalarType? out_dtype=None, str precision="float32") -> Tensor[]',
    _dual,
)
dequant_softmax = _register(
    "dequant_softmax(Tensor a, Tensor w, Tensor scale_w, Tensor? bias=None, "
    "ScalarType? dtype=None) -> Tensor[]",
    _logits,
)
_SCORE_OPTIONS = (
    "SymInt[2]? window=None, float? softcap=None, Tensor? alibi_slopes=None, Tensor? sinks=None"
)
decode_attention = _register(
    "decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? seq_lens=None, "
    'Tensor? block_table=None, str layout="hnd", Tensor? k_scale=None, Tensor? v_scale=None, '
    f"bool causal=True, float? scale=None, {_SCORE_OPTIONS}, bool return_lse=False) -> Tensor[]",
    lambda q, v_cache, return_lse, **_: _attention(q, v_cache, "bhsd", return_lse),
)
attention = _register(
    "attention(Tensor q, Tensor k, Tensor v, bool causal=False, str? causal_align=None, "
    "Tensor? mask=None, Tensor? seq_lens=None, SymInt? input_pos=None, float? scale=None, "
    f'{_SCORE_OPTIONS}, str layout="bhsd", '
    'str qk_accumulate="float32", bool return_lse=False, bool return_row_stats=False, '
    'str algorithm="flash") -> Tensor[]',
    _attention,
)
attention_varlen = _register(
    # The schema has no keyword-only arguments: those before the required max_seqlen_q have no
    # default.
    "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor? cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt? max_seqlen_k=None, Tensor? block_table=None, "
    'Tensor? seq_lens_k=None, str layout="hnd", Tensor? k_scale=None, Tensor? v_scale=None, '
    f'bool causal=False, str causal_align="bottom_right", float? scale=None, {_SCORE_OPTIONS}, '
    "bool return_lse=False) -> Tensor[]",
    _varlen,
)
cascade_attention = _register(
    "cascade_attention(Tensor q, Tensor shared_k, Tensor shared_v, Tensor k_cache, Tensor v_cache, "
    'Tensor? seq_lens=None, Tensor? block_table=None, str layout="hnd", Tensor? k_scale=None, '
    "Tensor? v_scale=None, float? scale=None, float? softcap=None, bool return_lse=False)"
    " -> Tensor[]",
    lambda q, v_cache, return_lse, **_: _attention(q, v_cache, "bhsd", return_lse),
)
merge_attention = _register(
    "merge_attention(Tensor out1, Tensor lse1, Tensor out2, Tensor lse2, "
    'str layout="bhsd") -> Tensor[]',
    lambda out1, lse1, **_: [_new(out1, out1.shape, out1.dtype), _new(lse1, lse1.shape)],
)
rope_and_cache = _register(
    "rope_and_cache(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor(a!)? k_cache=None, "
    "Tensor(b!)? v_cache=None, Tensor? inv_freq=None, Tensor? cos_sin=None, "
    "bool interleaved=False, "
    "float attention_factor=1.0, Tensor? q_weight=None, Tensor? k_weight=None, float eps=1e-6, "
    'Tensor? block_table=None, str layout="hnd", Tensor(c!)? k_scale=None, '
    "Tensor(d!)? v_scale=None) -> (Tensor, Tensor)",
    _rope,
    written=("k_cache", "v_cache", "k_scale", "v_scale"),
)
scaled_dot_product_attention = _register(
    "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
    "float dropout_p=0.0, bool is_causal=False, float? scale=None, bool enable_gqa=False)"
    " -> Tensor[]",
    lambda query, value, **_: _attention(query, value, "bhsd", False),
)
