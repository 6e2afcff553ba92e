"""nvmath-python: cuBLASLt, planned once, with its own epilogues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import dtypes
from ..op import Call
from .base import Peer

_EPILOGS = {None: "", "relu": "RELU", "gelu_tanh": "GELU"}  # cuBLASLt's GELU is the tanh form


def _build(op: str, call: Call) -> Callable[[], Any] | None:
    """Products of two floating-point matrices, optionally with a bias per column and activation."""
    if op != "matmul":
        return None
    a, b = call.args
    options = dict(call.kwargs)
    bias, activation = options.pop("bias", None), options.pop("activation", None)
    alpha = options.pop("alpha", 1.0)
    if (
        options
        or a.dtype != b.dtype
        or a.dtype not in (dtypes.float16, dtypes.bfloat16, dtypes.float32)
        or (a.ndim, b.ndim) != (2, 2)
        or activation not in _EPILOGS
        or (bias is not None and (bias.ndim != 1 or bias.dtype != a.dtype))
    ):
        return None
    from nvmath.linalg.advanced import Matmul, MatmulComputeType, MatmulEpilog

    # nvmath's bias is per row; ours is per column, that is, per row of the transposed product.
    compute = {"compute_type": MatmulComputeType.COMPUTE_32F}
    product = Matmul(_known(b.T), _known(a.T), alpha=alpha, options=compute)
    name = "_".join(filter(None, (_EPILOGS[activation], "" if bias is None else "BIAS")))
    planned: dict[str, Any] = {"epilog": getattr(MatmulEpilog, name)} if name else {}
    if bias is not None:
        planned["epilog_inputs"] = {"bias": _known(bias)}
    product.plan(**planned)
    return lambda: product.execute().T


def _known(array: Any) -> Any:
    """Convert bfloat16 to a torch tensor: nvmath supports torch's bfloat16, but not CuPy's."""
    if array.dtype != dtypes.bfloat16:
        return array
    import torch

    return torch.from_dlpack(array)


PEERS = (Peer("nvmath", "nvmath.linalg.advanced", _build),)
