"""Planted faults in attention over paged caches, each of which a check must catch."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from functools import partial

import numpy as np
from attention_hopper_checks import compare
from planted import Fault, fault_tests

from cupykern import attention_varlen, check, dtypes, inputs
from cupykern.attention.attention_hopper import AttentionHopperConfig
from cupykern.ops.attention_varlen import OP
from cupykern.ops.problems.attention_varlen import VarlenProblem
from cupykern.targets import host

PORTABLE, HOPPER = "attention/kv.cuh", "attention/kv_sm90.cuh"
CONFIG = AttentionHopperConfig(128, 128)

FAULTS = {
    "the pages of the first sequence": Fault(
        PORTABLE, "kv.block_table + head.batch * kv.pages.table_stride", "kv.block_table", "pages"
    ),
    "one page for all keys of a thread": Fault(
        PORTABLE, "kKeepsPages ? numbers[i] :", "kKeepsPages ? numbers[0] :", "pages"
    ),
    "pages that are not there": Fault(
        PORTABLE, "clamp_page(table[key], pages.last)", "table[key]", "wild tables"
    ),
    "what lies after the last key": Fault(
        PORTABLE, "from.exists && has(i, num_rows)", "from.exists", "a page of NaN"
    ),
    "the first row of each page": Fault(
        PORTABLE, "int64_t(in_page) * from.row_stride", "0", "pages"
    ),
    "an offset of a page in 32 bits": Fault(
        PORTABLE, "page * from.page_stride +", "int(page * from.page_stride) +",
        "large offsets"
    ),
    "all keys that a table has room for": Fault(
        "attention/work_tile.cuh", "h.sk = clamp_index(seq_lens[h.batch], 0, params.sk);",
        "h.sk = int(params.sk);", "pages"
    ),
    "queries of the next sequence": Fault(
        "attention/work_tile.cuh",
        "const int q_end = clamp_index(cu_seqlens_q[h.batch + 1], h.q_first, params.total_q); "
        "h.sq = clamp_index(q_end - h.q_first, 0, params.sq); h.sk = clamp_index(seq_lens",
        "h.sq = clamp_index(params.total_q - h.q_first, 0, params.sq); h.sk = clamp_index(seq_lens",
        "pages",
    ),
    "TMA: the pages of the first sequence": Fault(
        HOPPER, "block_table + head.batch * pages.table_stride", "block_table", "hopper"
    ),
    "TMA: one page for all boxes": Fault(
        HOPPER, "table[page], pages.last)", "table[0], pages.last)", "hopper"
    ),
    "TMA: what lies after the last key": Fault(
        HOPPER, "number * rows_of_page, length}", "number * rows_of_page, pages.size.divisor}",
        "hopper"
    ),
    "TMA: the first rows of a page": Fault(
        HOPPER, "{in_page, head.kv_head", "{0, head.kv_head", "hopper, large pages"
    ),
    "TMA: values where keys are": Fault(
        HOPPER, "load(to, map, full, head, key, pages.v_rows);",
        "load(to, map, full, head, key, pages.k_rows);", "other strides of values"
    ),
    "TMA: pages that are not there": Fault(
        HOPPER, "clamp_page(table[page], pages.last)", "table[page]", "hopper, wild tables"
    ),
    "TMA: a box beside its rows": Fault(
        "attention/storage_sm90.cuh", "bytes + i * kBoxBytes + row * kRowBytes, map",
        "bytes + i * kBoxBytes, map", "hopper"
    ),
}  # fmt: skip

MIX = ((40, 170), (65, 65), (0, 30), (1, 100), (50, 20))


def _problems() -> Iterator[tuple[str, object, object]]:
    for page, layout in ((16, "nhd"), (24, "hnd")):
        options = {"causal": True, "lse": True, "page": page, "layout": layout}
        yield "pages", OP, VarlenProblem(MIX, 2, 2, 16, 24, **options)


def _check_hopper(problem: VarlenProblem) -> None:
    if host.current().warp_size != 32:
        return
    try:
        assert compare(host.current(), problem, CONFIG).ok
    except check.Violation as violation:
        raise AssertionError from violation


def _normal(*shape: int) -> np.ndarray:
    return inputs.values("normal", shape, dtypes.float16, sum(shape))


def _compare(q, k, v, cu, config=None, **kwargs) -> None:
    kwargs = {"max_seqlen_q": len(q), **kwargs}
    references = OP.reference(q, k, v, cu, **kwargs)
    bounds = OP.bound(q, k, v, cu, reference=references, **kwargs)
    out = attention_varlen(q, k, v, cu, **kwargs, config=config)
    assert check.compare((out,), references, bounds).ok


def _check_wild_tables(config=None) -> None:
    """As a GPU's, whose contents nobody checks."""
    module = sys.modules["cupykern.ops.attention_varlen"]
    before, module.check_pages = module.check_pages, lambda *_: None
    try:
        if config is None or host.current().warp_size == 32:
            k = _normal(5, 1, 16, 16)
            table = np.array([[-(2**31), -1, 2**31 - 1, 5]], np.int32)
            lens, cu = np.array([60], np.int32), np.array([0, 20], np.int32)
            _compare(_normal(20, 1, 16), k, k, cu, config, block_table=table, seq_lens_k=lens)
    finally:
        module.check_pages = before


def _check_page_of_nan() -> None:
    """The first one, of no sequence."""
    x = _normal(3, 1, 16, 16)
    x[0] = np.nan
    table, lens = np.array([[2, 1]], np.int32), np.array([20], np.int32)
    cu = np.array([0, 20], np.int32)
    _compare(_normal(20, 1, 16), x, x, cu, block_table=table, seq_lens_k=lens)


def _check_large_offsets() -> None:
    stride, flags = 2**32 + 64, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = np.frombuffer(mmap.mmap(-1, 3 * stride, flags=flags), np.float16)
    x = _normal(3, 1, 16, 16)
    v = np.lib.stride_tricks.as_strided(memory, x.shape, (stride, *x.strides[1:]))
    v[...] = x
    table, lens = np.array([[2, 0, 1]], np.int32), np.array([40], np.int32)
    cu = np.array([0, 20], np.int32)
    _compare(_normal(20, 1, 16), x, v, cu, block_table=table, seq_lens_k=lens)


def _check_other_strides() -> None:
    """Rows of a page and of its heads, in another order in k than in v."""
    if host.current().warp_size != 32:
        return
    k, v = _normal(3, 2, 16, 16), _normal(3, 16, 2, 16).swapaxes(1, 2)
    table, lens = np.array([[2, 0, 1]], np.int32), np.array([40], np.int32)
    cu = np.array([0, 20], np.int32)
    _compare(_normal(20, 2, 16), k, v, cu, CONFIG, block_table=table, seq_lens_k=lens)


CHECKS = {
    "hopper": partial(
        _check_hopper, VarlenProblem(MIX, 2, 2, 64, 40, causal=True, lse=True, page=32)
    ),
    "hopper, large pages": partial(
        _check_hopper, VarlenProblem(MIX, 2, 1, 64, 64, page=256, layout="nhd")
    ),
    "wild tables": _check_wild_tables,
    "a page of NaN": _check_page_of_nan,
    "hopper, wild tables": partial(_check_wild_tables, CONFIG),
    "large offsets": _check_large_offsets,
    "other strides of values": _check_other_strides,
}


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, _problems, CHECKS
)
