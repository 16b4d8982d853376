"""The manifest: what it says, that it verifies itself, and that reading it starts no torch."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from regress.dump import DumpReader, Recorder, at, recording, tap
from regress.dump.dump_manifest import (
    MANIFEST,
    Provenance,
    environment,
    package_versions,
    read_manifest,
)
from regress.errors import DumpError


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    told = Provenance(
        config={"seed": 1, "optimizer": {"betas": (0.9, 0.999)}, "limit": float("inf")},
        environment=environment("cpu", threads=2),
        tokenizer={"fingerprint": "abc"},
    )
    folder = tmp_path / "dump"
    with recording(Recorder(folder, options={"loss": True, "param": True}, provenance=told)):
        for step in range(2):
            with at(step=step):
                tap("loss", loss=0.1)
                tap("param", w=1.0)
    return folder


def test_content(dump: Path) -> None:
    text = (dump / MANIFEST).read_text()
    tree = json.loads(text)
    assert tree["complete"] is True
    assert tree["schema_version"] == 1
    assert tree["mesh"] == {"world_size": 1}
    assert tree["config"] == {
        "limit": {"$float": "Infinity"},
        "optimizer": {"betas": [0.9, 0.999]},
        "seed": 1,
    }
    assert sorted(tree["files"]) == [
        *("loss/step_000000.safetensors", "loss/step_000001.safetensors"),
        *("param/step_000000.safetensors", "param/step_000001.safetensors"),
    ]
    assert text == json.dumps(tree, sort_keys=True, indent=1) + "\n"
    manifest = read_manifest(dump)
    assert manifest.provenance.config["limit"] == float("inf")
    assert manifest.provenance.environment["threads"] == 2


def test_two_equal_runs_have_equal_manifests(tmp_path: Path) -> None:
    for name in "ab":
        with recording(Recorder(tmp_path / name, options={"loss": True}, format="pt")), at(step=0):
            tap("loss", loss=0.1)
    assert (tmp_path / "a" / MANIFEST).read_bytes() == (tmp_path / "b" / MANIFEST).read_bytes()


def test_every_flip_and_cut_is_found(dump: Path) -> None:
    path = dump / MANIFEST
    sound = path.read_bytes()
    rng = random.Random(0)
    for bit in rng.sample(range(8 * len(sound)), 200):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            tree = read_manifest(dump).to_json()
        except DumpError as error:
            assert str(path) in str(error)  # noqa: PT017 - no error is right as well, if nothing changed
        else:
            path.write_bytes(sound)
            assert tree == read_manifest(dump).to_json()
    for tenth in range(10):
        path.write_bytes(sound[: len(sound) * tenth // 10])
        with pytest.raises(DumpError, match=r"manifest\.json is damaged"):
            read_manifest(dump)


def test_incomplete_is_refused(dump: Path) -> None:
    tree = json.loads((dump / MANIFEST).read_text())
    (dump / MANIFEST).write_text(json.dumps({**tree, "complete": False}))
    with pytest.raises(DumpError, match=r"manifest\.json is damaged"):
        read_manifest(dump)


def test_files_are_verified(dump: Path) -> None:
    first, second = sorted((dump / "loss").iterdir())
    second.write_bytes(first.read_bytes())  # intact, but not what the manifest lists
    reader = DumpReader(dump)
    with pytest.raises(DumpError, match=r"step_000001\.safetensors has \d+ bytes that do not match"):
        list(reader)
    second.unlink()
    with pytest.raises(DumpError, match=r"lacks 1 record file \(loss/step_000001\.safetensors\)"):
        DumpReader(dump)
    assert len(list(DumpReader(dump, only="param"))) == 2
    second.write_bytes(first.read_bytes())
    (dump / "param" / "step_000007_rank0.pt").write_bytes(b"")
    with pytest.raises(
        DumpError, match=r"has additional 1 record file .*step_000007_rank0\.pt.*move them away"
    ):
        DumpReader(dump)


def test_names_and_records(dump: Path) -> None:
    reader = DumpReader(dump)
    assert reader.names(type="param") == ["param/step_000000.safetensors", "param/step_000001.safetensors"]
    assert [record.type for record in reader.records(step=0)] == ["loss", "param"]
    with pytest.raises(DumpError, match="has no file 'loss/x'"):
        reader.read("loss/x")


def test_environment_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = environment("cuda:0", threads=3)
    assert found["variables"]["NCCL_ALGO"] == "Ring"
    assert "OMP_NUM_THREADS" not in found["variables"]
    assert (found["device"], found["threads"]) == ("cuda:0", 3)
    versions = package_versions(("numpy", "no-such-package"))
    assert sorted(versions) == ["numpy", "python"]


def test_no_torch() -> None:
    code = (
        "import sys, regress.dump, regress.dump.dump_manifest, regress.dump.dump_reader, regress.dump.taps, "
        "regress.dump.recorded_trajectories, regress.dump.dump_inspection\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lazy_names() -> None:
    import regress.dump

    for name in regress.dump.__all__:
        assert callable(getattr(regress.dump, name)), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        regress.dump.nothing  # noqa: B018


def test_config_must_be_plain(tmp_path: Path) -> None:
    bad: dict[str, Any] = {"model": object()}
    with (
        pytest.raises(DumpError, match=r"manifest\['config'\]\['model'\] is a object"),
        recording(Recorder(tmp_path, options={}, provenance=Provenance(config=bad))),
    ):
        pass
