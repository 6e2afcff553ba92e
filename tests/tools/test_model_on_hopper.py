"""What a decoder's steps launch on Hopper, on a GPU that is not there."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from fake_gpu import fake_gpu

from cupykern.arrays import empty_of
from cupykern.tools.model.cache import Cache
from cupykern.tools.model.config import LayerKind, ModelConfig
from cupykern.tools.model.decoder import Decoder, Layer
from cupykern.tools.model.linear import Dense

pytest.importorskip("cupy")

BF16, E4M3, INT8 = map(np.dtype, (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8))
CONFIG = ModelConfig(4096, 1024, 2048, 8, 2, 128, (LayerKind(),) * 2)


class Rows:
    """An embedding: what indexes an array is a kernel of CuPy's."""

    dtype = BF16

    def __init__(self, gpu):
        self._gpu = gpu

    def __getitem__(self, tokens):
        return self._gpu.array((tokens.size, CONFIG.hidden), BF16)


class Counters:
    """A cache's, to which nothing is added."""

    def __init__(self, gpu, batch):
        self._counters = gpu.array((2, batch), np.int32)

    def __iadd__(self, active):
        return self

    def __getitem__(self, index):
        return self._counters[index]


def decoder_on(gpu):
    c = CONFIG

    def linear(n, k):
        return Dense(gpu.array((n, k), BF16))

    def norm():
        return gpu.array((c.hidden,), BF16)

    layers = tuple(
        Layer(
            *(norm(), linear(c.q_width + 2 * c.kv_width, c.hidden), linear(c.hidden, c.q_width)),
            *(norm(), linear(c.intermediate, c.hidden), linear(c.intermediate, c.hidden)),
            linear(c.hidden, c.intermediate),
        )
        for _ in c.kinds
    )
    rotation = gpu.array((c.head_dim // 2,), np.float32), 1.0
    return Decoder(c, Rows(gpu), layers, norm(), linear(c.vocab, c.hidden), (rotation,) * 2)


def cache_on(gpu, batch, room, dtype=BF16):
    shape = batch, CONFIG.kv_heads, room, CONFIG.head_dim
    arrays = [empty_of(gpu.xp, shape, dtype) for _ in range(4)]
    scales = [tuple(gpu.array(shape[:3], np.float32) for _ in "kv") for _ in CONFIG.kinds]
    found = Cache(arrays[:2], arrays[2:], Counters(gpu, batch), None)
    return found if dtype == BF16 else replace(found, scales=scales)


def kernels(gpu):
    assert gpu.copies == []
    return [launch.variant.kernel for launch in gpu.launches]


@pytest.mark.parametrize("dtype, attends", [(BF16, ""), (E4M3, "_8bit"), (INT8, "_8bit")])
@pytest.mark.parametrize("batch", [1, 16, 64])
def test_a_layer_decodes_by_eight_launches(batch, dtype, attends, monkeypatch):
    with fake_gpu(monkeypatch, 2**28) as gpu:
        decoder, cache = decoder_on(gpu), cache_on(gpu, batch, 256, dtype)
        decoder.decode(gpu.array((batch,), np.int64), cache)
        found = kernels(gpu)
    assert len(found) == 8 * 2 + 2, found
    assert [found[i] for i in (2, 3, 6)] == [
        *("rope_and_cache", f"decode_attention{attends}"),
        "dual_gemm_hopper" if batch > 16 else "dual_gemm_skinny",
    ]
    assert found[:8] == found[8:16]


@pytest.mark.parametrize("tokens", [512, 1024])
def test_a_layer_reads_a_prompt_by_eight_launches(tokens, monkeypatch):
    with fake_gpu(monkeypatch, 2**28) as gpu:
        monkeypatch.setattr(gpu.xp, "arange", lambda a, b, dtype: gpu.array((b - a,), dtype))
        decoder, cache = decoder_on(gpu), cache_on(gpu, 1, 1024)
        decoder.prefill(gpu.array((1, tokens), np.int64), cache)
        found = kernels(gpu)
    assert len(found) == 8 * 2 + 2, found
    assert [found[i] for i in (2, 3, 6)] == [
        *("rope_and_cache", "attention_hopper", "dual_gemm_hopper")
    ]


def test_a_layer_reads_a_prompt_into_8_bits_by_eight_launches(monkeypatch):
    with fake_gpu(monkeypatch, 2**28) as gpu:
        monkeypatch.setattr(gpu.xp, "full", lambda n, value, dtype: gpu.array((n,), dtype))
        monkeypatch.setattr(
            gpu.xp, "arange", lambda *ends, dtype: gpu.array((len(range(*ends)),), dtype)
        )
        decoder, cache = decoder_on(gpu), cache_on(gpu, 1, 1024, E4M3)
        decoder.prefill(gpu.array((1, 512), np.int64), cache)
        found = kernels(gpu)
    assert len(found) == 8 * 2 + 2, found
    assert found[2:4] == ["rope_and_cache", "attention_paged_8bit"]
