"""Which config a call gets: its own, else the tuned one, else what the op's own rules say.

Asked when a plan is made, and never by a warm call.  CUPYKERN_TUNE: "readonly" (default) asks the
store of tuned configs, "0" does not, "1" also tunes what it lacks at its first call (tune.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

from kernels_cu import Variant

from . import plans, store
from .targets import Target

MODES = ("readonly", "0", "1")


@dataclass(frozen=True)
class Request:
    """What a plan asks for.

    The arguments of `choose`: sizes are bucketed in the key, the kind is not.
    """

    family: str
    target: Target
    sizes: tuple[tuple[str, int], ...]
    kind: tuple[tuple[str, Any], ...]
    configs: Callable[[], tuple[Any, ...]]
    variant: Callable[[Any], Variant]

    @property
    def key(self) -> str:
        """Equal for calls that share a tuned config."""
        words = [f"{name}={bucket(size)}" for name, size in self.sizes]
        words += [f"{name}={value}" for name, value in self.kind]
        return f"{self.family} {' '.join(words)} on {device_name(self.target)}"

    @property
    def digest(self) -> str:
        """Of the source of every kernel that the request may launch."""
        variants = [self.variant(config) for config in self.configs()]
        sources = sorted({(v.kernel, v.text or "") for v in variants})
        return store.digest(self.target.name, tuple(sources))


def bucket(size: int) -> int:
    """`size` rounded up to a multiple of a quarter of its power of two: 4 buckets an octave."""
    step = max(1, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // step) * step


@cache
def device_name(target: Target) -> str:
    from .tools import doctor

    try:
        name = doctor.device_name(target)
    except Exception:  # a driver that does not tell
        name = target.name
    return f"{name}, {target.arch}" + (f"{target.warp_size}" if target.name == "host" else "")


_recorder: ContextVar[list[Request] | None] = ContextVar("cupykern_requests", default=None)
_chosen = plans.table()


def choose(
    family: str,
    target: Target,
    sizes: Mapping[str, int],
    kind: Mapping[str, Any],
    configs: Callable[[], tuple[Any, ...]],
    variant: Callable[[Any], Variant],
) -> Any:
    """The tuned config of a call, if there is one and the call admits it, else the first of configs.

    family: the kernels', as "gemm".  configs: those that the call admits, the op's own choice first.
    variant: of a config.  sizes and kind decide both: dtypes and layouts are kinds.  Calls of sizes in
    one bucket share a tuned config.
    """
    place = (family, target, *sizes.values(), *kind.values())
    recorded = _recorder.get()
    if recorded is None and place in _chosen:
        return _chosen[place]
    sized, kinds = tuple(sizes.items()), tuple(kind.items())
    request = Request(family, target, sized, kinds, configs, variant)
    if recorded is not None:
        recorded.append(request)
    if len(_chosen) >= plans.MAX_PLANS:
        _chosen.clear()
    found = _chosen[place] = _tuned(request)
    return found


def _tuned(request: Request) -> Any:
    configs = request.configs()
    found = []
    if mode() != "0" and store.rows():
        row = store.find(request.key)
        if row is not None and row["digest"] == request.digest:
            found.append(row["config"])
    if built_in := store.built_in():
        found += [row["config"] for row in (built_in.get(request.key),) if row]
    by_name = {repr(config): config for config in configs} if found else {}
    return next((by_name[name] for name in found if name in by_name), configs[0])


def mode() -> str:
    """CUPYKERN_TUNE.  Raises ValueError for what is none of MODES."""
    found = os.environ.get("CUPYKERN_TUNE", "readonly")
    if found not in MODES:
        raise ValueError(f"CUPYKERN_TUNE must be one of {', '.join(MODES)}; got {found!r}")
    return found


@contextmanager
def recording() -> Iterator[list[Request]]:
    """Within the block, the list of what this thread's calls ask for: of every new plan."""
    requests: list[Request] = []
    token = _recorder.set(requests)
    try:
        yield requests
    finally:
        _recorder.reset(token)
