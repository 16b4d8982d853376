"""The skill for agents, followed on five planted bugs: the row of the symptom gives the command and what to read."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import GPT2Config, Qwen3Config, Qwen3ForCausalLM

from regress import record
from regress.cli import main

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| (.+?) \| (?:`regress (.+?)`|[^|]*) \| (.+) \|$",
    (ROOT / "skills/regress/SKILL.md").read_text(),
    re.M,
)
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
LOSS = '''
def loss(log_probs, old_log_probs, advantages, mask):
    """Every token is weighed by its own sequence, where DAPO counts all tokens alike."""
    ratio = (log_probs - old_log_probs).exp()
    term = -(ratio * advantages).minimum(ratio.clamp(0.8, 1.28) * advantages) * mask
    return (term.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
'''


def train(folder: Path, size: int, planted: str = "") -> None:
    """Train two steps on eight samples, in microbatches of a size."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids, advantages = torch.randint(40, (8, 9)), torch.randn(8, 1)
    with record(folder, model, token_gradient=True):
        for step in range(2):
            for rows, a in zip(ids.split(size), advantages.split(size), strict=True):
                logits = model(input_ids=rows, attention_mask=torch.ones_like(rows)).logits[:, :-1]
                log_probs = logits.log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0]
                loss = -((log_probs - log_probs.detach()).exp() * a).mean()
                if planted == "NaN" and step == 1:
                    loss = (
                        loss + 0.0 * (log_probs[0, 0] - log_probs[0, 0].detach()).sqrt()
                    )  # right, and 0 * inf behind
                (loss if planted == "undivided" else loss * len(rows) / len(ids)).backward()
            optimizer.step()
            optimizer.zero_grad()


def wrong_loss() -> dict[str, str]:
    Path("package.py").write_text(LOSS)
    return {"pkg.module:loss": "package:loss"}


def absolute_positions() -> dict[str, str]:
    GPT2Config().save_pretrained("model")
    return {"FOLDER": "model"}


def forgotten_optimizer() -> dict[str, str]:
    page = (ROOT / "docs/howto/check-a-resume.md").read_text()
    script = re.search(r"```python\n(# resumes\.py\n.*?)```", page, re.S)
    assert script is not None
    Path("train.py").write_text(script[1])
    return {"python train.py --out": f"{sys.executable} train.py"}


def undivided() -> dict[str, str]:
    train(Path("A"), 8)
    train(Path("B"), 2, "undivided")
    return {}


def nan_gradient() -> dict[str, str]:
    train(Path("run"), 8, "NaN")
    return {"DUMP": "run"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("symptom", "plant", "told", "answer"),
    [
        ("is this loss GRPO", wrong_loss, "departure:", "aggregation=seq-mean-token-mean"),
        (
            "packed rows differ from padded",
            absolute_positions,
            "wrong",
            "padded left wrong log-prob of sample 0, token 1",
        ),
        (
            "goes on otherwise after a resume",
            forgotten_optimizer,
            "first step that differs",
            "step 2, .* optimizer",
        ),
        (
            "differs by an integer",
            undivided,
            "token_gradient",
            "token_gradient .* a factor that is the number of micro",
        ),
        (
            "NaN comes in step 2",
            nan_gradient,
            "not finite",
            r"^nonfinite: gradient [^:]*: .*step1.* the first value that is not finite arises here",
        ),
    ],
)
def test_a_planted_bug_is_found_by_the_skill_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    symptom: str,
    plant: Callable[[], dict[str, str]],
    told: str,
    answer: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    ((_, command, read),) = [row for row in ROWS if symptom in row[0]]
    assert told in read
    for placeholder, value in plant().items():
        assert placeholder in command
        command = command.replace(placeholder, value)
    done = CliRunner().invoke(main, command.split())
    assert done.exit_code == 1, done.output
    assert re.search(answer, " ".join(done.output.split())), done.output
