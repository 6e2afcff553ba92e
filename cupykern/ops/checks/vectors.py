"""Products of vectors as numpy has them: a row before a matrix, a column behind one."""

from __future__ import annotations

from typing import Any, NamedTuple

from ... import arguments
from ...numerics import namespace
from .products import check_shapes


class Vectors(NamedTuple):
    """a and b as matrices; the product has a dim of one element for each that is a vector."""

    a: Any
    b: Any
    shape: tuple[int, ...]  # of the result, without these dims
    dims: tuple[int, ...]  # of the product: -2 for a, -1 for b

    def lift(self, name: str, x: Any) -> Any:
        """`x`, an array that broadcasts to the result's shape, for the product; None, numbers and
        0-d arrays as they are.  Raises TypeError and ValueError."""
        if not getattr(x, "ndim", 0):
            return x
        arguments.same_place(name, x, self.a, "a")
        xp = namespace(self.a)
        try:
            x = xp.broadcast_to(x, self.shape)
        except ValueError:
            message = f"{name} must broadcast to {self.shape}; got shape {x.shape}"
            raise ValueError(message) from None
        return self.expand(x)

    def expand(self, x: Any) -> Any:
        """An array of the result's shape as one of the product's: a view."""
        index = (..., None, None) if len(self.dims) == 2 else (..., None)
        return x[..., None, :] if self.dims == (-2,) else x[index]

    def lift_out(self, out: Any) -> Any:
        """Raises TypeError and ValueError."""
        if out is None:
            return None
        arguments.same_place("out", out, self.a, "a")
        if out.shape != self.shape:
            raise ValueError(f"out must have shape {self.shape}; got {out.shape}")
        return self.expand(out)

    def drop(self, y: Any, out: Any) -> Any:
        """The product, or each of several, as the result; the first one is in `out` if given."""
        if isinstance(y, tuple):
            return (self.drop(y[0], out), *(self.drop(x, None) for x in y[1:]))
        if out is not None:
            return out
        dropped = {dim + y.ndim for dim in self.dims}
        return y.reshape(tuple(n for axis, n in enumerate(y.shape) if axis not in dropped))


def read_vectors(a: Any, b: Any) -> Vectors:
    """a, b: a vector at least one of them.  Raises TypeError and ValueError."""
    arguments.target_of("a", a)
    arguments.same_place("b", b, a, "a")
    x = a[None] if a.ndim == 1 else a
    y = b[:, None] if b.ndim == 1 else b
    batch, m, n = check_shapes(x, y)
    ends = *((m,) if a.ndim > 1 else ()), *((n,) if b.ndim > 1 else ())
    dims = *((-2,) if a.ndim == 1 else ()), *((-1,) if b.ndim == 1 else ())
    return Vectors(x, y, (*batch, *ends), dims)
