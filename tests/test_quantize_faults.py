"""Planted faults in quantize (tests/planted.py); those of parts/row.cuh are in test_faults.py, and of
the largest magnitude in test_norm_faults.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from planted import Fault, caught_by, first_failure

from cupykern.rows.quantize_ops import OP, QuantizeProblem

ROWS, TILES, SCALE = "quantize.cu", "quantize_tiles.cu", "parts/quantize.cuh"
FAULTS = {
    "a vector's first element missed": Fault(
        ROWS, "largest.take(x[j]);", "if (j > 0) largest.take(x[j]);", "rows"
    ),
    "decoded where it should be encoded": Fault(
        ROWS, "row, scale.encode);", "row, scale.decode);", "rows"
    ),
    "a row's scale in the order of the launch": Fault(
        ROWS, "scales[row_offset(layout, kScale, task.row)]", "scales[task.row]", "columns"
    ),
    "a scale for the chunk, not for the row": Fault(
        ROWS,
        "if (!merge_row(task, t, c.live, layout.num_rows, statistics, merge, largest)) return;",
        "float other = largest;\n"
        "if (!merge_row(task, t, c.live, layout.num_rows, statistics, merge, other)) return;",
        "rows",
    ),
    "a scale of 0 for zeros": Fault(
        SCALE, ": decode(1.0f), encode(1.0f) {", ": decode(0.0f), encode(1.0f) {", "zeros"
    ),
    "an infinity is scaled like any number": Fault(
        SCALE, "if (!(largest < kInfinity)) {", "if (largest != largest) {", "special"
    ),
    "e5m2 as int8": Fault(SCALE, "dtype == kE5m2 ? 57344.0f", "dtype == kE5m2 ? 127.0f", "rows"),
    "a tile's sides exchanged": Fault(
        TILES, "p.row_tiles) * p.tile_rows;", "p.row_tiles) * p.tile_cols;", "tiles"
    ),
    "no scale for the last tile": Fault(
        TILES, "if (index >= params.num_tiles) return;", "if (index + 1 >= params.num_tiles) return;",
        "tiles",
    ),
    "the last rows' tiles as high as the others": Fault(
        TILES, "int(rows < p.tile_rows ? rows : p.tile_rows)", "int(p.tile_rows)", "tiles"
    ),
    "vectors that overlap": Fault(TILES, "(i - row * per_row) * kVectorWidth", "(i - row * per_row)", "tiles"),
    "the first vector for all": Fault(
        TILES, "store(y, p, at, encode, values);", "store(y, p, at, encode, first);", "large tiles"
    ),
    "codes where x lies": Fault(
        TILES, "next * p.outer_sizes[d]) * p.y_outer[d]", "next * p.outer_sizes[d]) * p.x_outer[d]", "matrices"
    ),
    "warps of a tile that do not meet": Fault(
        TILES, "merge_across_warps<0>(of_warp, t, MergeFloats<Larger>())", "of_warp", "large tiles"
    ),
}  # fmt: skip


def _problems() -> Iterator[tuple[str, object, QuantizeProblem]]:
    def problem(shape: tuple[int, ...], *options: object, **more: object) -> QuantizeProblem:
        return QuantizeProblem(shape, "bfloat16", *options, **more)

    for to in ("e4m3", "e5m2", "int8"):
        yield "rows", OP, problem((40, 3003), to)
    yield "zeros", OP, problem((40, 1), "int8", kind="exact")
    yield "special", OP, problem((40, 9), kind="special")
    yield "columns", OP, problem((3, 4, 33), "int8", "column", layout="F")
    yield "tiles", OP, problem((10, 70), "e4m3", "block", (3, 5))
    yield "tiles", OP, problem((3, 200), "int8", "block", (2, 128), layout="F")
    yield "tiles", OP, problem((3, 264), "e5m2", "block", (2, 128))
    yield "matrices", OP, problem((3, 5, 64), "e4m3", "block", (2, 32), layout="sliced")
    yield "large tiles", OP, problem((64, 128), "e4m3", "block", (64, 128))


def test_nothing_fails_without_a_fault():
    assert first_failure(_problems, {}) is None


@pytest.mark.faults
@pytest.mark.parametrize("name", FAULTS)
def test_caught(name, tmp_path_factory):
    fault = FAULTS[name]
    assert caught_by(fault, tmp_path_factory, _problems, {}) == fault.caught
