"""Limits of architectures, by name, so that a config can be chosen without a device."""

from __future__ import annotations

from typing import NamedTuple

from .base import Device


class _Limits(NamedTuple):
    multiprocessors: int
    shared_kib: int  # per block
    threads: int  # resident per multiprocessor


# The number of multiprocessors is per architecture, not per chip: it determines the number of
# splits, and all chips of an architecture must give bitwise equal results.
_UNKNOWN = _Limits(4, 48, 2048)
_LIMITS = {
    "host": _Limits(4, 227, 2048),
    "sm_80": _Limits(108, 163, 2048),
    "sm_86": _Limits(84, 99, 1536),
    "sm_87": _Limits(16, 163, 1536),
    "sm_89": _Limits(128, 99, 1536),
    "sm_90a": _Limits(132, 227, 2048),
    "sm_100a": _Limits(148, 227, 2048),
    "sm_103a": _Limits(148, 227, 2048),
    "sm_120a": _Limits(170, 99, 1536),
    "sm_121a": _Limits(48, 99, 1536),
    "gfx90a": _Limits(104, 64, 2048),
    "gfx942": _Limits(304, 64, 2048),
    "gfx1100": _Limits(48, 64, 2048),
    "gfx1151": _Limits(20, 64, 2048),
    "gfx1201": _Limits(32, 64, 2048),
}
_MEASURED = ("sm_90a", "host")


def is_measured(arch: str) -> bool:
    """Whether configs were measured on `arch`; true for the host, which runs the same configs.

    On other architectures each op has few configs, chosen without measurements.
    """
    return arch in _MEASURED


def multiprocessors(arch: str) -> int:
    """The number of multiprocessors (SMs, or AMD's CUs) assumed for `arch`; 4 for the host and
    unknown architectures."""
    return _LIMITS.get(arch, _UNKNOWN).multiprocessors


def device(arch: str, blocks: int | None = None) -> Device:
    """A device of `arch` with `blocks` multiprocessors; None: those of `multiprocessors(arch)`."""
    target = "host" if arch == "host" else "hip" if arch.startswith("gfx") else "cuda"
    warp_size = 64 if arch.startswith("gfx9") else 32
    return Device(target, arch, warp_size, blocks or multiprocessors(arch))


def max_cluster_size(arch: str) -> int:
    """The most blocks per cluster on `arch`; 1: no clusters."""
    return 16 if arch in ("host", "sm_90a", "sm_100a", "sm_103a") else 1


def max_shared_bytes(arch: str) -> int:
    """The most shared memory per block on `arch`, in bytes; if unknown, what every GPU has."""
    limits = _LIMITS.get(arch)
    if limits is None:
        return 1024 * (64 if arch.startswith("gfx") else 48)
    return 1024 * limits.shared_kib


def max_threads(arch: str) -> int:
    """The most resident threads per multiprocessor on `arch`, an NVIDIA architecture."""
    return _LIMITS.get(arch, _UNKNOWN).threads
