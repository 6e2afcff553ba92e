"""The layers of cupykern, and what its modules import."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

# From the bottom up.  A package stands for all of its modules.
LAYERS = (
    (
        *("kernels", "dtypes", "environment", "cache"),
        *("op", "param_structs", "tuned", "typing"),
    ),  # import no array and no device
    (
        *("targets", "arrays", "numerics", "precisions", "arguments", "inputs", "nvfp4"),
        *("interop", "expression", "reference", "error_statistics", "check"),
    ),
    ("runtime",),  # what calls share at run time
    ("rows", "gemm", "attention"),  # tasks, plans, configs, heuristics
    ("ops",),
    ("tuning",),
    ("watch", "public"),
    ("",),  # cupykern/__init__.py
    ("parallel", "tools", "peers", "cli", "__main__", "dask", "torch", "transformers"),
)


class Module(NamedTuple):
    tree: ast.Module
    is_package: bool


def read_modules(package: Path) -> dict[str, Module]:
    """Every module of a package by its full name."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found[name] = Module(ast.parse(path.read_text(encoding="utf-8")), is_package)
    return found


def imported(name: str, modules: Mapping[str, Module]) -> Iterator[str]:
    """The modules that `name` imports, also within its functions."""
    package = name if modules[name].is_package else name.rpartition(".")[0]
    for node in ast.walk(modules[name].tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in modules)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(base, package)
            for one in node.names:
                full = f"{base}.{one.name}"
                if full in modules or base in modules:
                    yield full if full in modules else base


def layer_of(name: str) -> int:
    """The layer of the module `name`, or that of its package."""
    within = name.partition(".")[2]
    (found,) = (i for i, layer in enumerate(LAYERS) if within.partition(".")[0] in layer)
    return found


def upward(modules: Mapping[str, Module]) -> list[str]:
    return [
        f"{name} imports {other}"
        for name in modules
        for other in imported(name, modules)
        if layer_of(other) > layer_of(name)
    ]


def circle(modules: Mapping[str, Module]) -> list[str]:
    """The modules of an import circle; empty if there is none."""
    graph = {name: {*imported(name, modules)} - {name} for name in modules}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []
