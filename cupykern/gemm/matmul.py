"""matmul: products of matrices with the epilogue fused, for every pair of dtypes that kernels take."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np

from .. import arguments, dtypes, plans
from ..arrays import assign, maker, packed
from ..numerics import namespace
from ..targets import Target
from . import gemm, product
from .copied_plan import CopiedPlan, Copy, copies
from .gemm import AnyConfig, AnyPlan
from .product import ACTIVATIONS, Product

INPUTS = (
    dtypes.float16,
    dtypes.bfloat16,
    dtypes.float32,
    dtypes.float8_e4m3fn,
    dtypes.float8_e5m2,
    dtypes.int8,
)
FLOATS = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
_MAX_K = 2**31
_MAX_INT8_K = (2**31 - 1) // 128**2


def matmul(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    alpha: Any = 1.0,
    out_dtype: Any = None,
    out: Any = None,
    accumulate: str = "float32",
    config: AnyConfig | None = None,
) -> Any:
    """activation(alpha * (a @ b) + bias) + residual

    a: (..., M, K), b: (..., K, N), batches broadcast.  Both float16, bfloat16, float32 or int8, both
        FP8 (float8_e4m3fn, float8_e5m2), or a float16 or bfloat16 and b FP8 or int8.
    bias, residual: float16, bfloat16 or float32 arrays that broadcast to (..., M, N); a bias of shape
        (N,) is one per column.
    activation: None, "relu", "gelu" (by erf), "gelu_tanh" or "silu".
    alpha: a finite real number.  A 0-d cupy array is read back, which synchronises.
    out_dtype: float16, bfloat16 or float32 of the result, or int32 of an int8 product with no other
        operand and alpha 1.  None: a's for float16 and bfloat16, bfloat16 for FP8, int32 for int8
        where it is allowed, else float32.
    out: array to write into, of the result's shape and dtype and apart from all operands.
    config: a GemmConfig, SkinnyGemmConfig, Sm90GemmConfig, Sm90Fp8GemmConfig, Sm90MixedGemmConfig or
        SplitKWorkspace; None: the measured one.
    accumulate: "float16" sums products of float16 in FP16, which GeForce-class chips do faster; a partial
        sum beyond 65504 is infinite.  Not on AMD.

    Sums in FP32 (int8: in int32, exactly, so K is at most 131071), FP32 inputs without TF32; the
    epilogue in FP32, one rounding at the end.  K = 0 gives the epilogue of zero; K must be less than
    2^31, which Hopper's kernels count to.  Any strides: operands
    whose neighbours lie along a row or column (of 8-bit ones and FP16 sums, along K), and whose rows or
    columns begin at multiples of 16 bytes, are read by vectors, others element by element.  Of products of at
    least 2^24 multiplications (2^21 where neighbours lie so) these others are copied before, into memory of
    their size that the call frees again, but 16-bit ones of up to 16 rows where only lines, not arrays, begin
    elsewhere; and so are up to 256 rows of an a that lies in columns, and an operand whose byte strides are no
    multiples of its itemsize.

    Raises TypeError (types, dtypes), ValueError (shapes, overlap, alpha, config, devices) and
    NotImplementedError.  Error bound: `reference.matmul_bound`.
    """
    key, known, _ = _find(
        a, b, bias, residual, activation, alpha, out_dtype, accumulate, config, out
    )
    if known is not None:
        return launch_known(known, (a, b, bias, residual), out)
    target = arguments.target_of("a", a)
    arguments.same_place("b", b, a, "a")
    fp16_accumulate = _check_accumulate(accumulate, a.dtype, b.dtype, target)
    for name, x in (("a", a), ("b", b)):
        dtypes.resolve(x.dtype, f"{name}'s dtype", INPUTS)
    alpha = arguments.finite_float("alpha", alpha, 1.0)
    plain = bias is None and residual is None and activation is None and alpha == 1.0
    out_dtype = result_dtype(a.dtype, b.dtype, out_dtype, plain)
    batch, m, n = check_shapes(a, b)
    shape = (*batch, m, n)
    bias = check_addend("bias", bias, a, shape)
    residual = check_addend("residual", residual, a, shape)
    check_activation(activation)
    operands = {"a": a, "b": b, "bias": bias, "residual": residual}
    return run(
        target, operands, shape, out_dtype, out, config, key, tuple(operands), alpha=alpha,
        activation=activation, fp16_accumulate=fp16_accumulate,
    )  # fmt: skip


_find = plans.finder("matmul", arrays=4, options=5)


def launch_known(known: tuple[Any, ...], given: tuple[Any, ...], out: Any) -> Any:
    """The result of a call that plans.find knows.  given: the arrays, in the order that `run` was told."""
    target, plan, pick, shape, out_dtype = known
    y = maker(target.xp)(shape, out_dtype) if out is None else out
    plan.launch(target.xp, pick((*given, None, y)))
    return y


def _picker(
    names: tuple[str, ...], given: tuple[str, ...], arrays: dict[str, Any]
) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What picks the kernel's arrays `names` of those given, None and the result."""
    places = {name: i for i, name in enumerate(given) if arrays.get(name) is not None}
    places["out"] = len(given) + 1
    return itemgetter(*(places.get(name, len(given)) for name in names))


def run(
    target: Target,
    operands: dict[str, Any],
    shape: tuple[int, ...],
    out_dtype: np.dtype,
    out: Any,
    config: AnyConfig | None,
    key: Any = None,
    given: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """Launch a product whose arguments are checked.

    operands: the arrays of `product.ARRAYS`, absent or None where there is none.  key: that of plans.find,
    if these are the arrays that it was given, or views that begin where they do; given: their names, in
    the order in which `launch_known` will get them.  options: the other fields of Product; `blocked`, the names of operands that are scales in blocks; `k`, if a's columns
    are not K; `complete`, (product, config) -> the whole product, and other arrays that the kernel takes, by name.
    """
    if out is not None:
        arguments.check_new_out(out, shape, out_dtype, operands)
    with arguments.on_device(target):
        y = maker(target.xp)(shape, out_dtype) if out is None else out
        if y.size == 0:
            return y
        arrays = {name: x for name, x in operands.items() if x is not None}
        matrices = {name: product.matrix(x, shape[:-2]) for name, x in arrays.items()}
        fields = {"alpha": 1.0, "activation": None, "bias": None, "residual": None}
        fields |= {"scale_a": None, "scale_b": None, **options}
        k, blocked = fields.pop("k", None), fields.pop("blocked", ())
        complete = fields.pop("complete", None)
        k = arrays["a"].shape[-1] if k is None else k
        for name, found in reversed(matrices.items()):  # b before a
            # Rare: a stride of some odd number of bytes, and odd strides beside NVFP4.
            if found is None or (
                name == "a" and product.must_be_copied(found, matrices["b"], k, shape[-2])
            ):
                key = None
                arrays[name] = packed(arrays[name])
                matrices[name] = product.matrix(arrays[name], shape[:-2])
        place = product.matrix(y, shape[:-2])
        if place is None:
            assign(y, run(target, operands, shape, out_dtype, None, config, **options))
            return y
        for name, found in matrices.items():
            if name in product.GROUPS:
                found = product.groups(found, k, name in blocked)
            fields[name] = found
        call = Product(batch=shape[:-2], m=shape[-2], n=shape[-1], k=k, out=place, **fields)
        copied: tuple[Copy, ...] = ()
        if config is None:
            kinds = (options.get(name, False) for name in ("block_scales", "fp16_accumulate"))
            all_copied = copies(arrays, matrices, *shape[-2:], k, *kinds)
            for copied in ((), all_copied[:1], all_copied):
                found = {copy.name: copy.matrix(shape[:-2]) for copy in copied}
                if copied == all_copied or gemm.streams(target, call._replace(**found)):
                    call = call._replace(**found)
                    break
        extra = {}
        if complete is not None:
            config = gemm.FAMILY.config(gemm.task_of(call), target, config)
            call, extra = complete(call, config)
        plan = _plan(target, call, config)
        if plan is None:  # rare: a batch of many dims that do not merge
            for i in range(shape[0]):
                part = {
                    name: x[i if x.shape[0] > 1 else 0] if x.ndim == len(shape) else x
                    for name, x in arrays.items()
                }
                run(target, part, shape[1:], out_dtype, y[i], config, **options)
            return y
        arrays |= {"out": y, **extra}
        names = product.ARRAYS[call.kernel]
        if copied:
            copiers = ((names.index(copy.name), copy.copier(target)) for copy in copied)
            plan = CopiedPlan(tuple(copiers), plan)
        plans.remember(key, (target, plan, _picker(names, given, arrays), shape, out_dtype))
        plan.launch(target.xp, tuple(map(arrays.get, names)))
    return y


@plans.cached
def _plan(target: Target, call: Product, config: AnyConfig | None) -> AnyPlan | None:
    return gemm.gemm_plan(target, call, config)


# --- arguments -----------------------------------------------------------------------------------


def _check_accumulate(accumulate: Any, a: np.dtype, b: np.dtype, target: Target) -> bool:
    """Whether to sum in FP16.  Raises ValueError, NotImplementedError."""
    if not isinstance(accumulate, str) or accumulate not in ("float32", "float16"):
        raise ValueError(f"accumulate must be 'float32' or 'float16'; got {accumulate!r}")
    if accumulate == "float32":
        return False
    if not a == b == dtypes.float16:
        raise NotImplementedError(
            f"accumulate='float16' is for products of float16 alone; got {a} and {b}"
        )
    if target.name == "hip":
        raise NotImplementedError("accumulate='float16': AMD's matrix cores do not sum in FP16")
    return True


def result_dtype(a: np.dtype, b: np.dtype, out_dtype: Any, plain: bool) -> np.dtype:
    """The result's dtype.  Raises TypeError for a pair of dtypes that cannot be multiplied."""
    for name, dtype in (("a", a), ("b", b)):
        dtypes.resolve(dtype, f"{name}'s dtype", (*INPUTS, product.FP4))
    product.compute_dtype(a, b)
    if out_dtype is None:
        return dtypes.of_product(a, b, plain)
    whole = a == b == dtypes.int8 and plain
    return dtypes.resolve(out_dtype, "out_dtype", (*FLOATS, *((dtypes.int32,) if whole else ())))


def check_depth(k: int) -> None:
    """Raise ValueError for a K that Hopper's kernels, which count it in 32 bits, do not take."""
    if k >= _MAX_K:
        raise ValueError(f"K must be less than 2^31; got {k}")


def check_shapes(a: Any, b: Any) -> tuple[tuple[int, ...], int, int]:
    """(batch, M, N).  Raises ValueError."""
    for name, x in (("a", a), ("b", b)):
        if x.ndim < 2:
            raise ValueError(f"{name} must have at least 2 dims; got shape {x.shape}")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a's columns must be b's rows; got shapes {a.shape} and {b.shape}")
    check_depth(a.shape[-1])
    if a.dtype == dtypes.int8 and a.shape[-1] > _MAX_INT8_K:
        raise ValueError(f"int32 sums are exact up to K = {_MAX_INT8_K}; got K = {a.shape[-1]}")
    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ValueError(
            f"the batches of shapes {a.shape} and {b.shape} do not broadcast"
        ) from None
    return batch, a.shape[-2], b.shape[-1]


def check_addend(name: str, x: Any, a: Any, shape: tuple[int, ...]) -> Any:
    """`x` broadcast to `shape`, or None.  Raises TypeError and ValueError."""
    if x is None:
        return None
    arguments.same_place(name, x, a, "a")
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be float16, bfloat16 or float32; got {x.dtype}")
    try:
        return namespace(a).broadcast_to(x, shape)
    except ValueError:
        raise ValueError(f"{name} must broadcast to {shape}; got shape {x.shape}") from None


def check_activation(activation: Any) -> None:
    if activation is not None and not isinstance(activation, str):
        raise TypeError(f"activation must be a string or None; got {type(activation).__name__}")
    if activation not in ACTIVATIONS:
        names = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"activation must be one of {names}; got {activation!r}")
