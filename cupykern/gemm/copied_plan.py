"""Products of operands that no main loop reads by vectors: these are copied before, line by line."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..arrays import maker
from .product import FP4, INNER, OUTER, Matrix, by_vectors, dual_by_vectors, layout_of

_LINE = 128  # bytes, that L2 reads at once
_MANY = 2**24  # multiplications
_FEW_ROWS = 256


class Copy(NamedTuple):
    """Of an operand: its name, shape and strides in bytes, and whether its columns become lines, not its rows."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    columns: bool

    @property
    def pitch(self) -> int:
        """From a line to the next in bytes."""
        size = self.shape[-2 if self.columns else -1] * self.dtype.itemsize
        return -(-size // _LINE) * _LINE

    def matrix(self, batch: tuple[int, ...]) -> Matrix:
        """The copy, broadcast to `batch` matrices."""
        pitch = self.pitch // self.dtype.itemsize
        steps = [1, pitch] if self.columns else [pitch, 1]
        step = pitch * self.shape[-1 if self.columns else -2]
        for size in reversed(self.shape[:-2]):
            steps.insert(0, step)
            step *= size
        steps = [0 if size == 1 else s for size, s in zip(self.shape, steps, strict=True)]
        steps = [0] * (len(batch) + 2 - len(steps)) + steps
        return Matrix(self.dtype, tuple(steps[:-2]), steps[-2], steps[-1], True)

    def make(self, xp: Any, x: Any) -> Any:
        """The copy's memory.  x: an array that begins where the operand does."""
        bits, itemsize = np.dtype(f"u{self.dtype.itemsize}"), self.dtype.itemsize
        shape, strides = self.shape, self.strides
        if self.columns:
            shape, strides = ((*t[:-2], t[-1], t[-2]) for t in (shape, strides))
        size = shape[-1] * itemsize
        made = maker(xp)((*shape[:-1], self.pitch // itemsize), bits)
        if xp is np:
            made[..., : shape[-1]] = np.lib.stride_tricks.as_strided(x.view(bits), shape, strides)
        elif len(shape) == 2 and strides[1] == itemsize and size <= strides[0] < 2**31:
            # 47 instead of 83 us of 4096 x 4097 16-bit numbers (H200).
            runtime, stream = xp.cuda.runtime, xp.cuda.get_current_stream()
            runtime.memcpy2DAsync(
                *(made.data.ptr, self.pitch, x.data.ptr, strides[0], size, shape[0]),
                *(runtime.memcpyDeviceToDevice, stream.ptr),
            )
        else:
            made[..., : shape[-1]] = xp.ndarray(shape, bits, x.data, strides)
        return made


def copies(
    arrays: dict[str, Any],
    matrices: dict[str, Matrix],
    m: int,
    n: int,
    k: int,
    block_scales: bool,
    half_sums: bool,
) -> tuple[Copy, ...]:
    """Of which operands of a product copies are made, so that all can be read by vectors.

    None of small products: (257, 259, 261) of FP16 takes 17 us so instead of 41, (1001, 1003, 1005) 27
    instead of 133 (H200).  Also of a few rows of a that lie in columns, for which there are no tiles: (32,
    4096, 4096) 20.4 instead of 31.7 us, but (304, 4096, 4096) 52.8 instead of 48.2.
    """
    a, others = matrices["a"], {x: matrices[x] for x in ("b", "b2") if x in matrices}
    b = others["b"]
    if m * n * k < _MANY or FP4 in (a.dtype, b.dtype):
        return ()
    vectors = dual_by_vectors if "b2" in others else by_vectors
    own = OUTER if a.row == 1 and m > _FEW_ROWS else INNER, OUTER if b.col == 1 else INNER
    inner = INNER, INNER
    for to_a, to_b in (inner,) if half_sums else (own, (INNER, own[1]), inner):
        if not vectors(a.dtype, b.dtype, to_a, to_b, block_scales):
            continue
        found = {"a": to_a == OUTER} if layout_of(a, a.col, a.row, k, m) != to_a else {}
        for name, x in others.items():
            if layout_of(x, x.row, x.col, k, n) != to_b:
                found[name] = to_b == INNER
        return tuple(_copy_of(name, arrays[name], columns) for name, columns in found.items())
    return ()


def _copy_of(name: str, x: Any, columns: bool) -> Copy:
    """Of a batch that is broadcast each matrix once."""
    batch = zip(x.shape[:-2], x.strides[:-2], strict=True)
    shape = *(1 if stride == 0 else size for size, stride in batch), *x.shape[-2:]
    return Copy(name, x.dtype, shape, x.strides, columns)


class CopiedPlan(NamedTuple):
    """The launch of a product, and where its arrays are that are copied before."""

    copies: tuple[tuple[int, Copy], ...]
    plan: Any
    launches: tuple[Any, ...] = ()  # each call takes memory

    def launch(self, xp: Any, arrays: tuple[Any, ...]) -> None:
        """arrays: the kernel's, of which copied ones need only begin where the operands do."""
        made = list(arrays)
        for place, copy in self.copies:
            made[place] = copy.make(xp, made[place])
        self.plan.launch(xp, tuple(made))
