"""The calculator: right on arithmetic, and nothing but arithmetic."""

from __future__ import annotations

import ast
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from regress.tasks import calculator
from regress.tasks.calculator import ToolError, calculate


def expressions() -> st.SearchStrategy[str]:
    numbers = st.integers(0, 99).map(str) | st.decimals(0, 9, places=2, allow_nan=False).map(str)
    return st.recursive(
        numbers,
        lambda inner: (
            st.tuples(inner, st.sampled_from(["+", " - ", "*", " / "]), inner).map("".join)
            | inner.map(lambda text: f"({text})")
            | inner.map(lambda text: f"-{text}")
        ),
        max_leaves=8,
    )


def exact(node: ast.AST, text: str) -> Fraction:
    """The value by Python's own parser of expressions, without floating point."""
    if isinstance(node, ast.Expression):
        return exact(node.body, text)
    if isinstance(node, ast.Constant):
        return Fraction(text[node.col_offset : node.end_col_offset])
    if isinstance(node, ast.UnaryOp):
        return -exact(node.operand, text)
    assert isinstance(node, ast.BinOp)
    left, right = exact(node.left, text), exact(node.right, text)
    kinds = {ast.Add: "__add__", ast.Sub: "__sub__", ast.Mult: "__mul__", ast.Div: "__truediv__"}
    return getattr(left, kinds[type(node.op)])(right)


@settings(max_examples=60, deadline=None)
@given(expressions())
@example("8/4/2")
@example("7-5-3")
@example("-2*-3")
@example("1/3")
@example("-0.0000004")
def test_it_agrees_with_exact_arithmetic(text: str) -> None:
    try:
        expected = exact(ast.parse(text, mode="eval"), text)
    except (ZeroDivisionError, SyntaxError):  # "007" is a number here and none in Python
        expected = None
    if expected is None:
        return
    if max(expected.numerator.bit_length(), expected.denominator.bit_length()) < 60:
        found = calculate(text)
        assert abs(Fraction(found) - expected) <= Fraction(1, 2 * 10**6)
        assert found == str(expected.numerator) or expected.denominator != 1
        assert found != "-0"


@settings(deadline=None)
@given(st.text() | st.text("0123456789+-*/(). e_", max_size=30))
def test_any_text_has_a_value_or_an_error_of_ours(text: str) -> None:
    try:
        found = calculate(text)
    except ToolError:
        return
    assert set(found) <= set("0123456789-.")
    assert (
        set(text) <= set(calculator.ALPHABET) | set(" \t\n\r\f\v\x1c\x1d\x1e\x1f\x85\u2028\u2029")
        or text.strip()
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("__import__('os').system('true')", "'_' is not a part of an expression"),
        ("9**9**9", "the exponent is not a whole number up to 64"),
        ("2**64**1", None),
        ("99**64", "more than 128 bits"),
        ("9" * 50, "more than 128 bits"),
        ("(" * 500, "500 characters, more than 200"),
        ("(" * 99 + "1" + ")" * 99, "nested more than 32 deep"),
        ("-" * 150 + "1", "nested more than 32 deep"),
        ("1/0", "divides by zero"),
        ("0**-1", "divides by zero"),
        ("2**0.5", "not a whole number"),
        ("1e9", "'e' is not a part"),
        ("٣+1", "is not a part"),
        ("1 2", "'2' is unexpected"),
        ("2*", "a number is missing before 'the end'"),
        ("(1", "a bracket is not closed"),
        ("", "a number is missing"),
    ],
)
def test_what_it_refuses(text: str, says: str | None) -> None:
    if says is None:
        assert calculate(text) == str(2**64)
        return
    with pytest.raises(ToolError) as caught:
        calculate(text)
    assert says in str(caught.value)
