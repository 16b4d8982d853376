"""Comparison of two values of a test with one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regress.compare.verdicts.verdict import Verdict


def assert_close(actual: Any, expected: Any, *, rtol: float = 0.0, atol: float = 0.0, why: str = "") -> None:
    """Compare two values leaf by leaf; the rules are those of `Regress.check`.

    Args:
        actual, expected: tensors (torch, numpy), numbers, texts, None, DataFrames, and dicts and lists of these.
        rtol: tolerance as a fraction of the largest absolute value of each expected tensor.
        atol: absolute tolerance, added to that.
        why: source of the tolerance; required if there is one.

    Raises:
        AssertionError: they differ; the first line is the verdict, the details follow.
        CheckError: the values or the tolerance are not valid together.
    """
    __tracebackhide__ = True
    from regress.report.verdict_text import explain, headline

    failed = [verdict for verdict in verdicts_on(actual, expected, rtol, atol, why) if not verdict.ok]
    if failed:
        raise AssertionError(f"{headline(failed[0])}\n{explain(failed)}")


def verdicts_on(
    actual: Any, expected: Any, rtol: float, atol: float, why: str, scale: float = 1.0
) -> list[Verdict]:
    """Return one verdict for each leaf of either value, the gravest first; ``scale`` multiplies the tolerance."""
    from regress.golden.value_tree import Tree
    from regress.plugin.golden_comparison import compare, tolerance_of

    tolerance = tolerance_of(rtol, atol, why, scale)
    return compare(Tree.of(actual), Tree.of(expected), tolerance, "assert_close")
