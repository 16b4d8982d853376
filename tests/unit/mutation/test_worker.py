"""Checks of mutants in ranks: what changes nothing stays alive, and no failure of the tool is taken for a kill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from mutation import unit_tests
from mutation.checks import Cases, Check, matrix
from mutation.mutants import Mutant, Planted, unchanged
from mutation.page import COLUMNS, page, rows
from mutation.ranks import Lines
from mutation.run import Cache, Suite, cheapest, decided, known, prove
from mutation.scopes import Scope
from mutation.unit_tests import Test, files
from mutation.worker import RIGHT, Seen, ToolError, Worker
from regress.replay.replay_pool import shared_pool
from regress.replay.variant import Extent

PATH, FUNCTION = "regress/grpo/loss_aggregation.py", "token_weights"
DIVISOR = "weights_K / max(counted, 1)"
"""Expression of the function that the case reaches."""


def planted(old: str, new: str, path: str = PATH, function: str = FUNCTION) -> Planted:
    return Planted(path, function, 0, 1, "planted", old, "0", 1, old, new)


def check(lines: Lines | None = None) -> Check:
    return Check("on_policy", "base", 20.0, lines or {PATH: [1]}, "0")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Worker]:
    worker = Worker(Cases())
    worker._pool = shared_pool()  # whose objects are frozen, and not remembered
    yield worker
    worker._folder.cleanup()


def outcome(worker: Worker, mutant: Mutant, folder: Path) -> tuple[str, str]:
    found = decided(mutant, Suite([check()], []), Cache(folder / "outcomes.jsonl"), worker)
    return found.fate, found.how


@pytest.mark.extended
def test_fates_in_ranks(ranks: Worker, tmp_path: Path) -> None:
    same = planted(DIVISOR, "weights_K * 1.0 / max(counted, 1)")
    assert outcome(ranks, same, tmp_path / "same") == ("alive", "")
    assert outcome(ranks, unchanged(same), tmp_path / "unchanged") == ("alive", "")
    gross = planted(DIVISOR, "weights_K / max(counted, 1) * 2")
    seen = ranks.replayed(check(), gross)
    assert (seen.how, seen.quantity) == ("verdict", "weights")
    assert seen.place.startswith("on_policy/base step0")
    raises = planted(DIVISOR, "weights_K / {}[counted]")
    seen = ranks.replayed(check(), raises)
    assert (seen.how, seen.place.rpartition(" ")[2]) == ("raised", FUNCTION)
    assert outcome(ranks, planted(DIVISOR, "None"), tmp_path / "later")[0] == "killed"


@pytest.mark.extended
def test_failures_of_the_tool_in_ranks(ranks: Worker, tmp_path: Path) -> None:
    gone = Mutant(PATH, "gone", 0, 1, "", "", "")
    assert outcome(ranks, gone, tmp_path / "gone") == ("error", "")
    dead = planted(DIVISOR, "__import__('os')._exit(3)")
    assert outcome(ranks, dead, tmp_path / "dead") == ("error", "")
    unused = planted("", "", function="_longest")
    with pytest.raises(ToolError, match="does not run in on_policy/base"):
        ranks.replayed(check(), unused)
    with pytest.raises(ToolError, match="without a word"):
        ranks.replayed(check(), dead)
    assert outcome(ranks, gone, tmp_path / "gone") == ("error", "")  # and is tried again


@pytest.mark.extended
def test_the_judge_reads_layouts_by_the_mutant_too(ranks: Worker) -> None:
    """Engine and judge that arrange samples in another order, both of them, agree: the values are the same."""
    shared = Check("on_policy", "base", 20.0, {}, "0")
    path, function = "regress/layout/layout_planner.py", "_order"
    turned = planted("list(range(len(lengths)))", "list(range(len(lengths)))[::-1]", path, function)
    assert ranks.replayed(shared, turned) == RIGHT
    twice = planted("list(range(len(lengths)))", "list(range(len(lengths) - 1))", path, function)
    assert ranks.replayed(shared, twice).how in ("verdict", "raised later")


class Scripted(Worker):
    """Worker whose replays and tests end as told."""

    def __init__(self, *seen: Seen | tuple[str, str] | None) -> None:
        self.left = list(seen)
        self.mutants: list[int] = []

    def _replayed(self, check: Check, mutant: Mutant, limit: float) -> Seen:
        self.mutants.append(mutant.number)
        found = self.left.pop(0)
        assert isinstance(found, Seen)
        return found

    def _tested(self, names: Sequence[str], mutant: Mutant, limit: float) -> tuple[str, str] | None:
        self.mutants.append(mutant.number)
        found = self.left.pop(0)
        assert not isinstance(found, Seen)
        return found


MUTANT = planted("", "")
LATE, RAISED, VERDICT = Seen("timeout", "x"), Seen("raised later", "x"), Seen("verdict", "x")


@pytest.mark.parametrize("seen", [LATE, RAISED, Seen("raised", "x")])
def test_kills_without_a_verdict_need_a_control(seen: Seen) -> None:
    worker = Scripted(seen, RIGHT)
    assert worker.replayed(check(), MUTANT) == seen
    assert worker.mutants == [0, -1]
    for wrong in (LATE, RAISED, VERDICT):
        with pytest.raises(ToolError, match="fails without a mutant, too"):
            Scripted(seen, wrong).replayed(check(), MUTANT)


def test_a_busy_machine_is_no_timeout_of_a_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1e6, 1e6])
    monkeypatch.setattr("mutation.worker.time", SimpleNamespace(monotonic=lambda: next(clock)))
    with pytest.raises(ToolError, match="takes 1000000 s without a mutant, too"):
        Scripted(LATE, RIGHT).replayed(check(), MUTANT)


TESTS = [Test("a::b", 0.1, {PATH: [1]}), Test("a::c", 0.1, {PATH: [1]})]


def test_unit_tests_need_a_control() -> None:
    assert Scripted(("", "")).tested(TESTS, MUTANT) == (RIGHT, "")
    worker = Scripted(("a::c", "wrong"), ("", ""))
    assert worker.tested(TESTS, MUTANT) == (Seen("unit test", "wrong"), "a::c")
    assert worker.mutants == [0, -1]
    for control in (("a::c", "wrong"), None):
        with pytest.raises(ToolError, match="fails without a mutant, too"):
            Scripted(("a::c", "wrong"), control).tested(TESTS, MUTANT)
    assert Scripted(None, ("", "")).tested(TESTS, MUTANT)[0].how == "timeout"
    with pytest.raises(ToolError, match="without a mutant, too"):
        Scripted(None, None).tested(TESTS, MUTANT)


def test_a_subtest_that_fails_is_a_failure_of_its_test(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest's own report says that the test passed, and mutants that subtests alone notice lived."""
    source = """
        def test_sums(subtests):
            for number in (2, 3):
                with subtests.test(number=number):
                    assert number + number == 4
    """
    item = pytester.getitem(source, "test_sums")
    monkeypatch.setitem(unit_tests._items, item.nodeid, item)
    (found,) = unit_tests.ran([item.nodeid], pytester.path)
    assert found.why == "assert (3 + 3) == 4"


def test_outcomes_are_kept_and_gone_on_from(tmp_path: Path) -> None:
    cache, replays = Cache(tmp_path / "x" / "outcomes.jsonl"), Suite([check()], [])
    alive = decided(MUTANT, replays, cache, Scripted(RIGHT))
    assert alive.fate == "alive"
    assert known(MUTANT, replays, cache) == alive
    more = Suite([check()], TESTS)
    assert known(MUTANT, more, cache) is None  # of tests that were added nothing is known
    worker = Scripted(("a::b", "wrong"), ("", ""))
    killed = decided(MUTANT, more, cache, worker)
    assert (killed.fate, killed.how, killed.by) == ("killed", "unit test", "a::b")
    again = Cache(tmp_path / "x" / "outcomes.jsonl")
    assert decided(MUTANT, more, again, Scripted()) == killed
    assert known(MUTANT, replays, again) is None  # the test that killed it is gone


def test_what_killed_a_mutant_has_to_be_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"tests/unit/grpo/test_kl.py": "1"}
    monkeypatch.setattr("mutation.run.files", lambda: content)
    name = "tests/unit/grpo/test_kl.py::test_x"
    suite = Suite([], [Test(name, 0.1, {PATH: [1]}, "1")])
    cache = Cache(tmp_path / "outcomes.jsonl")
    killed = decided(MUTANT, suite, cache, Scripted((name, "wrong"), ("", "")))
    assert cache.of([MUTANT]) == [(MUTANT, killed)]
    content["tests/unit/grpo/test_kl.py"] = "2"
    assert cache.of([MUTANT]) == []
    by_replay = decided(MUTANT, Suite([check()], []), Cache(tmp_path / "2"), Scripted(VERDICT))
    assert by_replay.fate == "killed"
    assert Cache(tmp_path / "2").of([MUTANT]) == []  # of a case with another manifest


@pytest.mark.parametrize(
    "changed", ["grpo/test_one.py", "grpo/plain.py", "parallel/conftest.py", "conftest.py"]
)
def test_a_test_is_another_where_it_or_a_helper_was_changed(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mutation.unit_tests.ROOT", tmp_path)
    unit = tmp_path / "tests/unit"
    for file in (
        "grpo/test_one.py",
        "grpo/plain.py",
        "parallel/conftest.py",
        "conftest.py",
        "grpo/notes.txt",
    ):
        path = unit / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1", encoding="utf-8")
    before = files()
    (unit / "grpo/notes.txt").write_text("2", encoding="utf-8")
    assert files() == before
    (unit / changed).write_text("2", encoding="utf-8")
    after = files()
    assert list(before) == list(after) == ["tests/unit/grpo/test_one.py"]
    assert after != before


def test_an_error_is_no_outcome(tmp_path: Path) -> None:
    cache, suite = Cache(tmp_path / "outcomes.jsonl"), Suite([check()], [])
    broken = decided(MUTANT, suite, cache, Scripted(RAISED, RAISED))
    assert broken.fate == "error"
    assert known(MUTANT, suite, Cache(tmp_path / "outcomes.jsonl")) is None
    table = dict(zip(COLUMNS, rows({"aggregation": [(MUTANT, broken)]}, {})[0], strict=True))
    assert (table["error"], table["verdict"], table["share"]) == ("1", "0", "-")


def test_no_line_is_unreached_that_a_test_reaches(tmp_path: Path) -> None:
    away, cache = check({"other.py": [1]}), Cache(tmp_path / "outcomes.jsonl")
    assert decided(MUTANT, Suite([away], []), cache, Scripted()).fate == "unreached"
    assert decided(MUTANT, Suite([away], TESTS), cache, Scripted(("", ""))).fate == "alive"


def test_a_tool_that_kills_what_is_unchanged_is_refused() -> None:
    lines = {PATH: sorted({mutant.line for mutant in Scope("x", (PATH,)).mutants()})}
    suite = Suite([check(lines)], [])
    prove(Scope("x", (PATH,)), suite, Scripted(RIGHT))
    with pytest.raises(ToolError, match="unchanged"):
        prove(Scope("x", (PATH,)), suite, Scripted(VERDICT))


def test_a_page_counts_what_is_equivalent_only_while_it_is_alive(tmp_path: Path) -> None:
    suite = Suite([check()], [])
    alive = decided(MUTANT, suite, Cache(tmp_path / "1"), Scripted(RIGHT))
    killed = decided(MUTANT, suite, Cache(tmp_path / "2"), Scripted(VERDICT))
    reasons = {MUTANT.name: "because"}
    for outcomes, column, share in (
        ([(MUTANT, alive), (MUTANT, killed)], "equivalent", "100.0 %"),
        ([(MUTANT, killed)], "verdict", "100.0 %"),
    ):
        table = dict(zip(COLUMNS, rows({"aggregation": outcomes}, reasons)[0], strict=True))
        assert (table[column], table["alive"], table["share"]) == ("1", "0", share)
    text = page({"aggregation": [(MUTANT, alive), (MUTANT, killed)]}, {})
    assert "| 50.0 % |" in text
    assert "- alive: `regress/grpo/loss_aggregation.py:1` token_weights" in text


def test_each_test_comes_before_more_of_its_parameters() -> None:
    def test(name: str, seconds: float) -> Test:
        return Test(name, seconds, {PATH: [1]})

    slow = [test(f"c::slow[{number}]", 20.0 + number) for number in range(4)]
    many = [test(f"a::many[{number}]", 0.1 + number / 1000) for number in range(200)]
    found = [one.name for one in cheapest([*slow, *many, test("b::other", 3.0)])]
    assert found[:3] == ["a::many[0]", "b::other", "c::slow[0]"]
    assert cheapest(slow) == slow[:3]
    assert len(found) < 100


def test_all_parameters_of_a_quick_test_come_before_slow_tests() -> None:
    quick = [Test(f"a::quick[{number}]", 0.001, {PATH: [1]}) for number in range(200)]
    slow = [Test(f"b{number}::slow", 4.0, {PATH: [1]}) for number in range(9)]
    assert cheapest([*slow, *quick])[:200] == quick


def test_replays_whose_values_the_engine_computes_for_their_ranks_are_left_out() -> None:
    """One of them ended a run: by the stored values it fails without a mutant."""
    found = matrix(2, Extent.REDUCED)
    assert ("dense", "dp2") in found
    assert ("dppo_kl", "base") in found
    assert ("dppo_kl", "dp2") not in found
