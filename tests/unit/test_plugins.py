"""Parts that stand on the core: found by the table of this package, or by the entry points of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint

import pytest

from regress import plugins
from regress.errors import ConfigError

Register = Callable[..., None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Register]:
    """``register("name", "module:attribute")``: the only entry point that is installed."""

    def install(*points: tuple[str, str]) -> None:
        found = [EntryPoint(name, value, plugins.SOURCES) for name, value in points]
        monkeypatch.setattr(plugins, "entry_points", lambda group: found)
        plugins.registered.cache_clear()

    yield install
    plugins.registered.cache_clear()


def test_parts_of_this_package_need_no_metadata(register: Register) -> None:
    register()
    for group, own in plugins.OWN.items():
        for name, point in plugins.registered(group).items():
            assert point.value == own[name]
            assert plugins.load(point) is not None
        assert plugins.registered(group).keys() == own.keys()


def test_stale_metadata_of_this_package_is_not_asked(register: Register) -> None:
    register(("nexrl", "regress.gone.nexrl:READER"), ("old", "regress.gone.old:READER"))
    assert plugins.registered(plugins.SOURCES)["nexrl"].value == "regress.interop.nexrl_dumps:READER"
    assert "old" not in plugins.registered(plugins.SOURCES)


def test_two_packages_of_one_name_are_both_named(register: Register) -> None:
    register(("nexrl", "mine:READER"))
    with pytest.raises(
        ConfigError,
        match=r"of regress.sources is registered by regress.interop.nexrl_dumps:READER and by mine:READER: uninstall",
    ):
        plugins.registered(plugins.SOURCES)


def test_what_cannot_be_loaded_is_named(register: Register) -> None:
    register(("mine", "a_package_that_is_gone:READER"))
    with pytest.raises(
        ConfigError,
        match="'mine' of regress.sources is a_package_that_is_gone:READER, which cannot be loaded "
        r"\(.*No module named.*\): repair or uninstall the package that registers it",
    ):
        plugins.load(plugins.registered(plugins.SOURCES)["mine"])
