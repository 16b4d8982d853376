"""`regress report`: a run read back as if nothing interrupted it, in text, JSON and one page that executes nothing."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from made_runs import HOSTILE, hostile, resumed, row, rows, written

from regress.cli import main


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def tree(*arguments: object) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"bare {name}")

    done = run(*arguments, "--format", "json")
    assert (done.exit_code, done.stderr) == (0, "")
    return json.loads(done.output, parse_constant=refuse)


class Tags(HTMLParser):
    """Tags of a page with their attributes, and the texts of its cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self._cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._cell = tag in ("td", "th")
        if self._cell:
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self._cell and self.cells:
            self.cells[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._cell = False


def page_of(tmp_path: Path, *runs: Path) -> tuple[str, Tags]:
    done = run(*runs, "--output", tmp_path / "page.html")
    assert (done.exit_code, done.stderr) == (0, "")
    text = (tmp_path / "page.html").read_text()
    return text, Tags(text)


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_text_tells_first_last_and_best(tmp_path: Path) -> None:
    done = run(written(tmp_path / "base", rows()), "--format", "text")
    assert done.exit_code == 0
    assert done.output.splitlines()[0] == "base: 4 steps, 8 optimizer updates"
    assert re.search(r"^Reward +0 -> 0.75 \(best 0.75 at step 3\)$", done.output, re.MULTILINE)
    assert re.search(r"^Curriculum stage +0 -> 1$", done.output, re.MULTILINE)


def test_series_have_their_steps_and_updates(tmp_path: Path) -> None:
    (told,) = tree(written(tmp_path / "base", rows()))["runs"]
    norm = told["series"]["training_step/grad_norm"]
    assert norm["update"] == [*range(8)]
    assert norm["x"] == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]
    assert norm["value"] == [1.0 + update for update in range(8)]
    assert told["series"]["rollouts/returns_mean"]["update"] == [None] * 4
    assert (told["steps"], told["updates"]) == (4, 8)


def test_a_resumed_run_has_each_step_once_and_its_segments(tmp_path: Path) -> None:
    (told,) = tree(written(tmp_path / "run", resumed()))["runs"]
    assert told["series"]["rollouts/returns_mean"]["value"] == [0.0, 0.25, 1.0, 1.25]
    assert told["series"]["training_step/loss"]["update"] == [*range(8)]
    assert [(s["number"], s["resumed_from"], s["step"], s["update"]) for s in told["segments"]] == [
        (0, None, 0, None),
        (1, "checkpoint-2", 2, 4),
    ]
    text = run(tmp_path / "run", "--format", "text").output
    assert "1: resumed from checkpoint-2 at step 2, update 4, 2024-11-22 12:5" in text


def test_samples_of_steps_that_were_made_again_are_those_of_the_last_segment(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", resumed())
    samples = [
        row(i, step, segment=segment, prompt=f"s{step}g{segment}")
        for i, (step, segment) in enumerate([(0, 0), (2, 0), (2, 0), (2, 1), (9, 0)])
    ]
    written(folder, samples, "eval_samples.jsonl", tail='{"step": 3, "pro')
    (told,) = tree(folder)["runs"]
    assert [sample["prompt"] for sample in told["samples"]] == ["s0g0", "s2g1"]
    assert any("torn" in note for note in told["notes"])


def test_the_page_of_two_runs(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a", rows()), written(tmp_path / "b", rows(2))
    text, tags = page_of(tmp_path, first, second)
    data = data_of(text)
    assert [told["name"] for told in data["runs"]] == ["a", "b"]
    titles = [chart["title"] for chart in data["charts"]]
    assert titles[:4] == ["Reward", "Pass rate", "Curriculum stage", "Lengths"]
    assert {"KL", "Clip fraction", "Gradient norm", "Learning rate"} <= {*titles}
    places = {attributes.get("id") for tag, attributes in tags.tags if tag == "div"}
    assert {f"chart-{number}" for number in range(len(titles))} <= places
    assert "0 -> 0.75 (best 0.75 at step 3)" in tags.cells
    assert "0 -> 0.25 (best 0.25 at step 1)" in tags.cells
    sources = [a for _, a in tags.tags if "src" in a or ("href" in a and not str(a["href"]).startswith("#"))]
    assert sources == []  # it needs no other file and no network


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    pair = written(tmp_path / "x" / "run", rows()), written(tmp_path / "y" / "run", rows())
    assert [told["name"] for told in tree(*pair)["runs"]] == [str(path) for path in pair]


def test_nothing_of_a_run_becomes_markup(tmp_path: Path) -> None:
    text, tags = page_of(tmp_path, hostile(tmp_path / HOSTILE.replace("/", "")))
    assert text.count("<script") == text.count("</script") == _clean(tmp_path).count("<script")
    assert not [tag for tag, _ in tags.tags if tag == "img"]
    assert not [a for _, a in tags.tags if any(name.startswith("on") for name in a)]
    assert HOSTILE in tags.cells
    data = data_of(text)
    assert "__proto__" in data["runs"][0]["series"]


def _clean(tmp_path: Path) -> str:
    return page_of(tmp_path, written(tmp_path / "clean", rows()))[0]


def test_a_terminal_is_given_no_control_characters(tmp_path: Path) -> None:
    done = run(hostile(tmp_path / "run"), "--format", "text")
    assert done.exit_code == 0
    assert "\x1b" not in done.output


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no metrics.jsonl"),
        ("", "holds no metrics"),
        ('{"segment": 0}\n{"step": 1}\n', "line 1 is not a row of metrics"),
        ('{"step": 1}\n', "holds no metrics"),
        ('[1, 2]\n"text"\n{"step": 1, "a": 2}\n', "line 1 is not a row of metrics"),
        ("\x00\x01\x02 PK binary\n\xff\n", "line 1 is not a row of metrics"),
        ('{"step": "three", "a": 1}\n{"step": 1, "a": 2}\n', "line 1 is not a row of metrics"),
    ],
)
def test_what_is_no_run_is_said_in_one_sentence(tmp_path: Path, content: str | None, words: str) -> None:
    (tmp_path / "run").mkdir()
    if content is not None:
        (tmp_path / "run" / "metrics.jsonl").write_bytes(content.encode("latin-1"))
    done = run(tmp_path / "run", "--format", "text")
    assert done.exit_code == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_run_is_said_in_one_sentence(tmp_path: Path) -> None:
    done = run(tmp_path / "nobody")
    assert (done.exit_code, "does not exist" in done.stderr) == (2, True)


def test_a_torn_last_line_is_left_out_with_a_note(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", rows(), tail='{"segment": 0, "sequence": 99, "st')
    assert tree(folder)["runs"][0]["series"]["rollouts/returns_mean"]["step"] == [0, 1, 2, 3]
    assert "note: " in run(folder, "--format", "text").output


def test_values_of_every_kind(tmp_path: Path) -> None:
    lines = [
        {
            "step": 0,
            "a": None,
            "b": True,
            "c": [1, 2],
            "d": {"e": 1},
            "f": 10**400,
            "g": "text",
            "rollouts/x": 1,
        },
        {"step": 1, "a": 1.5, "update": "seven", "rollouts/x": 2},
    ]
    folder = written(tmp_path / "run", lines, tail='{"step": 2, "a": NaN, "rollouts/x": Infinity}\n')
    (told,) = tree(folder)["runs"]
    assert told["series"]["a"]["value"] == [None, 1.5, None]
    assert told["series"]["f"]["value"] == [None]
    assert told["texts"] == {"g": [[0, "text"]]}
    assert "c" not in told["series"]
    page_of(tmp_path, folder)


def test_metrics_of_an_older_release(tmp_path: Path) -> None:
    """Rows had a step and values alone."""
    folder = written(tmp_path / "run", [{"step": n, "rollouts/returns_mean": n / 2} for n in range(3)])
    (told,) = tree(folder)["runs"]
    assert told["series"]["rollouts/returns_mean"]["value"] == [0.0, 0.5, 1.0]
    assert tree(folder / "metrics.jsonl")["runs"][0]["name"] == "run"


def test_damaged_samples_are_left_out_with_a_note(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", rows())
    (folder / "eval_samples.jsonl").write_text("not a row\n{}\n")
    (told,) = tree(folder)["runs"]
    assert told["samples"] == []
    assert any("evaluated samples are left out" in note for note in told["notes"])
