"""Import rules for code that a configuration, a golden case or a dump names as ``package.module:function``.

Modules below the project root that ``[tool.regress] allow_code`` of its pyproject.toml lists:

    [tool.regress]
    allow_code = ["my_kernels", "my_pkg.*"]

Anything else is refused unless the user allows all, with ``--allow-code`` (pytest: ``--regress-allow-code``).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from importlib.machinery import BuiltinImporter, ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from regress.errors import ConfigError, reason
from regress.project_settings import project_root, project_section

KEY = "allow_code"
VARIABLE = "GRPO_REGRESS_ALLOW_CODE"
"""Environment variable that allows all code where it is 1; ranks inherit it."""


def allow_all_code() -> None:
    """Allow this process, and those that it starts, to import any named code."""
    os.environ[VARIABLE] = "1"


def named_code(text: str, stated: str) -> Callable[..., Any]:
    """Import the function ``package.module:function``.

    Args:
        stated: origin of the name, for errors.

    Raises:
        ConfigError: if the text has another form, the module is not allowed, or there is no such function.
    """
    require_allowed(_parts(text, stated)[0], stated)
    return imported_function(text, stated)


def _parts(text: str, stated: str) -> tuple[str, str]:
    module, colon, attribute = text.partition(":")
    if not colon or not module or not attribute:
        raise ConfigError(f"{stated} names no function; write package.module:function")
    return module, attribute


def imported_function(text: str, stated: str) -> Callable[..., Any]:
    """Import the function ``package.module:function`` that the user named on the command line.

    Raises:
        ConfigError: if the text has another form, or there is no such function.
    """
    module, attribute = _parts(text, stated)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigError(f"""{stated} cannot be imported ({reason(error)}); the form is package.module:function, and
        the package must be importable from here""") from error
    if not callable(found):
        raise ConfigError(f"{stated} is not a function but {found!r}; name a function")
    return found  # type: ignore[no-any-return]  # callable, as was looked


def require_allowed(module: str, stated: str) -> None:
    """Raise `ConfigError` unless a module may be imported; none of its code runs for this check.

    Args:
        stated: origin of the name, for the error.
    """
    root = project_root()
    if os.environ.get(VARIABLE) != "1" and not _listed(module, root):
        place = "the project's pyproject.toml" if root is None else f"{root / 'pyproject.toml'}"
        raise ConfigError(f"""{stated} names code of the module {module}, which is imported only if it lies below the
        project root and [tool.regress] {KEY} in {place} lists it; list it there if it is yours, or allow all code with
        --allow-code (pytest: --regress-allow-code)""")
    if root is not None and str(root) not in sys.path:
        sys.path.append(str(root))


def allowed_modules(root: Path) -> list[str]:
    """Return the patterns of the modules that a project allows.

    Raises:
        ConfigError: if the key holds anything but a list of names.
    """
    found = project_section(root, KEY)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(name, str) and name for name in found):
        raise ConfigError(
            f"{root / 'pyproject.toml'}: [tool.regress] {KEY} = {found!r} is not a list of modules; write "
            "names such as "
            '["my_kernels"]'
        )
    return found


def _listed(module: str, root: Path | None) -> bool:
    package = module.partition(".")[0]
    if package not in sys.modules and _spec(package, root) is None:
        return True  # there is nothing to run, and the import will say so
    if root is None:
        return False
    patterns = allowed_modules(root)
    named = any(fnmatchcase(module, name) or module.startswith(f"{name}.") for name in patterns)
    return named and _below(package, root)


def _spec(package: str, root: Path | None) -> ModuleSpec | None:
    """Find the spec of a top-level module without running any of its code."""
    if not package:
        return None
    if package in sys.builtin_module_names:
        return BuiltinImporter.find_spec(package)
    return PathFinder.find_spec(package, [*sys.path, *([] if root is None else [str(root)])])


def _below(package: str, root: Path) -> bool:
    """Return True if a top-level module or package would be imported from below a folder."""
    spec = _spec(package, root)
    if spec is None:
        return False
    places = [spec.origin] if spec.origin is not None else list(spec.submodule_search_locations or ())
    known = root.resolve()
    return bool(places) and all(Path(place).resolve().is_relative_to(known) for place in places)
