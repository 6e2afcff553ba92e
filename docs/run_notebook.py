"""The outputs of a notebook's code cells, as JSON: `python docs/run_notebook.py NOTEBOOK`.

A list for each cell: what it printed, the value of its last line if that is an expression, and its
figures as PNG in base64.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def outputs(source: str, namespace: dict[str, Any]) -> list[dict[str, str]]:
    """Of one cell, which it runs in `namespace`."""
    printed, value = io.StringIO(), None
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
    text = printed.getvalue() + (f"{value!r}\n" if value is not None else "")
    return [*([{"text": text}] if text else []), *figures()]


def figures() -> list[dict[str, str]]:
    """Those that the cell made, which are closed."""
    if "matplotlib" not in sys.modules:
        return []
    from matplotlib import pyplot

    found = []
    for number in pyplot.get_fignums():
        image = io.BytesIO()
        pyplot.figure(number).savefig(image, format="png", dpi=130)
        found.append({"png": base64.b64encode(image.getvalue()).decode()})
    pyplot.close("all")
    return found


def main(path: str) -> None:
    cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    namespace: dict[str, Any] = {"__name__": "notebook"}
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    print(json.dumps([outputs(source, namespace) for source in sources]))


if __name__ == "__main__":
    main(sys.argv[1])
