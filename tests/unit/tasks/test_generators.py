"""The built-in tasks: answers are right, levels grow, spaces are counted exactly."""

import math
import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.errors import TaskError
from regress.tasks.difficulty_levels import FAMILIES
from regress.tasks.knowledge_base import knowledge_base
from regress.tasks.task_registry import make_task, task_names

SEEDS = st.integers(0, 2**32 - 1)


@cache
def facts() -> dict[str, str]:
    return dict(document.split(": ") for document in knowledge_base().documents)


@cache
def greatest_divisor(a: int, b: int) -> int:
    return max(d for d in range(1, a + 1) if a % d == 0 == b % d)


def solve(name: str, prompt: str) -> str:
    """The answer by another way than the generator's."""
    if name == "chain_sum":
        return str(sum(int(term) for term in re.findall(r"[+-]?\d+", prompt)))
    if name == "modular_sum":
        terms, modulus = prompt.split(" mod ")
        return str(sum(int(term) for term in terms.split("+")) % int(modulus))
    if name == "calculate":
        return str(eval(prompt, {"__builtins__": {}}))  # written by the generator
    if name == "lookup":
        return facts()[prompt]
    if name == "gcd":
        _, a, b = prompt.split()
        return str(greatest_divisor(int(a), int(b)))
    if name == "letter_counting":
        letter, word = re.fullmatch(r"count (\w) in (\w+)", prompt).groups()
        return str(len(word) - len(word.replace(letter, "")))
    verb, word = prompt.split()
    return {
        "copy": lambda: word,
        "rev": lambda: "".join(reversed(word)),
        "sort": lambda: "".join(letter * word.count(letter) for letter in sorted(set(word))),
        "parity": lambda: "01"[sum(int(bit) for bit in word) & 1],
    }[verb]()


@pytest.mark.parametrize("name", task_names())
@settings(deadline=None)
@given(level=st.integers(1, 5), seed=SEEDS)
def test_every_answer_is_right(name: str, level: int, seed: int) -> None:
    for problem in make_task(name, level, seed=seed).draw(20):
        assert problem.answer == solve(name, problem.prompt), problem.prompt


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("calculate", {"min_terms": 2, "max_terms": 3, "max_digits": 1}),
        ("chain_sum", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
        ("lookup", {"min_syllables": 2, "max_syllables": 3, "relations": 2}),
        ("copy", {"min_length": 1, "max_length": 4, "alphabet": "abc"}),
        ("gcd", {"max_value": 13}),
        ("letter_counting", {"min_length": 1, "max_length": 3, "alphabet": "abcd"}),
        ("modular_sum", {"min_terms": 2, "max_terms": 3, "max_value": 5, "modulus": 4}),
        ("parity", {"min_length": 2, "max_length": 6}),
        ("reverse_string", {"min_length": 3, "max_length": 3, "alphabet": "xyz"}),
        ("sort", {"min_length": 1, "max_length": 3, "alphabet": "210"}),
    ],
)
def test_the_numbering_of_prompts_has_no_gap_and_no_repetition(
    name: str, params: dict[str, int | str]
) -> None:
    space = sum(stratum.size for stratum in FAMILIES[name].strata(**params))

    problems = make_task(name, 1, params).draw(10**6)

    assert len(problems) == space == len({problem.prompt for problem in problems})


@pytest.mark.parametrize("name", task_names())
def test_each_level_is_harder_than_the_one_before(name: str) -> None:
    spaces, longest = [], []
    for level in range(1, len(FAMILIES[name].levels) + 1):
        spaces.append(sum(s.size for s in FAMILIES[name].strata(**FAMILIES[name].levels[level - 1])))
        longest.append(max(len(problem.prompt) for problem in make_task(name, level).draw(300)))

    assert spaces == sorted(set(spaces)), "the number of prompts must grow"
    assert longest == sorted(longest), "prompts must not become shorter"
    assert longest[-1] > longest[0]


@pytest.mark.parametrize("name", task_names())
@settings(deadline=None)
@given(level=st.integers(1, 5))
def test_every_level_fits_the_default_sizes_and_lengths(name: str, level: int) -> None:
    problems = make_task(name, level).draw(512 + 64)

    assert len(problems) == 512 + 64
    assert max(len(problem.prompt) for problem in problems) <= 28
    assert max(len(problem.answer) for problem in problems) <= 15


def test_kinds_are_mixed_evenly() -> None:
    words = [problem.answer for problem in make_task("reverse_string", 1).draw(300)]

    assert [sum(len(word) == length for word in words) for length in (3, 4, 5)] == [100, 100, 100]


def test_most_gcd_answers_are_not_one() -> None:
    answers = [problem.answer for problem in make_task("gcd", 1).draw(576)]

    assert (
        answers.count("1")
        < 576 / 2
        < 576 * sum(math.gcd(a, b) == 1 for a in range(1, 31) for b in range(1, 31)) / 900
    )


def test_terms_have_the_digits_asked_for() -> None:
    params = {"min_terms": 3, "max_terms": 3, "min_digits": 2, "max_digits": 2}
    terms = [
        int(t) for p in make_task("chain_sum", 1, params).draw(400) for t in re.findall(r"\d+", p.prompt)
    ]

    assert (min(terms), max(terms)) == (10, 99)
    assert any(problem.answer.startswith("-") for problem in make_task("chain_sum", 1).draw(50))


def test_sort_orders_digits_and_letters_by_code_point() -> None:
    params = {"min_length": 4, "max_length": 4, "alphabet": "b1aB"}

    answers = {p.prompt: p.answer for p in make_task("sort", 1, params).draw(256)}

    assert answers["sort b1aB"] == "1Bab"


def test_the_same_problems_on_every_platform() -> None:
    drawn = {
        name: [(p.prompt, p.answer) for p in make_task(name, 1, seed=7).draw(2)] for name in task_names()
    }

    assert drawn == PINNED


PINNED = {
    "calculate": [("(4*9)*5", "180"), ("7-0", "7")],
    "chain_sum": [("2+1+7", "10"), ("6-5", "1")],
    "copy": [("copy edacd", "edacd"), ("copy bfaa", "bfaa")],
    "gcd": [("gcd 30 26", "2"), ("gcd 23 11", "1")],
    "letter_counting": [("count a in daaaa", "4"), ("count c in bddd", "0")],
    "lookup": [("food of memo", "camun"), ("food of gove", "lepun")],
    "modular_sum": [("5+0 mod 5", "0"), ("3+6+7 mod 5", "1")],
    "parity": [("parity 11100100", "0"), ("parity 010001111", "1")],
    "reverse_string": [("rev eeed", "deee"), ("rev abdac", "cadba")],
    "sort": [("sort 3041", "0134"), ("sort 51352", "12355")],
}


@pytest.mark.parametrize(
    ("name", "level", "params", "message"),
    [
        (
            "revers_string",
            1,
            {},
            "task.name: there is no task 'revers_string'; did you mean 'reverse_string'?",
        ),
        ("poetry", 1, {}, "known are calculate, chain_sum, copy, gcd"),
        ("gcd", 0, {}, "task.level: task 'gcd' has levels 1 to 5, not 0"),
        ("gcd", 6, {}, "task.level: task 'gcd' has levels 1 to 5, not 6"),
        ("gcd", True, {}, "levels 1 to 5, not True"),
        ("sort", 1, {"maxlength": 3}, "task 'sort' has no parameter 'maxlength'; did you mean 'max_length'"),
        (
            "sort",
            1,
            {"max_length": 65},
            "task.params.max_length: task 'sort' needs a whole number from 1 to 64, not 65",
        ),
        ("sort", 1, {4: 4}, "task 'sort' has no parameter 4; known are alphabet, max_length, min_length"),
        ("sort", 1, {"max_length": 4.0}, "whole number from 1 to 64, not 4.0"),
        ("sort", 1, {"max_length": "4"}, "whole number from 1 to 64, not '4'"),
        (
            "sort",
            1,
            {"min_length": 6},
            "would have min_length 6 above max_length 5; set both min_length and max_length",
        ),
        (
            "sort",
            1,
            {"alphabet": 123},
            "different ASCII letters or digits in one string (quote digits in YAML), not 123",
        ),
        ("sort", 1, {"alphabet": "aba"}, "different ASCII letters or digits in one string"),
        ("sort", 1, {"alphabet": "a b"}, "different ASCII letters or digits in one string"),
        ("sort", 1, {"alphabet": ""}, "different ASCII letters or digits in one string"),
        ("sort", 1, {"alphabet": "é"}, "different ASCII letters or digits in one string"),
    ],
)
def test_impossible_tasks_are_refused_with_the_remedy(
    name: str, level: int, params: dict[str, object], message: str
) -> None:
    with pytest.raises(TaskError, match=re.escape(message)):
        make_task(name, level, params)
