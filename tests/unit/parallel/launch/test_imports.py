from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from regress.parallel.launch.forkserver_imports import imported_for_good


@pytest.fixture(autouse=True)
def _unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_imported_is_no_work_for_the_garbage_collector() -> None:
    with imported_for_good():
        assert not gc.isenabled()
        kept = [object()]
    assert gc.isenabled()
    assert not any(one is kept for one in gc.get_objects())


def test_the_collector_goes_on_after_an_import_that_fails() -> None:
    with pytest.raises(ImportError), imported_for_good():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with imported_for_good():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
