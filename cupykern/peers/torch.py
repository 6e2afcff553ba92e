"""PyTorch, as written ("torch") and through its compiler ("torch.compile")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import Call, Peer, only_array


def _function(op: str) -> Callable[[Any], Any] | None:
    import torch

    functions = {
        "softmax": lambda x: torch.softmax(x, -1),
        "log_softmax": lambda x: torch.log_softmax(x, -1),
    }
    return functions.get(op)


def _eager(op: str, call: Call) -> Callable[[], Any] | None:
    import torch

    x = only_array(call)
    function = None if x is None else _function(op)
    if function is None:
        return None
    tensor = torch.from_dlpack(x)
    return lambda: function(tensor)


def _compiled(op: str, call: Call) -> Callable[[], Any] | None:
    import torch

    x = only_array(call)
    function = None if x is None else _function(op)
    if function is None:
        return None
    # Each shape gets a kernel of its own: a recompilation would go on with symbolic shapes, and
    # after the eighth torch falls back to eager.
    torch.compiler.reset()
    compiled = torch.compile(function, dynamic=False)
    tensor = torch.from_dlpack(x)
    return lambda: compiled(tensor)


PEERS = (Peer("torch", "torch", _eager), Peer("torch.compile", "torch", _compiled))
