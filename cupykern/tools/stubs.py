"""The stubs of `cupykern` and `cupykern.parallel`: what type checkers know of public functions.

    python -m cupykern.tools.stubs

writes both `__init__.pyi`, which a test compares with the functions.  The package's own code knows
cupy and numpy arrays, `typing.Array`.  Users may pass others to functions of `cupykern`, whose
results are of the first array's class.  So a stub has an overload for numpy, with results of any
dtype, and one for other arrays, both again for each argument that asks for more results.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from .. import typing as own_types
from ..gemm import gemm

PATHS = {
    package: Path(str(import_module(package).__file__)).with_name("__init__.pyi")
    for package in ("cupykern", "cupykern.parallel")
}
_FOREIGN = {
    "Array": "AnyArray",
    "DTypeLike": "AnyDType",
    "Factor": "AnyFactor",
    "Operands": "AnyOperands",
    "ResultDTypes": "AnyResultDTypes",
}
_SWITCHES = ("quantize", "residual", "epilogue", "k_cache")
"""Arguments, beside flags return_..., that change the number of results."""
_ALIASES = {"AnyConfig": gemm}
_KEPT, _WIDTH = "\0", 99
_HEAD = "# Written by python -m cupykern.tools.stubs\n# fmt: off"
_STANDARD = {
    "collections.abc": ("Callable", "Mapping", "Sequence"),
    "typing": ("Any", "Literal", "overload"),
}


class _Kind(NamedTuple):
    """The first array's type, and that of results."""

    first: str
    result: str


class _Case(NamedTuple):
    """Annotations and defaults that differ from the function's, and the result's type."""

    changed: dict[str, tuple[str, object]]
    result: str


def stub(package: str) -> str:
    """The text of the package's `__init__.pyi`."""
    module = import_module(package)
    imports: set[tuple[str, str]] = set()
    functions: list[str] = []
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, FunctionType) and _first_array(inspect.signature(value)):
            lines = list(_overloads(name, value, package == "cupykern"))
            functions += [*lines, ""]
            imports |= _needed("\n".join(lines), inspect.unwrap(value), package)
        else:
            imports.add(_imported(module, name))
    others = [f"{name}: str" for name in ("__version__",) if hasattr(module, name)]
    names = textwrap.fill(", ".join(f'"{name}"' for name in module.__all__), 96)
    every = f"__all__ = [\n{textwrap.indent(names, '    ')},\n]"
    text = "\n".join(functions)
    standard = [
        (of, name)
        for of, names in _STANDARD.items()
        for name in names
        if re.search(rf"\b{name}\b", text)
    ]
    parts = _HEAD, *_grouped(set(standard)), "", "import numpy as np", "", *_grouped(imports)
    return "\n".join([*parts, "", *others, every, "", text])


def _first_array(signature: inspect.Signature) -> str | None:
    names = (p.name for p in signature.parameters.values() if _has(p.annotation, "Array"))
    return next(names, None)


def _has(annotation: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", annotation) is not None


def _overloads(name: str, function: Callable[..., Any], takes_foreign: bool) -> Iterator[str]:
    signature = inspect.signature(function)
    first = str(_first_array(signature))
    kinds = [_Kind("np.ndarray", "np.ndarray"), _Kind("GivenArray", "GivenArray")]
    if not takes_foreign:
        kinds[1] = _Kind("Array", "Array")
    if _has(signature.parameters[first].annotation, "NvFp4"):
        kinds.append(_Kind("NvFp4", "Any"))
    if not _has(signature.return_annotation, "(Array|Results)"):
        kinds = [_Kind("AnyArray", "")]
    cases = list(_cases(signature))
    found = [(kind, case) for kind in kinds for case in cases]
    if any(p.name.startswith("return_") for p in signature.parameters.values()) and len(cases) > 1:
        found.append((_Kind("AnyArray" if takes_foreign else "Array", "Any"), _Case({}, "Array")))
    for kind, case in found:
        if len(found) > 1:
            yield "@overload"
        yield _definition(name, signature, first, kind, case, takes_foreign)


def _cases(signature: inspect.Signature) -> Iterator[_Case]:
    """One result, and more results by each of the arguments that ask for them."""
    parameters, result = signature.parameters, signature.return_annotation
    names = [
        name
        for name, p in parameters.items()
        if name.startswith("return_") or (name in _SWITCHES and p.default is None)
    ]
    if "epilogue" in names:
        names = ["epilogue"]
    if result != "Results" or not names:
        yield _Case({}, result)
        return
    off: dict[str, tuple[str, object]] = {}
    on: dict[str, tuple[str, object]] = {}
    for name in names:
        kind = parameters[name].annotation
        is_flag = kind == "bool"
        off[name] = ("Literal[False]", False) if is_flag else ("None", None)
        on[name] = ("Literal[True]" if is_flag else kind.removesuffix(" | None"), inspect._empty)
    if "k_cache" in names:  # rotated keys are a result where there is no cache for them
        yield _Case(off, "tuple[Array, Array]")
        yield _Case({**on, "v_cache": on["k_cache"]}, "Array")
        return
    yield _Case(off, "Array")
    more = "tuple[Array, Array]" if names == ["return_lse"] else "tuple[Array, ...]"
    for name in names:
        yield _Case({name: on[name]}, "Any" if name == "epilogue" else more)


def _definition(
    name: str,
    signature: inspect.Signature,
    first: str,
    kind: _Kind,
    case: _Case,
    takes_foreign: bool,
) -> str:
    given, star = [], False
    for p in signature.parameters.values():
        annotation, default = case.changed.get(p.name, (p.annotation, p.default))
        if p.name == first:
            annotation = annotation.replace(" | NvFp4", "").replace("Array", kind.first)
        elif takes_foreign:
            annotation = re.sub(
                r"\b(" + "|".join(_FOREIGN) + r")\b", lambda m: _FOREIGN[m[0]], annotation
            )
        if p.kind is p.KEYWORD_ONLY and not star:
            given.append("*")
            star = True
        is_given = default is inspect.Parameter.empty
        given.append(f"{p.name}: {annotation}" + ("" if is_given else f" = {default!r}"))
    result = case.result.replace("Array", kind.result) if kind.result else case.result
    result = "Any" if kind.result == "Any" else result
    line = f"def {name}({', '.join(given)}) -> {result}: ...".replace("'", '"')
    if len(line) <= _WIDTH:
        return line
    kept = ", ".join(one.replace(" ", _KEPT) for one in given)  # no line ends inside an argument
    indent = " " * 4
    lines = textwrap.fill(kept, _WIDTH, initial_indent=indent, subsequent_indent=indent)
    lines = lines.replace(_KEPT, " ").replace("'", '"')
    return f"def {name}(\n{lines},\n) -> {result}: ..."


def _needed(text: str, function: Any, package: str) -> set[tuple[str, str]]:
    """(module, name) of the package's own types in `text`."""
    known = function.__globals__
    found = set()
    for name in set(re.findall(r"\b[A-Z]\w+", text)):
        module = getattr(known.get(name), "__module__", "")
        if hasattr(own_types, name) and name in own_types.__all__:
            module = own_types.__name__
        elif name in _ALIASES:
            module = _ALIASES[name].__name__
        if str(module).startswith("cupykern."):
            found.add((_relative(module, package), name))
    return found


def _imported(module: ModuleType, name: str) -> tuple[str, str]:
    """(module, name) of what the package imports under `name`."""
    value = inspect.unwrap(getattr(module, name))
    if hasattr(value, "__module__"):
        return _relative(value.__module__, module.__name__), name
    lines = inspect.getsource(module).splitlines()
    found = (re.fullmatch(rf"from (\S+) import {name}", line) for line in lines)
    return next(one[1] for one in found if one), name


def _grouped(imports: set[tuple[str, str]]) -> Iterator[str]:
    for module in sorted({module for module, _ in imports}):
        names = sorted(name for of, name in imports if of == module)
        line = f"from {module} import {', '.join(names)}"
        if len(line) > _WIDTH:
            lines = "".join(f"    {name},\n" for name in names)
            line = f"from {module} import (\n{lines})"
        yield line


def _relative(module: str, package: str) -> str:
    if module.startswith(f"{package}."):
        return module.removeprefix(package)
    return "." * len(package.split(".")) + module.removeprefix("cupykern.")


def main() -> None:
    for package, path in PATHS.items():
        path.write_text(stub(package))


if __name__ == "__main__":
    main()
