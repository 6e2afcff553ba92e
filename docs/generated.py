"""Sphinx extension: what is written from the package itself.

```{command-help}
```     a section for each command of `cupykern`, with its --help
```{result-figures}
```     the figures of results/*.json that `cupykern report` draws
<!-- table of the site: softmax -->
        a table of `cupykern report` that is not committed
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

RESULTS = Path(__file__).resolve().parent.parent / "results"


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("command-help", CommandHelp)
    app.add_directive("result-figures", ResultFigures)
    app.connect("source-read", _fill_tables)
    return {"parallel_read_safe": True}


def _fill_tables(app: Any, page: str, source: list[str]) -> None:
    from cupykern.tools import report

    if page == "results":
        source[0] = report.on_site(source[0], RESULTS)


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


class ResultFigures(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        from cupykern.tools import page

        return [
            _section(name, nodes.Text(title), nodes.raw("", body, format="html"))
            for name, title, body in page.sections(RESULTS, with_tables=False)
        ]
