"""Options that commands share, their parsers, and one-line errors."""

from __future__ import annotations

import difflib
import importlib.util
import math
from pathlib import Path
from typing import Any

import click

from .. import OPS, dtypes, environment, targets
from ..op import Op
from ..runtime import choice
from ..targets import host_compiler
from .stored import to_json
from .tables import one_line

TARGETS = ("cuda", "hip", "host")
DEFAULT_ARCHS = {"cuda": "sm_90a", "hip": "gfx942", "host": "host"}
ARCHS_OF = {
    "cuda": ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"),
    "hip": ("gfx90a", "gfx942", "gfx1100", "gfx1151", "gfx1201"),
    "host": ("host",),
}
ARCHS = (*ARCHS_OF["cuda"], *ARCHS_OF["hip"])
PLOTS = (".png", ".svg")
Shape = tuple[int, ...]


_ENVIRONMENT = environment.check, host_compiler.own_compiler, choice.mode


class Failure(click.ClickException):
    """An error that prints one line on stderr and sets the exit code."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click's is a class variable


class Group(click.Group):
    """Prints expected errors in one line; other exceptions are bugs and keep their traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            for check in _ENVIRONMENT:
                check()
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Failure("interrupted", 130) from None
        except targets.CompileError as error:
            raise Failure(one_line(str(error))) from None
        except BrokenPipeError:
            raise
        except (targets.UnavailableError, MemoryError, NotImplementedError, OSError) as error:
            raise Failure(str(error)) from None


def _parse_ops(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> list[Op]:
    known = {op.name: op for op in OPS}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?  Ops" if near else "ops"
            raise click.UsageError(f"unknown op {name!r}; {hint} are {', '.join(known)}")
    return [known[name] for name in names] or list(OPS)


def parse_op(ctx: click.Context, param: click.Parameter, name: str) -> Op:
    return _parse_ops(ctx, param, (name,))[0]


def parse_op_or_none(ctx: click.Context, param: click.Parameter, name: str | None) -> Op | None:
    return None if name is None else parse_op(ctx, param, name)


def parse_shapes(
    ctx: click.Context, param: click.Parameter, text: str | None
) -> list[Shape] | None:
    """Parse shapes like "4096,4096;32768,1024".  Raises click.UsageError."""
    if text is None:
        return None
    try:
        shapes = [tuple(int(n) for n in part.split(",")) for part in text.split(";") if part]
    except ValueError:
        shapes = []
    if not shapes or min(min(shape) for shape in shapes) < 0:
        raise click.UsageError(
            f"{param.opts[0]} must be sizes with commas, shapes with semicolons, as "
            f'"4096,4096;32768,1024"; got {text!r}'
        )
    return shapes


def parse_names(
    ctx: click.Context, param: click.Parameter, text: str | None
) -> tuple[str, ...] | None:
    """Parse names with commas.  Raises click.UsageError."""
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise click.UsageError(f"{param.opts[0]} must be names with commas; got {text!r}")
    return names


def parse_counts(
    ctx: click.Context, param: click.Parameter, text: str | None
) -> tuple[int, ...] | None:
    """Parse positive integers with commas.  Raises click.UsageError."""
    if text is None:
        return None
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise click.UsageError(
            f"{param.opts[0]} must be positive numbers with commas; got {text!r}"
        )
    return counts


def parse_ms(ctx: click.Context, param: click.Parameter, value: float) -> float:
    """Check a finite number of at least 0.  Raises click.UsageError."""
    if not 0 <= value < math.inf:
        raise click.UsageError(f"{param.opts[0]} must be a number of at least 0; got {value}")
    return value


def parse_archs(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[str, ...]:
    names = parse_names(ctx, param, text)
    for name in names or ():
        if name not in ARCHS:
            raise click.UsageError(f"unknown arch {name!r}; archs are {', '.join(ARCHS)}")
    return names or ARCHS


def parse_dtypes(
    ctx: click.Context, param: click.Parameter, text: str | None
) -> tuple[str, ...] | None:
    names = parse_names(ctx, param, text)
    # Products also have pairs and options: float16*int8:bias+kn (ops/problems/products.py:
    # bench_product).
    for name in (part for text in names or () for part in text.partition(":")[0].split("*")):
        if name not in dtypes.NAMES:
            raise click.UsageError(f"unknown dtype {name!r}; dtypes are {', '.join(dtypes.NAMES)}")
    return names


def parse_output(ctx: click.Context, param: click.Parameter, path: str | None) -> str | None:
    if path is not None and not Path(path).resolve().parent.is_dir():
        raise click.UsageError(f"{param.opts[0]}: there is no folder {Path(path).parent}")
    return path


def parse_plot(ctx: click.Context, param: click.Parameter, path: str | None) -> str | None:
    """Check a plot's path before anything is measured.  Raises click.UsageError."""
    if path is not None and Path(path).suffix.lower() not in PLOTS:
        raise click.UsageError(f"{param.opts[0]} must end in {' or '.join(PLOTS)}; got {path!r}")
    return parse_output(ctx, param, path)


ops_argument = click.argument("ops", nargs=-1, metavar="[OP]...", callback=_parse_ops)
target_option = click.option(
    "--target", type=click.Choice(TARGETS), help="Default: the GPU if there is one, else host."
)
shapes_option = click.option(
    "--shapes",
    callback=parse_shapes,
    help='As "4096,4096;32768,1024".  Default: the op\'s; of sweep and tune the first.',
)
dtypes_option = click.option(
    "--dtype",
    "dtype_names",
    callback=parse_dtypes,
    help="As `cupykern list` shows them (float16, float8_e4m3fn:rows), with commas.  Default: all.",
)
json_option = click.option(
    "--json", "json_path", type=click.Path(dir_okay=False), callback=parse_output,
    help="Write everything to this file.",
)  # fmt: skip


def write_json(path: str | None, value: Any) -> None:
    if path is not None:
        Path(path).write_text(to_json(value), encoding="utf-8")


def need_matplotlib(option: str) -> None:
    """Raises Failure without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise Failure(f"{option} needs matplotlib: pip install 'cupykern[bench]'")


def bench_tasks(
    ops: list[Op],
    target: str,
    shapes: list[Shape] | None,
    dtype_names: tuple[str, ...] | None,
) -> list[Any]:
    from .bench import tasks

    try:
        return tasks(ops, target, shapes, dtype_names)
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error)) from None


def suite_tasks(
    ops: list[Op],
    target: str,
    name: str,
    dtype_names: tuple[str, ...] | None,
    rows: int | None,
    seed: int,
) -> tuple[Any, list[Any]]:
    """Return (suite, tasks).  dtype_names: filters rows by `choice.group`."""
    from .suite import choice

    try:
        suite = choice.suite(name, rows, seed, target)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    tasks = choice.tasks(suite, ops, target)
    known = {choice.group(task.dtype) for task in tasks}
    if unknown := set(dtype_names or ()) - known:
        raise click.UsageError(
            f"suite {name} has no rows of {', '.join(sorted(unknown))} here; it has "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    tasks = [task for task in tasks if not dtype_names or choice.group(task.dtype) in dtype_names]
    if not tasks:
        raise click.UsageError(f"suite {name} has no rows of {', '.join(op.name for op in ops)}")
    return suite, tasks
