"""A small model of random weights, by Hugging Face's names."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from cupykern.tools.model.hugging_face import config_of

CONFIG = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
}


def tensors_of(config, seed=0):
    """Random ones, (out, in), by Hugging Face's names."""
    c, rng = config_of(config), np.random.default_rng(seed)
    shapes = {"model.embed_tokens": (c.vocab, c.hidden), "model.norm": (c.hidden,)}
    shapes["lm_head"] = c.vocab, c.hidden
    for i in range(len(c.kinds)):
        layer = {"input_layernorm": (c.hidden,), "post_attention_layernorm": (c.hidden,)}
        layer |= {f"self_attn.{x}_proj": (c.kv_width, c.hidden) for x in "kv"}
        layer |= {"self_attn.q_proj": (c.q_width, c.hidden)}
        layer |= {
            "self_attn.o_proj": (c.hidden, c.q_width),
            "mlp.down_proj": (c.hidden, c.intermediate),
        }
        layer |= {f"mlp.{x}_proj": (c.intermediate, c.hidden) for x in ("gate", "up")}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    found = {}
    for name, shape in shapes.items():
        x = rng.standard_normal(shape, np.float32)
        x = 1 + 0.1 * x if len(shape) == 1 else x / np.sqrt(shape[1])
        found[f"{name}.weight"] = x.astype(ml_dtypes.bfloat16)
    return found
