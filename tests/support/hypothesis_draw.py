"""op.Draw by hypothesis, so that what fails shrinks."""

from __future__ import annotations

from hypothesis import strategies as st


class HypothesisDraw:
    def __init__(self, data: st.DataObject):
        self._data = data

    def integer(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))

    def choice(self, options):
        return self._data.draw(st.sampled_from(options))
