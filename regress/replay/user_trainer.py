"""A user's own trainer in place of the engine: the function that replays golden cases, and its calls on ranks.

    # pyproject.toml
    [tool.regress]
    replay = "my_pkg.adapter:run"

    def run(case: Path, variant: Variant, precision: Precision, folder: Path) -> None: ...

or the hook ``pytest_regress_replay`` of a conftest.py, with the same arguments. ``case`` is the folder of an export
(`regress.replay.case_export`); the function leaves a dump in ``folder``, or raises `NotSupported`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regress.errors import ConfigError, NotSupported, ReplayError, reason
from regress.project_settings import project_section
from regress.replay.variant import Precision, Variant

KEY = "replay"
ARGUMENTS = ("case", "variant", "precision", "folder")


@dataclass(frozen=True)
class Adapter:
    """Function that replays golden cases, by its location, so that every process can find it.

    Attributes:
        name: name in messages.
        module, attribute: location of its definition.
        file: file of the module, if known; another module of the same name is not taken for it.
        root: folder from which the module is imported, besides those of Python.
    """

    name: str
    module: str
    attribute: str
    file: str | None = None
    root: str | None = None

    def load(self) -> Callable[..., Any]:
        """Import the function.

        Raises:
            ConfigError: if there is none, or it lacks an argument.
        """
        function = getattr(self._imported(), self.attribute, None)
        if not callable(function):
            raise ConfigError(
                f"{self.name}: {self.module} has no function {self.attribute}; correct its name"
            )
        check_arguments(function, self.name)
        return function  # type: ignore[no-any-return]  # callable, as was looked

    def _imported(self) -> Any:
        if self.root is not None and self.root not in sys.path:
            sys.path.append(self.root)
        known = sys.modules.get(self.module)
        if known is not None and self.file in (None, getattr(known, "__file__", None)):
            return known
        try:
            if self.file is None or _origin(self.module) == self.file:
                return importlib.import_module(self.module)
            spec = importlib.util.spec_from_file_location(self.module, self.file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except Exception as error:
            raise ConfigError(f"{self.name}: {self.module} cannot be imported ({reason(error)})") from error
        return module


def check_arguments(function: Callable[..., Any], name: str) -> None:
    """Raise `ConfigError` unless a function can be called with the arguments of an adapter, by name."""
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS))
    except TypeError:
        raise ConfigError(f"""{name} is {function.__name__}{signature}, but it is called with {", ".join(ARGUMENTS)} by
        name; give it these arguments""") from None


def project_adapter(root: Path) -> Adapter | None:
    """Return the adapter that ``[tool.regress] replay`` of a project names, or None.

    Raises:
        ConfigError: if it is not a path of a function, or its module does not exist.
    """
    text = project_section(root, KEY)
    if text is None:
        return None
    stated = f"{root / 'pyproject.toml'}: [tool.regress] {KEY} = {text!r}"
    module, colon, attribute = text.partition(":") if isinstance(text, str) else ("", "", "")
    if not colon or not module or not attribute.isidentifier():
        raise ConfigError(f"{stated} names no function; write package.module:function")
    if str(root) not in sys.path:
        sys.path.append(str(root))
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{stated}: {module} cannot be imported ({reason(error)}); correct it") from None
    if found is None:
        raise ConfigError(f"{stated}: there is no module {module}; correct it, or install the package")
    return Adapter(text, module, attribute, found.origin, str(root))


def hook_adapter(function: Callable[..., Any], hook: str) -> Adapter:
    """Return the adapter for a function of a conftest.py or plugin.

    Raises:
        ConfigError: for a function that another process cannot import, such as a method.
    """
    file = inspect.getsourcefile(inspect.unwrap(function)) if inspect.isfunction(function) else None
    if file is None or function.__qualname__ != function.__name__:
        raise ConfigError(f"""{hook} is {getattr(function, "__qualname__", function)!r}, which ranks cannot import; make
        it a function of a module""")
    return Adapter(f"{function.__module__}:{function.__name__}", function.__module__, function.__name__, file)


def _origin(module: str) -> str | None:
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return None if found is None else found.origin


def call_on_rank(
    adapter: Adapter, case: Path, variant: Variant, precision: Precision, folder: Path
) -> str | None:
    """Call an adapter on a rank of the pool; return the reason it does not support the variant, None if it does."""
    function = adapter.load()
    try:
        function(case=case, variant=variant, precision=precision, folder=folder)
    except NotSupported as error:
        return str(error).strip() or "no reason given"
    return None


def require_agreement(adapter: Adapter, reasons: list[str | None]) -> None:
    """Raise `NotSupported` if no rank supports a variant, and `ReplayError` if only some do."""
    refused = {rank: text for rank, text in enumerate(reasons) if text is not None}
    if not refused:
        return
    rank, text = next(iter(refused.items()))
    if len(refused) < len(reasons):
        raise ReplayError(f"""{adapter.name}: rank {rank} raised NotSupported ({text}) and others did not; raise it on
        every rank, before anything is communicated""")
    raise NotSupported(text)
