"""Every kernel and header compiles on its own: the order of includes decides nothing."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter

import editor
import pytest

from cupykern.kernels import ROOT

RUNTIME = ROOT / "platform" / "host"
HEADERS = [path for path in ROOT.rglob("*") if path.suffix in (".cuh", ".h")]


def test_every_kernel_and_header_compiles_alone(tmp_path):
    for path, files in editor.write(tmp_path).items():
        assert not (said := editor.errors("-include", str(path), *files)), said


@pytest.mark.parametrize("path", sorted(RUNTIME.glob("*.h")), ids=lambda path: path.name)
def test_every_header_of_the_host_runtime_compiles_alone(path):
    assert not editor.errors(str(path))


def test_every_file_is_checked():
    """Headers of the platform are parts of cuda.cuh, hip.cuh or host.cuh, or the host runtime's."""
    files = {path.relative_to(ROOT).as_posix() for path in (*HEADERS, *ROOT.glob("*.cu"))}
    assert {file for file in files if not file.startswith("platform/")} == set(editor.preceding())


def test_headers_of_the_host_runtime_include_no_circle():
    """Nor does one call what is defined above it: each compiles before those that include it."""
    includes = {
        path.name: re.findall(r'#include "platform/host/(.*)"', path.read_text())
        for path in RUNTIME.glob("*.h")
    }
    assert list(TopologicalSorter(includes).static_order())[-1] == "pool.h"


@pytest.mark.parametrize(
    "file", ["gemm/epilogue/linear_combination.cuh", "rows/softmax.cuh", "gemm/load_pair.cuh"]
)
def test_missing_includes_are_seen(file):
    text = (ROOT / file).read_text()
    alone = re.sub(r'#include ".*"\n', "", text)
    assert not editor.errors("-", text=editor.first_lines(file) + text)
    assert editor.errors("-", text=editor.first_lines(file) + alone)


def test_headers_are_included_once():
    """After the comment that describes the header."""
    for path in HEADERS:
        code = [line for line in path.read_text().splitlines() if not line.startswith("//")]
        assert code[0] == "#pragma once", path
