"""Launches that come again: with its arrays where they lay before, a launch is one that is packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import Kernel

Packer = Callable[[int, tuple[Any, ...], int], Callable[[], None]]
_MOST = 1024  # that one plan keeps


class Repeated:
    """The launches of one plan, by where their arrays lie.

    CuPy looks at every argument of every launch, and tensor maps are of addresses.  When arrays lie where
    they lay before, as results often do whose predecessors were freed, nothing is left to look at: a
    launch that comes for the second time is packed, and later ones are that one.
    """

    __slots__ = ("_arguments", "_grid", "_kernel", "_known", "_pack", "_shared_bytes")

    def __init__(
        self,
        kernel: Kernel,
        grid: int,
        shared_bytes: int,
        arguments: Callable[..., tuple[Any, ...]],
    ):
        """arguments: the kernel's, of what is launched with."""
        self._kernel, self._grid, self._shared_bytes = kernel, grid, shared_bytes
        self._arguments = arguments
        self._pack: Packer | None = getattr(kernel, "pack", None)
        self._known: dict[Any, Callable[[], None]] = {}

    def of(self, make: Callable[..., tuple[Any, ...]]) -> Repeated:
        """The same launch, of arrays that `make` makes of what it is launched with."""
        arguments = self._arguments
        return Repeated(
            self._kernel, self._grid, self._shared_bytes, lambda *given: arguments(make(*given))
        )

    def launch(self, arrays: tuple[Any, ...], places: Any = None) -> None:
        """With what `arguments` makes of `arrays`, of which some may be None.

        places: what the addresses of all of them follow from; None to look.
        """
        if places is None:
            # As places_of, without a call.
            try:
                places = tuple([x if x is None else x.data.ptr for x in arrays])
            except (AttributeError, TypeError, ValueError):
                places = None
        known = self._known.get(places)
        if known is None or known is _seen:
            self._launch(places, known, (arrays,))
        else:
            known()

    def launch_at(self, places: Any, *given: Any) -> None:
        """With what `arguments` makes of `given`, whose addresses follow from `places`; None: they do not."""
        known = self._known.get(places)
        if known is None or known is _seen:
            self._launch(places, known, given)
        else:
            known()

    def _launch(self, places: Any, known: Any, given: tuple[Any, ...]) -> None:
        args = self._arguments(*given)
        if known is _seen and self._pack is not None:
            packed = self._known[places] = self._pack(self._grid, args, self._shared_bytes)
            packed()
            return
        self._kernel(self._grid, args, self._shared_bytes)
        if self._pack is not None and places is not None:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[places] = _seen


def _seen() -> None:
    """In place of a launch that has come once."""


def places_of(arrays: tuple[Any, ...]) -> tuple[int | None, ...] | None:
    """The addresses of CuPy's arrays, of which some may be None; None for numpy's."""
    try:
        return tuple([x if x is None else x.data.ptr for x in arrays])
    except (AttributeError, TypeError, ValueError):  # numpy's x.data
        return None
