"""What only a GPU shows: capture, streams, devices, threads, compiler options, host time."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading

import needs
import numpy as np
import pytest

import cupykern
from cupykern import check, inputs, targets
from cupykern.kernels import Variant
from cupykern.op import Call, as_tuple
from cupykern.ops.softmax import OP, SoftmaxProblem
from cupykern.runtime import jit
from cupykern.targets import CompileError, host
from cupykern.tools import bench
from cupykern.tuning.timing import clock_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def x(gpu):
    return gpu.xp.asarray(inputs.values("normal", (256, 1000), np.dtype(np.float16), 1))


def test_captured_graph_computes_at_its_launch(gpu, x):
    expected = cupykern.softmax(x)
    y = gpu.xp.empty_like(x)
    cupykern.softmax(x, out=y)  # compiled before the capture
    y.fill(0)
    stream = gpu.xp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cupykern.softmax(x, out=y)
        graph = stream.end_capture()
        assert not bool((y == expected).all())
        graph.launch()
    stream.synchronize()
    assert bool((y == expected).all())


def test_launches_go_to_the_current_stream(gpu, x):
    stream = gpu.xp.cuda.Stream(non_blocking=True)
    gpu.xp.cuda.Device().synchronize()
    with stream:
        y = cupykern.softmax(x)
    stream.synchronize()
    assert bool((y == cupykern.softmax(x)).all())


@needs.gpus(2)
def test_an_array_of_another_device(gpu, x):
    with gpu.xp.cuda.Device(1):
        there = gpu.xp.asarray(x.get())
    y = cupykern.softmax(there)
    assert y.device.id == 1 and (y.get() == cupykern.softmax(x).get()).all()
    with pytest.raises(ValueError, match="out must be on x's device"):
        cupykern.softmax(there, out=x)


def test_eight_threads_get_the_same_bits(gpu, x):
    jit.clear()
    expected = cupykern.softmax(x).get()
    wrong: list[str] = []

    def work() -> None:
        try:
            for _ in range(50):
                if (cupykern.softmax(x).get() != expected).any():
                    wrong.append("differs")
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("shape", [(64, 4097), (4, 200_000), (2, 3_000_001)])
def test_repeated_calls_give_the_same_bits(gpu, shape):
    x = gpu.xp.asarray(inputs.values("normal", shape, np.dtype(np.float32), 1))
    first = cupykern.softmax(x)
    for _ in range(100):
        assert bool((cupykern.softmax(x) == first).all())


def test_host_and_gpu_agree_within_their_bounds(gpu):
    for dtype in OP.dtypes:
        problem = SoftmaxProblem((33, 3001), dtype=dtype, mask_shape=(33, 1))
        call = OP.inputs(problem, 1, np)
        with host.use():
            ours = cupykern.softmax(*call.args, **call.kwargs)
        kwargs = {**call.kwargs, "mask": gpu.xp.asarray(call.kwargs["mask"])}
        theirs = cupykern.softmax(gpu.xp.asarray(call.args[0]), **kwargs).get()
        references = OP.reference(*call.args, **call.kwargs)
        bounds = OP.bound(*call.args, **call.kwargs, reference=references)
        for output in (ours, theirs):
            assert check.compare((output,), references, bounds).ok


@needs.hopper
def test_the_architecture_with_its_own_instructions(gpu):
    text = (
        "KERNEL void word(int* y) {\n"
        '    asm volatile("setmaxnreg.inc.sync.aligned.u32 64;");\n    y[threadIdx.x] = 1;\n}\n'
    )
    y = gpu.xp.zeros(128, np.int32)
    gpu.compile(Variant("word", (), (), 128, text=text))(1, (y,))
    assert bool((y == 1).all())


def test_a_failed_compile_names_the_line(gpu):
    variant = Variant(
        "word", (), (), 32, text="KERNEL void word(int* y) {\n    y[0] = nothing;\n}\n"
    )
    with pytest.raises(
        CompileError, match=r"(?s)word.*does not compile for.*word\.cu\(2\)"
    ) as caught:
        gpu.compile(variant)
    assert caught.value.arch == gpu.arch


_ONE_CALL = "import cupy, cupykern; print(cupykern.softmax(cupy.zeros((2, 4), 'f4')).get().sum())"


def _call(folder) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _ONE_CALL],
        env={**os.environ, "CUPY_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_corrupted_cache_file(gpu, tmp_path):
    assert _call(tmp_path) == "2.0"
    files = list(tmp_path.glob("*.cubin"))
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert _call(tmp_path) == "2.0"


def test_a_cache_directory_that_cannot_be_written(gpu):
    """/sys takes no files, root's neither. (One that cannot be made stops CuPy's own import.)"""
    assert _call("/sys") == "2.0"


def test_two_processes_compile_at_once(gpu, tmp_path):
    environment = {**os.environ, "CUPY_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _ONE_CALL]
    both = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in both] == ["2.0", "2.0"]


@pytest.fixture(scope="module")
def clock():
    return clock_of(targets.get())


@pytest.mark.parametrize("op", cupykern.OPS, ids=lambda op: op.name)
def test_a_warm_call_costs_little(gpu, clock, op):
    """At most 5 us of host time beyond RawKernel launches of its kernels and cupy.empty of its
    arrays."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("host time is measured alone: without -n")
    tried = [bench.host_times((op,), gpu, clock, 1)[op.name] for _ in range(3)]
    made = 5 if op.name == "cascade_attention" else 1  # the results of its three calls
    beyond = [times["call"] - times["own launches"] - made * times["cupy.empty"] for times in tried]
    assert min(beyond) <= 5, tried  # what else the machine does only adds


def contents(outputs):
    """The bytes of what an op returned."""
    if isinstance(outputs, cupykern.NvFp4):
        outputs = outputs.data, outputs.scale, outputs.global_scale
    arrays = (y.view(np.uint8) if y.itemsize == 1 else y for y in as_tuple(outputs))
    return [y.get().tobytes() for y in arrays]


@pytest.mark.parametrize("op", cupykern.OPS, ids=lambda op: op.name)
def test_packed_launches_are_like_others(gpu, op):
    """With results where the last ones were, on other threads and streams, and in graphs."""
    call = op.inputs(bench.tiny_problem(op, gpu.name), 1, gpu.xp)
    run = functools.partial(op.run, *call.args, **call.kwargs)
    expected, found = contents(run()), []
    stream = gpu.xp.cuda.Stream(non_blocking=True)
    gpu.xp.cuda.Device().synchronize()

    def work() -> None:
        with stream:
            found.extend(contents(run()) for _ in range(4))

    work()
    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(found) == 12 and all(one == expected for one in found)
    with stream:
        stream.begin_capture()
        captured = run(), run()
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch()
        stream.synchronize()
        assert all(contents(outputs) == expected for outputs in captured)


def test_blocks_meet_on_two_streams_at_once(gpu):
    x = gpu.xp.asarray(inputs.values("normal", (1024, 1024), np.dtype(np.float16), 1))
    expected = contents(cupykern.quantize_nvfp4(x))
    streams = [gpu.xp.cuda.Stream(non_blocking=True) for _ in range(2)]
    gpu.xp.cuda.Device().synchronize()
    found = []
    for _ in range(100):
        for stream in streams:
            with stream:
                found.append(cupykern.quantize_nvfp4(x))
    for stream in streams:
        stream.synchronize()
    assert all(contents(one) == expected for one in found)


def test_large_arrays_are_sampled(gpu, x):
    part, (y,) = OP.sample(Call((x,)), (x,), 2000, 1)
    assert part.args[0].shape == (2, 1000) and y.shape == (2, 1000)
