"""PersistentRows (kernels_cu/rows/persistent.cuh): the norms."""

from __future__ import annotations

from dataclasses import replace

import needs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persistent_rows_problems import CONFIGS, OPS, SMALL, problem_of

import cupykern
from cupykern import check, inputs
from cupykern.op import Op, as_tuple
from cupykern.ops.norm import LAYER_OP, RMS_OP
from cupykern.rows.norm_configs import NormRows, PersistentRows
from cupykern.rows.row_layout import contiguous_operand, row_layout
from cupykern.runtime import workspace

pytestmark = needs.bulk_copies


def run_and_compare(
    op: Op, problem, target, config: PersistentRows, seed: int = 1
) -> check.Comparison:
    call = op.inputs(problem, seed, target.xp)
    references = op.reference(*call.args, **call.kwargs)
    bounds = op.bound(*call.args, **call.kwargs, reference=references)
    outputs = as_tuple(op.run(*call.args, **call.kwargs, config=config))
    return check.compare(outputs, references, bounds)


@pytest.mark.parametrize("dtype", CONFIGS)
@pytest.mark.parametrize("name", OPS)
def test_rows_of_any_number_and_length(target, name, dtype):
    """Also short and empty slices; more rows than stages and blocks, and fewer."""
    config = CONFIGS[dtype]
    lengths = st.integers(1, config.chunk // config.vector_width)

    @settings(max_examples=12, deadline=None)
    @given(st.integers(1, 40), lengths, st.sampled_from(inputs.KINDS), st.integers(0, 99))
    def check_one(rows, vectors, kind, seed):
        shape = rows, vectors * config.vector_width
        problem = problem_of(OPS[name], shape, dtype, kind, return_stats=seed % 2 == 0)
        comparison = run_and_compare(OPS[name], problem, target, config, seed)
        assert comparison.ok, f"{problem!r}: {comparison}"

    check_one()


def test_rows_are_taken_by_a_counter_that_is_zero_again(target, monkeypatch):
    """Fewer rows than blocks have at first, as many, and more."""
    counter = target.xp.zeros(1, np.uint32)
    monkeypatch.setattr(workspace, "take", lambda *_: (None, counter))
    for rows in (1, 7, 18, 19, 100):
        problem = problem_of(RMS_OP, (rows, 1024), "float16")
        assert run_and_compare(RMS_OP, problem, target, CONFIGS["float16"]).ok
        assert int(counter[0]) == 0


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_in_place_and_at_any_stride(target, name):
    """Rows that are read ahead are not those that are written; row strides may differ."""
    op, config = OPS[name], CONFIGS["float16"]
    call = op.inputs(problem_of(op, (33, 2048), "float16"), 3, target.xp)
    x = call.args[0]
    for view in (x[:, :1024], x[::2, 512:1024], x[::-1, :1016]):
        kwargs = {key: value[: view.shape[1]] for key, value in call.kwargs.items()}
        expected = op.run(view, **kwargs, config=config)
        references = op.reference(view, **kwargs)
        bounds = op.bound(view, **kwargs, reference=references)
        assert check.compare((expected,), references, bounds).ok
        here = view.copy()
        assert op.run(here, **kwargs, out=here, config=config) is here
        assert (here == expected).all()


def test_the_same_bits_in_any_batch(target):
    """A row's result does not depend on what else the block has done."""
    config = CONFIGS["bfloat16"]
    call = LAYER_OP.inputs(problem_of(LAYER_OP, (37, 6000), "bfloat16"), 5, target.xp)
    x = call.args[0]
    together = cupykern.layer_norm(x, **call.kwargs, config=config)
    for i in (0, 5, 36):
        alone = cupykern.layer_norm(x[i : i + 1], **call.kwargs, config=config)
        assert (alone.view(np.uint16) == together[i : i + 1].view(np.uint16)).all()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stages": 0}, "stages must be 1 to 32; got 0"),
        ({"stages": 33}, "stages must be 1 to 32; got 33"),
        ({"stages": 1}, "the 2 stages of a row, 2048 bytes each, do not fit"),
        ({"vectors_per_thread": 120}, "the 120 stages of a row, 2048 bytes each, do not fit"),
        ({"num_threads": 64}, "a multiple of 128, at most 512; got 64"),
        ({"num_threads": 1024}, "at most 512; got 1024"),
        ({"num_threads": 384}, "powers of two"),
        ({"vectors_per_thread": 0}, "positive"),
        ({"cluster_size": 32}, "up to 16 blocks"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_with_the_reason(changes, says):
    x = np.ones((3, 512), np.float16)
    with pytest.raises(ValueError, match=f"config does not fit: .*{says}"):
        cupykern.rms_norm(x, config=replace(SMALL, **changes))


def test_streams_are_for_hopper():
    place = contiguous_operand((3, 512), 2)
    layout = row_layout((3, 512), 1, (place,) * 5, (1, 2, 3))
    for arch, says in (("sm_80", "needs one of sm_90a, host; got sm_80"), ("sm_90a", None)):
        reason = SMALL.refusal(NormRows(arch, 2, layout))
        assert reason is None if says is None else says in reason


def test_streams_are_for_plain_calls_of_some_ops():
    x = np.ones((3, 512), np.float16)
    with pytest.raises(ValueError, match="for calls without options"):
        cupykern.layer_norm(x, compensated=True, config=SMALL)
    for call in (
        cupykern.softmax,
        lambda *args, **kwargs: cupykern.quantize(*args, "int8", granularity="row", **kwargs),
    ):
        with pytest.raises(TypeError, match="got PersistentRows"):
            call(x, config=SMALL)
