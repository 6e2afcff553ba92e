"""Decode steps of a model whose weights, KV heads and vocabulary are split over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ... import arrays, parallel
from ...check import Comparison
from ...parallel import Communicator
from ...targets import Target
from ..model import measure
from ..model.cache import Cache
from ..model.decoder import Decoder
from ..model.reference import Expected
from ..model.tensor_parallel import Cut, part_of_rank
from ..model_rows import DECODE
from .cases import Step


class Decode:
    def __init__(self, decoder: Decoder, batch: int, context: int, target: Target, seed: int):
        step = measure.Step(DECODE, batch, context)
        self.size, self.whole = (batch, context), decoder
        self.tokens = target.xp.asarray(measure.tokens_of(decoder.config, step, seed))
        self.cache = measure.made_cache(decoder, step, target, seed=seed)
        self.work = measure.work(decoder, step, self.cache)
        self._start = [step.start] * batch
        self._expected: Expected | None = None

    def step(self, comm: Communicator) -> Step:
        decoder, cache = self.whole, self.cache
        if comm.size > 1:
            decoder, cache = part_of_rank(comm, decoder), _heads(comm, decoder, cache)
        tokens = self.tokens[:, 0]
        return Step(lambda: decoder.decode(tokens, cache), _DecodeComparer(self, comm))

    @property
    def expected(self) -> Expected:
        """Computed from the initial cache, before any step."""
        if self._expected is None:
            given = self.whole, self.tokens, self.cache, self._start
            self._expected = Expected.of(*given)
        return self._expected


class _DecodeComparer:
    """Compare the rms error of all ranks' logits with the allowed one."""

    def __init__(self, decode: Decode, comm: Communicator):
        self._expected, self._comm = decode.expected, comm

    def compare(self, outputs: tuple[Any, ...]) -> Comparison:
        logits = parallel.all_gather(self._comm, arrays.packed(outputs[0].T)).T
        return Comparison(error_over_bound=self._expected.error_over_limit(logits))


def _heads(comm: Communicator, decoder: Decoder, cache: Cache) -> Cache:
    """Copy this rank's KV heads of a contiguous cache."""
    heads, width = Cut.of(decoder.config, comm).kv, decoder.config.head_dim
    part = slice(heads.start // width, heads.stop // width)
    keys, values = ([arrays.packed(x[:, part]) for x in of] for of in (cache.keys, cache.values))
    counters, active = cache.counters.copy(), cache.active.copy()
    return replace(cache, keys=keys, values=values, counters=counters, active=active)
