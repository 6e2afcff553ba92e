"""Products at launch: operands, batches, and the kernel parameters of both.

Shared by every mainloop and every op that multiplies matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..arrays import steps_of
from ..expression.code import FormulaCode
from ..expression.cpp import MAX_OPERANDS, OF_INTEGER_ARRAYS, OperandCode, source
from ..expression.expression import reductions
from ..expression.tree import Node
from ..param_structs import fast_divmod
from ..targets import address_of
from ..typing import Array

MAX_BATCH_DIMS = 4  # gemm/work_tile.cuh: kMaxBatchDims
_NUM_OPERANDS = 12  # gemm/work_tile.cuh: kOperands
# Contiguous along k, along m or n, or neither.  gemm/mainloop_portable.cuh: Layout
K_MAJOR, MN_MAJOR, STRIDED = range(3)
BLOCK = 128  # scale block along k and n; gemm/work_tile.cuh: kScaleBlock
ALIGNMENT = 16  # bytes of an asynchronous copy


class Activation(NamedTuple):
    """An activation of the epilogue.

    code: its number in gemm/epilogue/linear_combination.cuh: Activation.
    slow: it takes many instructions.
    halves: kernels that store 16-bit results by TMA compute it from half its argument, and so take
        half of alpha and of the bias.
    """

    code: int
    slow: bool = True
    halves: bool = False


ACTIVATIONS: dict[str | None, Activation] = {
    None: Activation(0, slow=False),
    "relu": Activation(1, slow=False),
    "gelu": Activation(2, halves=True),
    "gelu_tanh": Activation(3),
    "silu": Activation(4),
}
"""A new activation is a line here, one in reference/activations.py, and one in the kernels."""

FLOAT16S = (dtypes.float16, dtypes.bfloat16)
FP8 = (dtypes.float8_e4m3fn, dtypes.float8_e5m2)
FP4 = dtypes.float4_e2m1fn  # NVFP4, with scales
NARROW = *FP8, dtypes.int8  # dtypes of formula results that saturate


def compute_dtype(a: np.dtype, b: np.dtype) -> np.dtype:
    """The dtype in which a and b are multiplied.  It represents every value of both.

    Raises TypeError for a pair that is not supported.
    """
    if a == b and a in (*FLOAT16S, dtypes.float32, dtypes.int8):
        return a
    if dtypes.float32 in (a, b) and (a in FLOAT16S or b in FLOAT16S):
        return dtypes.float32
    if a in FLOAT16S and b in (*FP8, dtypes.int8):
        return a
    if (a in FP8 and b in FP8) or a == b == FP4:
        return dtypes.float16
    if a in FLOAT16S and b == FP4:
        return a
    raise TypeError(
        f"a and b must both be float16, bfloat16, float32 or int8, one float32 and one float16 or "
        f"bfloat16, both FP8, or a float16 or bfloat16 and b FP8 or int8; got {a} and {b}"
    )


# --- operands ----------------------------------------------------------------------------------


class Matrix(NamedTuple):
    """A batch of matrices in a plan: strides in elements, 0 along dims of size 1.

    aligned: every matrix begins at a multiple of 16 bytes.
    For FP4, of which a byte holds two, strides count bytes.
    """

    dtype: np.dtype
    batch_strides: tuple[int, ...]
    row: int
    col: int
    aligned: bool

    @property
    def transposed(self) -> Matrix:
        return self._replace(row=self.col, col=self.row)


def transposed(x: Matrix) -> Matrix:
    return x._replace(row=x.col, col=x.row)


def matrix(array: Array, batch: tuple[int, ...]) -> Matrix | None:
    """`array` broadcast to `batch` matrices; None unless address and strides are multiples of the
    itemsize.  uint8 arrays hold NVFP4 codes."""
    itemsize, strides = array.dtype.itemsize, steps_of(array)
    address = address_of(array)
    if any(step % itemsize for step in (address, *strides)):
        return None
    aligned = not any(step % ALIGNMENT for step in (address, *strides[:-2]))
    steps = [0] * max(0, len(batch) + 2 - len(strides)) + [s // itemsize for s in strides]
    dtype = FP4 if array.dtype == np.uint8 else array.dtype
    return Matrix(dtype, tuple(steps[:-2]), steps[-2], steps[-1], aligned)


class Groups(NamedTuple):
    """The strides of an NVFP4 operand's scales, in elements (nvfp4.cuh: GroupScales).

    block: from 128 rows to the next 128.  quarter: from 32 of these rows to the next 32.  row: from
    a row to the next.  word: from four scales of a row, 64 elements of k, to the next four.
    """

    batch_strides: tuple[int, ...]
    block: int
    quarter: int
    row: int
    word: int


def must_be_copied(a: Matrix, b: Matrix, k: int, m: int) -> bool:
    """Whether b is NVFP4 and the mainloops cannot read the other operand a by vectors along k."""
    return b.dtype == FP4 != a.dtype and layout_of(a, a.col, a.row, k, m) != K_MAJOR


def layouts(
    a: Matrix, b: Matrix, k: int, m: int, n: int, block_scales: bool = False
) -> tuple[int, int]:
    """The layouts in which the mainloop reads the operands: both by vectors, or both STRIDED.

    The FP32 mainloop reads each operand by its own layout, and K-major ones, which need not be
    aligned, by elements.
    """
    if b.dtype == FP4:
        return K_MAJOR, K_MAJOR
    if a.dtype == dtypes.float32:
        return _layout_of_fp32(a, a.col, a.row, k, m), _layout_of_fp32(b, b.row, b.col, k, n)
    found = layout_of(a, a.col, a.row, k, m), layout_of(b, b.row, b.col, k, n)
    vectors = by_vectors(a.dtype, b.dtype, *found, block_scales)
    return found if vectors else (STRIDED, STRIDED)


def by_vectors(
    a: np.dtype, b: np.dtype, layout_a: int, layout_b: int, block_scales: bool = False
) -> bool:
    """Whether there are variants that read operands of these layouts by vectors.

    The mainloops could also read FP32 of every layout, and E5M2 with block scales, by vectors; as
    these are rare, there are no such variants.
    """
    if STRIDED in (layout_a, layout_b) or (block_scales and dtypes.float8_e5m2 in (a, b)):
        return False
    if a.itemsize == 1:
        return (layout_a, layout_b) == (K_MAJOR, K_MAJOR)
    return layout_a == K_MAJOR if b.itemsize != 2 else True


def dual_by_vectors(
    a: np.dtype, b: np.dtype, layout_a: int, layout_b: int, block_scales: bool = False
) -> bool:
    """`by_vectors` for dual GEMMs, which have fewer pairs of dtypes and layouts."""
    if layout_a != K_MAJOR or not by_vectors(a, b, layout_a, layout_b, block_scales):
        return False
    if b in FLOAT16S:
        return True
    if block_scales and (a == dtypes.int8 or b != dtypes.float8_e4m3fn):
        return False
    return layout_b == K_MAJOR and dtypes.float8_e5m2 not in (a, b)


def layout_of(x: Matrix, k_step: int, mn_step: int, k: int, mn: int) -> int:
    """The layout of one operand (mn, k): K_MAJOR if it can be read by vectors along k, MN_MAJOR if
    along the other dim, else STRIDED.

    Vectors need rows that are aligned to 16 bytes, and positive strides.
    """
    if not x.aligned or min(x.batch_strides, default=0) < 0:
        return STRIDED

    def contiguous(near: int, near_size: int, step: int, size: int) -> bool:
        whole = step % (ALIGNMENT // x.dtype.itemsize) == 0
        return (near == 1 or near_size == 1) and whole and (step > 0 or size == 1)

    if contiguous(k_step, k, mn_step, mn):
        return K_MAJOR
    return MN_MAJOR if contiguous(mn_step, mn, k_step, k) else STRIDED


def _layout_of_fp32(x: Matrix, k_step: int, mn_step: int, k: int, mn: int) -> int:
    if layout_of(x, k_step, mn_step, k, mn) == MN_MAJOR:
        return MN_MAJOR
    return K_MAJOR if k_step == 1 else STRIDED


def misaligned_layout(a: Matrix, b: Matrix, m: int, n: int, k: int) -> int:
    """GemmTask.misaligned_b; STRIDED unless the operands begin at multiples of 16 bytes."""
    aligned = a.dtype == b.dtype in FLOAT16S and a.aligned and b.aligned
    if not aligned or not (a.col == 1 or k == 1) or a.row < 0:
        return STRIDED
    if (b.row == 1 or k == 1) and b.col >= 0:
        return K_MAJOR
    mn_major = (b.col == 1 or n == 1) and b.row >= 0
    return MN_MAJOR if mn_major and layout_of(a, a.col, a.row, k, m) == K_MAJOR else STRIDED


def groups(scales: Matrix, k: int, blocked: bool) -> Groups:
    """The Groups of an operand.

    scales: a batch of matrices (rows, K / 16); if blocked, of (1, number of scales).
    """
    if blocked:
        return Groups(scales.batch_strides, -(-k // 64) * 512, 4, 16, 512)
    return Groups(scales.batch_strides, 128 * scales.row, 32 * scales.row, scales.row, 4)


# --- products ----------------------------------------------------------------------------------


GROUPS = ("groups_a", "groups_b", "groups_b2")
ARRAYS = {  # each kernel's arrays, in order
    "gemm": ("a", "b", "out", "bias", "residual", "scale_a", "scale_b", "groups_a", "groups_b"),
    "dual_gemm": (
        *("a", "b", "b2", "out", "scale_a", "scale_b", "scale_b2"),
        *("groups_a", "groups_b", "groups_b2"),
    ),
    "dequant_softmax": (
        *("a", "b", "out", "bias", "scale_b"),
        *("logits", "statistics"),
    ),
}


OPERANDS = tuple(f"x{k}" for k in range(MAX_OPERANDS))  # names of an expression's arrays
OPERAND_CPP = {**dtypes.CPP_NAMES, **OF_INTEGER_ARRAYS}


class Formula(NamedTuple):
    """An expression as the epilogue.

    nodes: its tree.
    operands: matrices and numbers; None, until `of` is called, for the array of that name in
        OPERANDS.
    scope: "epilogue", or "gate" for two products.
    roots: the nodes of the results, if there are several.  Then `operands` ends with the results
        after the first; row reductions are FP32 (..., M, 1).
    first_matrix: index of the batch's first matrix.
    """

    nodes: tuple[Node, ...]
    operands: tuple[Matrix | float | None, ...]
    scope: str = "epilogue"
    roots: tuple[int, ...] = ()
    first_matrix: int = 0

    def of(self, matrices: dict[str, Matrix]) -> Formula:
        """The formula with `matrices`, by name, in place of None."""
        found = zip(OPERANDS, self.operands, strict=False)
        return self._replace(
            operands=tuple(matrices[name] if x is None else x for name, x in found)
        )

    @property
    def arguments(self) -> tuple[Matrix | float | None, ...]:
        """`operands` without results."""
        return self.operands[: len(self.operands) - max(0, len(self.roots) - 1)]

    def code(self, out: np.dtype) -> FormulaCode:
        """The C++ code.  out: the first result's dtype."""
        kinds = [
            OperandCode(OPERAND_CPP[x.dtype], x.row != 0, x.col != 0)
            if isinstance(x, Matrix)
            else OperandCode()
            for x in self.arguments
        ]
        results = (x for x in self.operands[len(kinds) :] if isinstance(x, Matrix))
        more = [dtypes.CPP_NAMES[x.dtype] for x in results]
        narrow = dtypes.CPP_NAMES[out] if out in NARROW else "void"
        text = source(self.nodes, kinds, self.scope, self.roots, more, narrow)
        return FormulaCode(text, bool(self.reductions))

    @property
    def reductions(self) -> tuple[tuple[int, str], ...]:
        """(operand index, one of tree.REDUCTIONS) of each result that is a row reduction."""
        found = enumerate(reductions(self.nodes, self.roots), len(self.operands) - len(self.roots))
        return tuple((k, reduction) for k, reduction in found if reduction is not None)

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes of the results after the first, whose shape is `shape`."""
        return tuple(
            shape if reduction is None else (*shape[:-1], 1)
            for reduction in reductions(self.nodes, self.roots[1:])
        )


class Product(NamedTuple):
    """A launch without its arrays.

    Computes out = activation(alpha * (scale_a * a) @ (scale_b * b) + bias) + residual.
    The kernel dual_gemm computes out = silu(alpha * (scale_a * a) @ (scale_b * b)) *
    (alpha2 * (scale_a * a) @ (scale_b2 * b2)).

    block_scales: scale_a and scale_b hold one scale per 128 of k (and per 128 columns of b).
    fp16_accumulate: accumulators of FP16 products are FP16.
    groups_a, groups_b, groups_b2: the scales of NVFP4 operands.  policy: see dual_gemm.cu.
    logits: the matrix of dequant_softmax's stored logits (logits.py); None: the epilogue stores
        exponentials to the result instead.  num_sets: sets of columns with statistics, per row.
    precision: for FP32 operands.  stored: the dtypes from which FP32 operands were converted.
    num_parts, part_steps: for operands that are parts of FP32 ones (split_float32.py): number of
        parts, and stride from a part to the next.
    formula: replaces bias, activation and residual; for dual_gemm, silu and the gating product.
    """

    batch: tuple[int, ...]
    m: int
    n: int
    k: int
    a: Matrix
    b: Matrix
    out: Matrix
    bias: Matrix | None
    residual: Matrix | None
    scale_a: Matrix | None
    scale_b: Matrix | None
    alpha: float
    activation: str | None
    block_scales: bool = False
    fp16_accumulate: bool = False
    groups_a: Groups | None = None
    groups_b: Groups | None = None
    b2: Matrix | None = None
    scale_b2: Matrix | None = None
    groups_b2: Groups | None = None
    alpha2: float = 1.0
    policy: int = 0
    kernel: str = "gemm"
    logits: Matrix | None = None
    num_sets: int = 0
    precision: str = "float32"
    stored: tuple[np.dtype, np.dtype] = (dtypes.float32, dtypes.float32)
    num_parts: tuple[int, int] = (1, 1)
    part_steps: tuple[int, int] = (0, 0)
    formula: Formula | None = None

    @property
    def array_names(self) -> tuple[str, ...]:
        """The names in ARRAYS, then those of the expression's operands."""
        return ARRAYS[self.kernel] + (OPERANDS if self.formula else ())

    @property
    def swapped(self) -> Product:
        """The transposed product, without scales."""
        names = ("out", "bias", "residual")
        others = {name: x.transposed for name in names if (x := getattr(self, name))}
        a, b = self.b.transposed, self.a.transposed
        return self._replace(m=self.n, n=self.m, a=a, b=b, **others)


# --- kernel parameters -------------------------------------------------------------------------


def merge_batch(
    sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> list[tuple[int, tuple[int, ...]]]:
    """Merge batch dims into the fewest: (size, stride of each operand) of each, innermost first.

    sizes: of the batch dims.  strides: of each operand along these dims.
    """
    dims: list[tuple[int, tuple[int, ...]]] = []
    for size, *steps in reversed(list(zip(sizes, *strides, strict=True))):
        if size == 1:
            continue
        inner = dims[-1] if dims else None
        if inner and all(s == i * inner[0] for s, i in zip(steps, inner[1], strict=True)):
            dims[-1] = (inner[0] * size, inner[1])
        else:
            dims.append((size, tuple(steps)))
    return dims


def product_dims(product: Product) -> list[tuple[int, tuple[int, ...]]]:
    """merge_batch of all operands of `product`, in the order of gemm/work_tile.cuh's Operand."""
    return [(size, strides[:_NUM_OPERANDS]) for size, strides in _all_dims(product)]


def _all_dims(p: Product) -> list[tuple[int, tuple[int, ...]]]:
    """product_dims, followed by the strides of the formula's operands."""
    none = (0,) * len(p.batch)
    operands = (
        *(p.a, p.b, p.out, p.bias, p.residual, p.scale_a, p.scale_b, p.groups_a, p.groups_b),
        *(p.b2, p.scale_b2, p.groups_b2),
        *((x if isinstance(x, Matrix) else None for x in p.formula.operands) if p.formula else ()),
    )
    return merge_batch(p.batch, [none if x is None else x.batch_strides for x in operands])


def fill_batch(batch: np.ndarray, dims: Sequence[tuple[int, Any]]) -> None:
    """batch: a zeroed BatchLayout."""
    batch["num_dims"] = len(dims)
    for d, (size, strides) in enumerate(dims):
        batch["sizes"][d] = size
        batch["strides"][:, d] = strides


def k_per_split(k: int, splits: int, unit: int) -> int:
    """K of each of `splits` ranges of k but the last, which can have less: a multiple of `unit`."""
    return max(1, -(-k // (splits * unit))) * unit


def fill_order(order: np.ndarray, tiles_m: int, tiles_n: int, batch: int, group: int = 8) -> None:
    """order: a zeroed TileOrder.  group: rows of tiles that run down before the next column."""
    group = min(group, tiles_m)
    whole, rest = divmod(tiles_m, group)
    order["split"] = fast_divmod(batch * tiles_m * tiles_n)
    order["matrix"] = fast_divmod(tiles_m * tiles_n)
    order["group"] = fast_divmod(group * tiles_n)
    order["rows"], order["last_rows"] = fast_divmod(group), fast_divmod(rest)
    order["whole_groups"] = whole


def fill_operand(
    operand: np.ndarray, x: Matrix, scale: Matrix | None, groups: Groups | None
) -> None:
    """operand: a zeroed OperandParams.  scale: block scales."""
    operand["strides"] = (x.row, x.col)
    operand["dtype"] = dtypes.CODES[x.dtype]
    if scale is not None:
        operand["block_scales"] = (scale.row, scale.col)
    if groups is not None:
        operand["groups"] = groups[1:]


def fill_block_scales(params: np.ndarray, p: Product) -> None:
    """Fill the strides of block scales.

    params: a kernel's struct with block_scales_a and block_scales_b (for dual GEMMs an array of
    two).
    """
    scales = {"a": (p.scale_a,), "b": (p.scale_b, p.scale_b2)[: params["block_scales_b"].size]}
    for name, of_operand in scales.items() if p.block_scales else ():
        places = np.atleast_1d(params[f"block_scales_{name}"])
        for i, x in enumerate(of_operand):
            if x is not None:
                places[i] = x.row, x.col


def fill_epilogue(epilogue: np.ndarray, product: Product) -> None:
    """epilogue: a zeroed EpilogueParams."""
    p = product
    epilogue["m"], epilogue["n"] = p.m, p.n
    for name, x in (("out", p.out), ("bias", p.bias), ("residual", p.residual)):
        if x is not None:
            epilogue[name] = (x.row, x.col)
            epilogue[f"{name}_dtype"] = dtypes.CODES[x.dtype]
    epilogue["scale_a_stride"] = 0 if p.scale_a is None else p.scale_a.row
    epilogue["scale_b_stride"] = 0 if p.scale_b is None else p.scale_b.col
    epilogue["alpha"] = p.alpha
    epilogue["activation"] = ACTIVATIONS[p.activation].code


def fill_formula(params: np.ndarray, product: Product) -> None:
    """params: a zeroed ExpressionParams."""
    assert product.formula is not None
    formula = product.formula
    params["first_matrix"] = formula.first_matrix
    for k, x in enumerate(formula.operands):
        if isinstance(x, Matrix):
            params["i_strides"][k], params["j_strides"][k] = x.row, x.col
        else:
            params["numbers"][k] = x
    for d, (_, strides) in enumerate(_all_dims(product)):
        own = strides[_NUM_OPERANDS:]
        params["batch_strides"][: len(own), d] = own


def fill_epilogues(epilogues: np.ndarray, product: Product) -> None:
    """epilogues: two zeroed EpilogueParams, one per product."""
    fill_epilogue(epilogues[0], product)
    fill_epilogue(epilogues[1], product._replace(scale_b=product.scale_b2, alpha=product.alpha2))
