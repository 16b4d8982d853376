"""Priority of the layers, key by key, and the origins that the configuration reports."""

from collections.abc import Callable

import pytest

from regress.engine.config import Loaded, Origin

Load = Callable[..., Loaded]
FILES = {"run.yaml": "seed: 1\nmax_steps: 1\nthreads: 1\n"}


def test_command_line_over_environment_over_file_over_default(load: Load) -> None:
    env = {"REGRESS_MAX_STEPS": "2", "REGRESS_THREADS": "2"}
    loaded = load(FILES, "threads=3", env=env)
    config = loaded.config
    assert (config.seed, config.max_steps, config.threads, config.device) == (1, 2, 3, "cpu")
    assert loaded.origins["seed"] == Origin("file", "run.yaml:1")
    assert loaded.origins["max_steps"] == Origin("environment", "REGRESS_MAX_STEPS")
    assert loaded.origins["threads"] == Origin("command line")
    assert loaded.origins["device"] == Origin("default")


@pytest.mark.parametrize(
    ("overrides", "env", "text", "clip_high", "origin"),
    [
        ((), {}, "algorithm: {preset: dapo}", 0.28, "preset dapo"),
        ((), {}, "algorithm: {preset: dapo, clip_high: 0.3}", 0.3, "file run.yaml:1"),
        (("algorithm.preset=dapo",), {}, "algorithm: {clip_high: 0.3}", 0.3, "file run.yaml:1"),
        (
            ("algorithm.preset=dapo",),
            {"REGRESS_ALGORITHM__CLIP_HIGH": "0.2"},
            "",
            0.2,
            "environment REGRESS_ALGORITHM__CLIP_HIGH",
        ),
        ((), {"REGRESS_ALGORITHM__PRESET": "dapo"}, "algorithm: {preset: cispo}", 0.28, "preset dapo"),
        ((), {"P": "dapo"}, "algorithm: {preset: '${oc.env:P}'}", 0.28, "preset dapo"),
        ((), {}, "algorithm: {preset: null}", 0.2, "default"),
    ],
)
def test_preset_lies_beneath_every_explicit_key(
    overrides: tuple[str, ...], env: dict[str, str], text: str, clip_high: float, origin: str, load: Load
) -> None:
    """An explicit key wins even where its value is the schema's default."""
    loaded = load({"run.yaml": text}, *overrides, env=env)
    assert loaded.config.algorithm.clip_high == clip_high
    assert str(loaded.origins["algorithm.clip_high"]) == origin


def test_environment_names(load: Load) -> None:
    env = {
        "REGRESS_OPTIMIZER__BETAS": "[0.8, 0.9]",
        "REGRESS_OPTIMIZER__LEARNING_RATE": "1e-4",
        "REGRESS_OPTIMIZER__MAX_GRAD_NORM": "null",
        "regress_model__dtype": "float64",
        "REGRESS_MODEL__CONFIG__HIDDEN_SIZE": "32",
        "REGRESS_SYSTEM_ENVS__NCCL_ALGO": "Ring",
        "REGRESS_SYSTEM_ENVS__OMP_NUM_THREADS": "01",
        "REGRESS_DEBUG__DUMP_OPTIONS__LOSS": "1",
        "REGRESS_TASK__REWARDS": "{a: 1, b: 2}",
        "REGRESS_EXP_NAME": "a=b, [c] # d",
        "REGRESS_DEBUG__DUMP_DIR": "${output_dir}/x",
        "REGRESS_TOKENIZER__PATH": "null",
        "REGRESSION": "is not ours",
    }
    config = load({}, env=env).config
    assert config.optimizer.betas == [0.8, 0.9]
    assert (config.optimizer.learning_rate, config.optimizer.max_grad_norm) == (1e-4, None)
    assert (config.model.dtype, config.model.config) == ("float64", {"hidden_size": 32})
    assert config.system_envs == {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "01"}
    assert config.debug.dump_options.loss is True
    assert config.task.rewards == {"a": 1.0, "b": 2.0}
    assert config.debug.dump_dir == "./outputs/a=b, [c] # d/x"
    assert config.tokenizer.path is None


def test_text_stays_as_it_is_written(load: Load) -> None:
    """YAML would make 7, true and 0.0 of these; a name and a variable are text."""
    text = "exp_name: 007\nsystem_envs: {NVTE_ALLOW_NONDETERMINISTIC_ALGO: 0, DETERMINISTIC_MODE: yes}\n"
    config = load({"run.yaml": text}, "system_envs.A=1e3", "system_envs.B=true").config
    assert config.exp_name == "007"
    assert config.system_envs == {
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "DETERMINISTIC_MODE": "yes",
        "A": "1e3",
        "B": "true",
    }


def test_interpolated_text_becomes_the_type_of_its_key(load: Load) -> None:
    text = (
        "max_steps: ${oc.env:STEPS}\nseed: ${max_steps}\nmodel:\n  tie_word_embeddings: ${oc.env:TIED,true}\n"
    )
    config = load({"run.yaml": text}, env={"STEPS": "3"}).config
    assert (config.max_steps, config.seed, config.model.tie_word_embeddings) == (3, 3, True)


def test_interpolation_reads_the_given_environment_only(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERIMENT_PATH", "/of/the/process")
    assert load({}).config.output_dir == "./outputs/regress"
    config = load({}, "exp_name=x", env={"EXPERIMENT_PATH": "/given"}).config
    assert config.debug.dump_dir == "/given/x/debug_dump"


def test_deleting_a_key_brings_the_default_back(load: Load) -> None:
    text = "seed: 5\nsystem_envs: {A: 1, B: 2}\ndebug: {dump_options: {loss: true, param: true}}\n"
    loaded = load({"run.yaml": text}, "~seed", "~system_envs.A", "~debug.dump_options")
    assert (loaded.config.seed, loaded.config.system_envs) == (0, {"B": "2"})
    assert not loaded.config.debug.dump_options.loss
    assert loaded.origins["seed"] == Origin("default")
    assert load({}, "~seed", env={"REGRESS_SEED": "3"}).config.seed == 0


def test_free_mappings_merge_but_replace_the_default(load: Load) -> None:
    files = {
        "run.yaml": "defaults: [base, _self_]\n"
        "model: {config: {b: 2, rope: {y: 2}}}\n"
        "task: {rewards: {length: 1}}",
        "base.yaml": "model: {config: {a: 1, b: 1, rope: {x: 1}}}",
    }
    loaded = load(files, "model.config.rope.z=3", "+model.config.c=4", "++model.config.d=5")
    assert loaded.config.model.config == {"a": 1, "b": 2, "rope": {"x": 1, "y": 2, "z": 3}, "c": 4, "d": 5}
    assert loaded.config.task.rewards == {"length": 1.0}
    assert loaded.origins["model.config.a"] == Origin("file", "base.yaml:1")
    assert loaded.origins["model.config.rope.z"] == Origin("command line")


def test_an_empty_mapping_clears_what_was_inherited(load: Load) -> None:
    files = {"run.yaml": "defaults: [base, _self_]\nsystem_envs: {}", "base.yaml": "system_envs: {A: 1}"}
    assert load(files).config.system_envs == {}
    loaded = load(files, "system_envs={}", "system_envs.B=1")
    assert loaded.config.system_envs == {"B": "1"}
    assert [key for key in loaded.origins if key.startswith("system_envs")] == ["system_envs.B"]


def test_the_last_override_wins(load: Load) -> None:
    assert load({}, "seed=1", "seed=2").config.seed == 2


def test_loading_changes_nothing_outside(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the environment, nor the resolver of another user of OmegaConf, nor Hydra's global state."""
    import os

    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    monkeypatch.setenv("SEEN", "process")
    before = dict(os.environ)
    with pytest.raises(Exception, match="NOT_SET"):
        load({}, "exp_name=${oc.env:NOT_SET}")
    load({"run.yaml": "defaults: [demo]"}, env={"SEEN": "given"})
    assert OmegaConf.create({"a": "${oc.env:SEEN}"}).a == "process"
    assert not GlobalHydra.instance().is_initialized()
    assert dict(os.environ) == before


def test_loading_inside_a_hydra_program(load: Load, tmp_path: object) -> None:
    from hydra import compose, initialize_config_dir

    load({"outer.yaml": "a: 1"}, name=None)
    with initialize_config_dir(str(tmp_path), version_base=None):
        assert load({"run.yaml": "defaults: [demo]"}).config.exp_name == "demo"
        assert compose("outer").a == 1
