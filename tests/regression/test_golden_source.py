"""A golden case as a source of `regress compare`: dumps of any layout beside it, counted and cut as they are."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from regress.cli import main
from regress.compare.dumps.comparison import compare_dumps
from regress.compare.quantities import NEW
from regress.compare.verdicts.verdict import Status
from regress.dump.dump_files import write_atomically
from regress.dump.dump_manifest import Entry, Manifest, write_manifest
from regress.dump.dump_reader import DumpReader
from regress.dump.formats import FORMATS
from regress.dump.record import Record
from regress.golden.case_update import commit
from regress.golden.golden_directory import GoldenStore
from regress.replay.case_run import replay
from regress.replay.command_replays import spelled_out, variant_table
from regress.replay.variant import Precision

GOLDEN = Path(__file__).parents[2] / "golden"
Change = Callable[[Record], Record | None]


def recorded(
    case: str, variant: str, folder: Path, precision: Precision = Precision.FLOAT64, **rest: Any
) -> Path:
    table = variant_table()
    chosen = (table | spelled_out(variant, table))[variant]
    return Path(str(replay(GoldenStore(GOLDEN).case(case), chosen, precision, folder, **rest).folder))


def rewritten(dump: Path, folder: Path, change: Change, config: dict[str, Any] | None = None) -> Path:
    """A complete dump of what a change makes of the records of another one."""
    reader = DumpReader(dump)
    encode, entries = FORMATS[reader.manifest.format].encode, {}
    for name in reader.names():
        record = change(reader.read(name))
        if record is not None:
            name = f"{record.type}/{record.where.stem}.safetensors"
            entries[name] = Entry(record.type, record.where, write_atomically(folder / name, encode(record)))
    told = reader.manifest.provenance
    told = told if config is None else replace(told, config=config)
    write_manifest(folder, Manifest(told, reader.manifest.format, entries))
    return folder


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, arguments), "--golden-dir", str(GOLDEN)])


@pytest.mark.parametrize(
    ("case", "variant", "precision"),
    [
        ("dapo", "mbs4", Precision.FLOAT64),
        ("moe", "packed-dynamic", Precision.FLOAT32),
        *(
            pytest.param(case, "mbs4", precision, marks=pytest.mark.extended)
            for case in ("dense", "gpt2", "tied", "moe", "tools", "dapo", "dr_grpo", "gspo", "cispo")
            for precision in (Precision.FLOAT32, Precision.BFLOAT16)
        ),
        *(
            pytest.param("dense", variant, Precision.FLOAT64, marks=pytest.mark.extended)
            for variant in ("tp2-sp", "pp2-1f1b-packed-mbs3", "cp2-zigzag-packed", "fsdp2")
        ),
        pytest.param("tied", "fsdp2", Precision.MIXED, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_a_healthy_dump_is_equal(case: str, variant: str, precision: Precision, tmp_path: Path) -> None:
    dump = recorded(case, variant, tmp_path, precision)
    found = compare_dumps(f"golden:{GOLDEN / case}", str(dump))
    said = "token_gradient was not compared", "lie at a bound of the clip range, on the other side of it"
    notes = [note for note in found.notes if not any(words in note for words in said)]
    assert (found.failed, found.problems, notes, found.exit_code) == ([], [], [], 0)
    recordings = GoldenStore(GOLDEN).case(case)
    quantities = {q for where in recordings.wheres() for q in recordings.quantities(where)}
    assert {verdict.quantity for verdict in found.verdicts} >= quantities
    bases = [v for v in found.verdicts if v.quantity == "gradient"]
    measured = f"golden case {case}", "ill-conditioned: rounding moves it"
    assert all(any(words in verdict.reason for words in measured) for verdict in bases)


def test_steps_may_be_counted_otherwise_and_have_no_updates(tmp_path: Path) -> None:
    """A trainer that counts optimizer steps, from 1."""

    def counted(record: Record) -> Record | None:
        if record.type == "trajectory":
            return None
        return replace(record, step=1 + (record.update or 0), update=None)

    dump = rewritten(
        recorded("dapo", "mbs4", tmp_path / "run"), tmp_path / "counted", counted, {"capture": {"x": 1}}
    )
    found = compare_dumps(f"golden:{GOLDEN / 'dapo'}", str(dump))
    assert (found.failed, found.problems, found.exit_code) == ([], [], 0)
    assert found.notes[0].startswith(
        "steps are counted otherwise than in dapo, so the actual step 1 with step 0 "
    )
    assert {verdict.place.step for verdict in found.verdicts} == {1, 2, 3, 4}


def test_what_a_foreign_trainer_did_not_record_is_said(tmp_path: Path) -> None:
    def captured(record: Record) -> Record | None:
        return record if record.type in ("forward_data", "gradient", "batch_inputs") else None

    dump = rewritten(
        recorded("dense", "mbs4", tmp_path / "run", steps=1),
        tmp_path / "captured",
        captured,
        {"capture": {"x": 1}},
    )
    done = run("golden:dense", dump)
    assert done.exit_code == 0, done.output
    assert "note: step 1, step 2 of dense has no counterpart in the actual dump" in done.output
    for stage in ("is_loss_debug", "activations", "optimizer"):
        assert f"note: {stage} is in the golden dump only" in done.output


def test_a_missing_case_or_state_is_one_sentence(tmp_path: Path) -> None:
    for source, said in (
        ("golden:densse", "there is no case 'densse'"),
        ("golden:dense@no-such-commit", "golden/dense of no-such-commit (fatal: "),
        ("golden:dense@--output=x", "is not a name of a golden case"),
        ("golden:dense@pending", "@HEAD what was committed"),
    ):
        done = run(source, tmp_path)
        assert (done.exit_code, said in done.stderr, done.stderr.count("\n")) == (2, True, 1), done.stderr


def test_an_update_that_is_not_committed(tmp_path: Path) -> None:
    """``golden:CASE@REVISION`` is the case as git has it."""
    same = run("golden:dense", "golden:dense", "--only", "gradient*")
    assert same.exit_code == 0, same.output
    golden = tmp_path / "golden"
    shutil.copytree(GOLDEN / "dense", golden / "dense")
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for command in (("init", "-q"), ("add", "-A"), (*who, "commit", "-qm", "golden")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, timeout=60)
    case = GoldenStore(golden).case("dense")
    where = case.wheres()[0]
    truth = {where: {"kl": {"kl": case.truth_of(where, "kl")["kl"] * 2}}}
    commit(case.folder, truth=truth, provenance={"why": "a test"})
    found = compare_dumps(f"golden:{golden}/dense@HEAD", f"golden:{golden}/dense")
    assert {verdict.quantity for verdict in found.failed} == {"kl", "invariants"}  # the loss is not their sum
    changed = subprocess.run(
        ["git", "diff", "--stat"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert [line.split()[0] for line in changed.stdout.splitlines()[:-1]] == [
        "golden/dense/manifest.json",
        f"golden/dense/truth/{where}/kl.safetensors",
    ]
    lines = subprocess.run(["git", "diff", "-U0"], cwd=tmp_path, check=True, capture_output=True, text=True)
    moved = [line for line in lines.stdout.splitlines() if line.startswith('+     "kl"')]
    assert len(moved) == 1, "a line for the tensor that moved"
    subprocess.run(["git", *who, "commit", "-qam", "kl"], cwd=tmp_path, check=True, timeout=60)
    found = compare_dumps(f"golden:{golden}/dense@HEAD", f"golden:{golden}/dense")
    assert "kl" not in {verdict.quantity for verdict in found.failed}, "HEAD is a later commit now"


def test_a_loss_of_one_element_is_a_number(tmp_path: Path) -> None:
    """A trainer that keeps its loss as ``[1]`` has the same loss, beside a golden case as beside a dump."""

    def widened(record: Record) -> Record:
        if record.type != "loss":
            return record
        tensors = {name: array.reshape(1) for name, array in record.tensors.items() if array.size == 1}
        return replace(record, tensors={**record.tensors, **tensors})

    dump = recorded("dense", "mbs4", tmp_path / "run", steps=1)
    other = rewritten(dump, tmp_path / "other", widened)
    for golden in ("golden:dense", dump):
        done = run(golden, other, "--only", "loss", "--step", 0)
        assert done.exit_code == 0, done.output


def test_a_quantity_that_was_added_since_a_case_was_recorded_is_a_note(tmp_path: Path) -> None:
    """As in a replay; any other tensor that the case lacks is told as one too many."""

    def with_residual(record: Record) -> Record:
        if record.type != "token_gradient":
            return record
        residual = np.zeros_like(record.tensors["token_gradient"])
        return replace(record, tensors={**record.tensors, "token_residual": residual + 1e-9})

    dump = recorded("dense", "base", tmp_path)
    found = compare_dumps(
        f"golden:{GOLDEN / 'dense'}", str(rewritten(dump, tmp_path / "more", with_residual))
    )
    assert found.failed == []
    assert f"token_gradient/token_residual: {NEW}" in found.notes
    other = compare_dumps(str(dump), str(tmp_path / "more"))
    assert [(verdict.status, verdict.name) for verdict in other.failed] == [
        (Status.EXTRA, "token_residual")
    ] * 3
