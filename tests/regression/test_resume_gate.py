"""Several ranks that go on from a damaged checkpoint: all of them end, one of them says why, none waits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIZES = "{hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2, head_dim: 8}"
SMALL = (
    *(f"model.config={SIZES}", "task.train_size=8", "task.eval_size=0", "data.prompts_per_step=2"),
    *(
        "data.group_size=2",
        "data.max_completion_length=4",
        "trainer.save_steps=1",
        "evaluation.every_n_steps=0",
    ),
)
RANKS = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.extended
def test_all_ranks_stop_with_one_message(tmp_path: Path) -> None:
    train = ("regress", "train", *SMALL, f"output_dir={tmp_path}")
    done = run(*train, "max_steps=1")
    assert done.returncode == 0, done.stderr
    weights = tmp_path / "checkpoint-1" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = (*RANKS, *train, "max_steps=2", "parallel.dp=2", "trainer.resume_from_checkpoint=latest")
    refused = run(*again)
    assert refused.returncode not in (0, None)
    errors = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, refused.stderr
    assert "regress doctor" in errors[0]
    assert refused.stdout.count("corrupted_model_weights") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    weights.write_bytes(whole)
    went_on = run(*again)
    assert went_on.returncode == 0, went_on.stderr[-2000:]
    assert (tmp_path / "checkpoint-2").is_dir()
