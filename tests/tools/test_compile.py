"""The compile gates: every variant of every op for every architecture, and that they can fail."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cupykern import OPS
from cupykern.kernels import Variant, source_text
from cupykern.targets import CompileError, offline
from cupykern.tools import gate, gate_record, machine_code, options

ARCHS = options.ARCHS
ROOT = Path(__file__).parents[2]
HIPRTC_NAMES = ROOT / "tests" / "support" / "hiprtc.h"


@pytest.mark.compile
def test_variants_compile_without_local_memory():
    """One for each architecture; `cupykern compile` compiles them all."""
    some = [gate.tasks(OPS, (arch,))[9 * i] for i, arch in enumerate(ARCHS)]
    rows = list(gate.compile_all(some, os.cpu_count() or 1))
    failures = [f"{row.arch} {row.variant}: {gate.failure(row)}" for row in rows]
    assert not [text for text, row in zip(failures, rows, strict=True) if gate.failure(row)]
    assert {row.arch for row in rows if row.skipped is None} == set(ARCHS)


def test_what_is_on_record_is_not_compiled(tmp_path, monkeypatch):
    path, compiled = tmp_path / "record.txt", []

    def compile_all(todo, jobs):
        for variant, arch in todo:
            compiled.append((variant, arch))
            yield gate.Row(variant, arch, 0.1, registers, None, 0, 0)

    monkeypatch.setattr(gate, "compile_all", compile_all)
    first, second, third = ((planted(f"x[0] = {i};"), "sm_80") for i in range(3))

    def run(todo, again=0.0, within=60.0):
        compiled.clear()
        rows = gate_record.compile_new(todo, todo, path, 1, again, within)
        return [gate.failure(row) for row in rows]

    registers = 40
    assert run([first, second]) == [None, None] and compiled == [first, second]
    assert run([first, second]) == [] == compiled
    assert run([first, second, third]) == [None] and compiled == [third]
    # Other lines and comments are the same code; another architecture, constant or use is not.
    text = "// why\n\n" + first[0].text.replace("{\n", "{\n    // what\n")
    assert run([(replace(first[0], text=text), "sm_80"), second, third]) == []
    for other in (
        (first[0], "sm_86"),
        (replace(first[0], constants=(("kOther", 1),)), "sm_80"),
        (replace(first[0], tuned=False), "sm_80"),
    ):
        assert run([other, second]) == [None] and compiled == [other]
    # Of what is gone nothing stays, but for architectures that were not asked for.
    lines = path.read_text().splitlines()[1:]
    assert {line.split()[0] for line in lines if line[0] == "s"} == {"sm_80", "sm_86"}
    assert run([third]) == [None]
    assert run([third], again=60.0) == [None] and compiled == [third]
    registers = 48
    assert run([third], again=60.0) == ["48 registers, 40 on record"]
    assert run([third]) == [None]  # what failed is not on record
    amd = first[0], "gfx942"
    assert run([amd, first, second], within=0.0) == [None] and compiled == [first]
    assert gate_record.missing([amd, first, second], path) == 2


@pytest.mark.parametrize("arch", ["sm_90a", "gfx942"])
def test_the_machine_code_of_a_rename_is_the_same(arch, tmp_path):
    rows = [
        gate.compile_row(planted(body, before), arch)
        for before, body in (
            ("DEVICE float twice(float y) { return y + y; }\n", "x[0] = twice(x[1]);"),
            ("namespace a { DEVICE float b(float z) { return z + z; } }\n\n", "x[0] = a::b(x[1]);"),
            ("", "x[0] = 3.0f * x[1];"),
            ("", "x[0] = 5.0f * x[1];"),
        )
    ]
    codes = [row.code for row in rows]
    assert codes[0] == codes[1] and len(set(codes)) == 3 and all(codes)
    path = tmp_path / "codes.txt"
    machine_code.write(path, rows[:3])
    compared = machine_code.compare(path, rows)
    assert [gate.failure(row) is None for row in compared] == [True, True, True, False]


@pytest.mark.parametrize(
    ("send", "sent", "code"),
    [(os.killpg, signal.SIGINT, 130), (os.kill, signal.SIGTERM, -signal.SIGTERM)],
    ids=["a terminal's Ctrl-C", "terminated"],
)
def test_an_end_that_is_asked_for_ends_the_compilers(send, sent, code, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, subprocess, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from cupykern.tools import gate\n"
        "def compile_offline(*task):\n"
        "    compiler = subprocess.Popen(['sleep', '600'])\n"
        "    with open('pids', 'a') as file:\n"
        "        file.write(f'{os.getpid()}\\n{compiler.pid}\\n')\n"
        "    compiler.wait()\n"
        "gate.compile_offline = compile_offline\n"
    )
    program = (
        "import signal, sys; from cupykern.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored where our parent "
        "does\n"
        "sys.exit(main(['compile', 'softmax', '--arch', 'sm_90a', '--jobs', '2']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = tmp_path / "pids"
    while not pids.exists() or len(pids.read_text().split()) < 4:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    send(process.pid, sent)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in err and "Error" not in err
    assert ("interrupted" in err) == (code == 130)
    end = time.monotonic() + 60
    while alive := [pid for pid in pids.read_text().split() if running(pid)]:
        assert time.monotonic() < end, alive
        time.sleep(0.01)


def running(pid: str) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_there_are_few_variants():
    """CI compiles those that are not on record, and some of the others again."""
    # Where configs are measured: clusters, and Hopper's main loops beside the portable one.  The
    # host target, which compiles what is called, has the portable configs of small arrays as well.
    most = {"sm_90a": (250, 893), "host": (280, 975)}
    for arch in (*ARCHS, "host"):
        of_an_op, in_all = most.get(arch, (105, 340))
        variants = {op.name: op.variants(arch) for op in OPS}
        for name, of_op in variants.items():
            assert len(of_op) <= of_an_op, (name, arch)
        assert len({variant for of_op in variants.values() for variant in of_op}) <= in_all, arch


def planted(body: str, before: str = "") -> Variant:
    text = before + "KERNEL void planted(float* x) {\n" + body + "\n}\n"
    return Variant("planted", (), (), 128, text=text)


@pytest.mark.parametrize("arch", ["sm_90a", "gfx942"])
def test_an_error_names_file_and_line(arch):
    row = gate.compile_row(planted("x[0] = no_such_name;"), arch)
    assert "planted.cu" in gate.failure(row) and "no_such_name" in gate.failure(row)
    assert any(mark in gate.failure(row) for mark in ("planted.cu(2)", "planted.cu:2"))


@pytest.mark.parametrize(("hip_version", "arch"), [(6, "gfx1201"), (7, "gfx942")])
def test_hiprtcs_own_names_are_no_trouble(hip_version, arch, tmp_path):
    """hiprtc puts a header of its own before the source, whose names must not collide with ours."""
    names = f"#define HIP_VERSION_MAJOR {hip_version}\n" + HIPRTC_NAMES.read_text()
    by_kernel = {variant.kernel: variant for op in OPS for variant in op.variants(arch)}
    flags = [flag for flag in offline.CLANG_FLAGS if flag != "-S"]
    for kernel, variant in by_kernel.items():
        source = tmp_path / f"{kernel}.hip"
        source.write_text(names + source_text(variant, "hip"))
        command = [*offline.find_clang(), *flags, f"--offload-arch={arch}", "-fsyntax-only"]
        done = subprocess.run([*command, str(source)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_an_undefined_symbol_fails():
    declared = 'extern "C" __attribute__((device)) float erff(float);\n'
    with pytest.raises(CompileError, match="undefined symbols: erff"):
        offline.compile_offline(planted("x[0] = erff(x[0]);", declared), "gfx942")


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_too_much_lds_fails(arch):
    body = "SHARED(float, big, [20000]); big[threadIdx.x] = x[0]; sync_block(); x[1] = big[0];"
    assert "80000" in gate.failure(gate.compile_row(planted(body), arch))


def test_a_spill_in_a_tuned_variant_fails():
    body = (
        "float v[300];\n#pragma unroll\nfor (int i = 0; i < 300; ++i) v[i] = x[i];\n"
        "#pragma unroll\nfor (int r = 0; r < 2; ++r) {\n#pragma unroll\n"
        "for (int i = 0; i < 300; ++i) v[i] = v[i] * v[(i * 7 + 1) % 300] + 1.0f;\nsync_block(); "
        "}\n"
        "#pragma unroll\nfor (int i = 0; i < 300; ++i) x[i] = v[i];"
    )
    variant = planted(body)
    assert "local memory" in gate.failure(gate.compile_row(variant, "sm_90a"))
    assert gate.failure(gate.compile_row(replace(variant, tuned=False), "sm_90a")) is None


@pytest.mark.parametrize("arch", ["sm_90a", *(arch for arch in ARCHS if arch.startswith("gfx"))])
def test_an_array_indexed_at_run_time_in_a_tuned_variant_fails(arch):
    """It is in local memory without a spill."""
    body = (
        "float v[64];\n#pragma unroll\nfor (int i = 0; i < 64; ++i) v[i] = x[i];\n"
        "for (int i = 0; i < 1000; ++i) v[(i * 7 + threadIdx.x) % 64] += x[i];\n"
        "#pragma unroll\nfor (int i = 0; i < 64; ++i) x[i] = v[i];"
    )
    row = gate.compile_row(planted(body), arch)
    assert row.local_bytes >= 64 * 4
    assert f"{row.local_bytes} bytes of local memory" in gate.failure(row)


def test_an_asynchronous_copy_that_has_no_encoding_fails(monkeypatch):
    """An illegal instruction on the GPU, which NVRTC 13.0 has made of copies with a policy."""
    op = next(op for op in OPS if op.name == "rms_norm")
    problem = op.bench_problem((2048, 262144), "float16")
    variant = op.variant(problem, op.configs(problem, "sm_90a")[0])
    count, cubins = offline.broken_copies, []
    monkeypatch.setattr(offline, "broken_copies", lambda cubin: cubins.append(cubin) or 1)
    assert "1 asynchronous copies" in gate.failure(gate.compile_row(variant, "sm_90a"))
    (cubin,) = cubins
    assert count(cubin) == 0

    words = np.frombuffer(cubin, "<u8", len(cubin) // 8).copy()
    (copies,) = np.nonzero((words & 0xFFF == 0xFAE) & (np.arange(len(words)) % 2 == 0))
    first = copies[0]
    words[first] ^= np.uint64(0xFAE ^ 0xDAE)  # with a uniform register in the address
    words[first + 1] &= ~np.uint64(0x3F)  # 0 for its number, as in the code that was made
    assert count(words.tobytes() + cubin[8 * len(words) :]) == 1


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_an_access_before_the_wait_fails(arch):
    right = "wait_for_previous_grid(); x[0] += 1;"
    assert gate.failure(gate.compile_row(planted(right), arch)) is None
    row = gate.compile_row(planted(f"const float early = x[1]; {right} x[2] = early;"), arch)
    assert "1 accesses to global memory before the wait" in gate.failure(row)


def test_before_sm_90_nothing_waits():
    rows = [
        gate.compile_row(planted(f"{wait} x[0] += 1;"), "sm_89")
        for wait in ("", "wait_for_previous_grid();")
    ]
    assert rows[0].code == rows[1].code


def test_an_unknown_architecture_is_skipped():
    row = gate.compile_row(planted("x[0] = 1;"), "sm_999")
    assert "does not know sm_999" in row.skipped and gate.failure(row) is None


@pytest.mark.parametrize("name", ["_REGISTERS", "_STACK_FRAME"])
def test_a_log_that_says_nothing_is_no_pass(name, monkeypatch):
    monkeypatch.setattr(offline, name, re.compile("what a later compiler may say"))
    row = gate.compile_row(planted("x[0] = 1;"), "sm_90a")
    assert "no registers or no stack frame" in gate.failure(row)


def test_rows_name_their_compiler():
    for arch, name in (("sm_90a", r"NVRTC \d+\.\d+"), ("gfx942", "clang")):
        assert re.search(name, gate.compile_row(planted("x[0] = 1;"), arch).compiler)
