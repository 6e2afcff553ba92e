"""Products whose NVFP4 weights are first decoded to 16-bit elements in memory."""

from __future__ import annotations

from ..arguments import config_class
from ..kernels import Variant
from ..targets import Device
from .gemm_task import GemmTask
from .product import FP4
from .sm90_dual_config import Sm90DualGemmConfig
from .sm90_gemm_config import Sm90GemmConfig


@config_class
class DecodeFirst:
    """One launch decodes the NVFP4 operands to 16-bit elements in memory; a second one, by
    `config`, multiplies them.  The second one's epilogue applies the global scales.

    It is for many rows of a: there the 16-bit mainloop is faster than the mixed-input one.
    """

    config: Sm90GemmConfig | Sm90DualGemmConfig

    @property
    def num_threads(self) -> int:
        return self.config.num_threads

    def shared_bytes(self, task: GemmTask) -> int:
        return self.config.shared_bytes(task.decoded)

    def variant(self, task: GemmTask) -> Variant:
        """The variant of the second launch."""
        return self.config.variant(task.decoded)

    def refusal(self, task: GemmTask, device: Device) -> str | None:
        """Why this config cannot compute `task` on `device`; None: it can."""
        if task.b != FP4:
            return f"DecodeFirst is for NVFP4 weights; got {task.b}"
        if task.scale_vectors or task.block_scales:
            return "Hopper's epilogues of 16-bit operands take one scale of all elements"
        return self.config.refusal(task.decoded, device)
