"""Causes that `regress compare` tells of dumps with lost files and of single wrong values."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from regress.cli import main

Setup = Callable[..., Any]
ADVICE = ("debug.dump_options", "WEAVER_DEBUG_DUMP_OPTIONS")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])


def removed(folder: Path, pattern: str) -> Path:
    found = [*folder.glob(pattern)]
    assert found
    for path in found:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return folder


@pytest.mark.parametrize(
    ("pattern", "rule", "evidence"),
    [
        ("loss", "not-recorded", "coverage loss is missing"),
        ("forward_data", "records-lost", "lacks all records of forward_data"),
        ("*/*rank1*", "records-lost", "lacks all records of rank 1"),
        ("loss/*rank1_micro1*", "records-lost", "lacks loss of step 0, rank 1, microbatch 1"),
        ("forward_data/*rank0_micro1*", "records-lost", "lacks forward_data of step 0, rank 0, microbatch 1"),
        ("*/*rank1_micro0*", "records-lost", "lacks all records of step 0, rank 1, microbatch 0"),
    ],
)
def test_lost_files_are_the_cause(
    pattern: str, rule: str, evidence: str, nexrl: Setup, sampled: Setup
) -> None:
    golden = nexrl("sh", sampled(8), micros=2).self_hosted().folder
    weaver = removed(nexrl("wv", sampled(8), micros=2).weaver().folder, pattern)
    done = run("--self_hosted_dir", golden, "--weaver_dir", weaver, "--step", 0)
    assert done.exit_code == 1
    told = " ".join(done.output.split())
    assert f"(rule {rule};" in told
    assert "cause unknown" not in told
    assert evidence in told
    assert all(word in told for word in ADVICE)
    assert f"next: regress dump show {weaver}" in done.output


@pytest.mark.parametrize("record_type", ["trajectory", "old_log_probs"])
def test_a_lost_type_of_a_self_hosted_dump(record_type: str, nexrl: Setup) -> None:
    golden, actual = nexrl("golden").self_hosted().folder, nexrl("actual").self_hosted().folder
    for folders in ((golden, removed(actual, record_type)), (actual, golden)):
        done = run(*folders)
        assert done.exit_code == 1
        assert "(rule not-recorded;" in done.output
        assert ADVICE[0] in " ".join(done.output.split())


def test_other_samples_are_no_lost_files(nexrl: Setup, sampled: Setup) -> None:
    done = run(nexrl("golden").self_hosted().folder, nexrl("actual", sampled(6, seed=3)).self_hosted().folder)
    assert done.exit_code == 1
    assert "records-lost" not in done.output


def test_one_wrong_token_on_one_rank_is_not_a_rank_with_other_weights(nexrl: Setup, sampled: Setup) -> None:
    golden = nexrl("golden", sampled(8), micros=2).self_hosted()
    batches = {(rank, micro): rows for rank, micro, rows in golden.batches()}
    name = (batches[1, 0][0].group, batches[1, 0][0].run)
    changed = sampled(8)
    (sample,) = (one for one in changed if (one.group, one.run) == name)
    sample.values["log_probs"][sample.prompt] -= 0.05
    done = run(golden.folder, nexrl("actual", changed, micros=2).self_hosted().folder)
    assert done.exit_code == 1
    assert "weights-of-a-rank" not in done.output
    assert (
        "(rule no-activations;" in done.output
    )  # what they were computed from is not recorded, so not proven right
    assert "affected: only rank 1; only microbatch 0" in done.output
    assert "--only param" not in done.output
    assert "--only log_probs" in done.output


def test_a_whole_rank_that_is_off_is_told_without_a_claim_about_replicas(
    nexrl: Setup, sampled: Setup
) -> None:
    """Without a mesh nothing tells which ranks are replicas, but the place and the candidates are told."""
    golden = nexrl("golden", sampled(8), micros=2).self_hosted()
    on_rank = {(s.group, s.run) for rank, _, rows in golden.batches() if rank == 1 for s in rows}
    changed = sampled(8)
    for sample in changed:
        if (sample.group, sample.run) in on_rank:
            sample.values["log_probs"] *= 1.0 + 0.1 * sample.values["entropy"]
    done = run(golden.folder, nexrl("actual", changed, micros=2).self_hosted().folder)
    assert "the model or its weights, its mask or positions" in " ".join(done.output.split())
    assert "only rank 1; all 21 compared tokens there" in " ".join(done.output.split())
    assert "weights-of-a-rank" not in done.output
    assert "--only param" not in done.output  # neither dump has any
