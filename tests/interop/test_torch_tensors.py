"""torch's tensors on the CPU: every op takes them and gives them back."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign_twins import CALLED, assert_same

import cupykern
from cupykern.interop import foreign
from cupykern.interop.tensors import DTYPES, TENSORS

X = torch.linspace(-3, 3, 96).reshape(8, 12)


def _tensor(x: np.ndarray) -> torch.Tensor:
    """x's memory, or a copy where torch has no such strides."""
    here = x.flags.writeable and all(
        stride >= 0 and stride % x.itemsize == 0 for stride in x.strides
    )
    return TENSORS.back(x if here else np.array(x, order="C"), None)


@pytest.mark.parametrize("op", CALLED, ids=lambda op: op.name)
@pytest.mark.parametrize("seed", range(6))
def test_every_op_gives_what_it_gives_numpy(op, seed):
    assert_same(op, seed, _tensor, torch.Tensor)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if DTYPES[d] != np.uint8], ids=str)
@pytest.mark.parametrize("index", [(), (slice(None, None, 2), slice(1, 5)), (3, 2), slice(0, 0)])
def test_memory_is_shared_both_ways(dtype, index):
    x = torch.arange(48).reshape(6, 8).to(dtype).t()[index]
    here = foreign.native("x", x)
    assert here.dtype == DTYPES[dtype] and here.shape == tuple(x.shape)
    back = TENSORS.back(here, x)
    assert (back.dtype, back.shape, back.data_ptr()) == (x.dtype, x.shape, x.data_ptr())
    if x.numel():
        assert here.ctypes.data == x.data_ptr()
        assert here.strides == tuple(stride * x.itemsize for stride in x.stride())
        assert back.stride() == x.stride()
    assert not back._is_view()


def test_out_is_written_in_place_and_returned():
    for x in (X, X.to(torch.bfloat16)):
        out = torch.empty_like(x)
        assert cupykern.softmax(x, out=out) is out
        assert torch.equal(out, cupykern.softmax(x))
        same = x.clone()
        assert cupykern.softmax(same, out=same) is same and torch.equal(same, out)


def test_results_are_ordinary_tensors():
    for dtype in (torch.float32, torch.bfloat16):
        y = cupykern.softmax(X.to(dtype))
        y.requires_grad_()
        (y * 2).sum().backward()
        assert y.is_leaf and torch.equal(y.grad, torch.full_like(y, 2))


def test_options_may_be_torch_dtypes():
    assert cupykern.softmax(X, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert cupykern.softmax(X.numpy(), dtype=torch.float16).dtype == np.float16
    assert cupykern.quantize(X, torch.float8_e5m2)[0].dtype == torch.float8_e5m2
    with pytest.raises(TypeError, match=r"dtype must be one of .*; got 'torch\.complex128'"):
        cupykern.softmax(X, dtype=torch.complex128)


def test_a_tensor_that_requires_grad():
    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=r"x requires grad.*torch\.no_grad\(\).*x\.detach\(\)"):
        cupykern.softmax(x)
    with pytest.raises(RuntimeError, match="weight requires grad"):
        cupykern.rms_norm(X, torch.nn.Parameter(torch.ones(12)))
    with torch.no_grad():
        assert torch.equal(cupykern.softmax(x), cupykern.softmax(X))
    assert torch.equal(cupykern.softmax(x.detach()), cupykern.softmax(X))
    with torch.inference_mode():
        assert torch.equal(cupykern.softmax(torch.nn.Parameter(X)), cupykern.softmax(X.clone()))


def test_tensors_without_memory_that_kernels_read():
    with pytest.raises(TypeError, match="x must be on the CPU or a GPU; got a tensor on meta"):
        cupykern.softmax(X.to("meta"))
    with pytest.raises(TypeError, match=r"x must be a dense tensor; got one of torch\.sparse_coo"):
        cupykern.softmax(X.to_sparse())
    with pytest.raises(TypeError, match="negative bit"):
        cupykern.softmax(torch.view_as_complex(X.reshape(8, 6, 2)).conj().imag)
    with pytest.raises(TypeError, match=r"x must have one of the dtypes.*got torch\.complex128"):
        cupykern.softmax(torch.zeros(3, dtype=torch.complex128))


def test_libraries_may_be_mixed_on_one_device():
    weight = np.linspace(0, 1, 12, dtype=np.float32)
    expected = cupykern.rms_norm(X.numpy(), weight)
    y = cupykern.rms_norm(X, weight)
    assert isinstance(y, torch.Tensor) and y.numpy().tobytes() == expected.tobytes()
    y = cupykern.rms_norm(X.numpy(), torch.from_numpy(weight))
    assert isinstance(y, np.ndarray) and y.tobytes() == expected.tobytes()
    out = torch.empty_like(X)
    assert cupykern.rms_norm(X.numpy(), weight, out=out) is out
    assert out.numpy().tobytes() == expected.tobytes()


def test_numbers_and_steering_tensors():
    assert torch.equal(cupykern.softmax(X, scale=torch.tensor(2.0)), cupykern.softmax(X, scale=2.0))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 1, 64, generator=generator).half()
    cache = torch.randn(2, 2, 32, 64, generator=generator).half()
    lens = torch.tensor([7, 32], dtype=torch.int32)
    y, lse = cupykern.decode_attention(q, cache, cache, seq_lens=lens, return_lse=True)
    arrays = (x.numpy() for x in (q, cache, cache))
    expected = cupykern.decode_attention(*arrays, seq_lens=lens.numpy(), return_lse=True)
    assert y.numpy().tobytes() == expected[0].tobytes()
    assert lse.numpy().tobytes() == expected[1].tobytes()
    with pytest.raises(ValueError, match="seq_lens"):
        cupykern.decode_attention(q, cache, cache, seq_lens=lens + 1)


def test_nvfp4_takes_torch_s_packed_dtype():
    x = cupykern.quantize_nvfp4(torch.ones(4, 64, dtype=torch.float16))
    assert x.data.dtype == torch.uint8 and x.shape == (4, 64)
    if hasattr(torch, "float4_e2m1fn_x2"):
        packed = cupykern.NvFp4(
            x.data.view(torch.float4_e2m1fn_x2), x.scale, global_scale=x.global_scale
        )
        assert torch.equal(cupykern.scaled_mm(packed, x), cupykern.scaled_mm(x, x))


def test_sdpa_reads_as_torch_s():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 33, 64, generator=generator).half() for _ in range(3))
    y = cupykern.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), is_causal=True
    )
    bound = cupykern.reference.attention_bound(
        q.numpy(), k.numpy(), v.numpy(), causal=True, reference=(expected.numpy(),)
    )
    assert ((y.double() - expected).abs().numpy() <= bound[0].elementwise).all()


def test_examples_of_the_docs():
    """In a process of their own: what torch.compile leaves behind in this one would trace them."""
    page = (Path(__file__).parents[2] / "docs" / "guide" / "interop.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    for name in ("jax", "transformers"):
        if importlib.util.find_spec(name) is None:
            blocks = [block for block in blocks if f"import {name}" not in block]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
