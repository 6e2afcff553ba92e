"""What profilers print becomes a few figures; without one the command says how to get it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cupykern import OPS, cli, targets
from cupykern.tools import processes, profile, stored

STALL = profile.STALL
NCU = {
    "ID": ("", "0"),
    "Process ID": ("", "4711"),
    "Kernel Name": ("", "softmax"),
    "Block Size": ("", "(128, 1, 1)"),
    "gpu__time_duration.sum": ("ns", "18,592"),
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": ("%", "88.25"),
    "dram__bytes_read.sum": ("byte", "33,554,432"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": ("%", "0"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "71.5"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": ("", "1,024"),
    "launch__registers_per_thread": ("register/thread", "40"),
    STALL.format("long_scoreboard"): ("inst", "9"),
    STALL.format("barrier"): ("inst", "0.75"),
    STALL.format("gmma"): ("inst", "n/a"),
    STALL.format("wait"): ("inst", "0.25"),
}


def raw_page(launches: int = 1) -> str:
    """As Nsight Compute documents: names, units, a line per launch, messages around."""
    rows = [NCU.keys(), [unit for unit, _ in NCU.values()]]
    rows += [[value for _, value in NCU.values()]] * launches
    table = "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows)
    return (
        '==PROF== Connected to process 4711 (/usr/bin/python3)\n==PROF== Profiling "softmax": '
        f"0%....50%....100% - 8 passes\n{table}\n==PROF== Disconnected from process 4711\n"
    )


def test_figures_and_stalls_are_read_from_ncus_page():
    launches = profile.parse_ncu(raw_page(2))
    assert len(launches) == 2 and launches[0] == launches[1]
    figures = {label: (value, unit) for label, value, unit in launches[0].figures}
    assert figures["time"] == (pytest.approx(18.592), "us")
    assert figures["DRAM throughput"] == (88.25, "%")
    assert figures["DRAM read"] == (pytest.approx(33.554432), "MB")
    assert figures["tensor cores busy"] == (0, "%") and figures["occupancy"] == (71.5, "%")
    assert figures["shared-memory conflicts"] == (1024, "")
    assert "DRAM written" not in figures  # was not there
    assert [share for _, share in launches[0].stalls] == [0.9, 0.075, 0.025]
    assert "global" in launches[0].stalls[0][0]


@pytest.mark.parametrize(
    "text", ["", "==ERROR== ERR_NVGPUCTRPERM\n", '"ID","Kernel Name"\n"",""\n', '"a","b"\n' * 4]
)
def test_what_is_no_raw_page(text):
    with pytest.raises(ValueError, match="no table") as caught:
        profile.parse_ncu(text)
    assert "ERR_NVGPUCTRPERM" in str(caught.value) or "ERROR" not in text


ROCPROF = (
    '"Correlation_Id","Dispatch_Id","Agent_Id","Queue_Id","Process_Id","Thread_Id","Grid_Size",'
    '"Kernel_Id","Kernel_Name","Workgroup_Size","LDS_Block_Size","Scratch_Size","VGPR_Count",'
    '"Accum_VGPR_Count","SGPR_Count","Counter_Name","Counter_Value","Start_Timestamp",'
    '"End_Timestamp"\n'
)


def collection(counter: str, *values: float, kernel: str = "softmax") -> str:
    return ROCPROF + "".join(
        f'{i},{i},"Agent 1",2,99,99,4096,4,"{kernel}",256,1024,0,28,4,32,"{counter}",{value},1,2\n'
        for i, value in enumerate(values, 1)
    )


def test_figures_are_read_from_rocprofs_collections():
    texts = [collection("MemUnitBusy", 10, 20, 87.5), collection("OccupancyPercent", 1, 2, 6.25e1)]
    (launch,) = profile.parse_rocprof(texts, "softmax")
    figures = {label: value for label, value, _ in launch.figures}
    assert figures["memory unit busy"] == 87.5 and figures["occupancy"] == 62.5  # after the warm-up
    assert figures["registers of a thread"] == 28 and "matrix cores busy" not in figures
    with pytest.raises(ValueError, match="no launch of nothing"):
        profile.parse_rocprof(texts, "nothing")


def test_the_command_shows_a_recorded_page(capsys, tmp_path):
    page, out = tmp_path / "page.csv", tmp_path / "p.json"
    page.write_text(raw_page())
    assert cli.main(["profile", "softmax", "--read", str(page), "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "88.2" in text and "90% of the waiting is for loads from global" in text
    (found,) = json.loads(out.read_text())["profiles"]
    assert found["launches"][0]["kernel"] == "softmax"
    page.write_text("nothing\n")
    assert cli.main(["profile", "softmax", "--read", str(page)]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_the_reason_why_there_is_no_profile_is_kept(capsys, tmp_path):
    out = tmp_path / "p.json"
    arguments = ["--target", "host", "--shape", "4,64", "--dtype", "float16", "--json", str(out)]
    assert cli.main(["profile", "softmax", *arguments]) == 1
    assert "needs a GPU" in capsys.readouterr().err
    document = json.loads(out.read_text())
    (found,) = document["profiles"]
    assert (document["kind"], found["op"], found["shape"]) == ("profile", "softmax", [4, 64])
    assert found["launches"] == [] and "needs a GPU" in found["unavailable"]


def test_profiles_of_a_device_are_kept_together(tmp_path):
    """Of a call the last one."""
    path = tmp_path / "p.json"

    def add(op: str, kernel: str, device: str = "one") -> list[tuple[str, str]]:
        header = {"kind": "profile", "date": "now", "machine": {"device": device}}
        call = {"op": op, "shape": [4, 64], "dtype": "float16"}
        launches = [profile.Profile(kernel, ())]
        path.write_text(stored.to_json(profile.document(header, call, launches, path)))
        found = stored.read(path)["profiles"]
        return [(each["op"], each["launches"][0]["kernel"]) for each in found]

    assert add("softmax", "a") == [("softmax", "a")]
    assert add("matmul", "b") == [("softmax", "a"), ("matmul", "b")]
    assert add("softmax", "c") == [("matmul", "b"), ("softmax", "c")]
    assert add("softmax", "d", "another") == [("softmax", "d")]


@pytest.mark.parametrize("kind, tool", [("cuda", "ncu"), ("hip", "rocprofv3")])
def test_a_profiler_that_is_missing(kind, tool, monkeypatch):
    monkeypatch.setattr(profile.shutil, "which", lambda name: None)
    monkeypatch.setattr(profile, "FOLDERS", ())
    with pytest.raises(targets.UnavailableError, match=f"{tool}.*missing"):
        profile.run(kind, "softmax", "softmax", (8, 8), "float16", 0, None)
    with pytest.raises(targets.UnavailableError, match="needs a GPU"):
        profile.run("host", "softmax", "softmax", (8, 8), "float16", 0, None)


@pytest.mark.parametrize(
    "kind, tool, body, label",
    [
        ("cuda", "ncu", f"print({raw_page()!r})", "DRAM throughput"),
        (
            *("hip", "rocprofv3"),
            "import sys; from pathlib import Path; a = sys.argv; "
            "counter = a[a.index('--pmc') + 1]; folder = Path(a[a.index('-d') + 1])\n"
            f"text = {collection('NAME', 1, 2, 3)!r}.replace('NAME', counter)\n"
            "(folder / '7_counter_collection.csv').write_text(text)",
            "memory unit stalled",
        ),
    ],
)
def test_profilers_are_run(kind, tool, body, label, monkeypatch, tmp_path):
    """By stand-ins that print what the real ones would, and see the real command line."""
    stand_in = tmp_path / tool
    log = tmp_path / "log"
    stand_in.write_text(
        f"#!{sys.executable}\nimport sys\nopen({str(log)!r}, 'a').write(repr(sys.argv) + '\\n')\n"
        f"{body}\n"
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (launch,) = profile.run(kind, "softmax", "softmax", (8, 16), "float16", 3, None)
    assert label in {name for name, *_ in launch.figures}
    assert "call('softmax', (8, 16), 'float16', 3, None)" in log.read_text()


def test_what_runs_under_a_profiler():
    """The program itself, on what is here."""
    problem = OPS[0].bench_problem((4, 64), "float16")
    config = repr(OPS[0].configs(problem, targets.get().arch)[0])
    profile.call("softmax", (4, 64), "float16", 0, config)
    with pytest.raises(KeyError):
        profile.call("softmax", (4, 64), "float16", 0, "none")
    done = subprocess.run(
        [sys.executable, "-c", "import cupykern.tools.profile"],
        capture_output=True,
        text=True,
        env=processes.environment(),
        cwd=Path("/"),
    )
    assert done.returncode == 0, done.stderr
