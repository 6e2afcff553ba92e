"""Peer: another library's implementations; and helpers that parse a call's arguments for peers."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import dtypes
from ..numerics import finfo
from ..op import Call

LESS_ACCURATE = ("torch.tf32",)
"""Peers that are shown, but do not count as comparison for full-precision results."""


@dataclass(frozen=True)
class Peer:
    """Another library's implementations.

    name: as in `--against`.
    module: must be importable for the peer.
    build: (op name, call) -> a function that computes the call's output, or None if the library
        does not support this op with these arguments.  Imports and slow set-up happen in `build`.
    parts: (op name, call) -> functions of the peer's consecutive steps, by name; {} if there is
        only one.  They are timed beside the peer, but not verified.
    """

    name: str
    module: str
    build: Callable[[str, Call], Callable[[], Any] | None]
    parts: Callable[[str, Call], dict[str, Callable[[], Any]]] = lambda op, call: {}

    def missing(self) -> str | None:
        """Return why the peer cannot be measured on this machine, or None."""
        if importlib.util.find_spec(self.module.partition(".")[0]) is None:
            return f"no module named {self.module}"
        try:
            importlib.import_module(self.module)
        except Exception as error:  # any error: libraries fail in many ways on other machines
            return f"{self.module} cannot be imported: {error}"
        return None


def to_array(output: Any, xp: Any) -> Any:
    """Convert an output, possibly another library's tensor, to an xp array that shares memory."""
    if isinstance(output, xp.ndarray):
        return output
    name = str(output.dtype).removeprefix("torch.")
    if not name.startswith("float8"):
        return xp.from_dlpack(output)
    import torch  # CuPy cannot read FP8 through DLPack

    return xp.from_dlpack(output.view(torch.uint8)).view(dtypes.NAMES[name])


def only_array(call: Call) -> Any | None:
    """Return x of a call f(x) along the last axis without options, else None."""
    plain = len(call.args) == 1 and call.kwargs in ({}, {"axis": -1})
    return call.args[0] if plain else None


class Norm(NamedTuple):
    """The arguments of a norm that other libraries have too; None: not given."""

    x: Any
    weight: Any
    bias: Any
    residual: Any
    eps: float


def norm_arguments(op: str, call: Call) -> Norm | None:
    """Return the arguments of a layer_norm, rms_norm or add_rms_norm call without other options."""
    if op not in ("layer_norm", "rms_norm", "add_rms_norm"):
        return None
    options = dict(call.kwargs)
    weight, bias, residual = (options.pop(name, None) for name in ("weight", "bias", "residual"))
    default = 1e-5 if op == "layer_norm" else finfo(call.args[0].dtype).eps
    eps = options.pop("eps", None)
    norm = Norm(call.args[0], weight, bias, residual, default if eps is None else eps)
    return None if options or (residual is None) == (op == "add_rms_norm") else norm
