"""Data of one's own: files by their content, functions by their path, and one sentence for every mistake."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.errors import TaskError
from regress.tasks.data_files import FileTask, read_task
from regress.tasks.data_rows import RowFields
from regress.tasks.problem import Problem
from regress.tasks.problem_split import make_dataset, make_graded_dataset
from regress.tasks.task_registry import OwnTask, make_task

ROWS = [
    {"prompt": "1+1", "answer": "2", "level": "basic", "complexity": 0.5, "source": "x"},
    {"prompt": [{"role": "user", "content": "2+2 ü"}], "answer": 4, "level": 2},
    {"prompt": [7, 8, 9], "answer": " yes "},
]
EXPECTED = [
    Problem("dataset", "1+1", "2", 1, complexity=0.5),
    Problem("dataset", "2+2 ü", "4", 2),
    Problem("dataset", "7 8 9", "yes", None, tokens=(7, 8, 9)),
]


def write_array(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False))


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("\ufeff" + "\r\n\n".join(json.dumps(row) for row in rows), newline="")


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    "array": write_array,
    "lines": write_lines,
    "parquet": write_parquet,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_the_content_tells_the_format(kind: str, tmp_path: Path) -> None:
    rows = ROWS[:1] if kind == "parquet" else ROWS  # a column has one type
    path = tmp_path / "data"
    WRITERS[kind](path, rows)
    assert list(read_task(path, RowFields()).problems) == EXPECTED[: len(rows)]


def test_fields_have_the_names_that_are_given(tmp_path: Path) -> None:
    write_lines(tmp_path / "data", [{"question": "q", "solution": "s", "difficulty": "Expert", "c": 3}])
    fields = RowFields("question", "solution", "difficulty", "c")
    assert read_task(tmp_path / "data", fields).problems == (Problem("dataset", "q", "s", 4, complexity=3.0),)


GOOD = '{"prompt": "a", "answer": "b"}'
DAMAGED = {
    "": "holds no rows",
    "[]": "holds no rows",
    f"{GOOD}\n{{": "line 2 is not valid JSON",
    f"{GOOD}\n{GOOD[:-1]}": "line 2 is not valid JSON",
    f"[\n{GOOD}\n{GOOD}]": "line 3 is not valid JSON (a comma or ] is missing)",
    f"[\n{GOOD},\n\n": "line 4 is not valid JSON",
    f"[{GOOD}]\n{GOOD}": "line 2 is not valid JSON (something follows the array)",
    f"{GOOD}\n\n3": "line 3 is 3, but a row is an object with the fields 'prompt' and 'answer'",
    f'{GOOD}\n{{"promt": "a", "answer": "b"}}': "line 2 has no 'prompt', which task.prompt_field asks for; did",
    '{"prompt": "a", "answer": null}': "line 1 has no 'answer', which task.answer_field asks for",
    '{"prompt": "a", "answer": 1.5}': "line 1: 'answer' must be the right answer as text (or a whole number), not 1.5",
    '{"prompt": "a", "answer": " "}': "line 1: 'answer' must be the right answer",
    '{"prompt": "a", "answer": true}': "line 1: 'answer' must be the right answer",
    '{"prompt": " ", "answer": "b"}': "line 1: 'prompt' must be text, a list of token ids, or a chat",
    '{"prompt": [1, -2], "answer": "b"}': "line 1: 'prompt' must be text",
    '{"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], "answer": "b"}': "a chat with",
    '{"prompt": "\\ud800", "answer": "b"}': "line 1: 'prompt' holds half a character",
    '{"prompt": "a", "answer": "b", "level": "hard"}': "line 1: level: 'hard' is not a level; give one of basic",
    '{"prompt": "a", "answer": "b", "complexity": 11}': "line 1: complexity: 11 is not a complexity",
    f"{GOOD}\n\n{GOOD}": "line 3 repeats the prompt of line 1",
    f"[{GOOD},\n{'[' * 100000}": "line 2 is not valid JSON",
}


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: text[:40])
def test_damage_is_one_sentence_with_file_and_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(text)
    with pytest.raises(TaskError) as caught:
        read_task(path, RowFields())
    assert str(caught.value).startswith(f"task.dataset_path: {path} ")
    assert DAMAGED[text] in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(sorted(WRITERS)), seed=st.integers(0, 10**6))
def test_random_damage_is_refused_or_leaves_sound_problems(
    kind: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("files") / "data"
    WRITERS[kind](path, [{"prompt": f"p{index}", "answer": f"a{index}"} for index in range(6)])
    data, rng = bytearray(path.read_bytes()), random.Random(seed)
    if rng.random() < 0.3:
        del data[rng.randrange(len(data)) :]
    for _ in range(rng.randrange(1, 4)):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(bytes(data))
    problems: tuple[Problem, ...] = ()
    said = ""
    try:
        problems = read_task(path, RowFields()).problems
    except TaskError as error:
        said = str(error)
    assert bool(problems) != (str(path) in said)
    assert all(problem.prompt and problem.answer for problem in problems)


@pytest.mark.parametrize("path", ["missing.jsonl", "."])
def test_no_file(path: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"cannot be read .* give a JSON array, JSON lines or a parquet file"):
        read_task(tmp_path / path, RowFields())


def file_task(size: int, seed: int = 0) -> FileTask:
    return FileTask(tuple(Problem("dataset", f"p{index}", "a") for index in range(size)), seed)


def test_all_of_a_file_is_trained_on_but_what_is_held_out() -> None:
    dataset = make_dataset(file_task(40), None, 10)
    assert (len(dataset.train), len(dataset.evaluation)) == (30, 10)
    assert {p.prompt for p in (*dataset.train, *dataset.evaluation)} == {f"p{index}" for index in range(40)}
    assert make_dataset(file_task(40, 1), None, 10).evaluation != dataset.evaluation


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (
            (40, 10),
            "task.dataset_path holds 40 problems, but task.train_size 40 and task.eval_size 10 need 50",
        ),
        (
            (None, 40),
            "task.dataset_path holds 40 problems, of which task.eval_size 40 leaves none to train on",
        ),
    ],
)
def test_a_file_that_is_too_small(sizes: tuple[int | None, int], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        make_dataset(file_task(40), *sizes)


def test_levels_share_a_dataset_and_no_prompt() -> None:
    tasks = [make_task("reverse_string", level) for level in (1, 2, 3)]
    dataset = make_graded_dataset(tasks, 100, 20)
    prompts = [problem.prompt for problem in (*dataset.train, *dataset.evaluation)]
    assert len(prompts) == len(set(prompts)) == 120
    levels = [problem.level for problem in dataset.train]
    assert [levels.count(level) for level in (1, 2, 3)] == [34, 33, 33]
    assert {problem.level for problem in dataset.evaluation[:3]} == {1, 2, 3}, (
        "so that a few are of all levels"
    )


def endless(level: int, seed: int, start: int = 0) -> Iterator[object]:
    for index in count(start):
        yield f"{seed}:{index // 2}", "a"  # every prompt twice
        yield {"prompt": f"own level {index}", "answer": 3, "level": level + 1}


def own(function: Callable[..., Any], **params: Any) -> OwnTask:
    return OwnTask("mine:rows", 2, function, params, 5)


def test_a_function_may_go_on_for_ever_and_repeat_itself() -> None:
    problems = own(endless, start=10).draw(9)
    assert len({problem.prompt for problem in problems}) == len(problems) == 9
    assert [problem.level for problem in problems[:2]] == [2, 3]
    assert problems[0].prompt == "5:5"


def test_a_function_that_repeats_itself_only_is_not_called_for_ever() -> None:
    def stuck(level: int, seed: int) -> Iterator[tuple[str, str]]:
        while True:
            yield "p", "a"

    assert len(own(stuck).draw(5)) == 1


def test_functions_that_fail() -> None:
    def fails(level: int, seed: int) -> Iterator[tuple[str, str]]:
        yield "p", "a"
        raise ValueError("no more disk")

    with pytest.raises(
        TaskError, match=r"task\.name: mine:rows failed when called with level=2, seed=5 .*no more disk"
    ):
        own(fails).draw(3)
    with pytest.raises(TaskError, match="unexpected keyword argument 'seeds'"):
        own(endless, seeds=1).draw(3)
    with pytest.raises(
        TaskError, match=r"mine:rows yielded a row \(number 1\) that is 3, but a row is an object"
    ):
        own(lambda level, seed: [3]).draw(1)


def test_a_path_needs_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPO_REGRESS_ALLOW_CODE", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_rows_task.py").write_text(
        "from pathlib import Path\nPath('ran').touch()\ndef rows(level, seed): return [('p', 'a')]\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        TaskError, match=r"task\.name: 'own_rows_task:rows' names code of the module own_rows_task"
    ):
        make_task("own_rows_task:rows")
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv("GRPO_REGRESS_ALLOW_CODE", "1")
    assert make_task("own_rows_task:rows").draw(1) == [Problem("own_rows_task:rows", "p", "a", 1)]
