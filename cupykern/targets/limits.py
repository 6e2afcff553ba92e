"""What architectures hold, by name: choosing a config needs no device."""

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
"""How many blocks run at once, for the number of splits: by architecture, so that the results of
two chips of one architecture agree bit for bit."""


_MEASURED = ("sm_90a", "host")


def is_measured(arch: str) -> bool:
    """Whether configs were measured on `arch`, or it is the host, which runs the same ones;
    elsewhere each op has few, which reason alone chose."""
    return arch in _MEASURED


def multiprocessors(arch: str) -> int:
    """How many blocks run at once on a chip of `arch`; of an unknown one and the host, few."""
    return _MULTIPROCESSORS.get(arch, 4)


def device(arch: str, blocks: int | None = None) -> Device:
    """A device of `arch` with `blocks` multiprocessors; None: as many as most of `arch` have."""
    target = "host" if arch == "host" else "hip" if arch.startswith("gfx") else "cuda"
    warp_size = 64 if arch.startswith("gfx9") else 32
    return Device(target, arch, warp_size, blocks or multiprocessors(arch))


def max_cluster_size(arch: str) -> int:
    """How many blocks a cluster may have on `arch`; 1: no clusters."""
    return 16 if arch in ("host", "sm_90a", "sm_100a", "sm_103a") else 1


def max_shared_bytes(arch: str) -> int:
    """The shared memory of a block on `arch`, in bytes; of an unknown one what every GPU has."""
    return 1024 * _SHARED_KIB.get(arch, 64 if arch.startswith("gfx") else 48)


def max_threads(arch: str) -> int:
    """The threads of an NVIDIA multiprocessor of `arch`."""
    return 1536 if arch in ("sm_86", "sm_89", "sm_120a") else 2048
