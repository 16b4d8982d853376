"""One model for all reports: what it holds, and its files."""

from __future__ import annotations

import json
import math
import random
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import regress.report
from regress.compare.verdicts.verdict import Status, Verdict, Worst
from regress.dump.canonical_json import loads
from regress.dump.coordinates import Place
from regress.errors import DumpError
from regress.report.report_files import write_report
from regress.report.report_model import Report
from regress.report.token_values import TokenTable, TokenValues
from regress.report.verdict_entries import Call


def call(quantity: str, multiple: float, *, micro: int = 0, where: str = "dense/packed") -> Call:
    status = Status.DRIFT if multiple > 1 else Status.OK
    worst = Worst((0, 3), "sample 0/1, position 3", -1.5, math.nan, math.inf, None)
    verdict = Verdict(
        *(status, quantity, quantity, Place(0, None, 0, micro), "<b>not</b> alike" if multiple > 1 else ""),
        worst=worst if multiple > 1 else None,
        multiple=multiple,
        max_error=multiple * 1e-12,
        tolerance=1e-12,
        count=10,
    )
    return Call(where, "float64", verdict, {"0": multiple}, "test_it.py::test_it")


CALLS = [
    call("gradient", 0.5),
    call("log_probs", 0.01, micro=10),
    call("log_probs", 0.25, micro=2),
    call("batch_inputs", 0.0),
    call("log_probs", math.inf, where="dense/tp2"),
]
TOKENS = TokenTable(
    *("dense/tp2", Place(0), ("g/0",), (3,), (5, 6, 7), (False, True, True)),
    values=[TokenValues("log_probs", (None, -1.0, -2.0), (None, -1.0, math.nan), 1e-6)],
    text=("a", "<i>", "c"),
)


@settings(deadline=None)
@given(st.sampled_from(CALLS))
def test_a_call_survives_json(found: Call) -> None:
    text = json.dumps(found.to_json())
    assert json.dumps(Call.from_json(json.loads(text)).to_json()) == text


def test_tokens_survive_json() -> None:
    text = json.dumps(TOKENS.to_json())
    assert json.dumps(TokenTable.from_json(json.loads(text)).to_json()) == text


@pytest.mark.parametrize(
    ("report", "code", "says"),
    [
        (Report("x", CALLS[:4], tensors=9), 0, "4 checks of 9 tensors: all within tolerance"),
        (Report("x", CALLS), 1, "5 checks: 1 failed in dense/tp2"),
        (
            Report("x", CALLS[:1], {"dense/cp2": "no"}),
            2,
            "1 check: all within tolerance; 1 could not be judged",
        ),
        (Report("x"), 2, "nothing was compared"),
        (
            Report("x", [call("kl", 2.0, where=name) for name in "abcd"]),
            1,
            "4 checks: 4 failed in a, b, c and 1 more",
        ),
    ],
)
def test_the_summary(report: Report, code: int, says: str) -> None:
    assert (report.exit_code, report.summary) == (code, says)


def test_the_json_is_strict_and_restores_every_verdict(tmp_path: Path) -> None:
    def refuse(text: str) -> None:
        raise AssertionError(text)

    report = Report("x", CALLS, tokens=[TOKENS], sections={"step": 3, "sections": []})
    write_report(tmp_path, report)
    text = (tmp_path / "report.json").read_text()
    tree = json.loads(text, parse_constant=refuse)
    assert (tree["schema_version"], tree["step"], tree["exit_code"]) == (3, 3, 1)
    assert [row["headroom"] for row in tree["headroom"]] == [None, 4.0, 2.0]
    assert tree["headroom"][1]["closest"]["place"] == "step0/rank0/micro2"
    assert [row["anchor"] for row in tree["calls"]][-1] == "dense/tp2/step0/rank0/micro0/log_probs"
    found = {repr(Call.from_json(row)) for row in loads(text)["calls"]}
    assert found == {repr(one._replace(layers=dict(one.layers))) for one in CALLS}


def test_the_frame_of_a_report_says_where() -> None:
    frame = Report("x", CALLS).to_frame()
    assert [*frame.columns[:5]] == ["where", "precision", "test", "status", "quantity"]
    assert frame["where"].tolist() == [call.where for call in CALLS]
    assert frame[frame.status != "ok"]["where"].tolist() == ["dense/tp2"]
    assert [*Report("x").to_frame().columns] == [*frame.columns]


SCHEMA = json.loads((Path(regress.report.__file__).parent / "report.schema.json").read_text())


@pytest.mark.parametrize(
    "report",
    [
        Report("x"),
        Report("x", CALLS, {"dense/cp2": "no"}, tokens=[TOKENS], environment={"numpy": "2"}, notes=["so"]),
        Report("x", error=DumpError("it is gone (a: b): copy it again").to_json()),
        Report("x", CALLS, sections={"step": 0, "num_ranks": 8, "sections": [{"section": "trajectories"}]}),
    ],
)
def test_the_json_is_what_the_schema_says(report: Report) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(report.to_json(), SCHEMA)
    jsonschema.validate(report.to_json(every=False), SCHEMA)


def test_the_schema_knows_every_field_and_refuses_others() -> None:
    described = SCHEMA["$defs"]["verdict"]["properties"]
    assert {spec.name for spec in fields(Verdict)} <= {*described}
    assert all("description" in entry or "anyOf" in entry for entry in described.values())
    tree = Report("x", CALLS).to_json()
    tree["calls"][0]["verdict"]["multipel"] = 1.0
    with pytest.raises(jsonschema.ValidationError, match="multipel"):
        jsonschema.validate(tree, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(Report("x", CALLS).to_json() | {"exit_code": 3}, SCHEMA)


def test_the_files_do_not_depend_on_who_came_first(tmp_path: Path) -> None:
    report = Report("x", CALLS, tokens=[TOKENS])
    written = write_report(tmp_path / "report", report)
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == sorted(p.name for p in written)
    before = [path.read_bytes() for path in written]
    mixed = random.Random(0).sample(CALLS, len(CALLS))
    assert [
        path.read_bytes() for path in write_report(tmp_path / "report", Report("x", mixed, tokens=[TOKENS]))
    ] == before
