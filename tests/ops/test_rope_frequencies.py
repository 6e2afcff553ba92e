"""rope_inv_freq: the scalings of long contexts, as their papers and Hugging Face have them."""

from __future__ import annotations

import numpy as np
import pytest

import cupykern

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_default_and_linear_frequencies():
    inv_freq, factor = cupykern.rope_inv_freq(8, 10_000, target="host")
    assert inv_freq.dtype == np.float32 and factor == 1.0
    np.testing.assert_array_equal(inv_freq, np.float32([1, 0.1, 0.01, 0.001]))
    linear = {"type": "linear", "factor": 4.0}
    assert (cupykern.rope_inv_freq(8, 10_000, linear, target="host")[0] == inv_freq / 4).all()


def test_llama3_keeps_short_waves_and_divides_long_ones():
    plain, _ = cupykern.rope_inv_freq(128, 500_000.0, target="host")
    scaled, factor = cupykern.rope_inv_freq(128, 500_000.0, LLAMA3, target="host")
    waves = 2 * np.pi / plain.astype(np.float64)
    assert factor == 1.0 and (scaled[waves < 2048] == plain[waves < 2048]).all()
    assert (scaled[waves > 8192] == plain[waves > 8192] / 8).all()
    between = (waves > 2048) & (waves < 8192)
    assert between.any() and (np.diff(scaled) < 0).all()
    assert ((scaled > plain / 8) & (scaled < plain))[between].all()


def test_yarn_as_its_paper_has_it():
    plain, _ = cupykern.rope_inv_freq(128, 1e6, target="host")
    scaled, factor = cupykern.rope_inv_freq(128, 1e6, YARN, target="host")
    assert factor == pytest.approx(0.1 * np.log(4) + 1)
    turns = 32768 * plain / (2 * np.pi)
    fast, slow = np.flatnonzero(turns > 32)[:-1], np.flatnonzero(turns < 1)[1:]
    assert (scaled[fast] == plain[fast]).all() and (scaled[slow] == plain[slow] / 4).all()
    for more, expected in (
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.5}, 0.1 * np.log(4) + 1),
        ({"mscale": 0, "mscale_all_dim": 0}, 0.1 * np.log(4) + 1),  # not given
        ({"factor": 1.0}, 1.0),
    ):
        found = cupykern.rope_inv_freq(128, 1e6, {**YARN, **more}, target="host")[1]
        assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.5},
        LLAMA3,
        YARN,
        {**YARN, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
        {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.5},
    ],
    ids=str,
)
def test_frequencies_are_those_of_hugging_face(scaling):
    pytest.importorskip("torch")
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=1024, num_attention_heads=8, max_position_embeddings=131072,
        rope_parameters={**scaling, "rope_theta": 500_000.0},
    )  # fmt: skip
    wanted, factor = rope.ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    found = cupykern.rope_inv_freq(128, 500_000.0, scaling, target="host")
    assert found[1] == pytest.approx(factor)
    np.testing.assert_allclose(found[0], wanted.numpy(), rtol=2e-6)


@pytest.mark.parametrize(
    ("error", "match", "args"),
    [
        (TypeError, "dim must be an integer", (8.0, 1e4)),
        (ValueError, "dim must be even", (7, 1e4)),
        (ValueError, "theta must be positive", (8, -1.0)),
        (TypeError, "scaling must be a mapping", (8, 1e4, "linear")),
        (ValueError, "rope_type must be one of default, linear", (8, 1e4, {"type": "dynamic"})),
        (ValueError, "lacks factor", (8, 1e4, {"type": "linear"})),
        (ValueError, "factor must be positive", (8, 1e4, {"type": "linear", "factor": 0})),
        (ValueError, "has no mscale", (8, 1e4, {"type": "linear", "factor": 2, "mscale": 1})),
        (ValueError, "rope_theta must be theta", (8, 1e4, {"rope_theta": 500.0})),
        (ValueError, "low_freq_factor", (8, 1e4, {**LLAMA3, "low_freq_factor": 4.0})),
        (TypeError, "truncate must be a bool", (8, 1e4, {**YARN, "truncate": 1})),
    ],
)
def test_wrong_frequencies_are_refused(error, match, args):
    with pytest.raises(error, match=match):
        cupykern.rope_inv_freq(*args, target="host")
