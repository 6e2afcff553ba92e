"""The peer of `bench --model`, as written, against the decoder in FP64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupykern import targets
from cupykern.op import Call
from cupykern.peers import torch_model
from cupykern.tools.model import measure
from cupykern.tools.model.config import LayerKind, ModelConfig, Positions
from cupykern.tools.model.random_weights import random_decoder
from cupykern.tools.model.reference import Expected

PLAIN = ModelConfig(96, 64, 176, 4, 2, 16, (LayerKind(), LayerKind(Positions(500.0))))
QWEN = replace(PLAIN, head_norms=True, qkv_bias=True)


@pytest.mark.parametrize("config", [PLAIN, QWEN], ids=["plain", "qwen"])
@pytest.mark.parametrize("step", [measure.Step("decode", 2, 9), measure.Step("prefill", 1, 9)])
def test_logits_are_nearly_as_exact_as_ours(step, config):
    host, decoder = targets.get("host"), random_decoder(config, "float16", target="host")
    tokens = np.random.default_rng(0).integers(0, 96, (step.batch, step.count))
    cache = measure.made_cache(decoder, step, host)
    expected = Expected.of(decoder, tokens, cache, [step.start] * step.batch)
    run = torch_model.step(step.kind, Call((decoder, tokens, cache, step.start)))
    # It rounds gate, up and logits too.
    assert expected.error_over_limit(run().numpy()) <= 2


def test_what_it_lacks_is_no_peer():
    host = targets.get("host")
    for change, weights, cache in (
        ({"softcap": 3.0}, "16bit", "16bit"),
        ({}, "int8", "16bit"),
        ({}, "16bit", "e4m3"),
    ):
        step = measure.Step("decode", 1, 9, cache)
        decoder = random_decoder(replace(PLAIN, **change), "float16", weights, target="host")
        call = Call((decoder, np.zeros((1, 1)), measure.made_cache(decoder, step, host), 8))
        assert torch_model.step("decode", call) is None
