"""Tests of arrays of other libraries; those of a missing library are not collected."""

from __future__ import annotations

from importlib.util import find_spec

_NEEDED = {
    "test_torch_model.py": "torch",
    "test_torch_tensors.py": "torch",
    "test_torch_operators.py": "torch",
    "test_torch_on_fake_gpu.py": "torch",
    "test_jax_arrays.py": "jax",
    "test_llama.py": "transformers",
    "test_transformers.py": "transformers",
}
collect_ignore = [file for file, module in _NEEDED.items() if find_spec(module) is None]
