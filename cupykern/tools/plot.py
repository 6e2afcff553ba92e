"""Plots that commands write to a file: a benchmark's rows, a check's errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .results import Row


def plot_rows(rows: Sequence[Row], path: str) -> bool:
    """Draw speed against shape, one panel per op and dtype, one bar per implementation.

    The file's suffix selects the format.  Returns False, without a file, if there are no rows.
    Raises ImportError without matplotlib, ValueError for an unknown suffix.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        panels.setdefault((row.op, row.dtype), []).append(row)
    if not panels:
        return False
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(9, 3.2 * len(panels)), squeeze=False, layout="constrained"
    )
    for axis, ((op, dtype), panel) in zip(axes[:, 0], panels.items(), strict=True):
        names = list(dict.fromkeys(result.name for row in panel for result in row.results))
        in_tflops = any(row.flops for row in panel)
        width = 0.8 / len(names)
        for number, name in enumerate(names):
            places, speeds = [], []
            for place, row in enumerate(panel):
                for result in row.results:
                    speed = result.tflops if in_tflops else result.gbps
                    if result.name == name and speed is not None:
                        places.append(place + (number - (len(names) - 1) / 2) * width)
                        speeds.append(speed)
            axis.bar(places, speeds, width, label=name)
        if not in_tflops and all(row.plain_us for row in panel):
            plain = [
                (row.bytes_read + row.bytes_written) / row.plain_us / 1e3
                for row in panel
                if row.plain_us
            ]
            label = f"plain {panel[0].plain}"
            axis.plot(range(len(panel)), plain, "k_", markersize=24, label=label)
        labels = ["x".join(map(str, row.shape)) for row in panel]
        axis.set_xticks(range(len(panel)), labels)
        axis.set_ylabel("TFLOP/s" if in_tflops else "GB/s")
        axis.set_title(f"{op} {dtype}", loc="left")
        axis.legend(fontsize="small", ncols=len(names) + 1)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def plot_precision(rows: Sequence[dict[str, Any]], path: str) -> bool:
    """Draw the errors of precision.Row records, one panel per op; see plot_rows."""
    from matplotlib import pyplot

    from . import figures

    ops = list(dict.fromkeys(row["op"] for row in rows))
    if not ops:
        return False
    counts = [sum(row["op"] == op for row in rows) for op in ops]
    figure, axes = pyplot.subplots(
        len(ops), 1, figsize=(9, sum(1.0 + 0.22 * count for count in counts)), squeeze=False,
        layout="constrained", height_ratios=[1.5 + 0.22 * count for count in counts],
    )  # fmt: skip
    for axis, op in zip(axes[:, 0], ops, strict=True):
        figures.draw_precision(axis, [row for row in rows if row["op"] == op], op)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
