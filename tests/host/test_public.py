"""Public names: where pickle and help() find them, and what crosses to worker processes."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import pydoc
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

import cupykern
from cupykern import OPS
from cupykern.gemm.portable_config import GemmConfig
from cupykern.kernels import Variant
from cupykern.rows.configs import SharedRows
from cupykern.targets import CompileError, host

FUNCTIONS = [name for name in cupykern.__all__ if inspect.isfunction(getattr(cupykern, name))]
CLASSES = [name for name in cupykern.__all__ if inspect.isclass(getattr(cupykern, name))]
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize("name", FUNCTIONS + CLASSES)
def test_pickle_finds_the_public_object(name):
    public = getattr(cupykern, name)
    assert pickle.loads(pickle.dumps(public)) is public
    assert public.__qualname__ == name
    assert getattr(sys.modules[public.__module__], name) is public


@pytest.mark.parametrize(
    "op", [op for op in OPS if op.run.__name__ in cupykern.__all__], ids=lambda op: op.name
)
def test_help_shows_an_op_by_its_public_name(op):
    name = op.run.__name__
    public = getattr(cupykern, name)
    assert public.__module__ == "cupykern" and public.__doc__ == op.run.__doc__
    assert inspect.signature(public) == inspect.signature(op.run)
    shown = pydoc.plain(pydoc.render_doc(public))
    assert f"function {name} in module cupykern\n" in shown and f"\n{name}(" in shown


def test_functions_that_tune_at_first_can_be_pickled():
    code = (
        "import pickle, cupykern\n"
        "assert cupykern.softmax.__wrapped__.__wrapped__\n"
        "print(pickle.loads(pickle.dumps(cupykern.softmax)) is cupykern.softmax)"
    )
    environment = {**os.environ, "CUPYKERN_TUNE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def _compile(variant: Variant) -> None:
    host.current().compile(variant)


@pytest.fixture(scope="module")
def worker():
    """One that imports everything anew."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as found:
        yield found


def test_a_worker_process_runs_public_functions(worker):
    y = worker.submit(cupykern.softmax, X, scale=2.0).result()
    assert y.tobytes() == cupykern.softmax(X, scale=2.0).tobytes()
    with pytest.raises(np.exceptions.AxisError, match=r"x of shape \(4, 6\): axis 5"):
        worker.submit(cupykern.softmax, X, axis=5).result()


def test_arguments_and_results_cross_to_worker_processes(worker):
    numbers = np.linspace(-2, 2, 64, dtype=np.float32).reshape(2, 32)
    packed = worker.submit(cupykern.quantize_nvfp4, numbers).result()
    here = cupykern.quantize_nvfp4(numbers)
    assert isinstance(packed, cupykern.NvFp4)
    assert (packed.dequantize() == here.dequantize()).all()
    y = worker.submit(cupykern.scaled_mm, packed, here).result()
    assert y.tobytes() == cupykern.scaled_mm(here, packed).tobytes()
    report = worker.submit(cupykern.nonfinite_report, X).result()
    assert report == cupykern.nonfinite_report(X)


def test_block_masks_cross_to_worker_processes(worker):
    kept = np.tri(70, dtype=bool)
    mask = worker.submit(cupykern.BlockMask.from_dense, kept, 64, 64).result()
    assert isinstance(mask, cupykern.BlockMask)
    q = np.random.default_rng(0).normal(size=(1, 1, 70, 16)).astype(np.float16)
    y = worker.submit(cupykern.attention, q, q, q, mask=mask).result()
    expected = cupykern.attention(q, q, q, mask=cupykern.BlockMask.from_dense(kept, 64, 64))
    assert y.tobytes() == expected.tobytes()


@pytest.mark.parametrize("config", [SharedRows(32, 32, 1, 1), GemmConfig(64, 64, 32, 2, 2)])
def test_configs_are_values(config):
    found = pickle.loads(pickle.dumps(config))
    assert found == config and hash(found) == hash(config)


def test_a_compile_error_crosses_from_worker_processes(worker):
    """It does not break the pool: pickle makes exceptions anew from their arguments."""
    variant = Variant("broken", (), (), 32, text="KERNEL void broken(float* x) { x[0] = y; }")
    with pytest.raises(CompileError, match=r"broken<.*does not compile for host") as raised:
        worker.submit(_compile, variant).result()
    assert raised.value.variant == variant and "y" in raised.value.log
    assert worker.submit(cupykern.softmax, X).result().shape == X.shape
