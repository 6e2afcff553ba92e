"""The C++ compiler of the host target: which one, its flags, and the disk cache of its builds."""

from __future__ import annotations

import _ctypes
import ctypes
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path

from .. import cache as disk_cache
from .. import environment
from .base import UnavailableError

SANITIZERS = ("address", "thread")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its command, its kind ("gcc", "clang" or "zig") and its version's text."""

    command: tuple[str, ...]
    kind: str
    version: str


def find_compiler() -> Compiler | None:
    """$CXX, else g++, clang++ or ziglang's, whichever comes first; None: there is none.

    Raises ValueError where CXX is set and is no compiler.
    """
    return own_compiler() or _find_compiler(os.environ.get("PATH", ""))


def own_compiler() -> Compiler | None:
    """$CXX; None where it is unset.  Raises ValueError for what is no compiler."""
    command = environment.compiler_command()
    return _own_compiler(command, os.environ.get("PATH", "")) if command else None


@cache
def _own_compiler(command: tuple[str, ...], path: str) -> Compiler:
    text = " ".join(command)
    if not shutil.which(command[0], path=path):
        raise ValueError(f"CXX must be a C++ compiler; got {text!r}, which is not found")
    compiler = _ask(command)
    if compiler is None:
        raise ValueError(f"CXX must be a C++ compiler; got {text!r}, which does not know --version")
    return compiler


@cache
def _find_compiler(path: str) -> Compiler | None:
    for name in ("g++", "clang++"):
        if shutil.which(name, path=path) and (compiler := _ask((name,))):
            return compiler
    if util.find_spec("ziglang"):
        command = (sys.executable, "-m", "ziglang", "c++")
        return Compiler(command, "zig", metadata.version("ziglang"))
    return None


def _ask(command: tuple[str, ...]) -> Compiler | None:
    """The compiler of a command that answers --version; None: it does not."""
    try:
        asked = subprocess.run(
            [*command, "--version"], capture_output=True, stdin=subprocess.DEVNULL
        )
    except OSError:
        return None
    version = asked.stdout.decode(errors="replace")
    kind = "clang" if "clang" in version else "gcc"
    return Compiler(command, kind, version) if asked.returncode == 0 else None


def the_compiler() -> Compiler:
    compiler = find_compiler()
    if compiler is None:
        raise UnavailableError(
            "the host target needs a C++ compiler: g++, clang++ or pip install 'cupykern[host]'"
        )
    return compiler


_FLAGS = [
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-w",
]
_NO_FORCED_INLINING = "-DDEVICE=inline"  # platform/host.cuh: compiled in half of the time
_OPTIMIZE_FLAGS = {
    "2": ("-O2",),
    "1": ("-O1", "-ftree-vectorize", _NO_FORCED_INLINING),
    "0": ("-Og", _NO_FORCED_INLINING),
}
_SANITIZER_FLAGS = {
    "address": (
        # Null pointers and the ends of objects are AddressSanitizer's.
        *("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize=vptr,null,object-size"),
        *("-fno-sanitize-recover=undefined", _NO_FORCED_INLINING),
    ),
    "thread": ("-O0", "-g1", "-fsanitize=thread", _NO_FORCED_INLINING),
}


def kernel_flags(
    compiler: Compiler, sanitizer: str | None, level: str | None = None
) -> tuple[str, ...]:
    """level: of optimization; None: CUPYKERN_HOST_OPTIMIZE's.  Raises ValueError."""
    if sanitizer:
        return _flags(compiler, sanitizer, _SANITIZER_FLAGS[sanitizer])
    level = level or environment.host_optimization()
    return _flags(compiler, None, _OPTIMIZE_FLAGS[level])


@cache
def _flags(compiler: Compiler, sanitizer: str | None, more: tuple[str, ...]) -> tuple[str, ...]:
    flags = [*_FLAGS, *more]
    if has_x86_64_v3():
        flags.append("-mcpu=x86_64_v3" if compiler.kind == "zig" else "-march=x86-64-v3")
    elif compiler.kind == "zig":
        flags.append("-mcpu=baseline")  # not the compiling machine's own
    if compiler.kind == "zig":
        # Nothing is taken from the C++ library, which zig would first have to build.
        flags += ["-fno-sanitize=undefined", "-nostdlib++"]
    if compiler.kind == "clang" and sanitizer == "address":
        flags.append("-shared-libsan")
    return tuple(flags)


@cache
def has_x86_64_v3() -> bool:
    """Whether this machine's CPU has the instructions of x86-64-v3."""
    if platform.machine() != "x86_64":
        return False
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"} <= words


# --- building and the disk cache ---------------------------------------------------------------


class CompilerFailed(Exception):
    """args[0]: what the compiler said."""


_FORMAT = "2"  # of the files: two versions of cupykern must not take them for their own
_DIGEST_BYTES = 32


def build(
    compiler: Compiler, flags: tuple[str, ...], source: str, symbols: tuple[str, ...]
) -> ctypes.CDLL:
    """The loaded library of `source`, which defines `symbols`, from the cache if it is whole there.

    Without a cache directory, or where a compile in it fails, as it does on a full disk, the
    compile is repeated in a private directory.  Raises CompilerFailed if that fails too, and
    OSError if there is no such directory.
    """
    key = hashlib.sha256()
    for part in (_FORMAT, *compiler.command, compiler.version, *flags, source):
        key.update(part.encode() + b"\0")
    name = f"{key.hexdigest()[:40]}.so"

    def build_in(folder: Path, **added: str) -> ctypes.CDLL:
        path = folder / name
        library = _load(path, symbols)
        if library is None:
            _compile(compiler, flags, source, path, added)
            library = _load(path, symbols)
        if library is None:
            raise CompilerFailed(f"{path} cannot be loaded")
        return library

    try:
        return build_in(disk_cache.folder(disk_cache.HOST))
    except (OSError, CompilerFailed) as error:
        reason = str(error).strip().partition("\n")[0]  # the name goes when the block ends
    private = disk_cache.private_folder()
    library = build_in(private, ZIG_GLOBAL_CACHE_DIR=str(private / "zig"))  # else in HOME
    disk_cache.warn_once(reason)
    return library


def _load(path: Path, symbols: tuple[str, ...]) -> ctypes.CDLL | None:
    """The library at `path`; None if it is missing, another one, damaged or cannot be loaded, or if
    another user could have written it.

    A digest of its name and its bytes follows these in the file: loading a truncated library can
    crash, and another kernel's would be launched.
    """
    try:
        data = disk_cache.read(path)
        if _digest(path.name, data[:-_DIGEST_BYTES]) != data[-_DIGEST_BYTES:]:
            return None
        library = ctypes.CDLL(str(path))
    except OSError:
        return None
    if all(hasattr(library, symbol) for symbol in symbols):
        return library
    _ctypes.dlclose(library._handle)  # or the next load of this path would find it again
    return None


def _digest(name: str, library: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + library).digest()


def _compile(
    compiler: Compiler, flags: tuple[str, ...], source: str, path: Path, added: dict[str, str]
) -> None:
    """Compile into `path`, at once or not at all; added: to the environment of the compiler.

    Raises CompilerFailed, OSError and KeyboardInterrupt.
    """
    with disk_cache.scratch(path.parent) as scratch:
        source_path, library = scratch / "kernel.cpp", scratch / "kernel.so"
        source_path.write_text(source)
        command = [*compiler.command, *flags, str(source_path), "-o", str(library), "-lm"]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env={**_environment(), **added},
        )
        if done.returncode == -signal.SIGINT:  # a terminal's Ctrl-C is the compiler's, too
            raise KeyboardInterrupt
        if done.returncode != 0 or not library.exists():
            said = done.stdout + done.stderr
            raise CompilerFailed(said or f"{' '.join(compiler.command)} has made no library")
        digest = _digest(path.name, library.read_bytes())
        with library.open("ab") as file:
            file.write(digest)
        library.chmod(0o600)
        os.replace(library, path)


def _environment() -> dict[str, str]:
    """The compiler's environment: no sanitizer, under which it would take three times as long."""
    without = "LD_PRELOAD" if environment.host_sanitizer() else None
    return {name: value for name, value in os.environ.items() if name != without}


# --- sanitizers --------------------------------------------------------------------------------

_LIBRARIES = {  # by kind of compiler
    "gcc": {"address": "libasan.so", "thread": "libtsan.so"},
    "clang": {
        "address": f"libclang_rt.asan-{platform.machine()}.so",
        "thread": f"libclang_rt.tsan-{platform.machine()}.so",
    },
}
_OPTIONS = {
    "address": {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
    "thread": {"TSAN_OPTIONS": "halt_on_error=0 exitcode=66"},
}


def sanitizer_environment(name: str) -> dict[str, str]:
    """What to add to the environment of a process that is to run kernels under sanitizer `name`.

    The process ends with an exit code other than 0 after a report.  Raises ValueError for an
    unknown name and UnavailableError where the compiler lacks the sanitizer.
    """
    if name not in SANITIZERS:
        raise ValueError(f"sanitizer must be one of {', '.join(SANITIZERS)}; got {name!r}")
    return {
        "CUPYKERN_HOST_SANITIZER": name,
        "LD_PRELOAD": _sanitizer_library(the_compiler(), name),
        "PYTHONMALLOC": "malloc",
        **_OPTIONS[name],
    }


@cache
def _sanitizer_library(compiler: Compiler, name: str) -> str:
    library = _LIBRARIES.get(compiler.kind, {}).get(name)
    if library:
        asked = subprocess.run(
            [*compiler.command, f"-print-file-name={library}"], capture_output=True, text=True
        )
        path = Path(asked.stdout.strip())
        if path.is_absolute() and path.exists():
            return str(path.resolve())
    raise UnavailableError(f"{' '.join(compiler.command)} has no {name} sanitizer; g++ has")


def check_sanitizer(compiler: Compiler, name: str) -> None:
    _sanitizer_library(compiler, name)
    symbol = {"address": "__asan_init", "thread": "__tsan_init"}.get(name)
    if symbol and not hasattr(ctypes.CDLL(None), symbol):
        raise UnavailableError(
            f"sanitizer {name!r} must be loaded before Python starts: set the environment that "
            f"cupykern.targets.host_compiler.sanitizer_environment({name!r}) gives"
        )
