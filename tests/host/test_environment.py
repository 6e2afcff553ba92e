"""Environment variables: what each takes, and errors that name it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import cupykern
from cupykern import environment, targets
from cupykern.ops.softmax import OP
from cupykern.runtime import choice
from cupykern.targets import cuda, host, host_compiler


def _compile() -> None:
    host.current().compile(OP.variants("host")[0])


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("CUPYKERN_HOST_WARP_SIZE", "33", lambda: cupykern.softmax(np.ones(4, np.float32))),
        ("CUPYKERN_HOST_WARP_SIZE", "many", _compile),
        ("CUPYKERN_HOST_SCHEDULE", "random", lambda: cupykern.softmax(np.ones(4, np.float32))),
        ("CUPYKERN_HOST_SCHEDULE", "sticky:", _compile),
        ("CUPYKERN_HOST_SANITIZER", "all", lambda: cupykern.softmax(np.ones(4, np.float32))),
        ("CUPYKERN_HOST_OPTIMIZE", "3", _compile),
        ("CXX", "nonexistent", _compile),
        ("CXX", "nonexistent -O1", targets.available),
        ("CXX", "false", _compile),
        ("CXX", "g++ '-O1", _compile),
        ("CUPYKERN_CUDA_CHECKED", "maybe", cuda.checked_options),
        ("CUPYKERN_OVERLAP", "maybe", environment.overlaps),
        ("CUPYKERN_TUNE", "yes", choice.mode),
    ],
)
def test_a_wrong_value_is_named_with_its_variable(name, value, read, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{name} must be .*; got .*{re.escape(value)}"):
        read()


def test_an_empty_value_counts_as_unset(monkeypatch):
    names = ("WARP_SIZE", "SCHEDULE", "SANITIZER", "OPTIMIZE")
    for name in (*(f"CUPYKERN_HOST_{name}" for name in names), "CUPYKERN_CUDA_CHECKED", "CXX"):
        monkeypatch.setenv(name, "")
    environment.check()
    assert host.current() == host.HostTarget()
    assert environment.host_optimization() == "2" and not cuda.checked_options()
    assert host_compiler.own_compiler() is None


def test_cxx_is_the_compiler(monkeypatch):
    compiler = host_compiler.find_compiler()
    if compiler.kind == "zig":
        pytest.skip("CXX would be Python")
    command = (*compiler.command, "-pipe")
    monkeypatch.setenv("CXX", " ".join(command))
    assert host_compiler.find_compiler().command == command


def test_the_cache_directory(monkeypatch, tmp_path):
    for name, found in (
        ("HOME", tmp_path / ".cache" / "cupykern"),
        ("XDG_CACHE_HOME", tmp_path / "cupykern"),
        ("CUPYKERN_CACHE_DIR", tmp_path),
    ):
        for other in ("XDG_CACHE_HOME", "CUPYKERN_CACHE_DIR"):
            if name == "HOME":
                monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(name, str(tmp_path))
        assert environment.cache_dir() == found
    monkeypatch.setenv("CUPYKERN_CACHE_DIR", "below")
    assert environment.cache_dir() == Path.cwd() / "below"
