"""Tensor maps that are planned once and encoded for the addresses of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from . import tensor_map
from .base import Target, address_of


class MapPlan(NamedTuple):
    """A tensor map without its address (tensor_map.encode), swizzled over the box's row bytes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    def encode(self, target: Target, address: int) -> Any:
        return tensor_map.encode(
            target.name, address, self.dtype, self.shape, self.strides, self.box,
            self.box[-1] * self.dtype.itemsize,
        )  # fmt: skip


@cache
def _no_map(target: Target) -> Any:
    return target.by_value(np.zeros(128, np.uint8))


def encoded_maps(
    target: Target, plans: tuple[MapPlan | None, ...], arrays: Sequence[Any]
) -> tuple[Any, ...]:
    """Encode `plans` for the first of `arrays`, as launch arguments; None gives an empty map."""
    return tuple(
        [
            _no_map(target) if plan is None else plan.encode(target, address_of(x))
            for plan, x in zip(plans, arrays[: len(plans)], strict=True)
        ]
    )
