"""Interpolations say what OmegaConf says, origins are those of the last value of a branch, Hydra's header is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from regress.engine.config import load_config
from regress.engine.config.config_messages import DEFAULT, FILE, Origin
from regress.engine.config.config_option import Entry, KeyPath
from regress.engine.config.config_schema import options
from regress.engine.config.config_values import Resolver, Values

PATHS = [
    *[option.path for option in list(options().values())[:12]],
    ("system_envs", "A"),
    ("system_envs", "B"),
    ("model", "config", "hidden_size"),
]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(PATHS), st.booleans()), max_size=12))
def test_an_origin_is_that_of_the_last_value_of_the_branch(steps: list[tuple[KeyPath, bool]]) -> None:
    """Whatever was given, replaced and removed in between, and asked for in between."""
    values, given = Values({}), {}
    for number, (path, gone) in enumerate(steps):
        if gone:
            values.remove(path)
        else:
            values.put(Entry(path, number, Origin(FILE, str(number))))
        for other in [
            other
            for other in given
            if other[: len(path)] == path or (not gone and path[: len(other)] == other)
        ]:
            del given[other]
        if not gone:
            given[path] = number
        for asked in PATHS:
            shared = [n for p, n in given.items() if p[: len(asked)] == asked or asked[: len(p)] == p]
            assert values.origin(asked) == (Origin(FILE, str(shared[-1])) if shared else Origin(DEFAULT))


@pytest.mark.parametrize("header", ["", "# @package _global_\n"])
@pytest.mark.parametrize("lists", ["", "defaults: [_self_]\n"])
def test_a_file_with_and_without_a_defaults_list(tmp_path: Path, header: str, lists: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"{header}{lists}max_steps: 7\nalgorithm: {{kl_coef: 0.5}}\n")
    found = load_config(config_path=str(path), environ={})
    assert (found.config.max_steps, found.config.algorithm.kl_coef) == (7, 0.5)
    assert found.origins["algorithm.kl_coef"].layer == FILE
    assert found.origins["seed"].layer == DEFAULT


TREE: dict[str, Any] = {
    "a": "x",
    "b": {"c": 2, "d": None, "e": [1, "two"], "f": "${a}", "g": "yes"},
    "none": None,
}


@pytest.mark.parametrize(
    "text", ["${a}", "${b.c}", "${b.d}", "${b.e}", "${b.f}", "${b.g}", "${none}", "${b}", "x${a}", "${a}${a}"]
)
def test_a_key_that_is_referred_to_has_the_value_that_omegaconf_gives(text: str) -> None:
    tree = {**TREE, "asked": text}
    expected: Any = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)

    def lookup(path: KeyPath) -> Any:
        value: Any = tree
        for name in path:
            value = value[name]
        return value

    found = Resolver(lookup, {}).resolved(("asked",))
    assert found == expected["asked"]
    assert type(found) is type(expected["asked"])
