"""Planted faults in quantize (tests/support/planted.py); those of rows/tile.cuh and rows/reduce.cuh
are in test_softmax_faults.py, and of the largest magnitude in test_norm_faults.py."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from planted import Fault, fault_tests
from quantize_checks import check_scales_of_one

from cupykern import check
from cupykern.op import as_tuple
from cupykern.ops.quantize import OP, QuantizeProblem
from cupykern.rows.quantize_tiles import GlobalTiles

SHARED = "rows/quantize_shared.cuh"
GLOBAL_TILES = "rows/quantize_global_tiles.cuh"
REGISTER_TILES = "rows/quantize_register_tiles.cuh"
COLUMNS = "rows/quantize_columns.cuh"
TILES = "rows/tiles.cuh"
SCALE = "rows/quantize.cuh"
FAULTS = {
    "a vector's first element missed": Fault(
        SHARED, "elements.take(x[j]);", "if (j > 0) elements.take(x[j]);", "columns"
    ),
    "decoded where it should be encoded": Fault(
        SHARED, "row, scale.encode);", "row, scale.decode);", "rows"
    ),
    "a row's scale in the order of the launch": Fault(
        SHARED,
        "scales[row_offset(layout, Params::kScale, work.row)]",
        "scales[work.row]",
        "columns",
    ),
    "a scale for the chunk, not for the row": Fault(
        SHARED,
        "if (!merge_row(work, t, c.live, layout.num_rows, statistics, merge, largest)) return;",
        "float other = largest;\n"
        "if (!merge_row(work, t, c.live, layout.num_rows, statistics, merge, other)) return;",
        "rows",
    ),
    "a scale of 0 for zeros": Fault(
        SCALE, ": decode(1.0f), encode(1.0f) {", ": decode(0.0f), encode(1.0f) {", "zeros"
    ),
    "a normal scale becomes one": Fault(
        SCALE, "largest / largest_finite >= kSmallestNormal",
        "largest / largest_finite > kSmallestNormal",
        "scales of one",
    ),
    "scales become one too early": Fault(
        SCALE, "largest / largest_finite >= kSmallestNormal",
        "largest / largest_finite >= 1.000002f * kSmallestNormal", "scales of one",
    ),
    "scales become one too late": Fault(
        SCALE, "largest / largest_finite >= kSmallestNormal", "largest / largest_finite >= 0.0f",
        "scales of one",
    ),
    "an infinity is scaled like any number": Fault(
        SCALE, "if (!(largest < kInfinity)) {", "if (largest != largest) {", "special"
    ),
    "e5m2 as int8": Fault(SCALE, "dtype == kE5m2 ? 57344.0f", "dtype == kE5m2 ? 127.0f", "rows"),
    "a tile's sides exchanged": Fault(
        TILES, "p.row_tiles) * p.tile_rows;", "p.row_tiles) * p.tile_cols;", "tiles"
    ),
    "no scale for the last tile": Fault(
        GLOBAL_TILES, "if (index >= params.num_tiles) return;",
        "if (index + 1 >= params.num_tiles) return;",
        "tiles",
    ),
    "the last rows' tiles as high as the others": Fault(
        TILES, "int(rows < p.tile_rows ? rows : p.tile_rows)", "int(p.tile_rows)", "tiles"
    ),
    "vectors that overlap": Fault(
        GLOBAL_TILES, "(i - row * per_row) * kVectorWidth", "(i - row * per_row)", "vectors"
    ),
    "the first vector for all": Fault(
        GLOBAL_TILES, "store(y, p, at, encode, values);", "store(y, p, at, encode, first);",
        "large tiles"
    ),
    "codes where x lies": Fault(
        TILES, "next * p.outer_sizes[d]) * p.y_outer[d]", "next * p.outer_sizes[d]) * p.x_outer[d]",
        "matrices"
    ),
    "warps of a tile that do not meet": Fault(
        GLOBAL_TILES, "merge_across_warps<0>(of_warp, t, MergeFloats<Larger>())", "of_warp",
        "large tiles"
    ),
    "warps of a register tile that do not meet": Fault(
        REGISTER_TILES, "largest[n].across_lanes(1, kWarpsPerRow);", "", "register tiles"
    ),
    "the same lane's scale for all tiles": Fault(
        REGISTER_TILES, "(lane_id() & ~(kTiles - 1)) + i", "lane_id() & ~(kTiles - 1)",
        "stacked tiles"
    ),
    "a tile for each word, wrongly picked": Fault(
        REGISTER_TILES, "i & 2 ? fours", "i & 4 ? fours", "stacked tiles"
    ),
    "scales of tiles that are not there": Fault(
        REGISTER_TILES, "t.lane < kTiles && t.lane * tiles.height < tiles.stack.num_rows",
        "t.lane < kTiles", "stacked tiles"
    ),
    "rows of the next tile": Fault(
        REGISTER_TILES, "(kTiles == 1 || first < height) && ", "", "stacked tiles"
    ),
    "columns of the next row": Fault(
        REGISTER_TILES, "&& col < stack.num_cols", "", "stacked tiles"
    ),
    "only the lower halves' largest": Fault(
        SCALE, "low > high ? low : high", "low", "register tiles"
    ),
    "words of both signs": Fault(
        SCALE, "0x7fff7fffu : 0x7fffffffu", "0xffffffffu : 0xffffffffu", "register tiles"
    ),
    "warps of a strip that do not meet": Fault(
        COLUMNS, "for (int i = 0; i < kWarps; ++i) largest.merge",
        "for (int i = 0; i < 1; ++i) largest.merge",
        "strips",
    ),
    "a strip's first block alone": Fault(
        COLUMNS, "for (int i = 0; i < t.blocks; ++i) of_column",
        "for (int i = 0; i < 1; ++i) of_column",
        "strips",
    ),
    "no barrier before a column's scale": Fault(
        COLUMNS, "    sync_block();\n    float encode", "    float encode", "strips"
    ),
    "a column's neighbour": Fault(
        COLUMNS, "column % 2 ? of_column.packed >> 16", "column % 2 == 0 ? of_column.packed >> 16",
        "strips"
    ),
    "the next matrix's scales": Fault(
        COLUMNS, "matrix * params.num_cols + first + column", "first + column", "strips"
    ),
    "rows below the last": Fault(
        COLUMNS, "col < strip.num_cols ? strip.num_rows - row : 0;",
        "kVectorsPerThread * kThreadsPerRow;",
        "strips",
    ),
    "every block the first rows": Fault(
        COLUMNS, "t.rank * (kThreadsPerRow * kVectorsPerThread) + t.lane", "t.lane", "strips"
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
    yield "strips", OP, problem((2, 1100, 72), "e4m3", "column")
    yield "tiles", OP, problem((10, 70), "e4m3", "block", (3, 5))
    yield "tiles", OP, problem((3, 200), "int8", "block", (2, 128), layout="F")
    yield "tiles", OP, problem((3, 264), "e5m2", "block", (2, 24))
    yield "matrices", OP, problem((3, 5, 64), "e4m3", "block", (2, 32), layout="sliced")
    yield "stacked tiles", OP, problem((19, 264), "e4m3", "block", (1, 128))
    yield "stacked tiles", OP, problem((19, 136), "e5m2", "block", (1, 64))
    yield "stacked tiles", OP, problem((2, 19, 40), "int8", "block", (1, 32))
    yield "register tiles", OP, problem((50, 72), "e5m2", "block", (40, 64))
    yield "large tiles", OP, problem((130, 72), "e4m3", "block", (128, 24))


def _scales_of_one() -> None:
    for to in ("e4m3", "int8"):
        check_scales_of_one(np, to, "row")


def _vectors_of_global_tiles() -> None:
    """A config that is not chosen."""
    call = OP.inputs(QuantizeProblem((130, 72), "bfloat16", "e4m3", "block", (128, 24)), 1, np)
    references = OP.reference(*call.args, **call.kwargs)
    bounds = OP.bound(*call.args, **call.kwargs, reference=references)
    outputs = OP.run(*call.args, **call.kwargs, config=GlobalTiles(256, 64, 8))
    assert check.compare(as_tuple(outputs), references, bounds).ok


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, _problems, {"scales of one": _scales_of_one, "vectors": _vectors_of_global_tiles}
)
