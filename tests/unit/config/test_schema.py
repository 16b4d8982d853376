"""The tree itself: complete, typed, readable by OmegaConf, and free of torch."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import regress.engine.config.conf
from regress.engine.config import Config, Loaded, Origin, config_hash, to_plain
from regress.engine.config.config_schema import options
from regress.engine.config.model_config import FAMILIES
from regress.grpo.objective import Objective
from regress.grpo.objective_catalogue import ADVANTAGES
from regress.grpo.objective_presets import PRESETS, make_objective
from tests.as_subtests import as_subtests

Load = Callable[..., Loaded]
BUILT_IN = Path(regress.engine.config.conf.__path__[0])


def test_importing_and_loading_needs_no_torch() -> None:
    """Environment variables of the configuration have to be set before torch is imported."""
    program = (
        "import sys; from regress.engine.config import load_config, print_config, to_plain\n"
        "to_plain(load_config(None, 'demo', ['seed=1'], {}).config)\n"
        "print(sorted({'torch', 'transformers', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_omegaconf_reads_the_schema() -> None:
    structured = OmegaConf.structured(Config)
    assert OmegaConf.to_container(structured, resolve=False) == to_plain(Config())
    assert OmegaConf.to_object(structured) == OmegaConf.to_object(OmegaConf.structured(Config()))


@as_subtests("key", options())
def test_every_key_explains_itself_and_keeps_its_own_rules(key: str) -> None:
    option = options()[key]
    assert option.help
    assert not option.help.endswith(".")
    assert option.checked(option.default, lambda _: Origin("default")) == option.default


def test_algorithm_is_the_objective(load: Load) -> None:
    algorithm = load({}).config.algorithm
    assert isinstance(algorithm, Objective)
    beside = {"preset", "loss_function"}
    assert {spec.name for spec in fields(algorithm)} == {spec.name for spec in fields(Objective)} | beside


TRAINED = [name for name in PRESETS if not ADVANTAGES[make_objective(name).advantage].needs]


@as_subtests("preset", TRAINED)
def test_presets_mean_what_the_mathematics_says(preset: str, load: Load) -> None:
    algorithm = load({}, f"algorithm.preset={preset}").config.algorithm
    expected = make_objective(preset)
    assert {spec.name: getattr(algorithm, spec.name) for spec in fields(expected)} == dataclasses.asdict(
        expected
    )


def test_what_nobody_gives_is_the_default_of_the_schema(load: Load) -> None:
    expected = Config(output_dir="./outputs/regress")
    expected.debug.dump_dir = "./outputs/regress/debug_dump"
    expected.trainer.checkpoint_dir = "./outputs/regress"
    loaded = load({})
    assert loaded.config == expected
    assert set(loaded.origins) == set(options())
    assert {str(origin) for origin in loaded.origins.values()} == {"default"}


def test_values_have_the_declared_types(load: Load) -> None:
    """Whole numbers in YAML become floats where the key is a float, in sections and in mappings."""
    config = load({"run.yaml": "optimizer: {eps: 1, betas: [0, 0.5]}\ntask: {rewards: {a: 2}}"}).config
    values = [config.optimizer.eps, *config.optimizer.betas, *config.task.rewards.values()]
    assert [type(value) for value in values] == [float] * 4


def test_defaults_are_not_shared() -> None:
    Config().task.rewards["mine"] = 1.0
    Config().optimizer.betas.append(0.5)
    assert Config().task.rewards == {"exact_match": 1.0}
    assert Config().optimizer.betas == [0.9, 0.999]


def test_hash_changes_with_every_value_and_with_nothing_else(load: Load) -> None:
    base = config_hash(load({}).config)
    assert base == config_hash(load({"run.yaml": "seed: 0"}, env={"REGRESS_THREADS": "1"}).config)
    assert len(base) == 64
    one_way, other_way = ("system_envs.A=1", "system_envs.B=2"), ("system_envs.B=2", "system_envs.A=1")
    assert config_hash(load({}, *one_way).config) == config_hash(load({}, *other_way).config)
    changed = [
        "seed=1",
        "algorithm.eps=1e-5",
        "model.config.a=1",
        "model.config.b=1",
        "system_envs.A=1",
        "optimizer.betas=[0.999,0.9]",
    ]
    hashes = {config_hash(load({}, override).config) for override in changed}
    assert len(hashes | {base}) == len(changed) + 1


def test_plain_form_is_the_whole_tree(load: Load) -> None:
    plain = to_plain(load({}, "model.config.a={b:[1,null]}").config)
    assert plain["model"]["config"] == {"a": {"b": [1, None]}}
    assert set(plain) == {spec.name for spec in fields(Config)}
    assert not any(is_dataclass(value) for value in plain.values())


@pytest.mark.parametrize("name", sorted(path.stem for path in BUILT_IN.glob("*.yaml")))
def test_built_in_configurations_load(name: str, load: Load) -> None:
    assert load({}, name=name).config.task.rewards


@pytest.mark.parametrize("model", FAMILIES)
def test_every_family_is_a_group(model: str, load: Load) -> None:
    assert load({}, f"model={model}").config.model.family == model


def test_unknown_name_of_the_package() -> None:
    package: Any = regress.engine.config
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # noqa: B018
