"""Peers without a GPU or library, stand-ins for those that need one, and a peer's steps."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
from fake_op import make_op

import cupykern
from cupykern import check, dtypes, targets
from cupykern.op import Call, as_tuple
from cupykern.peers import all_peers, cupyx, flash_attn, nvmath
from cupykern.peers.base import Peer, norm_arguments
from cupykern.peers.torch_attention import self_attention
from cupykern.tools import bench, bench_command, results
from cupykern.tuning import contender, timing

HOST = targets.get("host")
(CUPYX,), (NVMATH,) = cupyx.PEERS, nvmath.PEERS


def bench_row(peer: Peer):
    tasks = bench.tasks([make_op()], "host", [(8, 16)], ("float32",))
    settings = bench.Settings(warmup_ms=0, rep_ms=0)
    return bench.bench_task(tasks[0], HOST, timing.clock_of(HOST), settings, [peer])


@pytest.mark.parametrize(
    ("op", "options", "eps"),
    [("layer_norm", {}, 1e-5), ("rms_norm", {}, 2.0**-10), ("rms_norm", {"eps": 1e-6}, 1e-6)],
)
def test_norms_of_peers_have_our_default_eps(op, options, eps):
    call = Call((np.ones((2, 4), np.float16),), options)
    assert norm_arguments(op, call).eps == eps
    ours = {"layer_norm": cupykern.layer_norm, "rms_norm": cupykern.rms_norm}[op]
    x = np.full((1, 4), 2.0**-8, np.float16)  # which is as large as the square root of some eps
    assert (ours(x, **options) == ours(x, eps=eps)).all()


def third(op, call):
    return lambda: call.args[0] / np.float32(3)


def test_the_steps_of_a_peer_are_timed(capsys):
    steps = {"cast": lambda: sum(range(20_000)), "product": lambda: None}
    row = bench_row(Peer("two steps", "numpy", third, lambda op, call: steps))
    parts = row.results[1].parts_us
    assert set(parts) == {"cast", "product"} and parts["cast"] > parts["product"] >= 0
    assert row.results[0].parts_us is None and row.results[1].median_us > 0
    bench_command.print_rows([row], HOST, {})
    assert "two steps, us: cast " in capsys.readouterr().out


def test_steps_that_fail_do_not_fail_their_peer():
    def broken(op, call):
        raise RuntimeError("cannot be taken apart")

    row = bench_row(Peer("broken", "numpy", third, broken))
    assert row.results[1].median_us > 0 and row.results[1].parts_us is None
    assert row.results[1].note is None


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_rms_norm"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_cupys_expressions_are_within_the_bound(name, dtype):
    """CuPy's arithmetic is numpy's here; a residual is rounded as ours is."""
    op = next(op for op in cupykern.OPS if op.name == name)
    call = op.inputs(op.bench_problem((8, 512), dtype), 0, np)
    outputs = as_tuple(CUPYX.build(name, call)())
    references = op.reference(*call.args, **call.kwargs)
    bounds = op.bound(*call.args, **call.kwargs, reference=references)
    assert check.compare(outputs, references, bounds).error_over_bound <= 1


def test_cupy_has_not_everything():
    x = np.ones((2, 8), np.float16)
    assert CUPYX.build("rms_norm", Call((x,), {"quantize": "e4m3"})) is None
    assert CUPYX.build("quantize", Call((x, "e4m3"))) is None


class _Matmul:
    """As nvmath.linalg.advanced.Matmul documents: alpha * a @ b, a bias per row, an activation."""

    def __init__(self, a, b, *, alpha, options):
        assert options == {"compute_type": "32F"}
        self.a, self.b, self.alpha = a, b, alpha
        self.epilog, self.bias = "", 0.0

    def plan(self, *, epilog="", epilog_inputs=None):
        self.epilog = epilog
        self.bias = epilog_inputs["bias"][:, None] if epilog_inputs else 0.0

    def execute(self):
        y = self.alpha * (self.a.astype(np.float32) @ self.b.astype(np.float32)) + self.bias
        return (np.maximum(y, 0) if "RELU" in self.epilog else y).astype(self.a.dtype)


@pytest.fixture
def library(monkeypatch):
    advanced = types.ModuleType("nvmath.linalg.advanced")
    advanced.Matmul = _Matmul
    advanced.MatmulComputeType = types.SimpleNamespace(COMPUTE_32F="32F")
    names = ("BIAS", "RELU", "RELU_BIAS", "GELU", "GELU_BIAS")
    advanced.MatmulEpilog = types.SimpleNamespace(**{name: name for name in names})
    monkeypatch.setitem(sys.modules, "nvmath", types.ModuleType("nvmath"))
    monkeypatch.setitem(sys.modules, "nvmath.linalg", types.ModuleType("nvmath.linalg"))
    monkeypatch.setitem(sys.modules, "nvmath.linalg.advanced", advanced)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_nvmath_computes_our_product(library, bias, activation):
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-4, 5, shape).astype(np.float16) for shape in ((8, 16), (16, 24)))
    kwargs = {"activation": activation, "alpha": 0.5}
    if bias:
        kwargs["bias"] = np.arange(24, dtype=np.float16)
    ours = cupykern.matmul(a, b, **kwargs)
    np.testing.assert_array_equal(NVMATH.build("matmul", Call((a, b), kwargs))(), ours)


def test_what_nvmath_has_not(library):
    a = np.ones((8, 8), np.float16)
    for kwargs in ({"residual": a}, {"activation": "silu"}, {"bias": np.ones((8, 1), np.float16)}):
        assert NVMATH.build("matmul", Call((a, a), kwargs)) is None
    assert NVMATH.build("matmul", Call((a, a.astype(dtypes.float8_e4m3fn)))) is None
    assert NVMATH.build("softmax", Call((a,))) is None


class _Tensor(np.ndarray):
    """As much of a torch tensor as flash_attn's peer asks for."""

    def transpose(self, a, b):
        return self.swapaxes(a, b)


def _flash_attn(
    q, k, v, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None,
    softcap=0.0,
):  # fmt: skip
    """As flash_attn.cute.flash_attn_func is documented: (B, S, H, D), and (out, lse) back."""
    q, k, v = (np.asarray(x, np.float32).swapaxes(1, 2) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))
    score = q @ k.swapaxes(2, 3) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    score = softcap * np.tanh(score / softcap) if softcap else score
    left, right = window_size
    assert all(n is None or n >= 0 for n in window_size)
    distance = np.arange(score.shape[3])[None] - np.arange(score.shape[2])[:, None]
    distance -= score.shape[3] - score.shape[2]
    right = 0 if causal else right
    score[..., distance < (-np.inf if left is None else -left)] = -np.inf
    score[..., distance > (np.inf if right is None else right)] = -np.inf
    sink = -np.inf if learnable_sink is None else np.asarray(learnable_sink)[:, None, None]
    top = np.maximum(score.max(-1, keepdims=True), sink)
    weight = np.exp(score - top)
    out = weight @ v / (weight.sum(-1, keepdims=True) + np.exp(sink - top))
    return out.swapaxes(1, 2).astype(np.float16).view(_Tensor), None


def flash_attn_row(monkeypatch, function, number: int):
    """Of a benchmark of a shape with this fifth number, in which `function` is the library's."""
    torch, package, cute = (types.ModuleType(n) for n in ("torch", "flash_attn", "flash_attn.cute"))
    torch.from_dlpack = lambda x: x.view(_Tensor)
    cute.flash_attn_func = function
    for module in (torch, package, cute):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    op = next(op for op in cupykern.OPS if op.name == "attention")
    task = bench.tasks([op], "host", [(1, 4, 64, 64, number, 2)], ("float16",))[0]
    (peer,) = flash_attn.PEERS
    return bench.bench_task(task, HOST, timing.clock_of(HOST), bench.Settings(0, 0), [peer])


@pytest.mark.parametrize("fault", [None, "causal", "heads", "raises"])
@pytest.mark.parametrize("causal", [0, 1])
def test_flash_attn_is_verified_as_ours_is(fault, causal, monkeypatch):
    """A stand-in for the library, right or wrong, in a benchmark: what is wrong is timed but shown
    with its error, what fails with its message."""

    def function(q, k, v, **options):
        if fault == "raises":
            raise RuntimeError("unsupported head size")
        if fault == "causal":
            options["causal"] = not options["causal"]
        if fault == "heads":
            k = k[:, :, ::-1]
        return _flash_attn(q, k, v, **options)

    row = flash_attn_row(monkeypatch, function, causal)
    ours, theirs = row.results
    assert ours.verified and theirs.verified is (fault is None)
    if fault == "raises":
        assert theirs.median_us is None and "unsupported head size" in theirs.note
    else:
        assert theirs.median_us > 0 and (theirs.error_over_bound <= 1) is (fault is None)
        cell = dict(zip(results.COLUMNS, list(results.table_rows([row]))[1], strict=True))
        assert cell["verified"] == ("yes" if fault is None else "NO")


@pytest.mark.parametrize("number", [5, 7, 9, 20])
def test_flash_attn_gets_the_options_that_it_has(number, monkeypatch):
    ours, theirs = flash_attn_row(monkeypatch, _flash_attn, number).results
    assert ours.verified and theirs.verified and theirs.error_over_bound <= 1


@pytest.mark.parametrize("number", [5, 6, 7, 8, 9, 20])
def test_flash_attn_of_earlier_versions_has_no_options(number, monkeypatch):
    def function(q, k, v, softmax_scale=None, causal=False):
        raise AssertionError("called without the option")

    ours, theirs = flash_attn_row(monkeypatch, function, number).results
    assert ours.verified and theirs.note == contender.NO_SUCH_FUNCTION


def test_flash_attn_gets_windows_without_an_end(monkeypatch):
    """-1 is any; a single query of decode_attention is the last one, as the library's."""
    flash_attn_row(monkeypatch, _flash_attn, 0)
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 3, 40, 16)).astype(np.float16) for _ in range(3))
    (peer,) = flash_attn.PEERS
    for window in ((5, -1), (-1, 7), (-1, -1), (0, 3)):
        theirs = peer.build("attention", Call((q, k, v), {"window": window}))()
        np.testing.assert_allclose(theirs, cupykern.attention(q, k, v, window=window), atol=4e-3)
    last = q[:, :, -1:]
    theirs = peer.build("decode_attention", Call((last, k, v), {"window": (5, 0)}))()
    ours = cupykern.decode_attention(last, k, v, window=(5, 0))
    np.testing.assert_allclose(theirs, ours, atol=4e-3)


def test_calls_of_attention_that_others_have():
    q, k = np.ones((1, 4, 2, 8), np.float16), np.ones((1, 2, 5, 8), np.float16)
    found = self_attention("attention", Call((q, k, k), {"scale": 0.5}))
    assert found is not None and found[1:] == (False, 0.5)
    assert self_attention("attention", Call((q, k, k), {"causal": True})) is None  # two alignments
    assert self_attention("attention", Call((k, k, k), {"causal": True}))[1]
    assert self_attention("attention", Call((q, k, k), {"mask": None})) is None
    capped = Call((q, k, k), {"softcap": 3.0})
    assert self_attention("attention", capped) is None
    assert self_attention("attention", capped, ["softcap"]) is not None
    assert (
        self_attention("decode_attention", Call((q, k, k))) is None
    )  # causal, to the end of the keys
    assert self_attention("decode_attention", Call((q[:, :, :1], k, k)))[1] is False
    assert self_attention("decode_attention", Call((q, k, k), {"seq_lens": [5]})) is None
    assert self_attention("softmax", Call((q,))) is None


def test_every_peer_has_a_name_of_its_own():
    peers = all_peers()
    names = {"torch", "torch.compile", "torch.fast", "torch.cast", "torch.flash", "torch.cudnn"}
    assert names | {"torch.flex", "flash_attn", "quack", "liger", "cupy", "nvmath"} <= set(peers)
    for peer in peers.values():
        assert peer.missing() is None or peer.module.partition(".")[0] in peer.missing()
