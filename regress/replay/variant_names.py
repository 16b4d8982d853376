"""Names of variants: the settings that they spell out, and the choice by patterns or expressions as in pytest's -k.

``tp2-pp2-1f1b-packed-mbs4`` spells out its own configuration. Numbers follow the word: ``dp2`` is two replicas,
``mbs4`` four samples a microbatch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from regress.errors import ConfigError, meant
from regress.layout import DIMENSIONS

NUMBERS: Mapping[str, str] = {
    **{name: f"parallel.{name}" for name in DIMENSIONS},
    "mbs": "batching.micro_batch_size",
    "budget": "batching.max_tokens_per_microbatch",
    "pad": "batching.pad_to_multiple_of",
    "chunk": "batching.log_prob_chunk_size",
}
"""Words that a number follows, and the key that each sets."""

_TWO_STAGES = {"parallel.pp_stages_per_rank": 2}

WORDS: Mapping[str, Mapping[str, Any]] = {
    "packed": {"batching.layout": "packed"},
    "left": {"batching.padding_side": "left"},
    "reversed": {"batching.row_order": "reversed"},
    "longest": {"batching.row_order": "longest_first"},
    "eager": {"model.attn_implementation": "eager"},
    "varlen": {"model.attn_implementation": "varlen", "batching.layout": "packed"},
    "checkpointing": {"model.gradient_checkpointing": True},
    "dealt": {"parallel.sample_split": "interleaved"},
    "ddp": {"parallel.data_parallel": "ddp"},
    "accelerate": {"parallel.data_parallel": "accelerate"},
    "hsdp": {"parallel.data_parallel": "hsdp"},
    "noreshard": {"parallel.reshard_after_forward": False},
    "param32": {"parallel.fsdp_param_dtype": "float32"},
    "reduce32": {"parallel.fsdp_reduce_dtype": "float32"},
    "reduce16": {"parallel.fsdp_reduce_dtype": "bfloat16"},
    "hf": {"parallel.tp_implementation": "transformers"},
    "sp": {"parallel.sequence_parallel": True},
    "ulysses": {"parallel.cp_method": "ulysses"},
    "ring": {"parallel.cp_method": "ring"},
    "gather": {"parallel.cp_method": "all_gather"},
    "zigzag": {"parallel.cp_split": "zigzag"},
    "gpipe": {"parallel.pp_schedule": "gpipe"},
    "1f1b": {"parallel.pp_schedule": "1f1b"},
    "interleaved": {"parallel.pp_schedule": "interleaved_1f1b", **_TWO_STAGES},
    "bfs": {"parallel.pp_schedule": "looped_bfs", **_TWO_STAGES},
    "zb": {"parallel.pp_schedule": "interleaved_zero_bubble", **_TWO_STAGES},
    "zbv": {"parallel.pp_schedule": "zbv_zero_bubble", **_TWO_STAGES},
}
"""Words without a number, and the values they set."""

_NUMBERED = re.compile(r"([a-z]+)(\d+)", re.ASCII)


def overrides_of(name: str) -> dict[str, Any] | None:
    """Return the overrides that a name spells out, by dotted key; ``None`` if a part of it is not a known word."""
    found: dict[str, Any] = {}
    for part in name.split("-"):
        numbered = _NUMBERED.fullmatch(part)
        if part in WORDS:
            found |= WORDS[part]
        elif numbered is not None and numbered[1] in NUMBERS:
            found[NUMBERS[numbered[1]]] = int(numbered[2])
        else:
            return None
    return found


_TOKEN = re.compile(r"\s*(\(|\)|[^\s()]+)")
_WORDS = ("and", "or", "not")
Test = Callable[[str], bool]


def select(names: Iterable[str], pattern: str) -> list[str]:
    """Return names that match a comma-separated list of patterns, in order.

    Raises:
        ConfigError: for a pattern that matches none.
    """
    known = list(names)
    patterns = [part.strip() for part in pattern.split(",") if part.strip()] or [pattern]
    for part in patterns:
        if not any(fnmatchcase(name, part) for name in known):
            raise ConfigError(f"""{_meant(part, known)}{part!r} matches none of {", ".join(known)}; give a name, or a
            pattern such as 'packed*'""")
    return [name for name in known if any(fnmatchcase(name, part) for part in patterns)]


def _meant(name: str, known: Iterable[str]) -> str:
    """Return the name whose parts are the nearest ones, else the nearest names, in words."""
    words = [*known]
    parts = {part for word in words for part in word.split("-")}
    near = [next(iter([p] if p in parts else get_close_matches(p, parts, n=1)), "") for p in name.split("-")]
    whole = "-".join(near)
    return f"did you mean {whole}? " if len(near) > 1 and all(near) and whole != name else meant(name, words)


def choose(names: Iterable[str], text: str) -> list[str]:
    """Return the names that ``text`` matches, in their order.

    ``packed*,dp2`` is a list of patterns, each for a whole name. ``tp2 and not packed`` is an expression; its
    words are the dash-separated parts of a name, or patterns for all of it.

    Raises:
        ConfigError: if it finds nothing, or cannot be read.
    """
    known = list(names)
    tokens = _TOKEN.findall(text)
    if not {"(", ")", *_WORDS} & set(tokens):
        return select(known, text)
    test = _Parser(text, tokens).expression()
    found = [name for name in known if test(name)]
    if not found:
        parts = {part for name in known for part in name.split("-")}
        hints = (meant(word, parts) for word in tokens if word not in {"(", ")", *_WORDS, *parts})
        raise ConfigError(
            f"{next(filter(None, hints), '')}{text!r} matches none of {', '.join(known)}; name parts of their names"
        )
    return found


class _Parser:
    """Parser of expressions: ``or`` binds weaker than ``and``, which binds weaker than ``not``."""

    def __init__(self, text: str, tokens: list[str]) -> None:
        self._text, self._tokens = text, [*tokens, ""]

    def expression(self) -> Test:
        test = self._any()
        if self._tokens[0]:
            raise self._unreadable()
        return test

    def _any(self) -> Test:
        tests = [self._all()]
        while self._next("or"):
            tests.append(self._all())
        return lambda name: any(test(name) for test in tests)

    def _all(self) -> Test:
        tests = [self._not()]
        while self._next("and"):
            tests.append(self._not())
        return lambda name: all(test(name) for test in tests)

    def _not(self) -> Test:
        if self._next("not"):
            test = self._not()
            return lambda name: not test(name)
        if self._next("("):
            test = self._any()
            if not self._next(")"):
                raise self._unreadable()
            return test
        word = self._tokens[0]
        if word in ("", ")", *_WORDS):
            raise self._unreadable()
        self._tokens.pop(0)
        if any(sign in word for sign in "*?["):
            return lambda name: fnmatchcase(name, word)
        return lambda name: f"-{word}-" in f"-{name}-"

    def _next(self, token: str) -> bool:
        if self._tokens[0] != token:
            return False
        self._tokens.pop(0)
        return True

    def _unreadable(self) -> ConfigError:
        where = f"at {self._tokens[0]!r}" if self._tokens[0] else "at its end"
        return ConfigError(
            f"{self._text!r} is not an expression ({where}); write such as 'tp2 and not (packed or left)'"
        )
