"""The config of a task: the caller's, else the tuned one, else the estimated fastest.

A *task* is one frozen, hashable value that determines how a call is computed.  A `Family` is the
kernels that compute tasks of one type.  The legal configs, the choice and the keys of all caches
depend only on the task and the device, so no call depends on earlier calls.

CUPYKERN_TUNE: "readonly" (default) uses the store of tuned configs; "0" does not; "1" also tunes
missing tasks at their first call (tuning/tune.py).  The package's built-in rows apply always.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..arguments import check_config
from ..kernels import Variant
from ..targets import Device, Target, device_name, device_of
from . import store

MODES = ("readonly", "0", "1")

Task = TypeVar("Task")
Config = TypeVar("Config")


class InternalError(RuntimeError):
    """A config that cannot compute its task reached a launch: a defect of cupykern."""


@dataclass(frozen=True)
class Family(Generic[Task, Config]):
    """The kernels that compute tasks of one type.

    A module-level constant: its functions depend only on the task and the device.

    name: part of the keys in the store of tuned configs.
    config_types: the dataclasses that `config=` accepts.
    configs: (task, device) -> the legal configs, the estimated fastest first.
    refusal: (config, task, device) -> why the config cannot compute the task; None: it can.
    variant: (task, config) -> the variant that is launched (the first, if there are several).
    traits: task -> (sizes, kinds): the store's key of a task.  Tasks whose sizes round to the same
        buckets and whose kinds are equal share a tuned config, if it is legal for them.
    """

    name: str
    config_types: tuple[type[Any], ...]
    configs: Callable[[Task, Device], tuple[Config, ...]]
    refusal: Callable[[Config, Task, Device], str | None]
    variant: Callable[[Task, Config], Variant]
    traits: Callable[[Task], tuple[Mapping[str, int], Mapping[str, Any]]]

    def config(self, task: Task, target: Target, given: Any = None) -> Config:
        """`given`, else the tuned config, else the first of `configs`.

        Raises TypeError or ValueError if `given` cannot compute `task`, InternalError if the chosen
        config cannot.
        """
        hash(task)  # raises TypeError unless the task is hashable
        device = device_of(target)
        if given is not None:
            check_config(given, *self.config_types)
            if reason := self.refusal(given, task, device):
                raise ValueError(f"config does not fit: {reason}")
            return given
        request = Request(self, task, target)
        recorded = _recorder.get()
        if recorded is not None:
            recorded.append(request)
        config: Config = _tuned(request)
        if reason := self.refusal(config, task, device):
            raise InternalError(f"{self.name}: {config} was chosen for {task}: {reason}")
        return config


@dataclass(frozen=True)
class Request:
    """A plan's request for the config of a task on a target."""

    family: Family[Any, Any]
    task: Any
    target: Target

    def configs(self) -> tuple[Any, ...]:
        return self.family.configs(self.task, device_of(self.target))

    def variant(self, config: Any) -> Variant:
        return self.family.variant(self.task, config)

    @property
    def key(self) -> str:
        """Equal for tasks that share a tuned config."""
        sizes, kinds = self.family.traits(self.task)
        parts = [f"{name}={bucket(size)}" for name, size in sizes.items()]
        parts += [f"{name}={value}" for name, value in kinds.items()]
        return f"{self.family.name} {' '.join(parts)} on {device_name(self.target)}"

    @property
    def digest(self) -> str:
        """Digest of the sources of all kernels that the request can launch."""
        variants = [self.variant(config) for config in self.configs()]
        sources = sorted({(v.kernel, v.text or "") for v in variants})
        return store.digest(self.target.name, tuple(sources))


def bucket(size: int) -> int:
    """Round `size` up to a multiple of a quarter of the power of two below it: 4 per octave."""
    step = max(1, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // step) * step


_recorder: ContextVar[list[Request] | None] = ContextVar("cupykern_requests", default=None)


def _tuned(request: Request) -> Any:
    """The first legal config of the store's, the package's and the family's own."""
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
    """CUPYKERN_TUNE.  Raises ValueError unless it is one of MODES."""
    found = os.environ.get("CUPYKERN_TUNE", "readonly")
    if found not in MODES:
        raise ValueError(f"CUPYKERN_TUNE must be one of {', '.join(MODES)}; got {found!r}")
    return found


@contextmanager
def recording() -> Iterator[list[Request]]:
    """Within the block, a list that collects the Request of every new plan of this thread."""
    requests: list[Request] = []
    token = _recorder.set(requests)
    try:
        yield requests
    finally:
        _recorder.reset(token)
