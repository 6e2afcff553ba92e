"""Checks of `cupykern.parallel`, which tests/parallel runs on the ranks of MPI jobs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import agreement, attention, linear, llama, moe, norms, vocabulary

MODULES = (linear, norms, attention, vocabulary, moe, llama, agreement)


def _of(module: ModuleType) -> dict[str, Callable[[Any], None]]:
    """The functions of a module whose only parameter is `comm`."""
    own = inspect.getmembers(module, inspect.isfunction)
    return {
        f"{module.__name__.rpartition('.')[2]}: {name}": function
        for name, function in own
        if function.__module__ == module.__name__
        and list(inspect.signature(function).parameters) == ["comm"]
    }


CHECKS = {name: check for module in MODULES for name, check in _of(module).items()}
