"""The command that times first calls: startup."""

from __future__ import annotations

import click

from .. import targets
from ..op import Op
from .commands_tune import wait_option
from .options import json_option, ops_argument, target_option


@click.command("startup")
@ops_argument
@target_option
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True,
              help="Processes of each kind, of which the medians are taken.")  # fmt: skip
@json_option
@wait_option
def startup(
    ops: list[Op], target: str | None, repeats: int, json_path: str | None, wait: bool
) -> int:
    """Time ops' first calls in new processes.

    With an empty cache, so that the kernels are compiled, and with a warm one.  Of the first
    shape and dtype of `bench`.  Importing cupykern is timed too; CuPy's own import and context and
    the inputs are not.

    \b
    Example: cupykern startup softmax matmul --json startup.json
    """
    from ..tuning.protocol import lock
    from . import startup as measurement
    from .bench import first_tasks

    where = targets.get(target)
    with lock(wait):
        return measurement.run(first_tasks(ops, where.name), where, repeats, json_path)


COMMANDS = (startup,)
