"""The public API: its names, their signatures, and that nothing inside the package can replace them."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import regress
from regress.replay.replay_pool import shared_pool

SIGNATURES = Path(__file__).with_name("public_api.txt")
ROOMS = {module.name for module in pkgutil.iter_modules(regress.__path__)}


def signature(name: str) -> str:
    """A line for a public name: its kind, its arguments, and what it returns."""
    found = getattr(regress, name)
    if inspect.isclass(found) and issubclass(found, Exception):
        return f"class {name}({found.__mro__[1].__name__})"
    said = re.sub(r"<function \S+ at 0x[0-9a-f]+>", "<function>", str(inspect.signature(found)))
    return f"{'class' if inspect.isclass(found) else 'def'} {name}{said}"


def test_names_and_signatures_are_frozen() -> None:
    """Whoever changes the public API changes `public_api.txt` with it, and the changelog."""
    found = [signature(name) for name in regress.__all__ if name != "__version__"]
    assert "\n".join(found) + "\n" == SIGNATURES.read_text()


def test_no_public_name_is_a_room() -> None:
    assert not ROOMS & {*regress.__all__}


def test_types_and_homes_are_the_same_names() -> None:
    """A name that only one of the two tables has would be `Any` to type checkers, or missing at run time."""
    tree = ast.parse(Path(regress.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == {name: f"regress.{home}.{name}" for name, home in regress._HOMES.items()}


@pytest.mark.parametrize("room", ["dump", "golden", "grpo"])
def test_rooms_with_lazy_names_are_typed_too(room: str) -> None:
    module = importlib.import_module(f"regress.{room}")
    tree = ast.parse(Path(str(module.__file__)).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == {*module._HOMES}
    for name in module._HOMES:
        assert getattr(module, name) is not None


def import_everything() -> list[str]:
    """Import every submodule, and return the public names that are another thing since."""
    warnings.simplefilter("ignore")
    for module in pkgutil.walk_packages(regress.__path__, "regress."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    homes = {
        name: getattr(importlib.import_module(f"regress.{home}"), name)
        for name, home in regress._HOMES.items()
    }
    return [name for name, found in homes.items() if getattr(regress, name) is not found]


def test_importing_every_submodule_replaces_no_public_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that is forked from one that has imported torch, as nearly all the time went to that."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    target = importlib.import_module(Path(__file__).stem).import_everything
    assert shared_pool().run(target, {}, 1) == [[]]


def test_importing_the_package_starts_nothing() -> None:
    code = (
        "import regress, sys; print(*sorted({'torch', 'numpy', 'pandas', 'transformers'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == ""


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'recorder'"):
        regress.recorder  # noqa: B018  # the access is what is tested
