"""Models by their name on the Hugging Face hub: from the cache of this machine; without it and a network, an error."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Command = Callable[..., Result]
NAME, COMMIT = "Owner/Tiny-0.1B", "0" * 40


@pytest.fixture
def cache(case: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of a model and its tokenizer, as the hub's client lays them out: links to files named by hash."""
    home = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot = home / "snapshots" / COMMIT
    for folder in (snapshot, home / "blobs", home / "refs"):
        folder.mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    for file in (case.run / "final").iterdir():  # type: ignore[attr-defined]
        shutil.copy(file, home / "blobs" / f"hash-of-{file.name}")
        (snapshot / file.name).symlink_to(os.path.relpath(home / "blobs" / f"hash-of-{file.name}", snapshot))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return snapshot


def test_a_name_is_the_model_in_the_cache(cache: Path, command: Command, small: tuple[str, ...]) -> None:
    asked = [part for part in small if not part.startswith("model.config")]
    run = (*asked, "--model_name", NAME, "--max-prompts", "8", "max_steps=1")
    done = command(
        "train", *run, "output_dir=named", "debug.enable_data_dump=true", "debug.dump_options.loss=true"
    )
    assert done.exit_code == 0, done.stderr
    assert f"model.path={NAME} is" in done.stdout, "the log says which snapshot was used"
    assert f"model.path: {NAME}" in command("train", *run, "--print-config").stdout
    same = (*asked, f"model.path={cache}", "max_steps=1", "output_dir=local")
    assert command("train", *same).exit_code == 0
    assert (
        Path("named/final/model.safetensors").read_bytes()
        == Path("local/final/model.safetensors").read_bytes()
    )
    parts = (
        f"model.path={NAME}",
        f"tokenizer.path={NAME}",
        f"reference.path={NAME}",
        "algorithm.kl_coef=0.1",
    )
    assert command("train", *asked, *parts, "max_steps=1", "output_dir=parts").exit_code == 0


def test_a_name_is_the_base_of_an_adapter(cache: Path, command: Command, small: tuple[str, ...]) -> None:
    asked = [part for part in small if not part.startswith("model.config")]
    lora = (f"model.path={NAME}", "model.lora.r=2", "max_steps=1", "output_dir=adapted")
    assert command("train", *asked, *lora).exit_code == 0
    assert f'"base_model_name_or_path": "{NAME}"' in Path("adapted/final/adapter_config.json").read_text()
    more = ("model.path=adapted/final", "max_steps=1", "output_dir=more")
    assert command("train", *asked, *more).exit_code == 0
    shutil.rmtree(cache.parents[1])
    refused = command("train", *asked, *more, "--overwrite")
    assert refused.exit_code == 2
    assert "set model.lora.base_path to its directory" in refused.stderr


@pytest.mark.parametrize(
    ("lost", "holds"),
    [
        ("everything", "no model of this name"),
        ("model.safetensors", "only a part of it (no model.safetensors)"),
    ],
)
def test_without_cache_and_network_a_name_is_an_error(
    lost: str, holds: str, cache: Path, command: Command, small: tuple[str, ...]
) -> None:
    if lost == "everything":
        shutil.rmtree(cache.parents[1])
    else:
        (cache / lost).unlink()
    before = {*Path.cwd().rglob("*")}
    refused = command("train", *small, f"model.path={NAME}", "output_dir=out")
    assert refused.exit_code == 2
    told = f"model.path='{NAME}': there is no such directory, the hub's cache ("
    assert told in refused.stderr
    assert f"holds {holds}, and it cannot be downloaded (HF_HUB_OFFLINE is set)" in refused.stderr
    assert f"run hf download {NAME} where there is a network" in refused.stderr
    left = {path for path in Path.cwd().rglob("*") if "out" not in path.relative_to(Path.cwd()).parts}
    assert left == before


def test_where_there_is_a_network_it_is_downloaded(
    cache: Path, command: Command, small: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's client is asked for what a model needs; a failure of its network is the reason that is told."""
    import huggingface_hub

    calls: list[dict[str, object]] = []
    moved = cache.parents[1].rename(cache.parents[2] / "away")

    def download(name: str, **options: object) -> str:
        calls.append({"name": name, **options})
        if len(calls) == 1:
            raise ConnectionError("no route to the hub")
        return str((moved / "snapshots" / COMMIT).absolute())

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    asked = [part for part in small if not part.startswith("model.config")]
    run = ("train", *asked, "--model-name", NAME, "max_steps=1", "output_dir=out")
    refused = command(*run)
    assert refused.exit_code == 2
    assert "cannot be downloaded (ConnectionError: no route to the hub)" in refused.stderr
    done = command(*run)
    assert done.exit_code == 0, done.stderr
    assert {call["name"] for call in calls} == {NAME}
    assert all("*.py" not in call["allow_patterns"] for call in calls)  # type: ignore[operator]
