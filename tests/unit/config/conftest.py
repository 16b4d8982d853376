"""A working directory with YAML files in it, and nothing of the process's environment."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from regress.engine.config import Loaded, load_config
from regress.errors import ConfigError

FIRST = "<first file>"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loaded]:
    """``load({"a.yaml": text}, "key=value", env={...}, name=..., path=...)``; name: of the first file."""
    monkeypatch.chdir(tmp_path)

    def run(
        files: Mapping[str, str | bytes] | None = None,
        *overrides: str,
        env: Mapping[str, str] | None = None,
        name: str | None = FIRST,
        path: str | None = None,
    ) -> Loaded:
        for file, content in (files or {}).items():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        if name == FIRST:
            name = next(iter(files)).removesuffix(".yaml") if files else None
        return load_config(path, name, overrides, env or {})

    return run


@pytest.fixture
def refusal(load: Callable[..., Loaded]) -> Callable[..., str]:
    """The sentence with which ``load`` refuses the same arguments."""

    def run(*args: object, **kwargs: object) -> str:
        with pytest.raises(ConfigError) as caught:
            load(*args, **kwargs)
        return str(caught.value)

    return run
