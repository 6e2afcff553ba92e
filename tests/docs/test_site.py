"""The site builds without a warning and without the network; every command and public name is on it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cupykern
from cupykern.cli import cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    for name in ("sphinx", "furo", "myst_parser", "matplotlib"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", str(folder / "trees"), str(ROOT / "docs"), str(folder / "html")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_every_public_name(site):
    text = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    missing = [name for name in cupykern.__all__ if f'id="cupykern.{name}"' not in text]
    assert missing == ["OPS"]


def test_every_command(site):
    text = (site / "reference/commands.html").read_text()
    assert not [name for name in cli.commands if f'id="command-{name}"' not in text]


def test_it_loads_nothing_from_the_network(site):
    loads = re.compile(
        r"<(?:script|img|iframe)[^>]*\bsrc=\"(https?:)?//|<link[^>]*stylesheet[^>]*href=\"(https?:)?//"
    )
    found = [path.name for path in site.rglob("*.html") if loads.search(path.read_text())]
    assert not found


def test_figures_follow_the_theme(site):
    text = (site / "how.html").read_text()
    assert text.count('class="drawn"') == 3 and "var(--color-foreground-primary" in text
    assert (site / "benchmarks.html").read_text().count("<svg") > 10
