"""`case.yaml`: the reason, the configuration and the recipe of the inputs of a case."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from regress.dump.jsontext import Json, plain
from regress.errors import DumpError, GoldenError, reason

_KEYS = ("reason", "claims", "rollouts", "precisions", "leaves_out", "config", "recipe")
_ROLLOUTS = ("recorded", "sampled")
_LIMIT = 2**20
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+")


@dataclass(frozen=True)
class CaseFile:
    """Content of `case.yaml`.

    Attributes:
        reason: reason why this case exists.
        claims: signals it promises beyond those of every case, such as `tool_tokens`.
        config: engine configuration, as overrides of the defaults.
        recipe: settings that the inputs were made with, in the form of the program that made them.
        rollouts: ``recorded``: replays read the recorded rollouts; ``sampled``: they sample their own, which must be
            the recorded ones.
        precisions: precisions that it is replayed in; none: all.
        leaves_out: quantities that are not recorded, because other cases have them.
    """

    reason: str
    claims: list[str] = field(default_factory=list)
    config: dict[str, Json] = field(default_factory=dict)
    recipe: dict[str, Json] = field(default_factory=dict)
    rollouts: str = "recorded"
    precisions: list[str] = field(default_factory=list)
    leaves_out: list[str] = field(default_factory=list)


def parse_case(data: bytes, path: Path) -> CaseFile:
    """Parse `case.yaml`; raises `GoldenError` naming `path`, the rule and the remedy for anything malformed."""
    if len(data) > _LIMIT:
        raise GoldenError(
            f"{path} has {len(data)} bytes, but a case is described in at most {_LIMIT}: shorten it"
        )
    try:
        tree = yaml.load(data.decode("utf-8"), Loader=_Loader)
        values = plain(tree, "the case")
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise GoldenError(f"{path}{line} is no valid YAML ({error.problem}): correct it") from None
    except RecursionError:
        raise GoldenError(f"{path} is nested too deeply: it is no description of a case") from None
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, DumpError) as error:
        raise GoldenError(f"{path} holds what no case can hold ({reason(error)}): correct it") from None
    return _checked(values, path)


def _checked(values: Json, path: Path) -> CaseFile:
    if not isinstance(values, dict):
        raise GoldenError(f"{path} must hold a mapping with the key reason: write lines of KEY: VALUE")
    for key in values.keys() - set(_KEYS):
        raise GoldenError(f"{path} has the unknown key {key!r}: a case has {', '.join(_KEYS)}")
    found = values.get("reason")
    if not isinstance(found, str) or not found.strip():
        raise GoldenError(f"{path} has no reason: write one sentence on what this case is for")
    rollouts = values.get("rollouts", _ROLLOUTS[0])
    if rollouts not in _ROLLOUTS:
        raise GoldenError(f"{path} has rollouts {rollouts!r}: write {' or '.join(_ROLLOUTS)}")
    claims, precisions, leaves_out = (
        _words(values, key, path) for key in ("claims", "precisions", "leaves_out")
    )
    config, recipe = (_mapping(values, key, path) for key in ("config", "recipe"))
    return CaseFile(found, claims, config, recipe, str(rollouts), precisions, leaves_out)


def _words(values: dict[str, Json], key: str, path: Path) -> list[str]:
    found = values.get(key) or []
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise GoldenError(f"{path} has {key} {found!r}: write a list of words")
    return [str(word) for word in found]


def _mapping(values: dict[str, Json], key: str, path: Path) -> dict[str, Json]:
    found = values.get(key) or {}
    if not isinstance(found, dict):
        raise GoldenError(f"{path} has {key} {found!r}: write a mapping")
    return found


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no annotations
    """Loader of plain values only: no tags, aliases (which can grow without bound) or duplicate keys;
    `1e-3` is a number.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "an alias, which no case needs", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} twice", key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        found: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return found


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
