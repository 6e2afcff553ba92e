"""Fit the constants of the skinny GEMM model (cupykern/tuned/<arch>.json) to sweeps.

The model (gemm/skinny_heuristic.py: estimate) is not linear in its constants.  So the fit minimises
squared relative errors by Levenberg and Marquardt's method, in the constants' logarithms: all are
positive.  A weak pull to the old values keeps a constant that no sweep determines.  Held-out shapes
judge the fit.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import tuned
from ..gemm import skinny_heuristic
from ..gemm.gemm_task import GemmTask
from ..gemm.skinny_gemm import SkinnyGemmConfig
from ..targets.limits import device
from ..tuning.trials import Trial
from .fit import Fit, held_out, product_times, quality_of

ARCH, SECTION = "sm_90a", "skinny"
OTHER = "other_launch"  # of other mainloops: not fitted
_CONFIG = re.compile(r"SkinnyGemmConfig\((.*)\)")
_WEAK = 1e-3  # weight of an old value; a measurement has 1
_STEPS = 30
_NUDGE = 1e-4  # of a logarithm, for its derivative


@dataclass(frozen=True)
class Sample:
    """The median time of a product with a config."""

    task: GemmTask
    config: SkinnyGemmConfig
    us: float

    def predict(self, constants: Mapping[str, float], sms: int) -> float:
        return skinny_heuristic.estimate(self.config, self.task, sms, constants)


def samples(trials: Iterable[Trial]) -> list[Sample]:
    """Return samples of the verified trials that the model covers."""
    found, on = [], device(ARCH)
    for task, config, us in product_times(trials):
        fields = _CONFIG.fullmatch(config)
        if fields and skinny_heuristic.is_modelled(task, on):
            found.append(Sample(task.a_decoded, _config_of(fields[1]), us))
    return found


def _config_of(text: str) -> SkinnyGemmConfig:
    """The config of a repr's "tile_n=16, tile_k=128, ..."."""
    words = (word.split("=") for word in text.split(", "))
    return SkinnyGemmConfig(**{name: ast.literal_eval(value) for name, value in words})


def present_constants() -> dict[str, float]:
    """Return the file's constants, by name."""
    found = tuned.constants(ARCH, SECTION)
    return {name: value for name, value in found.items() if name != OTHER}


def fit(found: Sequence[Sample], seed: int = 0) -> Fit:
    """Fit to all shapes except a random quarter, which judges.

    Raises ValueError if fewer than 4 shapes are left to fit or to judge.
    """
    sms, old = device(ARCH).multiprocessors, present_constants()
    names = list(old)
    seen, unseen = held_out(found, seed)
    measured = np.log([sample.us for sample in seen])
    start = np.log([old[name] for name in names])

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        constants = dict(zip(names, np.exp(logarithms), strict=True))
        predicted = np.log([sample.predict(constants, sms) for sample in seen])
        return np.concatenate([predicted - measured, _WEAK * (logarithms - start)])

    now, errors, damping, counts = start, residuals(start), 1e-3, np.zeros(len(names), int)
    for step in range(_STEPS):
        moved = [residuals(now + _NUDGE * unit) for unit in np.eye(len(names))]
        slopes = np.stack([(x - errors) / _NUDGE for x in moved], axis=1)
        if step == 0:  # of samples alone: the rows of the pull depend on every constant
            counts = (np.abs(slopes[: len(seen)]) > 1e-6).sum(0)
        normal = slopes.T @ slopes
        change = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slopes.T @ errors)
        better = residuals(now + change)
        if better @ better < errors @ errors:
            gain = errors @ errors - better @ better
            now, errors, damping = now + change, better, damping / 3
            if gain < 1e-9 * (errors @ errors):
                break
        else:
            damping *= 10
            if damping > 1e9:
                break
    fitted = dict(zip(names, map(float, np.exp(now)), strict=True))
    times = {name: fitted[name] if n else old[name] for name, n in zip(names, counts, strict=True)}
    before, after = (
        quality_of((s.task, s.predict(constants, sms), s.us) for s in unseen)
        for constants in (old, times)
    )
    return Fit(times, dict(zip(names, map(int, counts), strict=True)), before, after)


def updated(document: dict[str, Any], times: Mapping[str, float], measured: str) -> dict[str, Any]:
    """Return `document`, a tuned file, with these constants rounded to three digits.

    measured: the note for changed constants.
    """
    document = json.loads(json.dumps(document))
    old = present_constants()
    for name, value in times.items():
        if value != old[name]:
            document[SECTION][name] |= {"value": float(f"{value:.3g}"), "measured": measured}
    return document
