"""The format of stored measurements: small JSON files without derived values.

A benchmark's row has its results by name, as lists of `columns`.  `notes` say why a result is not
verified; "" if the error is the reason.  A library without the function is left out.  Speeds
are derived from times and bytes.  A profile stores labels and units once, and each launch has a
value or null for each.  Floats keep 5 significant digits, and each record takes one line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..peers.base import LESS_ACCURATE
from ..tuning.contender import NO_SUCH_FUNCTION

_WORK = ("bytes_read", "bytes_written", "flops")  # a list in the file, fields of a row
_BY_COLUMN = ("sensitivity", "startup")  # kinds whose rows are lists of `columns`
COLUMNS = ("median_us", "q20_us", "q80_us", "error_over_bound")
# Of a row: made anew.
_DERIVED = ("problem", "results", "clocks", "repeats", "notes", "parts", *_WORK)


def to_json(value: Any) -> str:
    """Return `value` as JSON, a line for each record of a list.

    Numbers that JSON lacks become "inf", "-inf", "nan".
    """
    value = pack(plain_json(value))
    if not isinstance(value, dict):
        return _line(value) + "\n"
    fields = []
    for name, item in value.items():
        if isinstance(item, list) and item and isinstance(item[0], (dict, list)):
            text = "[\n  " + ",\n  ".join(map(_line, item)) + "\n ]"
        else:
            text = _line(item)
        fields.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def plain_json(value: Any) -> Any:
    """Convert `value` to types of JSON; see to_json."""
    if isinstance(value, dict):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else str(value)
    return value


def pack(document: Any) -> Any:
    """Return `document` in the stored form, which has fewer bytes: packed rows or launches."""
    kind = document.get("kind") if isinstance(document, dict) else None
    if kind == "profile":
        return _pack_profiles(document)
    if kind in _BY_COLUMN and document["rows"]:
        columns = list(document["rows"][0])
        values = [[row[name] for name in columns] for row in document["rows"]]
        return {**document, "columns": columns, "rows": values}
    if kind == "check" and document["summary"]:
        return _pack_check(document)
    if kind not in ("bench", "comparison", "suite", "model", "parallel"):
        return document
    rows = [_pack_row(row) for row in document["rows"]]
    return {**document, "columns": list(COLUMNS), "rows": rows}


def _pack_check(document: dict[str, Any]) -> dict[str, Any]:
    """Store the worst figures of each op and dtype after its other fields; null: no cases."""
    names = list(dict.fromkeys(name for one in document["summary"] for name in one["worst"] or ()))

    def packed(one: dict[str, Any]) -> list[Any]:
        fields = [value for name, value in one.items() if name != "worst"]
        return [*fields, one["worst"] and [one["worst"][name] for name in names]]

    fields = [name for name in document["summary"][0] if name != "worst"]
    summary = list(map(packed, document["summary"]))
    return {**document, "fields": fields, "figures": names, "summary": summary}


def _unpack_check(document: dict[str, Any]) -> dict[str, Any]:
    def unpacked(one: list[Any]) -> dict[str, Any]:
        *values, worst = one
        figures = worst and dict(zip(document["figures"], worst, strict=True))
        return {**dict(zip(document["fields"], values, strict=True)), "worst": figures}

    whole = {**document, "summary": list(map(unpacked, document["summary"]))}
    return {name: value for name, value in whole.items() if name not in ("fields", "figures")}


def _pack_profiles(document: dict[str, Any]) -> dict[str, Any]:
    launches = [launch for profile in document["profiles"] for launch in profile["launches"]]
    figures = list({tuple(figure[::2]): None for of in launches for figure in of["figures"]})

    def packed(launch: dict[str, Any]) -> dict[str, Any]:
        values = {(label, unit): value for label, value, unit in launch["figures"]}
        return {**launch, "figures": [values.get(figure) for figure in figures]}

    return {**_with_launches(document, packed), "figures": [list(figure) for figure in figures]}


def _unpack_profiles(document: dict[str, Any]) -> dict[str, Any]:
    figures = document["figures"]

    def unpacked(launch: dict[str, Any]) -> dict[str, Any]:
        found = zip(figures, launch["figures"], strict=True)
        of = [[label, value, unit] for (label, unit), value in found if value is not None]
        return {**launch, "figures": of}

    document = _with_launches(document, unpacked)
    return {name: value for name, value in document.items() if name != "figures"}


def _with_launches(
    document: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    profiles = [{**p, "launches": list(map(change, p["launches"]))} for p in document["profiles"]]
    return {**document, "profiles": profiles}


def _pack_row(row: dict[str, Any]) -> dict[str, Any]:
    packed = {k: v for k, v in row.items() if k not in _DERIVED and v is not None}
    if row["plain"] == plain_of(row["bytes_read"], row["bytes_written"]):
        del packed["plain"]
    packed["work"] = [row[name] for name in _WORK]
    results = [result for result in row["results"] if result.get("note") != NO_SUCH_FUNCTION]
    packed["results"] = {
        result["name"]: [_rounded(name, result.get(name)) for name in COLUMNS] for result in results
    }
    for name, field in (("notes", "note"), ("parts", "parts_us")):
        found = {r["name"]: r.get(field) for r in results if r.get(field) is not None}
        if name == "notes":
            found |= {r["name"]: _why(r) for r in results if not r["verified"]}
        if found:
            packed[name] = found
    if row.get("clocks") and row["clocks"].get("fell"):
        packed["clocks"] = row["clocks"]
    if row.get("repeats"):
        packed["repeats"] = row["repeats"]
    return packed


def plain_of(bytes_read: int, bytes_written: int) -> str:
    """Return what a row is compared with: a plain read for rows that mostly read."""
    return "copy" if 4 * bytes_written >= bytes_read else "read"


def _rounded(name: str, value: Any) -> Any:
    """An error over its bound with 3 digits, all that is ever shown."""
    if name != "error_over_bound" or not isinstance(value, float):
        return value
    return float(f"{value:.3g}")


def _why(result: dict[str, Any]) -> str:
    ratio = result.get("error_over_bound")
    return "" if ratio is not None and float(ratio) > 1 else (result["note"] or "")


def read(path: Path) -> Any:
    """Read and unpack a file of `to_json`.  Raises OSError, ValueError with the path."""
    try:
        return unpack(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a complete benchmark's JSON: {error!r}") from None


def unpack(document: Any) -> Any:
    """Return the document that was given to `pack`, with the speeds of its results."""
    if not isinstance(document, dict):
        return document
    if document.get("kind") == "profile" and "figures" in document:
        return _unpack_profiles(document)
    if document.get("kind") == "check" and "figures" in document:
        return _unpack_check(document)
    if "columns" not in document:
        return document
    columns = document["columns"]
    if document.get("kind") in _BY_COLUMN:
        rows = [dict(zip(columns, row, strict=True)) for row in document["rows"]]
    else:
        rows = [_unpack_row(row, columns) for row in document["rows"]]
    return {**document, "rows": rows}


def _unpack_row(packed: dict[str, Any], columns: list[str]) -> dict[str, Any]:
    row = packed | dict(zip(_WORK, packed["work"], strict=True))
    del row["work"]
    notes, parts, plain_us = row.get("notes", {}), row.get("parts", {}), row.get("plain_us")
    results = []
    for name, values in row["results"].items():
        result = dict(zip(columns, values, strict=True))
        median = result["median_us"]
        moved = row["bytes_read"] + row["bytes_written"]
        result |= {
            "name": name,
            "gbps": moved / median / 1e3 if median else None,
            "tflops": row["flops"] / median / 1e6 if median and row["flops"] else None,
            "speed_percent": 100 * plain_us / median if median and plain_us else None,
            "verified": name not in notes,
            "note": notes.get(name) or None,
            "parts_us": parts.get(name),
        }
        results.append(result)
    plain = plain_of(row["bytes_read"], row["bytes_written"])
    defaults: dict[str, Any] = {"plain": plain, "plain_us": None, "clocks": None, "repeats": []}
    return {**defaults, **row, "results": results}


def peer_times(row: dict[str, Any]) -> list[tuple[float, str]]:
    """Return (median in us, name) of a row's timed peers, without less accurate ones."""
    return [
        (peer["median_us"], peer["name"])
        for peer in row["results"][1:]
        if peer["median_us"] and peer["name"] not in LESS_ACCURATE
    ]
