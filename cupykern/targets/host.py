"""The host target: kernels compiled as C++ and run on the CPU, for tests and for machines without GPU.

Settings, by `use(...)` or the environment:
    warp_size   CUPYKERN_HOST_WARP_SIZE   32 (default) or 64
    schedule    CUPYKERN_HOST_SCHEDULE    fifo (default), lifo or sticky:<seed>: which thread runs next
    sanitizer   CUPYKERN_HOST_SANITIZER   address (and undefined behaviour) or thread: build kernels with it
And by the environment alone:
                CUPYKERN_HOST_OPTIMIZE    2 (default), 1: compile in two thirds of the time kernels that take up
                                          to a third longer, or 0: in half the time, two to three times as long
Schedules differ in the races that they expose.  A barrier or shuffle that not all threads reach ends
in HostKernelError, never in a hang.
"""

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
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kernels_cu import Variant, file_text, source_text

from ..cache import cache_dir
from . import CompileError, UnavailableError, by_value, limits

SANITIZERS = ("address", "thread")
_ORDERS = {"fifo": 0, "lifo": 1, "sticky": 2}  # host_block.h: Order
_POLL_MS = 50  # how often a running launch lets Python see Ctrl-C


class HostKernelError(RuntimeError):
    """A kernel broke a rule of its platform; the message names file, line and threads."""


@dataclass(frozen=True)
class HostTarget:
    """The CPU with these settings.  Raises ValueError for others."""

    warp_size: int = 32
    schedule: str = "fifo"
    sanitizer: str | None = None

    name: ClassVar[str] = "host"
    arch: ClassVar[str] = "host"
    multiprocessors: ClassVar[int] = limits.multiprocessors("host")
    xp: ClassVar[Any] = np

    def __post_init__(self) -> None:
        if self.warp_size not in (32, 64):
            raise ValueError(f"warp_size of the host target must be 32 or 64; got {self.warp_size}")
        if self.sanitizer not in (None, *SANITIZERS):
            raise ValueError(
                f"sanitizer must be one of {', '.join(SANITIZERS)}; got {self.sanitizer!r}"
            )
        _parse_schedule(self.schedule)

    def by_value(self, struct: np.ndarray) -> np.ndarray:
        return by_value(struct)

    def compile(self, variant: Variant) -> HostKernel:
        """Compile, or take from the disk cache, and load.

        Raises CompileError, and UnavailableError without a compiler or the sanitizer's library.
        """
        compiler = _compiler()
        if self.sanitizer:
            _check_sanitizer(compiler, self.sanitizer)
        flags = (*_kernel_flags(compiler, self.sanitizer), f"-DHOST_WARP_SIZE={self.warp_size}")
        try:
            runtime = _load_runtime(compiler, self.sanitizer)
            library = _build(compiler, flags, source_text(variant, "host"))
        except _CompilerFailed as failure:
            raise CompileError(variant, self.arch, failure.args[0]) from None
        return HostKernel(self, variant, runtime, library)


def _parse_schedule(schedule: str) -> tuple[int, int]:
    """(order, seed)"""
    order, _, seed = schedule.partition(":")
    if (
        order not in _ORDERS
        or (order == "sticky") != seed.isdigit()
        or (seed and order != "sticky")
    ):
        raise ValueError(f"schedule must be fifo, lifo or sticky:<seed>; got {schedule!r}")
    return _ORDERS[order], int(seed or 0)


# --- which target ------------------------------------------------------------------------------

_override: ContextVar[HostTarget | None] = ContextVar("cupykern_host_target", default=None)


def current() -> HostTarget:
    """The host target with the settings of `use`, else of the environment.  Raises ValueError."""
    return _override.get() or _from_environment(
        os.environ.get("CUPYKERN_HOST_WARP_SIZE", "32"),
        os.environ.get("CUPYKERN_HOST_SCHEDULE", "fifo"),
        os.environ.get("CUPYKERN_HOST_SANITIZER") or None,
    )


@cache
def _from_environment(warp_size: str, schedule: str, sanitizer: str | None) -> HostTarget:
    if not warp_size.isdigit():
        raise ValueError(f"CUPYKERN_HOST_WARP_SIZE must be 32 or 64; got {warp_size!r}")
    return HostTarget(int(warp_size), schedule, sanitizer)


@contextmanager
def use(**settings: Any) -> Iterator[HostTarget]:
    """Within the block, and this thread or task, `current()` has these settings of HostTarget."""
    target = replace(current(), **settings)
    token = _override.set(target)
    try:
        yield target
    finally:
        _override.reset(token)


# --- kernels -----------------------------------------------------------------------------------


class HostKernel:
    """A loaded variant.  Calls return when the kernel has ended."""

    usage = None

    def __init__(
        self, target: HostTarget, variant: Variant, runtime: ctypes.CDLL, library: ctypes.CDLL
    ):
        order, seed = _parse_schedule(target.schedule)
        library.host_load(ctypes.c_void_p(runtime.host_runtime()))
        library.host_parameters.restype = ctypes.POINTER(ctypes.c_int)
        sizes = library.host_parameters()
        self._sizes = []
        while size := sizes[len(self._sizes)]:
            self._sizes.append(size)
        self._variant = variant
        self._library = library  # keeps it loaded
        self._runtime = runtime
        self._config = (
            ctypes.cast(library.host_entry, ctypes.c_void_p).value,
            variant.num_threads,
            variant.cluster_size,
            target.warp_size,
            order,
            seed,
        )
        self._addresses = ctypes.c_uint64 * (2 * len(self._sizes))

    def _config_of(self, grid: int) -> tuple[Any, ...]:
        """host_create's first arguments: the blocks of a cooperative launch are one cluster."""
        if not self._variant.cooperative:
            return self._config
        most = limits.max_cluster_size("host")
        if grid > most:
            raise ValueError(f"a cooperative launch has up to {most} blocks here; got {grid}")
        return (*self._config[:2], grid, *self._config[3:])

    def __call__(self, grid: int, args: tuple[Any, ...], shared_bytes: int = 0) -> None:
        """Run `grid` blocks with `shared_bytes` of dynamic shared memory; arguments as in Kernel.

        Ctrl-C ends the kernel where a thread next meets others or a block starts, so not in a loop
        without a barrier or shuffle.

        Raises TypeError for arguments that do not fit the kernel's parameters, ValueError for a grid
        that is not a multiple of the cluster, and HostKernelError.
        """
        if grid <= 0 or grid % self._variant.cluster_size:
            raise ValueError(
                f"grid must be a positive multiple of {self._variant.cluster_size}; got {grid}"
            )
        addresses = self._pack(args)
        runtime = self._runtime
        launch = runtime.host_create(*self._config_of(grid), shared_bytes, grid, addresses)
        message = ctypes.create_string_buffer(2048)
        try:
            while not runtime.host_run(launch, _POLL_MS):
                pass
        finally:
            runtime.host_finish(launch, message, len(message))
        if message.value:
            raise HostKernelError(f"{self._variant.kernel}: {message.value.decode()}")

    def blocks_at_once(self, shared_bytes: int) -> int:
        """A few clusters, so that blocks that stay for many rows have some."""
        return (4 if self._variant.cooperative else 2) * self._variant.cluster_size

    def _pack(self, args: tuple[Any, ...]) -> ctypes.Array:
        """The arguments' addresses, then the values of pointers and scalars."""
        n = len(self._sizes)
        if len(args) != n:
            raise TypeError(f"{self._variant.kernel} takes {n} arguments; got {len(args)}")
        packed = self._addresses()
        values = ctypes.addressof(packed) + 8 * n
        for i, (arg, size) in enumerate(zip(args, self._sizes, strict=True)):
            is_pointer = arg is None or isinstance(arg, np.ndarray)
            is_struct = isinstance(arg, np.ndarray) and arg.dtype.type is np.void and arg.size == 1
            if is_struct and arg.dtype.names is None:
                is_pointer = False
            if is_pointer != (size == -1) or not (is_pointer or arg.nbytes == size):
                raise TypeError(
                    f"{self._variant.kernel}: argument {i} must be "
                    + ("an array or None" if size == -1 else f"a scalar or struct of {size} bytes")
                    + f"; got {type(arg).__name__}"
                    + (f" of {arg.nbytes} bytes" if hasattr(arg, "nbytes") else "")
                )
            packed[i] = values + 8 * i
            if is_pointer:
                packed[n + i] = 0 if arg is None else arg.__array_interface__["data"][0]
            elif isinstance(arg, np.ndarray):
                packed[i] = arg.__array_interface__["data"][0]
            else:
                packed[n + i] = int.from_bytes(arg.tobytes(), sys.byteorder)
        return packed


# --- compilers ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its command, its kind ("gcc", "clang" or "zig") and its version's text."""

    command: tuple[str, ...]
    kind: str
    version: str


def find_compiler() -> Compiler | None:
    """$CXX, g++, clang++ or ziglang's, whichever comes first; None: there is none."""
    return _find_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@cache
def _find_compiler(cxx: str, path: str) -> Compiler | None:
    for command in (tuple(shlex.split(cxx)), ("g++",), ("clang++",)):
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


def _compiler() -> Compiler:
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
_OPTIMIZE_FLAGS = {"2": ("-O2",), "1": ("-O1", "-ftree-vectorize"), "0": ("-Og",)}
_SANITIZER_FLAGS = {
    "address": (
        *("-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize=vptr"),
        "-fno-sanitize-recover=undefined",
    ),
    "thread": ("-O0", "-g", "-fsanitize=thread"),
}


def _kernel_flags(compiler: Compiler, sanitizer: str | None) -> tuple[str, ...]:
    """Raises ValueError for a CUPYKERN_HOST_OPTIMIZE that is none."""
    if sanitizer:
        return _flags(compiler, sanitizer, _SANITIZER_FLAGS[sanitizer])
    level = os.environ.get("CUPYKERN_HOST_OPTIMIZE", "2")
    if level not in _OPTIMIZE_FLAGS:
        raise ValueError(f"CUPYKERN_HOST_OPTIMIZE must be 0, 1 or 2; got {level!r}")
    return _flags(compiler, None, _OPTIMIZE_FLAGS[level])


@cache
def _flags(compiler: Compiler, sanitizer: str | None, more: tuple[str, ...]) -> tuple[str, ...]:
    flags = [*_FLAGS, *more]
    if _has_x86_64_v3():
        flags.append("-mcpu=x86_64_v3" if compiler.kind == "zig" else "-march=x86-64-v3")
    elif compiler.kind == "zig":
        flags.append("-mcpu=baseline")  # not the compiling machine's own
    if compiler.kind == "zig":
        flags.append("-fno-sanitize=undefined")
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


class _CompilerFailed(Exception):
    """args[0]: what the compiler said."""


def _build(compiler: Compiler, flags: tuple[str, ...], source: str) -> ctypes.CDLL:
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
        raise _CompilerFailed(f"{path} cannot be loaded")
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
    """Compile into `path`, at once or not at all.  Raises _CompilerFailed and OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        source_path, library = Path(scratch, "kernel.cpp"), Path(scratch, "kernel.so")
        source_path.write_text(source)
        command = [*compiler.command, *flags, str(source_path), "-o", str(library), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise _CompilerFailed(done.stdout + done.stderr)
        with library.open("ab") as file:
            file.write(hashlib.sha256(library.read_bytes()).digest())
        os.replace(library, path)


@cache
def _private_dir() -> Path:
    """Where this process alone keeps what the cache cannot."""
    directory = tempfile.mkdtemp(prefix="cupykern-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


_runtime_lock = threading.Lock()
os.register_at_fork(after_in_child=_runtime_lock._at_fork_reinit)  # nobody there releases it
_runtimes: dict[tuple[Compiler, str | None], ctypes.CDLL] = {}


def _load_runtime(compiler: Compiler, sanitizer: str | None) -> ctypes.CDLL:
    """host_runtime.cpp, compiled and loaded; never itself instrumented."""
    with _runtime_lock:
        runtime = _runtimes.get((compiler, sanitizer))
        if runtime is None:
            defines = {"address": ("-DHOST_ASAN",), "thread": ("-DHOST_TSAN",)}.get(sanitizer, ())
            flags = (*_flags(compiler, None, _OPTIMIZE_FLAGS["2"]), *defines, "-pthread")
            runtime = _build(compiler, flags, file_text("platform/host_runtime.cpp"))
            c_int, c_void_p = ctypes.c_int, ctypes.c_void_p
            runtime.host_runtime.restype = c_void_p
            runtime.host_create.argtypes = (
                *(c_void_p, c_int, c_int, c_int, c_int),
                *(ctypes.c_uint64, c_int, c_int, c_void_p),
            )
            runtime.host_create.restype = c_void_p
            runtime.host_run.argtypes = (c_void_p, c_int)
            runtime.host_finish.argtypes = (c_void_p, ctypes.c_char_p, c_int)
            _runtimes[compiler, sanitizer] = runtime
        return runtime


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
        "LD_PRELOAD": _sanitizer_library(_compiler(), name),
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


def _check_sanitizer(compiler: Compiler, name: str) -> None:
    _sanitizer_library(compiler, name)
    symbol = {"address": "__asan_init", "thread": "__tsan_init"}.get(name)
    if symbol and not hasattr(ctypes.CDLL(None), symbol):
        raise UnavailableError(
            f"sanitizer {name!r} must be loaded before Python starts: set the environment that "
            f"cupykern.targets.host.sanitizer_environment({name!r}) gives"
        )
