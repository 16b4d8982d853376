"""Selection of quantities by ``-k``: those whose full names pytest would select if each were a test of its own."""

from __future__ import annotations

import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import KeywordMatcher, deselect_by_keyword
from _pytest.mark.expression import Expression

from regress.plugin.quantity_selection import choose, chosen, full_name, misspelt, parts_of
from tests.plugin.conftest import GoldenProject, judged

GOLDEN = Path(__file__).parents[2] / "golden"
TIER = "--regress-tier=semantics"

SUITE = """
import pytest

@pytest.mark.regress(cases="dr_grpo,gpt2", variants="base,pad8,dp2,packed-mbs3")
def test_golden(regress_record):
    regress_record.check()

@pytest.mark.tagged
@pytest.mark.regress(cases="dr_grpo", variants="base,pad8")
def test_golden_again(regress_record):
    regress_record.check()

@pytest.mark.regress(cases="dr_grpo", variants="base")
@pytest.mark.parametrize("way", ["packed", "other"])
def test_both(regress_record, way):
    regress_record.check()

class TestGolden:
    @pytest.mark.regress(cases="dr_grpo", variants="base,pad8")
    def test_in_class(self, regress_record):
        regress_record.check()

def test_plain():
    pass
"""
HOOK = """
def pytest_collection_modifyitems(items):
    for item in items:
        if "rank1" in item.name:
            item.add_marker("slow")
"""
LATE = """
def pytest_itemcollected(item):
    if "rank1" in item.name:
        item.extra_keyword_matches.add("late_packed")
"""
CONFTESTS = {
    "none": {},
    "marks": {"conftest.py": HOOK},
    "declares": {"conftest.py": HOOK + "def pytest_regress_keywords(): return ['slow']\n"},
    "late": {"tests/z/conftest.py": HOOK},
    "collected": {"tests/conftest.py": LATE},
}
PARTS = (
    *("packed", "base", "pad8", "dp2", "rank1", "rank0", "micro1", "step2", "update", "log_probs", "entropy"),
    *(
        "loss",
        "gpt2",
        "dr_grpo",
        "dr_grpo/base",
        "/entropy]",
        "[gpt2/",
        "tagged",
        "slow",
        "late",
        "test_golden",
    ),
    *(
        "again",
        "TestGolden",
        "test_suite",
        "plain",
        "other",
        "coverage",
        "0/",
        "1",
        "bf16",
        "nothing",
        "REGRESS",
    ),
    *("z", "step1/rank0", "rank1/micro1", "/gradient", "dp2/step0", "other]"),
)


class Seen:
    """A plugin of the run that notes what is collected, and what is selected of it.

    Attributes:
        every: nodes before pytest deselects any by ``-k``.
        selected: names of the selected tests, and of the selected quantities of golden tests.
    """

    def __init__(self) -> None:
        self.every: list[pytest.Item] = []
        self.selected: set[str] = set()

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self.every.append(item)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.selected = _names(session.items)


def _names(nodes: list[pytest.Item]) -> set[str]:
    """Return the ids of tests, for those of golden cases the full ids of the chosen quantities."""
    parts = parts_of(nodes)
    found = {node.nodeid for node in nodes if node not in parts}
    for node, part in parts.items():
        start = node.nodeid.removesuffix(node.name)
        found |= {start + full_name(node, part, item) for item in chosen(node, part)}
    return found


@pytest.fixture(params=sorted(CONFTESTS))
def folder(request: pytest.FixtureRequest, pytester: pytest.Pytester) -> Path:
    """A project with golden tests in several forms, and hooks that change them."""
    root = pytester.path
    lines = [f"regress_golden_dir = {GOLDEN}", "regress_matrix = full", "regress_tier = semantics"]
    lines += ["markers =", "  slow: x", "  tagged: x", ""]
    (root / "pytest.ini").write_text("\n".join(["[pytest]", *lines]))
    less = SUITE.replace("dr_grpo,gpt2", "gpt2").partition("@pytest.mark.tagged")[0]
    for name, text in {"tests/a/test_suite.py": SUITE, "tests/z/test_suite_too.py": less}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "tests/z/test_more.py").write_text("def test_packed(): pass\ndef test_loss(regress): pass\n")
    for name, text in CONFTESTS[request.param].items():
        (root / name).write_text(text)
    return root


def _collect(pytester: pytest.Pytester, *arguments: str) -> Seen:
    seen = Seen()
    pytester.inline_run(
        "-q", "-p", "regress.plugin", "--collect-only", "--import-mode=importlib", *arguments, plugins=[seen]
    )
    return seen


def _expression(chance: random.Random, depth: int = 3) -> str:
    if depth == 0 or chance.random() < 0.3:
        return chance.choice(PARTS)
    if chance.random() < 0.25:
        return f"not {_expression(chance, depth - 1)}"
    both = _expression(chance, depth - 1), _expression(chance, depth - 1)
    return f"({both[0]} {chance.choice(['and', 'and', 'or'])} {both[1]})"


def _expected(every: list[pytest.Item], text: str) -> set[str]:
    """Return the names for which an expression holds if each quantity is a test of its own, by pytest's matching."""
    expression, parts, found = Expression.compile(text), parts_of(every), set()
    for node in every:
        start = node.nodeid.removesuffix(node.name)
        others = KeywordMatcher.from_item(node)._names - {node.name}
        full = (
            [full_name(node, parts[node], item) for item in parts[node].items]
            if node in parts
            else [node.name]
        )
        others -= {*full}  # of which a selected test has one
        found |= {start + name for name in full if expression.evaluate(KeywordMatcher({*others, name}))}
    return found


EXPRESSIONS = 60


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(1, 20))]
)
def test_what_is_judged_is_what_pytest_would_select_of_single_quantities(
    folder: Path, pytester: pytest.Pytester, seed: int
) -> None:
    """Random expressions, with the markers and keywords that hooks of conftest.py files add."""
    chance, every = random.Random(seed), _collect(pytester).every
    assert any("gpt2/dp2" in node.name for node in every)
    config, added, selecting = every[0].config, {node: {*node.extra_keyword_matches} for node in every}, 0
    for _ in range(EXPRESSIONS):
        config.option.keyword = text = _expression(chance)
        expected = _expected(every, text)
        selected = list(every)
        choose(selected, config)
        deselect_by_keyword(selected, config)
        assert _names(selected) == expected, text
        selecting += bool(expected)
        for node in every:
            node.extra_keyword_matches.clear()
            node.extra_keyword_matches.update(added[node])
    assert selecting > EXPRESSIONS // 3


def test_hooks_add_what_an_expression_names_before_it_is_evaluated(
    folder: Path, pytester: pytest.Pytester
) -> None:
    """The same through the command line, where conftest.py files come first and pytest's own selection last."""
    text = "not slow and not late and /gradient] or step1 and (slow or late) and /log_probs]"
    seen = _collect(pytester, "-k", text)
    assert seen.selected == _expected(seen.every, text)
    assert any("gradient" in name for name in seen.selected)


@pytest.mark.parametrize("folder", ["late"], indirect=True)
@pytest.mark.parametrize("text", ["[DR_GRPO/base/step0 and Micro0 and log_probs]", "[gpt"])
def test_cases_that_no_id_can_begin_with_are_not_planned(
    text: str, pytester: pytest.Pytester, folder: Path
) -> None:
    """What is selected is the same as where everything is collected first."""
    seen = _collect(pytester, "-k", text)
    every = _collect(pytester).every
    assert seen.selected == _expected(every, text) != set()
    assert len(seen.every) < len(every)


def test_a_test_of_more_parameters_is_selected_by_its_full_names(stubbed: Any) -> None:
    stubbed.write(
        "test_suite.py", SUITE.partition("@pytest.mark.tagged")[0].replace("dr_grpo,gpt2", "dr_grpo")
    )
    result = stubbed.run(TIER, "-k", "dr_grpo/base/step1/rank0/micro0/log_probs]")
    assert result.parseoutcomes()["passed"] == 1
    assert judged(result) == "1 quantity judged in 1 test"


@pytest.mark.one_in(3)  # of expressions and ways to run them
@pytest.mark.parametrize(
    ("text", "quantities", "tests"),
    [
        ("advantages", 3, 1),
        ("step1 and (advantages or grad_norm)", 2, 2),
        ("base and not step0 and not step1 and coverage", 1, 1),
        ("micro0 and entropy]", 3, 1),
        ("base/rank0/micro0]", None, 1),
    ],
)
def test_only_what_is_named_is_judged(everywhere: Any, text: str, quantities: int | None, tests: int) -> None:
    everywhere.fault(base={"type": "gradient", "tensor": "model.norm.weight", "factor": 2})
    result = everywhere.run(TIER, "-k", text)
    assert (result.ret, result.parseoutcomes()["passed"]) == (0, tests)
    number = rf"{quantities} quantit(y|ies)" if quantities else r"\d\d quantities"
    assert re.fullmatch(rf"{number} judged in {tests} tests?", judged(result))


def test_the_failed_ones_run_again_as_a_whole(everywhere: Any) -> None:
    everywhere.fault(base={"type": "is_loss_debug", "tensor": "advantages", "factor": 2})
    first = everywhere.run(TIER)
    assert judged(first) == f"{GoldenProject.QUANTITIES} quantities judged in {GoldenProject.TESTS} tests"
    everywhere.fault()
    again = everywhere.run(TIER, "--lf")
    again.assert_outcomes(passed=1)
    assert judged(again) != judged(first)


def test_an_id_in_one_expression_and_the_reproduced_quantity_in_another(stubbed: Any) -> None:
    """The command of a failure judges that quantity and no other."""
    stubbed.fault(base={"type": "gradient", "tensor": "model.norm.weight", "factor": 0.999})
    result = stubbed.run(TIER, "-k", "step1 and gradient")
    (line,) = {line for line in result.outlines if line.startswith("reproduce: ")}
    again = stubbed.run(*shlex.split(line)[2:])
    assert judged(again) == "1 quantity judged in 1 test"
    assert again.ret == pytest.ExitCode.TESTS_FAILED


def test_parts_of_names_that_occur_nowhere_are_named() -> None:
    names = ["[dense/base/", "[dense/base/step0/rank0/micro0/log_probs]"]
    assert [*misspelt("dnse and micro0 or (lgo_probs and not base)", names)] == [
        ("dnse", "dense"),
        ("lgo_probs", "log_probs"),
    ]
