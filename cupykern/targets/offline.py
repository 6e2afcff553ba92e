"""Compiling for GPUs that are not here: NVRTC for sm_*, clang for gfx*.  What the compile gates use."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib import util
from pathlib import Path

from kernels_cu import Variant, source_text

from . import CompileError, UnavailableError
from .cuda import OPTIONS

_CLANG_FLAGS = (
    *("-x", "hip", "--offload-device-only", "-nogpuinc", "-nogpulib"),
    *("-std=c++17", "-fgpu-flush-denormals-to-zero", "-O3", "-S"),
)


class UnknownArchError(Exception):
    """This compiler is too old for the architecture."""


@dataclass(frozen=True)
class Usage:
    """What a compiled variant needs.

    registers of a thread (VGPRs on AMD, whose scalar ones are sgprs), spill_bytes (AMD: scratch) of a
    thread, static shared_bytes (LDS) of a block, warnings that mean a slower kernel.
    """

    registers: int
    sgprs: int | None
    spill_bytes: int
    shared_bytes: int
    warnings: tuple[str, ...] = ()


def compile_offline(variant: Variant, arch: str) -> Usage:
    """Compile `variant` for `arch` ("sm_90a", "gfx942").

    Raises CompileError, UnknownArchError (an older compiler) and UnavailableError (none).
    """
    return (_compile_hip if arch.startswith("gfx") else _compile_cuda)(variant, arch)


# --- NVRTC -------------------------------------------------------------------------------------

_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"(\d+) bytes smem")
_WARNINGS = re.compile(r"C75(?:08|10)[^\n]*")  # setmaxnreg ignored, wgmma serialised


@cache
def cuda_include_dir() -> str:
    """Where cuda_fp16.h is.  Raises UnavailableError."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        directory = find_nvidia_header_directory("cudart")
    except ImportError:
        directory = None
    if directory is None or not Path(directory, "cuda_fp16.h").exists():
        raise UnavailableError("no CUDA headers: pip install 'cupykern[cuda13]'")
    return str(directory)


def _compile_cuda(variant: Variant, arch: str) -> Usage:
    try:
        from cupy.cuda import nvrtc

        version = nvrtc.getVersion()
    except Exception as error:  # CuPy, or its NVRTC, is missing or broken
        raise UnavailableError(
            f"NVRTC cannot be loaded ({error}): pip install 'cupykern[cuda13]'"
        ) from None
    options = (
        *OPTIONS,
        f"-arch={arch}",
        "-ftz=true",
        "--ptxas-options=-v",
        f"-I{cuda_include_dir()}",
        # What comes out of a cache comes without ptxas' words.
        *(("--no-cache",) if version >= (12, 8) else ()),
    )
    program = nvrtc.createProgram(source_text(variant, "cuda"), "variant.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        log = nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError:
        log = nvrtc.getProgramLog(program)
        if "--gpu-architecture" in log:
            name = ".".join(map(str, version))
            raise UnknownArchError(f"NVRTC {name} does not know {arch}") from None
        raise CompileError(variant, arch, log) from None
    finally:
        nvrtc.destroyProgram(program)
    spills = _SPILLS.search(log)
    shared = _SHARED.search(log)
    return Usage(
        registers=int(_REGISTERS.search(log)[1]),
        sgprs=None,
        spill_bytes=sum(map(int, spills.groups())) if spills else 0,
        shared_bytes=int(shared[1]) if shared else 0,
        warnings=tuple(_WARNINGS.findall(log)),
    )


# --- clang -------------------------------------------------------------------------------------

_METADATA = re.compile(
    r"\.(vgpr_count|sgpr_count|private_segment_fixed_size|group_segment_fixed_size):\s+(\d+)"
)
_REFERENCE = re.compile(r"\b([A-Za-z_][\w.]*)@(?:rel32|gotpcrel32|abs32)")
_DEFINITION = re.compile(r"^([A-Za-z_][\w.]*):", re.MULTILINE)


def find_clang() -> tuple[str, ...] | None:
    """The command of ziglang's clang, else of clang-19, clang-20 or clang; None: there is none."""
    if util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "clang")
    for name in ("clang-19", "clang-20", "clang"):
        if shutil.which(name):
            return (name,)
    return None


def _compile_hip(variant: Variant, arch: str) -> Usage:
    clang = find_clang()
    if clang is None:
        raise UnavailableError("no clang for AMD GPUs: pip install 'cupykern[host]'")
    with tempfile.TemporaryDirectory() as scratch:
        source, assembly = Path(scratch, "variant.hip"), Path(scratch, "variant.s")
        source.write_text(source_text(variant, "hip"))
        done = subprocess.run(
            [*clang, *_CLANG_FLAGS, f"--offload-arch={arch}", str(source), "-o", str(assembly)],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            if "unsupported HIP gpu architecture" in done.stderr:
                raise UnknownArchError(f"this clang does not know {arch}")
            raise CompileError(variant, arch, done.stderr)
        text = assembly.read_text()
    # Without a linker nobody else notices a call to a function that does not exist.
    undefined = set(_REFERENCE.findall(text)) - set(_DEFINITION.findall(text))
    if undefined:
        raise CompileError(variant, arch, f"undefined symbols: {', '.join(sorted(undefined))}")
    metadata = {name: int(value) for name, value in _METADATA.findall(text)}
    return Usage(
        registers=metadata["vgpr_count"],
        sgprs=metadata["sgpr_count"],
        spill_bytes=metadata["private_segment_fixed_size"],
        shared_bytes=metadata["group_segment_fixed_size"],
    )
