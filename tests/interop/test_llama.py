"""examples/llama.py beside transformers: the same folders, logits and texts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cupykern.tools.model import cache as caches
from cupykern.tools.model.reference import Exact, Expected, logits

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import llama

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LAYERS = ["sliding_attention", "full_attention"]
MODELS = {
    "llama": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {},
    "gemma": {"hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {"sliding_window": 4, "layer_types": LAYERS, "query_pre_attn_scalar": 20},
    "gemma3_text": {"sliding_window": 4, "layer_types": LAYERS, "query_pre_attn_scalar": 20},
}
TOKENS = np.random.default_rng(7).integers(3, 96, (1, 9))


def randomize(model):
    """Norms and biases too, which begin as ones and zeros."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data += 0.2 * torch.randn_like(parameter)


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(request.param, **SIZES, **MODELS[request.param])
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model)
    path = tmp_path_factory.mktemp(request.param)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )


def test_logits_are_those_of_transformers(folder):
    """The model in FP64 gives its logits but for rotations in FP32; and ours are near."""
    with torch.no_grad():
        wanted = theirs(folder)(torch.from_numpy(TOKENS)).logits[:, -1].numpy()
    decoder = llama.load(folder, target="host")
    empty = caches.contiguous(decoder.config, 1, 16, "bfloat16", "host")
    exact = logits(decoder, TOKENS, empty, [0], Exact())
    np.testing.assert_allclose(exact, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    expected = Expected.of(decoder, TOKENS, empty, [0])
    assert expected.error_over_limit(decoder.prefill(TOKENS, empty)) <= 1


def write_tokenizer(folder):
    """Words w3, w4, ... are tokens 3, 4, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(3, 96)} | {"?": 0}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_the_command_writes_texts(folder, capsys):
    write_tokenizer(folder)
    command = [str(folder), "--target", "host", "--tokens", "4", "--slots", "2", "--room", "16"]
    command += ["--weights", "e4m3"] if "qwen3" in folder.name else []
    command += ["--cache", "int8"] if "mistral" in folder.name else []
    prompts = ["w5 w6 w7", "w9"]
    both = [option for prompt in prompts for option in ("--prompt", prompt)]
    assert llama.main([*command, *both]) == 0
    out, err = capsys.readouterr()
    assert "tokens, " in err and "host emulation" in err
    for line, prompt in zip(out.splitlines(), prompts, strict=True):
        assert line.startswith(prompt)
        assert llama.main([*command, "--prompt", prompt]) == 0
        streamed = capsys.readouterr().out.rstrip("\n")
        assert line == prompt + streamed


def test_an_fp8_folder(tmp_path):
    """As DeepSeek-V3's and Qwen3's FP8 folders name their tensors."""
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 256, "head_dim": 128, "num_key_value_heads": 1}
    config = transformers.AutoConfig.for_model("qwen3", **{**sizes, "num_attention_heads": 2})
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(
        tmp_path
    )
    tensors = load_file(tmp_path / "model.safetensors")
    dense = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        n, k = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -k % 128, 0, -n % 128))
        blocks = padded.unflatten(0, (-1, 128)).unflatten(-1, (-1, 128))
        scale = blocks.abs().amax((1, 3)) / 448
        by_element = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
        tensors[name] = (weight / by_element).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
        dense[name] = tensors[name].double() * by_element.double()
    save_file(tensors, tmp_path / "model.safetensors")
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    model.load_state_dict({name: x.double() for name, x in dense.items()}, strict=False)
    with torch.no_grad():
        wanted = model(torch.from_numpy(TOKENS)).logits[:, -1].numpy()
    decoder = llama.load(tmp_path, target="host")
    empty = caches.contiguous(decoder.config, 1, 16, "bfloat16", "host")
    exact = logits(decoder, TOKENS, empty, [0], Exact())
    np.testing.assert_allclose(exact, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    expected = Expected.of(decoder, TOKENS, empty, [0])
    assert expected.error_over_limit(decoder.prefill(TOKENS, empty)) <= 1


def test_files_that_are_none_are_refused(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "a.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(ValueError, match=r"a\.safetensors"):
        llama.load(tmp_path, target="host")
    save_file({"x": torch.zeros(2, dtype=torch.int64)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="x is I64"):
        llama.load(tmp_path, target="host")


def test_end_tokens_are_those_of_both_configs(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert llama.end_tokens(tmp_path) == {2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert llama.end_tokens(tmp_path) == {2, 3, 4}
