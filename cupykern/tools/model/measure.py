"""Rows of `bench --model`: steps of a decoder, verified before and after timing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import dtypes
from ...check import Comparison
from ...inputs import bench_values
from ...kernels import Variant
from ...op import Call, Work
from ...peers import Peer
from ...runtime import jit
from ...targets import Target
from ...tuning.contender import OURS, Contender, Result
from ...tuning.protocol import Monitor
from ...tuning.timing import Clock, Function, Timing, time_rounds
from ..bench import Settings, free_memory, peer_contender
from ..model_rows import DECODE
from ..results import Row
from . import cache as caches
from .cache import Cache
from .config import ModelConfig
from .decoder import Decoder
from .graph import Graph
from .reference import Expected

_MOST_READ = 2**32  # bytes; times of larger reads are extrapolated linearly


@dataclass(frozen=True)
class Step:
    """A step to measure.

    kind: decode: one token of each of `batch` sequences, the last of `tokens`; or prefill:
    sequences of `tokens` tokens.  cache: a name of cache.FORMATS.
    """

    kind: str
    batch: int
    tokens: int
    cache: str = "16bit"

    @property
    def count(self) -> int:
        """New tokens per sequence."""
        return 1 if self.kind == DECODE else self.tokens

    @property
    def start(self) -> int:
        """Earlier tokens per sequence."""
        return self.tokens - self.count

    @property
    def shape(self) -> tuple[int, int]:
        return self.batch, self.tokens

    def __str__(self) -> str:
        return f"{self.kind} of {self.batch} x {self.tokens}"


def work(decoder: Decoder, step: Step, cache: Cache) -> Work:
    """Return a step's minimum traffic and operations.

    It reads the weights once and the keys and values of all earlier tokens, and writes new ones.
    """
    c, rows = decoder.config, step.batch * step.count
    products = 2 * rows * sum(x.weight.size for layer in decoder.layers for x in layer.linears)
    pairs = step.batch * (step.count * step.start + step.count * (step.count + 1) // 2)
    attended = 4 * pairs * c.q_width * len(decoder.layers)
    head = 2 * step.batch * c.vocab * c.hidden
    embedded = rows * c.hidden * decoder.embedding.itemsize
    before = step.batch * step.start * cache.nbytes_per_token
    return Work(
        decoder.nbytes + embedded + before,
        rows * cache.nbytes_per_token + 4 * step.batch * c.vocab,
        products + attended + head,
    )


class _Comparer:
    """Compare the logits' rms error with the allowed one."""

    def __init__(self, expected: Expected):
        self._expected = expected

    def compare(self, outputs: tuple[Any, ...]) -> Comparison:
        return Comparison(error_over_bound=self._expected.error_over_limit(outputs[0]))


def variants(
    config: ModelConfig, decoder: Decoder, steps: Sequence[Step], target: Target
) -> list[Variant]:
    """Return the variants that the steps launch."""
    found: dict[Variant, int] = {}
    for step in steps:
        with jit.recording() as recorded:
            cache, tokens = (
                made_cache(decoder, step, target, contents=False),
                tokens_of(config, step, 0),
            )
            function_of(decoder, step, target.xp.asarray(tokens), cache)()
        found |= recorded
        if target.name != "host":
            free_memory(target)
    return list(found)


def measure(
    decoder: Decoder,
    step: Step,
    name: str,
    target: Target,
    clock: Clock,
    settings: Settings,
    peers: Sequence[Peer],
    monitor: Monitor,
) -> Row:
    """Measure a step beside peers and a plain read of as many bytes.

    name: of the model, for the row.  Errors are noted in the Result.
    """
    tokens = target.xp.asarray(tokens_of(decoder.config, step, settings.seed))
    cache = made_cache(decoder, step, target, seed=settings.seed)
    moved = work(decoder, step, cache)
    dtype = str(decoder.embedding.dtype)
    row = Row(f"{name} {step.kind}", step.shape, dtype, str(step), *moved, "read")
    try:
        ours = Contender(OURS, Graph(function_of(decoder, step, tokens, cache), target))
        row.results.append(ours.result)
        expected = Expected.of(decoder, tokens, cache, [step.start] * step.batch)
        comparer = _Comparer(expected)
        ours()
        if not ours.verify(comparer):
            return row
        call = Call((decoder, tokens, cache, step.start))
        contenders = [ours]
        for peer in peers:
            contender = peer_contender(peer, step.kind, call, comparer, target.xp)
            row.results.append(contender.result)
            if contender.result.error_over_bound is not None:  # it ran
                contenders.append(contender)
        read = min(moved.bytes_read, _MOST_READ)
        begun = time.monotonic()
        functions: list[Function] = [*contenders, clock.read(read)]
        timings = time_rounds(clock, functions, settings.warmup_ms, settings.rep_ms)
        row.clocks = monitor.between(begun, time.monotonic())
        factor = moved.bytes_read / read
        median, q20, q80, runs = timings[-1]
        plain = Timing(factor * median, factor * q20, factor * q80, runs)
        row.plain_us = plain.median
        for contender, timing in zip(contenders, timings[:-1], strict=True):
            contender.result.timed(timing, moved, plain)
            contender.result.verified = contender.verify(comparer)
    except MemoryError:
        raise
    except Exception as error:
        if not row.results:
            row.results.append(Result(OURS))
        row.results[0].verified = False
        row.results[0].note = f"{type(error).__name__}: {error}"
    return row


def failed(name: str, step: Step, dtype: str, note: str) -> Row:
    """Return the row of a step that could not be measured."""
    result = Result(OURS, note=note)
    return Row(f"{name} {step.kind}", step.shape, dtype, str(step), 0, 0, 0, "read", None, [result])


def tokens_of(config: ModelConfig, step: Step, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return rng.integers(0, config.vocab, (step.batch, step.count), np.int64)


def made_cache(
    decoder: Decoder, step: Step, target: Target, contents: bool = True, seed: int = 0
) -> Cache:
    """Make a contiguous cache with room for the step.

    For decoding it holds all tokens but the last.  No sequence is active, so that every run of the
    step does the same work.
    """
    dtype = caches.dtype_of(step.cache, decoder.embedding.dtype)
    cache = caches.contiguous(decoder.config, step.batch, step.tokens, dtype, target.name)
    if step.kind == DECODE:
        for i, array in enumerate((*cache.keys, *cache.values) if contents else ()):
            found = bench_values(array.shape, dtype, seed + i % 8, target.xp)
            bits = f"u{dtype.itemsize}"  # CuPy cannot copy FP8
            array.view(bits)[...] = found.view(bits)
        for i, scales in enumerate(cache.scales or () if contents else ()):
            for j, scale in enumerate(scales):
                random = bench_values(scale.shape, dtypes.float32, seed + i + j, target.xp)
                scale[...] = target.xp.exp2(random / 4 - (5 if dtype == dtypes.int8 else 0))
        lengths = np.full(step.batch, step.tokens, np.int32)
        cache.set_lengths(lengths, active=np.zeros_like(lengths))
    return cache


def function_of(decoder: Decoder, step: Step, tokens: Any, cache: Cache) -> Any:
    """Return a function that runs the step."""
    if step.kind == DECODE:
        return lambda: decoder.decode(tokens[:, 0], cache)
    return lambda: decoder.prefill(tokens, cache)
