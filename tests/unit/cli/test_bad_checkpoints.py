"""Damaged checkpoints and tokenizers, and those that do not fit the run: one sentence, no code executed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file


def _bare_pickle(folder: Path, code: object) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(code))


def _zipped_pickle(folder: Path, code: object) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": code}, folder / "pytorch_model.bin")


def _edit(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def _weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def _write(name: str, content: str | bytes) -> Callable[[Path], None]:
    return lambda folder: (
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode()) and None
    )


def _cut(name: str, tenths: int) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) * tenths // 10])

    return cut


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


NOT_LOADED = "the checkpoint cannot be loaded (…); give a causal language model written by save_pretrained"
SAME_MODEL = "give weights and config.json of the same model"
NORM = "model.layers.0.self_attn.q_norm.weight"
CHECKPOINTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config.json": (
        _remove("config.json"),
        "the directory holds no config.json; give a directory written by save_pretrained",
    ),
    "config.json is not valid JSON": (_write("config.json", "{"), NOT_LOADED),
    "config.json is a list": (_write("config.json", "[]"), NOT_LOADED),
    "config.json is binary": (_write("config.json", b"\xff\xfe\0"), NOT_LOADED),
    "unknown architecture": (_edit(model_type="gpt9"), NOT_LOADED),
    "code of its own": (_edit(auto_map={"AutoConfig": "own.Config"}, model_type="own"), NOT_LOADED),
    "wrong type": (_edit(hidden_size="16"), NOT_LOADED),
    "another architecture": (
        _edit(model_type="gpt2"),
        f"the checkpoint lacks … of the model that …; {SAME_MODEL}",
    ),
    "another size": (
        _edit(num_key_value_heads=1),
        "the checkpoint holds model.layers.0.self_attn.k_proj.weight of shape [16, 16] and its config.json asks for "
        f"[8, 16]; {SAME_MODEL}",
    ),
    "lost weight": (
        _weights(lambda tensors: tensors.pop(NORM)),
        f"the checkpoint lacks {NORM} (1 missing in all) of the model that its config.json describes; {SAME_MODEL}",
    ),
    "no weights": (_remove("model.safetensors"), NOT_LOADED),
    **{
        f"cut at {tenths} tenths": (_cut("model.safetensors", tenths), NOT_LOADED)
        for tenths in range(0, 10, 3)
    },
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint(name: str, case: Any) -> None:
    damage, says = CHECKPOINTS[name]
    folder = case.checkpoint()
    damage(folder)
    case.refuses(f"model.path={folder}", says=f"model.path='TMP/checkpoint': {says}")


@pytest.mark.parametrize("save", [_bare_pickle, _zipped_pickle])
def test_pickle_with_code(save: Callable[[Path, object], None], case: Any) -> None:
    folder = case.checkpoint()
    save(folder, case.code)
    case.refuses(
        f"model.path={folder}",
        says="model.path='TMP/checkpoint': the checkpoint is a pickle that holds code, which was not executed; give "
        "one whose weights are in model.safetensors",
    )
    assert not case.executed


def test_the_pickle_of_these_tests_does_execute(case: Any) -> None:
    pickle.loads(pickle.dumps(case.code))
    assert case.executed


def test_a_sound_checkpoint_trains(case: Any) -> None:
    case.trains(f"model.path={case.checkpoint()}", f"tokenizer.path={case.folder / 'checkpoint'}")


def test_a_tokenizer_larger_than_the_model(case: Any) -> None:
    checkpoint = case.checkpoint()
    (checkpoint / "tokenizer_config.json").unlink()  # so that one is trained from the task
    case.refuses(
        f"model.path={checkpoint}",
        "task.name=copy",
        says="model.path='TMP/checkpoint': the model knows 14 tokens and the tokenizer 15; set tokenizer.path to the "
        "tokenizer the model was trained with",
    )


def _code_of_its_own(folder: Path) -> None:
    (folder / "config.json").unlink()  # or its architecture decides which tokenizer it is
    _settings(tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Tokenizer", None]})(folder)


def _settings(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


BROKEN_TEMPLATE = "the chat template cannot write the prompt '…' (…); correct chat_template"
TOKENIZERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (
        _cut("tokenizer.json", 5),
        "TMP/checkpoint holds no tokenizer that can be loaded (…); give a directory made by save_pretrained",
    ),
    "code of its own": (
        _code_of_its_own,
        "TMP/checkpoint holds no tokenizer that can be loaded (…); give a directory made by save_pretrained",
    ),
    "pad is eos": (
        _settings(pad_token="<end>"),
        "the tokenizer in TMP/checkpoint pads with '<end>' and ends with '<end>', but the two must be different "
        "tokens; set pad_token and save again",
    ),
    "no eos": (
        _settings(eos_token=None),
        "the tokenizer in TMP/checkpoint has no eos token; set eos_token and save again",
    ),
    "no chat template": (
        _remove("chat_template.jinja"),
        "the tokenizer in TMP/checkpoint has no chat template; set chat_template, or give the prompts as "
        "token ids",
    ),
    "a template that raises": (_write("chat_template.jinja", "{{ raise_exception('no') }}"), BROKEN_TEMPLATE),
    "a template that is none": (_write("chat_template.jinja", "{% if %}"), BROKEN_TEMPLATE),
    "a template that writes nothing": (
        _write("chat_template.jinja", "{# nothing #}"),
        "the chat template writes nothing for the prompt '…'; correct chat_template",
    ),
    "a template that loses the prompt": (
        _write("chat_template.jinja", "<user><end>"),
        "the prompts '…' and '…' become the same tokens; correct chat_template, or give a tokenizer that knows their "
        "characters",
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer(name: str, case: Any) -> None:
    damage, says = TOKENIZERS[name]
    folder = case.checkpoint()
    damage(folder)
    case.refuses(f"tokenizer.path={folder}", says=f"tokenizer.path: {says}")


def test_a_tokenizer_that_cannot_write_the_answers(case: Any) -> None:
    case.refuses(
        f"tokenizer.path={case.checkpoint()}",
        "task.params={alphabet: cdefghij}",
        says="tokenizer.path: the tokenizer turns the answer '…' into '…<unk>…', so no completion could be right; "
        "give a tokenizer that knows the characters of task reverse_string",
    )
