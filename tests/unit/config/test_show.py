"""The listing of ``--print-config``."""

import io
from collections.abc import Callable

import yaml
from rich.console import Console

from regress.engine.config import Loaded, print_config
from regress.engine.config.config_schema import options

Load = Callable[..., Loaded]


def printed(loaded: Loaded, **terminal: object) -> str:
    stream = io.StringIO()
    print_config(loaded, Console(file=stream, **terminal))  # type: ignore[arg-type]
    return stream.getvalue()


def test_plain_lines(load: Load) -> None:
    files = {"run.yaml": "exp_name: 007\nalgorithm: {preset: trl:dapo}\nmodel: {config: {hidden_size: 32}}\n"}
    env = {"REGRESS_OPTIMIZER__LEARNING_RATE": "1e-4"}
    lines = printed(load(files, "optimizer.betas=[0.8,0.9]", "model=gpt2", env=env)).splitlines()
    for line in (
        "exp_name: '007'  # file run.yaml:1",
        "output_dir: ./outputs/007  # default",
        "system_envs: {}  # default",
        "model.path: null  # default",
        "model.config.hidden_size: 32  # file run.yaml:3",
        "algorithm.eps: 0.0001  # preset trl:dapo",
        "algorithm.preset: trl:dapo  # file run.yaml:2",
        "optimizer.learning_rate: 0.0001  # environment REGRESS_OPTIMIZER__LEARNING_RATE",
        "optimizer.betas: [0.8, 0.9]  # command line",
        "task.rewards: {exact_match: 1.0}  # default",
    ):
        assert line in lines
    [family] = [line for line in lines if line.startswith("model.family")]
    assert family.startswith("model.family: gpt2  # command line model=gpt2 (")
    assert family.endswith("model/gpt2.yaml:2)")


def test_plain_lines_are_yaml_with_every_key_once(load: Load) -> None:
    text = 'exp_name: "a # b: [c]"\nsystem_envs: {A: "true", B: ""}\n'
    loaded = load({"run.yaml": text}, "debug.target_param_pattern='a|[b]'")
    listing = printed(loaded)
    values = yaml.safe_load(listing)
    assert len(values) == len(listing.splitlines())
    assert values["exp_name"] == "a # b: [c]"
    assert (values["system_envs.A"], values["system_envs.B"]) == ("true", "")
    assert values["debug.target_param_pattern"] == "a|[b]"
    assert set(options()) - set(values) == {"system_envs"}


def test_table_on_a_terminal(load: Load) -> None:
    shown = printed(
        load({}, "seed=3", "exp_name='[red]x'"), force_terminal=True, width=140, color_system=None
    )
    [row] = [line for line in shown.splitlines() if " seed " in line]
    assert [cell.strip() for cell in row.strip("│┃ ").split("│")] == ["seed", "3", "command line"]
    assert "[red]x" in shown
