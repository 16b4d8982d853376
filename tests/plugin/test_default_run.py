"""Which tests of this package run by default; the root conftest.py decides it."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from regress.replay.variants import EVERY, Precision, Variant

CONFTEST = Path(__file__).parents[2] / "conftest.py"
TESTS = """
    import pytest

    @pytest.mark.extended
    def test_more(): pass

    @pytest.mark.one_in(2)
    @pytest.mark.parametrize("number", range(3))
    def test_many(number): pass
"""
MARKERS = (
    "[pytest]\nmarkers =\n    extended: more\n    systems: systems\n    faults: faults\n    one_in(n): one"
)


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ((), 2),
        (("--extended",), 4),
        (("-m", "extended"), 2),
        (("test_it.py::test_more",), 1),
        (("test_it.py::test_many[1]", "test_it.py::test_many[2]"), 2),
        (("test_it.py::test_many",), 2),
    ],
    ids=["default", "all", "extended", "function", "ids", "part of an id"],
)
def test_an_extended_test_runs_if_it_is_asked_for(
    arguments: tuple[str, ...], passed: int, pytester: pytest.Pytester
) -> None:
    """By marker, by option, or by its whole id, as a failure prints it."""
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makefile(".ini", pytest=MARKERS)
    pytester.makepyfile(test_it=TESTS)
    pytester.runpytest_inprocess("-p", "regress.plugin", *arguments).assert_outcomes(passed=passed)


TP2 = Variant("tp2", "", precisions=(*EVERY, Precision.MIXED), cases=("dense", "moe"))
REMOTE = Variant("remote", "", {"trainer.type": "remote"}, EVERY)
COMPILED = Variant("compiled", "", {"model.compile": "inductor"}, EVERY)


@pytest.mark.parametrize(
    ("variant", "case", "precision", "ranks", "adds_little"),
    [
        (TP2, "moe", Precision.FLOAT64, 2, False),
        (TP2, "moe", Precision.MIXED, 2, False),
        (TP2, "dense", Precision.FLOAT32, 1, False),
        (TP2, "dense", Precision.FLOAT32, 2, True),
        (TP2, "moe", Precision.BFLOAT16, 1, True),
        (Variant("base", "", precisions=EVERY), "moe", Precision.BFLOAT16, 1, False),
        (COMPILED, "dense", Precision.FLOAT64, 1, False),
        (COMPILED, "dense", Precision.FLOAT32, 1, True),
        (REMOTE, "dense", Precision.FLOAT32, 1, True),
        (Variant("pairs", "", combines=True), "dense", Precision.FLOAT64, 2, True),
    ],
)
def test_replays_that_add_little_are_extended(
    variant: Variant, case: str, precision: Precision, ranks: int, adds_little: bool
) -> None:
    replay = SimpleNamespace(
        case=SimpleNamespace(name=case), variant=variant, precision=precision, world_size=ranks
    )
    assert runpy.run_path(str(CONFTEST))["_adds_little"](replay) is adds_little
