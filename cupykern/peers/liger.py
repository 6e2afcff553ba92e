"""Liger: Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import Call, Peer, only_array


def _build(op: str, call: Call) -> Callable[[], Any] | None:
    x = only_array(call)
    if op != "softmax" or x is None:
        return None
    import torch
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    tensor = torch.from_dlpack(x)
    return lambda: LigerSoftmaxFunction.apply(tensor)


PEERS = (Peer("liger", "liger_kernel", _build),)
