"""Checks of `cupykern.parallel`, which tests/parallel runs on the ranks of MPI jobs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import agreement, attention, linear, llama, moe, norms, vocabulary, wrong_arguments

MODULES = (linear, norms, attention, vocabulary, moe, llama, agreement, wrong_arguments)


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

ON_GPUS = (
    "linear: k_is_summed_over_ranks",
    "linear: columns_are_those_of_matmul",
    "linear: a_gated_network_by_columns_and_rows_is_that_of_one_rank",
    "linear: scaled_columns_are_those_of_scaled_mm",
    "linear: rows_of_different_numbers_are_gathered",
    "linear: sums_are_rounded_once",
    "linear: split_communicators_are_apart",
    "norms: sums_are_normalised_unrounded",
    "attention: results_are_those_of_the_whole_sequence",
    "vocabulary: probabilities_are_those_of_all_columns",
    "vocabulary: draws_find_their_columns",
    "moe: results_are_those_of_all_experts",
)
"""Each way of sending once: kernels are compiled for every check."""
