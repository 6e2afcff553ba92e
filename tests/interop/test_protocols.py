"""Arrays that are known by DLPack or `__cuda_array_interface__` alone."""

from __future__ import annotations

import ctypes
import gc
import weakref
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from fake_gpu import fake_gpu
from fake_streams import Stream, fake_streams, launch_of
from foreign_twins import CALLED, assert_same

import cupykern
from cupykern.interop import dlpack, foreign, protocols


class Dlpack:
    """An array that gives its memory by DLPack alone, of the version before 1.0 if it is `old`."""

    old = False

    def __init__(self, x):
        self.x = x.x if isinstance(x, Dlpack) else x

    def __dlpack_device__(self):
        return dlpack.Exported(self.x).__dlpack_device__()

    def __dlpack__(self, **options):
        if self.old and options:
            raise TypeError("no options")
        return dlpack.Exported(self.x).__dlpack__(**options)

    def __array_namespace__(self):
        return SimpleNamespace(from_dlpack=lambda x: type(self)(_numpy(x)))


class OldDlpack(Dlpack):
    old = True


class WithoutNamespace:
    def __init__(self, x):
        self.x = x

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **options):
        return dlpack.Exported(self.x).__dlpack__(**options)


def _numpy(x):
    return dlpack.take("x", x)


X = np.linspace(-3, 3, 96, dtype=np.float32).reshape(8, 12)


def _of(x, kind=Dlpack):
    return kind(x if x.flags.writeable else x.copy())


@pytest.mark.parametrize("op", CALLED, ids=lambda op: op.name)
@pytest.mark.parametrize("seed", range(4))
def test_every_op_gives_what_it_gives_numpy(op, seed):
    def to_foreign(x):
        # numpy's own export takes whole elements alone.
        whole = not any(stride % x.itemsize for stride in x.strides)
        return _of(x if whole else np.ascontiguousarray(x))

    assert_same(op, seed, to_foreign, Dlpack)


@pytest.mark.parametrize("kind", [Dlpack, OldDlpack])
@pytest.mark.parametrize(
    "dtype",
    [
        *(np.float16, np.float32, np.int8, np.uint8, np.int32, np.int64, np.bool_),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    ],
)
def test_memory_is_shared_both_ways(dtype, kind):
    x = np.arange(24).reshape(4, 6).astype(dtype)[::2, ::-1]
    there = kind(x)
    here = foreign.native("x", there)
    assert (here.dtype, here.shape, here.strides) == (x.dtype, x.shape, x.strides)
    assert np.shares_memory(here, x) and here.tobytes() == x.tobytes()
    back = foreign.library_of(there).back(here, there)
    assert type(back) is kind and np.shares_memory(back.x, x) and back.x.dtype == x.dtype


def test_memory_outlives_its_owner():
    here = foreign.native("x", Dlpack(np.full((1000, 1000), 7, np.float32)))
    np.full((1000, 1000), 8, np.float32)
    assert (here == 7).all()


def test_memory_is_freed_with_its_owner():
    """By its references, not by the garbage collector."""
    x = Dlpack(X.copy())
    memory = weakref.ref(x.x)
    gc.disable()
    try:
        y = cupykern.rms_norm(x, residual=x)
        packed = cupykern.quantize_nvfp4(Dlpack(np.ones((4, 64), np.float16)))
        results = [weakref.ref(z.x) for z in (*y, packed.data)]
        del x, y, packed
        assert memory() is None and all(result() is None for result in results)
    finally:
        gc.enable()


def test_out_is_written_in_place_and_returned():
    out = Dlpack(np.zeros_like(X))
    assert cupykern.softmax(Dlpack(X), out=out) is out
    assert out.x.tobytes() == cupykern.softmax(X).tobytes()


def test_out_that_is_read_only():
    x = X.copy()
    x.flags.writeable = False
    with pytest.raises(ValueError, match="out must be writable"):
        cupykern.softmax(X, out=Dlpack(x))


def test_results_are_of_the_first_array_s_library():
    y = cupykern.rms_norm(X, Dlpack(np.ones(12, np.float32)))
    assert type(y) is np.ndarray
    y, s = cupykern.rms_norm(Dlpack(X), np.ones(12, np.float32), residual=Dlpack(X.copy()))
    assert type(y) is type(s) is Dlpack
    assert type(cupykern.softmax(mask=X > 0, x=Dlpack(X))) is Dlpack  # by the signature


def test_without_a_namespace_results_are_numpy_arrays():
    y = cupykern.softmax(WithoutNamespace(X))
    assert type(y) is np.ndarray and y.tobytes() == cupykern.softmax(X).tobytes()


def test_numbers_may_be_foreign():
    y = cupykern.softmax(X, scale=Dlpack(np.array(2.0)))
    assert y.tobytes() == cupykern.softmax(X, scale=2.0).tobytes()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 5), (5, 0)])
def test_shapes_with_no_or_one_element(shape):
    x = np.ones(shape, ml_dtypes.bfloat16)
    values, scale = cupykern.quantize(Dlpack(x), "e4m3")
    assert values.x.shape == shape and scale.x.shape == ()
    if shape:
        y = cupykern.softmax(Dlpack(x))
        assert y.x.shape == shape and y.x.dtype == x.dtype


def test_nvfp4_keeps_foreign_arrays():
    mine = cupykern.quantize_nvfp4(Dlpack(np.ones((4, 64), np.float16)))
    assert all(type(x) is Dlpack for x in mine.arrays())
    made = cupykern.NvFp4(mine.data, mine.scale, mine.layout, mine.global_scale)
    assert made.data is mine.data
    plain = cupykern.quantize_nvfp4(np.ones((4, 64), np.float16))
    y = cupykern.scaled_mm(made, made)
    assert type(y) is Dlpack and y.x.tobytes() == cupykern.scaled_mm(plain, plain).tobytes()
    assert (made.dequantize().x == plain.dequantize()).all()
    assert type(made.to("plain").scale) is Dlpack
    with pytest.raises(ValueError, match="scale must have shape"):
        cupykern.NvFp4(mine.data, Dlpack(plain.scale[:-1]), mine.layout)


def test_block_masks_of_foreign_arrays():
    keep = np.tri(130, dtype=bool)
    plain = cupykern.BlockMask.from_dense(keep, 64, 64)
    mask = cupykern.BlockMask.from_dense(Dlpack(keep), 64, 64)
    assert (mask.to_dense() == plain.to_dense()).all()
    made = cupykern.BlockMask(
        *map(Dlpack, (plain.block_mask_types, plain.partial_indices, plain.partial_tiles)),
        *(130, 130, 64, 64),
    )
    assert (made.to_dense() == plain.to_dense()).all()
    q = np.random.default_rng(0).normal(size=(1, 1, 130, 16)).astype(np.float16)
    y = cupykern.attention(*[Dlpack(q)] * 3, mask=mask)
    assert y.x.tobytes() == cupykern.attention(q, q, q, mask=plain).tobytes()
    documents = cupykern.BlockMask.document(Dlpack(np.zeros(70, np.int32)))
    of_numpy = cupykern.BlockMask.document(np.zeros(70, np.int32))
    assert (documents.block_mask_types == of_numpy.block_mask_types).all()


def test_reports_and_watches():
    x = X.copy()
    x[0, 3] = np.nan
    assert cupykern.nonfinite_report(Dlpack(x)) == cupykern.nonfinite_report(x)
    with cupykern.watch() as watch:
        cupykern.softmax(Dlpack(x))
    (record,) = watch.records
    assert record.op == "softmax" and set(record.inputs) == {"x"}


def test_asarray_shares_memory():
    there = cupykern.asarray(Dlpack(X), target="host")
    assert type(there) is np.ndarray and np.shares_memory(there, X)


def test_checks_name_the_argument():
    with pytest.raises(TypeError, match=r"x must have one of the dtypes .*; got DLPack's type 5"):
        cupykern.softmax(WithoutNamespace(np.ones(3, np.complex128)))
    with pytest.raises(TypeError, match=r"mask must have dtype bool|mask must be"):
        cupykern.softmax(Dlpack(X), mask=Dlpack(X))
    there = WithoutNamespace(X)
    there.__class__ = type("Npu", (WithoutNamespace,), {"__dlpack_device__": lambda self: (12, 0)})
    with pytest.raises(TypeError, match="x must be on a CPU or GPU; got DLPack's device type 12"):
        cupykern.softmax(there)
    with pytest.raises(TypeError, match="x must be a cupy or numpy array; got list"):
        cupykern.softmax([1.0, 2.0])


# --- on a GPU that is not there -------------------------------------------------------------------


class CudaArray:
    """An object with `__cuda_array_interface__` alone."""

    def __init__(self, x, **more):
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (x.data.ptr, False),
            "shape": x.shape,
            "strides": x.strides,
            "typestr": x.dtype.str,
            "stream": None,
            **more,
        }


CudaArray.__cuda_array_interface__ = None  # the class says what it has


class GpuDlpack:
    def __init__(self, x):
        self.x, self.streams = x, []

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, *, stream, max_version):
        self.streams.append(stream)
        memory = (ctypes.c_uint8 * self.x.nbytes).from_address(self.x.data.ptr)
        array = np.frombuffer(memory, self.x.dtype).reshape(self.x.shape)
        return array.__dlpack__(max_version=max_version)


@pytest.fixture
def fake(monkeypatch):
    with fake_gpu(monkeypatch) as fake:
        fake_streams(monkeypatch, fake)
        attributes = SimpleNamespace(device=0)
        monkeypatch.setattr(
            fake.xp.cuda.runtime, "pointerGetAttributes", lambda address: attributes
        )
        monkeypatch.setattr(protocols, "in_use", type(protocols.in_use)())
        yield fake


def test_cuda_array_interface(fake):
    x = fake.array((4, 256), np.float16)[:, ::2]
    expected = launch_of(fake, lambda: cupykern.softmax(x))[1]
    y, launch = launch_of(fake, lambda: cupykern.softmax(CudaArray(x)))
    assert isinstance(y, fake.xp.ndarray)  # its module has no from_dlpack
    assert launch.variant == expected.variant and launch.args[0] == x.data.ptr == expected.args[0]
    out = CudaArray(fake.array((4, 128), np.float16))
    y, launch = launch_of(fake, lambda: cupykern.softmax(CudaArray(x), out=out))
    assert y is out and out.__cuda_array_interface__["data"][0] in launch.args


def test_cuda_array_interface_names_a_stream(fake):
    x = fake.array((4, 256), np.float16)
    launch_of(fake, lambda: cupykern.softmax(CudaArray(x, stream=77)))
    assert fake.stream.waits == [77]
    launch_of(fake, lambda: cupykern.softmax(CudaArray(x, stream=1)))  # the default one: CuPy's
    assert fake.stream.waits == [77]
    with pytest.raises(ValueError, match="out must be writable"):
        cupykern.softmax(x, out=CudaArray(x, data=(x.data.ptr, True)))


def test_dlpack_on_a_gpu_waits_and_is_kept(fake):
    x = fake.array((4, 256), np.float16)
    there = GpuDlpack(x)
    y, launch = launch_of(fake, lambda: cupykern.softmax(there))
    assert there.streams == [1] and launch.args[0] == x.data.ptr
    fake.stream = Stream(fake, 99)
    launch_of(fake, lambda: cupykern.softmax(there))
    assert there.streams == [1, 99]
    assert len(protocols.in_use) == 2  # until the kernels are done
    for event, _ in protocols.in_use:
        event.done = True
    launch_of(fake, lambda: cupykern.softmax(there))
    assert len(protocols.in_use) == 1


def test_what_kernels_read_is_released_before_its_library_ends(fake, monkeypatch):
    """Exit handlers run last registered first: ours is registered at the first call."""
    at_exit = []
    monkeypatch.setattr(protocols.atexit, "register", at_exit.append)
    protocols.release_at_exit.cache_clear()
    try:
        for _ in range(2):
            cupykern.softmax(GpuDlpack(fake.array((4, 256), np.float16)))
    finally:
        protocols.release_at_exit.cache_clear()
    events = [event for event, _ in protocols.in_use]
    assert len(events) == 2 and not any(event.done for event in events)
    (release,) = at_exit
    release()
    assert not protocols.in_use and all(event.done for event in events)


def test_several_libraries_on_one_device(fake):
    x, w = fake.array((4, 256), np.float16), fake.array((256,), np.float16)
    y, launch = launch_of(fake, lambda: cupykern.rms_norm(x, GpuDlpack(w)))
    assert isinstance(y, fake.xp.ndarray) and w.data.ptr in launch.args
    library = GpuDlpack.__module__.partition(".")[0]
    arrays = f"x: {library} array on gpu 0, weight: numpy array on cpu"
    with pytest.raises(TypeError, match=f"weight must be .* got .*{arrays}"):
        cupykern.rms_norm(GpuDlpack(x), np.ones(256, np.float16))


def test_operands_of_formulas():
    """In a dict, some of the library and one of numpy."""
    a, s, t = X.astype(np.float16), np.linspace(1, 2, 8, dtype=np.float32), X[:, :1]
    expected = cupykern.matmul(a, a.T, epilogue="acc * s + t", operands={"s": s, "t": t})
    y = cupykern.matmul(
        Dlpack(a), Dlpack(a.T), epilogue="acc * s + t", operands={"s": Dlpack(s), "t": t}
    )
    assert isinstance(y, Dlpack)
    np.testing.assert_array_equal(_numpy(y), expected)
