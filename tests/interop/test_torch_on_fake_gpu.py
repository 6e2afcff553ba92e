"""Tensors on a fake GPU: where kernels read and write, on which stream, in whose memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_gpu import fake_gpu
from fake_streams import Stream, fake_streams, launch_of

import cupykern
from cupykern.interop import tensors


class CudaTensor(torch.Tensor):
    """One that says that it is on GPU 0."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self):
        return 0


def _cuda(*shape, dtype=torch.float16):
    return _on_gpu(torch.zeros(shape, dtype=dtype))


def _on_gpu(x):
    return x.as_subclass(CudaTensor)


@pytest.fixture
def fake(monkeypatch):
    with fake_gpu(monkeypatch) as fake:
        fake_streams(monkeypatch, fake)
        fake.of_torch = Stream(fake, 0)
        monkeypatch.setattr(tensors, "current_stream", lambda device_id: fake.of_torch.ptr)
        monkeypatch.setattr(tensors, "cupy_stream", lambda handle: fake.of_torch)
        monkeypatch.setattr(tensors, "torch_device", lambda device_id: torch.device("cpu"))
        yield fake


def test_memory_is_torch_s(fake):
    x = _cuda(4, 256)
    y, launch = launch_of(fake, lambda: cupykern.softmax(x))
    assert (launch.args[0], launch.args[2]) == (x.data_ptr(), y.data_ptr())
    assert fake.num_allocations == 0 and (y.shape, y.dtype) == (x.shape, x.dtype)
    y[...] = 3
    assert not y._is_view() and y.untyped_storage().nbytes() == 2 * x.numel()


def test_a_known_call_reads_and_writes_elsewhere(fake):
    first, second = _cuda(4, 256), _cuda(4, 256)
    cupykern.softmax(first)
    out = _cuda(4, 256)
    y, launch = launch_of(fake, lambda: cupykern.softmax(second, out=out))
    assert y is out and (launch.args[0], launch.args[2]) == (second.data_ptr(), out.data_ptr())


def test_the_result_has_the_strides_of_the_argument(fake):
    x = _on_gpu(_cuda(256, 8).t())
    here = fake.xp.ndarray((8, 256), np.float16, strides=(2, 16))
    wanted = launch_of(fake, lambda: cupykern.softmax(here))[1]
    y, launch = launch_of(fake, lambda: cupykern.softmax(x))
    assert launch.variant == wanted.variant and y.stride() == (1, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_dtypes_that_numpy_lacks(fake, dtype):
    a, b = _cuda(16, 64, dtype=dtype), _on_gpu(_cuda(32, 64, dtype=dtype).t())
    c, launch = launch_of(fake, lambda: cupykern.matmul(a, b))
    told = repr(launch.args)  # addresses, or tensor maps that name theirs
    assert c.dtype == torch.bfloat16
    assert all(str(x.data_ptr()) in told for x in (a, b, c))


def test_results_that_share_an_allocation(fake):
    x = _cuda(5, 100)
    cupykern.quantize(x, "e4m3", granularity="row")
    values, scale = cupykern.quantize(x, "e4m3", granularity="row")
    assert values.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert values.data_ptr() + 512 == scale.data_ptr() and scale.shape == (5, 1)


def test_a_tensor_without_elements_launches_nothing(fake):
    y = cupykern.softmax(_cuda(0, 5))
    assert y.shape == (0, 5) and not fake.launches


def test_the_call_runs_on_torch_s_stream(fake):
    seen = []
    compiled = fake.compile
    fake.compile = lambda variant: seen.append(fake.stream.ptr) or compiled(variant)
    fake.of_torch, cupys = Stream(fake, 77), fake.stream
    cupykern.log_softmax(_cuda(4, 250))
    assert fake.stream is cupys and not cupys.waits and not fake.of_torch.waits
    assert all(ptr == 77 for ptr in seen)


def test_streams_of_mixed_arrays_wait_for_each_other(fake):
    fake.of_torch, cupys = Stream(fake, 77), fake.stream
    x, w = _cuda(4, 256), fake.array((256,), np.float16)
    y = cupykern.rms_norm(x, w)
    assert isinstance(y, torch.Tensor)
    assert fake.of_torch.waits == [0] and cupys.waits == [77]
    y = cupykern.rms_norm(fake.array((4, 256), np.float16), _cuda(256))
    assert isinstance(y, fake.xp.ndarray)  # on CuPy's stream
    assert cupys.waits == [77, 77] and fake.of_torch.waits == [0, 0]


def test_a_tensor_without_memory(fake):
    x = _cuda(4, 256)
    x.data_ptr = lambda: 0
    with pytest.raises(TypeError, match="x must have memory of its own; got a CudaTensor"):
        cupykern.softmax(x)


def test_errors_name_libraries_and_devices(fake):
    with pytest.raises(TypeError, match=r"x: torch array on gpu 0, weight: torch array on cpu"):
        cupykern.rms_norm(_cuda(4, 256), torch.ones(256))
    with pytest.raises(TypeError, match=r"x: torch array on gpu 0, weight: numpy array on cpu"):
        cupykern.rms_norm(_cuda(4, 256), np.ones(256, np.float16))
