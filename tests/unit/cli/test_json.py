"""Check the JSON that programs read: it follows its schema, on refusals too, and holds what failed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from safetensors.numpy import save_file

import regress
from tests.unit.cli.conftest import invoke, sentence_of, succeeded

HERE = Path(regress.__file__).parent
GOLDEN = HERE.parent / "golden"
SCHEMAS = {
    "compare": HERE / "report/report.schema.json",
    "oracle": HERE / "report/report.schema.json",
    "check": HERE / "report/report.schema.json",
    "objective": HERE / "check/check.schema.json",
    "explain": HERE / "explain/explain.schema.json",
    "show": HERE / "dump/show.schema.json",
    "doctor": HERE / "doctor/doctor.schema.json",
    "history": HERE / "report/history.schema.json",
    "golden": HERE / "golden/golden.schema.json",
    "presets": HERE / "grpo/objective.schema.json",
    "variants": HERE / "replay/variants.schema.json",
    "systems": HERE / "systems/systems.schema.json",
}


def checked(path: Path | str, command: str) -> dict[str, Any]:
    """Read a file as the schema of a command says."""
    schema = json.loads(SCHEMAS[command].read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    tree: dict[str, Any] = json.loads(Path(path).read_text())
    jsonschema.validate(tree, schema)
    return tree


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_json_holds_what_failed_and_json_calls_everything(here: Path) -> None:
    tensors = {f"layers.{n}.weight": np.full((4, 4), float(n), np.float32) for n in range(200)}
    for name in ("golden", "actual"):
        (here / name).mkdir()
        save_file(tensors, here / name / "model.safetensors")
        tensors["layers.7.weight"] = tensors["layers.7.weight"] + 1
    done = invoke("compare", "golden", "actual", "--json", "failed.json", "--json-calls", "all.json")
    assert done.exit_code == 1, done.output
    failed, every = checked("failed.json", "compare"), checked("all.json", "compare")
    assert [call["verdict"]["name"] for call in failed["calls"]] == ["layers.7.weight"]
    assert failed["checks"] == every["checks"] == len(every["calls"]) == 200
    assert failed["divergences"] == every["divergences"] != {}
    assert failed["summary"] == every["summary"]
    assert failed["exit_code"] == 1
    assert Path("failed.json").stat().st_size < 6000 < Path("all.json").stat().st_size / 10


@pytest.mark.parametrize(
    "command",
    [
        ("golden", "list", "--json"),
        ("golden", "show", "dense", "log_probs", "--json"),
        ("golden", "verify", "--json"),
        ("doctor", "--json", "."),
        ("history", "report.json", "--json", "-"),
    ],
    ids=" ".join,
)
def test_answers_on_standard_output_follow_their_schema(command: tuple[str, ...], here: Path) -> None:
    row = {"quantity": "loss", "precision": "float32", "failed": 0, "closest": {"multiple": 0.5}}
    (here / "report.json").write_text(json.dumps({"title": "a run", "headroom": [row]}))
    (here / "golden").mkdir()
    shutil.copytree(GOLDEN / "dense", here / "golden" / "dense")
    (here / "metrics.jsonl").write_text("{}")  # which is not a row of one
    damaged = here / "golden" / "damaged"
    damaged.mkdir()
    (damaged / "case.yaml").write_text("reason: [")
    done = invoke(*command)
    assert done.exit_code in (0, 1), done.output
    (here / "out.json").write_text(done.stdout)
    assert checked("out.json", command[0])


@pytest.mark.parametrize(
    "command",
    [
        ("compare", "nowhere", "nowhere"),
        ("compare", "nowhere", "nowhere", "--step", "later"),
        ("oracle", "nowhere"),
        ("explain", "nowhere"),
        ("explain", "golden:dense", "--preset", "grop"),
        ("check", "no.such:loss", "--as", "grpo"),
        ("dump", "check", "nowhere"),
        ("dump", "show", "nowhere"),
    ],
    ids=" ".join,
)
def test_a_refusal_is_json_too(command: tuple[str, ...], here: Path) -> None:
    result = invoke(*command, "--json", "out.json")
    assert result.exit_code == 2
    name = {"dump": command[1], "check": "objective"}.get(command[0], command[0])
    tree = checked("out.json", name)
    assert tree["exit_code"] == 2
    error = tree["error"]
    assert error["message"] == sentence_of(result)
    assert error["rule"]
    assert error["remedy"]
    assert error["type"].endswith("Error")


def test_a_check_of_a_dump_is_a_report(here: Path, request: pytest.FixtureRequest) -> None:
    case = f"golden:{request.config.rootpath / 'golden/dr_grpo'}"
    succeeded(invoke("dump", "check", case, "--json", "failed.json", "--json-calls", "all.json"))
    tree, every = checked("failed.json", "check"), checked("all.json", "check")
    assert (tree["exit_code"], tree["failed"], tree["calls"]) == (0, 0, [])
    assert tree["title"].endswith("none broken")
    assert {call["verdict"]["name"] for call in every["calls"]} >= {"masks", "log_probs", "loss"}


def test_what_is_shown_of_a_dump_is_json(case: Any) -> None:
    dump = case.recording()
    succeeded(invoke("dump", "show", str(dump), "--json", "dump.json"))
    whole = checked("dump.json", "show")
    assert whole["state"].startswith("complete: 4 safetensors files")
    assert "torch" in whole["settings"]
    assert {row["type"]: row["files"] for row in whole["types"]} == {"trajectory": 2, "loss": 2}
    (loss, *_) = (dump / "loss").glob("step_000000*")
    succeeded(invoke("dump", "show", str(loss), "--json", "loss.json"))
    (record,) = checked("loss.json", "show")["records"]
    assert (record["type"], record["step"], record["samples"]) == ("loss", 0, [])
    assert "pg_loss" in {row["tensor"] for row in record["tensors"]}
    rollouts = str(dump / "trajectory" / "step_000001.safetensors")
    succeeded(invoke("dump", "show", rollouts, "--json", "rollouts.json"))
    (record,) = checked("rollouts.json", "show")["records"]
    assert {row["run_id"] for row in record["samples"]} == {0, 1}
    printed = succeeded(invoke("dump", "show", str(dump), "--json", "-"))
    assert json.loads(printed.stdout) == whole
    assert "trajectory" in printed.stderr


def test_an_explanation_is_what_its_schema_says(here: Path, request: pytest.FixtureRequest) -> None:
    case = str(request.config.rootpath / "golden/dr_grpo")
    succeeded(invoke("explain", case, "--json", "told.json"))
    tree = checked("told.json", "explain")
    assert (tree["exit_code"], tree["error"], tree["preset"]) == (0, None, None)
    assert [one["step"] for one in tree["updates"]] == [0, 1, 2]
    assert {"mask", "aggregation", "preset"} <= set(tree["updates"][0]["shown"])


@pytest.mark.parametrize(
    "args", [(), ("trl:cispo",), ("--fields",), ("--parts",)], ids=["presets", "preset", "fields", "parts"]
)
def test_objectives_are_data(here: Path, args: tuple[str, ...]) -> None:
    (here / "found.json").write_text(succeeded(invoke("objective", *args, "--json")).stdout)
    found, text = checked("found.json", "presets"), succeeded(invoke("objective", *args)).stdout
    if args == ("trl:cispo",):
        told = {f"{'*' if row['set'] else ' '} {name}: " for name, row in found["fields"].items()}
        assert all(any(line.startswith(start) for start in told) for line in text.splitlines()[1:])
        assert found["fields"]["loss"] == {"value": "cispo", "set": True}
    else:
        (rows,) = (rows for key, rows in found.items() if key != "schema_version")
        assert len(rows) == len(text.splitlines())


def test_variants_and_systems_are_data(here: Path) -> None:
    succeeded(invoke("variants", "tp2*", "--json", "variants.json"))
    assert checked("variants.json", "variants")["variants"]["tp2"]["mesh"] == {"tp": 2}
    succeeded(invoke("variants", "--json", "all.json"))
    assert len(checked("all.json", "variants")["variants"]) > 100
    text = succeeded(invoke("systems", "list", "trainer", "--json", "systems.json")).stdout
    cells = checked("systems.json", "systems")["systems"]["trainer"]["cells"]
    assert len(cells) == len(text.splitlines()) - 1
