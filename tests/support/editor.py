"""Each file of kernels_cu on its own, on the host target: for clangd, and for tests of the sources.

    PYTHONPATH=. python tests/support/editor.py

writes build/compile_commands.json, where clangd looks for it.  A kernel or a header is preceded by
the first lines of a variant that includes it.
"""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path

from cupykern import OPS, kernels
from cupykern.targets import host_compiler, offline

_BUILD = Path(__file__).resolve().parents[2] / "build"
_PLATFORM = '#include "platform/host.cuh"'
_FLAGS = (
    "-std=c++17",
    "-fsyntax-only",
    "-w",
    "-DHOST_WARP_SIZE=32",
    "-DDEVICE=inline",
    "-x",
    "c++",
)


@cache
def preceding() -> dict[str, str]:
    """Every kernel and its headers but those of the platform: the lines before them."""
    found: dict[str, str] = {}
    for variant in (v for arch in ("host", "sm_90a") for op in OPS for v in op.variants(arch)):
        launch = _text(_PLATFORM, *variant.launch_lines())
        includes = [f'#include "{name}"' for name in variant.includes]
        entry = f"{variant.kernel}.cu"
        lines = launch + _text(*includes, *variant.type_lines())
        # A formula, but not before what it includes itself.
        written = (variant.text or "").removesuffix(f'#include "{entry}"\n')
        found.setdefault(entry, lines + written)
        for name in (entry, *variant.includes):
            for file in kernels.files_of(name):
                if not file.startswith("platform/"):
                    # What `includes` declare takes the variant's types as template arguments.
                    own = lines if f'"{file}"' in written else lines + written
                    found.setdefault(file, launch if includes else own)
    return found


def first_lines(file: str) -> str:
    return preceding().get(file, _text(_PLATFORM))


def _text(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def errors(*arguments: str, text: str | None = None) -> str:
    """The compiler's errors in files of kernels_cu, or with "-" in `text`; "": it compiles."""
    compiler = host_compiler.the_compiler()
    clang = offline.find_clang() if compiler.kind == "zig" else None  # zig c++ builds a C++ library
    command = (*(clang or compiler.command), *_FLAGS, f"-I{kernels.ROOT}", *arguments)
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=kernels.ROOT)
    return done.stderr if done.returncode else ""


def write(folder: Path) -> dict[Path, list[str]]:
    """Write what precedes files into `folder`.  Returns the files that each of these precedes."""
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, list[str]] = {}
    for file, lines in preceding().items():
        written.setdefault(lines, []).append(file)
    found = {}
    for lines, names in written.items():
        path = folder / f"{Path(names[0]).stem}.h"
        path.write_text(lines)
        found[path] = names
    return found


def main() -> None:
    commands = [
        {
            "directory": str(kernels.ROOT),
            "file": name,
            "arguments": ["c++", *_FLAGS, f"-I{kernels.ROOT}", "-include", str(path), name],
        }
        for path, names in write(_BUILD / "editor").items()
        for name in names
    ]
    (_BUILD / "compile_commands.json").write_text(json.dumps(commands, indent=1))


if __name__ == "__main__":
    main()
