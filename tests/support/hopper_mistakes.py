"""Mistakes in a kernel of Hopper's instructions, each with what reports it."""

from __future__ import annotations

_TOO_LATE = "changed while wgmma read it"


MISTAKES = {
    # name: (old, new, what the report says; None: the result is wrong)
    "no wait for the tile": (
        "        s.full[stage].wait(parity);\n",
        "",
        "0 of 2 arr|in one phase|" + _TOO_LATE,
    ),
    "the other parity of a full stage": (
        "full[stage].wait(parity)",
        "full[stage].wait(parity ^ 1)",
        "",
    ),
    "the other parity of an empty stage": (
        "empty[stage].wait(parity ^ 1)",
        "empty[stage].wait(parity)",
        r"word.cu:\d+: Barrier::wait: 1 thread \(287\) of block \d wait for parity 0 of the "
        r"Barrier "
        r"of word.cu:\d+: 0 of 2 arrivals",
    ),
    "too many bytes expected": (
        "sizeof(s.b[0]));",
        "sizeof(s.b[0]) + 16);",
        r"word.cu:\d+: Barrier::wait: 256 threads \(0-255\) of block \d wait for parity 0 of the "
        r"Barrier of word.cu:\d+: 1 of 1 arrivals, 16 bytes are missing",
    ),
    "too few bytes expected": (
        "sizeof(s.b[0]));",
        "sizeof(s.b[0]) - 16);",
        "1 of 1 arrivals, 16 bytes more than expected",
    ),
    "one operand's bytes forgotten": (
        " + sizeof(s.b[0]));",
        ");",
        "bytes more than expected|" + _TOO_LATE,
    ),
    "no wait for an empty stage": (
        "                s.empty[stage].wait(parity ^ 1);\n",
        "",
        "in one phase|" + _TOO_LATE,
    ),
    "a stage released too early": (
        "        wgmma_wait<1>();\n        if (i > 0 && thread == 0) s.empty[(i - 1) % kStages]",
        "        if (thread == 0) s.empty[stage]",
        r"word.cu:\d+: shared memory changed while wgmma read it",
    ),
    "the stage under way released": (
        "if (i > 0 && thread == 0) s.empty[(i - 1) % kStages]",
        "if (thread == 0) s.empty[stage]",
        _TOO_LATE,
    ),
    "no wait for the last product": ("    wgmma_wait<0>(d);\n", "", "without wgmma_wait"),
    "no fence before wgmma": ("        wgmma_fence(d);\n", "", "without wgmma_fence"),
    "a stage is never released": (
        "        if (i > 0 && thread == 0) s.empty[(i - 1) % kStages].arrive();\n",
        "",
        "0 of 2 arrivals",
    ),
    "one more arrival counted": ("s.empty[i].init(2)", "s.empty[i].init(3)", "2 of 3 arrivals"),
    "one arrival too few counted": ("s.empty[i].init(2)", "s.empty[i].init(1)", ""),
    "every thread arrives": ("i > 0 && thread == 0", "i > 0", "in one phase|arrivals|" + _TOO_LATE),
    "store before all have written": (
        "    named_barrier(1 + warpgroup, 128);\n",
        "",
        "changed while tma_store read it|without fence_async_proxy",
    ),
    "no fence before the store": (
        "    fence_async_proxy();\n",
        "",
        r"word.cu:\d+: tma_store reads what store_matrix has stored without fence_async_proxy",
    ),
    "left before the store has read": (
        "        tma_store_wait_read<0>();\n",
        "",
        "left the kernel before tma_store had read",
    ),
    "store not committed": (
        "        tma_store_commit();\n",
        "",
        "left the kernel before tma_store",
    ),
    "another swizzle": ("<128>(s.b", "<64>(s.b", None),
    "another stride": ("s.b[stage], 16, 1024)", "s.b[stage], 16, 512)", None),
    "tiles past the end": ("s.b[stage], 16, 1024)", "s.b[stage], 16, 16384)", "past the dynamic"),
    "advance by too little": ("advance(b, 32 * k)", "advance(b, 16 * k)", None),
    "coordinates in the wrong order": ("{i * kTileK, col}", "{col, i * kTileK}", None),
    "a coordinate too many": ("{i * kTileK, col}", "{i * kTileK, col, 0}", "as many coordinates"),
}
