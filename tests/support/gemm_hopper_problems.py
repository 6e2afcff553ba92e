"""Problems, configs and checks of Hopper's products."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cupykern import OPS, check, dtypes
from cupykern.gemm import sm90_heuristic
from cupykern.gemm.decode_first import DecodeFirst
from cupykern.gemm.gemm_task import GemmTask
from cupykern.gemm.product import K_MAJOR
from cupykern.gemm.sm90_dual_config import Sm90DualGemmConfig, Sm90MixedDualGemmConfig
from cupykern.gemm.sm90_gemm_config import Sm90Fp8GemmConfig, Sm90GemmConfig, Sm90MixedGemmConfig
from cupykern.gemm.sm90_heuristic import Sm90AnyConfig
from cupykern.gemm.sm90_logits_config import Sm90LogitsConfig
from cupykern.gemm.sm90_policies import Cooperative, Multicast, PingPong, SlicedK, SplitK
from cupykern.gemm.split_plan import SplitKWorkspace
from cupykern.ops.dequant_softmax import LogitsProblem
from cupykern.ops.problems.dual_gemm import DualProblem
from cupykern.ops.problems.products import FORMULAS, NVFP4, MatmulProblem
from cupykern.ops.problems.scaled import ScaledProblem
from cupykern.targets import Target
from cupykern.targets.limits import device


def task(**changes) -> GemmTask:
    sizes = GemmTask(1, 4096, 4096, 4096, dtypes.float16, dtypes.float16, K_MAJOR, K_MAJOR)
    return replace(sizes, **changes)


OF_FP8 = {"a": dtypes.float8_e4m3fn, "b": dtypes.float8_e4m3fn}


OF_MIXED = {"b": dtypes.float8_e4m3fn}


OP, SCALED = (next(op for op in OPS if op.name == name) for name in ("matmul", "scaled_mm"))


CHOSEN = (
    Sm90GemmConfig(128, 256, 64, 4),
    *(
        tile.config
        for tile in sm90_heuristic.table("16-bit")
        if tile.config.refusal(task(epilogue="general"), device("sm_90a")) is None
    ),
)
CONFIGS = (
    *CHOSEN,
    Sm90GemmConfig(256, 128, 64, 2),
    Sm90GemmConfig(128, 128, 64, 3, cluster=Multicast(2)),
    Sm90GemmConfig(64, 128, 64, 4, PingPong(), swap_ab=True),
)


# By dtype and layouts, which make variants: all configs have the first group, and one of the others
# that they can compute.
PROBLEMS = (
    MatmulProblem(136, 264, 192, layout_b="F", kind="exact"),
    MatmulProblem(392, 264, 640, layout_b="F", out_dtype="bfloat16", alpha=-3.7),
    MatmulProblem(
        *(200, 328, 200), layout_b="F", bias=(328,), residual=(200, 328), activation="gelu",
        alpha=0.125,
    ),
    MatmulProblem(
        *(200, 264, 136), layout_b="F", batch_a=(2,), residual=(2, 200, 264),
        activation="gelu_tanh",
        out_dtype="bfloat16",
    ),
    MatmulProblem(1, 8, 8, layout_b="F"),
    MatmulProblem(300, 257, 136, layout_b="F", out_dtype="bfloat16"),
    MatmulProblem(64, 64, 128, layout_b="F", kind="special"),
)  # fmt: skip


OTHERS = (
    (
        MatmulProblem(136, 264, 520, "bfloat16", out_dtype="float32"),
        MatmulProblem(72, 136, 136, "bfloat16", batch_a=(2, 1), batch_b=(3,), residual=(72, 136)),
        MatmulProblem(65, 136, 64, "bfloat16", batch_a=(3,), bias=(65, 1), activation="silu"),
        MatmulProblem(136, 264, 640, "bfloat16", batch_a=(2,), batch_b=(2,)),
    ),
    (MatmulProblem(136, 264, 192, layout_a="F", kind="same_sign"),),
    (MatmulProblem(136, 264, 72, "bfloat16", layout_a="F", layout_b="F"),),
)


# Few rows, with swap-AB.
FEW_ROWS = (
    (
        MatmulProblem(16, 264, 200, layout_b="F", kind="exact"),
        MatmulProblem(1, 136, 520, layout_b="F", bias=(136,), activation="gelu"),
        MatmulProblem(40, 136, 136, layout_b="F", bias=(40, 1), residual=(40, 136)),
        MatmulProblem(20, 137, 136, layout_b="F", out_dtype="float32"),
        MatmulProblem(17, 264, 400, "bfloat16", batch_a=(2,), batch_b=(2,)),
    ),
    (
        Sm90GemmConfig(16, 64, 64, 4, SlicedK(), swap_ab=True),
        Sm90GemmConfig(32, 64, 64, 4, SlicedK(), Multicast(2), swap_ab=True),
    ),
)


E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def fp8(m: int, n: int, k: int, scales: str, b: str = E4M3, **options) -> ScaledProblem:
    return ScaledProblem(MatmulProblem(m, n, k, E4M3, b, layout_b="F", **options), scales)


# (problems, configs), each for each.
FP8 = (
    (
        fp8(136, 264, 656, "blocks"),
        fp8(72, 136, 784, "blocks", batch_a=(2,), kind="same_sign", out_dtype="float32"),
        fp8(136, 264, 272, "rows", bias=(264,), activation="gelu"),
        fp8(1, 16, 16, "tensor"),
        MatmulProblem(392, 136, 272, E4M3, layout_b="F", residual=(392, 136)),
        fp8(136, 72, 144, "none", kind="exact"),
        fp8(64, 64, 128, "none", kind="special"),
    ),
    (
        Sm90Fp8GemmConfig(128, 128, 4),
        Sm90Fp8GemmConfig(128, 128, 3, cluster=SplitK(2)),
        Sm90Fp8GemmConfig(64, 64, 4, SlicedK()),
        Sm90Fp8GemmConfig(16, 64, 4, SlicedK(), swap_ab=True),
        Sm90Fp8GemmConfig(192, 128, 4, Cooperative(3)),
    ),
)


# Halves of the columns, for the short epilogue alone.
HALVES = (
    (
        fp8(264, 200, 656, "rows", bias=(200,)),
        fp8(72, 264, 144, "tensor", batch_a=(2,), kind="same_sign", out_dtype="bfloat16"),
        fp8(136, 72, 272, "none", kind="exact"),
        fp8(1, 16, 16, "tensor"),
        fp8(64, 64, 128, "none", kind="special"),
    ),
    (Sm90Fp8GemmConfig(128, 176, 2, cluster=Multicast(2)), Sm90Fp8GemmConfig(128, 192, 3)),
)


# Accumulators of any multiple of 8 columns, for results that TMA stores, and residuals (BF16) that
# it loads.
WIDTHS = (
    (
        (
            MatmulProblem(264, 264, 640, layout_b="F", out_dtype="bfloat16", alpha=-3.7),
            MatmulProblem(300, 264, 136, layout_b="F", bias=(264,), activation="gelu"),
            MatmulProblem(136, 136, 72, layout_b="F", batch_a=(2,), bias=(136,), activation="silu"),
            MatmulProblem(264, 264, 200, "bfloat16", layout_b="F", residual=(264, 264)),
            MatmulProblem(
                *(136, 136, 72, "bfloat16"), layout_b="F", residual=(136, 136), activation="silu"
            ),
            MatmulProblem(64, 64, 128, layout_b="F", kind="special"),
        ),
        (
            Sm90GemmConfig(152, 128, 64, 3, PingPong(), swap_ab=True),
            Sm90GemmConfig(128, 192, 64, 4, PingPong()),
            Sm90GemmConfig(72, 64, 64, 4, PingPong(), swap_ab=True),
            Sm90GemmConfig(24, 64, 128, 4, SlicedK(), swap_ab=True),
            Sm90GemmConfig(104, 64, 64, 4, Cooperative(1), swap_ab=True),
            Sm90GemmConfig(56, 128, 64, 3, swap_ab=True),
            Sm90GemmConfig(256, 104, 64, 2),
        ),
    ),
    (
        (
            fp8(264, 200, 656, "rows", bias=(200,)),
            fp8(72, 264, 144, "tensor", batch_a=(2,), kind="same_sign", out_dtype="bfloat16"),
            fp8(136, 72, 272, "none", kind="exact"),
            fp8(20, 72, 144, "rows"),
            MatmulProblem(
                *(200, 264, 400, E4M3), layout_b="F", residual=(200, 264), out_dtype="bfloat16"
            ),
        ),
        (
            Sm90Fp8GemmConfig(56, 128, 3, swap_ab=True),
            Sm90Fp8GemmConfig(104, 128, 3, swap_ab=True),
            Sm90Fp8GemmConfig(72, 64, 4, Cooperative(1), swap_ab=True),
            Sm90Fp8GemmConfig(128, 80, 3),
            Sm90Fp8GemmConfig(16, 64, 4, SlicedK(), swap_ab=True),
        ),
    ),
    (
        (
            ScaledProblem(
                MatmulProblem(300, 144, 272, "float16", E4M3, layout_b="F", bias=(144,)), "rows"
            ),
            MatmulProblem(
                *(136, 272, 208, "bfloat16", "int8"), layout_b="C", bias=(272,), activation="gelu"
            ),
            MatmulProblem(*(264, 144, 272, "bfloat16", E4M3), layout_b="F", residual=(264, 144)),
            MatmulProblem(64, 64, 128, "float16", E4M3, layout_b="F", kind="special"),
        ),
        (
            Sm90MixedGemmConfig(152, 128, 64, 3),
            Sm90MixedGemmConfig(40, 128, 64, 4),
            Sm90MixedGemmConfig(248, 128, 64, 2),
            Sm90MixedGemmConfig(88, 64, 128, 3, Cooperative(1)),
        ),
    ),
)


INT8 = (
    (
        MatmulProblem(136, 264, 400, "int8", layout_b="F"),
        MatmulProblem(72, 136, 144, "int8", layout_b="F", bias=(136,), out_dtype="float16"),
        ScaledProblem(MatmulProblem(65, 264, 1040, "int8", layout_b="F"), "rows"),
        MatmulProblem(
            *(72, 136, 144, "int8"),
            layout_b="F",
            residual=(72, 136),
            out_dtype="bfloat16",
        ),
    ),
    (Sm90GemmConfig(128, 64, 128, 4), Sm90GemmConfig(64, 64, 128, 4, SlicedK())),
)


def mixed(m: int, n: int, k: int, b: str = E4M3, a: str = "float16", **options) -> MatmulProblem:
    return MatmulProblem(m, n, k, a, b, **options)


# b (N, K) in memory; (K, N); of int8 in bfloat16.
MIXED = (
    (
        mixed(136, 272, 208, layout_b="F", kind="exact"),
        mixed(72, 136, 144, layout_b="F", bias=(72, 136), residual=(72, 136), activation="silu"),
        ScaledProblem(mixed(300, 144, 272, layout_b="F", bias=(300, 1)), "rows"),
        mixed(72, 144, 400, layout_b="C", batch_a=(2, 1), batch_b=(3,), bias=(144,)),
        mixed(136, 272, 208, layout_b="C", out_dtype="float32"),
        mixed(64, 64, 128, layout_b="C", kind="special"),
        mixed(1, 16, 16, "int8", "bfloat16", layout_b="F"),
        mixed(392, 144, 272, a="bfloat16", layout_b="F", residual=(392, 144), activation="relu"),
        mixed(72, 272, 144, a="bfloat16", layout_b="C", batch_a=(3,), residual=(3, 72, 272)),
        ScaledProblem(mixed(65, 144, 272, "int8", "bfloat16", layout_b="F"), "rows"),
    ),
    (
        Sm90MixedGemmConfig(256, 128, 64, 3),
        Sm90MixedGemmConfig(128, 128, 128, 2, cluster=SplitK(2)),
        Sm90MixedGemmConfig(64, 64, 128, 4, SlicedK(), Multicast(2)),
        Sm90MixedGemmConfig(32, 64, 256, 4, SlicedK()),
        Sm90MixedGemmConfig(16, 64, 128, 4, SlicedK()),
        Sm90MixedGemmConfig(64, 64, 128, 3, Cooperative(1)),
    ),
)


# Block scales of weights, and of a: of more stages than a warp has lanes, and of one.
MIXED_BLOCKS = (
    (
        ScaledProblem(mixed(170, 272, 656, a="bfloat16", layout_b="F", bias=(272,)), "blocks of b"),
        ScaledProblem(
            mixed(72, 392, 400, layout_b="F", batch_a=(2,), out_dtype="float32"), "blocks"
        ),
        ScaledProblem(mixed(24, 72, 8592, layout_b="F", kind="same_sign"), "blocks of b"),
        ScaledProblem(mixed(65, 144, 272, "int8", "bfloat16", layout_b="C"), "blocks of b"),
        ScaledProblem(mixed(1, 136, 144, "int8", layout_b="F", activation="silu"), "blocks"),
        ScaledProblem(mixed(16, 16, 112, layout_b="F"), "tensor"),
    ),
    (
        Sm90MixedGemmConfig(128, 128, 128, 2),
        Sm90MixedGemmConfig(64, 128, 128, 3, cluster=SplitK(2)),
        Sm90MixedGemmConfig(64, 64, 128, 4, SlicedK()),
        Sm90MixedGemmConfig(128, 128, 128, 2, cluster=Multicast(2)),
        Sm90MixedGemmConfig(64, 64, 128, 3, Cooperative(1)),
    ),
)


def fp4(m: int, n: int, k: int, **options) -> ScaledProblem:
    return ScaledProblem(mixed(m, n, k, NVFP4, layout_b="F", **options), "tensor")


FP4 = (
    (
        fp4(16, 136, 1056),
        fp4(40, 144, 288, bias=(144,), kind="exact"),
        fp4(130, 264, 2080, out_dtype="float32", activation="silu"),
    ),
    (
        Sm90MixedGemmConfig(16, 64, 256, 4, SlicedK()),
        Sm90MixedGemmConfig(128, 128, 128, 2, cluster=SplitK(2)),
        Sm90MixedGemmConfig(64, 128, 256, 2, cluster=SplitK(2)),
        Sm90MixedGemmConfig(64, 64, 128, 3, Cooperative(1)),
    ),
)

WIDTHS += (
    (
        (fp4(180, 72, 544), mixed(100, 136, 400, a="bfloat16", layout_b="F", bias=(136,))),
        (
            Sm90MixedGemmConfig(176, 128, 128, 2, cluster=SplitK(2)),
            Sm90MixedGemmConfig(96, 128, 128, 2, cluster=SplitK(4)),
        ),
    ),
    (
        (fp4(40, 144, 288, bias=(144,), kind="exact"), fp4(300, 264, 544, activation="silu")),
        (Sm90MixedGemmConfig(152, 128, 128, 2), Sm90MixedGemmConfig(72, 128, 128, 3)),
    ),
    (
        (MIXED_BLOCKS[0][0], ScaledProblem(mixed(300, 136, 272, layout_b="F"), "blocks")),
        (Sm90MixedGemmConfig(160, 128, 128, 2), Sm90MixedGemmConfig(72, 128, 128, 3)),
    ),
)


# Rows of tiles of more than one group (gemm/work_tile.cuh), the last one shorter.
MANY_GROUPS = (
    (
        MatmulProblem(2437, 136, 64, layout_b="F"),
        MatmulProblem(2240, 72, 64, layout_b="F", batch_a=(2,)),
    ),
    (
        Sm90GemmConfig(128, 64, 64, 2, Cooperative(1), swap_ab=True),
        Sm90GemmConfig(64, 64, 64, 4, SlicedK()),
    ),
)


# k in parts that another launch adds.
SPLITS = (
    (
        MatmulProblem(136, 264, 512, layout_b="F", kind="exact"),
        MatmulProblem(
            *(20, 136, 768, "bfloat16"), bias=(136,), residual=(20, 136), activation="silu",
            alpha=-3.7,
        ),
        MatmulProblem(
            328, 132, 256, layout_a="F", layout_b="F", bias=(328, 1), out_dtype="float32"
        ),
        MatmulProblem(136, 72, 512, "bfloat16", batch_a=(1,), layout_a="F"),
        MatmulProblem(64, 64, 256, layout_b="F", kind="special"),
        MatmulProblem(72, 140, 648, layout_b="F", kind="exact"),  # 11 stages, the last of 8
    ),
    (
        SplitKWorkspace(Sm90GemmConfig(128, 64, 64, 8), 4),
        SplitKWorkspace(Sm90GemmConfig(128, 128, 64, 6, cluster=Multicast(2)), 2),
    ),
)  # fmt: skip
# Splits of unequal length, and tiles whose columns no other epilogue of FP32 has.
UNEVEN_SPLITS = (
    (
        MatmulProblem(100, 140, 648, layout_b="F", kind="exact"),
        MatmulProblem(333, 132, 456, "bfloat16", layout_b="F", bias=(132,), activation="gelu"),
        MatmulProblem(20, 68, 1096, layout_b="F", residual=(20, 68)),
    ),
    (
        SplitKWorkspace(Sm90GemmConfig(88, 128, 64, 6, PingPong(), swap_ab=True), 4),
        SplitKWorkspace(Sm90GemmConfig(128, 144, 64, 4, PingPong()), 3),
        SplitKWorkspace(Sm90GemmConfig(136, 64, 64, 6, Cooperative(1), swap_ab=True), 4),
    ),
)

FP8_SPLITS = (
    (
        fp8(140, 136, 512, "rows", bias=(136,)),
        fp8(72, 68, 512, "tensor", out_dtype="float32"),
        fp8(24, 136, 1024, "blocks", bias=(136,), activation="silu"),
        fp8(60, 72, 640, "blocks"),
    ),
    (
        SplitKWorkspace(Sm90Fp8GemmConfig(128, 128, 5), 4),
        SplitKWorkspace(Sm90Fp8GemmConfig(16, 64, 18, SlicedK(), swap_ab=True), 2),
        SplitKWorkspace(Sm90Fp8GemmConfig(56, 64, 9, Cooperative(1), swap_ab=True), 3),
    ),
)
MIXED_SPLITS = (
    (
        ScaledProblem(mixed(130, 136, 512, layout_b="F"), "rows"),
        mixed(72, 144, 512, "int8", "bfloat16", layout_b="C", residual=(72, 144)),
        ScaledProblem(mixed(40, 264, 1024, a="bfloat16", layout_b="F", bias=(264,)), "blocks of b"),
        ScaledProblem(mixed(24, 136, 512, layout_b="F", out_dtype="float32"), "blocks"),
        ScaledProblem(mixed(100, 136, 656, layout_b="F"), "rows"),
    ),
    (
        SplitKWorkspace(Sm90MixedGemmConfig(128, 128, 128, 3), 2),
        SplitKWorkspace(Sm90MixedGemmConfig(64, 64, 128, 8, SlicedK()), 4),
        SplitKWorkspace(Sm90MixedGemmConfig(72, 128, 128, 3), 3),
    ),
)
FP4_SPLITS = (
    (
        fp4(40, 136, 1024, bias=(136,)),
        ScaledProblem(MatmulProblem(20, 72, 512, NVFP4, NVFP4, layout_b="F"), "tensor"),
        fp4(90, 136, 640),
    ),
    (
        SplitKWorkspace(Sm90MixedGemmConfig(64, 64, 256, 4, SlicedK()), 2),
        SplitKWorkspace(Sm90MixedGemmConfig(80, 128, 128, 4), 3),
    ),
)


def compute(target: Target, problem: MatmulProblem | ScaledProblem, config: Sm90AnyConfig) -> bytes:
    """Checks the output against the bound, and returns its bytes."""
    op = OP if isinstance(problem, MatmulProblem) else SCALED
    call = op.inputs(problem, 3, target.xp)
    y = op.run(*call.args, **call.kwargs, config=config)
    references = op.reference(*call.args, **call.kwargs)
    bounds = op.bound(*call.args, **call.kwargs, reference=references)
    comparison = check.compare((y,), references, bounds)
    # What is expected of FP8 on the host is too small for scales of blocks and numbers of one sign.
    in_blocks = op is SCALED and problem.scales.startswith("blocks")
    known = in_blocks and problem.product.kind == "same_sign"
    assert comparison.ok or (known and comparison.within_bound), f"{problem!r}: {comparison}"
    return y.tobytes()


def check_parts_of_k(splits: int) -> None:
    """Every part counts once: products of ones, which are 4^i in the i-th of up to 12 parts."""
    k = 64 * splits
    a, b = np.ones((4, k), np.float16), np.ones((64, k), np.float16)
    sizes = 4.0 ** (np.arange(splits) % 12)
    a *= np.repeat(np.exp2(np.arange(splits) % 12), 64).astype(np.float16)
    b *= np.repeat(np.exp2(np.arange(splits) % 12), 64).astype(np.float16)
    y = OP.run(
        a, b.T, out_dtype="float32", config=SplitKWorkspace(Sm90GemmConfig(128, 64, 64, 8), splits)
    )
    np.testing.assert_array_equal(y, np.full((4, 64), 64 * sizes.sum()))


def check_fp8_integers(target: Target, config, m: int, n: int, k: int) -> None:
    """Raises AssertionError unless FP8 products of integers are exact."""
    rng = np.random.default_rng(1)
    for least in (-8, 7):
        a, b = (rng.integers(least, 9, shape).astype(np.float32) for shape in ((m, k), (n, k)))
        codes = [target.xp.asarray(x.astype(dtypes.float8_e4m3fn).view(np.uint8)) for x in (a, b)]
        fp8_a, fp8_b = (x.view(dtypes.float8_e4m3fn) for x in codes)
        y = SCALED.run(fp8_a, fp8_b.T, out_dtype="float32", config=config)
        assert bool((target.xp.asarray(a @ b.T) == y).all())


# Few: a checker's build of a variant takes seconds.
CHECKED = (
    (FP8[0][0], FP8[1][1]),
    (HALVES[0][0], HALVES[1][0]),
    (MIXED[0][3], MIXED[1][1]),
    (WIDTHS[0][0][1], WIDTHS[0][1][0]),
    (WIDTHS[1][0][0], WIDTHS[1][1][0]),
    (PROBLEMS[2], CONFIGS[0]),
    (PROBLEMS[1], CONFIGS[2]),
    (PROBLEMS[3], CONFIGS[0]),
    (MIXED[0][-2], MIXED[1][0]),
    (MIXED_BLOCKS[0][0], MIXED_BLOCKS[1][0]),
    (MIXED_BLOCKS[0][1], MIXED_BLOCKS[1][2]),
    (MatmulProblem(200, 257, 192, layout_b="F", epilogue=FORMULAS[1]), CONFIGS[0]),
    (MatmulProblem(20, 136, 136, layout_b="F", epilogue=FORMULAS[0]), FEW_ROWS[1][1]),
)


# Of other ops: logits, NVFP4 decoded in registers and before, 8-bit weights.
OTHER_OPS = (
    (
        "dequant_softmax", LogitsProblem(70, 272, 272, layout_w="F"),
        Sm90LogitsConfig(64, 128, 128, 3)
    ),
    (
        "dual_gemm_silu", DualProblem(70, 72, 288, NVFP4, NVFP4),
        Sm90MixedDualGemmConfig(64, 128, 128, 3)
    ),
    (
        "dual_gemm_silu", DualProblem(70, 200, 272, "bfloat16", "int8", scales="rows"),
        Sm90MixedDualGemmConfig(32, 128, 128, 2)
    ),
    (
        "dual_gemm_silu", DualProblem(70, 75, 144, "float16", E4M3, scales="rows"),
        Sm90MixedDualGemmConfig(48, 256, 64, 3, Cooperative(4))
    ),
    (
        "dual_gemm_silu",
        DualProblem(70, 200, 400, "bfloat16", E4M3, scales="blocks of b"),
        Sm90MixedDualGemmConfig(32, 192, 128, 2, Cooperative(3))
    ),
    (
        "dual_gemm_silu", DualProblem(70, 72, 80, NVFP4, NVFP4),
        DecodeFirst(Sm90DualGemmConfig(128, 128, 64, 3))
    ),
)  # fmt: skip
