"""Code that a configuration names is imported only from below the project, and only if the project lists it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from regress.cli import main
from regress.errors import ConfigError
from regress.import_trust import VARIABLE, allow_all_code, allowed_modules, named_code

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
        ("own_module:number", "x is not a function but 3; name a function"),
        ("no_such_module:f", "x cannot be imported .ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_name_that_cannot_be_meant_is_told(name: str, says: str, project: Path) -> None:
    allow(project, "own_module")
    with pytest.raises(ConfigError, match=says):
        named_code(name, "x")


def test_the_list_has_to_be_one(project: Path) -> None:
    (project / "pyproject.toml").write_text('[tool.regress]\nallow_code = "own_module"\n')
    with pytest.raises(ConfigError, match="allow_code = 'own_module' is not a list of modules"):
        allowed_modules(project)


REFUSED = (
    *("GRPO_REGRESS_ALLOW_CODE", "GRPO_REGRESS_API_KEY", "REGRESS_STORE_TIMEOUT", "REGRESS_TASK__REWARDS"),
    *(
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "DYLD_INSERT_LIBRARIES",
        "PYTHONPATH",
        "PYTHONSTARTUP",
        "PATH",
        "HOME",
    ),
    *(
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
        "TORCHINDUCTOR_CACHE_DIR",
        "NCCL_NET_PLUGIN",
        "CUDA_INJECTION64_PATH",
    ),
    *("CC", "BASH_ENV", "GIT_SSH_COMMAND", "PYTEST_PLUGINS", "HF_ENDPOINT", "https_proxy", "pythonpath"),
)


@pytest.mark.parametrize("name", REFUSED)
def test_no_configuration_sets_a_variable_that_decides_which_code_runs(
    name: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a file, not in one it inherits from, and not in one it names: the code it names is not imported."""
    monkeypatch.setenv(VARIABLE, "0")
    own = f"system_envs: {{{name}: '1'}}\n"
    files = {
        "own.yaml": own + "task: {rewards: {'foreign_module:f': 1.0}}\n",
        "beside.yaml": own,
        "heir.yaml": "defaults: [beside, _self_]\ntask: {rewards: {'foreign_module:f': 1.0}}\n",
        "interpolated.yaml": f"exp_name: '1'\nsystem_envs: {{{name}: '${{exp_name}}'}}\n",
    }
    for file, text in files.items():
        Path(file).write_text(text)
    for file in ("own.yaml", "heir.yaml", "interpolated.yaml"):
        done = CliRunner().invoke(main, ["train", "--config-path", file, "max_steps=0"])
        assert done.exit_code == 2
        assert f"system_envs.{name} (file " in done.stderr
        assert "set it in the shell that starts the command" in done.stderr
    assert not ran(project)
    assert not Path("outputs").exists()


def test_a_configuration_of_hydra_sets_no_variable(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    Path("own.yaml").write_text(
        f"hydra: {{job: {{env_set: {{{VARIABLE}: '1'}}}}}}\ntask: {{rewards: {{'foreign_module:f': 1.0}}}}\n"
    )
    assert CliRunner().invoke(main, ["train", "--config-path", "own.yaml", "max_steps=0"]).exit_code == 2
    assert not ran(project)


def test_variables_that_change_numbers_may_be_set(project: Path) -> None:
    names = (
        *("NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG", "DETERMINISTIC_MODE"),
        *(
            "OMP_NUM_THREADS",
            "ATEN_CPU_CAPABILITY",
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
            "MY_KERNELS",
            "WANDB_PROJECT",
        ),
    )
    words = [f"system_envs.{name}=x" for name in names]
    assert CliRunner().invoke(main, ["train", "--print-config", *words]).exit_code == 0
