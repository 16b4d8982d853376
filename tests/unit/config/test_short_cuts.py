"""Short cuts of composition say what the long way says: origins by path, files without a defaults list, plain keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from regress.engine.config import defaults as module
from regress.engine.config import load_config
from regress.engine.config.leaves import KeyPath, leaves
from regress.engine.config.origins import COMMAND_LINE, DEFAULT, FILE, Origin
from regress.engine.config.resolve import Resolver
from regress.engine.config.store import Entry, Store

PATHS = [
    *[leaf.path for leaf in list(leaves().values())[:12]],
    ("system_envs", "A"),
    ("system_envs", "B"),
    ("model", "config", "hidden_size"),
]


def around(path: KeyPath) -> list[KeyPath]:
    return [path[:depth] for depth in range(1, len(path) + 1)] + [(*path, "below")]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(PATHS), st.booleans()), max_size=12))
def test_an_origin_is_that_of_the_last_value_of_the_branch(steps: list[tuple[KeyPath, bool]]) -> None:
    """Whatever was given, replaced and removed in between, and asked for in between."""
    store = Store()
    for number, (path, gone) in enumerate(steps):
        if gone:
            store.remove(path)
        else:
            store.put(Entry(path, number, Origin(FILE, str(number))))
        entries = [*store._entries.values()]
        for asked in {near for known in PATHS for near in around(known)}:
            shared = [
                entry
                for entry in entries
                if entry.path[: len(asked)] == asked or asked[: len(entry.path)] == entry.path
            ]
            assert store.origin(asked) == (shared[-1].origin if shared else Origin(DEFAULT))


@pytest.mark.parametrize("header", ["", "# @package _global_\n"])
@pytest.mark.parametrize("lists", ["", "defaults: [_self_]\n"])
def test_a_file_without_a_defaults_list_is_composed_as_hydra_composes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: str, lists: str
) -> None:
    asked: list[Path] = []
    loader = module._loader
    monkeypatch.setattr(module, "_loader", lambda directory: asked.append(directory) or loader(directory))
    path = tmp_path / "mine.yaml"
    path.write_text(f"{header}{lists}max_steps: 7\nalgorithm: {{kl_coef: 0.5}}\n")
    found = load_config(config_path=str(path), environ={})
    assert bool(asked) == bool(header or lists), "the long way is gone where the file is alone"
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
    found = Resolver(tree, lambda _: Origin(COMMAND_LINE)).resolved(("asked",))
    assert found == expected["asked"]
    assert type(found) is type(expected["asked"])
