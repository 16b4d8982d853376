"""Inheritance, groups and search paths, as Hydra's users write them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from regress.engine.config import Loaded, Origin

Load = Callable[..., Loaded]


@pytest.mark.parametrize(
    ("defaults", "seed"),
    [
        ("[base, _self_]", 1),
        ("[_self_, base]", 2),
        ("[base]", 1),
        ("[base, other, _self_]", 1),
        ("[_self_, base, other]", 3),
    ],
)
def test_self_has_the_place_it_is_given(defaults: str, seed: int, load: Load) -> None:
    files = {"run.yaml": f"defaults: {defaults}\nseed: 1", "base.yaml": "seed: 2", "other.yaml": "seed: 3"}
    assert load(files).config.seed == seed


def test_inheritance_over_three_files(load: Load) -> None:
    files = {
        "c.yaml": "defaults: [b, _self_]\nmax_steps: 3",
        "b.yaml": "defaults: [a, _self_]\nmax_steps: 2\nthreads: 2",
        "a.yaml": "max_steps: 1\nthreads: 1\nseed: 1",
    }
    loaded = load(files)
    assert (loaded.config.max_steps, loaded.config.threads, loaded.config.seed) == (3, 2, 1)
    assert loaded.origins["threads"] == Origin("file", "b.yaml:3")
    assert loaded.origins["seed"] == Origin("file", "a.yaml:3")


def test_group_in_a_defaults_list(load: Load) -> None:
    loaded = load({"run.yaml": "defaults:\n  - model: llama\n  - _self_\nmodel: {dtype: float64}\n"})
    assert (loaded.config.model.family, loaded.config.model.dtype) == ("llama", "float64")


def test_own_group_shadows_the_built_in_one(load: Load) -> None:
    files = {"run.yaml": "defaults: [{model: llama}]", "model/llama.yaml": "family: gpt2"}
    assert load(files).config.model.family == "gpt2"


@pytest.mark.parametrize("override", ["model=gpt2", "+model=gpt2"])
@pytest.mark.parametrize("text", ["", "defaults: [{model: llama}]", "defaults: [{model: llama}, _self_]"])
def test_group_chosen_on_the_command_line(text: str, override: str, load: Load) -> None:
    """With or without the plus sign, whether or not the defaults list has the group."""
    loaded = load({"run.yaml": text}, override)
    assert loaded.config.model.family == "gpt2"
    assert loaded.config.model.tie_word_embeddings
    assert loaded.origins["model.family"].layer == "command line"


def test_group_chosen_without_any_file(load: Load) -> None:
    assert load({}, "model=qwen3_moe").config.model.family == "qwen3_moe"


def test_group_chosen_on_the_command_line_wins_over_the_environment(load: Load) -> None:
    env = {"REGRESS_MODEL__FAMILY": "llama", "REGRESS_MODEL__DTYPE": "float64"}
    config = load({"run.yaml": "defaults: [{model: qwen3}]"}, "model=gpt2", env=env).config
    assert (config.model.family, config.model.dtype) == ("gpt2", "float64")
    assert load({"run.yaml": "defaults: [{model: qwen3}]"}, env=env).config.model.family == "llama"


def test_group_deleted_on_the_command_line(load: Load) -> None:
    assert load({"run.yaml": "defaults: [{model: gpt2}]"}, "~model").config.model.family == "qwen3"


def test_value_beside_a_group_of_the_same_name(load: Load) -> None:
    config = load({}, "model={family: llama, dtype: float64}").config
    assert (config.model.family, config.model.dtype) == ("llama", "float64")


def test_directory_with_the_name_of_a_value(load: Load) -> None:
    assert load({"seed/1.yaml": ""}, "seed=3", name=None).config.seed == 3


def test_group_into_the_root(load: Load) -> None:
    files = {"run.yaml": "", "experiment/long.yaml": "# @package _global_\nmax_steps: 99\ntask: {level: 2}"}
    config = load(files, "+experiment=long").config
    assert (config.max_steps, config.task.level) == (99, 2)


def test_relocated_group(load: Load) -> None:
    files = {"run.yaml": "defaults: [optim@optimizer: slow]", "optim/slow.yaml": "learning_rate: 1e-6"}
    assert load(files).config.optimizer.learning_rate == 1e-6


def test_optional_default_that_is_missing(load: Load) -> None:
    assert load({"run.yaml": "defaults: [optional model: nowhere, _self_]\nseed: 4"}).config.seed == 4


def test_built_in_configurations_can_be_inherited(load: Load) -> None:
    config = load({"run.yaml": "defaults: [demo, _self_]\nmax_steps: 7"}).config
    assert (config.max_steps, config.debug.enable_data_dump) == (7, True)


@pytest.mark.parametrize("name", ["run", "run.yaml"])
@pytest.mark.parametrize("path", [None, ".", "{cwd}"])
def test_ways_to_name_a_file(name: str, path: str | None, load: Load, tmp_path: Path) -> None:
    path = path and path.replace("{cwd}", str(tmp_path))
    assert load({"run.yaml": "seed: 5"}, name=name, path=path).config.seed == 5


@pytest.mark.parametrize("path", ["conf/run.yaml", "./conf/run.yaml", "{cwd}/conf/run.yaml"])
def test_path_to_the_file_itself(path: str, load: Load, tmp_path: Path) -> None:
    files = {"conf/run.yaml": "defaults: [base, _self_]", "conf/base.yaml": "seed: 6"}
    assert load(files, name=None, path=path.replace("{cwd}", str(tmp_path))).config.seed == 6


def test_name_below_the_directory(load: Load) -> None:
    files = {"conf/sub/run.yaml": "defaults: [base]", "conf/sub/base.yaml": "seed: 8"}
    assert load(files, path="conf", name="sub/run").config.seed == 8


@pytest.mark.parametrize("entry", ["file://./shared", "shared", "file://{cwd}/shared", "${oc.env:SHARED}"])
def test_search_path_of_the_file(entry: str, load: Load, tmp_path: Path) -> None:
    entry = entry.replace("{cwd}", str(tmp_path))
    files = {
        "conf/run.yaml": f"hydra:\n  searchpath:\n    - {entry}\ndefaults: [base, {{model: mine}}]\n",
        "shared/base.yaml": "seed: 9",
        "shared/model/mine.yaml": "dtype: float64",
    }
    config = load(files, path="conf", name="run", env={"SHARED": "file://shared"}).config
    assert (config.seed, config.model.dtype) == (9, "float64")


def test_search_path_comes_after_the_own_directory_and_before_the_built_in_one(load: Load) -> None:
    files = {
        "conf/run.yaml": "hydra: {searchpath: [shared]}\ndefaults: [demo, base]",
        "conf/base.yaml": "seed: 1",
        "shared/base.yaml": "seed: 2",
        "shared/demo.yaml": "max_steps: 77",
    }
    config = load(files, path="conf", name="run").config
    assert (config.seed, config.max_steps, config.exp_name) == (1, 77, "regress")


def test_search_path_of_the_command_line(load: Load) -> None:
    files = {"conf/run.yaml": "defaults: [base]", "shared/base.yaml": "seed: 9"}
    assert load(files, "hydra.searchpath=[file://shared]", path="conf", name="run").config.seed == 9


def test_linked_file_inherits_from_the_neighbors_of_the_link(load: Load, tmp_path: Path) -> None:
    load(
        {"v1/run.yaml": "defaults: [base, _self_]", "v1/base.yaml": "seed: 1", "here/base.yaml": "seed: 2"},
        name=None,
    )
    (tmp_path / "here" / "run.yaml").symlink_to(tmp_path / "v1" / "run.yaml")
    assert load(path="here", name="run").config.seed == 2


def test_sections_without_lines_and_empty_files(load: Load) -> None:
    assert (
        load({"run.yaml": "debug:\n  # dump_dir: x\nsystem_envs: {}\n"}).config.debug.dump_every_n_steps == 1
    )
    assert load({"empty.yaml": ""}).config.seed == 0
