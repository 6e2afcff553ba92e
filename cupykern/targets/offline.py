"""Compile for GPUs that are not present: NVRTC for sm_*, clang for gfx*.  For the compile gates."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np

from ..kernels import Variant, source_text
from .base import CompileError, UnavailableError
from .cuda import OPTIONS

CLANG_FLAGS = (
    *("-x", "hip", "--offload-device-only", "-nogpuinc", "-nogpulib"),
    *("-std=c++17", "-fgpu-flush-denormals-to-zero", "-O3", "-S"),
)


class UnknownArchError(Exception):
    """This compiler is too old for the architecture."""


@dataclass(frozen=True)
class Usage:
    """Resources of a compiled variant.

    registers: per thread (AMD: VGPRs).  sgprs: AMD's scalar registers; NVIDIA: None.
    local_bytes: local memory per thread (the stack frame; AMD: scratch), which holds spilled
        registers and arrays that are indexed at run time.
    shared_bytes: static shared memory (LDS) per block.
    warnings: findings that mean a slower or wrong kernel.
    code: digest of the machine code (code_digest; AMD: of the assembly); equal digests are equal
        kernels.
    """

    registers: int
    sgprs: int | None
    local_bytes: int
    shared_bytes: int
    warnings: tuple[str, ...] = ()
    code: str = ""


def compile_offline(variant: Variant, arch: str) -> Usage:
    """Compile `variant` for `arch` ("sm_90a", "gfx942").

    Raises CompileError, UnknownArchError (compiler too old), UnavailableError (no compiler).
    """
    return (_compile_hip if arch.startswith("gfx") else _compile_cuda)(variant, arch)


def options(arch: str) -> tuple[str, ...]:
    """The compiler's options for `arch`, without those that only add output."""
    if arch.startswith("gfx"):
        return (*CLANG_FLAGS, f"--offload-arch={arch}")
    return (*OPTIONS, f"-arch={arch}", "-ftz=true")


def compiler_name(arch: str) -> str:
    """The compiler that compile_offline uses for `arch`: "NVRTC 13.0".  Raises UnavailableError."""
    if not arch.startswith("gfx"):
        return f"NVRTC {'.'.join(map(str, _nvrtc().getVersion()))}"
    clang = find_clang()
    if clang is None:
        raise UnavailableError("no clang for AMD GPUs: pip install 'cupykern[host]'")
    done = subprocess.run([*clang, "--version"], capture_output=True, text=True)
    return done.stdout.partition("\n")[0].strip() or clang[-1]


# --- NVRTC -------------------------------------------------------------------------------------

_REGISTERS = re.compile(r"Used (\d+) registers")
_STACK_FRAME = re.compile(r"(\d+) bytes stack frame")
_SHARED = re.compile(r"(\d+) bytes smem")
# setmaxnreg ignored (C7508); wgmma serialised (several numbers) or with injected waits.
_WARNINGS = re.compile(r"C7508[^\n]*|C75\d\d[^\n]*(?:serialized|injected)[^\n]*")


def _nvrtc() -> Any:
    """CuPy's nvrtc module, with its library loaded.  Raises UnavailableError."""
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # CuPy, or its NVRTC, is missing or broken
        raise UnavailableError(
            f"NVRTC cannot be loaded ({error}): pip install 'cupykern[cuda13]'"
        ) from None
    return nvrtc


_BROKEN = (
    "{} asynchronous copies with a uniform register in their shared address: an illegal instruction"
)


def broken_copies(cubin: bytes) -> int:
    """The number of instructions `LDGSTS [R + UR + offset], desc[UR]`, which no GPU can encode.

    Some versions of ptxas (13.0) generate them from cp.async with a cache policy, with 0 for the
    registers.
    """
    return sum(
        int(((code[:, 0] & 0xFFF == 0xDAE) & (code[:, 1] & 0x3F == 0)).sum())
        for code in _instructions(cubin)
    )


_EARLY = "{} accesses to global memory before the wait for the previous grid"
_WAIT = 0x82E  # ACQBULK
# LD, LDG, ST, STG, LDGSTS, ATOMG, RED, bulk copies and TMA, each with and without a uniform
# register in the address.
_GLOBAL_ACCESSES = (
    *(0x380, 0x980, 0x381, 0x981, 0x385, 0x985, 0x386, 0x986, 0xDAE, 0xFAE, 0x3A3, 0x9A3),
    *(0x3A6, 0x9A6, 0x3A8, 0x9A8, 0x3A9, 0x9A9, 0x38E, 0x98E, 0x3BA, 0x5BA, 0x3B4, 0x5B4),
    *(0x3B5, 0x5B5),
)


def early_accesses(cubin: bytes) -> int:
    """The number of global memory accesses before `griddepcontrol.wait`; 0 without a wait.

    The compiler keeps the order of asm statements, and of accesses relative to memory clobbers.  It
    can move a read-only load (ld.global.nc) above the wait.
    """
    found = 0
    for code in _instructions(cubin):
        opcodes = code[:, 0] & 0xFFF
        waits = np.flatnonzero(opcodes == _WAIT)
        if waits.size:
            found += int(np.isin(opcodes[: waits[0]], _GLOBAL_ACCESSES).sum())
    return found


def _instructions(cubin: bytes) -> Iterator[np.ndarray]:
    """Yield each function's 128-bit instructions as uint64 (n, 2); the first has the opcode."""
    for name, content in _sections(cubin):
        if name.startswith(".text."):
            yield np.frombuffer(content, "<u8", len(content) // 8).reshape(-1, 2)


_CODE_SECTIONS = (
    ".text.",
    ".nv.constant0",
    ".nv.constant2",
    ".nv.constant3",
    ".nv.info",
    ".nv.shared.",
)
# Attributes of .nv.info whose first four bytes are an index into the symbol table.
_OF_SYMBOLS = (0x0A, 0x0F, 0x11, 0x12, 0x23, 0x2F)


def code_digest(cubin: bytes) -> str:
    """Digest of the sections that define a kernel: instructions, constants, resources, attributes.

    It excludes names of kernels and files, line numbers, symbol tables and variables' addresses.
    """
    digest = hashlib.sha256()
    for kind in _CODE_SECTIONS:
        for name, content in _sections(cubin):
            if name.startswith(kind):
                content = _without_symbols(content) if kind == ".nv.info" else content
                digest.update(kind.encode() + struct.pack("<Q", len(content)) + content)
    return digest.hexdigest()[:16]


def _without_symbols(info: bytes) -> bytes:
    """Clear the symbol indices in .nv.info, so that the order of symbols does not count.

    Its entries are (format, attribute, size or value, payload).
    """
    result, at = bytearray(info), 0
    while at < len(info):
        kind, attribute, size = struct.unpack_from("<2BH", info, at)
        at += 4
        if kind == 4:  # with a payload
            if attribute in _OF_SYMBOLS:
                result[at : at + 4] = bytes(4)
            at += size
    return bytes(result)


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of an ELF file's sections."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    # Section headers: name, type, flags, address, offset, size.
    sections = [struct.unpack_from("<2I4Q", cubin, headers + i * size) for i in range(count)]
    for name, kind, _, _, offset, length in sections:
        at = sections[names][4] + name
        text = cubin[at : cubin.index(b"\0", at)].decode()
        yield text, b"" if kind == _NOBITS else cubin[offset : offset + length]


_NOBITS = 8  # the type of sections without contents in the file, such as .nv.shared


def _compile_cuda(variant: Variant, arch: str) -> Usage:
    nvrtc = _nvrtc()
    asked = (
        *options(arch),
        "--ptxas-options=-v",
        # A cached result lacks ptxas' log.
        *(("--no-cache",) if nvrtc.getVersion() >= (12, 8) else ()),
    )
    program = nvrtc.createProgram(source_text(variant, "cuda"), "variant.cu", (), ())
    try:
        nvrtc.compileProgram(program, asked)
        log = nvrtc.getProgramLog(program)
        known = arch.startswith(("sm_8", "sm_9"))  # encodings that broken_copies reads
        cubin = nvrtc.getCUBIN(program)
        copies, early = (broken_copies(cubin) if known else 0), early_accesses(cubin)
    except nvrtc.NVRTCError:
        log = nvrtc.getProgramLog(program)
        if "--gpu-architecture" in log:
            raise UnknownArchError(f"{compiler_name(arch)} does not know {arch}") from None
        raise CompileError(variant, arch, log) from None
    finally:
        nvrtc.destroyProgram(program)
    registers, frames = _REGISTERS.search(log), _STACK_FRAME.findall(log)
    shared = _SHARED.search(log)
    if registers is None or not frames:  # another version's log must not pass for zeros
        raise CompileError(variant, arch, f"its log has no registers or no stack frame:\n{log}")
    return Usage(
        registers=int(registers[1]),
        sgprs=None,
        # The kernel's and that of each function that was not inlined.
        local_bytes=sum(map(int, frames)),
        shared_bytes=int(shared[1]) if shared else 0,
        warnings=(
            *_WARNINGS.findall(log),
            *([_BROKEN.format(copies)] if copies else ()),
            *([_EARLY.format(early)] if early else ()),
        ),
        code=code_digest(cubin),
    )


# --- clang -------------------------------------------------------------------------------------

_METADATA = re.compile(
    r"\.(vgpr_count|sgpr_count|private_segment_fixed_size|group_segment_fixed_size):\s+(\d+)"
)
# Of AMD's assembly: comments, file names and clang's identifier of the file.
_COMMENTS = re.compile(r"[ \t]*;.*|^.*(?:\.file|\.ident|__hip_cuid_).*\n", re.MULTILINE)
_SCRATCH_ACCESS = re.compile(r"^\s*(?:scratch|buffer)_(?:load|store)", re.MULTILINE)
_REFERENCE = re.compile(r"\b([A-Za-z_][\w.]*)@(?:rel32|gotpcrel32|abs32)")
_DEFINITION = re.compile(r"^([A-Za-z_][\w.]*):", re.MULTILINE)


def find_clang() -> tuple[str, ...] | None:
    """The command for ziglang's clang, else clang-19, clang-20 or clang; None: there is none."""
    if zig := util.find_spec("ziglang"):
        # What `python -m ziglang` runs, without starting Python for each variant.
        binary = Path(zig.origin or "").with_name("zig.exe" if os.name == "nt" else "zig")
        if binary.exists():
            return (str(binary), "clang")
        return (sys.executable, "-m", "ziglang", "clang")
    for name in ("clang-19", "clang-20", "clang"):
        if shutil.which(name):
            return (name,)
    return None


def _compile_hip(variant: Variant, arch: str) -> Usage:
    clang = find_clang()
    if clang is None:
        raise UnavailableError("no clang for AMD GPUs: pip install 'cupykern[host]'")
    # Pipes avoid scratch files, which could be left behind or fail on a full disk.
    done = subprocess.run(
        [*clang, *options(arch), "-", "-o", "-"],
        input=source_text(variant, "hip"),
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        if "unsupported HIP gpu architecture" in done.stderr:
            raise UnknownArchError(f"this clang does not know {arch}")
        raise CompileError(variant, arch, done.stderr)
    text = done.stdout
    # No linker runs, so calls to undefined functions are detected here.
    undefined = set(_REFERENCE.findall(text)) - set(_DEFINITION.findall(text))
    if undefined:
        raise CompileError(variant, arch, f"undefined symbols: {', '.join(sorted(undefined))}")
    metadata = {name: int(value) for name, value in _METADATA.findall(text)}
    # SGPRs that are spilled into lanes of VGPRs leave an unused frame.
    used = _SCRATCH_ACCESS.search(text) is not None
    return Usage(
        registers=metadata["vgpr_count"],
        sgprs=metadata["sgpr_count"],
        local_bytes=metadata["private_segment_fixed_size"] if used else 0,
        shared_bytes=metadata["group_segment_fixed_size"],
        code=hashlib.sha256(_COMMENTS.sub("", text).encode()).hexdigest()[:16],
    )
