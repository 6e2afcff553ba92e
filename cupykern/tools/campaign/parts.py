"""The parts of a campaign, in the order in which workers take their tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...op import Op
from ...targets import Target
from . import bad_calls, cases, large, products, repeats, sanitizers, streams
from .tally import Tally, Task


@dataclass(frozen=True)
class Amount:
    """count: cases of a part, as its `tasks` counts them.  chunk: cases per task."""

    count: int
    chunk: int


@dataclass(frozen=True)
class Part:
    """A part of the campaign.

    tasks(ops, count, seed, chunk): its tasks.  at_once: its limit of concurrent tasks.
    share: no task starts after this fraction of the campaign's seconds, from the part's first task.
    task_seconds: a task that takes longer counts as hung.
    """

    name: str
    tasks: Callable[[Sequence[Op], int, int, int], list[Task]]
    run: Callable[[Task, Target], Tally]
    on_gpu: Amount
    on_host: Amount
    share: float
    at_once: int = 1000
    task_seconds: float = 120

    def tasks_on(self, target: Target, ops: Sequence[Op], seed: int) -> list[Task]:
        amount = self.on_host if target.name == "host" else self.on_gpu
        return self.tasks(ops, amount.count, seed, amount.chunk)


PARTS = (
    # Long tasks come first; short tasks fill the other processes meanwhile.
    Part("sanitizers", sanitizers.tasks, sanitizers.run, Amount(1, 1), Amount(0, 1),
         share=0.75, at_once=len(sanitizers.TOOLS), task_seconds=300),
    Part("large", large.tasks, large.run, Amount(1, 1), Amount(1, 1), share=0.6, at_once=1),
    Part("streams", streams.tasks, streams.run, Amount(10_000, 1000), Amount(2, 2),
         share=0.8, at_once=1),
    Part("repeats", repeats.tasks, repeats.run, Amount(1000, 1000), Amount(3, 3), share=0.5),
    Part("bad_calls", bad_calls.tasks, bad_calls.run, Amount(50_000, 50), Amount(600, 4),
         share=0.5),
    Part("products", products.tasks, products.run, Amount(10_000, 40), Amount(92, 2), share=0.6),
    Part("cases", cases.tasks, cases.run, Amount(13_400, 100), Amount(10, 5), share=1.0),
)  # fmt: skip
