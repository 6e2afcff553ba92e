"""Planted faults in the kernels of decode_attention, each of which a check must catch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import test_decode_attention as properties
from planted import Fault, caught_by, first_failure

from cupykern.attention.decode_problem import OP, DecodeProblem
from cupykern.targets import host

KERNEL, ROWS = "parts/decode_shared_rows.cuh", "parts/decode_warp_rows.cuh"
TASK, RESULTS = "parts/decode_task.cuh", "parts/decode_results.cuh"
SOURCE, QUERIES = "parts/decode_source.cuh", "parts/decode_queries.cuh"

FAULTS = {
    "no barrier before a stage is read": Fault(
        KERNEL,
        "copy_async_wait<kStages - 2>(); sync_block();",
        "copy_async_wait<kStages - 2>();",
        "lengths",
    ),
    "a stage too early": Fault(
        KERNEL, "copy_async_wait<kStages - 2>();", "copy_async_wait<kStages - 1>();", "lengths"
    ),
    "a stage is loaded over while it is read": Fault(
        SOURCE,
        "next_stage = next_stage + 1 < kStages ?",
        "next_stage = next_stage + 2 < kStages ?",
        "lengths",
    ),
    "scores read too early": Fault(
        KERNEL,
        "        sync_block();\n        softmax.weigh",
        "        softmax.weigh",
        "lengths",
    ),
    "weights read too early": Fault(
        KERNEL, "sync_block(); add_values(values,", "add_values(values,", "lengths"
    ),
    "values behind the end": Fault(SOURCE, "has_v && valid", "has_v", "lengths"),
    "a key too many": Fault(
        KERNEL,
        "const bool seen = first_key + 2 * pair + e < end;",
        "const bool seen = first_key + 2 * pair + e <= end;",
        "lengths",
    ),
    "columns behind the last": Fault(
        SOURCE, "has_k = vector * 8 < params.dim,", "has_k = true,", "padded rows"
    ),
    "a query sees one key less": Fault(
        KERNEL, "params.queries.by - 1 - query", "params.queries.by - query", "lengths"
    ),
    "queries and heads swapped": Fault(
        KERNEL,
        "int head = task.first_row + row; const int query = params.queries.take_from(head);",
        "int head = task.first_row + row; params.queries.take_from(head); const int query = head;",
        "lengths",
    ),
    "a row's sum is not rescaled": Fault(
        KERNEL, "mine.sum * factor + sum", "mine.sum + sum", "lengths"
    ),
    "values are not rescaled": Fault(
        KERNEL, "value *= storage.factors[WarpColumns::row(m, i)];", "value *= 1.0f;", "lengths"
    ),
    "the sum of one thread for that of its row": Fault(
        KERNEL, "sum += shuffle_xor(sum, mask);", "(void)mask;", "lengths"
    ),
    "the largest score of one thread for that of its row": Fault(
        KERNEL,
        "largest = maximum(largest, shuffle_xor(largest, mask));",
        "(void)mask;",
        "lengths",
    ),
    "small weights in FP16's subnormals": Fault(
        KERNEL, "kSame<Element, half> ? 14.0f : 0.0f", "0.0f", "small weights"
    ),
    "infinity minus infinity": Fault(
        KERNEL,
        "const float finite = exponent == -kInfinity ? 0.0f : exponent;",
        "const float finite = exponent;",
        "lengths",
    ),
    "a chunk goes on with the sums of the one before": Fault(
        KERNEL,
        "softmax.restart(); values.restart(); chunk_end",
        "softmax.restart(); chunk_end",
        "infinite value",
    ),
    "a chunk goes on with the maximum of the one before": Fault(
        KERNEL,
        "softmax.restart(); values.restart(); chunk_end",
        "values.restart(); chunk_end",
        "who computes",
    ),
    "a group goes on with the chunks of the one before": Fault(
        RESULTS,
        "store_group(chunk / kGroup); restart();",
        "store_group(chunk / kGroup);",
        "who computes",
    ),
    "chunks end where their task ends": Fault(
        KERNEL, "if (!ends && key < chunk_end) continue;", "if (!ends) continue;", "who computes"
    ),
    "groups end where their task ends": Fault(
        RESULTS, "chunk % kGroup == kGroup - 1 || is_last", "is_last", "who computes"
    ),
    "nothing is loaded where there is no key": Fault(
        SOURCE,
        "source.load(stages[next_stage], key);",
        "if (key < task.end) source.load(stages[next_stage], key);",
        "lengths",
    ),
    "rows past the last": Fault(RESULTS, "if (row >= task.num_rows) continue;", "", "lengths"),
    "the last rows are those of the first block": Fault(
        QUERIES,
        "const int row = task.first_row + i;",
        "const int row = i;",
        "rows",
    ),
    "a page's keys counted from the sequence's first": Fault(
        SOURCE,
        "within[i] = page_size.take_from(page);",
        "page_size.take_from(page), within[i] = key;",
        "pages",
    ),
    "a quotient too small": Fault(TASK, "if (rest >= by) ++quotient, rest -= by;", "", "lengths"),
    "the pages of the tile before": Fault(
        SOURCE, "find_pages(first_key + kTileK);", "find_pages(first_key);", "pages"
    ),
    "a page's offset in 32 bits": Fault(
        SOURCE, "copy(i, k + page * k_page", "copy(i, k + int(page * k_page)", "large caches"
    ),
    "the same keys again": Fault(SOURCE, "k += kLinesAtOnce * k_row, v +=", "v +=", "lengths"),
    "the first sequence's pages": Fault(
        SOURCE, "block_table + task.batch * params.table_stride", "block_table", "pages"
    ),
    "pages that there are not": Fault(
        SOURCE, "pages[i] < last_page ? pages[i] : last_page", "pages[i]", "clamped"
    ),
    "a key behind the cache": Fault(
        TASK, "length < max_keys ? length", "length <= max_keys + 1 ? length", "clamped"
    ),
    "chunks by the longest length": Fault(
        TASK, "size * kMaxChunks < num_keys", "size * 2 < max_keys", "any batch"
    ),
    "chunks weigh the same": Fault(
        RESULTS, "exp2_approx(added.exponent - finite)};", "1.0f};", "lengths"
    ),
    "a group's values are not rescaled": Fault(
        RESULTS,
        "value = multiply_add(value, factors.before,",
        "value = multiply_add(value, 1.0f,",
        "lengths",
    ),
    "a group's sum is not rescaled": Fault(
        RESULTS, "multiply_add(total.sum, mine.before,", "multiply_add(total.sum, 1.0f,", "lengths"
    ),
    "the last chunk is left out": Fault(
        RESULTS, "if (done + i < count) fold", "if (done + i < count - 1) fold", "lengths"
    ),
    "a fold's factors read before they are there": Fault(
        RESULTS,
        "storage.folds[turn][own.row] = mine; sync_block();",
        "storage.folds[turn][own.row] = mine;",
        "lengths",
    ),
    "a fold's factors written while they are read": Fault(
        RESULTS, "turn ^= 1;  // the other buffer may still be read", "", "lengths"
    ),
    "folded before all chunks are there": Fault(
        RESULTS, "uint32_t(count - 1);", "uint32_t(count - 2);", "who computes"
    ),
    "told before it is known": Fault(
        RESULTS, "told = last; } sync_block();", "told = last; }", "lengths"
    ),
    "the counters stay": Fault(RESULTS, "if (last) *counter = 0;", "", "counters"),
    "groups weigh the same": Fault(
        RESULTS, "= exp2_approx(group.exponent - finite);", "= 1.0f;", "many chunks"
    ),
    "the largest exponent of one thread's groups": Fault(
        RESULTS,
        "largest = MergeFloats<Max>().across_lanes(largest, 1, kThreadsPerRow);",
        "",
        "many chunks",
    ),
    "the last group is left out": Fault(
        RESULTS,
        "if (first + g >= task.num_groups) continue;",
        "if (first + g >= task.num_groups - 1) continue;",
        "many chunks",
    ),
    "groups' weights read before they are there": Fault(
        RESULTS, "sync_block(); values.restart();", "values.restart();", "who computes"
    ),
    "many rows: no barrier before a stage is read": Fault(
        ROWS, "sync_block();  // this stage is whole", "// whole", "rows"
    ),
    "many rows: a key too many": Fault(
        ROWS, "if (key >= ends[m][Rows::slot(i)])", "if (key > ends[m][Rows::slot(i)])", "rows"
    ),
    "many rows: only the last tile is masked": Fault(
        ROWS, "params.causal ? params.queries.by - 1 : 0); {", "0); {", "rows"
    ),
    "many rows: all see what the last query sees": Fault(
        ROWS, "params.queries.by - 1 - query", "0 * query", "rows"
    ),
    "many rows: values are not rescaled": Fault(
        ROWS, "value *= factors[m][Rows::slot(i)];", "(void)factors, (void)m;", "rows"
    ),
    "many rows: sums are not rescaled": Fault(
        ROWS, "of[m].rescale(factors[m]);", "(void)factors;", "rows"
    ),
    "many rows: a negative scale for a positive one": Fault(
        ROWS,
        "const float before = scale > 0.0f ? 1.0f : scale;",
        "const float before = 1.0f;",
        "rows",
    ),
    "many rows: totals read before they are there": Fault(
        ROWS, "softmax.tell(storage.totals); sync_block();", "softmax.tell(storage.totals);", "rows"
    ),
    "many rows: a chunk goes on with the maximum of the one before": Fault(
        ROWS,
        "softmax.restart(); values.restart(); chunk_end",
        "values.restart(); chunk_end",
        "many rows, who computes",
    ),
    "the queries of the task before": Fault(
        SOURCE, "if (queries == current) return;", "return;", "single chunks"
    ),
    "queries loaded over those that are used": Fault(
        SOURCE, "number < current + kQuerySlots", "number < current + 5", "single chunks"
    ),
    "the pages and keys of the task before": Fault(
        SOURCE, "source.begin(params, task); key = task.first;", "key = task.first;", "who computes"
    ),
    "a task twice": Fault(TASK, "index += int(gridDim.x);", "index += 1;", "counters"),
    "rows see what those of the task before saw": Fault(
        KERNEL, "softmax.begin(params, task); results.begin();", "results.begin();", "who computes"
    ),
    "chunks counted from the task before": Fault(
        KERNEL,
        "softmax.begin(params, task); results.begin();",
        "softmax.begin(params, task);",
        "who computes",
    ),
    "many rows: rows see what those of the task before saw": Fault(
        ROWS,
        "softmax.begin(params, task); results.begin();",
        "results.begin();",
        "many rows, who computes",
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
    yield "padded rows", *problem(1, 2, 1, 1, 70, 72, layout="padded")


def _on_host(test, *args):
    return lambda: test(host.current(), *args)


def _who_computes(chunks_per_block: int, rows: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        test = properties.test_who_computes_changes_no_bit
        test(host.current(), chunks_per_block, rows, monkeypatch)


def _counters() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        properties.test_the_counters_are_zero_again(monkeypatch)


CHECKS = {
    "any batch": _on_host(properties.test_a_sequence_has_the_same_bits_in_any_batch),
    "who computes": lambda: _who_computes(8, 16),
    "single chunks": lambda: _who_computes(1, 16),
    "many rows, who computes": lambda: _who_computes(8, 64),
    "clamped": _on_host(properties.test_lengths_and_tables_of_the_device_are_clamped),
    "large caches": properties.test_caches_of_more_than_2_to_the_32_bytes,
    "many chunks": _on_host(properties.test_chunks_grow_with_the_length, 64 * 10),
    "counters": _counters,
    "infinite value": _on_host(properties.test_an_infinite_value_is_one_in_the_result),
    "small weights": _on_host(properties.test_small_weights_are_not_lost),
}


def test_nothing_fails_without_a_fault():
    assert first_failure(_problems, CHECKS) is None


@pytest.mark.faults
@pytest.mark.parametrize("name", FAULTS)
def test_caught(name, tmp_path_factory):
    fault = FAULTS[name]
    # Memory that is overwritten may end the process first.
    assert caught_by(fault, tmp_path_factory, _problems, CHECKS) in (fault.caught, "a crash")
