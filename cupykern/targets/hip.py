"""The hip target: the same source strings, compiled by CuPy's ROCm build, which calls hiprtc.

Tested by compiling and by emulation, never on an AMD GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..kernels import Variant, source_text
from .base import CompileError, Usage, by_value, launch_argument

OPTIONS = ("-std=c++17",)  # hiprtc refuses -arch and -ftz; CuPy adds its flag for subnormals


class HipTarget:
    """One ROCm device."""

    name = "hip"

    def __init__(self, device_id: int):
        import cupy

        self.xp = cupy
        self.device_id = device_id
        properties = cupy.cuda.runtime.getDeviceProperties(device_id)
        # "gfx90a:sramecc+:xnack-"
        self.arch = properties["gcnArchName"].decode().partition(":")[0]
        self.warp_size = int(properties["warpSize"])
        self.multiprocessors = int(properties["multiProcessorCount"])

    def compile(self, variant: Variant) -> HipKernel:
        """Compile, or take from CuPy's disk cache, and load.  Raises CompileError."""
        cupy = self.xp
        options = (*OPTIONS, f"--offload-arch={self.arch}")
        module = cupy.RawModule(code=source_text(variant, "hip"), options=options)
        with cupy.cuda.Device(self.device_id):
            try:
                function = module.get_function(variant.kernel)
            except cupy.cuda.compiler.CompileException as error:
                raise CompileError(variant, self.arch, error.get_message()) from None
            return HipKernel(function, variant, self)

    def by_value(self, struct: np.ndarray | np.generic) -> Any:
        return launch_argument(by_value(struct))


class HipKernel:
    """A loaded variant."""

    def __init__(self, function: Any, variant: Variant, target: HipTarget):
        self._multiprocessors = target.multiprocessors
        self._function, self._launch = function, function.kernel
        self._block = (variant.num_threads, 1, 1)
        self.usage = _usage(function)

    def blocks_at_once(self, shared_bytes: int) -> int:
        """One block per compute unit, which always fits."""
        return self._multiprocessors

    def __call__(self, grid: int, args: tuple[Any, ...], shared_bytes: int = 0) -> None:
        self._launch((grid, 1, 1), self._block, args, shared_bytes)

    def launch_plainly(self, grid: int, args: tuple[Any, ...], shared_bytes: int) -> None:
        """The same launch by CuPy's RawKernel, as in code without this wrapper."""
        self._function((grid,), self._block, args, shared_mem=shared_bytes)


def _usage(function: Any) -> Usage | None:
    try:
        return Usage(function.num_regs, function.local_size_bytes, function.shared_size_bytes)
    except Exception:  # this HIP does not report it
        return None
