"""Low-rank adapters: what is trained, recorded, saved and loaded, and the reference without a second model."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from regress.dump.adapter_names import plain_adapter_name
from regress.dump.dump_reader import DumpReader
from regress.engine.adapters.adapter_modules import read_adapter
from regress.engine.adapters.model_files import save_model, without_adapter
from regress.engine.config.config_schema import Config
from regress.engine.config.task_config import WarmStartConfig
from regress.engine.mini_batch import Microbatch, TokenBatch
from regress.engine.run_construction import Run, build
from regress.engine.training_run import train
from regress.errors import ConfigError
from regress.layout import BatchPlan

pytest.importorskip("peft")
MakeConfig = Callable[..., Config]
LORA = ("model.lora.r=2", "model.lora.alpha=6", "model.lora.target_modules=[q_proj, down_proj]")
RANDOM = "model.lora.init_lora_weights=random"
KL = "algorithm.kl_coef=0.1"


def made(config: Config) -> Run:
    return build(config, ExitStack(), lambda name, total: lambda: None)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=torch.arange(12).view(2, 6) % 9, use_cache=False).logits
    return found


def sampled(run: Run) -> Sequence[Microbatch]:
    samples = run.trainer.worker.rollout(0, run.trainer.prompts(0), "train")
    return TokenBatch(samples).microbatches(BatchPlan(), run.trainer.world.plan, 0)


def weights(model: Any) -> dict[str, Tensor]:
    return {plain_adapter_name(name): value.detach().clone() for name, value in model.named_parameters()}


def test_only_the_adapter_is_trained_recorded_and_saved_by_the_names_of_its_file(
    config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    options = [f"debug.dump_options.{name}=true" for name in ("param", "gradient", "optimizer")]
    run = config(*LORA, "debug.enable_data_dump=true", "model.lora.save_merged=true", *options)
    first = weights(made(replace(run, warm_start=WarmStartConfig())).trainer.policy.model)
    train(run, console)
    final = tmp_path / "run" / "final"
    saved = read_adapter(final)
    reader = DumpReader(run.debug.dump_dir)
    recorded = {
        kind: next(iter(reader.records(kind, 1))).tensors for kind in ("param", "gradient", "optimizer")
    }
    assert len(saved) == 8
    assert "model.layers.1.mlp.down_proj.lora_B.weight" in saved
    assert saved.keys() == recorded["param"].keys() == recorded["gradient"].keys()
    assert {name.rpartition("/")[0] for name in recorded["optimizer"]} == saved.keys()
    for name, value in saved.items():
        np.testing.assert_array_equal(value.numpy(), recorded["param"][name])
        assert not torch.equal(value, first[name]), "it was not updated"
    base = load_file(final / "base" / "model.safetensors")
    assert all(torch.equal(value, first[name]) for name, value in base.items()), "the base model moved"
    place = "model.layers.0.self_attn.q_proj"
    delta = saved[f"{place}.lora_B.weight"] @ saved[f"{place}.lora_A.weight"]
    merged = load_file(final / "merged" / "model.safetensors")[f"{place}.weight"]
    torch.testing.assert_close(merged, base[f"{place}.weight"] + 3.0 * delta)  # alpha / r


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, about transformers
def test_what_is_saved_is_loaded_by_peft_and_by_a_run(
    config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    train(config(*LORA, RANDOM, "max_steps=1"), console)
    final = tmp_path / "run" / "final"
    base = json.loads((final / "adapter_config.json").read_text())["base_model_name_or_path"]
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), final)
    found = logits(theirs)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(final)), found)
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(base)), found, atol=1e-3)
    moved = tmp_path / "moved"
    final.rename(moved)  # the base model that it holds moves with it
    ours = made(config(f"model.path={moved}", "warm_start.steps=0"))
    assert torch.equal(logits(ours.trainer.policy.model), found)
    assert len(dict(ours.trainer.policy.named_parameters())) == 8


def test_the_reference_is_the_adapter_as_it_was_and_the_policy_keeps_its_bits(config: MakeConfig) -> None:
    """No second model: the reference computes in the policy's place."""
    run = made(config(*LORA, RANDOM, KL))
    policy, reference = run.trainer.policy, run.trainer.reference
    assert reference is not None
    micros, before = sampled(run), weights(policy.model)
    (start,) = policy.log_probs(micros)
    grow(run)
    moved, (other,) = weights(policy.model), policy.log_probs(micros)
    assert torch.equal(reference.log_probs(micros)[0], start)
    assert not torch.allclose(other, start, atol=1e-3)
    assert torch.equal(policy.log_probs(micros)[0], other)
    assert all(torch.equal(value, moved[name]) for name, value in weights(policy.model).items())
    trained = set(dict(policy.named_parameters()))
    assert {name for name in before if not torch.equal(before[name], moved[name])} == trained


@torch.no_grad()
def grow(run: Run) -> None:
    for _, parameter in run.trainer.policy.named_parameters():
        parameter.mul_(1.5)


def test_the_reference_without_the_adapter_is_the_base_model(config: MakeConfig) -> None:
    run, plain = made(config(*LORA, RANDOM, KL, "reference.without_adapter=true")), made(config())
    policy, reference, micros = run.trainer.policy, run.trainer.reference, sampled(run)
    assert reference is not None
    plain.trainer.policy.model.load_state_dict(without_adapter(policy.model).state_dict())
    (expected,) = plain.trainer.policy.log_probs(micros)
    assert torch.equal(reference.log_probs(micros)[0], expected)
    assert not torch.allclose(policy.log_probs(micros)[0], expected, atol=1e-3)


@pytest.mark.extended
def test_the_reference_follows_the_policy_at_its_interval(config: MakeConfig) -> None:
    run = made(config(*LORA, RANDOM, KL, "reference.sync_every_n_steps=2"))
    policy, reference, micros = run.trainer.policy, run.trainer.reference, sampled(run)
    assert reference is not None
    (start,) = policy.log_probs(micros)
    grow(run)
    reference.after_step(0)
    assert torch.equal(reference.log_probs(micros)[0], start)
    reference.after_step(1)
    assert torch.equal(reference.log_probs(micros)[0], policy.log_probs(micros)[0])


@pytest.mark.extended
@pytest.mark.parametrize(
    "override",
    [
        "model.gradient_checkpointing=true",
        "model.compile=eager",
        "model.attn_implementation=eager",
        "batching.micro_batch_size=3",
        "batching.log_prob_chunk_size=5",
        "model.family=gpt2",
        "model.family=qwen3_moe",
        "model.lora.target_modules=[all-linear]|model.family=qwen3_moe",
        "model.lora.use_rslora=true",
        "model.lora.bias=all",
        "model.lora.target_modules=[all-linear]",
        "model.lora.target_modules=[lm_head, embed_tokens]",
        "model.lora.layers_to_transform=[1]",
        "model.lora.rank_pattern={down_proj: 3}",
        "model.dtype=bfloat16",
        "model.dtype=float64",
    ],
)
def test_every_way_to_compute_trains_the_adapter(
    override: str, config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    names = {"model.family=gpt2": ["model.lora.target_modules=[c_attn, c_proj]"]}.get(override, [])
    run = config(*LORA, RANDOM, KL, "max_steps=1", *names, *override.split("|"))
    before = weights(made(replace(run, warm_start=WarmStartConfig())).trainer.policy.model)
    train(run, console)
    final = tmp_path / "run" / "final"
    after = weights(made(config(f"model.path={final}", "warm_start.steps=0")).trainer.policy.model)
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    assert moved == {
        name for name in before if "lora_" in name or ("bias=all" in override and "bias" in name)
    }


def test_a_run_goes_on_from_the_adapter_of_a_checkpoint(
    config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    """Bit by bit, with the reference of the first process: after a warm start it is nobody's base model."""
    settings, folder = (*LORA, KL, "trainer.save_steps=1"), tmp_path / "again"
    train(config(*settings, "max_steps=2", f"output_dir={tmp_path / 'whole'}"), console)
    whole = read_adapter(tmp_path / "whole" / "final")
    train(config(*settings, "max_steps=1", f"output_dir={folder}"), console)
    saved = folder / "checkpoint-1"
    assert not (saved / "model.safetensors").exists()
    first = read_adapter(saved)
    train(
        config(*settings, "max_steps=2", f"output_dir={folder}", f"trainer.resume_from_checkpoint={saved}"),
        console,
    )
    found = read_adapter(tmp_path / "again" / "final")
    assert all(torch.equal(value, found[name]) for name, value in whole.items())
    assert not all(torch.equal(value, first[name]) for name, value in whole.items())


def test_log_probs_in_float64_are_those_of_the_merged_weights(config: MakeConfig) -> None:
    """True float64 end to end: a factor in float32 would show at 1e-7."""
    run = made(config(*LORA, RANDOM, "model.dtype=float64"))
    policy = run.trainer.policy
    merged = made(config("model.dtype=float64", "warm_start.steps=0")).trainer.policy
    whole = without_adapter(policy.model, merge=True).state_dict()
    merged.model.load_state_dict(whole)
    micros = sampled(run)
    ours, theirs = policy.log_probs(micros)[0], merged.log_probs(micros)[0]
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("model.lora.alpha=4",), r"model\.lora\.alpha=4.* means nothing with model\.lora\.r=null"),
        ((*LORA, "model.lora.dropout=0.1"), r"dropout=0\.1 would draw other values .* ratios differ from 1"),
        ((*LORA, "model.lora.target_modules=[all-linear, q_proj]"), "names all-linear beside other modules"),
        (
            (*LORA, "model.lora.rank_pattern={q_proj: 0}"),
            r"rank_pattern\.q_proj=0 has to be a whole number from 1",
        ),
        (
            (*LORA, "parallel.tp=2", "parallel.tp_implementation=transformers"),
            "no plan for the adapters .* parallel.tp_implementation=torch",
        ),
        (("reference.without_adapter=true", KL), "finds no adapter while model.lora.r=null"),
        ((*LORA, "reference.without_adapter=true"), "without_adapter=true finds no reference model"),
        (
            (*LORA, KL, "reference.without_adapter=true", "reference.path=x"),
            "both decide what the reference is",
        ),
        (
            (*LORA, KL, "reference.without_adapter=true", "model.lora.bias=all"),
            "cannot take trained biases .* reference.path",
        ),
        (
            (*LORA, KL, "reference.sync_every_n_steps=1", "reference.mixup_alpha=0.5"),
            "not a mixture of their products; set reference.mixup_alpha=1",
        ),
        ((*LORA, KL, "reference.sync_every_n_steps=1", "reference.path=x"), "copies the policy's adapter"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    overrides: tuple[str, ...], sentence: str, config: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config(*overrides)


def test_modules_that_the_model_does_not_have_are_refused(config: MakeConfig) -> None:
    run = config("model.lora.r=2", "model.lora.target_modules=[query]")
    with pytest.raises(
        ConfigError, match=r"model\.lora\.r=2: peft cannot put this adapter into Qwen3.*query"
    ):
        made(run)


def test_a_missing_peft_names_the_extra(config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"model\.lora\.r=2 needs peft, .* pip install 'peft>="):
        made(config(*LORA))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter in a directory of its own, with its base model."""
    from regress.engine.config import load_config

    folder = tmp_path_factory.mktemp("adapter")
    run = load_config(overrides=[*LORA, RANDOM, "task.train_size=12", "task.eval_size=4"], environ={}).config
    save_model(made(run).trainer.policy.model, folder / "whole", portable=True)
    return folder / "whole"


def edited(change: dict[str, Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    return edit


def renamed(old: str, new: str | None) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        value = tensors.pop(f"base_model.model.{old}")
        save_file(tensors if new is None else {**tensors, f"base_model.model.{new}": value}, path)

    return edit


A = "model.layers.0.self_attn.q_proj.lora_A.weight"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "type": (edited({"peft_type": "IA3"}), r"of the type 'IA3', and only LORA is supported"),
    "dora": (edited({"use_dora": True}), r"sets use_dora=True, which is not supported"),
    "saved": (
        edited({"modules_to_save": ["lm_head"]}),
        r"sets modules_to_save=\['lm_head'\], which is not supp",
    ),
    "rank": (
        edited({"r": 3}),
        r"lora_A.weight has shape \[2, 64\] and the model under the adapter asks for \[3, 64\]",
    ),
    "json": (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json cannot be read"),
    "lacking": (renamed(A, None), f"adapter_model.safetensors lacks {A} \\(1 in all\\)"),
    "more": (renamed(A, "x.lora_A.weight"), f"adapter_model.safetensors lacks {A}"),
    "torn": (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x"), "safetensors cannot be read"),
    "pickle": (
        lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"),
        "holds adapter_config.json and no adapter_model.safetensors, and weights in pickles are not loaded",
    ),
    "base": (
        lambda f: shutil.rmtree(f / "base"),
        r"'base' in its adapter_config.json, is not a directory here, .* set ",
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", DAMAGE)
def test_a_directory_that_holds_no_intact_adapter_is_refused(
    name: str, adapter: Path, tmp_path: Path, config: MakeConfig
) -> None:
    damage, sentence = DAMAGE[name]
    folder = tmp_path / "damaged"
    shutil.copytree(adapter, folder)
    damage(folder)
    with pytest.raises(ConfigError, match=sentence) as caught:
        made(config(f"model.path={folder}", "warm_start.steps=0"))
    assert "\n" not in str(caught.value)


def test_settings_beside_an_adapter_have_to_be_its_own(adapter: Path, config: MakeConfig) -> None:
    made(config(f"model.path={adapter}", *LORA, "warm_start.steps=0"))
    with pytest.raises(
        ConfigError, match=r"model\.lora\.r=4 is not that of the adapter in model\.path=.* \(2\)"
    ):
        made(config(f"model.path={adapter}", *LORA, "model.lora.r=4"))
    with pytest.raises(ConfigError, match=r"model\.lora\.base_path=.* is not an adapter; set it to null"):
        made(config(f"model.path={adapter / 'base'}", f"model.lora.base_path={adapter}"))


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("model.layers.0.self_attn.q_proj.base_layer.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("h.0.attn.c_attn.lora_A.default.weight", "h.0.attn.c_attn.lora_A.weight"),
        ("wte.lora_embedding_B.default", "wte.lora_embedding_B"),
        ("q_proj.lora_A.other.weight", "q_proj.lora_A.other.weight"),  # several adapters stay apart
        ("default.weight", "default.weight"),
        (
            "experts.base_layer.lora_B.default.weight",
            "experts.base_layer.lora_B.weight",
        ),  # of a second parameter
        ("experts.base_layer.base_layer.down_proj", "experts.down_proj"),
        ("my_base_layer.weight", "my_base_layer.weight"),
    ],
)
def test_names_are_those_of_the_file(name: str, plain: str) -> None:
    assert plain_adapter_name(name) == plain
