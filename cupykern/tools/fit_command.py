"""`cupykern fit`: fit the models' constants to sweeps, and report the errors on other shapes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from .. import tuned
from ..gemm.sm90_heuristic import ARCH
from . import fit, fit_skinny
from .options import Failure
from .tables import number, print_table
from .trace import read


def run(
    paths: tuple[Path, ...], seed: int, written: Path | None, only: tuple[str, ...] = ()
) -> int:
    """only: as of fit.fit; then skinny GEMM's constants stay."""
    trials, devices = [], []
    for path in paths:
        try:
            header, found = read(path)
        except ValueError as error:
            raise Failure(str(error)) from None
        if header["target"] == "host":
            raise Failure(f"{path} is host emulation: its times say nothing about a GPU")
        devices.append(str(header["machine"]["device"]))
        trials += found
    document, problems = tuned.load(ARCH), []
    models: list[tuple[Any, Any, Any]] = [
        (fit, partial(fit.fit, only=only), fit.present_times()),
    ]
    if not only:
        models.append((fit_skinny, fit_skinny.fit, fit_skinny.present_constants()))
    for model, fit_of, old in models:
        samples = model.samples(trials)
        try:
            fitted = fit_of(samples, seed)
        except ValueError as error:
            problems.append(str(error))
            continue
        _print(fitted, old)
        measured = f"cupykern fit: {len(samples)} times on {', '.join(dict.fromkeys(devices))}"
        document = model.updated(document, fitted.times, measured)
    if len(problems) == len(models):
        raise Failure(problems[0])
    if written is not None:
        written.write_text(fit.text(document) + "\n", encoding="utf-8")
    return 0


def _print(fitted: fit.Fit, old: dict[str, float]) -> None:
    print_table(
        ("constant", "samples", "in the file", "fitted"),
        (
            (name, count, number(old[name]), number(fitted.times[name]))
            for name, count in fitted.counts.items()
            if count
        ),
    )
    for what, quality in (("file", fitted.before), ("fitted", fitted.after)):
        click.echo(
            f"{what}: on {quality.num_shapes} shapes that were not fitted the error is "
            f"{quality.median_error:.1%} (median), {quality.max_error:.1%} (largest); the choice "
            f"takes {quality.mean_loss:.1%} (mean), {quality.max_loss:.1%} (largest) longer than "
            "the best config"
        )
