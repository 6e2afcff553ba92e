"""QuACK: CuTe-DSL kernels for Hopper and later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import Call, Peer, only_array


def _build(op: str, call: Call) -> Callable[[], Any] | None:
    x = only_array(call)
    if op != "softmax" or x is None or x.ndim != 2:
        return None
    import torch
    from quack.softmax import softmax

    tensor = torch.from_dlpack(x)
    return lambda: softmax(tensor)


PEERS = (Peer("quack", "quack", _build),)
