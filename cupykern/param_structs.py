"""Parameter structs of the kernels as numpy dtypes, read from the kernels' own source.

The C++ struct is the only description of the layout.  Members can be numbers, pointers, structs
(also unnamed, or with one `int` template parameter) and arrays of them, whose sizes are literals,
enumerators or constants.  A struct can have one base.  Member functions, static members and enums
take no memory.  Anything else raises ValueError with file and line.  64-bit Linux and GPUs share
this layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple, NoReturn

import numpy as np

from .kernels import file_text

_NUMBERS = {
    **{f"int{8 * n}_t": f"i{n}" for n in (1, 2, 4, 8)},
    **{f"uint{8 * n}_t": f"u{n}" for n in (1, 2, 4, 8)},
    "unsigned char": "u1",
    "unsigned short": "u2",
    "unsigned long long": "u8",
    "int": "i4",
    "float": "f4",
    "double": "f8",
}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_TOKEN = re.compile(r"\s*(\w+|\S)")
_FUNCTION = re.compile(r"[^;{}()]*\w\([^;{}]*\)\s*(?:const\s*)?\{")
_ENUM = r"enum(?: \w+)? \{([^}]*)\}"
_MEMBER_ENUM, _GLOBAL_ENUM = re.compile(rf"\s*{_ENUM}"), re.compile(rf"\n{_ENUM}")
_LINE = re.compile(r'^#line (\d+) "(.*)"\n', re.MULTILINE)


@cache
def struct_dtype(file: str, struct: str, **constants: int) -> np.dtype:
    """The layout of `struct`, which kernels_cu/<file> or one of its includes declares.

    constants: the variant's constants that are array sizes.
    """
    return _Reader(file, constants).struct(struct).dtype


def zeros(file: str, struct: str, **constants: int) -> np.ndarray:
    """A zeroed 0-d array of struct_dtype(...), to be filled with a kernel's parameters."""
    return np.zeros((), struct_dtype(file, struct, **constants))


def fast_divmod(divisor: int) -> tuple[int, int]:
    """The members of a FastDivmod (kernels_cu/common/fast_divmod.cuh).  By 0 nothing is divided."""
    return divisor, (2**32 - 1) // max(divisor, 1)


class _Type(NamedTuple):
    dtype: np.dtype
    alignment: int


def _number(name: str) -> _Type:
    dtype = np.dtype(name)
    return _Type(dtype, dtype.alignment)


_POINTER = _number("u8")


def _enumerators(body: str) -> dict[str, int]:
    """The enumerators in the body of an enum, up to the first whose value is not a literal."""
    values: dict[str, int] = {}
    following = 0
    for enumerator in body.split(","):
        name, _, value = enumerator.partition("=")
        if value and not value.strip().isdecimal():
            break
        following = int(value or following)
        values[name.strip()] = following
        following += 1
    return values


class _Reader:
    """Reads the text of a file and its includes, from `_at` on."""

    def __init__(self, file: str, constants: Mapping[str, int]) -> None:
        self._text = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), file_text(file))
        self._constants = constants
        self._at = self._text.index("\n") + 1  # after the first #line

    def struct(self, name: str, argument: int | None = None) -> _Type:
        """The struct called `name`.  argument: the template argument, if it is a template."""
        template = "" if argument is None else r"template <int (\w+)>\s+"
        declaration = rf"\n{template}struct (?:alignas\((\d+)\) )?{name} (?:: (\w+) )?\{{"
        found = list(re.finditer(declaration, self._text))
        if len(found) != 1:
            self._fail(f"there are {len(found)} declarations of struct {name}")
        *parameters, alignment, base = found[0].groups()
        behind, self._at = self._at, found[0].end()
        scope = dict.fromkeys(parameters, argument or 0)
        before = self.struct(base).dtype if base else None
        read = self._members(scope, int(alignment or 1), before)
        self._at = behind
        return read

    def _members(
        self, scope: dict[str, int], alignment: int = 1, base: np.dtype | None = None
    ) -> _Type:
        """The struct whose members begin at `_at`.

        scope: its constants.  base: the base class, placed first; its size is a multiple of 8.
        """
        names: list[str] = []
        formats: list[np.dtype] = []
        offsets: list[int] = []
        size = 0
        if base is not None:
            for name, field in (base.fields or {}).items():
                names.append(name)
                formats.append(field[0])
                offsets.append(field[1])
            size, alignment = base.itemsize, max(alignment, 8)
        while not self._has("}"):
            if enum := _MEMBER_ENUM.match(self._text, self._at):
                scope |= _enumerators(enum[1])
                self._at = enum.end()
            elif self._has("static") or _FUNCTION.match(self._text, self._at):
                self._skip()
            elif not self._has(";"):
                kind = self._type(scope)
                separator = ","
                while separator == ",":
                    name, member = self._declarator(kind, scope)
                    size += -size % member.alignment
                    names.append(name)
                    formats.append(member.dtype)
                    offsets.append(size)
                    size += member.dtype.itemsize
                    alignment = max(alignment, member.alignment)
                    separator = self._take(*(";" if kind is _POINTER else ",;"))
        size += -size % alignment
        layout = {"names": names, "formats": formats, "offsets": offsets, "itemsize": size}
        return _Type(np.dtype(layout), alignment)  # type: ignore[call-overload]  # of lists

    def _type(self, scope: dict[str, int]) -> _Type:
        self._has("const")
        name = self._word()
        while name.startswith("unsigned") and name not in _NUMBERS:
            name += f" {self._word()}"
        if self._has("*"):
            while self._has("*"):
                pass
            return _POINTER
        if name in _NUMBERS:
            return _number(_NUMBERS[name])
        if name == "struct":
            self._take("{")
            return self._members(dict(scope))
        if not self._has("<"):
            return self.struct(name)
        argument = self._value(scope)
        self._take(">")
        return self.struct(name, argument)

    def _declarator(self, kind: _Type, scope: Mapping[str, int]) -> tuple[str, _Type]:
        name, sizes = self._word(), []
        while self._has("["):
            sizes.append(self._value(scope))
            self._take("]")
        return name, kind._replace(dtype=np.dtype((kind.dtype, tuple(sizes))))

    def _value(self, scope: Mapping[str, int]) -> int:
        word = self._word()
        for values in (scope, self._constants):
            if word in values:
                return values[word]
        if word.isdecimal():
            return int(word)
        constant = rf"\nconstexpr int {word} = (\d+);"
        found = [int(value) for value in re.findall(constant, self._text)]
        for enum in _GLOBAL_ENUM.finditer(self._text):
            found += [value for name, value in _enumerators(enum[1]).items() if name == word]
        if len(found) != 1:
            self._fail(f"there are {len(found)} constants {word}")
        return found[0]

    def _skip(self) -> None:
        """Skip the rest of a member without data: to its semicolon or the end of its body."""
        depth, token = 0, ""
        while depth or token not in (";", "}"):
            token = self._take()
            depth += (token in "({[") - (token in ")}]")

    def _word(self) -> str:
        word = self._take()
        return word if re.match(r"\w", word) else self._fail(f"unexpected {word}")

    def _take(self, *allowed: str) -> str:
        """Consume the next token.  Raises ValueError if `allowed` is given and lacks it."""
        token = _TOKEN.match(self._text, self._at)
        if token is None:
            self._fail("the file ends within a struct")
        self._at = token.end()
        if allowed and token[1] not in allowed:
            self._fail(f"expected {' or '.join(allowed)}; got {token[1]}")
        return token[1]

    def _has(self, token: str) -> bool:
        """Whether `token` comes next; if so, consume it."""
        after = _TOKEN.match(self._text, self._at)
        has = after is not None and after[1] == token
        if after is not None and has:
            self._at = after.end()
        return has

    def _fail(self, what: str) -> NoReturn:
        *_, marker = _LINE.finditer(self._text, 0, self._at)
        line = int(marker[1]) + self._text.count("\n", marker.end(), self._at)
        raise ValueError(f"{marker[2]}:{line}: {what}")
