"""Blocks from the documents of NexRL and ROLL, unchanged: they mean here what they mean there."""

from collections.abc import Callable

from regress.engine.config import Loaded

Load = Callable[..., Loaded]

NEXRL_DEBUG = r"""
debug:
  enable_data_dump: true
  dump_dir: "${oc.env:EXPERIMENT_PATH,./debug_dump}/debug_dump"
  dump_format: "pt"
  dump_every_n_steps: 1

  dump_options:
    trajectory: true
    old_log_probs: true
    forward_data: true
    loss: true
    param: false
    gradient: false

  target_param_pattern: "model\\.layers\\.0\\.self_attn\\.q_proj\\.weight"
"""

NEXRL_REPLAY = """
hydra:
  searchpath:
    - file://./

defaults:
  - single_turn_math_qwen2a5_7b
  - _self_

rollout_worker:
  type: "mock"
  need_llm_inference: false
  trajectory_load_path: "/path/to/debug_dump/trajectory/step_000000.pt"
  trajectory_format: "pt"
"""

ROLL_MOCK = """
exp_name: "sokoban_precision_test_dump"
max_steps: 50

rollout_mock:
  enable: true
  mode: dump
  dump_dir: ./output/rollout_dumps/baseline_v1

system_envs:
  NCCL_ALGO: Ring
  NVTE_ALLOW_NONDETERMINISTIC_ALGO: '0'
  CUBLAS_WORKSPACE_CONFIG: ':4096:8'
  DETERMINISTIC_MODE: '1'
"""


def test_nexrl_dump(load: Load) -> None:
    debug = load({"run.yaml": NEXRL_DEBUG}).config.debug
    assert (debug.enable_data_dump, debug.dump_format, debug.dump_every_n_steps) == (True, "pt", 1)
    assert debug.dump_dir == "./debug_dump/debug_dump"
    assert debug.target_param_pattern == r"model\.layers\.0\.self_attn\.q_proj\.weight"
    asked = [name for name, value in vars(debug.dump_options).items() if value]
    assert asked == ["trajectory", "old_log_probs", "forward_data", "loss"]
    moved = load({"run.yaml": NEXRL_DEBUG}, env={"EXPERIMENT_PATH": "/exp"}).config.debug
    assert moved.dump_dir == "/exp/debug_dump"


def test_nexrl_replay_inherits_from_the_recorded_run(load: Load) -> None:
    files = {"single_turn_math_qwen3_8b.yaml": NEXRL_REPLAY, "single_turn_math_qwen2a5_7b.yaml": NEXRL_DEBUG}
    config = load(files).config
    worker = config.rollout_worker
    assert (worker.type, worker.need_llm_inference, worker.trajectory_format) == ("mock", False, "pt")
    assert worker.trajectory_load_path == "/path/to/debug_dump/trajectory/step_000000.pt"
    assert config.debug.dump_options.trajectory


def test_roll_dump_and_mock(load: Load) -> None:
    config = load({"run.yaml": ROLL_MOCK}).config
    assert (config.exp_name, config.max_steps) == ("sokoban_precision_test_dump", 50)
    assert config.rollout_mock.dump_dir == "./output/rollout_dumps/baseline_v1"
    assert config.system_envs == {
        "NCCL_ALGO": "Ring",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "DETERMINISTIC_MODE": "1",
    }
    replay = load({"run.yaml": ROLL_MOCK.replace("mode: dump", "mode: mock")}).config
    assert replay.rollout_mock.mode == "mock"


def test_roll_command_line(load: Load) -> None:
    """``--config_name agentic_sokoban --config_path examples/qwen``."""
    files = {"examples/qwen/agentic_sokoban.yaml": ROLL_MOCK}
    assert load(files, path="examples/qwen", name="agentic_sokoban").config.max_steps == 50
