"""Selection of single quantities by ``-k``.

A test is one rank and microbatch of a replay, but ``-k "tp2 and rank1 and log_probs"`` may name steps and quantities,
too. Each quantity at each place has a name of its own, ``test_golden[dense/tp2/step0/rank1/micro0/log_probs]``: it is
judged if the expression holds for that name, and a test of which nothing is judged is deselected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

import pytest

from regress.plugin.replay_parts import ReplayPart

if TYPE_CHECKING:
    from _pytest.mark.expression import Expression

    from regress.replay.test_matrix import Item

FIXTURE = "regress_record"
"""Fixture whose parameter is the part of a replay that a test is about."""

_CHOSEN = pytest.StashKey[tuple["Item", ...]]()


def chosen(node: pytest.Item, part: ReplayPart) -> Sequence[Item]:
    """Return the quantities that a test judges: all of its part, or those that ``-k`` names."""
    return node.stash.get(_CHOSEN, part.items)


def parts_of(nodes: Iterable[pytest.Item]) -> dict[pytest.Item, ReplayPart]:
    """Return the tests of golden cases, and the part of a replay that each is about."""
    found = {node: getattr(node, "callspec", None) for node in nodes}
    parts = {node: one.params.get(FIXTURE) for node, one in found.items() if one is not None}
    return {node: part for node, part in parts.items() if isinstance(part, ReplayPart)}


def choose(nodes: list[pytest.Item], config: pytest.Config) -> None:
    """Choose by ``-k`` the quantities that each test of a golden case judges.

    Args:
        nodes: collected tests; those of golden cases that would judge nothing are deselected and removed.
    """
    parts = parts_of(nodes)
    expression = _expression(config) if parts else None
    if expression is None:
        return
    left = set()
    for node, part in parts.items():
        found = node.stash[_CHOSEN] = tuple(_selected(expression, node, part))
        if found:  # pytest evaluates the expression for the whole test: by this name it holds
            node.extra_keyword_matches.add(full_name(node, part, found[0]))
        else:
            left.add(node)
    if left:
        config.hook.pytest_deselected(items=[node for node in nodes if node in left])
        nodes[:] = [node for node in nodes if node not in left]


def asked(node: pytest.Item, part: ReplayPart, replay: str) -> bool:
    """Return True if ``-k`` would choose any of what a test judges in another replay, ``case/variant``, too."""
    expression = _expression(node.config)
    names = [
        full_name(node, part, item).replace(part.replay.name, replay).lower() for item in chosen(node, part)
    ]
    above = [one.name.lower() for one in node.listchain()[:-1]]
    return expression is None or any(
        expression.evaluate(
            lambda text, /, _own=name, **_: any(text.lower() in one for one in (_own, *above))
        )
        for name in names
    )


def full_name(node: pytest.Item, part: ReplayPart, item: Item) -> str:
    """Return the name of one quantity of a test: as the test's, with step, update and quantity."""
    return node.name.replace(part.id, item.id)


def selector(node: pytest.Item, part: ReplayPart, item: Item) -> str:
    """Return the text by which ``-k`` selects one quantity of a test."""
    end = (
        "]" if full_name(node, part, item).endswith(f"{item.name}]") else ""
    )  # "entropy" is in "entropy_loss", too
    return f"/{item.name}{end}"


def _expression(config: pytest.Config) -> Expression | None:
    from _pytest.mark.expression import Expression

    text = str(config.getoption("keyword") or "").strip()
    try:
        return Expression.compile(text) if text else None
    except SyntaxError:  # pytest refuses it
        return None


def starts_of(config: pytest.Config) -> list[str]:
    """Return the texts that ``-k`` asks the id of every test to begin with, in lower case.

    They stand behind a bracket, as in ``[dense/packed and log_probs``. An expression with more than `and` has none.
    """
    text = str(config.getoption("keyword") or "").lower()
    if re.search(r"[()]|\b(or|not)\b", text):
        return []
    return [start for term in text.split(" and ") if (start := term.partition("[")[2].strip().rstrip("]"))]


def _selected(expression: Expression, node: pytest.Item, part: ReplayPart) -> Iterator[Item]:
    from _pytest.mark import KeywordMatcher

    shared = cache(KeywordMatcher.from_item(node))
    for item in part.items:
        matches = partial(_matches, full_name(node, part, item).lower(), shared)
        if expression.evaluate(matches):
            yield item


def _matches(
    name: str, shared: Callable[..., bool], text: str, /, **arguments: str | int | bool | None
) -> bool:
    return text.lower() in name or shared(text, **arguments)


def misspelt(expression: str, names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the words of an expression that occur in none of some names, each with the nearest part of one."""
    from difflib import get_close_matches

    known = {name.lower() for name in names}
    words: Mapping[str, None] = dict.fromkeys(part for name in known for part in re.split(r"[][/]", name))
    for word in dict.fromkeys(re.findall(r"[\w:+.\[\]\\/-]+", expression)):
        text = word.lower()
        if word in ("and", "or", "not") or any(text in name for name in known):
            continue
        for near in get_close_matches(text, words, n=1):
            yield word, near
