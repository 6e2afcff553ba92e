""" "Add an op" of docs/kernels.md: in a copy of the package its five places make an op."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from package_copy import blocks, copied, insert, run


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """Of the package, with the op."""
    folder = copied(
        tmp_path_factory.mktemp("copy"),
        ("cupykern", "kernels_cu", "docs", "tests", "results", "cli.py", "pyproject.toml"),
    )
    files = blocks("Add an op")
    export = files.pop("cupykern/__init__.py")
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        assert not path.exists()
        path.write_text(text if path.suffix == ".py" else f"// {name}{text}")
    insert(folder / "cupykern/ops/__init__.py", "    softmax,\n", "    scale_shift,")
    insert(folder / "cupykern/ops/__init__.py", "    nonfinite_report.OP,", "    scale_shift.OP,")
    insert(folder / "cupykern/__init__.py", "softmax = ", export.strip())
    insert(folder / "cupykern/__init__.py", '    "softmax",', '    "scale_shift",')
    return folder


def test_the_page_has_the_five_places():
    assert list(blocks("Add an op")) == [
        "cupykern/reference/scale_shift.py",
        "kernels_cu/scale_shift.cu",
        "cupykern/ops/scale_shift.py",
        "cupykern/__init__.py",
        "tests/ops/test_scale_shift.py",
    ]


def test_it_is_listed(copy):
    assert re.search(r"^\W*scale_shift\b", run(copy, "cli.py", "list"), re.MULTILINE)


def test_type_checkers_know_it(copy):
    run(copy, "-m", "cupykern.tools.stubs")
    assert "def scale_shift(x: np.ndarray" in (copy / "cupykern/__init__.pyi").read_text().replace(
        "(\n    ", "("
    )


def test_it_is_checked(copy):
    printed = run(copy, "cli.py", "check", "scale_shift", "--target", "host", "--cases", "40")
    assert "scale_shift" in printed


def test_a_wrong_kernel_is_found(copy):
    """The checks are of the op's own reference."""
    path = copy / "kernels_cu/scale_shift.cu"
    text = path.read_text()
    path.write_text(text.replace("* scale + shift", "* scale - shift"))
    try:
        with pytest.raises(AssertionError, match="scale_shift"):
            run(copy, "cli.py", "check", "scale_shift", "--target", "host", "--cases", "40")
    finally:
        path.write_text(text)


def test_it_is_benchmarked(copy, tmp_path):
    file = tmp_path / "bench.json"
    run(
        *(copy, "cli.py", "bench", "scale_shift", "--target", "host", "--shapes", "64,1000"),
        *("--dtype", "float32", "--rep-ms", "1", "--warmup-ms", "0", "--json", str(file)),
    )
    assert "scale_shift" in json.dumps(json.loads(file.read_text()))


def test_the_tests_of_all_ops_pass(copy):
    """Those with the op's name in their own; and its own tests."""
    files = (
        *("docs/test_docstrings.py", "host/test_compute_sanitizer.py", "host/test_plans.py"),
        *("host/test_public.py", "interop/test_protocols.py", "ops/test_arguments.py"),
        *("ops/test_odd_strides.py", "ops/test_scale_shift.py", "ops/test_watch.py"),
        *("tools/test_bench.py", "tools/test_campaign.py", "tools/test_history.py"),
        "tools/test_sensitivity.py",
    )
    printed = run(
        *(copy, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "--target", "host"),
        *(
            "-k",
            "scale_shift or every_op_has or every_public_op or test_the_record",
            *(f"tests/{x}" for x in files),
        ),
    )
    assert int(re.search(r"(\d+) passed", printed)[1]) > 20


def test_it_has_a_section_in_the_reference(copy):
    pytest.importorskip("sphinx")
    printed = run(copy / "docs", "-c", "import generated; print(generated.undocumented())")
    assert printed == "['scale_shift']\n"
