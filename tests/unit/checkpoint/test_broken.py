"""A checkpoint is foreign input: what is missing, damaged or forged is refused in one sentence, and nothing is lost."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regress.engine.checkpoint.checkpoint_tensors import read_tensors, write_tensors
from regress.errors import CheckpointError, RegressError
from tests.unit.checkpoint.conftest import Case


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (
        lambda c: (c / "manifest.json").unlink(),
        "is not a complete checkpoint: it has no manifest",
    ),
    "torn manifest": (lambda c: _truncate(c / "manifest.json"), "manifest.json is damaged"),
    "manifest of a dump": (
        lambda c: (c / "manifest.json").write_text('{"kind": "dump", "schema_version": 1, "sha256": ""}'),
        "it is not that of a checkpoint",
    ),
    "named pipe": (lambda c: _pipe(c / "manifest.json"), "it is not a regular file"),
    "no weights": (lambda c: (c / "model.safetensors").unlink(), "lacks model.safetensors"),
    "half of the weights": (lambda c: _truncate(c / "model.safetensors"), "do not match the size and hash"),
    "another bit": (lambda c: _flip(c / "model.safetensors"), "do not match the size and hash"),
    "no state": (lambda c: (c / "regress_state.json").unlink(), "lacks regress_state.json"),
    "half of the optimizer": (
        lambda c: _truncate(c / "optimizer.safetensors"),
        "do not match the size and hash",
    ),
    "a stranger": (
        lambda c: (c / "adapter_config.json").write_text("{}"),
        "has adapter_config.json, which is not of this checkpoint; move it away",
    ),
    "nothing": (
        lambda c: c.rename(c.with_name("gone")),
        "is not a folder, but a checkpoint is one; check the path",
    ),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(case: Case, name: str) -> None:
    damage, says = DAMAGES[name]
    before = (case.folder / "metrics.jsonl").read_bytes()
    damage(case.checkpoint())
    with pytest.raises(CheckpointError) as caught:
        case.resume()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert (case.folder / "metrics.jsonl").read_bytes() == before, "a refused run leaves the record alone"


FORGERIES: dict[str, tuple[Callable[[Case], object], str]] = {
    "another release": (
        lambda c: c.change_state(lambda tree: tree.update(schema_version=99)),
        "schema version 99, this release reads 2",
    ),
    "no scheduler": (
        lambda c: c.change_state(lambda tree: tree.pop("scheduler")),
        "regress_state.json is damaged",
    ),
    "steps that do not count": (
        lambda c: c.change_state(lambda tree: tree.update(step="many")),
        "step is 'many' and no number that counts",
    ),
    "updates without outcomes": (
        lambda c: c.change_state(lambda tree: tree.update(updates_in_step=2)),
        "tells of 2 updates in a step and has outcomes of 0",
    ),
    "no optimizer": (
        lambda c: ((c.checkpoint() / "optimizer.safetensors").unlink(), c.seal()),
        "holds no state of the optimizer",
    ),
    "another tokenizer": (
        lambda c: c.change_state(lambda tree: tree["parts"].update(tokenizer_fingerprint="x")),
        "was written with another tokenizer",
    ),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_state_is_refused(case: Case, name: str) -> None:
    forge, says = FORGERIES[name]
    forge(case)
    with pytest.raises(RegressError) as caught:
        case.resume()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_list_of_files_that_leads_out_is_refused(case: Case) -> None:
    from regress.dump.dump_files import Stamp
    from regress.engine.checkpoint.checkpoint_manifest import read_manifest, write_manifest

    write_manifest(
        case.checkpoint(), {**read_manifest(case.checkpoint()), "../../secret.json": Stamp(1, "0" * 64)}
    )
    with pytest.raises(CheckpointError, match="lies outside of the checkpoint"):
        case.resume()


class _Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("exploded"),))


def test_weights_in_a_pickle_are_not_read(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (case.checkpoint() / "model.safetensors").unlink()
    (case.checkpoint() / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb()))
    case.seal()
    with pytest.raises(CheckpointError, match="holds no safetensors file, and other weights are not read"):
        case.resume()
    assert not (tmp_path / "exploded").exists()


def test_code_that_a_checkpoint_names_is_not_imported(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "payload.py").write_text("raise SystemExit(7)")
    monkeypatch.syspath_prepend(str(tmp_path))
    case.change_state(lambda tree: tree["config"].update({"algorithm.loss_function": "payload:run"}))
    with pytest.raises(CheckpointError, match=r"algorithm\.loss_function=payload:run, and this run has"):
        case.resume()
    assert "payload" not in sys.modules
    with pytest.raises(RegressError, match="--allow-code"):
        case.resume("algorithm.loss_function=payload:run")
    assert "payload" not in sys.modules


def test_weights_of_another_model_are_named(case: Case) -> None:
    changes = ("model.config={hidden_size: 16, intermediate_size: 64}",)
    with pytest.raises(
        CheckpointError, match=r"its model has the shape .* resume with the model that wrote it"
    ):
        case.resume(*changes, allow=("model.config",))


def test_a_changed_record_of_the_dump_is_noticed(case: Case, tmp_path: Path) -> None:
    dumping = ("debug.enable_data_dump=true", "debug.dump_options.param=true")
    other = Case(tmp_path / "dumping")
    other.run(*dumping)
    records = sorted((other.folder / "debug_dump" / "param").iterdir())
    records[0].unlink()
    with pytest.raises(RegressError) as caught:
        other.resume(*dumping)
    assert "holds 1 records from before checkpoint-1, which knows of 2; restore them" in str(caught.value)
    assert len(list((other.folder / "debug_dump" / "param").iterdir())) == len(records) - 1, (
        "nothing was removed"
    )
    other.resume(*dumping, f"debug.dump_dir={tmp_path / 'new'}")
    manifest = json.loads((tmp_path / "new" / "manifest.json").read_text())
    assert len(manifest["files"]) == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors, told: (tensors, {}), "is not an unfinished step"),
        (lambda tensors, told: (tensors, {"records": "[]"}), "is not an unfinished step"),
        (
            lambda tensors, told: ({n: v for n, v in tensors.items() if "/advantages" not in n}, told),
            "lacks the advantages of its unfinished step",
        ),
        (lambda tensors, told: ({n: v[:1] for n, v in tensors.items() if v.dim()}, told), "trajector"),
    ],
)
def test_a_forged_unfinished_step_is_refused(case: Case, change: Callable[..., Any], says: str) -> None:
    name = "checkpoint-1-update1"
    path = case.checkpoint(name) / "unfinished.safetensors"
    tensors, told = read_tensors(path)
    write_tensors(path, *change(tensors, {key: value for key, value in told.items() if key != "format"}))
    case.seal(name)
    with pytest.raises(RegressError, match=says) as caught:
        case.resume(name=name)
    assert "\n" not in str(caught.value)


def test_an_unfinished_step_without_its_sampler_weights_is_refused(tmp_path: Path) -> None:
    """Checkpoints of earlier releases lack them, and those of the tokens at hand would be others."""
    chosen = {"sampler_correction": "token_truncate", "correction_max": "2.0", "correction_normalize": "true"}
    corrected = [f"algorithm.{key}={value}" for key, value in chosen.items()]
    other, name = Case(tmp_path / "corrected"), "checkpoint-1-update1"
    other.run(*corrected)
    path = other.checkpoint(name) / "unfinished.safetensors"
    tensors, told = read_tensors(path)
    del tensors["is_loss_debug/correction"]
    write_tensors(path, tensors, {key: value for key, value in told.items() if key != "format"})
    other.seal(name)
    with pytest.raises(CheckpointError) as caught:
        other.resume(*corrected, name=name)
    assert str(caught.value) == (
        "checkpoint-1-update1 lacks the sampler weights of its unfinished step; resume from another checkpoint"
    )
