"""The dtypes of arrays and the corresponding C++ types of kernels."""

from __future__ import annotations

import ml_dtypes
import numpy as np

float16 = np.dtype(np.float16)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
float32 = np.dtype(np.float32)
float8_e4m3fn = np.dtype(ml_dtypes.float8_e4m3fn)
float8_e5m2 = np.dtype(ml_dtypes.float8_e5m2)
float4_e2m1fn = np.dtype(ml_dtypes.float4_e2m1fn)
int8 = np.dtype(np.int8)
int32 = np.dtype(np.int32)
complex64 = np.dtype(np.complex64)

CPP_NAMES = {
    float16: "half",
    bfloat16: "bf16",
    float32: "float",
    float8_e4m3fn: "e4m3",
    float8_e5m2: "e5m2",
    int8: "int8_t",
    float4_e2m1fn: "e2m1x2",  # two to a byte
}

CODES = {  # dtype.cuh: DType
    float16: 0,
    bfloat16: 1,
    float32: 2,
    float8_e4m3fn: 3,
    float8_e5m2: 4,
    int8: 5,
    int32: 6,
    float4_e2m1fn: 7,
}

QUANTIZED = {"e4m3": float8_e4m3fn, "e5m2": float8_e5m2, "int8": int8}
"""The target formats of quantisation, by short name."""

NAMES = {
    "float16": float16,
    "bfloat16": bfloat16,
    "float32": float32,
    "float8_e4m3fn": float8_e4m3fn,
    "float8_e5m2": float8_e5m2,
    "float4_e2m1fn": float4_e2m1fn,
    "int8": int8,
    "int32": int32,
}

OF_ARRAYS = tuple(dtype for dtype in NAMES.values() if dtype != float4_e2m1fn)
"""The dtypes of arrays; FP4 codes, two per byte, are the uint8 data of an NvFp4."""

DOUBLE = (np.dtype(np.float64), np.dtype(np.complex128))


def resolve(
    dtype: object, argument: str, allowed: tuple[np.dtype, ...], instead: str = ""
) -> np.dtype:
    """Return `dtype` (a name, type or dtype) as one of `allowed`.

    argument: the name in messages, "x's dtype" for an array x.
    instead: a function that computes in double precision, for the message.

    Raises TypeError naming `argument`, and NotImplementedError for arrays in double precision.
    """
    resolved: np.dtype | None
    try:
        known = NAMES.get(dtype) if isinstance(dtype, str) else None
        resolved = known or np.dtype(dtype)  # type: ignore[call-overload]  # it raises TypeError
    except (TypeError, ValueError, SyntaxError):  # numpy's, for unknown dtypes
        resolved = None
    # numpy reads None as float64.
    if dtype is None or resolved is None or resolved not in allowed:
        names = ", ".join(str(d) for d in allowed)
        says = f"{argument} must be one of {names}; got {dtype!r}"
        if argument.endswith("'s dtype") and resolved in DOUBLE:
            call = f", or call {instead}" if instead else ""
            raise NotImplementedError(f"{says}: no kernel has double precision; convert it{call}")
        raise TypeError(says)
    return resolved


def of_product(a: np.dtype, b: np.dtype, plain: bool) -> np.dtype:
    """The default dtype of a matrix product.

    plain: the product has no scales, alpha, bias, residual or activation.
    """
    if a == b == int8 and plain:
        return int32
    if a in (float8_e4m3fn, float8_e5m2):
        return bfloat16
    return a if a in (float16, bfloat16) and b != float32 else float32
