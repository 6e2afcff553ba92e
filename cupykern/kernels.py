"""Variants of kernels, and `source_text`: one source string for CUDA, HIP or host C++.

A *variant* is the whole specialisation of a kernel.  Its types and constants are the first lines of
the source string, and those lines are the same on every target except for the platform header.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

_HERE = Path(__file__).resolve().parent
# An installed package contains the kernels; in a checkout they are next to the package.
ROOT = _HERE / "kernels_cu" if (_HERE / "kernels_cu").is_dir() else _HERE.parent / "kernels_cu"
TARGETS = ("cuda", "hip", "host")

# The value of a constant for an option that is decided at run time (common/presence.cuh: kEither).
# The other two values are False (never) and True (always).
EITHER = 2

_WAIT = re.compile(r"\bwait_for_previous_grid\(\);")
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')


@dataclass(frozen=True)
class Variant:
    """One specialisation of the kernel `kernel` (file kernels_cu/<kernel>.cu, entry <kernel>).

    types: ("Element", "half") pairs, written as `using Element = half;`.
    constants: ("kVectorWidth", 8) pairs, written as `constexpr int kVectorWidth = 8;` (bool
        likewise).
    num_threads: threads per block, written as kNumThreads.
    cluster_size: blocks per cluster, written as kClusterSize; more than 1 needs Hopper or the host.
    min_blocks: the second argument of __launch_bounds__, written as kMinBlocks: at least so many
        blocks are resident per SM, which caps the registers of a thread.
    tuned: the heuristics can choose this variant; the compile gates refuse local memory in it.
    text: the source of a kernel without a file in kernels_cu (the tests' small kernels).
    includes: files that declare the names in `types`; placed between the launch sizes and the
        types.
    waits: the kernel has a grid barrier (platform/grid.cuh).  The host target runs all blocks at
        once, at most 16, so that its schedules decide which of them wait.
    launched: (threads per block, blocks per cluster) of the launch, for a source that takes any
        sizes up to num_threads and cluster_size; all such launches share the source.
    """

    kernel: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int], ...]
    num_threads: int
    cluster_size: int = 1
    min_blocks: int = 1
    tuned: bool = True
    text: str | None = None
    includes: tuple[str, ...] = ()
    waits: bool = False
    launched: tuple[int, int] | None = None

    @property
    def launch_sizes(self) -> tuple[int, int]:
        """(threads per block, blocks per cluster) of a launch."""
        return self.launched or (self.num_threads, self.cluster_size)

    @property
    def largest(self) -> Variant:
        """The same variant, launched with its largest blocks and clusters."""
        sizes = self.num_threads, self.cluster_size
        return self if self.launched is None else replace(self, launched=sizes)

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in (*self.types, *self.constants)]
        words.append(f"kNumThreads={self.num_threads}")
        if self.cluster_size > 1:
            words.append(f"kClusterSize={self.cluster_size}")
        if self.min_blocks > 1:
            words.append(f"kMinBlocks={self.min_blocks}")
        return f"{self.kernel}<{', '.join(words)}>"

    def launch_lines(self) -> list[str]:
        """The launch sizes, in C++."""
        has_clusters = self.cluster_size > 1 and self.launched is None
        cluster = f"CLUSTER_DIMS({self.cluster_size})" if has_clusters else ""
        return [
            f"#define KERNEL_CLUSTER {cluster}".rstrip(),
            _constant("kNumThreads", self.num_threads),
            _constant("kClusterSize", self.cluster_size),
            _constant("kMinBlocks", self.min_blocks),
        ]

    def type_lines(self) -> list[str]:
        """Types and constants, in C++."""
        lines = [f"using {name} = {cpp};" for name, cpp in self.types]
        return lines + [_constant(name, value) for name, value in self.constants]

    def header(self) -> str:
        """The variant's lines of C++, the same on every target."""
        cluster, *sizes = self.launch_lines()
        return "\n".join((cluster, *self.type_lines(), *sizes)) + "\n"


def _constant(name: str, value: int) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {'true' if value else 'false'};"
    return f"constexpr int {name} = {value};"


def source_text(variant: Variant, target: str) -> str:
    """The one self-contained string that `target` ("cuda", "hip" or "host") compiles.

    Includes in quotes are resolved here, each file once, because CuPy's cache key holds the source
    text but not the contents of included files.  `#line` markers keep compile errors pointing
    into kernels_cu.
    """
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}; got {target!r}")
    already = frozenset(files_of(f"platform/{target}.cuh"))
    text = resolve(f"platform/{target}.cuh") + f'#line 1 "variant of {variant.kernel}"\n'
    if variant.includes:
        text += "\n".join(variant.launch_lines()) + "\n"
        for name in variant.includes:
            text += resolve(name, already)
            already |= frozenset(files_of(name))
        text += f'#line 1 "types of {variant.kernel}"\n' + "\n".join(variant.type_lines()) + "\n"
    else:
        text += variant.header()
    return text + _kernel_text(variant, already) + f"REGISTER_KERNEL({variant.kernel})\n"


@cache
def overlaps(variant: Variant) -> bool:
    """Whether the kernel can start before the stream's previous kernel has ended, because its
    source calls wait_for_previous_grid (platform/cuda.cuh)."""
    already = frozenset(files_of("platform/cuda.cuh"))
    return _WAIT.search(_kernel_text(variant, already)) is not None


def file_text(name: str) -> str:
    """The file kernels_cu/<name> with its quoted includes in place."""
    return resolve(name)


def _kernel_text(variant: Variant, already: frozenset[str]) -> str:
    if variant.text is None:
        return resolve(f"{variant.kernel}.cu", already)
    return "".join(_expand_text(f"{variant.kernel}.cu", variant.text, set(already)))


@cache
def resolve(name: str, already: frozenset[str] = frozenset()) -> str:
    """Return `file_text(name)` without the files that are `already` in place."""
    return "".join(_expand(name, set(already)))


@cache
def files_of(name: str) -> tuple[str, ...]:
    """Return kernels_cu/<name> and the files that it includes."""
    seen: set[str] = set()
    list(_expand(name, seen))
    return tuple(seen)


def _expand(name: str, seen: set[str]) -> Iterator[str]:
    """Yield the lines of `name` with its quoted includes in place, skipping files in `seen`."""
    if name not in seen:
        seen.add(name)
        yield from _expand_text(f"kernels_cu/{name}", (ROOT / name).read_text(), seen)


def _expand_text(name: str, text: str, seen: set[str]) -> Iterator[str]:
    yield f'#line 1 "{name}"\n'
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        include = _INCLUDE.match(line)
        if include:
            yield from _expand(include[1], seen)
            yield f'#line {number + 1} "{name}"\n'
        else:
            yield "\n" if line == "#pragma once\n" else line
