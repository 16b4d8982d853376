"""Project settings: the section ``[tool.regress]`` of pyproject.toml."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regress.errors import ConfigError

KEYS = ("variants", "tolerances", "replay", "allow_code")


def project_section(root: Path, key: str) -> Any:
    """Return the value of a key of ``[tool.regress]`` in ``root/pyproject.toml``, None where there is none.

    Raises:
        ConfigError: naming a file that is no TOML, or a key that nothing reads.
    """
    path = root / "pyproject.toml"
    if not path.is_file():
        return None
    import tomllib  # the plugin loads this module in every run of pytest

    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no valid TOML ({error}); correct it") from None
    section = tree.get("tool", {}).get("regress", {})
    if not isinstance(section, Mapping) or (unknown := section.keys() - set(KEYS)):
        named = ", ".join(sorted(unknown)) if isinstance(section, Mapping) else repr(section)
        raise ConfigError(
            f"{path}: [tool.regress] holds {named}, which nothing reads; its keys are {', '.join(KEYS)}, options of "
            "pytest stand in [tool.pytest.ini_options]"
        )
    return section.get(key)


def project_root(start: Path | None = None) -> Path | None:
    """Return the folder of the nearest pyproject.toml, or None."""
    start = (start or Path.cwd()).absolute()
    return next((path for path in (start, *start.parents) if (path / "pyproject.toml").is_file()), None)
