"""The C++ compiler of the host target: its choice, its flags, and the disk cache of builds."""

from __future__ import annotations

import _ctypes
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    """A C++ compiler: its command, its kind ("gcc", "clang" or "zig") and its version text."""

    command: tuple[str, ...]
    kind: str
    version: str


def find_compiler() -> Compiler | None:
    """$CXX, else the first found of g++, clang++ and ziglang's; None: there is none.

    Raises ValueError if CXX is set but is not a compiler.
    """
    return own_compiler() or _find_compiler(os.environ.get("PATH", ""))


def own_compiler() -> Compiler | None:
    """$CXX; None if it is unset.  Raises ValueError if it is not a compiler."""
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
    """The Compiler of a command; None unless its --version succeeds."""
    try:
        asked = subprocess.run(
            [*command, "--version"],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env=_environment(),
        )
    except OSError:
        return None
    version = asked.stdout.decode(errors="replace")
    kind = "clang" if "clang" in version else "gcc"
    if any(Path(word).stem in ("zig", "ziglang") for word in command):
        kind = "zig"  # its version is clang's
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
_NO_FORCED_INLINING = "-DDEVICE=inline"  # platform/host.cuh; halves the compile time
_OPTIMIZE_FLAGS = {
    "2": ("-O2",),
    "1": ("-O1", "-ftree-vectorize", _NO_FORCED_INLINING),
    "0": ("-Og", _NO_FORCED_INLINING),
}
# Of level 0 by g++: without passes that take longer than they save, and without what a C library
# starts with, which the linker would read.
_FAST_GCC = (
    *("-fno-forward-propagate", "-fno-guess-branch-probability", "-fno-tree-ccp"),
    *("-fno-ira-share-save-slots", "-fira-region=one", "-nostartfiles", "-nodefaultlibs"),
)
_SANITIZER_FLAGS = {
    "address": (
        # AddressSanitizer checks null pointers and object sizes itself.
        *("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize=vptr,null,object-size"),
        *("-fno-sanitize-recover=undefined", _NO_FORCED_INLINING),
    ),
    "thread": ("-O0", "-g1", "-fsanitize=thread", _NO_FORCED_INLINING),
}


def kernel_flags(
    compiler: Compiler, sanitizer: str | None, level: str | None = None
) -> tuple[str, ...]:
    """The compiler's flags for kernels.

    level: the optimization level without a sanitizer; None: CUPYKERN_HOST_OPTIMIZE.  Raises
        ValueError.
    """
    if sanitizer:
        return _flags(compiler, sanitizer, _SANITIZER_FLAGS[sanitizer])
    level = level or environment.host_optimization()
    fast = _FAST_GCC if level == "0" and compiler.kind == "gcc" else ()
    return _flags(compiler, None, (*_OPTIMIZE_FLAGS[level], *fast))


@cache
def _flags(compiler: Compiler, sanitizer: str | None, more: tuple[str, ...]) -> tuple[str, ...]:
    flags = [*_FLAGS, *more]
    if has_x86_64_v3():
        flags.append("-mcpu=x86_64_v3" if compiler.kind == "zig" else "-march=x86-64-v3")
    elif compiler.kind == "zig":
        flags.append("-mcpu=baseline")  # zig's default is the compiling machine's CPU
    if compiler.kind == "zig":
        # Kernels do not use the C++ library, which zig would have to build first.
        flags += ["-fno-sanitize=undefined", "-nostdlib++"]
    if compiler.kind == "clang" and sanitizer == "address":
        flags.append("-shared-libsan")
    return tuple(flags)


@cache
def has_x86_64_v3() -> bool:
    """Return whether this machine's CPU has the instructions of x86-64-v3."""
    if platform.machine() != "x86_64":
        return False
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"} <= words


# --- building and the disk cache ---------------------------------------------------------------


class CompilerFailed(Exception):
    """A compile failed; args[0]: the compiler's output."""


_FORMAT = "2"  # of the cached files, which versions of cupykern share
_DIGEST_BYTES = 32


def build(
    compiler: Compiler, flags: tuple[str, ...], source: str, symbols: tuple[str, ...]
) -> ctypes.CDLL:
    """The loaded library of `source`, which defines `symbols`, from the cache if it is intact.

    Without a cache directory, or if a compile in it fails (on a full disk, say), compiles in a
    private directory.  Raises CompilerFailed if that fails too, and OSError if the private
    directory cannot be made.
    """
    key = hashlib.sha256()
    for part in (_FORMAT, *compiler.command, compiler.version, *flags, source):
        key.update(part.encode() + b"\0")
    name = f"{key.hexdigest()[:40]}.so"

    def build_in(folder: Path, **added: str) -> ctypes.CDLL:
        path = folder / name
        library = _load(path, symbols)
        if library is None:
            with _one_process(path) as is_replaced:
                if is_replaced:
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
        reason = str(error).strip().partition("\n")[0]  # `error` is unbound after the block
    private = disk_cache.private_folder()
    library = build_in(private, ZIG_GLOBAL_CACHE_DIR=str(private / "zig"))  # its default: in HOME
    disk_cache.warn_once(reason)
    return library


@contextmanager
def _one_process(path: Path) -> Iterator[bool]:
    """Within the block, other processes that would compile into `path` wait, as ranks of one job
    would all do.  True: another process has replaced it meanwhile.  Where the file system has no
    locks, nobody waits.

    The lock is on `path` itself, empty until the compile replaces it, so that no other file is
    left.  It ends with its process, and a forked child does not have it; it would also end if this
    process closed another descriptor of the same file.
    """
    descriptor, is_replaced = None, False
    try:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
            is_replaced = os.fstat(descriptor).st_nlink == 0
        yield is_replaced
    finally:
        if descriptor is not None:
            found = os.fstat(descriptor)
            if found.st_nlink and not found.st_size:  # the compile failed
                with suppress(OSError):
                    path.unlink()
            os.close(descriptor)


def _load(path: Path, symbols: tuple[str, ...]) -> ctypes.CDLL | None:
    """Load the library at `path`; None if it is missing, damaged, another kernel's or not loadable,
    or if another user could have written it.

    The file ends with a digest of its name and the library's bytes.  Without that check a truncated
    library could crash, and a renamed one would launch another kernel.
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
    _ctypes.dlclose(library._handle)  # otherwise the next load of this path returns it again
    return None


def _digest(name: str, library: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + library).digest()


def _compile(
    compiler: Compiler, flags: tuple[str, ...], source: str, path: Path, added: dict[str, str]
) -> None:
    """Compile into `path` atomically.  added: variables for the compiler's environment.

    Raises CompilerFailed, OSError and KeyboardInterrupt.
    """
    with disk_cache.scratch(path.parent) as scratch:
        source_path, library = scratch / "kernel.cpp", scratch / "kernel.so"
        source_path.write_text(source)
        command = [*compiler.command, *flags, str(source_path), "-o", str(library), "-lm"]
        if compiler.kind == "gcc":
            command.append("-lgcc")
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env={**_environment(), **added},
        )
        if done.returncode == -signal.SIGINT:  # Ctrl-C in a terminal also ends the compiler
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
    """The compiler's environment, without a preloaded sanitizer, which triples its time."""
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
    """Variables to add to the environment of a process that runs kernels under sanitizer `name`.

    After a report the process exits with a code other than 0.  Raises ValueError for an unknown
    name and UnavailableError if the compiler lacks the sanitizer.
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
            [*compiler.command, f"-print-file-name={library}"],
            env=_environment(),
            capture_output=True,
            text=True,
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
