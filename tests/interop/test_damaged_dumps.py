"""Dumps that were damaged or say what cannot be: one plain sentence, the right exit code, no silence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from regress.cli import main
from regress.dump.dump_files import write_atomically
from regress.dump.dump_manifest import Entry, Manifest, Provenance, write_manifest
from regress.dump.formats import FORMATS
from regress.dump.record import Record
from regress.layout import Segment, TokenLayout

COLUMNS = 6
Change = Callable[[Record], Record]


def record(record_type: str, rank: int, **tensors: Any) -> Record:
    """Two samples of this rank, a row each; their last four tokens count."""
    layout = TokenLayout((2, COLUMNS), tuple(Segment(i, 0, COLUMNS, i, 0) for i in range(2)))
    meta: dict[str, Any] = {"layout": layout.to_json(), "samples": [[f"g{rank}", 0], [f"g{rank}", 1]]}
    return Record(
        record_type,
        0,
        tensors,
        {} if record_type == "gradient" else meta,
        rank=rank,
        micro=_micro(record_type),
    )


def _micro(record_type: str) -> int | None:
    return None if record_type == "gradient" else 0


def dump(
    folder: Path,
    *,
    ranks: tuple[int, ...] = (0, 1),
    mesh: Any = None,
    config: Any = None,
    change: Change = lambda record: record,
) -> Path:
    """A complete dump of some of the ranks of a run on two."""
    entries: dict[str, Entry] = {}
    for rank in ranks:
        rng = np.random.default_rng(rank)
        mask = np.tile(np.arange(COLUMNS) >= 2, (2, 1)).astype(np.int64)
        values = np.where(mask, -rng.exponential(1, (2, COLUMNS)), 0.0)
        found = [
            record("forward_data", rank, log_probs=values, response_mask=mask),
            record("gradient", rank, weight=np.arange(4.0)),
        ]
        for one in map(change, found):
            name = f"{one.type}/{one.where.stem}.safetensors"
            stamp = write_atomically(folder / name, FORMATS["safetensors"].encode(one))
            entries[name] = Entry(one.type, one.where, stamp)
    told = Provenance(config=config or {}, mesh=mesh or {"world_size": 2, "dp": 2})
    write_manifest(folder, Manifest(told, "safetensors", entries))
    return folder


def run(*arguments: object) -> tuple[int, str]:
    """Exit code, and all that was said in one line."""
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.split())


def compare(golden: Path, actual: Path) -> tuple[int, str]:
    return run("compare", golden, actual, "--engine", "local")


def twice(one: Record) -> Record:
    """Name the same place of the tensors twice."""
    if one.type != "forward_data":
        return one
    meta: Any = json.loads(json.dumps(one.meta))
    meta["layout"]["segments"].append(meta["layout"]["segments"][0])
    meta["samples"].append(meta["samples"][0])
    return replace(one, meta=meta)


def with_nan(record_type: str, tensor: str) -> Change:
    def change(one: Record) -> Record:
        if one.type != record_type:
            return one
        values = one.tensors[tensor].copy()
        values.reshape(-1)[3] = np.nan
        return replace(one, tensors={**one.tensors, tensor: values})

    return change


def test_a_healthy_dump_is_equal_to_itself(tmp_path: Path) -> None:
    good = dump(tmp_path / "good")
    assert compare(good, good)[0] == 0
    assert run("dump", "check", good)[0] == 0


def test_segments_that_overlap_are_refused_and_named(tmp_path: Path) -> None:
    good, bad = dump(tmp_path / "good"), dump(tmp_path / "bad", change=twice)
    words = "has a segment of sample g0/0 over another segment, at row 0, column 0; record it again"
    for (code, said), expected in ((compare(good, bad), 1), (compare(bad, good), 2), (compare(bad, bad), 2)):
        assert code == expected
        assert words in said or "over another" in said
    code, said = run("dump", "check", bad)
    assert code == 1
    assert "coverage forward_data" in said


def test_a_rank_that_is_lost_in_both_dumps_is_no_difference(tmp_path: Path) -> None:
    good, bad = dump(tmp_path / "good"), dump(tmp_path / "bad", ranks=(0,))
    assert compare(good, bad)[0] == 1
    code, said = compare(bad, bad)
    assert code == 2
    assert "in both dumps rank 1 of 2 recorded nothing of this update" in said


def test_a_mesh_of_more_ranks_than_can_be_named(tmp_path: Path) -> None:
    bad = dump(tmp_path / "bad", mesh={"world_size": 10**9, "dp": 10**9})
    code, said = run("dump", "check", bad)
    assert code == 1
    assert "999999998 of 1000000000 ranks recorded nothing of this update" in said


def test_a_rank_outside_of_the_mesh_is_named(tmp_path: Path) -> None:
    code, said = run("dump", "check", dump(tmp_path / "bad", ranks=(0, 1, 2)))
    assert code == 1
    assert "rank 2 recorded, but the mesh in the manifest has the ranks 0 to 1" in said


@pytest.mark.parametrize("mesh", [{"dp": 0}, {"dp": "two"}, {"dp": True}])
def test_a_mesh_that_is_none(tmp_path: Path, mesh: Any) -> None:
    bad = dump(tmp_path / "bad", mesh=mesh)
    for code, said in (compare(bad, bad), run("dump", "check", bad)):
        assert code == 2
        assert f"its mesh has the extent dp={mesh['dp']!r}, which is not a number of ranks" in said


def test_a_configuration_of_somebody_else_has_no_sections(tmp_path: Path) -> None:
    config: Any = {
        "model": "gpt2",
        "algorithm": None,
        "parallel": 7,
        "debug": {"dump_options": [1]},
        "data": [],
    }
    other = dump(tmp_path / "other", config=config)
    assert compare(other, other)[0] == 0
    assert compare(dump(tmp_path / "good"), other)[0] == 0
    assert run("dump", "check", other)[0] == 0


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (with_nan("forward_data", "log_probs"), "log_probs"),
        (with_nan("gradient", "weight"), "gradient weight"),
    ],
)
def test_a_value_that_is_not_finite_is_found_without_a_golden(
    tmp_path: Path, change: Change, name: str
) -> None:
    code, said = run("dump", "check", dump(tmp_path / "bad", change=change))
    assert code == 1
    assert f"nonfinite: {name}" in said


def test_nan_beside_the_loss_tokens_is_nobody_s_business(tmp_path: Path) -> None:
    def beside(one: Record) -> Record:
        if one.type != "forward_data":
            return one
        values = np.where(one.tensors["response_mask"] > 0, one.tensors["log_probs"], np.nan)
        return replace(one, tensors={**one.tensors, "log_probs": values})

    assert run("dump", "check", dump(tmp_path / "bad", change=beside))[0] == 0


def test_a_bit_that_changed_later_is_found(tmp_path: Path) -> None:
    bad = dump(tmp_path / "bad")
    file = next((bad / "gradient").iterdir())
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    code, said = run("dump", "check", bad)
    assert code == 2
    assert "do not match the size and hash in manifest.json" in said


@pytest.mark.parametrize(
    ("text", "words"), [("null", "it is not a JSON object"), ("{}", "it lacks 'sha256'")]
)
def test_a_manifest_of_another_kind(tmp_path: Path, text: str, words: str) -> None:
    bad = dump(tmp_path / "bad")
    (bad / "manifest.json").write_text(text)
    code, said = compare(bad, bad)
    assert (code, words in said) == (2, True)


def test_a_checkpoint_beside_a_dump_has_no_samples_to_lack(tmp_path: Path) -> None:
    def parameters(one: Record) -> Record:
        return replace(one, type="param") if one.type == "gradient" else one

    whole = dump(tmp_path / "dump", change=parameters)
    weights = tmp_path / "weights.safetensors"
    save_file({"weight": np.arange(4.0)}, weights)
    for code, said in (compare(weights, whole), compare(whole, weights)):
        assert code == 0
        assert "forward_data is in the" in said


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    good = dump(tmp_path / "good")
    (tmp_path / "file").touch()
    code, said = run("compare", good, good, "--engine", "local", "--report", tmp_path / "file" / "below")
    assert code == 2
    assert "cannot be written (Not a directory)" in said


@pytest.mark.parametrize("path", ["a\0b", "a" * 300])
def test_a_path_that_no_file_can_have(tmp_path: Path, path: str) -> None:
    code, said = run("compare", path, dump(tmp_path / "good"))
    assert code == 2
    assert "error: " in said


@pytest.mark.parametrize("name", ["gradient/step_000000_rank0.safetensors", "manifest.json"])
def test_a_named_pipe_is_no_file_to_wait_for(tmp_path: Path, name: str) -> None:
    bad = dump(tmp_path / "bad")
    (bad / name).unlink()
    os.mkfifo(bad / name)
    for code, _ in (compare(bad, bad), run("dump", "check", bad), run("explain", bad)):
        assert code == 2


def emptied(record_type: str, *names: str) -> Change:
    """Fill tensors of a stage with zeros, all of them where none is named."""

    def change(one: Record) -> Record:
        if one.type != record_type:
            return one
        zeros = {name: np.zeros_like(one.tensors[name]) for name in names or one.tensors}
        return replace(one, tensors={**one.tensors, **zeros})

    return change


def weights(one: Record) -> Record:
    return replace(one, type="param") if one.type == "gradient" else one


def with_norm(one: Record) -> Record:
    return replace(one, meta={"grad_norm": 3.5}) if one.type == "gradient" else one


def with_entropy(value: float) -> Change:
    def change(one: Record) -> Record:
        if one.type != "forward_data":
            return one
        told = {"entropy": np.full((2, COLUMNS), value), "log_probs": np.zeros((2, COLUMNS))}
        return replace(one, tensors={**one.tensors, **told})

    return change


def after(*changes: Change) -> Change:
    def change(one: Record) -> Record:
        for own in changes:
            one = own(one)
        return one

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (emptied("forward_data", "log_probs"), "a log-prob is 0 only where the policy is certain"),
        (with_entropy(1.5), "a log-prob is 0 only where the policy is certain"),
        (after(with_norm, emptied("gradient")), "gradient: each of 8 values is 0, though grad_norm is 3.5"),
        (after(weights, emptied("param")), "param: each of 8 values is 0, which no trained model's are"),
    ],
)
def test_zeros_that_cannot_be_are_found_without_a_golden(tmp_path: Path, change: Change, words: str) -> None:
    code, said = run("dump", "check", dump(tmp_path / "bad", change=change))
    assert (code, words in said) == (1, True)


@pytest.mark.parametrize("change", [with_entropy(1e-3), emptied("gradient"), with_norm, weights])
def test_zeros_that_can_be_are_no_damage(tmp_path: Path, change: Change) -> None:
    """A certain policy, gradients of samples without advantages, and values that are none."""
    assert run("dump", "check", dump(tmp_path / "good", change=change))[0] == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_token_ids_that_contradict_each_other_are_found_without_a_golden(tmp_path: Path, rank: int) -> None:
    def named(wrong: int | None) -> Change:
        def change(one: Record) -> Record:
            ids = np.arange(2 * COLUMNS).reshape(2, COLUMNS)
            if one.type == "gradient":  # the inputs stand in for it
                return record("batch_inputs", one.rank or 0, input_ids=ids)
            ids = ids + (np.arange(COLUMNS) == 4) * (one.rank == wrong)
            return replace(one, tensors={**one.tensors, "input_ids": ids})

        return change

    assert run("dump", "check", dump(tmp_path / "good", change=named(None)))[0] == 0
    code, said = run("dump", "check", dump(tmp_path / "bad", change=named(rank)))
    assert code == 1
    assert "all records of a token name the same token id: the token id in forward_data" in said
    assert f"of rank {rank} microbatch 0 at sample g{rank}/0" in said


def test_token_gradients_without_a_grid_are_no_traceback(tmp_path: Path) -> None:
    def flat(one: Record) -> Record:
        if one.type != "forward_data":
            return one
        return replace(one, type="token_gradient", tensors={"token_gradient": np.ones(2 * COLUMNS)})

    code, said = run("explain", dump(tmp_path / "bad", ranks=(0,), mesh={"world_size": 1}, change=flat))
    assert code == 2
    assert "token_gradient of step_000000_rank0_micro0 has the shape (12,), not [rows, columns] of" in said


@pytest.mark.parametrize("shards", [-7, "x", [None]])
def test_shards_that_are_no_mapping_are_no_traceback_and_not_ignored(tmp_path: Path, shards: Any) -> None:
    def change(one: Record) -> Record:
        return replace(one, meta={"shards": shards}) if one.type == "gradient" else one

    good, bad = dump(tmp_path / "good"), dump(tmp_path / "bad", change=change)
    for code, said in (compare(good, bad), run("dump", "check", bad)):
        assert code == 1
        assert "weight in gradient of rank 0 has no usable shard layout" in said
