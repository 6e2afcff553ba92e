"""Planted faults in the embedding of complex matrices, each of which a check must catch."""

from __future__ import annotations

from planted import Fault, fault_tests

from cupykern import OPS
from cupykern.ops.complex_matmul import ComplexProblem

OP = next(op for op in OPS if op.name == "complex_matmul")
FILE = "embed_complex64.cu"
FAULTS = {
    "an imaginary part of the other sign": Fault(FILE, "^ 0x80000000u", "", "rows"),
    "the transpose's signs are the matrix's": Fault(
        FILE, "first.words[1] = element.words[1] ^ p.flip;", "first.words[1] = element.words[1];",
        "columns",
    ),
    "one matrix of the batch": Fault(FILE, "matrix * p.matrix_step + ", "", "batch"),
    "the second row over the first": Fault(
        FILE, "to + p.pitch + 2 * near", "to + 2 * near", "rows"
    ),
    "real and imaginary parts of every second element": Fault(
        FILE, "from + 2 * near * p.near_step", "from + near * p.near_step", "rows"
    ),
}  # fmt: skip


PROBLEMS = (
    ("rows", OP, ComplexProblem(9, 20, 300)),
    ("columns", OP, ComplexProblem(9, 20, 300, layout_b="F")),
    ("batch", OP, ComplexProblem(9, 20, 300, batch_b=(3,))),
)

test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, lambda: PROBLEMS
)
