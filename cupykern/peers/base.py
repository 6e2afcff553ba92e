"""Peer: another library's implementations; and the arguments that peers take."""

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
"""Peers that are shown, but are no comparison for results of full precision."""


@dataclass(frozen=True)
class Peer:
    """Another library's implementations.

    name: as in `--against`.
    module: what must be importable for it.
    build: (op name, call) -> a function that computes the call's output, or None if the library has
        none for this op and these arguments.  Importing, and what needs time, happens in `build`.
    parts: likewise, the functions of the steps that the peer takes one after another, by name; {}
        if it takes one.  Timed beside it, not verified.
    """

    name: str
    module: str
    build: Callable[[str, Call], Callable[[], Any] | None]
    parts: Callable[[str, Call], dict[str, Callable[[], Any]]] = lambda op, call: {}

    def missing(self) -> str | None:
        """Why the peer cannot be measured here; None if it can."""
        if importlib.util.find_spec(self.module.partition(".")[0]) is None:
            return f"no module named {self.module}"
        try:
            importlib.import_module(self.module)
        except Exception as error:  # libraries fail in many ways on machines they don't expect
            return f"{self.module} cannot be imported: {error}"
        return None


def to_array(output: Any, xp: Any) -> Any:
    """An output, perhaps another library's tensor, as an array of xp; shares the memory."""
    if isinstance(output, xp.ndarray):
        return output
    name = str(output.dtype).removeprefix("torch.")
    if not name.startswith("float8"):
        return xp.from_dlpack(output)
    import torch  # DLPack has no FP8 that CuPy reads

    return xp.from_dlpack(output.view(torch.uint8)).view(dtypes.NAMES[name])


def only_array(call: Call) -> Any | None:
    """x of a call f(x) along the last axis without options, else None: all that some peers do."""
    plain = len(call.args) == 1 and call.kwargs in ({}, {"axis": -1})
    return call.args[0] if plain else None


class Norm(NamedTuple):
    """The arguments of a norm that other libraries' norms take too; None: not given."""

    x: Any
    weight: Any
    bias: Any
    residual: Any
    eps: float


def norm_arguments(op: str, call: Call) -> Norm | None:
    """The arguments of a layer_norm, rms_norm or add_rms_norm call, unless it has other options."""
    if op not in ("layer_norm", "rms_norm", "add_rms_norm"):
        return None
    options = dict(call.kwargs)
    weight, bias, residual = (options.pop(name, None) for name in ("weight", "bias", "residual"))
    default = 1e-5 if op == "layer_norm" else finfo(call.args[0].dtype).eps
    eps = options.pop("eps", None)
    norm = Norm(call.args[0], weight, bias, residual, default if eps is None else eps)
    return None if options or (residual is None) == (op == "add_rms_norm") else norm
