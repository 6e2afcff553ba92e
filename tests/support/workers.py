"""Functions for processes of their own, which import them by name: tests themselves have none."""

from __future__ import annotations

from cupykern.kernels import Variant
from cupykern.targets import host


def compile_variant(variant: Variant) -> None:
    host.current().compile(variant)
