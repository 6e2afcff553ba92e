"""What is an expression and what is not, tracing, and what kernels are keyed by."""

from __future__ import annotations

import ast
import pickle
import re

import numpy as np
import pytest
from expressions import texts
from hypothesis import given
from hypothesis import strategies as st

import cupykern
from cupykern.expression import cpp, read
from cupykern.expression.trace import trace
from cupykern.expression.tree import FUNCTIONS, MAX_NODES

# Text, column of the place (from 1), reason.
ILLEGAL = [
    ("acc ** 2", 1, r"x \* x in place"),
    ("1 + (acc and s)", 6, "write & and"),
    ("not acc", 1, "write ~"),
    ("acc + foo(acc)", 7, "foo is not a function; there are abs, exp"),
    ("acc + exp", 7, r"exp is a function: write exp\(...\)"),
    ("2 * acc.real", 5, "Attribute is not part"),
    ("acc[0]", 1, "acc has no indices"),
    ("acc + [acc]", 7, "List is not part"),
    ("lambda: 1", 1, "Lambda is not part"),
    ("(lambda: 1)()", 2, "this is not a function"),
    ("[x for x in acc]", 1, "ListComp is not part"),
    ("f'{acc}'", 1, "JoinedStr is not part"),
    ("acc @ acc", 1, "MatMult is not part"),
    ("acc << 2", 1, "LShift is not part"),
    ("acc in acc", 1, "Compare is not part"),
    ("acc is acc", 1, "Compare is not part"),
    ("(y := acc)", 2, "NamedExpr is not part"),
    ("await acc", 1, "Await is not part|outside function"),
    ("acc + 'x'", 7, "literals are numbers; got 'x'"),
    ("acc + True", 7, "literals are numbers; got True"),
    ("acc + None", 7, "literals are numbers"),
    ("acc + 1j", 7, "literals are numbers"),
    ("acc + ...", 7, "literals are numbers"),
    ("acc * 1e39", 7, "1e[+]39 is not a normal number"),
    ("acc * 1e-39", 7, "1e-39 is not a normal number"),
    ("acc * 9223372036854775808", 7, "63 bits"),
    ("acc + 1 / 0", 7, "division by zero"),
    ("acc // 2", 1, "// is for integers; got real and integer"),
    ("i // j", 1, "// is by an integer literal"),
    ("i % 0", 1, "% is by an integer literal that is not 0"),
    ("s + (acc > 0) * acc", 5, r"where\(condition, 1, 0\)"),
    ("acc > 0", 1, r"where\(condition, 1, 0\)"),
    ("acc & 1", 1, "& is for booleans; got real and integer"),
    ("~acc", 1, "~ is for booleans; got real"),
    ("where(acc, 1, 2)", 1, "a condition is boolean; got real"),
    ("s if acc else 1", 1, "a condition is boolean; got real"),
    ("1 + exp(acc, 2)", 5, "exp takes 1 arguments; got 2"),
    ("where(acc > 0, 1)", 1, "where takes 3 arguments; got 2"),
    ("exp(x=acc)", 1, "exp takes no keywords"),
    ("exp(*acc)", 5, "Starred is not part"),
    ("ä + acc ** 2", 5, "in place of"),
]


@pytest.mark.parametrize(("text", "column", "reason"), ILLEGAL, ids=[text for text, *_ in ILLEGAL])
def test_anything_else_is_a_syntax_error_with_place_and_reason(text, column, reason):
    with pytest.raises(SyntaxError, match=reason) as error:
        cupykern.expression(text)
    assert error.value.offset == column and error.value.text == text and error.value.lineno == 1


@pytest.mark.parametrize(
    "text",
    ["", "acc +", "acc; acc", "x = acc", "import os", "acc\0", "\ud800", "(" * 300, "acc\nacc"],
)
def test_what_python_cannot_read_is_a_syntax_error(text):
    with pytest.raises(SyntaxError):
        cupykern.expression(text)


def test_size_is_limited():
    for text in ("-" * 4000 + "acc", "~" * 4000 + "(acc > 0)", "acc" + " + acc" * 4000):
        with pytest.raises(SyntaxError):
            cupykern.expression(text)
    chain = "acc"
    for k in range(MAX_NODES):
        chain = f"{chain}+{k}.5"
    with pytest.raises(SyntaxError, match=f"at most {MAX_NODES} operations"):
        cupykern.expression(chain)

    def doubled(acc):
        for _ in range(MAX_NODES - 1):
            acc = acc * acc
        return acc

    assert len(read(doubled).nodes) == MAX_NODES  # of 2^255 operations as a tree without sharing


def test_the_place_of_a_later_line():
    with pytest.raises(SyntaxError) as error:
        cupykern.expression("(acc +\n   acc ** 2)")
    assert (error.value.lineno, error.value.offset, error.value.end_offset) == (2, 4, 12)


@pytest.mark.parametrize("formula", [3, None, b"acc", ["acc"], np.zeros(3)])
def test_other_types_are_a_type_error(formula):
    with pytest.raises(TypeError, match="string or a callable"):
        cupykern.expression(formula)


# --- code ----------------------------------------------------------------------------------------

_WORDS = {
    *("float", "int64_t", "uint64_t", "const", "return", "x", "acc", "i", "j", "b", "bool"),
    *("wrap", "floor_divide", "floor_modulo", "smaller_of", "larger_of", "magnitude", "kLog2E"),
    *("exp_of", "exp2_approx", "log_accurate", "square_root", "reciprocal_square_root"),
    *("tanh_accurate", "erf_accurate", "sigmoid", "gelu", "gelu_tanh", "sine", "cosine"),
    *("whole_below", "template", "get", "results", "to_float", "from_float", "half", "bf16"),
}


@given(text=texts(), names=st.tuples(st.text(min_size=1), st.text(min_size=1)))
def test_code_has_words_of_its_own_alone(text, names):
    """Whatever a user's names and numbers are."""
    for old, new in zip(("s", "t"), names, strict=True):
        if new.isidentifier() and new not in (*FUNCTIONS, "acc", "i", "j", "b", "s", "t"):
            text = re.sub(rf"\b{old}\b", lambda _, new=new: new, text)
    try:
        formula = read(text)
    except SyntaxError:  # a keyword
        return
    code = cpp.source(formula.nodes, [cpp.OperandCode()] * len(formula.names))
    body = code[code.index("kResults]) {") + 12 :]
    numbers = r"\b(0x[01]\.[0-9a-f]+p[+-]\d+f|\d+ll|\d+)(?!\w)"
    words = set(re.findall(r"[^\W\d]\w*", re.sub(numbers, "", body)))
    assert {word for word in words if not re.fullmatch(r"[tx]\d+", word)} <= _WORDS
    assert not re.search(r'["\'#\\@$`]|//|/\*', body)


@pytest.mark.parametrize(
    "name", ['x"', "x;", "x\n", "a b", "1x", "", "class", "exp", "acc", "i", 3, None, "x//", "µ\0"]
)
def test_operands_have_free_names(name):
    a = np.ones((2, 2), np.float16)
    with pytest.raises((ValueError, NameError)):
        cupykern.matmul(a, a, epilogue="acc + y", operands={name: 1.0})


# --- keys ----------------------------------------------------------------------------------------


@given(first=texts(), second=texts())
def test_equal_digests_are_equal_trees(first, second):
    one, two = read(first), read(second)
    assert (one.digest == two.digest) == (one.nodes == two.nodes)
    assert one.digest == read(f"({first})").digest == pickle.loads(pickle.dumps(one)).digest


def test_digests_tell_what_is_alike_apart():
    alike = (
        *("acc + 0.0", "acc + -0.0", "acc + 1", "acc + i", "i + 1", "j + 1", "acc - 1"),
        *("1 - acc", "acc * s - t", "acc * t - s"),
    )
    digests = [read(text).digest for text in alike]
    # Numbers count, not how they are written; the first operand is the first one named.
    assert len(set(digests)) == len(alike) - 1
    assert read("acc * s - t").digest == read("acc * t - s").digest
    assert read("acc+1").digest == read(" ( acc + 1.0 ) ").digest
    assert read("acc * s + t * s").digest != read("acc * s + t * t").digest


def test_digests_are_those_of_other_versions():
    """They are in keys of stored configs."""
    known = {
        "acc": "c095ecad99bc73c7",
        "maximum(acc * s + t, 0) + where((i - j) % 3 == 1, exp(-acc), 0.1)": "1aeb698db3a159fd",
    }
    assert {text: read(text).digest[:16] for text in known} == known


# --- tracing -------------------------------------------------------------------------------------


@given(text=texts())
def test_tracing_is_parsing(text):
    """What Python evaluates of the text, with symbols for names, is the same tree."""
    text = _without_conditions(text)  # of which Python would ask for the truth
    arguments = ", ".join(dict.fromkeys(re.findall(r"[^\W\d]\w*", text)))
    traced = read(eval(f"lambda {arguments}: {text}"))
    parsed = read(text)
    assert traced.nodes == parsed.nodes and traced.names == parsed.names


def _without_conditions(text: str) -> str:
    class Where(ast.NodeTransformer):
        def visit_IfExp(self, node):
            args = [self.visit(x) for x in (node.test, node.body, node.orelse)]
            return ast.Call(ast.Name("where"), args, [])

    return ast.unparse(ast.fix_missing_locations(Where().visit(ast.parse(text, mode="eval"))))


def test_conditions_are_where():
    assert read("s if acc > 0 else t") == read("where(acc > 0, s, t)")
    assert read("1 if 0 < acc < s else 2") == read("where((0 < acc) & (acc < s), 1, 2)")


def test_branches_of_conditions_are_conditions():
    for one, two in (
        ("j <= i if i < 5 else j > 9", "where(i < 5, j <= i, 9 < j)"),
        ("m[i, j]", "m[i, j] != 0"),
        ("~m[i, j] & keep", "~(m[i, j] != 0) & (keep != 0)"),
        ("m[j] if i < 5 else j > 9", "where(i < 5, m[j] != 0, j > 9)"),
        ("m[j] if i < 5 else n[j]", "where(i < 5, m[j] != 0, n[j] != 0)"),
    ):
        assert read(one, "mask") == read(two, "mask")
    assert read(lambda i, j, m, n, where: where(i < 5, m[j], n[j]), "mask") == read(two, "mask")
    assert read("where(keep, acc, 0)") == read("acc if keep != 0 else 0")
    assert read("where((acc > 0 if s else i < 3), 1, 2)") == read(
        "where(where(s != 0, acc > 0, i < 3), 1, 2)"
    )


@pytest.mark.parametrize(
    "text", ["i", "j - i", "m[j] + 1", "m[j] if i < 5 else 2", "where(i < 5, j < 3, 2)", "i & m[j]"]
)
def test_what_is_no_condition_is_no_mask(text):
    with pytest.raises(SyntaxError, match=r"a mask is boolean|is not a number|is for booleans"):
        read(text, "mask")


def test_numpys_functions_are_traced():
    def formula(acc, s, j, erf):
        x = np.maximum(acc * np.float32(0.5), 0) + np.exp(-np.abs(acc)) * erf(s)
        return np.where((j % 2 == 0) & ~np.isnan(acc), x, np.sqrt(abs(x)))

    text = "maximum(acc * 0.5, 0) + exp(-abs(acc)) * erf(s)"
    assert read(formula) == read(f"where((j % 2 == 0) & ~isnan(acc), {text}, sqrt(abs({text})))")


@pytest.mark.parametrize(
    ("formula", "reason"),
    [
        (lambda acc: acc if acc > 0 else 0, "where"),
        (lambda acc: acc**2, r"unsupported operand"),
        (lambda acc: np.cosh(acc), "no numpy.cosh"),
        (lambda acc: np.sum(acc), "no numpy.sum"),
        (lambda acc: np.add.reduce(acc), "no numpy.add"),
        (lambda acc: acc + np.ones(3), "literals are numbers"),
        (lambda acc: acc + "x", "literals are numbers"),
        (lambda acc, i: i // i, "integer literal"),
        (lambda acc: acc > 0, "where"),
        (lambda acc: None, "literals are numbers"),
        (lambda *acc: acc, "have names"),
        (lambda acc: float(acc), "float"),
    ],
)
def test_what_a_callable_may_not_do_is_a_type_error(formula, reason):
    with pytest.raises(TypeError, match=reason):
        cupykern.expression(formula)


def test_tracing_calls_once():
    calls = []
    trace(lambda acc: calls.append(acc) or acc)
    assert len(calls) == 1


# --- what is printed -----------------------------------------------------------------------------


def test_an_expression_prints_code_reference_and_bound():
    text = str(cupykern.expression("maximum(acc * s + t, 0) / (1 + exp(-acc))"))
    code, reference, bound = re.split("Reference, in FP64:|Error, ", text)
    assert "operands: x0 = s, x1 = t" in code and "larger_of(" in code and "exp_of(" in code
    assert "t2 = acc * s" in reference and "maximum(t4, 0.0)" in reference
    assert "e(t2) <= |acc| e(s) + |s| e(acc)" in bound and "any where e(" in bound


@given(text=texts())
def test_the_printed_reference_is_the_formula(text):
    """Line by line, as Python reads it."""
    formula = read(text)
    lines = re.search(r"FP64:\n(.*?)\n\nError", str(formula), re.DOTALL)[1].splitlines()
    values = {}
    for line in lines:
        name, _, written = line.strip().partition(" = ")
        for known, value in values.items():
            written = re.sub(rf"\b{known}\b", lambda _, value=value: f"({value})", written)
        if len(written) > 3000:
            return
        values[name] = written
    again = read(values["result"].replace("real", ""))
    assert again.nodes == formula.nodes and again.names == formula.names
