"""JAX's arrays on the CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foreign_twins import CALLED, assert_same

import cupykern
from cupykern.interop import foreign

X = jnp.linspace(-3, 3, 96, dtype=jnp.float32).reshape(8, 12)


def _array(x: np.ndarray) -> jax.Array:
    return jnp.asarray(np.array(x, order="C"))


@pytest.mark.parametrize("op", CALLED, ids=lambda op: op.name)
@pytest.mark.parametrize("seed", range(3))
def test_every_op_gives_what_it_gives_numpy(op, seed):
    assert_same(op, seed, _array, jax.Array)


@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8, jnp.bool_]
)
def test_memory_is_shared_both_ways(dtype):
    x = jnp.arange(512).reshape(16, 32).astype(dtype)
    here = foreign.native("x", x)
    assert here.dtype == x.dtype and here.ctypes.data == x.unsafe_buffer_pointer()
    made = cupykern.empty((16, 32), str(x.dtype), "host") if dtype != jnp.bool_ else here
    back = foreign.library_of(x).back(made, x)
    assert isinstance(back, jax.Array) and back.dtype == x.dtype
    assert back.unsafe_buffer_pointer() == made.ctypes.data


def test_results_take_part_in_jax():
    y = cupykern.softmax(X.astype(jnp.bfloat16))
    assert (jax.jit(lambda y: y * 2)(y) == y + y).all()


def test_out_is_refused():
    with pytest.raises(TypeError, match="out must not be a jax array, which cannot be written to"):
        cupykern.softmax(X, out=jnp.zeros_like(X))


def test_traced_arrays_are_refused():
    for transformed in (jax.jit(cupykern.softmax), jax.vmap(cupykern.softmax)):
        with pytest.raises(TypeError, match="x must not be traced by JAX"):
            transformed(X)
    with pytest.raises(TypeError, match="x must not be traced by JAX"):
        jax.grad(lambda x: cupykern.softmax(x).sum())(X)


def test_options_may_be_jax_dtypes():
    assert cupykern.softmax(X, dtype=jnp.bfloat16).dtype == jnp.bfloat16
