"""Mutants of the engine: each is another program with a name of its own."""

from __future__ import annotations

import ast

from mutation.equivalent import equivalents
from mutation.mutants import ROOT, Mutant, mutants
from mutation.operators import changes
from mutation.scopes import PATHS, SCOPES
from tests.as_subtests import as_subtests

SOURCE = '''
def scaled(x, bound, on=True):
    """Docstrings and messages are not numerics."""
    if bound < 0:
        raise ValueError(f"bound is {bound + 1}")
    total = 0.0
    with quiet():
        for value in x:
            total += -value * 2 if value > bound and on else value.abs().sum()
    state[0] = total
    return total
'''


def test_changes_of_a_function() -> None:
    (function,) = (node for node in ast.parse(SOURCE).body if isinstance(node, ast.FunctionDef))
    found = {change.operator for change in changes(function)}
    assert found >= {"> to >=", "> to <", "* to /", "and to or", "if always", "if never", "- left out"}
    assert found >= {"abs left out", "sum to mean", "with left out", "left out", "2 to 3", "0.0 to 1.0"}
    assert not any("<" in operator and operator != "> to <" for operator in found)  # a check, and its message


@as_subtests("path", PATHS)
def test_every_mutant_is_another_program(path: str) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for change in changes(function):
            if isinstance(change.new, ast.expr):
                compile(ast.fix_missing_locations(ast.Expression(change.new)), path, "eval")


def test_mutants_have_names_of_their_own() -> None:
    found = [mutant.name for scope in SCOPES.values() for mutant in scope.mutants()]
    assert len(found) == len(set(found))
    assert len(SCOPES["parallel"].mutants()) == SCOPES["parallel"].sample


def test_what_is_equivalent_is_still_a_mutant() -> None:
    names = {mutant.name for mutant in mutants(PATHS)}
    stale = [name for name in equivalents() if name not in names]
    assert not stale, "mutation/equivalent.toml names what is not a mutant any more"
    assert all(reason.strip() for reason in equivalents().values())


def test_an_expression_of_several_lines_is_reached_by_any_of_them() -> None:
    mutant = Mutant("x.py", "f", 0, 10, "", "", "", 12)
    assert [mutant.reached([line]) for line in (9, 10, 12, 13)] == [False, True, True, False]
    assert Mutant("x.py", "f", 0, 10, "", "", "").reached([10])
    spanning = [one for one in mutants(PATHS) if one.last > one.line]
    assert spanning
    assert all(one.text for one in spanning)
