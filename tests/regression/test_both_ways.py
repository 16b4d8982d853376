"""Neither of two dumps is known to be right: the cause is the same whichever of them comes first."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from regress.cli import main
from regress.dump.dump_files import write_atomically
from regress.dump.dump_manifest import Entry, Manifest, write_manifest
from regress.dump.dump_reader import DumpReader
from regress.dump.formats import FORMATS
from regress.dump.record import Record, replace_tensors
from regress.golden.golden_directory import GoldenStore
from regress.replay.case_run import replay
from regress.replay.variant import Precision
from regress.replay.variant_table import VARIANTS
from tests.faults.registry import installed
from tests.regression.test_compared_dumps import rewritten

GOLDEN = Path(__file__).parents[2] / "golden"
Dumps = Callable[..., Path]
Told = list[dict[str, Any]]

FORWARD = ("trajectory", "old_log_probs", "forward_data", "loss", "is_loss_debug")
"""Stages of a dump that has no outputs of modules."""


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dumps:
    """Record one step of a case under a variant and a fault, once."""
    known: dict[tuple[str, str, str | None], Path] = {}

    def record(case: str, variant: str, fault: str | None = None) -> Path:
        key = case, variant, fault
        if key not in known:
            folder = tmp_path_factory.mktemp("dump")
            given, around = GoldenStore(GOLDEN).case(case), partial(installed, fault)
            made = replay(
                given, VARIANTS[variant], Precision.FLOAT64, folder, steps=1, around=around if fault else None
            )
            known[key] = Path(str(made.folder))
        return known[key]

    return record


def causes(golden: Path, actual: Path, folder: Path) -> Told:
    """The causes that ``regress compare`` names of two dumps that differ."""
    told = folder / "told.json"
    found = CliRunner(catch_exceptions=False).invoke(
        main, ["compare", str(golden), str(actual), "--json", str(told)]
    )
    assert found.exit_code == 1, found.output
    named: Told = json.loads(told.read_text())["diagnoses"]["compare"]
    assert named[0]["rule"] in found.output
    return named


def without_modules(dump: Path, folder: Path) -> Path:
    return rewritten(dump, folder, lambda record: record if record.type in FORWARD else None)


def test_samples_that_see_others_are_told_whichever_dump_has_them_in_one_row(
    dump: Dumps, tmp_path: Path
) -> None:
    right = without_modules(dump("dense", "base"), tmp_path / "right")
    leaks = without_modules(dump("dense", "varlen", "one_segment"), tmp_path / "leaks")
    forward, backward = causes(right, leaks, tmp_path), causes(leaks, right, tmp_path)
    assert (forward[0]["rule"], forward[0]["of"]) == ("packed-leak", "actual")
    assert (backward[0]["rule"], backward[0]["of"]) == ("packed-leak", "golden")


def test_a_shift_tells_of_neither_dump_which_one_is_wrong(dump: Dumps, tmp_path: Path) -> None:
    """Shift a loss mask where each microbatch holds one sample: a single token of each shows it."""

    def late(record: Record) -> Record | None:
        if record.type != "batch_inputs":
            return None
        mask = record.tensors["response_mask"]
        return replace_tensors(record, {"response_mask": mask & np.roll(mask, 1, axis=1)})

    whole = rewritten(
        dump("dense", "base"),
        tmp_path / "whole",
        lambda record: record if record.type == "batch_inputs" else None,
    )
    alone = rewritten(dump("dense", "mbs1"), tmp_path / "alone", late)
    for pair in ((whole, alone), (alone, whole)):
        (told,) = causes(*pair, tmp_path)
        assert (told["rule"], told["of"]) == ("mask-shifted", "actual")


def test_a_prompt_is_wrongly_trained_on_by_the_dump_that_does(dump: Dumps, tmp_path: Path) -> None:
    def of_ones(record: Record) -> Record:
        if record.type != "batch_inputs":
            return record
        return replace_tensors(record, {"response_mask": record.tensors["attention_mask"]})

    right = dump("dense", "mbs4")
    wrong = rewritten(right, tmp_path / "wrong", of_ones)
    for pair, of in (((right, wrong), "actual"), ((wrong, right), "golden")):
        told = causes(*pair, tmp_path)[0]
        assert (told["rule"], told["of"]) == ("prompt-tokens", of)


def test_tokens_that_a_fault_is_confined_to_tell_of_neither_dump_which_one_is_wrong(
    dump: Dumps, tmp_path: Path
) -> None:
    def dropped(record: Record) -> Record | None:
        if record.type != "is_loss_debug":
            return record if record.type in FORWARD else None
        kept = record.tensors["advantages"] >= 0
        return replace_tensors(record, {"policy_loss": record.tensors["policy_loss"] * kept})

    right = without_modules(dump("dense", "base"), tmp_path / "right")
    wrong = rewritten(dump("dense", "mbs1"), tmp_path / "wrong", dropped)
    for pair in ((right, wrong), (wrong, right)):
        assert {told["of"] for told in causes(*pair, tmp_path)} == {"actual"}


def test_dump_check_adds_up_the_advantages_of_the_groups_of_the_engine(dump: Dumps, tmp_path: Path) -> None:
    def moved(record: Record) -> Record:
        if record.type != "is_loss_debug":
            return record
        return replace_tensors(record, {"advantages": record.tensors["advantages"] + 0.5})

    base = dump("dense", "base")
    found = CliRunner().invoke(main, ["dump", "check", str(base)])
    assert found.exit_code == 0, found.output
    assert "advantages of a group" not in found.output

    found = CliRunner().invoke(main, ["dump", "check", str(rewritten(base, tmp_path / "moved", moved))])
    assert found.exit_code == 1, found.output
    assert "advantages of a group add up to 0: the sum over group" in found.output


def two_updates(dump: Path, folder: Path, *, own: bool = False, other: bool = False) -> Path:
    """A dump in which the rollouts of a step are trained on twice, the second time as a step of its own.

    Args:
        own: old log-probs of the second update are those of its own forward pass.
        other: those of the first are others than its own.
    """
    reader = DumpReader(dump)
    encode, entries = FORMATS[reader.manifest.format].encode, {}
    for step in (0, 1):
        for name in reader.names():
            record = replace(reader.read(name), step=step)
            if record.type not in ("trajectory", "forward_data", "is_loss_debug"):
                continue
            if "log_probs" in record.tensors:
                first = record.tensors["log_probs"]
                bent = 0.1 * np.cos(np.arange(first.size, dtype=first.dtype)).reshape(first.shape)
                changed = {"log_probs": first + step * bent}
                if record.type == "is_loss_debug":
                    changed["old_log_probs"] = changed["log_probs"] if own else first + other * bent
                record = replace_tensors(record, changed)
            name = f"{record.type}/{record.where.stem}{Path(name).suffix}"
            entries[name] = Entry(record.type, record.where, write_atomically(folder / name, encode(record)))
    write_manifest(folder, Manifest(reader.manifest.provenance, reader.manifest.format, entries))
    return folder


def test_old_log_probs_of_a_second_update_are_not_its_own_and_those_of_a_first_may_be(
    dump: Dumps, tmp_path: Path
) -> None:
    base = dump("dense", "base")
    right, own, other = (
        two_updates(base, tmp_path / "right"),
        two_updates(base, tmp_path / "own", own=True),
        two_updates(base, tmp_path / "other", other=True),
    )
    forward, backward = causes(right, own, tmp_path)[0], causes(own, right, tmp_path)[0]
    assert (forward["rule"], forward["of"]) == ("old-is-current", "actual")
    assert (backward["rule"], backward["of"]) == ("old-is-current", "golden")
    for pair in ((right, other), (other, right)):
        assert "old-is-current" not in {one["rule"] for one in causes(*pair, tmp_path)}


FAULTS = (
    ("old_is_current", "dapo", "mbs4", "old-is-current"),
    ("ratio_not_clipped", "dense", "mbs4", "clip-left-out"),
    ("columns_as_positions", "gpt2", "packed-dynamic", "position-columns"),
    ("positions_ignored", "gpt2", "packed-dynamic", "positions-not-passed"),
    ("causal_only", "dense", "packed-mbs3", "packed-leak"),
    ("targets_one_early", "dense", "mbs4", "targets-off-by-one"),
    ("kl_direction_reversed", "dense", "mbs4", "kl-direction"),
    ("clip_sides_swapped", "dapo", "mbs4", "clip-sides"),
    ("ratio_inverted", "dense", "mbs4", "ratio-inverted"),
    ("loss_divided_by_microbatches", "dense", "mbs4", "token-gradient-of-microbatches"),
    ("last_microbatch_left_out", "dense", "mbs4", "batch-left-out"),
    ("tokens_behind_the_first_end_token_masked", "tools", "packed-dynamic", "loss-mask"),
    ("stream_of_the_batch", "rollout", "base", "other-rollouts"),
    ("update_made_twice", "dense", "mbs4", "step-counter"),
    ("last_layer_not_in_the_optimizer", "dense", "mbs4", "step-counter"),
    ("lone_sample_without_advantage", "trl", "base", "advantage-groups"),
)
DEFAULT = ("last_microbatch_left_out",)


@pytest.mark.parametrize(
    ("fault", "case", "variant", "rule"),
    [pytest.param(*row, marks=[] if row[0] in DEFAULT else pytest.mark.extended) for row in FAULTS],
)
def test_a_fault_has_one_cause_in_both_directions(
    dump: Dumps, tmp_path: Path, fault: str, case: str, variant: str, rule: str
) -> None:
    right, wrong = dump(case, variant), dump(case, variant, fault)
    forward, backward = causes(right, wrong, tmp_path)[0], causes(wrong, right, tmp_path)[0]
    assert (forward["rule"], backward["rule"]) == (rule, rule)
    sides = {forward["of"], backward["of"]}
    assert sides == {"golden", "actual"} or sides == {"actual"}, "both directions name one dump"


def test_tokens_that_one_dump_lacks_are_left_out_there_or_lost(dump: Dumps, tmp_path: Path) -> None:
    right = dump("dense", "mbs4")
    left_out = dump("dense", "mbs4", "last_microbatch_left_out")
    assert causes(right, left_out, tmp_path)[0]["of"] == "actual"
    assert causes(left_out, right, tmp_path)[0]["of"] == "golden"

    def thinned(record: Record) -> Record | None:
        return None if record.type == "forward_data" and record.where.micro == 1 else record

    lost = rewritten(right, tmp_path / "lost", thinned)
    for pair, of in (((right, lost), "actual"), ((lost, right), "golden")):
        told = causes(*pair, tmp_path)[0]
        assert (told["rule"], told["of"]) == ("records-lost", of)
        assert f"the {of} dump lacks forward_data of step 0, rank 0, microbatch 1" in str(told["evidence"])


@pytest.mark.extended
@pytest.mark.parametrize(
    ("fault", "rule"),
    [("update_made_twice", "update-made-twice"), ("last_layer_not_in_the_optimizer", "no-update")],
)
def test_numbers_of_updates_that_differ_are_explained_where_one_of_them_is_that_of_a_first_update(
    dump: Dumps, tmp_path: Path, fault: str, rule: str
) -> None:
    right, wrong = dump("dense", "mbs4"), dump("dense", "mbs4", fault)
    reader = DumpReader(right)
    (name,) = reader.names("optimizer")
    last = next(float(v) for key, v in reader.read(name).tensors.items() if key.endswith("/step")) - 1

    def fresh(record: Record) -> Record:
        counts = {key: value - last for key, value in record.tensors.items() if key.endswith("/step")}
        return replace_tensors(record, counts) if record.type == "optimizer" else record

    pair = rewritten(right, tmp_path / "right", fresh), rewritten(wrong, tmp_path / "wrong", fresh)
    forward, backward = causes(*pair, tmp_path)[0], causes(*pair[::-1], tmp_path)[0]
    assert (forward["rule"], forward["of"]) == (rule, "actual")
    assert (backward["rule"], backward["of"]) == (rule, "golden")
