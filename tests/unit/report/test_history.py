"""How much of its tolerance each quantity used, run by run."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner

from regress.cli import main


def report(folder: Path, number: int, failed: int = 0, **shares: float) -> str:
    """Write what `pytest --regress-report` writes of one run, as far as a history reads it."""
    rows = [
        {"quantity": name, "precision": "float32", "closest": {"multiple": share}, "failed": 0}
        for name, share in shares.items()
    ]
    rows += [{"quantity": "loss", "precision": "float32", "closest": None, "failed": failed}] * bool(failed)
    path = folder / f"report{number}.json"
    path.write_text(json.dumps({"title": f"run {number}", "headroom": rows}))
    return str(path)


def history(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(main, ["history", *arguments])
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def test_what_rose_over_all_earlier_runs_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reports = [report(tmp_path, n, gradient=0.03, log_probs=0.5 + 0.01 * n) for n in range(40)]
    history(*reports)
    told = history(report(tmp_path, 40, gradient=0.61, log_probs=0.9), "--json", "found.json")
    assert told.startswith(
        "rose: gradient float32: 0.03 of its tolerance in 39 runs (0.03 at most), now 0.61 "
        "log_probs float32: 0.7 of its tolerance in 39 runs (0.89 at most), now 0.9 "
    )
    rows = json.loads((tmp_path / "found.json").read_text())["quantities"]
    assert [(row["quantity"], row["rose"], len(row["shares"])) for row in rows] == [
        ("gradient", True, 40),
        ("log_probs", False, 40),
    ]


def test_a_report_counts_once_and_nothing_is_lost(tmp_path: Path) -> None:
    file = ["--history", str(tmp_path / "h.sqlite")]
    first = report(tmp_path, 0, gradient=0.03)
    assert "1 of 1 reports added" in history(first, *file)
    assert "0 of 1 reports added" in history(first, *file)
    assert "gradient float32: 0.03 of its tolerance 0 of 0 reports added" in history(*file)


def test_what_fails_is_told_and_what_is_gone_is_not(tmp_path: Path) -> None:
    file = ["--history", str(tmp_path / "h.sqlite")]
    history(report(tmp_path, 0, gradient=0.03, entropy=0.1), *file)
    told = history(report(tmp_path, 1, failed=3, gradient=0.03), *file)
    assert told.startswith("rose: loss float32: 3 comparisons failed gradient float32: 0.03 of")
    assert "entropy" not in told


def headroom(*failed: int) -> str:
    """A report with a row of the same quantity for each number of failures."""
    row = {"quantity": "loss", "precision": "float32", "closest": None}
    return json.dumps({"title": "x", "headroom": [{**row, "failed": count} for count in failed]})


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", '{"title": "x", "headroom": [{}]}', "{", '{"headroom": []}', "[" * 5000),
        *(headroom(2**80), headroom(-1), headroom(1, 2)),
    ],
)
def test_what_is_no_report_is_refused_and_adds_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    file = ["--history", str(tmp_path / "h.sqlite")]
    told = history(report(tmp_path, 0, gradient=0.03), str(tmp_path / "bad.json"), *file, code=2)
    assert "bad.json is not a report of regress" in told
    assert "0 of 0 reports added" in history(*file)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "named pipe" in history(str(tmp_path / "pipe"), "--history", str(tmp_path / "h.sqlite"), code=2)
    assert "named pipe" in history("--history", str(tmp_path / "pipe"), code=2)


def test_a_share_that_is_no_number_is_refused(tmp_path: Path) -> None:
    history(report(tmp_path, 0, gradient=0.03), "--history", str(tmp_path / "h.sqlite"))
    with sqlite3.connect(tmp_path / "h.sqlite") as store:
        store.execute("update used set share = 9e999")
    assert "not finite" in history("--history", str(tmp_path / "h.sqlite"), code=2)


def test_what_is_no_history_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "h.sqlite").write_text("a letter, not a database " * 50)
    told = history(report(tmp_path, 0, gradient=0.03), "--history", str(tmp_path / "h.sqlite"), code=2)
    assert (
        "h.sqlite is not a history that can be read and written (file is not a database): give another"
        in told
    )
    assert (tmp_path / "h.sqlite").read_text().startswith("a letter")
    with sqlite3.connect(tmp_path / "other.sqlite") as store:
        store.execute("create table run (x)")
    assert "is not a history" in history(
        report(tmp_path, 1, loss=0.1), "--history", str(tmp_path / "other.sqlite"), code=2
    )


def test_a_history_whose_tables_are_no_text_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "h.sqlite") as store:
        store.execute("create table aaaa (x)")
    store.close()
    damaged = (tmp_path / "h.sqlite").read_bytes().replace(b"TABLE aaaa", b"TABLE\xa0aaaa")
    (tmp_path / "h.sqlite").write_bytes(damaged)
    told = history(report(tmp_path, 0, loss=0.1), "--history", str(tmp_path / "h.sqlite"), code=2)
    assert "h.sqlite is not a history that can be read and written (UnicodeDecodeError: " in told
    assert (tmp_path / "h.sqlite").read_bytes() == damaged
