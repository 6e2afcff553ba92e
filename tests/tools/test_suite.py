"""Benchmark suites: legal shapes, the same on every machine, and what is said of their times."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections import Counter
from dataclasses import fields, replace
from types import SimpleNamespace

import needs
import numpy as np
import pytest
from fake_gpu import fake_gpu, on_fake_gpu

from cupykern import OPS, cli, dtypes, inputs
from cupykern.op import Work
from cupykern.tools import baseline, bench, bench_command, options, stored
from cupykern.tools.suite import choice, models, shapes, summary
from cupykern.tuning import protocol

BY_NAME = {op.name: op for op in OPS}
OPS_OF_SUITES = {
    *("softmax", "log_softmax", "layer_norm", "rms_norm", "add_rms_norm", "quantize"),
    *("quantize_nvfp4", "matmul", "scaled_mm", "dual_gemm_silu", "dequant_softmax", "attention"),
    "decode_attention",
}


@pytest.fixture(autouse=True)
def own_lock(monkeypatch, tmp_path):
    monkeypatch.setattr(protocol, "lock_path", lambda: tmp_path / "lock")


def chosen(name="models", seed=0, rows=12, target="cuda", ops=OPS):
    return choice.tasks(choice.suite(name, rows, seed, target), ops, target)


def key(task):
    return task.op.name, task.shape, task.dtype


def entries_of(name):
    return {
        entry
        for model in models.by_suite()[name]
        for tokens in shapes.token_counts(model)
        for entry in shapes.entries(model, tokens)
    }


# --- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.by_suite())
def test_every_shape_of_a_model_is_a_problem(name):
    made = set()
    for entry in entries_of(name):
        op = BY_NAME[entry.op]
        problem = op.bench_problem(entry.shape, entry.dtype)
        assert {field for field, _ in entry.changes} <= {field.name for field in fields(problem)}
        assert min(op.work(replace(problem, **dict(entry.changes)))) >= 0
        made.add(entry.op)
    assert {"matmul", "scaled_mm", "quantize", "attention"} <= made <= OPS_OF_SUITES


def test_models_have_all_ops_of_suites():
    assert {task.op.name for task in chosen(rows=1)} == OPS_OF_SUITES == shapes.RANDOM.keys()


@pytest.mark.parametrize(
    "name, op, shape, dtype",
    [
        ("llama3-8b", "matmul", (1, 6144, 4096), "bfloat16"),
        ("llama3-8b", "matmul", (777, 4096, 14336), "bfloat16"),
        ("llama3-8b", "matmul", (777, 4096, 14336), "float32"),
        ("llama3-8b", "dual_gemm_silu", (16, 14336, 4096), "float32"),
        ("llama3-8b", "dual_gemm_silu", (16, 14336, 4096), "float8_e4m3fn"),
        ("llama3-8b", "attention", (1, 32, 2048, 128, 1, 8), "bfloat16"),
        ("llama3-8b", "decode_attention", (64, 32, 8, 8192, 128), "bfloat16"),
        ("llama3-70b", "scaled_mm", (32768, 57344, 8192), "float8_e4m3fn:blocks"),
        ("qwen2.5-7b", "matmul", (8, 4608, 3584), "bfloat16:bias"),
        ("qwen2.5-7b", "matmul", (8, 3584, 3584), "bfloat16"),
        ("qwen3-8b", "rms_norm", (32 * 100, 128), "bfloat16"),
        # 32768 tokens x 8 experts of 128: 2048 for each.
        ("qwen3-30b-a3b", "matmul", (2048, 1536, 2048), "bfloat16"),
        ("qwen3-30b-a3b", "matmul", (1, 2048, 768), "bfloat16"),
        ("qwen3-30b-a3b", "softmax", (4096, 128), "float32"),
        ("mistral-7b", "decode_attention", (1, 32, 8, 4096, 128), "bfloat16"),
        ("gemma3-12b", "decode_attention", (1, 16, 8, 1024, 256), "bfloat16"),
        ("phi4", "dequant_softmax", (1, 100352, 5120), "bfloat16"),
        ("deepseek-v3", "scaled_mm", (4096, 24576, 1536), "float8_e4m3fn:blocks"),
        ("deepseek-v3", "dual_gemm_silu", (1024, 2048, 7168), "float8_e4m3fn"),
        ("gpt-oss-20b", "matmul", (5, 5120, 2880), "bfloat16:bias"),
        ("whisper-large-v3", "attention", (2, 20, 1500, 64, 0, 20), "float16"),
        ("whisper-large-v3", "layer_norm", (3000, 1280), "float16"),
        ("vit-l", "matmul", (8 * 577, 4096, 1024), "float16:bias+gelu"),
        ("sdxl", "matmul", (1024, 10240, 1280), "float16:bias"),
        ("flux", "matmul", (4608, 21504, 3072), "bfloat16:bias"),
    ],
)
def test_known_calls_of_models(name, op, shape, dtype):
    assert (op, shape, dtype) in {entry[:3] for entry in entries_of(name)}


def test_calls_that_models_do_not_make():
    assert "dual_gemm_silu" not in {
        e.op for name in ("gemma2-9b", "vit-l") for e in entries_of(name)
    }
    lengths = {e.shape[2] for e in entries_of("mistral-7b") if e.op == "attention"}
    assert max(lengths) == 4096  # the window
    assert not [e for e in entries_of("flux") if e.op in ("decode_attention", "dequant_softmax")]
    rows = {e.shape[0] for e in entries_of("vit-l") if e.op == "matmul"}
    assert all(count % 197 == 0 or count % 577 == 0 for count in rows)


def test_values_of_latent_attention_are_narrower():
    (task, *_) = (t for t in chosen("deepseek-v3") if t.op.name == "attention")
    assert (task.problem.d, task.problem.dv, task.problem.causal) == (192, 128, True)


def test_a_window_hides_keys_of_a_cache():
    caches = {e.shape[3] for e in entries_of("gpt-oss-20b") if e.op == "decode_attention"}
    assert 128 in caches and 131072 in caches
    caches = {e.shape[3] for e in entries_of("mistral-7b") if e.op == "decode_attention"}
    assert caches == {512, 2048, 4096}


# --- the sample ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["models", "deepseek-v3", "random:5:12"])
def test_rows_are_distinct_fit_and_are_as_many_as_asked_for(name):
    tasks = chosen(name)
    assert len({(task.op.name, task.dtype, repr(task.problem)) for task in tasks}) == len(tasks)
    assert all(choice.fits(task.op.work(task.problem), "cuda") for task in tasks)
    counts = Counter((task.op.name, choice.group(task.dtype)) for task in tasks)
    assert max(counts.values()) == 12


def test_work_fits_up_to_the_limits_of_the_target():
    assert choice.fits(Work(10**9, 10**9), "cuda")
    assert not choice.fits(Work(4 * 10**9 + 1, 0), "cuda")
    assert not choice.fits(Work(0, 8 * 10**9 + 1), "cuda")
    assert choice.fits(Work(2**21, 2**21, 2**25), "host")
    assert not choice.fits(Work(2**21, 2**21 + 1), "host")
    assert not choice.fits(Work(0, 0, 2**25 + 1), "host")


def test_a_sample_is_the_same_whatever_is_asked_for_beside_it():
    """Other ops, more rows; another seed takes other shapes."""
    some = [BY_NAME["matmul"], BY_NAME["softmax"]]
    everything = {key(task) for task in chosen()}
    alone = {key(task) for task in chosen(ops=some)}
    assert alone == {one for one in everything if one[0] in ("matmul", "softmax")}
    assert alone < {key(task) for task in chosen(ops=some, rows=24)}
    other = {key(task) for task in chosen(ops=some, seed=1)}
    assert len(other & alone) < len(alone) / 2


EXPECTED_OF_MODELS = [
    ("rms_norm", (8192, 2048), "bfloat16"),
    ("rms_norm", (100, 8192), "bfloat16"),
    ("rms_norm", (24, 4096), "bfloat16"),
    ("rms_norm", (2048, 512), "bfloat16"),
]
EXPECTED_OF_RANDOM = [
    ("matmul", (1, 1154, 136), "float16"),
    ("matmul", (3, 5424, 41), "bfloat16"),
    ("matmul", (15, 273, 64), "float16"),
    ("matmul", (357, 45, 1152), "float32"),
    ("matmul", (1088, 144, 1928), "float32"),
    ("matmul", (2168, 1664, 14920), "bfloat16"),
    ("softmax", (1, 64), "bfloat16"),
    ("softmax", (3, 60888), "float32"),
    ("softmax", (4, 608), "bfloat16"),
    ("softmax", (6, 47), "float16"),
    ("softmax", (36, 64), "float32"),
    ("softmax", (6016, 5929), "float16"),
]


def test_a_sample_of_models_is_the_same_on_every_machine():
    found = [key(task) for task in chosen(ops=[BY_NAME["rms_norm"]], rows=4)]
    assert found == EXPECTED_OF_MODELS


def test_random_suites_are_the_same_on_every_machine():
    found = [
        key(task) for task in chosen("random:7:2", ops=[BY_NAME["matmul"], BY_NAME["softmax"]])
    ]
    assert sorted(found) == EXPECTED_OF_RANDOM
    assert not {*found} & {key(task) for task in chosen("random:8:2")}


def test_random_sizes_are_log_uniform_and_some_are_odd():
    draw = shapes.Draw("seed", 17)
    sizes = [draw.size(0, 12) for _ in range(12000)]
    assert min(sizes) == 1 and all(size <= 2**12 for size in sizes)
    large = Counter(int(math.log2(size)) for size in sizes if size >= 128)
    assert set(large) == set(range(7, 12)) and min(large.values()) > 0.85 * max(large.values())
    odd = [size % 2 for size in sizes if size >= 128]
    assert 0.1 < sum(odd) / len(odd) < 0.25
    assert all(draw.size(4, 17, 16) % 16 == 0 for _ in range(100))
    assert all(shapes.Draw("seed", 9).size(0, 17) <= 2**9 for _ in range(100))


def test_rows_of_ops_are_mixed():
    """So that an interrupted run is a sample of all."""
    names = [task.op.name for task in chosen()][:60]
    assert len(set(names)) > 8


@pytest.mark.parametrize(
    "dtype, group",
    [
        ("bfloat16", "bfloat16"),
        ("float16:bias+gelu", "float16"),
        ("float16*int8:bias", "float16*int8"),
        ("float8_e4m3fn:blocks", "float8_e4m3fn:blocks"),
        ("float8_e4m3fn:bias+rows", "float8_e4m3fn:rows"),
        ("bfloat16:block", "bfloat16:block"),
    ],
)
def test_groups_leave_out_epilogues(dtype, group):
    assert choice.group(dtype) == group


@pytest.mark.parametrize("name", ["llama", "random", "random:1", "random:1:0", "random:-1:3", ""])
def test_a_wrong_name_gives_one_line(name):
    with pytest.raises(ValueError, match=r"unknown suite .*llama3-8b.*random:SEED:COUNT") as error:
        choice.suite(name, None, 0, "host")
    assert "\n" not in str(error.value)


# --- plans ---------------------------------------------------------------------------------------


def _without_values(shape, dtype, seed, xp, unit=None):
    """For bench_values: memory that nothing touches."""
    return np.zeros(shape, dtype)


_FAKE_MEMORY = 1 << 32  # that is touched nowhere


def _is_cheap(task):
    """Fits the fake GPU twice; inputs that are not bench_values' are really made."""
    made = task.op.name == "dual_gemm_silu" or "float4" in task.dtype
    return sum(task.op.work(task.problem)[:2]) < (2**25 if made else _FAKE_MEMORY // 2)


@pytest.mark.parametrize("name, seed", [("models", 0), ("models", 1), ("random:3:2", 0)])
@needs.no_gpu
def test_every_row_is_planned_on_a_fake_gpu(name, seed, monkeypatch):
    pytest.importorskip("cupy")
    monkeypatch.setattr(inputs, "bench_values", _without_values)
    tasks = [task for task in chosen(name, seed, rows=30) if _is_cheap(task)]
    groups = {}
    for task in tasks:
        groups.setdefault((task.op.name, choice.group(task.dtype)), []).append(task)
    assert len(groups) > 30
    with fake_gpu(monkeypatch, _FAKE_MEMORY) as gpu:
        for task in itertools.chain.from_iterable(tasks[:2] for tasks in groups.values()):
            config = task.op.configs(task.problem, "sm_90a")[0]
            assert task.op.variant(task.problem, config).kernel, key(task)
            call = task.op.inputs(task.problem, 0, np)
            gpu.reuse()
            call = on_fake_gpu(call, gpu)
            gpu.launches.clear()
            task.op.run(*call.args, **call.kwargs)
            assert gpu.launches, key(task)


@needs.no_gpu
def test_kernels_of_a_gpus_rows_are_known_before_they_run(monkeypatch):
    """By calls that launch nothing."""
    pytest.importorskip("cupy")
    some = [BY_NAME[name] for name in ("softmax", "matmul", "quantize", "decode_attention")]
    with fake_gpu(monkeypatch) as gpu:
        pool = SimpleNamespace(free_all_blocks=gpu.reuse)
        monkeypatch.setattr(gpu.xp, "get_default_memory_pool", lambda: pool)
        made = {dtypes.float8_e4m3fn: np.uint8}
        monkeypatch.setattr(
            inputs,
            "bench_values",
            lambda shape, dtype, seed, xp: gpu.array(shape, made.get(dtype, dtype)).view(dtype),
        )
        tasks = chosen(rows=2, ops=some)
        found = bench.variants(tasks, gpu)
        assert not gpu.launches
        first = {t.op.variant(t.problem, t.op.configs(t.problem, "sm_90a")[0]) for t in tasks}
    assert {variant.kernel for variant in first} <= {variant.kernel for variant in found}
    assert len(found) == len(set(found)) >= 6


@pytest.mark.parametrize("used", [False, True])
def test_memory_that_torch_keeps_is_given_back(used, monkeypatch):
    """CuPy's pool cannot ask for it."""
    freed = []
    cuda = SimpleNamespace(is_initialized=lambda: used, empty_cache=lambda: freed.append("torch"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    pool = SimpleNamespace(free_all_blocks=lambda: freed.append("cupy"))
    xp = SimpleNamespace(get_default_memory_pool=lambda: pool)
    bench.free_memory(SimpleNamespace(xp=xp))
    assert freed == ["cupy", "torch"][: 1 + used]


# --- the summary ---------------------------------------------------------------------------------


def row(ours, peers, shape=(8, 8), dtype="float16", op="softmax", verified=True):
    results = [{"name": "cupykern", "median_us": ours, "verified": verified}]
    results += [{"name": n, "median_us": us, "verified": True} for n, us in peers.items()]
    return {"op": op, "shape": shape, "dtype": dtype, "results": results}


def test_a_summary_of_synthetic_times():
    rows = [
        row(100.0, {"torch": 400.0, "quack": 200.0}, (1, 1)),
        row(100.0, {"torch": 50.0, "quack": None}, (2, 2)),
        row(100.0, {"torch": 98.0}, (3, 3)),
        row(100.0, {"torch": 97.0, "quack": 120.0}, (4, 4)),
        row(100.0, {"torch": 99.0}, (5, 5)),
        row(100.0, {}, (6, 6)),
        row(100.0, {"torch": None}, (7, 7)),
        row(None, {"torch": 10.0}, (8, 8), verified=False),
    ]
    (line,) = summary.lines(rows)
    assert (line.op, line.dtype, line.rows, line.alone, line.wrong) == (
        "softmax",
        "float16",
        5,
        3,
        1,
    )
    product = 2 * 0.5 * 0.98 * 0.97 * 0.99
    assert line.speedup == pytest.approx(product ** (1 / 5))
    assert line.behind == (3 / 5, 2 / 5, 1 / 5)
    assert [(x.shape, x.peer, x.ratio) for x in line.furthest] == [
        ((2, 2), "torch", 0.5),
        ((4, 4), "torch", 0.97),
        ((3, 3), "torch", 0.98),
    ]
    assert str(line.furthest[0]) == "2x2 float16 torch 0.500"
    cells = ("softmax", "float16", "5", "3", "1", "0.988", "60%", "40%", "20%")
    assert summary.cells(line) == cells and len(summary.HEAD) == len(cells)


def test_lines_are_of_ops_and_dtypes():
    rows = [
        row(1.0, {"torch": 2.0}, dtype="bfloat16:bias", op="matmul"),
        row(1.0, {"torch": 8.0}, dtype="bfloat16", op="matmul"),
        row(1.0, {"torch": 1.0}, dtype="float8_e4m3fn:blocks", op="scaled_mm"),
        row(1.0, {}, dtype="float8_e4m3fn:rows", op="scaled_mm"),
        row(1.0, {"torch": 1.0}),
    ]
    found = {(line.op, line.dtype): line for line in summary.lines(rows)}
    assert next(iter(found)) == ("softmax", "float16")
    assert found["matmul", "bfloat16"].speedup == pytest.approx(4.0)
    assert found["matmul", "bfloat16"].furthest == ()
    alone = found["scaled_mm", "float8_e4m3fn:rows"]
    assert (alone.rows, alone.alone, alone.speedup, alone.behind) == (0, 1, None, None)
    assert summary.cells(alone)[5:] == ("-",) * 4


# --- the command ---------------------------------------------------------------------------------

HOST = ("--target", "host", "--rep-ms", "0", "--warmup-ms", "0")


def run(capsys, *args):
    code = cli.main(["bench", *args])
    return code, *capsys.readouterr()


def test_bench_of_a_suite_prints_and_writes_its_rows(capsys, tmp_path):
    path = tmp_path / "suite.json"
    ops = ("rms_norm", "softmax")
    code, out, _ = run(
        capsys,
        *ops,
        "--suite",
        "llama3-8b",
        *HOST,
        "--rows",
        "2",
        "--seed",
        "3",
        "--json",
        str(path),
    )
    assert code == 0
    title, head, _, *lines = out.splitlines()
    assert title.startswith("suite llama3-8b, seed 3, 4 rows.  host emulation")
    assert [line.split()[:2] for line in lines] == [
        ["softmax", "float32"],
        ["rms_norm", "bfloat16"],
    ]
    document = stored.read(path)
    assert document["kind"] == "suite"
    assert document["suite"] == {
        "name": "llama3-8b", "rows": 2, "seed": 3, "behind_by": [0.02, 0.03, 0.1],
    }  # fmt: skip
    assert len(document["rows"]) == 4 and document["rows"][0]["results"][0]["verified"]
    assert [line["op"] for line in document["summary"]] == ["softmax", "rms_norm"]
    assert document["settings"]["seed"] == 3
    device = document["machine"]["device"]
    assert len(baseline.load(path, device)) == 4


def test_an_interrupted_suite_keeps_what_was_measured(capsys, tmp_path, monkeypatch):
    real = bench_command.run

    def interrupted(*args):
        yield from itertools.islice(real(*args), 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_command, "run", interrupted)
    path = tmp_path / "suite.json"
    args = ("rms_norm", "--suite", "llama3-8b", *HOST, "--rows", "4", "--json", str(path))
    code, out, _ = run(capsys, *args)
    assert code == 130 and "2 of 4 rows" in out.splitlines()[0]
    document = json.loads(path.read_text())
    assert document["interrupted"] and len(document["rows"]) == 2
    assert document["summary"][0]["alone"] == 2


def test_a_wrong_row_of_a_suite_says_why(capsys, monkeypatch):
    wrong = replace(BY_NAME["rms_norm"], run=lambda x, weight=None: x + x)
    monkeypatch.setattr(options, "OPS", (wrong, BY_NAME["softmax"]))
    code, out, _ = run(capsys, "--suite", "llama3-8b", *HOST)
    assert code == 1
    line, *_ = (line for line in out.splitlines() if line.startswith("rms_norm "))
    assert line.split()[2:5] == ["0", "1", "1"]
    assert out.splitlines()[-1].startswith("rms_norm") and "error/bound" in out.splitlines()[-1]


@pytest.mark.parametrize(
    "args, says",
    [
        (("--suite", "llama"), "unknown suite 'llama'; suites are models, llama3-8b"),
        (("--suite", "models", "--shapes", "4,4"), "leave out --shapes"),
        (("--rows", "3"), "--rows is of a --suite"),
        (("softmax", "--suite", "flux"), "suite flux has no rows of softmax"),
        (
            ("rms_norm", "--suite", "models", "--dtype", "int8"),
            "no rows of int8 here; it has bfloat16",
        ),
    ],
)
def test_what_the_command_refuses(args, says, capsys):
    code, out, err = run(capsys, *args, "--target", "host")
    assert code == 2 and says in err and out == ""
    assert len([line for line in err.splitlines() if line.startswith("Error")]) <= 1
