"""Limits of architectures, by name, so that a config can be chosen without a device."""

from __future__ import annotations

from .base import Device

_SHARED_KIB = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_87": 163,
    "sm_89": 99,
    "sm_90a": 227,
    "sm_100a": 227,
    "sm_103a": 227,
    "sm_120a": 99,
    "sm_121a": 99,
    "host": 227,
}

_MULTIPROCESSORS = {
    "sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90a": 132, "sm_100a": 148, "sm_120a": 170,
    "gfx90a": 104, "gfx942": 304, "gfx1100": 48, "gfx1151": 20, "gfx1201": 32,
}  # fmt: skip
"""Multiprocessors, which determine the number of splits.  One number per architecture: all its
chips have bitwise equal results."""


_MEASURED = ("sm_90a", "host")


def is_measured(arch: str) -> bool:
    """Whether configs were measured on `arch`; true for the host, which runs the same configs.

    On other architectures each op has few configs, chosen without measurements.
    """
    return arch in _MEASURED


def multiprocessors(arch: str) -> int:
    """The multiprocessors of a chip of `arch`; few for unknown architectures and the host."""
    return _MULTIPROCESSORS.get(arch, 4)


def device(arch: str, blocks: int | None = None) -> Device:
    """A device of `arch` with `blocks` multiprocessors; None: the usual number of `arch`."""
    target = "host" if arch == "host" else "hip" if arch.startswith("gfx") else "cuda"
    warp_size = 64 if arch.startswith("gfx9") else 32
    return Device(target, arch, warp_size, blocks or multiprocessors(arch))


def max_cluster_size(arch: str) -> int:
    """The most blocks per cluster on `arch`; 1: no clusters."""
    return 16 if arch in ("host", "sm_90a", "sm_100a", "sm_103a") else 1


def max_shared_bytes(arch: str) -> int:
    """The most shared memory per block on `arch`, in bytes; if unknown, what every GPU has."""
    return 1024 * _SHARED_KIB.get(arch, 64 if arch.startswith("gfx") else 48)


def max_threads(arch: str) -> int:
    """The most resident threads per multiprocessor on `arch`, an NVIDIA architecture."""
    return 1536 if arch in ("sm_86", "sm_89", "sm_120a") else 2048
