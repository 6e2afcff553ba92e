"""What type checkers know of public calls.  mypy checks this module too (pyproject.toml)."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import cupykern
from cupykern import parallel


class Exported:
    """An array of another library."""

    shape: tuple[int, ...]
    dtype: object

    def __dlpack__(self, *, stream: int | None = None) -> object:
        raise NotImplementedError

    def __dlpack_device__(self) -> tuple[int, int]:
        raise NotImplementedError


def test_results_of_numpy_arrays_are_numpy_arrays_of_any_dtype() -> None:
    x: NDArray[np.float32] = np.ones((2, 16), np.float32)
    half: NDArray[np.float16] = cupykern.softmax(x, dtype="float16")
    assert_type(cupykern.softmax(x), np.ndarray)
    assert_type(cupykern.layer_norm(x), np.ndarray)
    assert_type(cupykern.rms_norm(x, residual=x), tuple[np.ndarray, ...])
    assert_type(cupykern.quantize(x, "int8"), tuple[np.ndarray, np.ndarray])
    assert_type(cupykern.matmul(x, x.T, activation="relu"), np.ndarray)
    assert_type(cupykern.quantize_nvfp4(x), cupykern.NvFp4)
    assert_type(cupykern.nonfinite_report(x), cupykern.NonfiniteReport)
    assert_type(parallel.all_reduce(parallel.SelfCommunicator(), x), np.ndarray)
    assert half.dtype == np.float16


def test_flags_decide_about_the_number_of_results() -> None:
    q = np.ones((1, 2, 16, 64), np.float16)
    comm, is_wanted = parallel.SelfCommunicator(), bool(q.size)
    assert_type(cupykern.attention(q, q, q), np.ndarray)
    assert_type(cupykern.attention(q, q, q, return_lse=True), tuple[np.ndarray, ...])
    assert_type(cupykern.decode_attention(q, q, q, return_lse=True), tuple[np.ndarray, np.ndarray])
    assert_type(parallel.ring_attention(comm, q, q, q), np.ndarray)
    either: Any = cupykern.attention(q, q, q, return_lse=is_wanted)
    assert isinstance(either, tuple)


def results_of_other_libraries(x: Exported, cupy_array: Any) -> None:
    """Never called."""
    assert_type(cupykern.softmax(x, mask=x), Exported)
    assert_type(cupykern.quantize(x, "e4m3"), tuple[Exported, Exported])
    assert_type(cupykern.attention(x, x, x, return_lse=True), tuple[Exported, ...])
    assert_type(cupykern.softmax(cupy_array), Any)
    cupykern.softmax(3)  # type: ignore[call-overload]
    cupykern.attention(x, x, x, layout="bhds")  # type: ignore[call-overload]
    cupykern.matmul(x, x, activation="tanh")  # type: ignore[call-overload]
    parallel.all_gather(parallel.SelfCommunicator(), x)  # type: ignore[call-overload]
