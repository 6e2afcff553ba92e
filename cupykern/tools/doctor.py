"""Report what this machine has, and what is missing for which feature."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__, cache, environment
from ..targets import Target, cpu_name, product_name


@dataclass(frozen=True)
class Finding:
    """A component; if it is missing, what it is needed for and how to install it."""

    thing: str
    found: str | None
    needed_for: str = ""
    install: str = ""
    why: str = ""
    """First line of the error, if the component exists but does not work."""

    def __str__(self) -> str:
        """Describe a missing component in one line."""
        why = f" ({self.why})" if self.why else ""
        return f"{self.thing}{why}: needed for {self.needed_for}. {self.install}"


def find_all() -> list[Finding]:
    """Return the findings for everything that the targets and the command use."""
    return [
        Finding("python", f"{platform.python_version()} ({sys.executable})"),
        Finding("cupykern", __version__),
        *(
            Finding(name, _version(name), use, f"Run: pip install '{package}'")
            for name, use, package in (
                ("numpy", "everything", "numpy"),
                ("ml_dtypes", "everything", "ml_dtypes"),
                ("rich", "coloured tables", "cupykern[bench]"),
                ("matplotlib", "plots and the page of `report`", "cupykern[bench]"),
            )
        ),
        *_find_gpu(),
        _find_host_compiler(),
        _find_hip_compiler(),
        Finding(
            "profiler",
            shutil.which("ncu") or shutil.which("rocprofv3"),
            "`profile`",
            "Install NVIDIA Nsight Compute (ncu) or ROCm's rocprofv3, and put it on PATH",
        ),
        Finding(
            "nvidia-smi",
            nvidia_smi().get("driver_version"),
            "clocks and temperature of `bench`",
            "It comes with NVIDIA's driver",
        ),
        _find_cache(),
        Finding("free memory", _free_memory()),
    ]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


_GPU = "targets cuda and hip"
_CUPY = "Run: pip install 'cupykern[cuda13]' (CUDA 13), 'cupykern[cuda12]' or 'cupykern[rocm7]'"
_HOST = "Run: pip install 'cupykern[host]'"


def _find_gpu() -> list[Finding]:
    if importlib.util.find_spec("cupy") is None:
        return [Finding("cupy", None, _GPU, _CUPY)]
    try:
        import cupy
    except Exception as error:
        return [Finding("cupy", None, _GPU, _CUPY, f"cannot be imported: {_line(error)}")]
    runtime = cupy.cuda.runtime
    kind = "ROCm" if runtime.is_hip else "CUDA"
    findings = [
        Finding("cupy", f"{cupy.__version__}, built for {kind}"),
        Finding("cupy cache", os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")),
    ]
    try:
        version = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
        findings.append(Finding("hiprtc" if runtime.is_hip else "nvrtc", version))
    except Exception as error:
        findings.append(Finding("nvrtc", None, "compiling for GPUs", _CUPY, _line(error)))
    if not runtime.is_hip:
        findings.append(_find_headers())
    driver = "AMD's ROCm driver" if runtime.is_hip else "NVIDIA's driver"
    driver = f"Install {driver}, if this machine has such a GPU"
    try:
        version = runtime.driverGetVersion()
        findings.append(Finding("driver", str(version) if version else None, _GPU, driver))
        for device in range(runtime.getDeviceCount()):
            name = runtime.getDeviceProperties(device)["name"].decode()
            free, total = cupy.cuda.Device(device).mem_info
            memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
            findings.append(Finding(f"gpu {device}", f"{name}, {memory}"))
    except Exception as error:
        findings.append(Finding("gpu", None, _GPU, driver, _line(error)))
    return findings


def _find_headers() -> Finding:
    """Check whether NVRTC compiles what CuPy's kernels include (ours include nothing).

    Needs no GPU.
    """
    from cupy._core.core import assemble_cupy_compiler_options
    from cupy.cuda import nvrtc

    try:
        options = assemble_cupy_compiler_options(())  # finds the headers like a RawModule
        program = nvrtc.createProgram("#include <cuda_fp16.h>\n", "headers.cu", [], [])
        nvrtc.compileProgram(program, options)
        return Finding("cuda headers", "cuda_fp16.h compiles")
    except Exception as error:
        return Finding("cuda headers", None, "target cuda", _CUPY, _line(error))


def _find_host_compiler() -> Finding:
    from ..targets import host_compiler

    compiler = host_compiler.find_compiler()
    found = None if compiler is None else " ".join(compiler.command)
    return Finding("C++ compiler", found, "target host", f"{_HOST}, or install g++")


def _find_hip_compiler() -> Finding:
    from ..targets import offline

    clang = offline.find_clang()
    found = None if clang is None else " ".join(clang)
    return Finding("clang for HIP", found, "`compile --arch gfx*`", _HOST)


def _find_cache() -> Finding:
    folder = environment.cache_dir()
    found = f"{folder} ({cache.size() / 2**20:.1f} MiB{_cache_problem(folder)})"
    return Finding("kernel cache", found)


def _cache_problem(folder: Path) -> str:
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        if nearest == folder:
            cache.check_private(folder)
    except OSError as error:
        return f", not used: {error}"
    try:  # os.access returns true for root, and for a file
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError:
        return ", cannot be written: kernels last a process"
    return ""


def _free_memory() -> str | None:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_AVPHYS_PAGES') / 2**30:.1f} GiB"
    except (ValueError, OSError):
        return None


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- for a benchmark's record ------------------------------------------------------------------


def machine(target: Target) -> dict[str, Any]:
    """Return device, versions and host, for a benchmark's record."""
    found: dict[str, Any] = {
        "device": product_name(target),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "ml_dtypes": _version("ml_dtypes"),
    }
    if target.name != "host":
        cupy = target.xp
        runtime = cupy.cuda.runtime
        properties = runtime.getDeviceProperties(runtime.getDevice())
        found["multiprocessors"] = properties["multiProcessorCount"]
        found["memory_bytes"] = properties["totalGlobalMem"]
        found["cupy"] = cupy.__version__
        found["nvrtc"] = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
        found["driver_api"] = runtime.driverGetVersion()
        for name in ("torch", "triton", "quack-kernels", "liger-kernel", "flash-attn-4"):
            if version := _version(name):
                found[name] = version
    return found


_SMI_FIELDS = (
    "name", "driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw",
)  # fmt: skip


def nvidia_smi(pci_bus_id: str | None = None) -> dict[str, str]:
    """Return driver, clocks (MHz), temperature (C) and power (W); {} if nvidia-smi is missing."""
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(_SMI_FIELDS)}",
        "--format=csv,noheader,nounits",
    ]
    if pci_bus_id:
        command += ["-i", pci_bus_id]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        return {}
    return dict(zip(_SMI_FIELDS, map(str.strip, lines[0].split(",")), strict=False))


def gpu_state(target: Target) -> dict[str, str]:
    """Return `nvidia_smi` of the target's device; {} on other targets than cuda."""
    if target.name != "cuda":
        return {}
    return nvidia_smi(target.xp.cuda.Device().pci_bus_id)
