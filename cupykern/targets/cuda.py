"""The cuda target: one source string per variant, compiled by cupy.RawModule, from sm_80 on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np

from .. import environment
from ..kernels import Variant, overlaps, source_text
from .base import CompileError, Usage, by_value, launch_argument
from .launches import Launcher, launcher, max_active_clusters
from .limits import max_shared_bytes
from .repeated import pack

OPTIONS = ("-std=c++17",)
_ARCHS_WITH_OWN_INSTRUCTIONS = {
    "90": "sm_90a",
    "100": "sm_100a",
    "103": "sm_103a",
    "120": "sm_120a",
    "121": "sm_121a",
}
_allowing = threading.Lock()
_LAUNCHERS = 256  # cached per kernel
_OVERLAP_DRIVER = 12030  # CUDA 12.3: launches overlap in captured graphs too
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14  # CU_FUNC_ATTRIBUTE_*, for clusters of more than 8 blocks


class CudaTarget:
    """One CUDA device."""

    name = "cuda"
    warp_size = 32

    def __init__(self, device_id: int):
        import cupy

        self.xp = cupy
        self.device_id = device_id
        device = cupy.cuda.Device(device_id)
        capability = device.compute_capability
        self.multiprocessors = int(device.attributes["MultiProcessorCount"])
        self.arch = _ARCHS_WITH_OWN_INSTRUCTIONS.get(capability, f"sm_{capability}")
        # Whether kernels that call wait_for_previous_grid can start while the previous one runs.
        self.overlaps = (
            int(capability) >= 90 and cupy.cuda.runtime.driverGetVersion() >= _OVERLAP_DRIVER
        )

    def compile(self, variant: Variant) -> CudaKernel:
        """Compile, or take from CuPy's disk cache, and load.  Raises CompileError."""
        cupy = self.xp
        # CuPy appends its own -arch=sm_90; the first one given wins, and wgmma needs the "a".
        options = (*OPTIONS, f"-arch={self.arch}", *checked_options())
        module = cupy.RawModule(code=source_text(variant, "cuda"), options=options)
        with cupy.cuda.Device(self.device_id):
            try:
                try:
                    function = module.get_function(variant.kernel)
                except OSError:  # the cache directory cannot be written
                    with _cache_in_memory():
                        function = module.get_function(variant.kernel)
            except cupy.cuda.compiler.CompileException as error:
                raise CompileError(variant, self.arch, error.get_message()) from None
            kind = ClusterCudaKernel if variant.launched else CudaKernel
            return kind(cupy, function, variant, self)

    def by_value(self, struct: np.ndarray | np.generic) -> Any:
        return launch_argument(by_value(struct))


class CudaKernel:
    """A loaded variant."""

    def __init__(self, cupy: Any, function: Any, variant: Variant, target: CudaTarget):
        self._function = function
        self._launch = function.kernel
        self._driver = cupy.cuda.driver
        self._num_threads, self._cluster_size = variant.launch_sizes
        self._multiprocessors, self._device_id = target.multiprocessors, target.device_id
        if variant.cluster_size > 8:
            cupy.cuda.driver.funcSetAttribute(
                self._launch.ptr, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1
            )
        may_overlap = target.overlaps and overlaps(variant)
        self._launcher: Callable[[tuple[int, int, int]], Launcher] | None = None  # by sizes
        cluster_size = self._cluster_size if variant.launched else 1  # else the source declares it
        if cluster_size > 1 or may_overlap:
            make = partial(
                launcher, self._launch.ptr, cluster_size=cluster_size, overlaps=may_overlap
            )
            self._launcher = lru_cache(_LAUNCHERS)(make)
        self._launch_linear = function.kernel.linear_launch
        self.usage = Usage(function.num_regs, function.local_size_bytes, function.shared_size_bytes)
        # Above 48 KiB, static shared memory included, the function's limit must be raised.
        self._max_shared_bytes = 48 * 1024 - function.shared_size_bytes

    def blocks_at_once(self, shared_bytes: int) -> int:
        self._allow(shared_bytes)
        size = self._cluster_size
        if size > 1:
            count = max_active_clusters(self._launch.ptr, size, self._num_threads, shared_bytes)
        else:
            count = self._multiprocessors * self._driver.occupancyMaxActiveBlocksPerMultiprocessor(
                self._launch.ptr, self._num_threads, shared_bytes
            )
        return size * max(count, 1)

    def _allow(self, shared_bytes: int) -> None:
        with _allowing:  # another thread must not lower the limit again
            if shared_bytes > self._max_shared_bytes:
                self._function.max_dynamic_shared_size_bytes = shared_bytes
                self._max_shared_bytes = shared_bytes

    def __call__(self, grid: int, args: tuple[Any, ...], shared_bytes: int = 0) -> None:
        if self._launcher is not None:  # CuPy's launch does not take attributes
            self.pack(grid, args, shared_bytes)()
            return
        if shared_bytes > self._max_shared_bytes:
            self._allow(shared_bytes)
        # Takes sizes of one dim as ints, without tuples.
        self._launch_linear(grid * self._num_threads, args, shared_bytes, self._num_threads)

    def pack(self, grid: int, args: tuple[Any, ...], shared_bytes: int) -> Callable[[], None]:
        """Return a function that repeats this launch (repeated.pack), for arrays at the addresses
        of those in `args`."""
        if shared_bytes > self._max_shared_bytes:
            self._allow(shared_bytes)
        sizes = grid, self._num_threads, shared_bytes
        launch_on = None if self._launcher is None else self._launcher(sizes)
        return pack(self._launch, self._device_id, sizes, args, launch_on)

    def launch_plainly(self, grid: int, args: tuple[Any, ...], shared_bytes: int) -> None:
        """The same launch by CuPy's RawKernel, as in code without this wrapper."""
        self._function((grid,), (self._num_threads,), args, shared_mem=shared_bytes)


class ClusterCudaKernel(CudaKernel):
    """A kernel whose block and cluster sizes are set by the launch."""

    def __init__(self, cupy: Any, function: Any, variant: Variant, target: CudaTarget):
        super().__init__(cupy, function, variant, target)
        # CuPy loads a source once: the function's limit applies to launches of all sizes.
        self._allow(max_shared_bytes(target.arch) - function.shared_size_bytes)

    launch_plainly = CudaKernel.__call__


def checked_options() -> tuple[str, ...]:
    """Options for compute-sanitizer's racecheck, with CUPYKERN_CUDA_CHECKED=1.

    Every thread arrives at barriers itself (platform/cuda/hopper.cuh); reports get line numbers.
    """
    return ("-DEVERY_THREAD_ARRIVES", "-lineinfo") if environment.cuda_checked() else ()


@contextmanager
def _cache_in_memory() -> Iterator[None]:
    before = os.environ.get("CUPY_CACHE_IN_MEMORY")
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUPY_CACHE_IN_MEMORY"]
        else:
            os.environ["CUPY_CACHE_IN_MEMORY"] = before
