"""Arguments of `record` that are not valid, refused before anything is hooked."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from regress.errors import CaptureError

Rule = tuple[Callable[[Any], bool], str]
"""Test of a value, and what it has to be, in words."""


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_factor(value: Any) -> bool:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return known and math.isfinite(value) and value > 0


def _is_id(value: Any) -> bool:
    return value == "none" or (isinstance(value, int) and not isinstance(value, bool))


def _is_mesh(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and _is_count(size) for name, size in value.items()
    )


def _is_name(value: Any) -> bool:
    if isinstance(value, str) or not callable(value):
        return isinstance(value, str)
    try:
        inspect.signature(value).bind({})
    except TypeError:
        return False
    except ValueError:  # a function in C tells no signature
        pass
    return True


def _is_module(value: Any) -> bool:
    return isinstance(value, str | nn.Module)


FLAG: Rule = (_is_flag, "True or False")
PATTERN: Rule = (_is_text, "a regular expression of names")
CHOICE: Rule = (
    lambda value: _is_flag(value) or _is_text(value),
    "True, False or a regular expression of names",
)
FIND: Rule = (_is_name, "the name of a forward argument, or a function of all of them")

RULES: Mapping[str, Rule] = {
    "folder": (
        lambda value: isinstance(value, str | os.PathLike) or hasattr(value, "iterdir"),
        "the path of a folder",
    ),
    "token_gradient": FLAG,
    "activations": PATTERN,
    "routing": FLAG,
    "gradient": CHOICE,
    "param": CHOICE,
    "optimizer_state": CHOICE,
    "initial_weights": FLAG,
    "temperature": (_is_factor, "a finite number greater than 0, by which logits are divided"),
    "samples": FIND,
    "classify": (callable, 'a function of the forward arguments that returns "old", "reference" or None'),
    "every_n_steps": (_is_count, "a whole number of 1 or more"),
    "decoder": (_is_module, "a module or its name"),
    "head": (
        lambda value: _is_module(value) or callable(value),
        "a module, its name, or a function from hidden states to logits",
    ),
    "input_ids": FIND,
    "attention_mask": FIND,
    "position_ids": FIND,
    "cu_seq_lens": FIND,
    "pad_token_id": (_is_id, 'a token id, or "none"'),
    "mesh": (_is_mesh, 'the extent of each dimension, such as {"dp": 2}'),
    "sequence_group": (lambda value: callable(getattr(value, "size", None)), "a process group"),
    "backward_scale": (_is_factor, "a finite number greater than 0"),
    "read_from": (lambda value: value in ("logits", "hidden_states"), '"logits" or "hidden_states"'),
    "system": (_is_text, "the name of the trainer"),
    "overwrite": FLAG,
}
"""Argument -> what it has to be; None stands for the default where there is one."""

REQUIRED = (
    *("folder", "token_gradient", "routing", "gradient", "param", "optimizer_state", "initial_weights"),
    *("every_n_steps", "system", "overwrite"),
)
"""Arguments that cannot be None."""
PATTERNS = ("activations", "gradient", "param", "optimizer_state")


def _short(value: Any) -> str:
    """Return a value on one line, of 80 characters at most."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that are not valid.

    Raises:
        CaptureError: naming the first of them.
    """
    for name, (fits, words) in RULES.items():
        value = arguments[name]
        if value is None and name not in REQUIRED:
            continue
        if not fits(value):
            raise CaptureError(f"record({name}={_short(value)}) is not valid: give {words}")
        if name in PATTERNS and isinstance(value, str):
            try:
                re.compile(value)
            except re.error as error:
                raise CaptureError(
                    f"record({name}=...) {value!r} is not a regular expression ({error}): correct it"
                ) from None
