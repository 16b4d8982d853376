"""Project settings: the section ``[tool.regress]`` of pyproject.toml."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regress.errors import ConfigError
from regress.untrusted_files import read_bytes

_LIMIT = 1 << 24  # bytes
KEYS = ("variants", "tolerances", "replay", "allow_code")


def project_section(root: Path, key: str) -> Any:
    """Return the value of a key of ``[tool.regress]`` in ``root/pyproject.toml``, None where there is none.

    Raises:
        ConfigError: naming a file that is not valid TOML, or a key that nothing reads.
    """
    path = root / "pyproject.toml"
    if not path.is_file():
        return None
    tool = project_tree(path).get("tool", {})
    section = tool.get("regress", {}) if isinstance(tool, Mapping) else {}
    if not isinstance(section, Mapping) or (unknown := section.keys() - set(KEYS)):
        named = ", ".join(sorted(unknown)) if isinstance(section, Mapping) else repr(section)
        raise ConfigError(f"""{path}: [tool.regress] holds {named}, which nothing reads; its keys are {", ".join(KEYS)},
        options of pytest stand in [tool.pytest.ini_options]""")
    return section.get(key)


def project_tree(path: Path) -> Mapping[str, Any]:
    """Return the content of a pyproject.toml.

    Raises:
        ConfigError: if it cannot be read, or is not valid TOML.
    """
    import tomllib  # the plugin loads this module in every run of pytest

    try:
        return tomllib.loads(read_bytes(path, _LIMIT).decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); correct it") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # what is not valid TOML or UTF-8, or a number of thousands of digits
        why = (
            "it is nested too deeply"
            if isinstance(error, RecursionError)
            else str(error).partition("; use")[0]
        )
        raise ConfigError(f"{path} is not valid TOML ({why}); correct it") from None


def project_root(start: Path | None = None) -> Path | None:
    """Return the folder of the nearest pyproject.toml, or None."""
    start = (start or Path.cwd()).absolute()
    return next((path for path in (start, *start.parents) if (path / "pyproject.toml").is_file()), None)
