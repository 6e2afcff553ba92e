"""The layouts of parameters that Python reads from the kernels' source are the compiler's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import editor
import numpy as np
import pytest

import cupykern
from cupykern import kernels
from cupykern.param_structs import struct_dtype, zeros

# Of the package's structs: pairs of a file of kernels_cu and a name.
_USES = re.compile(r'"([\w/]+\.(?:cu|cuh|h))",\s+"(\w+)"')
_KINDS = """
template <class T> constexpr char kKind = 'u';
template <> constexpr char kKind<int8_t> = 'i';
template <> constexpr char kKind<int32_t> = 'i';
template <> constexpr char kKind<int64_t> = 'i';
template <> constexpr char kKind<float> = 'f';
template <> constexpr char kKind<double> = 'f';
template <class T> T value_of(const T&);
"""


def _used_structs() -> dict[str, set[str]]:
    """The structs of each file."""
    found: dict[str, set[str]] = {}
    for path in Path(cupykern.__file__).parent.rglob("*.py"):
        for file, struct in _USES.findall(path.read_text()):
            found.setdefault(file, set()).add(struct)
    return found


def _assertions(struct: str, dtype: np.dtype, path: str = "", start: int = 0) -> Iterator[str]:
    """static_assert lines of the members of `struct` that begin with `path`."""
    for name in dtype.names or ():
        member, offset = dtype.fields[name]
        here, offset = f"{path}{name}", start + offset
        yield f"static_assert(__builtin_offsetof({struct}, {here}) == {offset});"
        yield f"static_assert(sizeof((({struct}*)0)->{here}) == {member.itemsize});"
        first = here + "[0]" * member.ndim
        if member.base.names:
            yield from _assertions(struct, member.base, f"{first}.", offset)
        else:
            value = f"value_of((({struct}*)0)->{first})"
            yield f"static_assert(kKind<decltype({value})> == '{member.base.kind}');"


def _layout_errors(file: str, structs: set[str], preceding: str, **constants: int) -> str:
    opened = re.findall(r"^namespace \w+", (kernels.ROOT / file).read_text(), re.MULTILINE)
    lines = [f"using {namespace};" for namespace in opened]
    for struct in structs:
        dtype = struct_dtype(file, struct, **constants)
        lines.append(f"static_assert(sizeof({struct}) == {dtype.itemsize});")
        lines += _assertions(struct, dtype)
    text = f'{preceding}#include "{file}"\n{_KINDS}' + "\n".join(lines) + "\n"
    return editor.errors("-", text=text)


def test_structs_of_many_files_are_used():
    assert sum(map(len, _used_structs().values())) > 20


@pytest.mark.parametrize("file", sorted(_used_structs()))
def test_layouts_are_the_compilers(file):
    lines = editor.first_lines(file)
    constants = re.findall(r"constexpr int (\w+) = (\d+);", lines)
    sizes = {name: int(value) for name, value in constants}
    assert not _layout_errors(file, _used_structs()[file], lines, **sizes)


# --- what is read --------------------------------------------------------------------------------

PARTS = """
constexpr int kSize = 3;
enum Kind { kFirst, kSecond = 4, kKinds };
struct alignas(32) Aligned { uint8_t byte; };
template <int kCount>
struct Row { double values[kCount]; int8_t last; };
"""
EVERYTHING = """#pragma once
#include "parts.cuh"
namespace rows {
struct Everything {
    enum Operand { kX, kY, kOperands };
    static constexpr int64_t none[2] = {1, 2};
    DEVICE int64_t of(int i) const { return stride + i; }  // a function (with a body)

    uint16_t first;  /* a comment;
                        of two lines */
    const float* pointer;
    void** pointers[kOperands];
    int64_t sizes[kSize][kKinds], stride;
    struct { uint8_t low; uint32_t high; } pairs[2];
    Row<kOperands> row;
    Aligned aligned[kGiven];
    unsigned char bytes[5];
    unsigned long long end;
};
}  // namespace rows
"""


@pytest.fixture
def root(tmp_path, monkeypatch) -> Iterator[Path]:
    """kernels_cu with files of the test's own."""
    (tmp_path / "platform").symlink_to(kernels.ROOT / "platform")
    caches = struct_dtype, kernels.resolve, kernels.files_of
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "ROOT", tmp_path)
        yield tmp_path
    for cached in caches:
        cached.cache_clear()


def test_all_that_structs_have_is_read(root):
    (root / "parts.cuh").write_text(PARTS)
    (root / "everything.cuh").write_text(EVERYTHING)
    given = '#include "platform/host.cuh"\nconstexpr int kGiven = 2;\n'
    assert not _layout_errors("everything.cuh", {"Everything"}, given, kGiven=2)
    dtype = struct_dtype("everything.cuh", "Everything", kGiven=2)
    assert dtype["sizes"].shape == (3, 5) and dtype["aligned"].shape == (2,)
    assert dtype.fields["aligned"][1] % 32 == 0 == dtype.itemsize % 32
    assert _layout_errors("everything.cuh", {"Everything"}, given.replace("2", "3"), kGiven=2)
    params = zeros("everything.cuh", "Everything", kGiven=2)
    params["pairs"][1] = (1, 2)
    assert params.tobytes().count(b"\0") == dtype.itemsize - 2


@pytest.mark.parametrize(
    "member, message",
    [
        ("int64_t x = 1;", "expected , or ;; got ="),
        ("int32_t bits : 3;", "expected , or ;; got :"),
        ("const Other& other;", "0 declarations of struct Other"),
        ("int64_t& x;", "unexpected &"),
        ("bool x;", "0 declarations of struct bool"),
        ("long x;", "0 declarations of struct long"),
        ("alignas(16) int x;", "0 declarations of struct alignas"),
        ("void (*call)(int);", "0 declarations of struct void"),
        ("decltype(sizeof(0)) x;", "0 declarations of struct decltype"),
        ("int *x, y;", "expected ;; got ,"),
        ("int f() const;", "expected , or ;; got ("),
        ("int64_t x[kNowhere];", "0 constants kNowhere"),
        ("int64_t x[2 * 3];", "expected ]; got *"),
        ("union { int32_t x; float y; };", "0 declarations of struct union"),
        ("Pair<int> pair;", "0 constants int"),
        ("private: int x;", "0 declarations of struct private"),
    ],
)
def test_anything_else_is_refused_with_file_and_line(root, member, message):
    (root / "bad.cuh").write_text(
        f"// A comment.\n\nstruct Bad {{\n    int64_t x;\n    {member}\n}};\n"
    )
    with pytest.raises(ValueError, match=rf"^kernels_cu/bad\.cuh:5: .*{re.escape(message)}"):
        struct_dtype("bad.cuh", "Bad")


def test_a_struct_is_declared_once(root):
    (root / "twice.cuh").write_text("struct Twice { int x; };\nstruct Twice { int x; };\n")
    with pytest.raises(ValueError, match="2 declarations of struct Twice"):
        struct_dtype("twice.cuh", "Twice")
