"""Clocks: time functions in interleaved rounds, with a cold cache before every run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from ..kernels import Variant
from ..runtime import jit
from ..targets import GpuKernel, Target
from ..typing import Array

FLUSH_BYTES = 256 * 2**20  # several times the largest L2 cache
Function = Callable[[], Any]


class Timing(NamedTuple):
    """Median, 20% and 80% quantile of `runs` runs, in microseconds."""

    median: float
    q20: float
    q80: float
    runs: int


def summarize(times: Sequence[float]) -> Timing:
    q20, median, q80 = np.quantile(times, (0.2, 0.5, 0.8))
    return Timing(float(median), float(q20), float(q80), len(times))


class Clock(Protocol):
    min_rounds: int
    max_rounds: int
    is_emulation: bool  # times measure the emulation's work, not a GPU's

    def round(self, functions: Sequence[Function], number: int = 0) -> list[float]:
        """Run each function once, in the order of round `number`; return microseconds of each."""

    def copy(self, nbytes: int) -> Function:
        """Return a plain copy that reads nbytes / 2 and writes nbytes / 2."""

    def read(self, nbytes: int) -> Function:
        """Return a plain read of nbytes."""


def time_rounds(
    clock: Clock, functions: Sequence[Function], warmup_ms: float, rep_ms: float
) -> list[Timing]:
    """Time the functions side by side.

    Each round runs all functions, so that a drift of the clocks affects all of them.  Each round
    has another order, so that a function's after-effects (heat, clocks, caches) do not always
    affect the same successor.  The number of rounds is the number of runs of functions[0] in
    rep_ms, within the clock's limits.
    """
    clock.round(functions)
    estimate = min(clock.round(functions)[0] for _ in range(2)) / 1000 if functions else 0.0

    def rounds(ms: float, least: int) -> int:
        return int(np.clip(ms / max(estimate, 1e-6), least, clock.max_rounds))

    for number in range(rounds(warmup_ms, 1)):
        clock.round(functions, number)
    times = [clock.round(functions, number) for number in range(rounds(rep_ms, clock.min_rounds))]
    return [summarize(column) for column in zip(*times, strict=True)]


def order_of_round(count: int, number: int) -> list[int]:
    """Return a permutation of range(count), the same in every process."""
    return np.random.default_rng(number).permutation(count).tolist()


_READ = r"""
// Reads `count` 16-byte words; the store never happens but keeps the loads alive.
extern "C" __global__ void __launch_bounds__(512)
read_words(const uint4* data, long long count, unsigned int* sink) {
    long long stride = (long long)gridDim.x * blockDim.x;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned int sum = 0;
    for (; i + 3 * stride < count; i += 4 * stride) {
        uint4 a = data[i], b = data[i + stride], c = data[i + 2 * stride], d = data[i + 3 * stride];
        sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w;
        sum ^= c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; i < count; i += stride) {
        uint4 a = data[i];
        sum ^= a.x ^ a.y ^ a.z ^ a.w;
    }
    if (sum == 0x9e3779b9u) *sink = sum;
}
"""
# Lines that a kernel loaded with evict_last stay in L2 while other lines are read normally.  So the
# flush reads with evict_last too, and then resets its lines to evict_normal.
_REPLACE = r"""
extern "C" __global__ void __launch_bounds__(512)
replace_lines(const uint4* data, long long count, unsigned int* sink) {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    long long stride = (long long)gridDim.x * blockDim.x;
    unsigned int sum = 0;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        uint4 a;
        asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                     : "=r"(a.x), "=r"(a.y), "=r"(a.z), "=r"(a.w) : "l"(data + i), "l"(policy));
        sum ^= a.x ^ a.y ^ a.z ^ a.w;
    }
    if (sum == 0x9e3779b9u) *sink = sum;
}
extern "C" __global__ void __launch_bounds__(512) give_up_lines(const char* data, long long lines) {
    long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < lines; i += stride)
        asm volatile("applypriority.global.L2::evict_normal [%0], 128;" ::"l"(data + 128 * i)
                     : "memory");
}
"""
_WAIT = r"""
extern "C" __global__ void wait(long long ticks) {
    long long begin = clock64();
    while (clock64() - begin < ticks) {}
}
"""
_TICKS_PER_US = 2000  # approximate SM clock: a somewhat longer wait does no harm
_NOTHING = 'extern "C" __global__ void nothing(const void* x, void* y, int m, int n) {}'


def _empty(cupy: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Call cupy.empty; for FP8, which it does not support, return a view of bytes."""
    if dtype.itemsize > 1 or dtype.kind in "iu":
        return cupy.empty(shape, dtype)
    return cupy.empty(shape, np.uint8).view(dtype)


class GpuClock:
    """Event timing on CuPy's current stream."""

    min_rounds, max_rounds = 20, 500
    is_emulation = False
    _LONGEST_HEAD_START_US = 3000.0

    def __init__(self, target: Target):
        self._cupy = cupy = target.xp
        self._read_kernel = cupy.RawKernel(_READ, "read_words")
        self._sink = cupy.zeros(1, np.uint32)
        multiprocessors = cupy.cuda.Device().attributes["MultiProcessorCount"]
        self._read_grid = 4 * multiprocessors
        self._flush_buffer = cupy.empty(FLUSH_BYTES, np.uint8)
        self._replace_kernel = self._give_up_kernel = None
        if target.name == "cuda":
            replace = cupy.RawModule(code=_REPLACE)
            self._replace_kernel = replace.get_function("replace_lines")
            self._give_up_kernel = replace.get_function("give_up_lines")
        self._events: list[Any] = []
        self._wait_kernel = cupy.RawKernel(_WAIT, "wait")
        self._head_start_us = 0.0

    def flush(self) -> None:
        """Replace the lines of the L2 cache by clean ones.

        After only a write, the next kernel's time would include the write-back of dirty lines.
        After a plain read, 3% of 128 MB that were loaded with evict_last would still be in L2.
        """
        self._flush_buffer.data.memset_async(0, FLUSH_BYTES)
        if self._replace_kernel is None or self._give_up_kernel is None:
            self._read(self._flush_buffer)
            return
        sizes = (self._read_grid,), (512,)
        self._replace_kernel(*sizes, (self._flush_buffer, np.int64(FLUSH_BYTES // 16), self._sink))
        self._give_up_kernel(*sizes, (self._flush_buffer, np.int64(FLUSH_BYTES // 128)))

    def _read(self, data: Array) -> None:
        args = (data, np.int64(data.nbytes // 16), self._sink)
        self._read_kernel((self._read_grid,), (512,), args)

    def round(self, functions: Sequence[Function], number: int = 0) -> list[float]:
        # The GPU starts when the host has enqueued about the whole round.  So it never waits for
        # the host between two events, although a peer with several launches takes long to enqueue.
        cupy, count = self._cupy, len(functions)
        while len(self._events) < 2 * count:
            self._events.append(cupy.cuda.Event())
        begun = time.perf_counter()
        self._wait_kernel((1,), (1,), (np.int64(_TICKS_PER_US * self._head_start_us),))
        for i in order_of_round(count, number):
            self.flush()
            self._events[2 * i].record()
            functions[i]()
            self._events[2 * i + 1].record()
        enqueued_us = 1e6 * (time.perf_counter() - begun)
        self._head_start_us = min(1.2 * enqueued_us, self._LONGEST_HEAD_START_US)
        cupy.cuda.get_current_stream().synchronize()
        pairs = zip(self._events[0 : 2 * count : 2], self._events[1 : 2 * count : 2], strict=True)
        return [1000 * cupy.cuda.get_elapsed_time(start, end) for start, end in pairs]

    def copy(self, nbytes: int) -> Function:
        half = max(nbytes // 2, 1)
        source, destination = self._noise(half), self._cupy.empty(half, np.uint8)
        return lambda: destination.data.copy_from_device_async(source.data, half)

    def read(self, nbytes: int) -> Function:
        source = self._noise(nbytes)
        return lambda: self._read(source)

    def _noise(self, nbytes: int) -> Any:
        """Return varied bytes: copying zeros can be faster than copying data."""
        words = self._cupy.arange(-(-nbytes // 4), dtype=np.uint32)
        words *= np.uint32(2654435761)
        return words.view(np.uint8)[:nbytes]

    def host_times(self, call: Function, out: Array) -> dict[str, float]:
        """Return host times of a warm call in microseconds, and its number of kernels.

        The times are those of the call, of launching an empty kernel by its RawKernel, of
        cupy.empty for the call's result, of the call's own launches by their RawKernels, and of the
        call minus one launch and cupy.empty.

        The functions run in turns, since CPU speed changes from one millisecond to the next; times
        are medians of rounds.
        """
        cupy = self._cupy
        nothing = cupy.RawKernel(_NOTHING, "nothing")
        args = (out, out, np.int32(1), np.int32(1))
        with jit.logging_launches() as noted:
            call()
            noted.clear()
            call()
        launches = [(cast(GpuKernel, one.kernel).launch_plainly, one[1:]) for one in noted]

        def launch_all() -> None:
            for launch, of_one in launches:
                launch(*of_one)

        times = self._host_times(
            call,
            lambda: nothing((1,), (128,), args),
            lambda: _empty(cupy, out.shape, out.dtype),
            launch_all,
        )
        names = "call", "RawKernel launch", "cupy.empty", "own launches"
        found = dict(zip(names, np.median(times, axis=0).tolist(), strict=True))
        beyond = float(np.median(times[:, 0] - times[:, 1] - times[:, 2]))
        return {**found, "kernels": len(launches), "call less launch and empty": beyond}

    def _host_times(self, *functions: Function) -> np.ndarray:
        """Return microseconds by round and function."""
        calls, rounds = 100, 31  # 100 calls fit the launch queue, so none waits for the GPU
        for function in functions:
            function()
        times = np.zeros((rounds, len(functions)))
        for number in range(rounds):
            for i in order_of_round(len(functions), number):
                function = functions[i]
                self._cupy.cuda.get_current_stream().synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    function()
                times[number, i] = 1e6 * (time.perf_counter() - start) / calls
        self._cupy.cuda.get_current_stream().synchronize()
        return times


_STAGED = """
// y = x, staged in shared memory, with barriers as kernels have them: their emulation takes most of
// the host's time.  A read writes the same few words again and again.
KERNEL void {name}(const unsigned int* x, unsigned int* y, long long count) {{
    SHARED(unsigned int, staged, [128]);
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long first = (long long)blockIdx.x * blockDim.x; first < count; first += stride) {{
        const long long i = first + threadIdx.x;
        if (i < count) staged[threadIdx.x] = x[i];
        sync_block();
        if (i < count) {{ {store} }}
        sync_block();
    }}
}}
"""
_COPY = Variant(
    "plain_copy",
    (),
    (),
    128,
    text=_STAGED.format(name="plain_copy", store="y[i] = staged[threadIdx.x];"),
)
_READ_ALL = Variant(
    "plain_read",
    (),
    (),
    128,
    text=_STAGED.format(
        name="plain_read", store="y[blockIdx.x * blockDim.x + threadIdx.x] = staged[threadIdx.x];"
    ),
)


_BLOCKS = 16


class HostClock:
    """CPU time of all threads of this process, without a flush; these are not GPU times.

    CPU time depends less on other load: under a load that doubled the wall-clock time of a softmax,
    its CPU time changed by a few percent, and so did that of the plain copy, which is a kernel too.
    """

    min_rounds, max_rounds = 3, 20
    is_emulation = True

    def __init__(self, target: Target):
        self._target = target

    def round(self, functions: Sequence[Function], number: int = 0) -> list[float]:
        times = [0.0] * len(functions)
        for i in order_of_round(len(functions), number):
            start = time.process_time()
            functions[i]()
            times[i] = 1e6 * (time.process_time() - start)
        return times

    def copy(self, nbytes: int) -> Function:
        return self._plain(_COPY, nbytes // 2)

    def read(self, nbytes: int) -> Function:
        return self._plain(_READ_ALL, nbytes)

    def _plain(self, variant: Variant, nbytes: int) -> Function:
        kernel = jit.get_kernel(self._target, variant)
        source = np.ones(max(nbytes // 4, 1), np.uint32)
        destination = np.empty(max(source.size, _BLOCKS * variant.num_threads), np.uint32)
        args = (source, destination, np.int64(source.size))
        return lambda: kernel(_BLOCKS, args)


def clock_of(target: Target) -> Clock:
    return HostClock(target) if target.name == "host" else GpuClock(target)
