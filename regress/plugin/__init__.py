"""The pytest plugin: options, the fixture `regress`, goldens and their updates.

It loads with every run of pytest, so it imports neither torch nor numpy nor pandas before a test needs them.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from regress.import_trust import allow_all_code
from regress.plugin import pytest_hooks, replay_session
from regress.plugin.failure_summary import FailedReplays
from regress.plugin.model_tests import ModelTests
from regress.plugin.orphaned_checks import Orphans
from regress.plugin.pytest_options import add_options, spell_out
from regress.plugin.quantity_selection import choose
from regress.plugin.regress_fixture import regress, regress_check
from regress.plugin.replay_tests import regress_record
from regress.plugin.session_settings import SETTINGS, read_settings
from regress.plugin.update_summary import SUMMARY, Summary
from regress.printable_text import encodable

__all__ = ["regress", "regress_check", "regress_record"]


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hooks of conftest.py files."""
    pluginmanager.add_hookspecs(pytest_hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare options and ini keys."""
    add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> None:
    """Keep options without a value from swallowing the path that follows them."""
    spell_out(early_config, parser, args)


def pytest_configure(config: pytest.Config) -> None:
    """Check all settings, whether or not a test will ask for them."""
    config.stash[SETTINGS] = read_settings(config)
    if config.getoption("--regress-allow-code"):
        allow_all_code()
    summary = config.stash[SUMMARY] = Summary(config)
    config.pluginmanager.register(Orphans(config, summary), "regress-orphans")  # prints after the summary
    config.pluginmanager.register(summary, "regress-summary")
    config.pluginmanager.register(FailedReplays(config), "regress-failed-replays")
    if config.getoption("--regress-model"):
        config.pluginmanager.register(ModelTests(), "regress-models")
    replay_session.register(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the quantities that ``-k`` names: after conftest.py files, before pytest itself deselects tests."""
    choose(items, config)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return a line that announces an update of goldens, or says which revision on the hub is read; else None."""
    settings = config.stash[SETTINGS]
    if settings.update is not None:
        return f"regress: {settings.update} in {settings.golden_dir}"
    if "snapshots" not in settings.golden_dir.parts:
        return None
    from regress.golden.hub_goldens import hub_address

    address = hub_address(settings.golden_dir)
    return None if address is None else f"regress: goldens of {address}"


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, dict[str, Any] | None, dict[str, Any] | None]:
    """Escape what cannot be encoded in a report of a worker: a lone surrogate of a name would end the session."""
    found = yield
    text = str(found)
    return found if found is None or (text.isascii() and "\\ud" not in text) else encodable(found)
