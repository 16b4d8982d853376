"""Copies of dumps: bit by bit as they are, or with hashes in place of ids, texts and names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from regress import Trajectory
from regress.cli import main
from regress.dump.bitwise_difference import compare_bitwise
from regress.dump.dump_manifest import Provenance
from regress.dump.dump_reader import DumpReader
from regress.dump.record import Record
from regress.dump.recorder import Recorder
from regress.dump.trajectory import from_record, to_record

SECRETS = ("acme", "Zanzibar", "secret_gate", "patient-7")
IDS = np.array([[7001, 7002, 7001, 0]])


def recorded(folder: Path, shift: float = 0.0) -> Path:
    """Record one step of a trainer whose names, ids and texts are its own."""
    provenance = Provenance(
        config={"model": {"path": "/home/acme/Zanzibar"}, "algorithm": {"loss": "ppo_clip"}},
        tokenizer={"fingerprint": "Zanzibar"},
    )
    samples: Any = {"samples": [["patient-7", 0]]}
    one = Trajectory(
        "patient-7",
        0,
        [7001, 7002, 7001],
        [0, 1, 1],
        1.0,
        1,
        prompt=[{"role": "user", "content": "Zanzibar"}],
        response="Zanzibar?",
        finish_reason="stop",
        extra={"owner_acme": "acme"},
        rewards={"acme_reward": 1.0},
    )
    name = "model.layers.0.secret_gate.weight"
    records = [
        to_record([one], 0, None),
        Record(
            "batch_inputs",
            0,
            {"input_ids": IDS, "position_ids": np.arange(4)[None]},
            samples,
            rank=0,
            micro=0,
        ),
        Record(
            "gradient", 0, {name: np.ones((2, 3), np.float32) + np.float32(shift)}, {"grad_norm": 1.0}, rank=0
        ),
        Record(
            "optimizer",
            0,
            {f"{name}/exp_avg": np.ones(3, np.float32)},
            {"learning_rates": {name: 0.1, "acme.bias": 0.2}, "optimizer_type": "torch.optim.adamw.AdamW"},
            rank=0,
        ),
    ]
    recorder = Recorder(folder, options={record.type: True for record in records}, provenance=provenance)
    for record in records:
        recorder.put(record)
    recorder.close()
    return folder


def export(*arguments: str | Path) -> str:
    done = CliRunner().invoke(main, ["dump", "export", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_plain_copy_has_the_same_bits_in_any_format(tmp_path: Path) -> None:
    source = recorded(tmp_path / "a")
    assert "4 records: " in export(source, tmp_path / "b")
    assert not compare_bitwise(str(source), str(tmp_path / "b")).differences
    export(source, tmp_path / "c", "--format", "jsonl")
    export(tmp_path / "c", tmp_path / "d", "--format", "safetensors")
    assert not compare_bitwise(str(source), str(tmp_path / "d")).differences


def test_nothing_that_tells_whose_it_is_stays(tmp_path: Path) -> None:
    export(recorded(tmp_path / "a"), tmp_path / "b", "--redact")
    for path in (tmp_path / "b").rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert not [secret for secret in SECRETS if secret.encode() in data or secret in path.name], path
    found = {record.type: record for record in DumpReader(tmp_path / "b")}
    ids = found["batch_inputs"].tensors["input_ids"]
    assert ids[0, 0] == ids[0, 2] != ids[0, 1]
    assert ids[0, 3] == 0
    assert not set(ids.ravel().tolist()) & {7001, 7002}
    assert found["batch_inputs"].tensors["position_ids"].tolist() == [[0, 1, 2, 3]]
    (one,) = from_record(found["trajectory"])
    assert one.tokens == ids[0, :3].tolist()
    assert (one.reward, one.loss_mask, one.finish_reason) == (1.0, [0, 1, 1], "stop")
    assert [[one.group_id, 0]] == found["batch_inputs"].meta["samples"]
    (name,) = found["gradient"].tensors
    assert name.startswith("model.layers.0.n")
    assert name.endswith(".weight")
    assert [*found["optimizer"].tensors] == [f"{name}/exp_avg"]
    rates: Any = found["optimizer"].meta["learning_rates"]
    assert len(rates) == 2
    assert found["optimizer"].meta == {
        "learning_rates": {name: 0.1, **{key: 0.2 for key in rates if key != name}},
        "optimizer_type": "torch.optim.adamw.AdamW",
    }
    assert DumpReader(tmp_path / "b").config["algorithm"] == {"loss": "ppo_clip"}


def test_dumps_of_one_key_compare_as_the_originals_do(tmp_path: Path) -> None:
    for name, shift in (("a", 0.0), ("b", 0.5)):
        export(recorded(tmp_path / name, shift), tmp_path / f"{name}r", "--redact", "--key", "ours")
    outputs = []
    for sides in (("a", "b"), ("ar", "br"), ("ar", "ar")):
        done = CliRunner().invoke(main, ["compare", *(str(tmp_path / side) for side in sides)])
        outputs.append((done.exit_code, done.output.count("drift: gradient")))
    assert outputs == [(1, 1), (1, 1), (0, 0)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a", "a"], "a is the dump itself: give another folder"),
        (["a", "b", "--key", "k"], "--key is for hashes, which only --redact makes: give both"),
        (["nowhere", "b"], "nowhere does not exist: give the folder of a dump"),
    ],
)
def test_what_cannot_be_copied_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded(tmp_path / "a")
    done = CliRunner().invoke(main, ["dump", "export", *arguments])
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert not (tmp_path / "b").exists()


def test_a_damaged_dump_is_not_copied(tmp_path: Path) -> None:
    source = recorded(tmp_path / "a")
    (file,) = (source / "gradient").iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    done = CliRunner().invoke(main, ["dump", "export", str(source), str(tmp_path / "b"), "--redact"])
    assert done.exit_code == 2
    assert "do not match the size and hash" in done.output
    assert not (tmp_path / "b" / "manifest.json").exists()
