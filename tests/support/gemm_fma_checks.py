"""Configs and checks of the FP32 mainloop of multiply-adds."""

from __future__ import annotations

import mmap

import numpy as np
from products import MATMUL, compare

from cupykern.gemm.fma_config import FmaGemmConfig
from cupykern.ops.problems.products import MatmulProblem
from cupykern.targets import host

TILE = FmaGemmConfig(64, 32, 8, 8, 4, 3)
WIDE = FmaGemmConfig(64, 128, 16, 8, 16, 2)
SMALL = FmaGemmConfig(16, 128, 8, 4, 4, 4)  # fewer copies of a than threads
CONFIGS = (TILE, WIDE, SMALL)


def check_layouts(config: FmaGemmConfig = TILE) -> None:
    """Tails in all three sizes, k of several stages; vectors, elements along k and along m or n."""
    for m, n, k, layouts in (
        (68, 136, 53, "FC"),
        (67, 129, 53, "CF"),
        (67, 129, 21, "FC"),
        (5, 132, 40, "CC"),
    ):
        problem = MatmulProblem(
            *(m, n, k, "float32"), layout_a=layouts[0], layout_b=layouts[1], kind="same_sign"
        )
        check_of(problem, config)


def check_epilogue() -> None:
    """Each column with a bias of its own, each row with a residual; in more than one round."""
    for out_dtype in ("float16", "float32"):
        problem = MatmulProblem(
            70, 133, 20, "float32", alpha=-0.5, bias=(133,), residual=(70, 133),
            activation="gelu", out_dtype=out_dtype,
        )  # fmt: skip
        check_of(problem, WIDE)


def check_batch() -> None:
    problem = MatmulProblem(20, 36, 30, "float32", None, (3,), (), alpha=0.3)
    check_of(problem, SMALL)


def check_splits() -> None:
    """The last one shorter; columns that are no whole run."""
    for n in (36, 37):
        problem = MatmulProblem(40, n, 250, "float32", bias=(n,), kind="same_sign")
        check_of(problem, FmaGemmConfig(64, 32, 8, 8, 4, 3, splits=4))


def check_far_rows() -> None:
    """Two rows of each operand; nothing is mapped where a third one would be."""
    step, flags = 2**34, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = np.frombuffer(mmap.mmap(-1, step + 4096, flags=flags), np.float32)
    rows = np.lib.stride_tricks.as_strided(memory, (2, 24), (step, 4))
    rows[...] = np.random.default_rng(1).standard_normal(rows.shape)
    for a, b in ((rows, rows.T), (rows.T, rows)):
        assert compare(MATMUL, a, b, config=SMALL).ok


def check_of(problem: MatmulProblem, config: FmaGemmConfig) -> None:
    """Raises AssertionError."""
    call = MATMUL.inputs(problem, 1, host.current().xp)
    comparison = compare(MATMUL, *call.args, **call.kwargs, config=config)
    assert comparison.ok, f"{problem!r} {config}: {comparison}"
