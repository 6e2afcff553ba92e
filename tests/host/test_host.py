"""What only the host target shows: Ctrl-C, fork, its disk cache, its compilers."""

from __future__ import annotations

import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib import util
from pathlib import Path

import numpy as np
import pytest

from cupykern import cli, targets
from cupykern.kernels import ROOT, Variant, file_text, source_text
from cupykern.ops.softmax import OP
from cupykern.runtime import jit
from cupykern.targets import CompileError, UnavailableError, host, host_compiler
from cupykern.tools import doctor

ONE_CALL = "import numpy, cupykern; print(cupykern.softmax(numpy.zeros((2, 4), 'f4')).sum())"


def run_python(code: str, **environment: str) -> str:
    """What `code` prints, in a process of its own that ends well."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- a process and its signals -------------------------------------------------------------------

INTERRUPTED = """
import signal
import time
import numpy as np
import cupykern
from cupykern.targets import host
from cupykern.kernels import Variant

# Else it is ignored where the tests' parent ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
{long}
x = np.ones((4, 8), np.float32)
cupykern.softmax(x)  # compiled, and its workers started
print("running", flush=True)
try:
    run()
except KeyboardInterrupt:
    print(time.time())
    print((cupykern.softmax(x) == 0.125).all())
"""
ENDLESS = """
text = "KERNEL void word(volatile float* x) {{ while (x[0] == 0) {body} }}"
kernel = host.current().compile(Variant("word", (), (), {num_threads}, text=text))
run = lambda: kernel(4, (np.zeros(1, np.float32),))
"""
MANY_ROWS = """
rows = np.zeros((30_000, 4000), np.float16)
cupykern.softmax(rows[:1000])  # compiled
run = lambda: [cupykern.softmax(rows) for _ in range(1000)]
"""


@pytest.mark.parametrize(
    "long",
    [
        ENDLESS.format(body="sync_block();", num_threads=64),
        ENDLESS.format(body="sync_warp();", num_threads=64),
        ENDLESS.format(body="sync_block();", num_threads=1),  # it never waits for another
        MANY_ROWS,
    ],
    ids=["block", "warp", "one thread", "softmax"],
)
def test_ctrl_c_ends_a_kernel_within_a_second(long):
    """And the next call is right."""
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(long=long)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "running\n"
        time.sleep(0.3)
        sent = time.time()
        process.send_signal(signal.SIGINT)
        caught, right = process.communicate(timeout=30)[0].split()
    finally:
        process.kill()
    assert float(caught) - sent < 1 and right == "True"


def test_both_go_on_after_a_fork():
    """Also while another thread is inside a launch: its workers and locks are the parent's."""
    code = (
        "import os, threading, numpy as np, cupykern\n"
        "x = np.ones((4000, 8), np.float32)\n"
        "cupykern.softmax(x)\n"
        "forked = threading.Event()\n"
        "def work():\n"
        "    while not forked.is_set(): cupykern.softmax(x)\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "children = []\n"
        "for _ in range(4):\n"
        "    pid = os.fork()\n"
        "    right = (cupykern.softmax(x) == 0.125).all()\n"
        "    if pid == 0: os._exit(0 if right else 1)\n"
        "    children.append(pid)\n"
        "statuses = [os.waitpid(pid, 0)[1] for pid in children]\n"
        "forked.set()\n"
        "thread.join()\n"
        "print(right, statuses)\n"
    )
    assert run_python(code) == "True [0, 0, 0, 0]"


def test_a_fork_while_another_thread_compiles(tmp_path):
    """The child compiles too, and does not wait for a thread that it does not have."""
    code = (
        "import os, threading, numpy as np\n"
        "from cupykern.runtime import jit\n"
        "from cupykern.targets import host\n"
        "from cupykern.kernels import Variant\n"
        "def run(value):\n"
        "    text = f'KERNEL void word(float* x) {{ x[0] = {value}; }}'\n"
        "    kernel = jit.get_kernel(host.current(), Variant('word', (), (), 32, text=text))\n"
        "    x = np.zeros(1, np.float32)\n"
        "    kernel(1, (x,))\n"
        "    return x[0] == value\n"
        "compile, begun = host.HostTarget.compile, threading.Event()\n"
        "def note_and_compile(target, variant):\n"
        "    begun.set()\n"
        "    return compile(target, variant)\n"
        "host.HostTarget.compile = note_and_compile\n"
        "thread = threading.Thread(target=run, args=(1,))\n"
        "thread.start()\n"
        "begun.wait()\n"
        "pid = os.fork()\n"
        "right = run(2)\n"
        "if pid == 0: os._exit(0 if right else 1)\n"
        "thread.join()\n"
        "print(right, os.waitpid(pid, 0)[1])\n"
    )
    assert run_python(code, CUPYKERN_CACHE_DIR=str(tmp_path)) == "True 0"


# --- the disk cache ------------------------------------------------------------------------------


def test_processes_that_need_a_kernel_at_once_compile_it_once(tmp_path):
    found = host_compiler.the_compiler()
    cache, log, compiler = tmp_path / "cache", tmp_path / "log", tmp_path / found.kind
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || echo compiles >> "{log}"\n'
        f'exec {shlex.join(found.command)} "$@"\n'
    )
    compiler.chmod(0o700)
    environment = {**os.environ, "CUPYKERN_CACHE_DIR": str(cache), "CXX": str(compiler)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_CALL], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in processes] == ["2.0"] * 3
    left = [path.suffix for path in cache.rglob("*") if not path.is_dir()]
    assert left == [".so", ".so"]  # the runtime and the variant
    assert log.read_text().split() == ["compiles"] * 2


def test_a_failed_compile_leaves_nothing(tmp_path):
    """Those that wait for it compile in their turn."""
    compiler = host_compiler.the_compiler()
    wrong = compiler, ("-shared",), "this is no C++", ("word",)
    with pytest.raises(host_compiler.CompilerFailed), pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUPYKERN_CACHE_DIR", str(tmp_path))
        host_compiler.build(*wrong)
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_a_damaged_library_is_compiled_again(tmp_path):
    """It is not loaded: that could crash, or give wrong numbers."""
    assert run_python(ONE_CALL, CUPYKERN_CACHE_DIR=str(tmp_path)) == "2.0"
    whole = {path: path.read_bytes() for path in tmp_path.rglob("*.so")}
    kernel, _runtime = sorted(whole, key=lambda path: len(whole[path]))
    for paths, damage in (
        ((kernel,), lambda data: b""),
        (whole, lambda data: data[: len(data) // 2]),
        ((kernel,), lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]),
    ):
        damaged = {path: damage(whole[path]) for path in paths}
        for path, data in damaged.items():
            path.write_bytes(data)
        assert run_python(ONE_CALL, CUPYKERN_CACHE_DIR=str(tmp_path)) == "2.0"
        assert all(path.read_bytes() != data for path, data in damaged.items())


@pytest.mark.parametrize("place", ["a file", "not writable"])
def test_a_cache_that_cannot_be_written(place, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    if place == "a file":
        folder.write_text("")
    else:
        folder = Path("/proc/cupykern")  # not even root makes a folder there
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    printed = run_python(ONE_CALL, CUPYKERN_CACHE_DIR=str(folder), TMPDIR=str(scratch))
    assert printed == "2.0" and not list(scratch.iterdir())
    monkeypatch.setenv("CUPYKERN_CACHE_DIR", str(folder))
    (found,) = [x.found for x in doctor.find_all() if x.thing == "kernel cache"]
    assert "cannot be written" in found


# --- compilers -----------------------------------------------------------------------------------


def _variant() -> Variant:
    return OP.variants("host")[0]


def test_each_target_has_kernels_of_its_own():
    """Else what is tested at one size of a warp would run at another."""
    text = "KERNEL void warp_size(int* out) { out[threadIdx.x] = kWarpSize; }\n"
    variant = Variant("warp_size", (), (), 128, text=text)
    for warp_size in (32, 64, 32):
        with host.use(warp_size=warp_size) as target:
            out = np.zeros(128, np.int32)
            jit.get_kernel(target, variant)(1, (out,))
        assert (out == warp_size).all()


@pytest.mark.parametrize("grid", [-2, 0, 3])
def test_a_grid_is_of_whole_clusters(grid):
    text = "KERNEL void nothing(int* out) {}\n"
    kernel = host.current().compile(Variant("nothing", (), (), 128, cluster_size=2, text=text))
    kernel(2, (None,))
    with pytest.raises(ValueError, match=f"positive multiple of 2; got {grid}"):
        kernel(grid, (None,))


def test_a_compile_error_names_op_variant_target_and_line():
    """A constant that the kernel uses is left out of the variant's lines."""
    variant = _variant()
    (missing, _), *rest = variant.constants
    broken = replace(variant, constants=tuple(rest))
    with pytest.raises(CompileError) as raised:
        host.current().compile(broken)
    first, _, log = str(raised.value).partition("\n")
    assert first == f"{broken} does not compile for host:" and first.startswith("softmax")
    error = next(line for line in log.splitlines() if "error" in line)
    file, number = re.match(r"kernels_cu/(\S+\.cuh?):(\d+):", error).groups()
    assert missing in file_text(file) and missing in error
    assert missing in (ROOT / file).read_text().splitlines()[int(number) - 1]


def test_a_missing_compiler_is_named_with_its_remedy(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setitem(sys.modules, "ziglang", None)
    with pytest.raises(UnavailableError, match=r"pip install 'cupykern\[host\]'"):
        host.current().compile(_variant())
    assert "host" not in targets.available()
    missing = [x for x in doctor.find_all() if x.thing in ("C++ compiler", "clang for HIP")]
    assert len(missing) == 2
    for finding in missing:
        assert finding.found is None and "pip install 'cupykern[host]'" in finding.install
    assert cli.main(["doctor"]) == (0 if targets.available() else 1)
    assert "pip install 'cupykern[host]'" in capsys.readouterr().out


needs_zig = pytest.mark.skipif(util.find_spec("ziglang") is None, reason="ziglang is missing")


@needs_zig
def test_ziglang_compiles_without_another_compiler(tmp_path):
    """The first time takes some seconds more: zig then builds what it links with."""
    found = run_python(
        "from cupykern.targets import host_compiler; print(host_compiler.find_compiler().kind)\n"
        + ONE_CALL,
        PATH="",
        CXX="",
        CUPYKERN_CACHE_DIR=str(tmp_path),
    )
    assert found.split() == ["zig", "2.0"]


@needs_zig
def test_ziglang_by_name_is_no_clang(monkeypatch):
    """It takes other names of CPUs."""
    monkeypatch.setenv("CXX", f"{sys.executable} -m ziglang c++")
    compiler = host_compiler.find_compiler()
    assert compiler is not None and compiler.kind == "zig"
    assert not [x for x in host_compiler.kernel_flags(compiler, None) if x.startswith("-march")]


@needs_zig
def test_kernels_compile_for_aarch64(tmp_path, monkeypatch):
    """With the flags that the host target takes there.  Its fibers are assembly of their own."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    host_compiler.has_x86_64_v3.cache_clear()
    # Of a version that no other test has: flags are kept for each compiler.
    zig = host_compiler.Compiler((sys.executable, "-m", "ziglang", "c++"), "zig", "of aarch64")
    flags = host_compiler.kernel_flags(zig, None, "2")
    host_compiler.has_x86_64_v3.cache_clear()
    for name, text in {
        "runtime": file_text("platform/host/runtime.cpp"),
        "variant": source_text(_variant(), "host"),
    }.items():
        path = tmp_path / f"{name}.cpp"
        path.write_text(text)
        done = subprocess.run(
            [
                *(*zig.command, "-target", "aarch64-linux-gnu", "-DHOST_WARP_SIZE=32"),
                *(flag for flag in flags if flag != "-shared"),
                *("-c", str(path), "-o", f"{path}.o"),
            ],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        machine = Path(f"{path}.o").read_bytes()[18:20]
        assert int.from_bytes(machine, "little") == 183  # ELF's EM_AARCH64


def test_levels_of_optimization(monkeypatch):
    """All give kernels that work, from different binaries."""
    text = "KERNEL void twice(float* y) { y[threadIdx.x] *= 2.0f; }\n"
    variant = Variant("twice", (), (), 32, text=text)
    flags = []
    for level in ("0", "1", "2"):
        monkeypatch.setenv("CUPYKERN_HOST_OPTIMIZE", level)
        flags.append(host_compiler.kernel_flags(host_compiler.find_compiler(), None))
        y = np.arange(32, dtype=np.float32)
        targets.get("host").compile(variant)(1, (y,))
        assert (y == 2 * np.arange(32)).all()
    assert len(set(flags)) == 3
    monkeypatch.setenv("CUPYKERN_HOST_OPTIMIZE", "3")
    with pytest.raises(ValueError, match="CUPYKERN_HOST_OPTIMIZE must be 0, 1 or 2"):
        targets.get("host").compile(variant)
