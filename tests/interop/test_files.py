"""Bare files and checkpoints of Hugging Face as sources of a comparison."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from regress.cli import main

Weights = Mapping[str, torch.Tensor]


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {f"model.layers.{i}.q_proj.weight": torch.randn(16, 8, generator=generator) for i in range(3)}
    return {
        **found,
        "lm_head.weight": torch.randn(20, 8, generator=generator).bfloat16(),
        "ids": torch.arange(5),
    }


def one_file(path: Path, tensors: Weights) -> Path:
    save_file(dict(tensors), path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def torch_file(path: Path, tensors: Weights) -> Path:
    torch.save(dict(tensors), path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def checkpoint(path: Path, tensors: Weights) -> Path:
    path.mkdir()
    save_file(dict(tensors), path / "model.safetensors")
    (path / "config.json").write_text("{}")
    torch.save({"args": 1}, path / "training_args.bin")
    return path


def torch_checkpoint(path: Path, tensors: Weights) -> Path:
    path.mkdir()
    torch.save(dict(tensors), path / "pytorch_model.bin")
    return path


def sharded(path: Path, tensors: Weights, kind: str = "safetensors") -> Path:
    path.mkdir()
    names, stem = sorted(tensors), "model" if kind == "safetensors" else "pytorch_model"
    where = {}
    for number, part in enumerate((names[:2], names[2:]), start=1):
        shard = f"{stem}-{number:05d}-of-00002.{kind}"
        found = {name: tensors[name] for name in part}
        if kind == "safetensors":
            save_file(found, path / shard)
        else:
            torch.save(found, path / shard)
        where |= dict.fromkeys(part, shard)
    (path / f"{stem}.{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


def sharded_bin(path: Path, tensors: Weights) -> Path:
    return sharded(path, tensors, "bin")


def folder_of_files(path: Path, tensors: Weights) -> Path:
    path.mkdir()
    for index, (name, tensor) in enumerate(tensors.items()):
        torch.save({name: tensor}, path / f"part{index}.pt")
    return path


KINDS = [one_file, torch_file, checkpoint, torch_checkpoint, sharded, sharded_bin, folder_of_files]


def compare(golden: Path, actual: Path, *options: str) -> Result:
    done = CliRunner().invoke(main, ["compare", str(golden), str(actual), "--engine", "local", *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_equal_and_one_element(tmp_path: Path, kind: Callable[[Path, Weights], Path]) -> None:
    golden = sharded(tmp_path / "golden", weights())
    same = compare(golden, kind(tmp_path / "same", weights()), "--bitwise")
    assert (same.exit_code, "5 checks of 5 tensors" in same.output) == (0, True), same.output
    other = weights()
    other["model.layers.1.q_proj.weight"][3, 4] += 0.01
    done = compare(golden, kind(tmp_path / "other", other))
    assert done.exit_code == 1
    assert "drift: param model.layers.1.q_proj.weight: element [3, 4]" in done.output


def test_names_and_shapes(tmp_path: Path) -> None:
    golden, other = weights(), weights()
    del other["ids"]
    other["new"] = torch.zeros(2)
    other["lm_head.weight"] = other["lm_head.weight"].T.contiguous()
    done = compare(one_file(tmp_path / "a", golden), one_file(tmp_path / "b", other))
    assert done.exit_code == 1
    for words in (
        "missing: param ids: only in the golden dump",
        "extra: param new: only in the actual dump",
        "shape: param lm_head.weight: golden [20, 8], actual [8, 20]",
    ):
        assert words in done.output


def test_options(tmp_path: Path) -> None:
    other = weights()
    other["model.layers.1.q_proj.weight"][3, 4] += 0.01
    pair = one_file(tmp_path / "a", weights()), torch_file(tmp_path / "b", other)
    assert compare(*pair, "--only", "*layers.2*").exit_code == 0
    assert compare(*pair, "--atol", "0.011").exit_code == 0
    assert compare(*pair, "--rtol", "1e-6").exit_code == 1
    out = tmp_path / "report"
    assert compare(*pair, "--report", str(out)).exit_code == 1
    assert json.loads((out / "report.json").read_text())["exit_code"] == 1


def test_integers_are_exact(tmp_path: Path) -> None:
    other = weights()
    other["ids"][2] += 1
    pair = one_file(tmp_path / "a", weights()), one_file(tmp_path / "b", other)
    done = compare(*pair, "--rtol", "10")
    assert done.exit_code == 1
    assert "param ids: element [2]" in done.output


def lost_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def lost_tensor(folder: Path) -> None:
    save_file({"ids": weights()["ids"]}, folder / "model-00001-of-00002.safetensors")


def twice(folder: Path) -> None:
    names = sorted(weights())
    found = {name: weights()[name] for name in [*names[2:], names[0]]}
    save_file(found, folder / "model-00002-of-00002.safetensors")


def unnamed(folder: Path) -> None:
    names = sorted(weights())[2:]
    found = {**{name: weights()[name] for name in names}, "more": torch.zeros(1)}
    save_file(found, folder / "model-00002-of-00002.safetensors")


def outside(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"ids": "../../etc/passwd"}}')


def no_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


def empty_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')


def cut_off(folder: Path) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


def empty_file(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")


def two_names(folder: Path) -> None:
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    text = f'{{"ids":{entry},"ids":{entry}}}'.encode()
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))


def unknown_type(folder: Path) -> None:
    text = b'{"ids":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(1))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (
            lost_shard,
            "names the shard model-00002-of-00002.safetensors, which is missing: copy the checkpoint again",
        ),
        (lost_tensor, "lacks 1 of the tensors that model.safetensors.index.json promises (lm_head.weight)"),
        (
            twice,
            "holds the tensor ids twice, in model-00001-of-00002.safetensors and in model-00002-of-00002",
        ),
        (unnamed, "holds the tensor more, which model.safetensors.index.json does not name"),
        (outside, "names the shard '../../etc/passwd' outside of its folder"),
        (no_index, "is not an index of shards"),
        (empty_index, "names no tensor, so there is nothing to compare"),
        (cut_off, "claims the bytes 40:360 of 357; it was cut off or changed"),
        (empty_file, "cannot be read as tensors: it is empty"),
        (two_names, "two of its tensors have the name 'ids'; give each a name of its own"),
        (unknown_type, "its tensor 'ids' has the type 'F4'; types that can be compared are BOOL"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_checkpoint(tmp_path: Path, harm: Callable[[Path], None], words: str) -> None:
    folder = sharded(tmp_path / "a", weights())
    harm(folder)
    done = compare(folder, folder)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.txt", b"hello, world", "begins like neither a safetensors file nor an archive of torch.save"),
        (
            "x.safetensors",
            (2).to_bytes(8, "little") + b"{}",
            "holds no tensor, so there is nothing to compare",
        ),
        ("x.pt", b"\x80\x04.", "it is a bare pickle, which may hold code and was not executed"),
    ],
)
def test_what_is_no_file_of_tensors(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    done = compare(tmp_path / name, tmp_path / name)
    assert done.exit_code == 2
    assert words in done.stderr


def test_folders_without_weights(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    torch.save({"args": 1}, tmp_path / "a" / "training_args.bin")
    done = compare(tmp_path / "a", tmp_path / "a")
    assert done.exit_code == 2
    assert "holds no weights: give a checkpoint with one of model.safetensors.index.json" in done.stderr
