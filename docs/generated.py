"""Sphinx extension: what is written from the package itself.

```{command-help}
```     a section for each command of `cupykern`, with its --help
```{torch-operators}
```     the functions of cupykern.torch, of which it imports nothing: torch need not be there
```{other-functions}
```     the functions of cupykern, in a section each, that no page of reference/ has
```{result-figures}
```     the figures of results/*.json that `cupykern report` draws
<!-- table of the site: softmax -->
        a table of `cupykern report` that is not committed
<!-- notebook -->
        docs/notebook.ipynb and its outputs, which are not stored: the build runs it
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

DOCS = Path(__file__).resolve().parent
RESULTS, NOTEBOOK = DOCS.parent / "results", DOCS / "notebook.ipynb"


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("command-help", CommandHelp)
    app.add_directive("other-functions", OtherFunctions)
    app.add_directive("result-figures", ResultFigures)
    app.add_directive("torch-operators", TorchOperators)
    app.connect("source-read", _fill_tables)
    app.connect("source-read", _fill_notebook)
    return {"parallel_read_safe": True}


def _fill_tables(app: Any, page: str, source: list[str]) -> None:
    from cupykern.tools import report

    if page == "results":
        source[0] = report.on_site(source[0], RESULTS)


def _fill_notebook(app: Any, page: str, source: list[str]) -> None:
    if page != "recipes/notebook":
        return
    app.env.note_dependency(str(NOTEBOOK))
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    found = iter(_run_notebook())
    parts = []
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
        else:
            parts += [f"```python\n{text}\n```", *map(_output, next(found))]
    source[0] = source[0].replace("<!-- notebook -->", "\n\n".join(parts))


def _run_notebook() -> list[list[dict[str, str]]]:
    """Its outputs by code cell, from a process and with a store of its own."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(DOCS.parent)}
        environment |= {"XDG_CACHE_HOME": cache, "CUPYKERN_CACHE_DIR": f"{cache}/cupykern"}
        environment.pop("CUPYKERN_TUNE", None)
        command = [sys.executable, str(DOCS / "run_notebook.py"), str(NOTEBOOK)]
        done = subprocess.run(
            command, cwd=cache, env=environment, stdout=subprocess.PIPE, check=True, text=True
        )
    return json.loads(done.stdout.replace(f"{cache}/", ""))


def _output(output: dict[str, str]) -> str:
    if "text" in output:
        return f"```text\n{output['text'].rstrip()}\n```"
    address = f"data:image/png;base64,{output['png']}"
    image = f'<img class="output" alt="The figure of the cell above" src="{address}">'
    return f"```{{raw}} html\n{image}\n```"


def _section(name: str, title: nodes.Node, *content: nodes.Node) -> nodes.section:
    return nodes.section("", nodes.title("", "", title), *content, ids=[name], names=[name])


class CommandHelp(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        from cupykern.cli import cli

        sections = []
        for name, command in sorted(cli.commands.items()):
            context = click.Context(command, info_name=f"cupykern {name}", max_content_width=84)
            context.terminal_width = 84
            text = command.get_help(context)
            block = nodes.literal_block(text, text, language="text")
            sections.append(_section(f"command-{name}", nodes.literal("", name), block))
        return sections


class TorchOperators(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        import cupykern

        tree = ast.parse((DOCS.parent / "cupykern" / "torch.py").read_text(encoding="utf-8"))
        lines = []
        for name in registered(tree):
            signature = inspect.signature(getattr(cupykern, name))
            left = [p for p in signature.parameters.values() if p.name not in ("out", "config")]
            plain = [p.replace(annotation=p.empty) for p in left]
            signature = inspect.Signature(plain)
            lines.append(f".. py:function:: cupykern.torch.{name}{signature}")
        text = "\n".join(lines)
        return self.parse_text_to_nodes(f"```{{eval-rst}}\n{text}\n```")


class OtherFunctions(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        sections = []
        for name in undocumented():
            text = f"```{{eval-rst}}\n.. autofunction:: cupykern.{name}\n```"
            content = self.parse_text_to_nodes(text)
            sections.append(_section(name, nodes.Text(name), *content))
        return sections


def undocumented() -> list[str]:
    """The public functions that no page of reference/ names: new ones."""
    import cupykern

    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    named = set(re.findall(r":: cupykern\.(\w+)$", pages, re.MULTILINE))
    functions = (x for x in cupykern.__all__ if inspect.isfunction(getattr(cupykern, x)))
    return [x for x in functions if x not in named]


def registered(tree: ast.Module) -> list[str]:
    """The names of cupykern/torch.py's operators, in its order."""
    return [
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "_register"
        for target in node.targets
        if isinstance(target, ast.Name)
    ]


class ResultFigures(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        from cupykern.tools import page

        return [
            _section(name, nodes.Text(title), nodes.raw("", body, format="html"))
            for name, title, body in page.sections(RESULTS, with_tables=False)
        ]
