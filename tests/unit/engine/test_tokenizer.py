"""The character tokenizer: ids, templates, round trips, fingerprints; and what a bad directory is told."""

import contextlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from regress.engine.tokenizer import (
    completion_ids,
    completion_text,
    fingerprint,
    load_tokenizer,
    prompt_ids,
    train_tokenizer,
)
from regress.errors import TaskError
from regress.tasks.problem_split import make_dataset
from regress.tasks.task_registry import make_task, task_names

TEXTS = ["rev abc", "cba", "Äß \n\t", " two  spaces ", "<", "n't 1 , 2 . 3"]
CHARACTERS = sorted(set("".join(TEXTS)))
TOKENIZER = train_tokenizer(TEXTS)


def text_of(max_size: int = 20) -> st.SearchStrategy[str]:
    return st.text(CHARACTERS, max_size=max_size)


def test_special_tokens_come_first_and_then_the_characters_in_order() -> None:
    assert TOKENIZER.convert_ids_to_tokens(range(5)) == ["<pad>", "<end>", "<unk>", "<user>", "<assistant>"]
    assert TOKENIZER.convert_ids_to_tokens(range(5, len(TOKENIZER))) == CHARACTERS
    assert TOKENIZER.pad_token_id != TOKENIZER.eos_token_id
    assert TOKENIZER.bos_token_id is None


@settings(deadline=None)
@given(texts=st.permutations(TEXTS))
def test_the_ids_depend_only_on_the_set_of_characters(texts: list[str]) -> None:
    assert fingerprint(train_tokenizer(texts + texts[:2])) == fingerprint(TOKENIZER)


def test_ids_and_fingerprint_are_the_same_in_every_run() -> None:
    tokenizer = train_tokenizer(["rev abc", "cba"])

    assert prompt_ids(tokenizer, "rev abc") == [3, 10, 9, 11, 5, 6, 7, 8, 1, 4]
    assert completion_ids(tokenizer, "cba") == [8, 7, 6, 1]


@settings(deadline=None)
@given(text=text_of())
def test_text_makes_the_round_trip_one_token_a_character(text: str) -> None:
    ids = TOKENIZER.encode(text)

    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text
    assert completion_text(TOKENIZER, completion_ids(TOKENIZER, text)) == text


@pytest.mark.parametrize("name", task_names())
def test_every_problem_makes_the_round_trip_and_has_no_unknown_token(name: str) -> None:
    dataset = make_dataset(make_task(name, 3), 50, 10)
    tokenizer = train_tokenizer(dataset.texts())

    for text in dataset.texts():
        assert tokenizer.unk_token_id not in tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None)
@given(prompt=text_of(), answer=text_of())
def test_a_prompt_and_its_completion_are_the_conversation(prompt: str, answer: str) -> None:
    chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]

    whole = TOKENIZER.apply_chat_template(chat, tokenize=True, return_dict=False)

    assert prompt_ids(TOKENIZER, prompt) + completion_ids(TOKENIZER, answer) == whole
    assert len(prompt_ids(TOKENIZER, prompt)) == len(prompt) + 3


def test_bos_is_put_once_in_front_if_asked_for() -> None:
    tokenizer = train_tokenizer(TEXTS, bos=True)
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]

    ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)

    assert tokenizer.bos_token_id == 5
    assert [place for place, token in enumerate(ids) if token == 5] == [0]
    assert 5 not in completion_ids(tokenizer, "abc")


def test_only_users_and_assistants_speak() -> None:
    with pytest.raises(Exception, match="the roles are user and assistant, not system"):
        TOKENIZER.apply_chat_template([{"role": "system", "content": "a"}], tokenize=True)


def test_a_character_never_seen_is_unknown_and_not_dropped() -> None:
    assert TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode("aZZb")) == ["a", "<unk>", "<unk>", "b"]


def test_a_completion_ends_at_the_first_eos_and_shows_misplaced_special_tokens() -> None:
    a, b = TOKENIZER.encode("ab")
    pad, end, user = TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.convert_tokens_to_ids("<user>")

    assert completion_text(TOKENIZER, [a, end, b, end, pad]) == "a"
    assert completion_text(TOKENIZER, (a, b)) == "ab"
    assert completion_text(TOKENIZER, [end]) == completion_text(TOKENIZER, []) == ""
    assert completion_text(TOKENIZER, [a, user, pad, b, end]) == "a<user><pad>b"


def test_no_text_is_an_error() -> None:
    with pytest.raises(TaskError, match="the tokenizer has no text to learn its characters from"):
        train_tokenizer(["", ""])


@pytest.mark.parametrize("bos", [False, True])
def test_a_saved_tokenizer_comes_back_the_same(tmp_path: Path, bos: bool) -> None:
    tokenizer = train_tokenizer(TEXTS, bos=bos)
    tokenizer.save_pretrained(tmp_path)

    loaded = load_tokenizer(tmp_path)

    assert fingerprint(loaded) == fingerprint(tokenizer)
    assert prompt_ids(loaded, TEXTS[3]) == prompt_ids(tokenizer, TEXTS[3])
    assert completion_text(loaded, completion_ids(loaded, TEXTS[5])) == TEXTS[5]


def test_using_a_tokenizer_does_not_change_its_fingerprint() -> None:
    tokenizer = train_tokenizer(TEXTS)
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)

    assert fingerprint(tokenizer) == fingerprint(TOKENIZER)


def edited(folder: Path, **changes: object) -> PreTrainedTokenizerFast:
    """The tokenizer after editing its pipeline file, as another version of it would be."""
    TOKENIZER.save_pretrained(folder)
    pipeline = json.loads((folder / "tokenizer.json").read_text())
    for key, value in changes.items():
        pipeline[key] = value
    (folder / "tokenizer.json").write_text(json.dumps(pipeline))
    return load_tokenizer(folder)


def test_all_that_changes_ids_changes_the_fingerprint(tmp_path: Path) -> None:
    template = train_tokenizer(TEXTS)
    template.chat_template += " "
    eos = train_tokenizer(TEXTS)
    eos.eos_token = "<user>"
    swapped = dict(TOKENIZER.backend_tokenizer.get_vocab())
    swapped["a"], swapped["b"] = swapped["b"], swapped["a"]
    model = {**json.loads(TOKENIZER.backend_tokenizer.to_str())["model"], "vocab": swapped}
    variants = [
        TOKENIZER,
        template,
        eos,
        train_tokenizer([*TEXTS, "z"]),
        train_tokenizer(TEXTS, bos=True),
        edited(tmp_path / "lower", normalizer={"type": "Lowercase"}),
        edited(tmp_path / "split", pre_tokenizer={"type": "WhitespaceSplit"}),
        edited(tmp_path / "swap", model=model),
    ]

    assert len({fingerprint(variant) for variant in variants}) == len(variants)


def test_a_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    for path in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(TaskError, match=re.escape(f"tokenizer.path: {path} is not a directory")):
            load_tokenizer(path)


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"version": "1.0"}', "\x00" * 10])
def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path, content: str | None) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)

    with pytest.raises(
        TaskError, match=re.escape(f"tokenizer.path: {tmp_path} holds no tokenizer")
    ) as caught:
        load_tokenizer(str(tmp_path))

    assert "\n" not in str(caught.value)


def test_code_beside_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Mine: pass\n")

    with contextlib.suppress(TaskError):  # refusing and loading without the code are both right
        load_tokenizer(tmp_path)

    assert not (tmp_path / "executed").exists()


def test_pad_must_differ_from_eos(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path)

    with pytest.raises(
        TaskError, match="pads with '<end>' and ends with '<end>', but the two must be different"
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        (
            "pad_token",
            "pads with None and ends with '<end>', but the two must be different tokens; set pad_token",
        ),
        ("eos_token", "has no eos token; set eos_token and save again"),
        ("chat_template", "has no chat template; set chat_template"),
    ],
)
def test_what_the_engine_needs_must_be_there(tmp_path: Path, attribute: str, message: str) -> None:
    tokenizer = train_tokenizer(TEXTS)
    setattr(tokenizer, attribute, None)
    tokenizer.save_pretrained(tmp_path)

    with pytest.raises(TaskError, match=re.escape(f"the tokenizer in {tmp_path} ")) as caught:
        load_tokenizer(tmp_path)

    assert message in str(caught.value)
