"""Tests of architectures: one for each layout of the models that ``--regress-model`` names."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

from regress.credential_redaction import redacted
from regress.errors import RegressError

if TYPE_CHECKING:
    from regress.check.architecture_check import Architecture


class ModelTests:
    """Adds the tests to a session."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Add a test for each layout of each model, before ``-k`` deselects any."""
        for name in dict.fromkeys(config.getoption("--regress-model")):
            node = ModelNode.from_parent(
                session, name=redacted(name), nodeid=f"regress-model[{redacted(name)}]"
            )
            node.model = name
            items += node.collect()


class ModelNode(pytest.Collector):
    """A model that ``--regress-model`` names."""

    model: str

    @cached_property
    def architecture(self) -> Architecture:
        """The model, built once."""
        from regress.check.architecture_check import Architecture

        return Architecture(self.model)

    def collect(self) -> Iterator[pytest.Item]:
        """Return a test for each layout."""
        from regress.check.model_layouts import LAYOUTS

        return (LayoutTest.from_parent(self, name=layout) for layout in LAYOUTS)


class LayoutTest(pytest.Item):
    """A layout, which has to compute what each sample gives alone; one that the model refuses is skipped."""

    parent: ModelNode

    def runtest(self) -> None:
        """Judge the layout."""
        row = self.parent.architecture.row(self.name)
        if (
            row.verdict == "refused"
        ):  # no wrong number: the model raises, as `regress check model` tells without failing
            pytest.skip(f"the model refuses it: {row.text}")
        if row.verdict == "wrong":
            raise RegressError(f"{self.parent.name}, {self.name}: {row.text}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the sentence of an error of this package."""
        own = isinstance(excinfo.value, RegressError)
        return str(excinfo.value) if own else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Return where the test is: nowhere in a file."""
        return self.parent.nodeid, None, self.name
