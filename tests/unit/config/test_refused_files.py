"""Files that cannot be read, found or composed: the exact sentence for each."""

from collections.abc import Callable
from pathlib import Path

import pytest

import regress.engine.config.conf
from regress.engine.config import config_files as files
from regress.errors import ConfigError

Refusal = Callable[..., str]
BUILT_IN = Path(regress.engine.config.conf.__path__[0])

BROKEN = {
    b"seed: [1\n": "File run.yaml:2 is not valid YAML (expected ',' or ']', but got '<stream end>'); "
    "correct it.",
    b"seed: 1\nseed: 2\n": "File run.yaml:2 is not valid YAML (found duplicate key seed); correct it.",
    b"seed: 1\n  max_steps: 2\n": "File run.yaml:2 is not valid YAML (mapping values are not allowed here); "
    "correct it.",
    b"seed: *nothing\n": "File run.yaml:1 is not valid YAML (found undefined alias 'nothing'); correct it.",
    b"seed: !!python/object/apply:os.getcwd []\n": "File run.yaml:1 is not valid YAML (could not determine a "
    "constructor for the tag 'tag:yaml.org,2002:python/object/apply:os.getcwd'); correct it.",
    b"- seed\n": "File run.yaml:1 must hold a mapping; write lines of KEY: VALUE.",
    b"\n\nseed\n": "File run.yaml:3 must hold a mapping; write lines of KEY: VALUE.",
    b"exp_name: caf\xe9\n": "File run.yaml is not UTF-8 text; save it as UTF-8.",
    b"null: 3\n": "File run.yaml holds what YAML cannot read (Incompatible key type 'NoneType'); correct it.",
    b"seed: !!int abc\n": "File run.yaml holds what YAML cannot read (invalid literal for int() with base "
    "10: 'abc'); correct it.",
    b"\x00\x01\x02": "File run.yaml is not text but binary data; give a YAML file.",
    b"a: " + b"[" * 600: "File run.yaml is nested too deeply; it is not a configuration.",
}


@pytest.mark.parametrize("content", BROKEN, ids=range(len(BROKEN)))
def test_broken_file(content: bytes, refusal: Refusal) -> None:
    assert refusal({"run.yaml": content}) == BROKEN[content]


@pytest.mark.parametrize("content", BROKEN, ids=range(len(BROKEN)))
def test_broken_inherited_file_is_named(content: bytes, refusal: Refusal) -> None:
    """The culprit is the file that is broken, not the one that inherits from it."""
    sentence = refusal({"child.yaml": "defaults: [sub/run, _self_]", "sub/run.yaml": content})
    assert sentence == BROKEN[content].replace("run.yaml", "sub/run.yaml")


@pytest.mark.parametrize(
    "entry", ["broken", "./broken", "/task/broken", "/task: broken", "optional /task: broken"]
)
def test_broken_neighbor_in_a_group_is_named(entry: str, refusal: Refusal) -> None:
    """However a defaults list spells its entries."""
    files = {
        "run.yaml": "defaults: [{task: hard}]",
        "task/hard.yaml": f"defaults: [{{{entry}}}]" if ":" in entry else f"defaults: ['{entry}']",
        "task/broken.yaml": "level: [\n",
    }
    assert refusal(files).startswith("File task/broken.yaml:2 is not valid YAML")


def test_broken_group_file_is_named(refusal: Refusal) -> None:
    sentence = refusal({"run.yaml": "", "task/hard.yaml": "level: [\n"}, "task=hard")
    assert sentence.startswith("File task/hard.yaml:2 is not valid YAML")


@pytest.mark.parametrize("layer", ["file", "environment", "command line"])
def test_number_that_python_refuses(layer: str, refusal: Refusal) -> None:
    digits = "9" * 5000
    sentence = {
        "file": lambda: refusal({"run.yaml": f"seed: {digits}"}),
        "environment": lambda: refusal({}, env={"REGRESS_SEED": digits}),
        "command line": lambda: refusal({}, f"seed={digits}"),
    }[layer]()
    assert "\n" not in sentence
    assert len(sentence) < 300


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def denied(*_: object, **__: object) -> bytes:
        raise PermissionError(13, "Permission denied", "run.yaml")

    monkeypatch.setattr(files, "read_bytes", denied)
    with pytest.raises(ConfigError) as caught:
        files.read_yaml(tmp_path / "run.yaml")
    assert str(caught.value) == "File run.yaml cannot be read (Permission denied); check permissions."


def test_name_without_file(refusal: Refusal) -> None:
    assert refusal({"baseline.yaml": ""}, name="basline") == (
        f"config_name=basline is not a configuration: basline.yaml is in none of the directories ., {BUILT_IN}; "
        "the nearest name is baseline."
    )


def test_directory_in_place_of_a_file(refusal: Refusal) -> None:
    sentence = refusal({"run.yaml/inside.yaml": ""}, name="run")
    assert sentence.startswith(
        "config_name=run is not a configuration: run.yaml is in none of the directories ., "
    )


def test_directory_without_name(refusal: Refusal) -> None:
    assert refusal({"conf/a.yaml": "", "conf/b.yaml": ""}, name=None, path="conf") == (
        "config_path=conf is a directory; add config_name (there are: a, b)."
    )


def test_path_to_nothing(refusal: Refusal) -> None:
    assert refusal({}, path="nowhere.yaml") == (
        "config_path=nowhere.yaml is not a directory and no .yaml file; correct the path."
    )
    assert refusal({}, path="nowhere", name="a") == (
        "config_path=nowhere is missing, but config_name=a needs a directory; give that."
    )


def test_path_to_a_file_beside_a_name(refusal: Refusal) -> None:
    assert refusal({"a.yaml": ""}, path="a.yaml", name="b") == (
        "config_path=a.yaml is a file, but config_name=b needs a directory; give that."
    )


def test_name_that_no_file_can_have(refusal: Refusal) -> None:
    sentence = refusal({}, name="x" * 300)
    assert sentence.endswith("xxx.yaml cannot be used (File name too long); correct it.")


def test_inherited_file_is_missing(refusal: Refusal) -> None:
    files = {"run.yaml": "seed: 1\ndefaults:\n  - bsae\n  - _self_\n", "base.yaml": ""}
    assert refusal(files) == (
        f"bsae (file run.yaml:2) is not a configuration: bsae.yaml is in none of the directories ., {BUILT_IN}; "
        "the nearest name is base."
    )


def test_group_option_is_missing(refusal: Refusal) -> None:
    assert refusal({"run.yaml": "defaults: [{model: gpt3}]"}) == (
        "model/gpt3 (file run.yaml:1) is not a configuration: gpt3.yaml is in none of the directories "
        f"{BUILT_IN / 'model'}; the nearest name is gpt2."
    )


def test_chosen_group_option_is_missing(refusal: Refusal) -> None:
    assert refusal({"run.yaml": ""}, "model=lama") == (
        "model/lama (command line) is not a configuration: lama.yaml is in none of the directories "
        f"{BUILT_IN / 'model'}; the nearest name is llama."
    )


def test_group_is_missing(refusal: Refusal) -> None:
    assert refusal({"run.yaml": "defaults: [{modle: gpt2}]"}) == (
        "modle/gpt2 (file run.yaml:1) is not a configuration: there is no group modle in any of the directories "
        f"., {BUILT_IN}."
    )


@pytest.mark.parametrize("entry", ["a", "./a", "../{here}/a"])
def test_circle(entry: str, refusal: Refusal, tmp_path: Path) -> None:
    entry = entry.replace("{here}", tmp_path.name)
    assert refusal({"a.yaml": "defaults: [b]", "b.yaml": f"defaults: ['{entry}']"}) == (
        "Files inherit in a circle, a.yaml -> b.yaml -> a.yaml; take one of them out of a defaults list."
    )


@pytest.mark.parametrize(
    "defaults", ["3", "{model: gpt2}", "[3]", "[[a]]", "[_self_, _self_]", "[{model: 3}]"]
)
def test_defaults_that_are_no_list_of_files(defaults: str, refusal: Refusal) -> None:
    sentence = refusal({"run.yaml": f"defaults: {defaults}"})
    assert "\n" not in sentence
    assert sentence.startswith(
        ("The defaults lists of run.yaml cannot be composed (", "model/3 (file run.yaml:1)")
    )
