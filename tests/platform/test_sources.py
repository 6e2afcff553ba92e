"""Every kernel and header compiles on its own: the order of includes decides nothing."""

from __future__ import annotations

import re

import editor
import pytest

from cupykern.kernels import ROOT

HEADERS = [path for path in ROOT.rglob("*") if path.suffix in (".cuh", ".h")]


def test_every_kernel_and_header_compiles_alone(tmp_path):
    for path, files in editor.write(tmp_path).items():
        assert not (said := editor.errors("-include", str(path), *files)), said


def test_every_file_is_checked():
    """Headers of the platform are parts of cuda.cuh, hip.cuh, host.cuh or host_runtime.cpp."""
    files = {path.relative_to(ROOT).as_posix() for path in (*HEADERS, *ROOT.glob("*.cu"))}
    assert {file for file in files if not file.startswith("platform/")} == set(editor.preceding())


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
