"""Measured numbers as data: every one says what it means, and all are used."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from cupykern import tuned
from cupykern.gemm import sm90_heuristic
from cupykern.targets.limits import device

PACKAGE = Path(tuned.__file__).parents[1]
FILES = sorted(path.stem for path in Path(tuned.__file__).parent.glob("*.json"))
TABLES = tuned.load("sm_90a")["gemm_tiles"]


def sections(arch: str) -> dict:
    return {k: v for k, v in tuned.load(arch).items() if isinstance(v, dict) and k != "gemm_tiles"}


@pytest.mark.parametrize("arch", FILES)
def test_numbers_say_what_they_are(arch):
    found = tuned.load(arch)
    assert found["arch"] == arch == device(arch).arch and found["gpu"]
    for section in sections(arch).values():
        for name, entry in section.items():
            assert set(entry) == {"value", "unit", "meaning", "measured"}, name
            assert all(isinstance(entry[key], str) for key in ("unit", "meaning", "measured"))


@pytest.mark.parametrize("arch", FILES)
def test_every_constant_is_used(arch):
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    for section in sections(arch).values():
        for name in section:
            assert re.search(rf'(_C|constants)\[[^\]]*"{name}"', code), name


def test_there_are_no_numbers_of_other_architectures():
    with pytest.raises(FileNotFoundError):
        tuned.load("sm_80")


def test_every_table_is_used():
    code = Path(sm90_heuristic.__file__).read_text()
    for name in TABLES:
        assert f'"{name}"' in code


@pytest.mark.parametrize("name", TABLES)
def test_tables_have_distinct_whole_configs_and_plausible_times(name):
    """Of configs that differ, or their epilogues; with all fields, and times of a large GEMM."""
    assert TABLES[name]["measured"]
    tiles = sm90_heuristic.table(name)
    rows = [(tile.config, epilogue) for tile in tiles for epilogue in tile.epilogues]
    assert len({*rows}) == len(rows) > 0
    for tile in tiles:
        assert 1 < tile.us < 100 and set(tile.epilogues) <= {"tma_store", "general"}
        assert isinstance(tile.config, sm90_heuristic.CONFIGS)
        assert dataclasses.is_dataclass(tile.kernel)
        assert tile.tile_us is None or 0 < tile.tile_us < 20


def test_configs_from_json():
    made = sm90_heuristic.from_json(
        {"DecodeFirst": {"config": {"Sm90GemmConfig": {
            "tile_m": 128, "tile_n": 128, "tile_k": 64, "stages": 6, "schedule": {"PingPong": {}},
        }}}}
    )  # fmt: skip
    assert repr(made) == (
        "DecodeFirst(config=Sm90GemmConfig(tile_m=128, tile_n=128, tile_k=64, stages=6, "
        "schedule=PingPong(), cluster=Multicast(size=1), swap_ab=False))"
    )
    with pytest.raises(KeyError):
        sm90_heuristic.from_json({"Unknown": {}})
