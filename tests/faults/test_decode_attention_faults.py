"""Planted faults in the kernels of decode_attention, each of which a check must catch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from decode_checks import (
    check_any_batch,
    check_behind_the_end,
    check_chunks_that_grow,
    check_clamped,
    check_clusters,
    check_counters,
    check_infinite_value,
    check_keys_behind,
    check_large_caches,
    check_range_of_queries,
    check_sinks_of_chunks,
    check_small_weights,
    check_strides_of_tables,
    check_who_computes,
)
from planted import Fault, fault_tests
from products import compare

from cupykern import dtypes
from cupykern.ops.decode_attention import OP
from cupykern.ops.problems.attention import ScoreChoice
from cupykern.ops.problems.decode_attention import DecodeProblem
from cupykern.targets import host

MAINLOOP, MMA = "attention/decode/mainloop.cuh", "attention/decode/mma.cuh"
SOFTMAX = "attention/online_softmax.cuh"
WORK_TILE, EPILOGUE = "attention/decode/work_tile.cuh", "attention/decode/epilogue.cuh"
LOAD_KV, LOAD_Q = "attention/decode/load_kv.cuh", "attention/decode/load_q.cuh"
MERGE, MERGE_KERNEL = "attention/decode/merge.cuh", "decode_merge.cu"

SCORE = "attention/decode/score.cuh"

FAULTS = {
    "a window, one key too many": Fault(
        MMA, "key < position - params.left", "key < position - params.left - 1", "options"
    ),
    "chunks begin after the window does": Fault(
        WORK_TILE, "position(num_keys) - left;", "position(num_keys) - left + 1;", "options"
    ),
    "a sink in every chunk": Fault(
        MAINLOOP, "if (work.first_chunk == 0) {", "if (work.first_chunk >= 0) {", "sinks of chunks"
    ),
    "a sink that is in no sum": Fault(SCORE, "sink == -kInfinity ? 0.0f : 1.0f", "0.0f", "options"),
    "the sink of another head": Fault(
        SCORE, "params.queries.divide(head);", "head = 0;", "options"
    ),
    "distances from the last query": Fault(
        MMA, "positions[m][r] = position;", "positions[m][r] = work.num_keys - 1;", "options"
    ),
    "ALiBi of the first sequence": Fault(SCORE, "work.batch * params.slope_batch +", "", "options"),
    "no barrier before a stage is read": Fault(
        MAINLOOP,
        "copy_async_wait<kStages - 1>(); sync_stage();",
        "copy_async_wait<kStages - 1>();",
        "lengths",
    ),
    "a stage too early": Fault(
        MAINLOOP,
        "copy_async_wait<kStages - 1>();",
        "copy_async_wait<kStages>();",
        "lengths",
    ),
    "queries and the work tile are read before they are written": Fault(
        MAINLOOP,
        "if constexpr (kWarpOwnsKeys) sync_block();  // the queries are loaded",
        "",
        "lengths",
    ),
    "a stage is refilled before it is empty": Fault(
        MAINLOOP,
        "sync_stage();  // the stage is empty",
        "",
        "many rows, who computes",
    ),
    "a stage is refilled while it is read": Fault(
        LOAD_KV,
        "stage = stage + 1 < kStages ?",
        "stage = stage + 2 < kStages ?",
        "lengths",
    ),
    "values past the end": Fault(
        LOAD_KV,
        "has_v && valid",
        "has_v",
        "lengths",
    ),
    "columns past the last": Fault(
        LOAD_KV, "has_k = vector * kPerVector < params.dim,", "has_k = true,", "padded rows"
    ),
    "two queries see all keys": Fault(
        WORK_TILE,
        "causal ? queries.divisor - 1 : 0",
        "causal && queries.divisor > 2 ? queries.divisor - 1 : 0",
        "keys behind",
    ),
    "tables have no gaps between rows": Fault(
        LOAD_KV,
        "table += work.batch * params.table_stride;",
        "table += work.batch * int64_t(params.max_keys / params.page_size.divisor);",
        "tables",
    ),
    "a query sees one key less": Fault(
        MMA, "params.queries.divisor - 1 - query", "params.queries.divisor - query", "lengths"
    ),
    "queries and heads swapped": Fault(
        MMA,
        "int query = params.queries.divide(head); if constexpr (Score::kGeneral)",
        "int query = head + 0 * params.queries.divide(head); if constexpr (Score::kGeneral)",
        "lengths",
    ),
    "small weights in FP16's subnormals": Fault(
        SOFTMAX, "kSame<T, half> ? 7.0f : 0.0f", "0.0f", "small weights"
    ),
    "infinity minus infinity": Fault(
        MAINLOOP,
        "const float finite = state.exponent == -kInfinity ? 0.0f : state.exponent;",
        "const float finite = state.exponent;",
        "lengths",
    ),
    "a chunk keeps the accumulators of the one before": Fault(
        MAINLOOP,
        "softmax.reset(); output.clear(); chunk_end",
        "softmax.reset(); chunk_end",
        "infinite value",
    ),
    "a chunk keeps the softmax of the one before": Fault(
        MAINLOOP,
        "softmax.reset(); output.clear(); chunk_end",
        "output.clear(); chunk_end",
        "who computes",
    ),
    "a group keeps the state of the one before": Fault(
        EPILOGUE,
        "work.group_partial(params, chunk / kChunksPerGroup)); clear();",
        "work.group_partial(params, chunk / kChunksPerGroup));",
        "who computes",
    ),
    "chunks end where their work tile ends": Fault(
        MAINLOOP, "if (is_last || key >= chunk_end) {", "if (is_last) {", "who computes"
    ),
    "groups end where their work tile ends": Fault(
        EPILOGUE,
        "chunk % kChunksPerGroup == kChunksPerGroup - 1 || is_last",
        "is_last",
        "who computes",
    ),
    "the tile of a sequence without keys is not loaded": Fault(
        LOAD_KV,
        "end_key(work.end_key > work.first_key ? work.end_key : work.first_key + 1)",
        "end_key(work.end_key)",
        "lengths",
    ),
    "a sequence without keys has one": Fault(
        LOAD_KV,
        "end_key = work.end_key; table",
        "end_key = work.end_key > work.first_key ? work.end_key : work.first_key + 1; table",
        "behind the end",
    ),
    "rows past the last": Fault(
        EPILOGUE,
        "if (row >= work.num_rows) break;",
        "",
        "lengths",
    ),
    "the last rows are those of the first block": Fault(
        LOAD_Q,
        "row = work.first_row + i / kQueryVectors;",
        "row = i / kQueryVectors;",
        "rows",
    ),
    "a page's keys counted from the sequence's first": Fault(
        LOAD_KV,
        "const int key_of_page = page_size.divide(key);",
        "const int key_of_page = key;",
        "pages",
    ),
    "a quotient too small": Fault(
        "common/fast_divmod.cuh",
        "if (remainder >= divisor) ++quotient, remainder -= divisor;",
        "",
        "lengths",
    ),
    "the pages of the tile before": Fault(
        LOAD_KV, "load_pages(tile_key + kTileN);", "load_pages(tile_key);", "pages"
    ),
    "a page's offset in 32 bits": Fault(
        LOAD_KV,
        "copy(i, k + page * k_page_stride",
        "copy(i, k + int(page * k_page_stride)",
        "large caches",
    ),
    "the same keys again": Fault(
        LOAD_KV,
        "k += kKeysPerPass * k_stride, v +=",
        "v +=",
        "lengths",
    ),
    "the keys of the warp behind": Fault(
        LOAD_KV,
        "k += kKeysOfOthers * k_stride, v += kKeysOfOthers * v_stride;",
        "",
        "lengths",
    ),
    "the first sequence's pages": Fault(
        LOAD_KV, "table += work.batch * params.table_stride;", "", "pages"
    ),
    "pages that do not exist": Fault(
        "attention/pages.cuh",
        "page < 0 ? 0 : page < last_page ? page : last_page",
        "page",
        "clamped",
    ),
    "a key past the cache": Fault(
        WORK_TILE, "length < max_keys ? length", "length <= max_keys + 1 ? length", "clamped"
    ),
    "chunks by the longest length": Fault(
        WORK_TILE,
        "chunks(params, num_keys - begin);",
        "chunks(params, params.max_keys);",
        "any batch",
    ),
    "chunks weigh the same": Fault(
        MERGE, "exp2_approx(added.exponent - finite)};", "1.0f};", "lengths"
    ),
    "a group's values are not rescaled": Fault(
        MERGE,
        "return multiply_add(value, factors.before, product);",
        "return value + product;",
        "lengths",
    ),
    "a group's sum is not rescaled": Fault(
        MERGE,
        "multiply_add(state.sum, factors.before,",
        "multiply_add(state.sum, 1.0f,",
        "lengths",
    ),
    "the last chunk is left out": Fault(
        MERGE,
        "if (first_chunk + i >= end) continue;",
        "if (first_chunk + i >= end - 1) continue;",
        "lengths",
    ),
    "folded before all chunks are stored": Fault(
        MERGE, "uint32_t(count - 1);", "uint32_t(count - 2);", "who computes"
    ),
    "the flag is read before it is written": Fault(
        MERGE, "flag = last; } sync_block();", "flag = last; }", "who computes"
    ),
    "the counters stay": Fault(MERGE, "if (last) *counter = 0;", "", "counters"),
    "groups weigh the same": Fault(
        MERGE,
        "factors[i] = exp2_approx(groups[i].exponent - finite);",
        "factors[i] = 1.0f;",
        "many chunks",
    ),
    "the largest exponent of one thread's groups": Fault(
        MERGE,
        "largest = reduce_row<Max>(largest);",
        "",
        "many chunks",
    ),
    "the first group's weight for all": Fault(
        MERGE,
        "return shuffle(x, lane_of(group));",
        "return shuffle(x, lane_of(0));",
        "who computes",
    ),
    "the first groups' weights for the last": Fault(
        MERGE,
        "const float x = kGroups > 1 && group >= kLanes ? mine[kGroups - 1] : mine[0];",
        "const float x = mine[0];",
        "most chunks",
    ),
    "values are read before they are copied": Fault(
        MERGE,
        "copy_async_wait<0>();",
        "",
        "lengths",
    ),
    "the values of the chunks before": Fault(
        MERGE,
        "if (begin > 0) copy_values<kBatch>(memory, begin);",
        "",
        "most chunks",
    ),
    "warps' parts weigh the same": Fault(
        MAINLOOP,
        "exp2_approx(warps[w].exponent - finite)",
        "1.0f",
        "lengths",
    ),
    "warps' parts are read before they are stored": Fault(
        MAINLOOP,
        "store(output, memory, m * kRowsPerPass, num_rows); sync_block();",
        "store(output, memory, m * kRowsPerPass, num_rows);",
        "lengths",
    ),
    "warps' states are stored over those that are read": Fault(
        MAINLOOP,
        "if constexpr (kWarpOwnsKeys) sync_block();  // the last chunk's exchange has been read",
        "",
        "who computes",
    ),
    "rows stored over those that are read": Fault(
        MAINLOOP,
        "if (m > 0) sync_block();",
        "",
        "one chunk",
    ),
    "a warp's keys counted from the tile's first": Fault(
        MAINLOOP, "key + warp_first_key()", "key", "lengths"
    ),
    "all warps have the first keys": Fault(MMA, "keys(warp_first_key())", "keys(0)", "lengths"),
    "many rows: the first rows of each part": Fault(
        MERGE_KERNEL,
        "const int begin = int(blockIdx.x) % kPasses * kRowsPerPass;",
        "const int begin = 0;",
        "two row tiles",
    ),
    "many rows: the first row tile for all": Fault(
        MERGE_KERNEL,
        "* params.row_tiles.divisor + row_tile_of_head;",
        "* params.row_tiles.divisor;",
        "two row tiles",
    ),
    "many rows: rows that do not exist": Fault(
        MERGE_KERNEL,
        "const bool has_row = begin + quad.row < work.num_rows;",
        "const bool has_row = true;",
        "rows",
    ),
    "all warps have the first columns": Fault(
        MMA, "return warp_first_col() + n * 16", "return n * 16", "columns"
    ),
    "the second half of the scores is left out": Fault(
        MMA, "+= chains[1].at(0, n).values[i];", "+= 0.0f;", "lengths"
    ),
    "a cluster's first block does not wait for the second": Fault(
        EPILOGUE, "if (!is_first) return; cluster_wait();", "if (!is_first) return;", "clusters"
    ),
    "a cluster's second group is left out": Fault(
        EPILOGUE,
        "multiply_add(added[j], second_factor, multiply_add(value,",
        "(0.0f * added[j] + multiply_add(value,",
        "clusters",
    ),
    "a cluster's groups weigh the same": Fault(
        EPILOGUE, "exp2_approx(second.exponent - finite)", "1.0f", "clusters"
    ),
    "a cluster's second group has the state of the first row": Fault(
        EPILOGUE, "second = partial.states[row];", "second = partial.states[0];", "clusters"
    ),
    "8 bits: queries that FP16 does not hold": Fault(
        LOAD_Q, "exponent - kLargest)", "127)", "range of queries"
    ),
    "8 bits: the largest element of a thread": Fault(
        LOAD_Q,
        "unit_of(MergeFloats<Max>().across_lanes(largest, 1, kRowThreads))",
        "unit_of(largest)",
        "range of queries",
    ),
    "8 bits: all queries in the unit of the first": Fault(
        MMA,
        "units[r] = rows[warp_first_row() + m * kFragmentRows + Rows::row(lane_id(), r)];",
        "units[r] = rows[0];",
        "range of queries",
    ),
    "8 bits: queries are read before they are converted": Fault(
        MMA, "QueryUnits::convert(tile); sync_block();", "QueryUnits::convert(tile);", "codes"
    ),
    "a run of chunks counts as its chunks": Fault(
        EPILOGUE, "blocks = (count + run - 1) >> (run >> 1);", "blocks = count;", "runs of chunks"
    ),
    "many rows: a key too many": Fault(
        MMA,
        "if (key >= end_keys[m][Rows::slot(i)])",
        "if (key > end_keys[m][Rows::slot(i)])",
        "rows",
    ),
    "many rows: only the last tile is masked": Fault(
        WORK_TILE, "(causal ? queries.divisor - 1 : 0);", "0;", "rows"
    ),
    "many rows: all see what the last query sees": Fault(
        MMA, "params.queries.divisor - 1 - query", "0 * query", "rows"
    ),
    "many rows: values are not rescaled": Fault(
        MMA, "value *= factors[m][Rows::slot(i)] * factor;", "(void)factors, (void)m;", "rows"
    ),
    "many rows: row sums are not rescaled": Fault(
        SOFTMAX, "sum[r] *= factors[r];", "(void)factors;", "rows"
    ),
    "many rows: a negative scale for a positive one": Fault(
        MMA,
        "score_scale = scale > 0.0f ? 1.0f : scale;",
        "score_scale = 1.0f;",
        "rows",
    ),
}


def _problems() -> Iterator[tuple[str, object, object]]:
    def problem(*shape, **options):
        return OP, DecodeProblem(*shape, **{"return_lse": True, "kind": "uniform", **options})

    yield "lengths", *problem(3, 4, 2, 2, 300, 128, lens=(257, 0, 300), scale=0.02)
    yield "lengths", *problem(1, 2, 2, 3, 300, 128, scale=-0.01)
    yield "one chunk", *problem(2, 6, 1, 1, 100, 128, lens=(100, 1))
    yield "pages", *problem(2, 4, 1, 1, 300, 128, lens=(70, 300), page=24, scale=0.02)
    yield "rows", *problem(1, 70, 1, 1, 300, 64, scale=-1.0, kind="normal")
    yield "rows", *problem(2, 20, 1, 3, 130, 64, lens=(129, 70), scale=0.3, kind="normal")
    yield "columns", *problem(1, 2, 1, 1, 100, 256, scale=0.02)
    yield "padded rows", *problem(1, 2, 1, 1, 70, 72, view="padded")
    yield "codes", *problem(2, 4, 2, 1, 300, 128, dtype="bfloat16", cache_dtype="int8", scale=0.02)
    # Two chunks and more, of which each sequence's window cuts others.
    options = ScoreChoice((180, 0), 3.0, "bh", True)
    yield "options", *problem(2, 6, 2, 2, 700, 64, lens=(700, 333), kind="normal", options=options)


def _on_host(test, *args):
    return lambda: test(host.current(), *args)


def _who_computes(chunks_per_block: int, rows: int) -> None:
    check_who_computes(host.current(), chunks_per_block, rows)


def _two_row_tiles() -> None:
    """Of a KV head, whose chunks are merged by the second kernel."""
    problem = DecodeProblem(1, 70, 1, 1, 300, 64)
    (config,) = (c for c in OP.configs(problem, "host") if c.chunks_per_block == 1)
    assert config.has_merge_kernel and problem.heads > config.tile_m
    call = OP.inputs(problem, 1, np)
    found = OP.run(*call.args, **call.kwargs, config=config)
    assert compare(OP, *call.args, outputs=found, **call.kwargs).ok


def _counters() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        check_counters(monkeypatch)


CHECKS = {
    "any batch": _on_host(check_any_batch),
    "who computes": lambda: _who_computes(16, 16),
    "single chunks": lambda: _who_computes(1, 16),
    "runs of chunks": lambda: _who_computes(2, 8),
    "many rows, who computes": lambda: _who_computes(16, 64),
    "two row tiles": _two_row_tiles,
    "clusters": _on_host(check_clusters, 8),
    "keys behind": _on_host(check_keys_behind, 2),
    "tables": _on_host(check_strides_of_tables, "apart"),
    "clamped": _on_host(check_clamped),
    "behind the end": _on_host(check_behind_the_end),
    "large caches": check_large_caches,
    "many chunks": _on_host(check_chunks_that_grow, 64 * 10),
    "most chunks": _on_host(check_chunks_that_grow, 64 * 256),
    "counters": _counters,
    "infinite value": _on_host(check_infinite_value),
    "sinks of chunks": check_sinks_of_chunks,
    "range of queries": _on_host(check_range_of_queries, dtypes.int8),
    "small weights": _on_host(check_small_weights),
}


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, _problems, CHECKS
)
