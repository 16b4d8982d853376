"""Code that a configuration names is imported only from below the project, and only if the project lists it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from regress.errors import ConfigError
from regress.trust import VARIABLE, allow_all_code, allowed_modules, named_code

FORBIDDEN = "is imported only if it lies below the project root"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a module and a package of its own; a run of any leaves a file."""
    root = tmp_path / "project"
    for folder in (root / "own_package", tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
    text = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\ndef f(): return 1\nnumber = 3\n"
    for path in ("project/own_module.py", "project/own_package/__init__.py", "project/own_package/inner.py",
                 "elsewhere/foreign_module.py"):  # fmt: skip
        (tmp_path / path).write_text(text)
    (root / "pyproject.toml").write_text("")
    monkeypatch.chdir(root)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "elsewhere")])
    for name in [name for name in sys.modules if name.startswith(("own_", "foreign_module"))]:
        monkeypatch.delitem(sys.modules, name)
    return root


def ran(project: Path) -> bool:
    return (project.parent / "ran").exists()


def allow(project: Path, *names: str) -> None:
    (project / "pyproject.toml").write_text(f"[tool.regress]\nallow_code = {list(names)!r}\n")


@pytest.mark.parametrize("name", ["own_module:f", "own_package.inner:f", "foreign_module:f", "os:system"])
def test_what_is_not_listed_is_not_run(name: str, project: Path) -> None:
    with pytest.raises(ConfigError, match=FORBIDDEN) as caught:
        named_code(name, f"task.environment={name}")
    assert str(caught.value).startswith(
        f"task.environment={name} names code of the module {name.split(':')[0]}"
    )
    assert not ran(project)


@pytest.mark.parametrize("name", ["foreign_module", "os", "json.decoder"])
def test_what_lies_elsewhere_is_not_run_though_it_is_listed(name: str, project: Path) -> None:
    allow(project, name, name.partition(".")[0])
    with pytest.raises(ConfigError, match=FORBIDDEN):
        named_code(f"{name}:f", "x")
    assert not ran(project)


@pytest.mark.parametrize(
    ("listed", "name"),
    [
        ("own_module", "own_module:f"),
        ("own_package", "own_package.inner:f"),
        ("own_package.*", "own_package.inner:f"),
        ("own_*", "own_module:f"),
    ],
)
def test_what_is_listed_below_the_project_runs(listed: str, name: str, project: Path) -> None:
    allow(project, listed)
    assert named_code(name, "x")() == 1


def test_a_listed_name_does_not_allow_another_that_begins_so(project: Path) -> None:
    allow(project, "own")
    with pytest.raises(ConfigError, match=FORBIDDEN):
        named_code("own_module:f", "x")
    assert not ran(project)


def test_a_link_out_of_the_project_is_not_below_it(project: Path) -> None:
    (project / "linked_module.py").symlink_to(project.parent / "elsewhere" / "foreign_module.py")
    allow(project, "linked_module")
    with pytest.raises(ConfigError, match=FORBIDDEN):
        named_code("linked_module:f", "x")
    assert not ran(project)


def test_everything_runs_where_the_user_allows_it(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    with pytest.raises(ConfigError, match=FORBIDDEN):
        named_code("foreign_module:f", "x")
    allow_all_code()
    assert named_code("foreign_module:f", "x")() == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own_module", "x names no function; write package.module:function"),
        (":f", "x names no function; write package.module:function"),
        ("own_module:", "x names no function; write package.module:function"),
        ("own_module:g", "x cannot be imported .AttributeError: "),
        ("own_module:number", "x is no function but 3; name a function"),
        ("no_such_module:f", "x cannot be imported .ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_name_that_cannot_be_meant_is_told(name: str, says: str, project: Path) -> None:
    allow(project, "own_module")
    with pytest.raises(ConfigError, match=says):
        named_code(name, "x")


def test_the_list_has_to_be_one(project: Path) -> None:
    (project / "pyproject.toml").write_text('[tool.regress]\nallow_code = "own_module"\n')
    with pytest.raises(ConfigError, match="allow_code = 'own_module' is no list of modules"):
        allowed_modules(project)
