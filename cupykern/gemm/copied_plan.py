"""Products of misaligned or strided operands, which are first copied into aligned memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..arrays import maker, steps_of
from ..kernels import Variant
from ..param_structs import zeros
from ..runtime.jit import get_kernel
from ..targets import Target
from ..targets.repeated import Repeated
from ..typing import Namespace
from .product import (
    ALIGNMENT,
    FP4,
    K_MAJOR,
    MN_MAJOR,
    Matrix,
    by_vectors,
    dual_by_vectors,
    layout_of,
    merge_batch,
)

_LINE = 128  # bytes of an L2 line
MANY = 2**24  # multiplications
_LONG = 64  # tile_k of the mainloops with scalar loads
ALIGN_ROWS = Variant("align_rows", (), (), 256)
FEW_ROWS, _FEW_CODES = 256, 64


class Copy(NamedTuple):
    """One operand to copy to aligned memory: its name, dtype, shape and byte strides.

    columns: the operand's columns become the rows of the copy.
    to: the copy's dtype; None: the operand's.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    columns: bool
    to: np.dtype | None = None

    @property
    def made(self) -> np.dtype:
        """The copy's dtype."""
        return self.dtype if self.to is None else self.to

    @property
    def pitch(self) -> int:
        """Row stride of the copy in bytes."""
        size = self.shape[-2 if self.columns else -1] * self.made.itemsize
        return -(-size // _LINE) * _LINE

    def matrix(self, batch: tuple[int, ...]) -> Matrix:
        """The copy, broadcast to `batch` matrices."""
        pitch = self.pitch // self.made.itemsize
        steps = [1, pitch] if self.columns else [pitch, 1]
        step = pitch * self.shape[-1 if self.columns else -2]
        for size in reversed(self.shape[:-2]):
            steps.insert(0, step)
            step *= size
        steps = [0 if size == 1 else s for size, s in zip(self.shape, steps, strict=True)]
        steps = [0] * (len(batch) + 2 - len(steps)) + steps
        return Matrix(self.made, tuple(steps[:-2]), steps[-2], steps[-1], True)

    @property
    def in_memory(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides in the copy's order: its rows, then the elements of a row."""
        if not self.columns:
            return self.shape, self.strides
        shape, strides = ((*t[:-2], t[-1], t[-2]) for t in (self.shape, self.strides))
        return shape, strides

    @property
    def rows(self) -> tuple[int, int] | None:
        """(number of rows, row stride in bytes) of the operand if align_rows.cu can copy it; else
        None."""
        shape, strides = self.in_memory
        dims = merge_batch(shape[:-1], (strides[:-1],))
        count, (step,) = dims[0] if dims else (1, (0,))
        near = shape[-1] == 1 or strides[-1] == self.dtype.itemsize
        known = len(dims) <= 1 and step >= 0 and near
        return (count, step) if known and count * self.pitch < 2**36 else None

    def copier(self, target: Target) -> Callable[[Any], Any]:
        """A function that allocates and fills the copy, from any array that begins at the operand's
        address."""
        xp, itemsize, rows = target.xp, self.dtype.itemsize, self.rows
        shape, strides = self.in_memory
        bits, size = np.dtype(f"u{itemsize}"), shape[-1] * itemsize
        empty, made_shape = maker(xp), (*shape[:-1], self.pitch // self.made.itemsize)
        if rows is None or self.to is not None:
            read, written = (bits, bits) if self.to is None else (self.dtype, self.to)

            def assign(x: Any) -> Any:
                made = empty(made_shape, written)
                if xp is np:
                    source = np.lib.stride_tricks.as_strided(x.view(read), shape, strides)
                else:
                    source = xp.ndarray(shape, read, x.data, strides)
                made[..., : shape[-1]] = source
                return made

            return assign
        count, step = rows
        params = zeros("gemm/align_rows.cuh", "CopyParams")
        params["source_row"], params["result_row"] = step, self.pitch
        params["source_bytes"] = (count - 1) * step + size
        params["row_chunks"] = chunks = -(-size // ALIGNMENT)
        params["num_chunks"] = count * chunks
        grid = min(-(-count * chunks // ALIGN_ROWS.num_threads), 16 * target.multiprocessors)
        kernel, struct = get_kernel(target, ALIGN_ROWS), target.by_value(params)
        repeated = Repeated(kernel, grid, 0, lambda arrays: (*arrays, struct))

        def launch(x: Any) -> Any:
            made = empty(made_shape, bits)
            repeated.launch((x, made))
            return made

        return launch


def copies(
    arrays: dict[str, Any],
    matrices: dict[str, Matrix],
    m: int,
    n: int,
    k: int,
    block_scales: bool,
    fp16_accumulate: bool,
) -> tuple[Copy, ...]:
    """The operands to copy first, so that the mainloop reads all of them by vectors.

    Small products copy nothing.  Small is below MANY multiplications; if align_rows.cu makes the
    copies, below MANY / 8 with k <= _LONG.  With copies, FP16 (128, 129, 131) takes 19 us instead
    of 26, (17, 333, 335) 16 instead of 42, (1001, 1003, 1005) 25 instead of 133 (H200).

    An MN-major a of at most FEW_ROWS rows is copied too, because no tiles exist for it:
    (32, 4096, 4096) takes 20.4 us instead of 31.7, but (304, 4096, 4096) 52.8 instead of 48.2.
    """
    a, others = matrices["a"], {x: matrices[x] for x in ("b", "b2") if x in matrices}
    b = others["b"]
    if FP4 in (a.dtype, b.dtype):
        return _copies_of_codes(arrays, b, m, n, k)
    vectors = dual_by_vectors if "b2" in others else by_vectors
    own = MN_MAJOR if a.row == 1 and m > FEW_ROWS else K_MAJOR, MN_MAJOR if b.col == 1 else K_MAJOR
    k_major = K_MAJOR, K_MAJOR
    for to_a, to_b in (k_major,) if fp16_accumulate else (own, (K_MAJOR, own[1]), k_major):
        if not vectors(a.dtype, b.dtype, to_a, to_b, block_scales):
            continue
        found = {"a": to_a == MN_MAJOR} if layout_of(a, a.col, a.row, k, m) != to_a else {}
        for name, x in others.items():
            if layout_of(x, x.row, x.col, k, n) != to_b:
                found[name] = to_b == K_MAJOR
        if a.dtype == dtypes.float32:  # FP32 needs one contiguous dim only
            near = {"a": 1 in (a.row, a.col), "b": 1 in (b.row, b.col)}
            found = {name: columns for name, columns in found.items() if not near[name]}
        made = tuple(_copy_of(name, arrays[name], columns) for name, columns in found.items())
        if all(copy.rows for copy in made):
            return made if m * n * k >= MANY // 8 or k > _LONG else ()
        return made if m * n * k >= MANY else ()
    return ()


def conversions(arrays: dict[str, Any], matrices: dict[str, Matrix]) -> tuple[Copy, ...]:
    """The copy that converts a 16-bit operand to FP32, if the other operand is FP32; else none.

    The copy keeps the operand's contiguous dim.
    """
    kinds = {matrices[name].dtype for name in ("a", "b")}
    if dtypes.float32 not in kinds or len(kinds) == 1:
        return ()
    name = "b" if matrices["a"].dtype == dtypes.float32 else "a"
    columns = matrices[name].col != 1 and matrices[name].row == 1
    return (_copy_of(name, arrays[name], columns)._replace(to=dtypes.float32),)


def _copies_of_codes(arrays: dict[str, Any], b: Matrix, m: int, n: int, k: int) -> tuple[Copy, ...]:
    """The copy of b's misaligned NVFP4 codes, for up to _FEW_CODES rows of a.  With more rows the
    codes are decoded to memory first, which needs no copy."""
    if b.dtype != FP4 or m > _FEW_CODES or layout_of(b, b.row, b.col, k // 2, n) == K_MAJOR:
        return ()
    copy = _copy_of("b", arrays["b"], True)._replace(dtype=FP4)
    return (copy,) if copy.rows is not None and k > _LONG else ()


def _copy_of(name: str, x: Any, columns: bool) -> Copy:
    """The Copy of the operand x; a broadcast batch dim is copied once."""
    steps = steps_of(x)
    batch = zip(x.shape[:-2], steps[:-2], strict=True)
    shape = *(1 if step == 0 else size for size, step in batch), *x.shape[-2:]
    return Copy(name, x.dtype, shape, steps, columns)


class CopiedPlan(NamedTuple):
    """The launch of a product, preceded by copies of some of its arrays.

    copiers: (index among the kernel's arrays, a function that returns the copy) of each.
    """

    copiers: tuple[tuple[int, Callable[[Any], Any]], ...]
    plan: Any
    launches: tuple[Any, ...] = ()  # empty: each call allocates memory

    def launch(self, xp: Namespace, arrays: tuple[Any, ...]) -> None:
        """arrays: the kernel's arrays; a copied one need only begin at the operand's address."""
        made = list(arrays)
        for place, copy in self.copiers:
            made[place] = copy(made[place])
        self.plan.launch(xp, tuple(made))
