"""Launches have as much dynamic shared memory as the kernels' structs take."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import editor
import pytest
from fake_gpu import FakeGpu, fake_gpu
from fake_machine import SIZE, FakeMachine

import cupykern
from cupykern import kernels
from cupykern.gemm.parts_config import PartsGemmConfig
from cupykern.gemm.portable_config import GemmConfig
from cupykern.gemm.split_float32 import SplitFloat32
from cupykern.kernels import Variant
from cupykern.op import RandomDraw
from cupykern.precisions import SPLITS
from cupykern.tools.history import FAMILIES
from cupykern.tools.history.sequences import draw_sequence

_SEQUENCES = 30  # of each function
_VARIANTS = 3  # of each kernel
# One struct for each array of a call, or each stage or vector that fits.
_SEVERAL = {
    *("normalize_even", "normalize_persistent", "normalize_shared", "normalize_span"),
    "softmax_cluster",
}
# Bytes that a launch may have too many: configs round up, and Hopper's attention has room for a
# varlen call's sequences and a block mask's steps in all calls.
_SPARE = {
    "attention_hopper": 2400,
    "attention_hopper_general": 2400,
    "attention_hopper_formula": 2400,
    **dict.fromkeys(("attention_hopper_paged", "attention_hopper_paged_formula"), 2400),
    **dict.fromkeys(("decode_attention", "decode_attention_general"), 16),
    **dict.fromkeys(
        ("decode_attention_formula", "decode_attention_8bit", "decode_attention_8bit_formula"), 16
    ),
    **dict.fromkeys(("gemm_hopper", "gemm_expression_hopper"), 1024),
}
_ASSERT = """#undef SHARED_STORAGE
template <int kStorage> constexpr bool kFits = {condition};
#define SHARED_STORAGE(Struct, name)                                             \\
    static_assert(kFits<int(sizeof(Struct))>, "as large as the launch's memory"); \\
    Struct& name = *static_cast<Struct*>(nullptr)
"""

Launches = dict[Variant, set[int]]


def _run(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """The variants that have shared memory, and how many bytes."""
    found: Launches = defaultdict(set)

    def note() -> None:
        for launch in gpu.launches:
            if launch.shared_bytes:
                found[launch.variant].add(launch.shared_bytes)
        gpu.launches.clear()

    weights, scale = gpu.array((32000, 4096), "int8"), gpu.array((32000,), "float32")
    for m in (8, 512):
        cupykern.dequant_softmax(gpu.array((m, 4096), "float16"), weights.T, scale)
        note()
    x = gpu.array((512, 512), "float16")
    cupykern.dual_gemm_silu(x, x.T, x.T, epilogue="maximum(acc1, 0) * acc2")
    note()
    x = gpu.array((512, 512), "float32")
    cupykern.matmul(x, x, precision="fp16x3")
    note()
    q, codes = gpu.array((1, 8, 1, 128), "float16"), gpu.array((1, 2, 500, 128), "int8")
    cupykern.decode_attention(q, codes, codes, score="s - 0.1 * (i - j)")
    note()
    heads = gpu.array((1, 8, 512, 128), "float16")
    cupykern.attention(heads, heads, heads, score="s - j")
    note()
    for dtype, score in (("int8", None), ("int8", "s - j"), ("float16", "s - j")):
        pages = gpu.array((32, 2, 16, 128), dtype)
        cupykern.attention_varlen(
            gpu.array((512, 8, 128), "float16"), pages, pages, gpu.array((2,), "int32"),
            max_seqlen_q=512, score=score,
            block_table=gpu.array((1, 32), "int32"), seq_lens_k=gpu.array((1,), "int32"),
        )  # fmt: skip
        note()
    for parts in SPLITS.values():
        tile = GemmConfig(128, 128, 32, 2, 4, stages=2)
        config = SplitFloat32(PartsGemmConfig(parts, tile))
        cupykern.matmul(x, x, precision=parts.name, config=config)
        note()
    x = gpu.array((256, 262_144), "float16")
    cupykern.layer_norm(x, x[0], x[0])  # PersistentRows
    note()
    x = gpu.array((2**17, 301), "float16")  # SpanRows
    cupykern.softmax(x)
    cupykern.rms_norm(x)
    note()
    machine = FakeMachine(gpu, monkeypatch)
    for name in FAMILIES:
        for seed in range(_SEQUENCES):
            for call in draw_sequence(RandomDraw(seed), (name,), large=True):
                machine.alone(call)
                note()
    return found


@pytest.fixture(scope="module")
def launches(no_gpu) -> Launches:
    pytest.importorskip("cupy")
    with pytest.MonkeyPatch.context() as monkeypatch, fake_gpu(monkeypatch, SIZE) as gpu:
        return _run(gpu, monkeypatch)


def _errors(variant: Variant, sizes: set[int], spare: int) -> str:
    if variant.kernel in _SEVERAL:
        fits = (f"{size} % kStorage == 0" for size in sizes)
    else:
        fits = (f"kStorage <= {size} && {size} <= kStorage + {spare}" for size in sizes)
    text = kernels.source_text(variant, "host")
    start = text.index('#line 1 "variant of')
    lines = _ASSERT.replace("{condition}", " && ".join(fits))
    return editor.errors("-", text=text[:start] + lines + text[start:])


def _has_storage(entry: Path) -> bool:
    return "SHARED_STORAGE(" in kernels.file_text(entry.name)


def test_every_kernel_with_shared_memory_is_launched(launches):
    having = {path.stem for path in kernels.ROOT.glob("*.cu") if _has_storage(path)}
    assert {variant.kernel for variant in launches} == having


def test_launches_have_the_bytes_of_the_struct(launches):
    of_kernel = defaultdict(list)
    for variant in sorted(launches, key=str):
        of_kernel[variant.kernel].append(variant)
    for kernel, variants in of_kernel.items():
        for variant in variants[:: -(-len(variants) // _VARIANTS)]:
            said = _errors(variant, launches[variant], _SPARE.get(kernel, 0))
            assert not said, f"{variant}, {launches[variant]} bytes: {said}"


@pytest.mark.parametrize("kernel", ["gemm", "softmax_cluster"])
@pytest.mark.parametrize("wrong", [-8, 8])
def test_a_wrong_size_is_seen(launches, kernel, wrong):
    variant = min((v for v in launches if v.kernel == kernel), key=str)
    assert _errors(variant, {size + wrong for size in launches[variant]}, 0)
