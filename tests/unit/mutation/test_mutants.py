"""Mutants of the engine: each is another program, and is in force where the function is used."""

from __future__ import annotations

import ast
import gc

import pytest
import torch

from mutation.mutants import ROOT, Mutant, install, mutants
from mutation.operators import changes
from mutation.scopes import PATHS, SCOPES
from regress.grpo import kl
from regress.grpo.presets import make_objective

SOURCE = '''
def scaled(x, bound, on=True):
    """Docstrings and messages are no numerics."""
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


@pytest.mark.parametrize("path", PATHS)
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


def test_a_mutant_is_in_force_until_it_is_taken_back() -> None:
    objective = make_objective("trl:grpo", kl_coef=0.1, kl_placement="loss")

    def value() -> float:
        return float(kl.kl_estimate(torch.tensor([0.1]), torch.tensor([0.3]), objective))

    right, code = value(), kl.kl_estimate.__code__
    wrong = set()
    gc.freeze()  # as a warm forkserver does
    try:
        for mutant in mutants(["regress/grpo/kl.py"]):
            if mutant.function == "kl_estimate":
                assert install(mutant) == 1
                try:
                    wrong.add(value())
                except Exception:  # a mutant may do anything
                    continue
                finally:
                    kl.kl_estimate.__code__ = code
    finally:
        kl.kl_estimate.__code__ = code
    assert value() == right
    assert wrong - {right}


def test_a_function_that_is_not_there() -> None:
    with pytest.raises(KeyError):
        install(Mutant("regress/grpo/kl.py", "gone", 0, 1, "", "", ""))
