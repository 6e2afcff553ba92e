"""The site builds without a warning or the network, with every command and public name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cupykern
from cupykern.cli import cli

ROOT = Path(__file__).resolve().parents[2]


def test_site_builds_with_every_public_name_and_no_warning(tmp_path):
    """One test, since the build takes longest."""
    for name in ("sphinx", "furo", "myst_parser", "matplotlib"):
        pytest.importorskip(name)
    site = tmp_path / "html"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "trees"), str(ROOT / "docs"), str(site)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    _has_every_public_name(site)
    _has_every_command(site)
    _loads_nothing_from_the_network(site)
    _has_figures_that_follow_the_theme(site)
    _has_the_notebook_with_outputs(site)
    _has_the_operators_of_torch(site)


def _has_every_public_name(site: Path) -> None:
    text = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    missing = [name for name in cupykern.__all__ if f'id="cupykern.{name}"' not in text]
    assert missing == ["OPS"]


def _has_every_command(site: Path) -> None:
    text = (site / "reference/commands.html").read_text()
    assert not [name for name in cli.commands if f'id="command-{name}"' not in text]


_LOADS = re.compile(
    r"<(?:script|img|iframe)[^>]*\bsrc=\"(https?:)?//|<link[^>]*stylesheet[^>]*href=\"(https?:)?//"
)


def _loads_nothing_from_the_network(site: Path) -> None:
    assert not [path.name for path in site.rglob("*.html") if _LOADS.search(path.read_text())]


def _has_figures_that_follow_the_theme(site: Path) -> None:
    text = (site / "how.html").read_text()
    assert text.count('class="drawn"') == 3 and "var(--color-foreground-primary" in text
    assert (site / "benchmarks.html").read_text().count("<svg") > 10


def _has_the_notebook_with_outputs(site: Path) -> None:
    """Its cells ran, with their assertions: else the site is not built."""
    text = (site / "recipes/notebook.html").read_text()
    assert "over its bound 0." in text and "largest error" in text and "image/png" in text
    assert "'fifo': " in text and "Rows(num_threads=" in text  # schedules; the config tune kept


def _has_the_operators_of_torch(site: Path) -> None:
    text = (site / "reference/interop.html").read_text()
    assert text.count('id="cupykern.torch.') >= 15 and 'id="cupykern.torch.softmax"' in text
