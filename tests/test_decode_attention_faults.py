"""Planted faults in the kernels of decode_attention, each of which a check must catch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import test_decode_attention as properties
from planted import Fault, fault_tests

from cupykern.attention.decode_problem import OP, DecodeProblem
from cupykern.targets import host

WARPS, PRODUCTS = "parts/decode_warps.cuh", "parts/decode_products.cuh"
SOFTMAX = "parts/online_softmax.cuh"
TASK, RESULTS = "parts/decode_task.cuh", "parts/decode_results.cuh"
SOURCE, QUERIES = "parts/decode_source.cuh", "parts/decode_queries.cuh"
MERGE, MERGE_KERNEL = "parts/decode_merge.cuh", "decode_merge.cu"

FAULTS = {
    "no barrier before a stage is read": Fault(
        WARPS,
        "copy_async_wait<kStages - 1>(); sync_tile();",
        "copy_async_wait<kStages - 1>();",
        "lengths",
    ),
    "a stage too early": Fault(
        WARPS,
        "copy_async_wait<kStages - 1>();",
        "copy_async_wait<kStages>();",
        "lengths",
    ),
    "queries read before they are there": Fault(
        WARPS,
        "if constexpr (kOwnKeys) sync_block();  // the queries",
        "",
        "lengths",
    ),
    "a stage is loaded over before it has been read": Fault(
        WARPS,
        "sync_tile();  // the stage has been read",
        "",
        "many rows, who computes",
    ),
    "a stage is loaded over while it is read": Fault(
        SOURCE,
        "next_stage = next_stage + 1 < kStages ?",
        "next_stage = next_stage + 2 < kStages ?",
        "lengths",
    ),
    "values behind the end": Fault(
        SOURCE,
        "has_v && valid",
        "has_v",
        "lengths",
    ),
    "columns behind the last": Fault(
        SOURCE, "has_k = vector * 8 < params.dim,", "has_k = true,", "padded rows"
    ),
    "a query sees one key less": Fault(
        PRODUCTS, "params.queries.by - 1 - query", "params.queries.by - query", "lengths"
    ),
    "queries and heads swapped": Fault(
        PRODUCTS,
        "const int query = params.queries.take_from(head); ends[m][r]",
        "params.queries.take_from(head); const int query = head; ends[m][r]",
        "lengths",
    ),
    "small weights in FP16's subnormals": Fault(
        SOFTMAX, "kSame<T, half> ? 7.0f : 0.0f", "0.0f", "small weights"
    ),
    "infinity minus infinity": Fault(
        WARPS,
        "const float finite = total.exponent == -kInfinity ? 0.0f : total.exponent;",
        "const float finite = total.exponent;",
        "lengths",
    ),
    "a chunk goes on with the sums of the one before": Fault(
        WARPS,
        "softmax.restart(); values.restart(); chunk_end",
        "softmax.restart(); chunk_end",
        "infinite value",
    ),
    "a chunk goes on with the maximum of the one before": Fault(
        WARPS,
        "softmax.restart(); values.restart(); chunk_end",
        "values.restart(); chunk_end",
        "who computes",
    ),
    "a group goes on with the chunks of the one before": Fault(
        RESULTS,
        "task.group_node(params, chunk / kGroup)); restart();",
        "task.group_node(params, chunk / kGroup));",
        "who computes",
    ),
    "chunks end where their task ends": Fault(
        WARPS, "if (ends || key >= chunk_end) {", "if (ends) {", "who computes"
    ),
    "groups end where their task ends": Fault(
        RESULTS, "chunk % kGroup == kGroup - 1 || is_last", "is_last", "who computes"
    ),
    "tiles of a sequence without keys": Fault(
        WARPS, "if (task.first < task.end) {", "if (true) {", "lengths"
    ),
    "copies for a sequence without keys": Fault(
        WARPS,
        "if (task.first < task.end) { TileLoads loads(params, task, caches, block_table);",
        "if (true) { TileLoads loads(params, task, caches, block_table);"
        " if (task.first == task.end) loads.end = task.first + 1;",
        "empty caches",
    ),
    "the task is read before it is there": Fault(
        WARPS, "sync_block();  // storage.task is written", "", "lengths"
    ),
    "rows past the last": Fault(
        RESULTS,
        "if (row >= task.num_rows) break;",
        "",
        "lengths",
    ),
    "the last rows are those of the first block": Fault(
        QUERIES,
        "row = task.first_row + i / kVectors;",
        "row = i / kVectors;",
        "rows",
    ),
    "a page's keys counted from the sequence's first": Fault(
        SOURCE,
        "const int within = page_size.take_from(key);",
        "const int within = key;",
        "pages",
    ),
    "a quotient too small": Fault(TASK, "if (rest >= by) ++quotient, rest -= by;", "", "lengths"),
    "the pages of the tile before": Fault(
        SOURCE, "find_pages(first_key + kTileK);", "find_pages(first_key);", "pages"
    ),
    "a page's offset in 32 bits": Fault(
        SOURCE,
        "copy(i, k + page * k_page",
        "copy(i, k + int(page * k_page)",
        "large caches",
    ),
    "the same keys again": Fault(
        SOURCE,
        "k += kLinesAtOnce * k_row, v +=",
        "v +=",
        "lengths",
    ),
    "the keys of the warp behind": Fault(
        SOURCE,
        "k += kOthers * k_row, v += kOthers * v_row;",
        "",
        "lengths",
    ),
    "the first sequence's pages": Fault(
        SOURCE, "table += task.batch * params.table_stride;", "", "pages"
    ),
    "pages that there are not": Fault(
        SOURCE, "pages[i] < last_page ? pages[i] : last_page", "pages[i]", "clamped"
    ),
    "a key behind the cache": Fault(
        TASK, "length < max_keys ? length", "length <= max_keys + 1 ? length", "clamped"
    ),
    "chunks by the longest length": Fault(
        TASK, "chunks(params, num_keys);", "chunks(params, params.max_keys);", "any batch"
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
        "multiply_add(total.sum, factors.before,",
        "multiply_add(total.sum, 1.0f,",
        "lengths",
    ),
    "the last chunk is left out": Fault(
        MERGE,
        "if (first_chunk + i >= end) continue;",
        "if (first_chunk + i >= end - 1) continue;",
        "lengths",
    ),
    "folded before all chunks are there": Fault(
        MERGE, "uint32_t(count - 1);", "uint32_t(count - 2);", "who computes"
    ),
    "told before it is known": Fault(
        MERGE, "told = last; } sync_block();", "told = last; }", "who computes"
    ),
    "the counters stay": Fault(MERGE, "if (last) *counter = 0;", "", "counters"),
    "groups weigh the same": Fault(
        MERGE,
        "weights[i] = exp2_approx(groups[i].exponent - finite);",
        "weights[i] = 1.0f;",
        "many chunks",
    ),
    "the largest exponent of one thread's groups": Fault(
        MERGE,
        "largest = across_row<Max>(largest);",
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
    "values read before they are there": Fault(
        MERGE,
        "copy_async_wait<0>();",
        "",
        "lengths",
    ),
    "the values of the chunks before": Fault(
        MERGE,
        "if (begin > 0) start_values<kValuesAtOnce>(memory, begin);",
        "",
        "most chunks",
    ),
    "warps' sums weigh the same": Fault(
        WARPS,
        "exp2_approx(warps[w].exponent - finite)",
        "1.0f",
        "lengths",
    ),
    "warps' sums read before they are there": Fault(
        WARPS,
        "store(mine, memory, m * kRowsAtOnce, num_rows); sync_block();",
        "store(mine, memory, m * kRowsAtOnce, num_rows);",
        "lengths",
    ),
    "warps' sums stored over those that are read": Fault(
        WARPS,
        "if constexpr (kOwnKeys) sync_block();  // what lies there has been read since",
        "",
        "who computes",
    ),
    "rows stored over those that are read": Fault(
        WARPS,
        "if (m > 0) sync_block();",
        "",
        "one chunk",
    ),
    "a warp's keys counted from the tile's first": Fault(
        WARPS, "key + first_key_of_warp()", "key", "lengths"
    ),
    "all warps have the first keys": Fault(
        PRODUCTS, "keys(first_key_of_warp())", "keys(0)", "lengths"
    ),
    "many rows: the first rows of each part": Fault(
        MERGE_KERNEL,
        "const int begin = int(blockIdx.x) % kParts * kRowsAtOnce;",
        "const int begin = 0;",
        "rows",
    ),
    "many rows: the first block's sums for all": Fault(
        MERGE_KERNEL, "* params.row_blocks.by + row_block;", "* params.row_blocks.by;", "rows"
    ),
    "many rows: rows that there are not": Fault(
        MERGE_KERNEL,
        "const bool has_row = begin + own.row < task.num_rows;",
        "const bool has_row = true;",
        "rows",
    ),
    "all warps have the first columns": Fault(
        PRODUCTS, "return first_col_of_warp() + n * 16", "return n * 16", "columns"
    ),
    "the second half of the scores is left out": Fault(
        PRODUCTS, "+= sums[1].at(0, 0).values[i];", "+= 0.0f;", "lengths"
    ),
    "a pair's first block does not wait for the second": Fault(
        RESULTS, "if (!is_first) return; cluster_wait();", "if (!is_first) return;", "pairs"
    ),
    "a pair's second group is left out": Fault(
        RESULTS,
        "multiply_add(added[j], other, multiply_add(value,",
        "(0.0f * added[j] + multiply_add(value,",
        "pairs",
    ),
    "a pair's groups weigh the same": Fault(
        RESULTS, "exp2_approx(second.exponent - finite)", "1.0f", "pairs"
    ),
    "a pair's second group has the sum of the first row": Fault(
        RESULTS, "second = pair.totals[row];", "second = pair.totals[0];", "pairs"
    ),
    "many rows: a key too many": Fault(
        PRODUCTS, "if (key >= ends[m][Rows::slot(i)])", "if (key > ends[m][Rows::slot(i)])", "rows"
    ),
    "many rows: only the last tile is masked": Fault(
        WARPS, "(params.causal ? params.queries.by - 1 : 0);", "0;", "rows"
    ),
    "many rows: all see what the last query sees": Fault(
        PRODUCTS, "params.queries.by - 1 - query", "0 * query", "rows"
    ),
    "many rows: values are not rescaled": Fault(
        PRODUCTS, "value *= factors[m][Rows::slot(i)];", "(void)factors, (void)m;", "rows"
    ),
    "many rows: sums are not rescaled": Fault(
        PRODUCTS, "of[m].rescale(factors[m]);", "(void)factors;", "rows"
    ),
    "many rows: a negative scale for a positive one": Fault(
        PRODUCTS,
        "const float before = scale > 0.0f ? 1.0f : scale;",
        "const float before = 1.0f;",
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


def _on_host(test, *args):
    return lambda: test(host.current(), *args)


def _who_computes(chunks_per_block: int, rows: int) -> None:
    properties.test_who_computes_changes_no_bit(host.current(), chunks_per_block, rows)


def _counters() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        properties.test_the_counters_are_zero_again(monkeypatch)


CHECKS = {
    "any batch": _on_host(properties.test_a_sequence_has_the_same_bits_in_any_batch),
    "who computes": lambda: _who_computes(16, 16),
    "single chunks": lambda: _who_computes(1, 16),
    "many rows, who computes": lambda: _who_computes(16, 64),
    "pairs": _on_host(properties.test_pairs_of_blocks_change_no_bit, 8),
    "clamped": _on_host(properties.test_lengths_and_tables_of_the_device_are_clamped),
    "empty caches": lambda: properties.test_empty_caches_are_not_read(host.current(), "no keys", 2),
    "large caches": properties.test_caches_of_more_than_2_to_the_32_bytes,
    "many chunks": _on_host(properties.test_chunks_grow_with_the_length, 64 * 10),
    "most chunks": _on_host(properties.test_chunks_grow_with_the_length, 64 * 256),
    "counters": _counters,
    "infinite value": _on_host(properties.test_an_infinite_value_is_one_in_the_result),
    "small weights": _on_host(properties.test_small_weights_are_not_lost),
}


test_nothing_fails_without_a_fault, test_caught = fault_tests(FAULTS, _problems, CHECKS)
