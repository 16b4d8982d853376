"""The same datums through an SDK and self-hosted: log-probs, losses, gradient norms and weights, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import HERE, SEEDS, SERVICE_PYTHON

PROMPTS = ("rev abc", "rev hgf", "rev eee", "rev bad")
ADAM = {"beta1": 0.8, "beta2": 0.97, "eps": 1e-7, "weight_decay": 0.1, "grad_clip_norm": 0.5}
RATES = (1e-3, 2e-3, 5e-4)


def rows_of(driver: Any, update: int) -> list[Any]:
    """Return rows of completions, one of them of a negative advantage and one of a single token."""
    prompts = [driver.tokenizer.encode(f"<user>{text}<end><assistant>") for text in PROMPTS]
    drawn = driver.draw(prompts, [100 * update + number for number in range(len(prompts))], 5, 1.0)
    found = []
    for number, (prompt, (tokens, log_probs)) in enumerate(zip(prompts, drawn, strict=True)):
        length = 1 if number == update else len(tokens)
        mask = [0] * len(prompt) + [1] * length
        known = [0.0] * len(prompt) + log_probs[:length]
        found.append(([*prompt, *tokens[:length]], known, mask, (-1.0) ** number / (3 + number)))
    return found


def test_the_same_datums_give_the_same_bits(
    make_driver: Callable[[str], Any], configurations: Path, service_folder: Path, tmp_path: Path
) -> None:
    """Any detour of a number on its way, or another order of the step's sums, would show."""
    name = f"seed-{SEEDS[0]}"
    driver = make_driver(name)
    driver.publish("initial")
    sent, replies = [], []
    for number, rate in enumerate(RATES):
        rows = rows_of(driver, number)
        metrics = driver.step(rows, rate, ADAM, 0.0)
        shown = [
            [value for value, counts in zip(values, mask[1:], strict=True) if counts]
            for values, (_, _, mask, _) in zip(driver.log_probs, rows, strict=True)
        ]
        replies.append({"log_probs": shown, "loss": metrics["loss:sum"], "grad_norm": metrics["grad_norm"]})
        sent.append({"rows": rows, "adam": {"learning_rate": rate, **ADAM}})
    driver.save("after-updates")
    saves = (service_folder / "state" / "saves").glob("state-*/checkpoint/regress_state.json")
    (folder,) = [told.parent for told in saves if json.loads(told.read_text())["step"] == len(RATES)]
    weights = folder / "model.safetensors"
    request, output = tmp_path / "request.json", tmp_path / "output.json"
    config = str(configurations / f"{name}.yaml")
    request.write_text(json.dumps({"config": config, "updates": sent, "weights": str(weights)}))
    command = [os.environ[SERVICE_PYTHON], HERE / "self_hosted_updates.py", request, output]
    subprocess.run(command, cwd=tmp_path, check=True)
    expected = json.loads(output.read_text())
    assert replies == expected["updates"]
    assert expected["compared"] > 10
    assert not expected["differing"]
