"""Rows of the document on debug dumps: recording, replaying and comparing."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import torch

from tests.docs.walking import Walk, shows
from tests.interop.conftest import Nexrl, rollouts

BLOCK = """\
defaults: [reverse_string, _self_]
debug:
  enable_data_dump: true
  dump_dir: "${oc.env:EXPERIMENT_PATH,./debug_dump}/debug_dump"
  dump_format: "pt"  # pt 或 jsonl
  dump_every_n_steps: 1

  # Self-hosted mode 数据类型
  dump_options:
    trajectory: true       # Rollout trajectories
    old_log_probs: true    # GRPO old log probabilities
    forward_data: true     # Forward pass logprobs/entropy
    loss: true             # Loss values
    param: false           # Parameter (需要 use_orig_params)
    gradient: false        # Gradient (需要 use_orig_params)

  # Param/gradient dump 需要指定参数名 pattern
  target_param_pattern: "model\\\\.layers\\\\.0\\\\.self_attn\\\\.q_proj\\\\.weight"
"""
"""The document's, unchanged; the first line inherits the rest of a run."""
FIRST = ("trajectory", "old_log_probs", "forward_data", "loss")
ALL = (
    *(f"debug.dump_options.{name}=true" for name in (*FIRST, "is_loss_debug", "batch_inputs", "param")),
    *("debug.enable_data_dump=true", "debug.dump_options.gradient=true", "evaluation.every_n_steps=0"),
)


def loaded(walk: Walk, file: str) -> Any:
    return torch.load(walk.path(file), weights_only=True)


def block(walk: Walk) -> str:
    """The dump of the document's block."""
    walk.write("s000.yaml", BLOCK)
    walk.train("--config-path", "s000.yaml", to="plain")
    return "debug_dump/debug_dump"


@shows("debug-dump", "debug.enable_data_dump", "debug.dump_dir", "tree of a self-hosted dump")
def the_block_of_the_document(walk: Walk) -> None:
    for dump, environ in ((block(walk), {}), ("elsewhere/debug_dump", {"EXPERIMENT_PATH": "elsewhere"})):
        walk.train("--config-path", "s000.yaml", to="plain" if not environ else "plain2", **environ)
        folder = walk.path(dump)
        assert {path.name for path in folder.iterdir()} == {*FIRST, "manifest.json"}
        assert sorted(path.name for path in (folder / "trajectory").iterdir()) == [
            "step_000000.pt",
            "step_000001.pt",
        ]
    assert "forward_data" in walk.regress("dump", "show", block(walk)).output


@shows(
    "debug-dump", "dump_options.trajectory", "dump_options.old", "dump_options.forward", "dump_options.loss"
)
def every_type_is_shown(walk: Walk) -> None:
    words = {
        "trajectory": "finish",
        "old_log_probs": "old_log_probs",
        "forward_data": "entropy",
        "loss": "pg_loss",
    }
    for name, word in words.items():
        assert f" {name} " in walk.regress("dump", "show", f"{block(walk)}/{name}").output
        (file, *_) = sorted(walk.path(f"{block(walk)}/{name}").iterdir())
        assert word in walk.regress("dump", "show", file).output, name


@shows("debug-dump", "debug.dump_format: pt, with NexRL's keys")
def the_keys_of_nexrl(walk: Walk) -> None:
    dump = block(walk)
    found = loaded(walk, f"{dump}/trajectory/step_000000.pt")
    assert {"step", "num_trajectories", "trajectories"} <= found.keys()
    assert {"tokens", "loss_mask", "reward"} <= found["trajectories"][0].keys()
    assert {"old_log_probs", "shape"} <= loaded(walk, f"{dump}/old_log_probs/step_000000.pt").keys()
    forward = loaded(walk, f"{dump}/forward_data/step_000000_rank0_micro0.pt")
    assert {"rank", "micro_idx", "log_probs", "entropy", "response_mask", "input_ids"} <= forward.keys()
    loss = loaded(walk, f"{dump}/loss/step_000000_rank0_micro0.pt")
    assert {"loss", "pg_loss", "entropy_loss", "metrics"} <= loss.keys()
    walk.train(*ALL, "debug.dump_format=pt", to="pt")
    assert walk.path("pt/debug_dump/is_loss_debug/step_000001_rank0_micro0.pt").is_file()


@shows("debug-dump", "debug.dump_format: jsonl")
def lines_of_json(walk: Walk) -> None:
    walk.train(*ALL, "debug.dump_format=jsonl", to="jsonl")
    files = sorted(walk.path("jsonl/debug_dump").rglob("*.jsonl"))
    assert {path.parent.name for path in files} >= {
        *FIRST,
        "param",
        "gradient",
        "is_loss_debug",
        "batch_inputs",
    }
    for path in files:
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=lambda name: 1 / 0)


@shows("debug-dump", "debug.dump_every_n_steps")
def some_steps_only(walk: Walk) -> None:
    walk.train(*ALL, "debug.dump_every_n_steps=2", "max_steps=3", to="every2")
    names = {path.name for path in walk.path("every2/debug_dump/trajectory").iterdir()}
    assert names == {"step_000000.safetensors", "step_000002.safetensors"}


@shows("debug-dump", "dump_options.param", "dump_options.gradient", "debug.target_param_pattern")
def parameters_of_a_pattern(walk: Walk) -> None:
    pattern = r"model\.layers\.0\.self_attn\.q_proj\.weight"
    walk.train(*ALL, "debug.dump_format=pt", f"debug.target_param_pattern='{pattern}'", to="pattern")
    for name in ("param", "gradient"):
        (path,) = walk.path(f"pattern/debug_dump/{name}").glob("step_000000*.pt")
        assert pattern.replace("\\", "") in str(loaded(walk, str(path.relative_to(walk.folder))))
    refused = walk.train(*ALL, "debug.target_param_pattern=nothing_like_it", to="pattern0", code=2)
    assert "nothing_like_it" in refused.errors


@shows("debug-dump", "a second run into the same directory")
def a_second_run_is_refused(walk: Walk) -> None:
    walk.train(*ALL, to="golden")
    refused = walk.train(*ALL, "debug.overwrite=false", "--overwrite", to="golden", code=2)
    assert "debug.overwrite=true" in refused.errors


@shows("debug-dump", "types is_loss_debug and batch_inputs", "a file for each rank and microbatch")
def files_of_microbatches(walk: Walk) -> None:
    walk.train(*ALL, "debug.dump_format=pt", "batching.micro_batch_size=4", to="micros")
    for name in ("is_loss_debug", "batch_inputs", "forward_data", "loss"):
        found = {path.name for path in walk.path(f"micros/debug_dump/{name}").glob("step_000000*")}
        assert found == {f"step_000000_rank0_micro{n}.pt" for n in range(4)}, name


SIDE = """\
defaults: [reverse_string, _self_]
exp_name: base_b
output_dir: ./base_b
evaluation: {every_n_steps: 0}
debug: {enable_data_dump: true, dump_format: pt, dump_options: {trajectory: true, param: true, gradient: true}}
"""
MOCK = """\
hydra:
  searchpath:
    - file://./

defaults:
  - base_b
  - _self_

output_dir: ./mock_b
# Mock rollout worker 从 dump 文件加载
rollout_worker:
  type: "mock"
  need_llm_inference: false
  trajectory_load_path: "%s"
  trajectory_format: "pt"
"""


def replayed(walk: Walk, load: str, *more: str, code: int = 0) -> Any:
    from tests.docs.walking import SMALL

    walk.write("base_b.yaml", SIDE)
    walk.write("mock_b.yaml", MOCK % load)
    walk.regress("train", "--config-path", ".", "--config-name", "base_b", *SMALL)
    return walk.regress("train", "--config-path", ".", "--config-name", "mock_b", *SMALL, *more, code=code)


@shows(
    "debug-dump",
    *(
        "a configuration that inherits",
        "rollout_worker.type: mock",
        "trajectory_load_path",
        "trajectory_format",
    ),
    *("the complete example", "trajectories matched by"),
)
def recorded_rollouts_are_trained_on(walk: Walk) -> None:
    replayed(walk, "base_b/debug_dump")
    same = walk.regress("compare", "--bitwise", "base_b/debug_dump", "mock_b/debug_dump").output
    assert "identical" in same or "equal" in same, same
    replayed(walk, "base_b/debug_dump/trajectory/step_000000.pt", "max_steps=1", "output_dir=one")
    replayed(walk, "base_b/debug_dump/trajectory", "output_dir=folder")
    other = replayed(walk, "base_b/debug_dump", "seed=5", "output_dir=other", code=2)
    assert re.search(r"group|prompt", other.told), other.errors
    other_format = "rollout_worker.trajectory_format=jsonl", "output_dir=asked_jsonl"
    wrong = replayed(walk, "base_b/debug_dump", *other_format, code=2)
    assert "is a pt dump, not jsonl" in wrong.told, wrong.errors


@shows(
    "debug-dump",
    "compare two dumps, with a JSON report",
    "5.1|python nexrl",
    "--output",
    "--step (default 1)",
)
def two_dumps_are_compared(walk: Walk) -> None:
    walk.train(*ALL, to="golden")
    walk.train(*ALL, "algorithm.entropy_coef=0.01", to="entropy")
    dirs = ("--self_hosted_dir", "golden/debug_dump", "--weaver_dir")
    equal = walk.regress("compare", *dirs, "golden/debug_dump", "--step", 0, "--output", "report.json")
    assert "within tolerance" in equal.output or "equal" in equal.output
    assert {"sections", "step", "exit_code"} <= walk.json("report.json").keys()
    walk.regress("compare", "golden/debug_dump", "golden/debug_dump")
    early = walk.regress("compare", *dirs, "golden/debug_dump", "--step", 2, code=2)
    assert "steps count from 0" in early.told


def nexrl(walk: Walk, name: str, change: Any = lambda samples: None) -> Nexrl:
    samples = rollouts(8)
    change(samples)
    return Nexrl(walk.path(name), samples, micros=2)


@shows(
    "debug-dump",
    *(
        "the full command",
        "--remote_api_dir",
        "--num_ranks",
        "trajectories: tokens",
        "forward data:",
        "loss, pg_loss",
    ),
    *("six tensors", "analysis of datums", "text: directories"),
)
def the_full_command(walk: Walk) -> None:
    nexrl(walk, "A").self_hosted(), nexrl(walk, "B").remote_api(), nexrl(walk, "C").weaver()
    dirs = ("--self_hosted_dir", "A", "--remote_api_dir", "B", "--weaver_dir", "C", "--step", 0)
    full = walk.regress("compare", *dirs, "--num_ranks", 2, "--num_micros", 2, "--output", "full.json")
    for section in (
        "TRAJECTORIES",
        "FORWARD_DATA_ALL",
        "LOSS_DATA_ALL",
        "IS_LOSS_DEBUG_ALL",
        "DATUMS_ANALYSIS",
    ):
        assert f"--- {section} ---" in full.output, section
    assert "has no ranks, so all of its records were compared" in full.told
    found = {one["section"]: one for one in walk.json("full.json")["sections"]}
    assert all(row["tokens_match"] for row in found["trajectories"]["trajectory_comparisons"])
    names = [one["name"] for one in found["is_loss_debug_all"]["comparisons"][0]["comparisons"]]
    six = {"log_probs", "old_log_probs", "advantages", "prob_ratio", "elementwise_loss", "effective_valid"}
    assert six <= {*names}
    names = [one["name"] for one in found["loss_data_all"]["comparisons"][0]["comparisons"]]
    assert {"loss", "pg_loss", "entropy_loss"} <= {*names}
    assert found["datums_analysis"]["num_datums"] == 8
    for line in ("rank1_micro1 loss: ✓", "differences of loss over 4 places: max 0, min 0, mean 0"):
        assert line in full.output, line
    assert all(str(walk.path(name)) in full.told or f": {name}" in full.told for name in "ABC")


@shows("debug-dump", "shape mismatch")
def other_padding_is_aligned(walk: Walk) -> None:
    walk.train(*ALL, to="golden")
    load = "rollout_worker.trajectory_load_path=golden/debug_dump"
    mock = ("rollout_worker.type=mock", "rollout_worker.need_llm_inference=false", load)
    walk.train(*ALL, *mock, "batching.padding_side=left", "batching.micro_batch_size=4", to="left")
    walk.regress("compare", "golden/debug_dump", "left/debug_dump")


@shows("debug-dump", "loss: entropy coefficient")
def an_entropy_coefficient_is_named(walk: Walk) -> None:
    walk.train(*ALL, to="golden")
    walk.train(*ALL, "algorithm.entropy_coef=0.01", to="entropy")
    assert "entropy" in walk.regress("compare", "golden/debug_dump", "entropy/debug_dump", code=1).told


@shows("debug-dump", "loss: numerical precision")
def a_precision_is_named(walk: Walk) -> None:
    walk.train(*ALL, "warm_start.steps=0", to="float32")
    load = "rollout_worker.trajectory_load_path=float32/debug_dump"
    mock = ("rollout_worker.type=mock", "rollout_worker.need_llm_inference=false", load)
    walk.train(*ALL, *mock, "warm_start.steps=0", "model.dtype=bfloat16", to="bfloat16")
    told = walk.regress("compare", "float32/debug_dump", "bfloat16/debug_dump", "--atol", "1e-5", code=1).told
    assert "bfloat16" in told, told[-2000:]


@shows("debug-dump", "loss: random seed")
def another_seed_is_named(walk: Walk) -> None:
    walk.train(*ALL, to="golden")
    walk.train(*ALL, "seed=9", to="seed9")
    told = walk.regress("compare", "golden/debug_dump", "seed9/debug_dump", code=1).told
    assert "seed" in told, told[-2000:]


@shows("debug-dump", "find the place in is_loss_debug")
def the_first_divergence_is_a_term_of_the_loss(walk: Walk) -> None:
    def raise_losses(samples: Any) -> None:
        samples[6].values["elementwise_loss"] += 1e-3

    nexrl(walk, "A").self_hosted()
    nexrl(walk, "A2").weaver(), nexrl(walk, "C2", raise_losses).weaver()
    told = walk.regress("compare", "A2", "C2", "--step", 0, code=1).told
    assert "elementwise_loss" in told
    assert "log_probs" not in told.partition("drift")[2][:60]


@shows("debug-dump", "missing data: dump options")
def missing_data_names_its_settings(walk: Walk) -> None:
    nexrl(walk, "A").self_hosted()
    weaver = nexrl(walk, "C3").weaver()
    shutil.rmtree(weaver.folder / "loss")
    told = walk.regress("compare", "--self_hosted_dir", "A", "--weaver_dir", "C3", "--step", 0, code=1).told
    assert "WEAVER_DEBUG_DUMP_OPTIONS" in told, told[-2000:]
    walk.train(*ALL, to="golden")
    lost = walk.path("lost")
    shutil.rmtree(lost, ignore_errors=True)
    shutil.copytree(walk.path("golden/debug_dump"), lost)
    (lost / "loss/step_000001_rank0_micro0.safetensors").unlink()
    told = walk.regress("compare", "golden/debug_dump", "lost", code=2).told
    assert "step_000001_rank0_micro0" in told or "lacks 1 record" in told, told


@shows("debug-dump", "one changed token")
def one_token_is_no_rank(walk: Walk) -> None:
    def change(samples: Any) -> None:
        samples[5].values["log_probs"][samples[5].prompt] -= 0.05

    nexrl(walk, "A2").weaver(), nexrl(walk, "C4", change).weaver()
    told = walk.regress("compare", "A2", "C4", "--step", 0, code=1).told
    assert "other weights" not in told
    assert "position" in told
