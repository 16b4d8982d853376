"""Tests of golden cases that are left out before they are made: exactly those that pytest would deselect."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.compare.quantities import QUANTITIES
from regress.plugin import narrowing, replays
from regress.plugin.expressions import Keywords, may_have_marker, may_hold
from regress.plugin.wanted import Wanted

GOLDEN = Path(__file__).parents[2] / "golden"

PLACES = st.tuples(
    st.integers(0, 12),
    st.none() | st.integers(0, 2),
    st.none() | st.integers(0, 11),
    st.none() | st.integers(0, 3),
).map(
    lambda found: "/".join(
        f"{word}{number}"
        for word, number in zip(("step", "update", "rank", "micro"), found, strict=True)
        if number is not None
    )
)
REPLAYS = st.tuples(
    st.sampled_from(["dense", "dr_grpo", "Step1", "moe.v2", "rank"]),
    st.sampled_from(["base", "dp2-packed-mbs3", "tp2-bf16", "micro1", "PAD8", "base-fp32"]),
).map("/".join)
TESTS = st.tuples(REPLAYS, PLACES, st.sampled_from([quantity.name for quantity in QUANTITIES])).map("/".join)


@st.composite
def selections(draw: st.DrawFn) -> tuple[str, str]:
    """The id of a test, and an expression whose names are mostly parts of it."""
    id = draw(TESTS)
    name = f"test_golden[{id}]"
    start = st.integers(0, len(name) - 1)
    part = st.tuples(start, st.integers(1, 14)).map(lambda cut: name[cut[0] :][: cut[1]])
    other = st.sampled_from(
        ["packed", "rank1", "loss", "/log", "1/", "slow", "suite.py", "SLOW", "x", "0]", "regress"]
    )
    names = st.one_of(part, part, part.map(str.upper), other).filter(
        lambda text: text not in ("and", "or", "not")
    )
    leaves = names.map(lambda text: f"({text})")
    expressions = st.recursive(
        leaves,
        lambda inner: (
            inner.map("not {}".format)
            | st.tuples(inner, inner).map(lambda both: f"({both[0]} and {both[1]})")
            | st.tuples(inner, inner).map(lambda both: f"({both[0]} or {both[1]})")
        ),
        max_leaves=6,
    )
    return id, draw(expressions)


@settings(deadline=None)
@given(selections())
def test_a_replay_is_left_out_only_if_none_of_its_tests_is_selected(selection: tuple[str, str]) -> None:
    """Catches any name that could stand where an id goes on, and is taken for one that cannot."""
    id, text = selection
    shared = KeywordMatcher(frozenset(["test_suite.py", "test_golden", "regress", "slow"]))
    selected = Expression.compile(text).evaluate(
        KeywordMatcher(frozenset([*shared._names, f"test_golden[{id}]"]))
    )
    keywords = Keywords("test_golden", shared)
    assert may_hold(Expression.compile(text), keywords.of_test(id)) == selected
    if selected:
        assert may_hold(Expression.compile(text), keywords.of_replay("/".join(id.split("/")[:2])))


@settings(deadline=None)
@given(selections(), st.sets(st.sampled_from(["slow", "extended", "packed"])))
def test_a_test_is_kept_if_names_that_hooks_add_could_select_it(
    selection: tuple[str, str], added: set[str]
) -> None:
    id, text = selection
    shared = KeywordMatcher(frozenset(["test_golden"]))
    everything = KeywordMatcher(frozenset([*shared._names, *added, f"test_golden[{id}]"]))
    keywords = Keywords("test_golden", shared, frozenset({"slow", "extended", "packed"}))
    if Expression.compile(text).evaluate(everything):
        assert may_hold(Expression.compile(text), keywords.of_test(id))
        assert may_hold(Expression.compile(text), keywords.of_replay("/".join(id.split("/")[:2])))


def test_a_replay_without_the_text_of_an_expression_is_left_out() -> None:
    """Catches a narrowing that keeps everything, which would be right, and of no use."""
    keywords = Keywords("test_golden", KeywordMatcher(frozenset(["test_golden"])))

    def kept(text: str, replay: str) -> bool:
        return may_hold(Expression.compile(text), keywords.of_replay(replay))

    assert kept("packed and micro1 and log_probs", "dense/dp2-packed")
    assert not kept("packed and micro1 and log_probs", "dense/base")
    assert not kept("dense/tp2 and rank1", "dense/tp4")
    assert not kept("[tied/base/ and /entropy]", "dense/base")
    assert not kept("not dense", "dense/base")
    assert not kept("nothing", "dense/base")


def test_a_marker_that_a_hook_may_add_keeps_the_tests() -> None:
    decide = may_have_marker(lambda name: name == "regress", ["extended"])
    for text, kept in [("regress", True), ("slow", False), ("extended", True), ("not regress", False)]:
        assert may_hold(Expression.compile(text), decide) == kept


def test_an_expression_of_many_unknown_names_keeps_everything() -> None:
    text = " and ".join(f"micro{number}" for number in range(40))
    assert may_hold(Expression.compile(text), lambda _: None)


SUITE = """
import pytest

@pytest.mark.regress(cases="dr_grpo,gpt2", variants="base,pad8,dp2,packed-mbs3")
def test_golden(regress_record):
    pass

@pytest.mark.tagged
@pytest.mark.regress(cases="dr_grpo", variants="base,pad8")
def test_golden_again(regress_record):
    pass

@pytest.mark.regress(cases="dr_grpo", variants="base")
@pytest.mark.parametrize("way", ["packed", "other"])
def test_both(regress_record, way):
    pass

class TestGolden:
    @pytest.mark.regress(cases="dr_grpo", variants="base,pad8")
    def test_in_class(self, regress_record):
        pass

def test_plain():
    pass
"""
HOOK = """
def pytest_collection_modifyitems(items):
    for item in items:
        if "entropy" in item.name:
            item.add_marker("slow")
"""
LATE = """
def pytest_itemcollected(item):
    if "rank1" in item.name:
        item.extra_keyword_matches.add("late_packed")
"""
CONFTESTS = {
    "none": {},
    "undeclared": {"conftest.py": HOOK},
    "declared": {"conftest.py": HOOK + "def pytest_regress_keywords(): return ['slow']\n"},
    "late": {"tests/z/conftest.py": HOOK},
    "collected": {"tests/conftest.py": LATE},
}
PARTS = (
    *(
        "packed",
        "base",
        "pad8",
        "dp2",
        "rank1",
        "rank0",
        "micro1",
        "step2",
        "update",
        "log_probs",
        "entropy",
        "loss",
    ),
    *(
        "gpt2",
        "dr_grpo",
        "dr_grpo/base",
        "/entropy]",
        "[gpt2/",
        "tagged",
        "slow",
        "late",
        "test_golden",
        "again",
    ),
    *("TestGolden", "test_suite", "plain", "other", "coverage", "0/", "1", "bf16", "nothing", "REGRESS", "z"),
)
MARKS = (
    "slow",
    "tagged",
    "not slow",
    "tagged or slow",
    "regress",
    "not regress and tagged",
    "regress(cases='dr_grpo')",
)


EVERY: list[str] = []
"""All ids of the project, which no hook of a conftest.py changes."""


class Seen:
    """A plugin of the run that notes what was selected; without narrowing if told so."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.ids = [item.nodeid for item in session.items]


@pytest.fixture(params=sorted(CONFTESTS))
def folder(request: pytest.FixtureRequest, pytester: pytest.Pytester) -> Path:
    """A project with golden tests in several forms, and hooks that change them."""
    root = pytester.path
    lines = [f"regress_golden_dir = {GOLDEN}", "regress_matrix = full", "regress_tier = semantics"]
    lines += ["markers =", "  slow: x", "  tagged: x", ""]
    (root / "pytest.ini").write_text("\n".join(["[pytest]", *lines]))
    for name in ("tests/a/test_suite.py", "tests/z/test_suite_too.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(SUITE)
    (root / "tests/z/test_more.py").write_text("def test_packed(): pass\ndef test_loss(regress): pass\n")
    for name, text in CONFTESTS[request.param].items():
        (root / name).write_text(text)
    return root


def _selected(pytester: pytest.Pytester, *arguments: str) -> list[str]:
    seen = Seen()
    pytester.inline_run(
        "-q", "-p", "regress.plugin", "--collect-only", "--import-mode=importlib", *arguments, plugins=[seen]
    )
    return seen.ids


def _expression(chance: random.Random, depth: int = 3) -> str:
    if depth == 0 or chance.random() < 0.3:
        return chance.choice(PARTS)
    if chance.random() < 0.25:
        return f"not {_expression(chance, depth - 1)}"
    both = _expression(chance, depth - 1), _expression(chance, depth - 1)
    return f"({both[0]} {chance.choice(['and', 'and', 'or'])} {both[1]})"


def _arguments(chance: random.Random, ids: list[str]) -> Iterator[str]:
    """A random selection; ``{lf}`` stands for failures of an earlier run."""
    if chance.random() < 0.7:
        yield from ("-k", _expression(chance))
    if chance.random() < 0.25:
        yield from ("-m", chance.choice(MARKS))
    if chance.random() < 0.2:
        yield f"--deselect={chance.choice(ids)[: chance.choice([20, 40, 60, 200])]}"
    if chance.random() < 0.35:
        yield chance.choice(["--lf", "--lf", "--ff", "--sw", "--nf"])
    for _ in range(chance.choice([0, 0, 0, 1, 1, 2, 4])):
        whole = chance.choice(ids)
        yield chance.choice([
            *(whole, whole, whole.partition("[")[0], whole.partition("::")[0], "tests", "tests/a", "tests/z"),
            *("tests/z/test_more.py", "tests/a/test_suite.py::TestGolden"),
        ])  # fmt: skip


def _failures(chance: random.Random, ids: list[str]) -> dict[str, bool]:
    stale = [
        "tests/a/test_suite.py::test_golden[dr_grpo/gone/step0/coverage]",
        "tests/a/test_suite.py",
        "tests/z",
    ]
    found = [chance.choice(ids) for _ in range(chance.choice([0, 1, 3, 30]))]
    return dict.fromkeys([*found, *(id for id in stale if chance.random() < 0.15)], True)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(1, 60))]
)
def test_what_is_selected_is_what_pytest_selects_of_all_tests(
    folder: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Random selections, against those of a collection from which nothing is left out beforehand."""
    chance = random.Random(seed)
    cache = folder / ".pytest_cache/v/cache"
    cache.mkdir(parents=True)

    def collected(*arguments: str, all: bool) -> list[str]:
        with monkeypatch.context() as patch:
            if all:
                patch.setattr(narrowing, "choices", lambda _: iter([Wanted()]))
            return _selected(pytester, *arguments)

    EVERY[:] = EVERY or collected(all=True)
    assert any("gpt2/dp2" in id for id in EVERY)
    arguments = [*_arguments(chance, EVERY)]
    failures = json.dumps(_failures(chance, EVERY))
    found = []
    for every in (True, False):
        (cache / "lastfailed").write_text(failures)
        (cache / "stepwise").write_text("[]")
        found.append(collected(*arguments, all=every))
        found[-1] += sorted(json.loads((cache / "lastfailed").read_text()))
    assert found[1] == found[0], arguments


def test_less_is_made_than_is_selected_from(
    folder: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a narrowing that is right because it does nothing."""
    made = []
    items = replays._parameters

    def counted(*arguments: object) -> object:
        found = items(*arguments)  # type: ignore[arg-type]
        made.append(len(found))
        return found

    monkeypatch.setattr(replays, "_parameters", counted)
    _selected(pytester, "-k", "gpt2/base and step1 and log_probs", "tests/a/test_suite.py::test_golden")
    conftest = folder / "conftest.py"
    silent = conftest.exists() and "pytest_regress_keywords" not in conftest.read_text()
    assert (made[0] > 100) == (silent or (folder / "tests/conftest.py").exists())
