"""Tokenizers: a local one with one token per character, or any local Hugging Face tokenizer.

`apply_chat_template` writes a turn as ``<user>text<end>`` or ``<assistant>text<end>``, so a problem costs
three special tokens besides its text, and the end-of-turn token ends generation.
"""

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import cast

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from regress.engine.model_hub import local_folder
from regress.errors import TaskError
from regress.tasks.conversation_turns import marks_in, without_marks
from regress.tasks.problem import Problem

PAD, END, UNKNOWN, USER, ASSISTANT, BEGIN = "<pad>", "<end>", "<unk>", "<user>", "<assistant>", "<begin>"
TOOL = "<tool>"

_TEMPLATE = (
    "{{ bos_token or '' }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('the roles are user and assistant, not ' ~ message['role']) }}"
    "{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


_TOOL_TEMPLATE = _TEMPLATE.replace("['user', 'assistant']", "['user', 'assistant', 'tool']").replace(
    "user and assistant", "user, assistant and tool"
)


def train_tokenizer(
    texts: Iterable[str], *, bos: bool = False, tool: bool = False
) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each character of `texts`, in code point order after the special tokens, and
    one for each mark of a call or an answer in them.

    The ids depend only on the sets of characters and marks. pad differs from eos; there is a bos token, or one
    that begins the turn of a tool, only if asked for. Raises TaskError if there is no text.
    """
    texts = list(texts)
    marks = sorted(set().union(*map(marks_in, texts)))
    characters = sorted(set().union(*map(without_marks, texts)))
    if not characters:
        raise TaskError("the tokenizer has no text to learn its characters from: give the task some problems")
    roles = [USER, ASSISTANT, *([TOOL] if tool else [])]
    specials = [PAD, END, UNKNOWN, *roles, *([BEGIN] if bos else [])]
    vocabulary = {token: index for index, token in enumerate(specials + characters)}
    # byte-pair encoding without merges: every character is a token, and no pre-tokenizer can drop one
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        bos_token=BEGIN if bos else None,
        extra_special_tokens=roles,
        chat_template=_TOOL_TEMPLATE if tool else _TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(path: str | Path, *, chat: bool = True, sampling: bool = True) -> PreTrainedTokenizerBase:
    """Load the tokenizer saved in a directory, or of a name on the hub; never run code stored with it.

    Args:
        chat: prompts are text, so that a chat template is needed.
        sampling: completions are sampled, so that an eos token is needed, and a pad token other than eos (a mask made
            from pad would otherwise hide the end of every completion).

    Raises:
        TaskError: if there is none, or if it lacks what is needed.
    """
    folder = local_folder(path, "tokenizer.path", weights=False)
    if not folder.is_dir():
        raise TaskError(
            f"tokenizer.path: {folder} is not a directory; give a directory made by save_pretrained"
        )
    try:
        kind = PreTrainedTokenizerFast if _is_generic(folder) else AutoTokenizer
        tokenizer = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its parsers raise
        reason = str(error).strip().partition("\n")[0]
        raise TaskError(f"""tokenizer.path: {folder} holds no tokenizer that can be loaded ({type(error).__name__}:
        {reason}); give a directory made by save_pretrained""") from error
    if sampling:
        _check_ends(tokenizer, folder)
    if chat and not tokenizer.chat_template:
        raise TaskError(f"""tokenizer.path: the tokenizer in {folder} has no chat template; set chat_template, or give
        the prompts as token ids""")
    return tokenizer


def _is_generic(folder: Path) -> bool:
    """Return True if ``tokenizer.json`` alone is the tokenizer, as ``tokenizer_config.json`` tells.

    `AutoTokenizer` would build another one over it for some models, of the class that their family has (Qwen2).
    """
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and settings.get("tokenizer_class") == PreTrainedTokenizerFast.__name__


def _check_ends(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    if tokenizer.eos_token_id is None:
        raise TaskError(
            f"tokenizer.path: the tokenizer in {folder} has no eos token; set eos_token and save again"
        )
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise TaskError(f"""tokenizer.path: the tokenizer in {folder} pads with {tokenizer.pad_token!r} and ends with
        {tokenizer.eos_token!r}, but the two must be different tokens; set pad_token and save again""")


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a sha256 over everything that decides the ids of a text and the text of ids.

    That is: vocabulary, merges, normalizer, pre- and post-processing, decoder, special tokens and chat
    template. Padding and truncation are left out, since every call to a tokenizer may change them.
    """
    content: dict[str, object] = {
        "vocabulary": tokenizer.get_vocab(),
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
    }
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        pipeline = json.loads(tokenizer.backend_tokenizer.to_str())
        content["pipeline"] = {key: pipeline[key] for key in pipeline.keys() - {"padding", "truncation"}}
    else:
        content["pipeline"] = type(tokenizer).__name__
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Return the ids of a conversation in which the user has asked `prompt` and the assistant is to answer."""
    return _chat_ids(tokenizer, [{"role": "user", "content": prompt}], add_generation_prompt=True)


def _chat_ids(
    tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, str]], *, add_generation_prompt: bool = False
) -> list[int]:
    found = tokenizer.apply_chat_template(
        chat, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
    )
    return cast(list[int], found)


def turn_ids(tokenizer: PreTrainedTokenizerBase, problem: Problem, role: str, content: str) -> list[int]:
    """Return the ids between the end of a completion and the start of the next, with `content` said by `role`
    between them.

    Raises ValueError if the chat template writes the turns before it in another way when one is added.
    """
    chat = [{"role": "user", "content": problem.prompt}, {"role": "assistant", "content": problem.answer}]
    before = _chat_ids(tokenizer, chat)
    whole = _chat_ids(tokenizer, [*chat, {"role": role, "content": content}], add_generation_prompt=True)
    if whole[: len(before)] != before or tokenizer.eos_token_id not in before:
        raise ValueError("the turns before it are written in another way")
    # the policy's own completion ends with eos; the template's text after it belongs to this turn
    behind = before[::-1].index(tokenizer.eos_token_id)
    return whole[len(before) - behind :]


def completion_ids(tokenizer: PreTrainedTokenizerBase, answer: str) -> list[int]:
    """Return the ids that a model should generate after `prompt_ids`: the answer and eos."""
    return [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]


def completion_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text before the first eos. Other special tokens stay visible: they are mistakes, judged as such."""
    if tokenizer.eos_token_id in ids:
        ids = ids[: ids.index(tokenizer.eos_token_id)]
    return cast(
        str, tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )
