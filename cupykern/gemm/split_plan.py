"""Split-K with a workspace, for few tiles and long K: one launch computes a batch of partial
accumulators, another adds them.

The Python half of kernels_cu/reduce_split_k.cu.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from .. import dtypes
from ..arguments import config_class
from ..arrays import maker
from ..kernels import Variant
from ..param_structs import zeros
from ..runtime.jit import get_kernel
from ..targets import Device, Target
from ..targets.repeated import Repeated
from ..typing import Namespace
from .gemm_task import GemmTask
from .product import (
    ARRAYS,
    OPERANDS,
    Matrix,
    Product,
    fill_batch,
    fill_epilogue,
    fill_formula,
    k_per_split,
    product_dims,
)
from .sm90_gemm_config import Sm90Fp8GemmConfig, Sm90GemmConfig, Sm90MixedGemmConfig

REDUCE_SPLIT_K = Variant("reduce_split_k", (), (), 256)
_RUN, _BLOCKS = 4, 8  # reduce_split_k.cu: kRun; blocks per multiprocessor
_OUT = ARRAYS["gemm"].index("out")
SplitConfig = Sm90GemmConfig | Sm90Fp8GemmConfig | Sm90MixedGemmConfig


@config_class
class SplitKWorkspace:
    """`config` computes `splits` ranges of K, each of equally many stages but the last, which can
    have fewer.  A second launch adds the partial accumulators and applies the epilogue."""

    config: SplitConfig
    splits: int

    @property
    def num_threads(self) -> int:
        return self.config.num_threads

    def split(self, task: GemmTask) -> GemmTask:
        """The task of the first launch: a batch of partial accumulators, each of k of a split."""
        k = task.k
        if self.splits > 1:
            k = k_per_split(k, self.splits, self.config.tile_k)
        return replace(
            task,
            batch=self.splits,
            k=k,
            epilogue="floats",
            epilogue_decoded="floats",
            slow_activation=False,
            scale_vectors=False,
            formula=None,
        )

    def shared_bytes(self, task: GemmTask) -> int:
        return self.config.shared_bytes(self.split(task))

    def variant(self, task: GemmTask) -> Variant:
        """The variant of the first launch."""
        return self.config.variant(self.split(task), self.splits)

    def refusal(self, task: GemmTask, device: Device) -> str | None:
        """Why this config cannot compute `task` on `device`; None if it can."""
        t, splits = task, self.splits
        if splits < 1:
            return f"splits must be positive; got {splits}"
        if t.kernel != "gemm" or t.batch != 1 or t.n % _RUN:
            return "split-K with a workspace is of one product with a multiple of 4 columns"
        if t.a in (dtypes.int8, dtypes.float32):
            return f"split-K with a workspace has no kernel for {t.a} operands"
        if not t.k or self.config.tile_k < 1:
            return f"split-K needs a positive k and tile_k; got k = {t.k} and {self.config}"
        if self.config.split_k > 1:
            return "k is split by a workspace or by the blocks of a cluster, not by both"
        part = self.split(t)
        if (splits - 1) * part.k >= t.k:
            return f"the last of {splits} splits of k = {t.k} would be empty"
        if splits * t.m * t.n >= 2**31:
            return f"{splits} splits of {t.m} x {t.n} accumulators need too large a workspace"
        return self.config.refusal(part, device)


class SplitPlan(NamedTuple):
    """A launch that stores partial accumulators to a workspace, and one that adds them."""

    splits: Any
    operands: tuple[str, ...]  # arrays that the first launch reads
    partial_size: int
    reduction: Repeated  # takes the partial accumulators and the arrays of Product.array_names
    launches: tuple[Repeated, ...] = ()  # empty: each call allocates memory

    def launch(self, xp: Namespace, arrays: tuple[Any, ...]) -> None:
        """arrays: product.ARRAYS."""
        partials = maker(xp)((self.partial_size,), dtypes.float32)
        given = zip(ARRAYS["gemm"], arrays, strict=False)  # a formula's operands come last
        taken = [x if name in self.operands else None for name, x in given]
        taken[_OUT] = partials
        self.splits.launch(xp, tuple(taken))
        self.reduction.launch((partials, *arrays))


def partials_pitch(n: int) -> int:
    """Row stride of the partial accumulators in elements."""
    return -(-n // _RUN) * _RUN


def split_plan(target: Target, product: Product, splits: int, plan_of: Any) -> SplitPlan:
    """The plan of split-K with a workspace.

    plan_of: maps the Product of the splits, a batch of partial accumulators, to its plan.
    """
    p = product

    def all_of(x: Any) -> Any:  # every split takes its range of k of the same operand
        return x and x._replace(batch_strides=(0,))

    scale_a, scale_b = (p.scale_a, p.scale_b) if p.block_scales else (None, None)
    of_splits = Product(
        *((splits,), p.m, p.n, p.k),
        *(all_of(p.a), all_of(p.b)),
        Matrix(dtypes.float32, (p.m * p.n,), p.n, 1, True),
        bias=None,
        residual=None,
        scale_a=all_of(scale_a),
        scale_b=all_of(scale_b),
        alpha=1.0,
        activation=None,
        block_scales=p.block_scales,
        groups_a=all_of(p.groups_a),
        groups_b=all_of(p.groups_b),
    )
    operands: tuple[str, ...] = ("a", "b", "groups_a", "groups_b")
    if p.block_scales:
        operands += ("scale_a", "scale_b")
    return reduced_plan(target, product, splits, plan_of(of_splits), operands)


def formula_plan(target: Target, product: Product, plan_of: Any) -> SplitPlan:
    """The plan of a product of FP32 operands with a formula.

    FP32 kernels evaluate no formulas: they store the accumulators, and a second launch evaluates
    the formula.  plan_of: maps the Product without the formula to its plan.
    """
    p, pitch = product, partials_pitch(product.n)
    steps = [p.m * pitch * math.prod(p.batch[i + 1 :]) for i in range(len(p.batch))]
    out = Matrix(dtypes.float32, tuple(steps), pitch, 1, True)
    plain = p._replace(out=out, alpha=1.0, formula=None)
    return reduced_plan(target, p, 1, plan_of(plain))


def reduced_plan(
    target: Target,
    product: Product,
    num_splits: int,
    splits: Any,
    operands: tuple[str, ...] = ("a", "b"),
) -> SplitPlan:
    """The plan that adds `num_splits` partial accumulators and applies `product`'s epilogue.

    splits: the plan that stores the partial accumulators.  operands: the arrays that it reads; the
    epilogue does not apply scales that are among them.
    """
    p = product
    struct, variant = ("reduce_split_k.cu", "SplitKParams"), REDUCE_SPLIT_K
    names: tuple[str, ...] = ("out", "bias", "residual", "scale_a", "scale_b")
    if p.formula is not None:
        struct = ("reduce_split_k_expression.cu", "SplitKExpressionParams")
        variant = p.formula.code(p.out.dtype).variant(REDUCE_SPLIT_K, "reduce_split_k_expression")
        names = ("out", "scale_a", "scale_b", *OPERANDS)
    params = zeros(*struct)
    fill_epilogue(params["epilogue"], p)
    size = math.prod(p.batch) * p.m * partials_pitch(p.n)
    if p.formula is not None:
        fill_batch(params["batch"], product_dims(p))
        params["batch_size"] = math.prod(p.batch)
        fill_formula(params["expression"], p)
    params["num_splits"] = num_splits
    grid = min(-(-size // (_RUN * REDUCE_SPLIT_K.num_threads)), _BLOCKS * target.multiprocessors)
    places = tuple(None if x in operands else p.array_names.index(x) for x in names)
    struct = target.by_value(params)

    def arguments(given: tuple[Any, ...]) -> tuple[Any, ...]:
        partials, *arrays = given
        return (partials, *(None if i is None else arrays[i] for i in places), struct)

    reduction = Repeated(get_kernel(target, variant), grid, 0, arguments)
    return SplitPlan(splits, operands, num_splits * size, reduction)
