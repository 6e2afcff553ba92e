"""The C++ compiler of the host target: which one, with which flags, and the disk cache of what it built."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path

from ..cache import cache_dir
from . import UnavailableError

SANITIZERS = ("address", "thread")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its command, its kind ("gcc", "clang" or "zig") and its version's text."""

    command: tuple[str, ...]
    kind: str
    version: str


def find_compiler() -> Compiler | None:
    """$CXX, g++, clang++ or ziglang's, whichever comes first; None: there is none.  Raises ValueError."""
    return _find_compiler(own_command(), os.environ.get("PATH", ""))


def own_command() -> tuple[str, ...]:
    """CXX.  Raises ValueError for what is no command."""
    cxx = os.environ.get("CXX", "")
    try:
        return tuple(shlex.split(cxx))
    except ValueError as error:
        raise ValueError(f"CXX must be a command; got {cxx!r}: {error}") from None


@cache
def _find_compiler(own: tuple[str, ...], path: str) -> Compiler | None:
    for command in (own, ("g++",), ("clang++",)):
        if not command or not shutil.which(command[0], path=path):
            continue
        asked = subprocess.run([*command, "--version"], capture_output=True, text=True)
        if asked.returncode == 0:
            kind = "clang" if "clang" in asked.stdout else "gcc"
            return Compiler(command, kind, asked.stdout)
    if util.find_spec("ziglang"):
        command = (sys.executable, "-m", "ziglang", "c++")
        return Compiler(command, "zig", metadata.version("ziglang"))
    return None


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
    """level: of optimization; None: CUPYKERN_HOST_OPTIMIZE's.  Raises ValueError for one that is none."""
    if sanitizer:
        return _flags(compiler, sanitizer, _SANITIZER_FLAGS[sanitizer])
    return _flags(compiler, None, _OPTIMIZE_FLAGS[level or optimization()])


def optimization() -> str:
    """CUPYKERN_HOST_OPTIMIZE.  Raises ValueError for what is no level."""
    level = os.environ.get("CUPYKERN_HOST_OPTIMIZE", "2")
    if level not in _OPTIMIZE_FLAGS:
        raise ValueError(f"CUPYKERN_HOST_OPTIMIZE must be 0, 1 or 2; got {level!r}")
    return level


@cache
def _flags(compiler: Compiler, sanitizer: str | None, more: tuple[str, ...]) -> tuple[str, ...]:
    flags = [*_FLAGS, *more]
    if _has_x86_64_v3():
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
def _has_x86_64_v3() -> bool:
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


def build(compiler: Compiler, flags: tuple[str, ...], source: str) -> ctypes.CDLL:
    """The loaded library of `source`, from the cache if it is there and whole."""
    key = hashlib.sha256()
    for part in (*compiler.command, compiler.version, *flags, source):
        key.update(part.encode() + b"\0")
    name = f"{key.hexdigest()[:40]}.so"
    path = cache_dir() / "host" / name
    library = _load(path)
    if library is None:
        try:
            _compile(compiler, flags, source, path)
            library = _load(path)
        except OSError:  # the cache cannot be written
            pass
    if library is None:  # nor, perhaps, executed
        path = _private_dir() / name
        _compile(compiler, flags, source, path)
        library = _load(path)
    if library is None:
        raise CompilerFailed(f"{path} cannot be loaded")
    return library


def _load(path: Path) -> ctypes.CDLL | None:
    """The library at `path`; None if it is missing, damaged or cannot be loaded.

    The SHA-256 of a library follows its bytes in the file: loading a truncated one can crash.
    """
    try:
        data = path.read_bytes()
        if hashlib.sha256(data[:-32]).digest() != data[-32:]:
            return None
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _compile(compiler: Compiler, flags: tuple[str, ...], source: str, path: Path) -> None:
    """Compile into `path`, at once or not at all.  Raises CompilerFailed and OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        source_path, library = Path(scratch, "kernel.cpp"), Path(scratch, "kernel.so")
        source_path.write_text(source)
        command = [*compiler.command, *flags, str(source_path), "-o", str(library), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment())
        if done.returncode != 0:
            raise CompilerFailed(done.stdout + done.stderr)
        with library.open("ab") as file:
            file.write(hashlib.sha256(library.read_bytes()).digest())
        os.replace(library, path)


def _environment() -> dict[str, str]:
    """The compiler's: without a checker (sanitizer_environment), under which it takes three times as long."""
    without = "LD_PRELOAD" if "CUPYKERN_HOST_SANITIZER" in os.environ else None
    return {name: value for name, value in os.environ.items() if name != without}


@cache
def _private_dir() -> Path:
    """Where this process alone keeps what the cache cannot."""
    directory = tempfile.mkdtemp(prefix="cupykern-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


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

    The process ends with an exit code other than 0 after a report.  Raises ValueError for an unknown
    name and UnavailableError where the compiler lacks the sanitizer.
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
