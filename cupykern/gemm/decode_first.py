"""Weights that are converted to 16-bit elements in memory before their product."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..kernels import Variant
from ..targets import Device
from .gemm_task import GemmTask
from .product import FP4
from .sm90_dual_config import Sm90DualGemmConfig
from .sm90_gemm_config import Sm90GemmConfig


@dataclass(frozen=True)
class DecodeFirst:
    """8-bit or NVFP4 weights are converted to 16-bit elements in memory, by a launch of their own;
    then `config`, whose epilogue has their scales.

    For many rows of a: the mainloop of 16-bit operands is faster than the mixed-input one.
    """

    config: Sm90GemmConfig | Sm90DualGemmConfig

    @property
    def num_threads(self) -> int:
        return self.config.num_threads

    def decoded(self, task: GemmTask) -> GemmTask:
        """The second launch's: its operands are K-major or MN-major rows of whole 128 bytes."""
        return replace(task.decoded, column_scales=task.kernel == "gemm")

    def shared_bytes(self, task: GemmTask) -> int:
        return self.config.shared_bytes(self.decoded(task))

    def variant(self, task: GemmTask) -> Variant:
        """Of the second launch."""
        return self.config.variant(self.decoded(task))

    def refusal(self, task: GemmTask, device: Device) -> str | None:
        """Why this config cannot compute `task` on `device`; None: it can."""
        if not task.mixed_input and task.b != FP4:
            return f"DecodeFirst is for a 16-bit a with 8-bit weights, or NVFP4; got {task.b}"
        if task.kernel == "gemm":
            if reason := self._gemm_refusal(task):
                return reason
        elif task.scale_vectors:
            return "the gated epilogue of 16-bit operands takes one scale of all elements"
        return self.config.refusal(self.decoded(task), device)

    def _gemm_refusal(self, task: GemmTask) -> str | None:
        if not task.tma_store_epilogue or task.row_scales or task.block_scales:
            return "DecodeFirst needs the TMA-store epilogue, and scales of columns or of all"
        if task.b != FP4 and task.batch != 1:
            return f"8-bit weights are converted for one product; got a batch of {task.batch}"
        return None
