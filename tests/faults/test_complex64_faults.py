"""Planted faults in the embedding of complex matrices, each of which a check must catch."""

from __future__ import annotations

from planted import Fault, fault_tests
from products import compare

from cupykern import OPS
from cupykern.ops.complex_matmul import ComplexProblem
from cupykern.targets import host

OP = next(op for op in OPS if op.name == "complex_matmul")
FILE = "embed_complex64.cu"
FAULTS = {
    "an imaginary part of the other sign": Fault(FILE, "^ 0x80000000u", "", "rows"),
    "the transpose's signs are the matrix's": Fault(
        FILE, "first.words[1] = element.words[1] ^ p.flip;", "first.words[1] = element.words[1];",
        "columns",
    ),
    "one matrix of the batch": Fault(FILE, "matrix * p.matrix_step + ", "", "batch"),
    "the second row over the first": Fault(FILE, "to + p.pitch + 2 * near", "to + 2 * near", "rows"),
    "real and imaginary parts of every second element": Fault(
        FILE, "from + 2 * near * p.near_step", "from + near * p.near_step", "rows"
    ),
}  # fmt: skip


def holds(layout: str, batch: tuple[int, ...] = ()) -> bool:
    problem = ComplexProblem(9, 20, 300, batch_b=batch, layout_b=layout)
    with host.use() as target:
        call = OP.inputs(problem, 1, target.xp)
        return compare(OP, *call.args).ok


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS,
    checks={
        "rows": lambda: holds("C"),
        "columns": lambda: holds("F"),
        "batch": lambda: holds("C", (3,)),
    },
)
