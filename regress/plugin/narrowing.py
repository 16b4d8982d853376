"""Selection of golden-case tests before they are made.

Making thirty thousand tests to run two hundred of them takes longer than running these. Only tests that
pytest would deselect later are left out: by ids on the command line, ``-k``, ``-m`` or ``--lf``. In case of
doubt, nothing is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from regress.plugin.expressions import Evaluated, Keywords, may_have_marker, may_hold
from regress.plugin.wanted import Wanted

HOOKS = (
    "pytest_collection_modifyitems",
    "pytest_itemcollected",
    "pytest_pycollect_makeitem",
    "pytest_generate_tests",
)
"""Hooks by which a plugin could give tests further markers, keywords and parameters."""

DECLARATION = "pytest_regress_keywords"

KNOWN = {
    "_pytest": (),
    "regress": (),
    "xdist": (),
    "pytest_timeout": (),
    "pytest_cov": (),
    "_hypothesis_pytestplugin": ("hypothesis",),
    "anyio": ("anyio", "usefixtures"),
}
"""Plugins with such hooks, and the markers that they add."""


def choices(metafunc: pytest.Metafunc) -> Iterator[Wanted]:
    """Yield which tests of a function to make: the first choice that finds any is right; if none does, none is run."""
    if _recollected(metafunc.definition):
        yield Wanted()
        return
    whole, texts = _asked(metafunc.config, metafunc.definition)
    named = _containing(
        texts
    )  # pytest refuses an id that no test has, even if an expression would deselect it
    wanted = _by_expressions(metafunc) | named if whole else named
    failed = _last_failed(metafunc)
    if failed is not None:
        yield wanted & failed
    yield wanted


def _containing(texts: list[str]) -> Wanted:
    """Return the tests with an id in one of some texts."""
    return Wanted(
        lambda name: any(f"{name}/" in text for text in texts),
        lambda id: any(id in text for text in texts),
        narrowed=True,
    )


def _asked(config: pytest.Config, definition: pytest.Function) -> tuple[bool, list[str]]:
    """Return whether the command line asks for a function as a whole, and the bracketed ids that it names."""
    whole, texts = bool(config.getoption("pyargs")), []
    chain = {node.name for node in definition.listchain()}
    for argument in config.args:
        base, bracket, rest = argument.partition("[")
        path, *parts = base.split("::")
        if not _may_hold_file(path, definition.path, config):
            continue
        if parts and parts[-1] not in chain:
            continue
        if bracket:
            texts.append(f"[{rest}")
        else:
            whole = True
    return whole or not texts, texts


def _may_hold_file(path: str, file: Path, config: pytest.Config) -> bool:
    """Return True if a path of the command line is a file or holds it, or does not exist here."""
    found = [
        place for root in (config.invocation_params.dir, config.rootpath) if (place := root / path).exists()
    ]
    return not found or any(file.resolve().is_relative_to(place.resolve()) for place in found)


def _last_failures(config: pytest.Config) -> dict[str, bool]:
    cache = getattr(config, "cache", None)
    found = {} if cache is None else cache.get("cache/lastfailed", {})
    return found if isinstance(found, dict) else {}


def _recollected(definition: pytest.Function) -> bool:
    """Return True if pytest treats all tests of a module as failed, because its last collection failed."""
    failed = _last_failures(definition.config)
    return any(node.nodeid in failed for node in definition.listchain() if node.nodeid)


def _last_failed(metafunc: pytest.Metafunc) -> Wanted | None:
    """Return the tests that ``--lf`` leaves of a module, if any of them exists; None where it leaves all."""
    config, definition = metafunc.config, metafunc.definition
    if not config.getoption("lf", False) or not config.pluginmanager.hasplugin("lfplugin-collwrapper"):
        return None
    if metafunc.cls is not None or definition.session.isinitpath(definition.path) or not _alone(metafunc):
        return None
    start = f"{definition.nodeid}["
    failed = {id[len(start) : -1] for id in _last_failures(config) if id.startswith(start)}
    replays = {"/".join(id.split("/")[:2]) for id in failed}
    return Wanted(replays.__contains__, failed.__contains__, narrowed=True) if failed else None


def _by_expressions(metafunc: pytest.Metafunc) -> Wanted:
    """Return the tests that ``-k`` and ``-m`` could select."""
    config, definition = metafunc.config, metafunc.definition
    texts = str(config.getoption("keyword") or "").lstrip(), str(config.getoption("markexpr") or "")
    if not any(texts) or config.getoption("stepwise", False) or not _alone(metafunc):
        return Wanted()
    added = _added(config)
    if added is None:
        return Wanted()
    try:
        return _selected(definition, *texts, added)
    except (ImportError, AttributeError, SyntaxError):  # another pytest, or an invalid expression
        return Wanted()


def _selected(definition: pytest.Function, keywords: str, markers: str, added: frozenset[str]) -> Wanted:
    from _pytest.mark import KeywordMatcher, MarkMatcher
    from _pytest.mark.expression import Expression

    if markers:
        present = MarkMatcher.from_markers(definition.iter_markers())
        if not may_hold(Expression.compile(markers), may_have_marker(present, added)):
            return Wanted(lambda _: False, lambda _: False, narrowed=True)
    if not keywords:
        return Wanted()
    expression: Evaluated = Expression.compile(keywords)
    names = Keywords(definition.name, KeywordMatcher.from_item(definition), added)
    return Wanted(
        lambda replay: may_hold(expression, names.of_replay(replay)),
        lambda id: may_hold(expression, names.of_test(id)),
        narrowed=True,
    )


def _alone(metafunc: pytest.Metafunc) -> bool:
    """Return True if nothing else adds to the ids of a function's tests."""
    if metafunc.definition.get_closest_marker("parametrize") is not None:
        return False
    if any(hasattr(owner, "pytest_generate_tests") for owner in (metafunc.module, metafunc.cls)):
        return False
    found: Any = getattr(metafunc, "_arg2fixturedefs", None)
    return found is not None and not any(
        fixture.params is not None for fixtures in found.values() for fixture in fixtures
    )


def _added(config: pytest.Config) -> frozenset[str] | None:
    """Return the markers and keywords that plugins may give to tests once they are made; None if unknown."""
    names: set[str] = set()
    for plugin in config.pluginmanager.get_plugins():
        if not any(hasattr(plugin, hook) for hook in HOOKS) or hasattr(plugin, DECLARATION):
            continue
        module = plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__module__
        own = KNOWN.get(module.partition(".")[0])
        if own is None:
            return None
        names.update(own)
    if any(_may_add(path) for path in _conftests(config)):
        return None
    for declared in getattr(config.hook, DECLARATION)(config=config):
        names.update(declared)
    return frozenset(names)


def _conftests(config: pytest.Config) -> Iterable[Path]:
    """Yield the conftest.py files of the collected folders, except those that pytest has loaded."""
    loaded = {getattr(plugin, "__file__", None) for plugin in config.pluginmanager.get_plugins()}
    passed = config.getini("norecursedirs")
    for argument in config.args:
        for folder, folders, files in os.walk(config.invocation_params.dir / argument.partition("::")[0]):
            folders[:] = [
                name for name in folders if not any(fnmatchcase(name, pattern) for pattern in passed)
            ]
            path = Path(folder) / "conftest.py"
            if path.name in files and str(path) not in loaded:
                yield path


def _may_add(path: Path) -> bool:
    """Return True if a conftest.py has one of the hooks."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return any(name in text for name in (*HOOKS, "pytest_plugins"))
