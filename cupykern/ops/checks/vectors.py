"""Products with vectors, like in numpy: a is a row, b is a column."""

from __future__ import annotations

from typing import Any, NamedTuple

from ... import arguments
from ...numerics import namespace
from ...typing import Array, Results
from .products import check_shapes


class Vectors(NamedTuple):
    """a and b as matrices.  The product has a dim of size 1 for each operand that is a vector."""

    a: Array
    b: Array
    shape: tuple[int, ...]  # of the result, without dims of size 1
    dims: tuple[int, ...]  # the product's dims of size 1: -2 for a, -1 for b

    def lift(self, name: str, x: Any) -> Any:
        """Broadcast `x` to the result's shape and expand it to the product's shape.  None, numbers
        and 0-d arrays are returned as they are.  Raises TypeError and ValueError."""
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

    def expand(self, x: Array) -> Array:
        """View an array of the result's shape in the product's shape."""
        index = (..., None, None) if len(self.dims) == 2 else (..., None)
        return x[..., None, :] if self.dims == (-2,) else x[index]

    def lift_out(self, out: Array | None) -> Array | None:
        """View `out` in the product's shape.  Raises TypeError and ValueError."""
        if out is None:
            return None
        arguments.same_place("out", out, self.a, "a")
        if out.shape != self.shape:
            raise ValueError(f"out must have shape {self.shape}; got {out.shape}")
        return self.expand(out)

    def drop(self, y: Results, out: Array | None) -> Any:
        """The product, or each of several, in the result's shape; the first is `out` if given."""
        if isinstance(y, tuple):
            return (self.drop(y[0], out), *(self.drop(x, None) for x in y[1:]))
        if out is not None:
            return out
        dropped = {dim + y.ndim for dim in self.dims}
        return y.reshape(tuple(n for axis, n in enumerate(y.shape) if axis not in dropped))


def read_vectors(a: Array, b: Array) -> Vectors:
    """Vectors of a and b, at least one of which is a vector.  Raises TypeError and ValueError."""
    arguments.target_of("a", a)
    arguments.same_place("b", b, a, "a")
    x = a[None] if a.ndim == 1 else a
    y = b[:, None] if b.ndim == 1 else b
    batch, m, n = check_shapes(x, y)
    ends = *((m,) if a.ndim > 1 else ()), *((n,) if b.ndim > 1 else ())
    dims = *((-2,) if a.ndim == 1 else ()), *((-1,) if b.ndim == 1 else ())
    return Vectors(x, y, (*batch, *ends), dims)
