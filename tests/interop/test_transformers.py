"""attn_implementation="cupykern" of Hugging Face transformers, in small random models."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.masking_utils import sdpa_mask

import cupykern.transformers

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 128}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**DECODER)),
    "mistral": (MistralForCausalLM, MistralConfig(**DECODER, sliding_window=8)),
    # Every other layer has the window.
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(
        **DECODER, head_dim=16, sliding_window=8, attn_logit_softcapping=0.5,
        query_pre_attn_scalar=1,
    )),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig(
        **DECODER, head_dim=16, sliding_window=8, num_local_experts=2, num_experts_per_tok=1,
    )),
}  # fmt: skip
IDS = torch.randint(1, 128, (2, 20), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS)
PADDED[0, :5] = 0


def _exact(module, query, key, value, attention_mask, scaling, softcap=None, s_aux=None, **options):
    """In FP64, which transformers' eager attention leaves for its softmax."""
    heads = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(heads, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is None:
        attention_mask = torch.ones(scores.shape[2:], dtype=torch.bool).tril()
    scores = scores.masked_fill(~attention_mask, -torch.inf)
    if s_aux is not None:
        sinks = s_aux[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1).nan_to_num()[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("exact", _exact)
AttentionMaskInterface.register("exact", sdpa_mask)


def _model(kind, config, dtype=torch.bfloat16):
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # of FP64 too
    model = kind(config).eval().to(dtype)
    for layer in getattr(getattr(model, "model", None), "layers", ()):
        if hasattr(layer.self_attn, "sinks"):
            layer.self_attn.sinks.data.copy_(torch.linspace(-1, 2, 4))
    return model


def _logits(model, implementation, **options):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(IDS, **options).logits.double()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mask", [None, PADDED], ids=["full", "padded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_are_as_near_to_fp64_as_eager_s(name, mask, dtype):
    model = _model(*MODELS[name], dtype)
    exact = _logits(_model(*MODELS[name], dtype).double(), "exact", attention_mask=mask)
    real = torch.ones_like(IDS, dtype=torch.bool) if mask is None else mask.bool()
    ours, eager = (
        (_logits(model, implementation, attention_mask=mask) - exact)[real].square().mean().sqrt()
        for implementation in ("cupykern", "eager")
    )
    assert ours <= 1.25 * eager  # its probabilities are rounded later
    assert eager < 0.05 * exact[real].square().mean().sqrt()  # of a model that computes something


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mask", [None, PADDED], ids=["full", "padded"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_decoding_with_a_cache(name, mask, cache):
    """Of the same tokens: what each step's logits are, with the cache, in one go without it."""
    if name == "mistral" and cache == "static":
        return  # transformers' own window of a static cache
    model = _model(*MODELS[name])
    model.set_attn_implementation("cupykern")
    with torch.no_grad():
        found = model.generate(
            IDS, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0,
            cache_implementation=cache, output_logits=True, return_dict_in_generate=True,
            eos_token_id=None,
        )  # fmt: skip
        whole = None if mask is None else torch.cat([mask, torch.ones(2, 6, dtype=mask.dtype)], 1)
        again = model(found.sequences, attention_mask=whole, use_cache=False).logits
    steps = torch.stack(found.logits, 1).double()
    expected = again[:, 19:-1].double()
    assert steps.shape == expected.shape
    assert (steps - expected).abs().max() < 0.03 * expected.abs().max()


def test_an_encoder_sees_all_positions():
    model = _model(BertModel, BertConfig(**SIZES))
    results = []
    for implementation in ("cupykern", "eager"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            results.append(model(IDS, attention_mask=PADDED).last_hidden_state.double())
    ours, eager = (x[PADDED.bool()] for x in results)
    assert (ours - eager).abs().max() < 0.03 * eager.abs().max()


def test_compile_keeps_one_graph():
    model = _model(*MODELS["llama"])
    model.set_attn_implementation("cupykern")
    with torch.no_grad():
        expected = model(IDS).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(IDS).logits, expected)


def test_what_it_lacks():
    model = _model(*MODELS["llama"], torch.float32)
    model.set_attn_implementation("cupykern")
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"dtype=torch\.bfloat16"):
        model(IDS)
    with pytest.raises(RuntimeError, match=r"requires grad.*torch\.no_grad"):
        model.bfloat16()(IDS)
    q = torch.zeros(1, 1, 4, 16, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="has no dropout"):
        cupykern.transformers.attention_forward(torch.nn.Module(), q, q, q, None, dropout=0.1)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("queries, keys", [(20, 20), (1, 20)])
def test_a_window_without_a_mask(is_causal, queries, keys):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, queries, 16, generator=generator).half()
    k, v = (torch.randn(1, 2, keys, 16, generator=generator).half() for _ in range(2))
    found, _ = cupykern.transformers.attention_forward(
        torch.nn.Module(), q, k, v, None, is_causal=is_causal, sliding_window=5, scaling=0.25
    )
    at = torch.arange(keys)
    apart = at[keys - queries :, None] - at
    seen = (apart < 5) & ((apart >= 0) | (not is_causal and queries > 1)) & (apart > -5)
    expected = cupykern.attention(q, k, v, mask=seen, scale=0.25).transpose(1, 2)
    assert torch.equal(found, expected)
