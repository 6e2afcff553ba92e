"""The commands that measure `results/` and write its tables, in order."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One command.

    minutes: approximate, on one H200 and 16 cores, including kernel compilation at first use.
    gpus: how many it needs, one per mpiexec rank if there are several; 0: it runs anywhere.
    file: written in the folder of results; "": none.  args: of `cupykern`, without --json.
    """

    name: str
    minutes: int
    args: tuple[str, ...]
    file: str = ""
    gpus: int = 1

    def arguments(self, folder: str) -> list[str]:
        """Return the arguments of `cupykern`."""
        args = [word.replace("FOLDER", folder) for word in self.args]
        return [*args, "--json", f"{folder}/{self.file}"] if self.file.endswith(".json") else args

    def command(self, folder: str, program: Sequence[str] = ("cupykern",)) -> list[str]:
        ranks = ["mpiexec", "-n", str(self.gpus)] if self.gpus > 1 else []
        return [*ranks, *program, *self.arguments(folder)]


def _bench(op: str, minutes: int, peers: str = "") -> Step:
    against = ("--against", peers) if peers else ()
    timing = ("--warmup-ms", "10", "--rep-ms", "20")
    return Step(op, minutes, ("bench", op, *against, *timing), f"{op}.json")


def _suite(seed: int, minutes: int, peers: str, *ops: str) -> Step:
    args = ("bench", *ops, "--suite", "models", "--rows", "9", "--seed", str(seed))
    more = ("--against", peers, "--warmup-ms", "8", "--rep-ms", "20")
    return Step(f"suite_{seed}", minutes, (*args, *more), f"suite_{seed}.json")


def _parallel(step: str, gpus: int, *more: str) -> Step:
    args = ("bench", "--parallel", step, *more, "--against", "torch")
    return Step(f"parallel_{step}_{gpus}", 2, args, f"parallel_{step}_{gpus}.json", gpus)


def _model(weights: str) -> Step:
    name = f"model_llama3_8b_{weights.replace('-', '_')}"
    return Step(name, 1, ("bench", "--model", "llama3-8b", "--weights", weights), f"{name}.json")


def _profile(op: str, shape: str, dtype: str) -> Step:
    args = ("profile", op, "--shape", shape, "--dtype", dtype)
    return Step(f"profile {op} {shape} {dtype}", 1, args, "profiles.json")


_OF_ROWS = "torch,torch.compile,quack,liger"
_TORCH_ATTENTION = "torch.flash,torch.cudnn"
_OPTIONS = ";".join(f"1,16,16384,128,{code}" for code in (1, 5, 6, 7, 8, 9, 1024, 4096))
_PRECISIONS = "float32,float32:fma,float32:bf16x9,float32:bf16x6,float32:bf16x3,float32:tf32"

STEPS = (
    Step("compile", 15, ("compile", "--only-failures", "--record", "FOLDER/compiled.txt"),
         "compiled.txt", gpus=0),
    Step("check", 5, ("check",), "check.json"),
    Step("campaign", 9, ("campaign", "--seconds", "540"), "campaign.json"),
    Step("history", 15, ("check", "--history", "20000"), "history.json"),
    Step("sensitivity", 10, ("check", "--sensitivity", "--target", "host"),
         "host_sensitivity.json", gpus=0),
    _bench("softmax", 3, f"{_OF_ROWS},cupy"),
    _bench("log_softmax", 1, "torch"),
    _bench("layer_norm", 4, _OF_ROWS),
    _bench("rms_norm", 4, f"{_OF_ROWS},cupy"),
    _bench("add_rms_norm", 4, _OF_ROWS),
    _bench("quantize", 1, "torch"),
    _bench("quantize_nvfp4", 1),
    _bench("matmul", 5, "torch,torch.tf32,cupy"),
    Step("matmul_precisions", 2,
         ("bench", "matmul", "--shapes", "1024,1024,1024;4096,4096,4096;8192,8192,8192",
          "--dtype", _PRECISIONS, "--against", "torch,torch.tf32",
          "--warmup-ms", "10", "--rep-ms", "20"),
         "matmul_precisions.json"),
    _bench("complex_matmul", 1),
    _bench("scaled_mm", 10, "torch,torch.compile,torch.fast,torch.cast"),
    _bench("dual_gemm_silu", 5, "torch,torch.compile"),
    _bench("dequant_softmax", 1, "torch.compile"),
    _bench("attention", 12, f"{_TORCH_ATTENTION},torch.flex,flash_attn"),
    Step("attention_options", 4,
         ("bench", "attention", "--dtype", "bfloat16", "--shapes", _OPTIONS,
          "--against", "torch.flex,flash_attn,torch.cudnn", "--warmup-ms", "5", "--rep-ms", "20"),
         "attention_options.json"),
    _bench("attention_varlen", 1, "torch.flash"),
    _bench("decode_attention", 2, _TORCH_ATTENTION),
    _bench("rope_and_cache", 2),
    _bench("merge_attention", 1),
    _bench("cascade_attention", 1),
    _bench("nonfinite_report", 1),
    Step("startup", 2, ("startup", "--repeats", "1"), "startup.json"),
    _suite(131, 3, "torch,torch.fast,torch.cast", "scaled_mm", "matmul"),
    _suite(171, 1, "torch", "matmul", "dual_gemm_silu", "--dtype", "float32"),
    _suite(101, 8, "torch,torch.fast,torch.cast,torch.flash,torch.cudnn"),
    Step("model_llama3_8b", 5, ("bench", "--model", "llama3-8b", "--prefill", "512,4096"),
         "model_llama3_8b.json"),
    _model("e4m3"),
    _model("e4m3-blocks"),
    _parallel("mlp", 2),
    _parallel("mlp", 4),
    _parallel("attention", 2),
    _parallel("attention", 4),
    _parallel("decode", 4, "--batch", "1,16"),
    _profile("decode_attention", "16,32,8,8192,128", "bfloat16"),
    _profile("decode_attention", "1,32,8,131072,128", "bfloat16"),
    _profile("attention", "1,32,16384,64", "bfloat16"),
    _profile("layer_norm", "2048,262144", "bfloat16"),
    _profile("rms_norm", "2048,262144", "bfloat16"),
    _profile("softmax", "32768,1024", "float16"),
    _profile("softmax", "32768,1024", "float32"),
    _profile("matmul", "4096,4096,4096", "bfloat16"),
    _profile("matmul", "4096,4096,4096", "bfloat16:bias+gelu"),
    _profile("scaled_mm", "4096,7168,2048", "float8_e4m3fn"),
    _profile("scaled_mm", "4096,7168,2048", "float8_e4m3fn:rows"),
    _profile("scaled_mm", "4096,14336,4096", "float8_e4m3fn:rows"),
    _profile("scaled_mm", "8192,8192,8192", "float8_e4m3fn"),
    Step("report", 1, ("report", "--results", "FOLDER"), gpus=0),
)  # fmt: skip


def chosen(names: Sequence[str]) -> list[Step]:
    """Return the steps of these names, in order; no names: all steps.

    "profile" selects all profiles.  Raises ValueError for unknown names.
    """
    known = {step.name.partition(" ")[0] for step in STEPS} | {step.name for step in STEPS}
    for name in names:
        if name not in known:
            steps = ", ".join(dict.fromkeys(step.name.partition(" ")[0] for step in STEPS))
            raise ValueError(f"unknown step {name!r}; steps are {steps}")
    wanted = set(names)
    return [s for s in STEPS if not names or {s.name, s.name.partition(" ")[0]} & wanted]


def run(step: Step, folder: str) -> int:
    """Run the step's command and return its exit code."""
    return subprocess.run(step.command(folder, (sys.executable, "-m", "cupykern"))).returncode
