"""Convert torch tensors to cupy and numpy arrays, and back, without copies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from .. import dtypes
from . import dlpack
from .protocols import ForeignStream, join

_NOTHING: AbstractContextManager[object] = nullcontext()

DTYPES = {
    **{getattr(torch, name): dtype for name, dtype in dtypes.NAMES.items() if hasattr(torch, name)},
    **{
        getattr(torch, name): np.dtype(name)
        for name in (
            *("bool", "uint8", "int16", "int64", "uint16", "uint32", "uint64", "float64"),
            "complex64",
        )
    },
}
TORCH = {dtype: of_torch for of_torch, dtype in DTYPES.items()}
if hasattr(torch, "float4_e2m1fn_x2"):  # NvFp4's data: two codes in a byte
    DTYPES[torch.float4_e2m1fn_x2] = np.dtype(np.uint8)
# For dtypes that numpy lacks, by item size: the dtypes to view a tensor as, and an array, before
# converting it.
_VIEWS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16)}


_VIEWED = {d for d in DTYPES if DTYPES[d].isbuiltin != 1 or d not in TORCH.values()}


class Tensors:
    """The Library of tensors.  Calls run on torch's current stream, with torch's allocator."""

    name = "torch"

    def __init__(self) -> None:
        # Set by cupykern.torch: the operators by name, and a function that calls one untraced.
        self.operators: dict[str, Callable[..., Any]] = {}
        self.untraced: Callable[..., Any] | None = None

    def instead(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any] | None:
        """While torch.compile traces: the function's operator, or the function untraced.

        Raises RuntimeError if cupykern.torch was not imported.
        """
        if not torch.compiler.is_compiling():
            return None
        if self.untraced is None:
            raise RuntimeError(
                "import cupykern.torch before torch.compile traces cupykern's functions"
            )
        operator = self.operators.get(function.__name__)
        more = any(kwargs.get(name) is not None for name in ("out", "config", "epilogue", "score"))
        mask = kwargs.get("mask")
        formula = mask is not None and not hasattr(mask, "dtype")
        if (
            operator is None
            or more
            or formula
            or any(hasattr(x, "arrays") for x in (*args, *kwargs.values()))
        ):
            return functools.partial(self.untraced, function)
        return operator

    def running(self, x: Any, mixed: bool) -> AbstractContextManager[object]:
        return _Running(x.get_device(), mixed) if x.is_cuda else _NOTHING

    def native(self, name: str, x: Any) -> Any:
        """An array of x's memory, ready on CuPy's current stream.

        Raises TypeError (dtype, layout, device) and RuntimeError (a tensor that requires grad).
        """
        if x.requires_grad:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"{name} requires grad, and cupykern has no backward pass: call it within "
                    f"torch.no_grad(), or with {name}.detach()"
                )
            x = x.detach()
        dtype = DTYPES.get(x.dtype)
        if dtype is None:
            allowed = ", ".join(str(allowed) for allowed in DTYPES)
            raise TypeError(f"{name} must have one of the dtypes {allowed}; got {x.dtype}")
        if x.layout != torch.strided or x.is_neg():
            raise TypeError(
                f"{name} must be a dense tensor; got one of {x.layout}"
                + (" with its negative bit set (resolve_neg() clears it)" if x.is_neg() else "")
            )
        if x.is_cuda:
            return _cupy(name, x, dtype)
        if not x.is_cpu:
            raise TypeError(f"{name} must be on the CPU or a GPU; got a tensor on {x.device}")
        if x.dtype not in _VIEWED:
            return x.numpy()
        return x.view(_VIEWS[dtype.itemsize][0]).numpy().view(dtype)

    def before(self, natives: Sequence[Any]) -> None:
        for device_id in _devices(natives):
            _order(device_id, torch_waits=False)

    def after(self, natives: Sequence[Any], runs: bool) -> None:
        if not runs:
            for device_id in _devices(natives):
                _order(device_id, torch_waits=True)

    def place(self, x: Any) -> str:
        """The device of x, for messages."""
        return f"gpu {x.get_device()}" if x.is_cuda else str(x.device)

    def back(self, array: Any, like: Any) -> Any:
        if isinstance(array, np.ndarray):
            if array.dtype.isbuiltin == 1:
                return torch.from_numpy(array)
            codes = torch.from_numpy(array.view(_VIEWS[array.itemsize][1]))
            return _tensor(codes.untyped_storage(), 0, array, codes.device)
        data = array.data
        storage = getattr(data.mem, "_owner", None)
        if isinstance(storage, torch.Tensor):
            storage = storage.untyped_storage()
        elif not isinstance(storage, torch.UntypedStorage):  # memory of CuPy's own pool
            return torch.from_dlpack(dlpack.Exported(array))
        offset = data.ptr - storage.data_ptr() if array.size else 0
        return _tensor(storage, offset // array.itemsize, array, torch_device(data.device_id))


def _tensor(storage: Any, offset: int, array: Any, device: Any) -> torch.Tensor:
    """A tensor of array's shape, strides and dtype at an offset, in elements, in a storage.

    It is not a view of another tensor, so it can require grad and be written to.
    """
    itemsize = array.itemsize
    strides = [stride // itemsize for stride in array.strides]
    made = torch.empty(0, dtype=TORCH[array.dtype], device=device)
    return made.set_(storage, offset, array.shape, strides)


TENSORS = Tensors()


def _devices(natives: Sequence[Any]) -> set[int]:
    return {x.device.id for x in natives if not isinstance(x, np.ndarray)}


def _cupy(name: str, x: Any, dtype: np.dtype) -> Any:
    import cupy

    address, strides = x.data_ptr(), None
    if not address and x.numel():
        raise TypeError(f"{name} must have memory of its own; got a {type(x).__qualname__}")
    if not x.is_contiguous():
        itemsize = dtype.itemsize
        strides = tuple([stride * itemsize for stride in x.stride()])
    return dlpack.cupy_at(cupy, address, tuple(x.shape), dtype, strides, x, x.get_device())


@functools.lru_cache(maxsize=64)
def cupy_stream(handle: int) -> Any:
    """Return CuPy's stream for a CUDA stream handle."""
    import cupy

    if handle == 0:
        return cupy.cuda.Stream.null
    return cupy.cuda.Stream.from_external(ForeignStream(handle))


def current_stream(device_id: int) -> int:
    """The handle of torch's current stream, without a Stream object, as in torch's own code."""
    return torch._C._cuda_getCurrentRawStream(device_id)


def _order(device_id: int, torch_waits: bool) -> None:
    """Make CuPy's current stream of a device wait for torch's, or torch's for CuPy's."""
    import cupy

    handle = current_stream(device_id)
    with dlpack.on_device(cupy, device_id):
        current = cupy.cuda.get_current_stream()
        if current.ptr == handle:
            return
        pair = (cupy_stream(handle), current)
        join(cupy, *(pair if torch_waits else reversed(pair)))


class _Running:
    """Within the block, CuPy uses torch's device, current stream and allocator.

    Memory of torch's allocator stays valid in torch's CUDA graphs, which have private pools, and
    there is one pool of free memory instead of two.

    others: some arguments may be CuPy arrays; torch's and CuPy's streams then wait for each other.
    """

    def __init__(self, device_id: int, others: bool):
        self._device_id, self._others = device_id, others

    def __enter__(self) -> None:
        import cupy

        self._device = None
        if self._device_id != cupy.cuda.runtime.getDevice():
            self._device = cupy.cuda.Device(self._device_id)
            self._device.__enter__()
        handle = current_stream(self._device_id)
        before = cupy.cuda.get_current_stream()
        self._before = self._stream = None
        if before.ptr != handle:
            self._stream = cupy_stream(handle)
            if self._others and not self._stream.is_capturing():
                self._before = before
                join(cupy, self._stream, before)
            self._stream.__enter__()
        self._allocator = cupy.cuda.using_allocator(functools.partial(_allocate, self._device_id))
        self._allocator.__enter__()

    def __exit__(self, *error: Any) -> None:
        import cupy

        self._allocator.__exit__(*error)
        if self._stream is not None:
            self._stream.__exit__(*error)
            if self._before is not None:
                join(cupy, self._before, self._stream)
        if self._device is not None:
            self._device.__exit__(*error)


def _allocate(device_id: int, size: int) -> Any:
    """Allocate with torch's allocator on torch's current stream; return CuPy's pointer."""
    import cupy

    storage = torch.UntypedStorage(size, device=torch_device(device_id))
    memory = cupy.cuda.UnownedMemory(storage.data_ptr(), size, storage, device_id)
    return cupy.cuda.MemoryPointer(memory, 0)


@functools.lru_cache
def torch_device(device_id: int) -> Any:
    return torch.device("cuda", device_id)
