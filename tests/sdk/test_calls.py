"""NexRL's sequence of calls, and what comes between them."""

from __future__ import annotations

from typing import Any

PROMPT = [3, 6, 7, 8, 4]


def test_nexrl_calls(driver: Any) -> None:
    """Every call of a training loop returns what NexRL reads."""
    first = driver.publish("initial")
    drawn = driver.sample(PROMPT, 2, 4, 1.0, 11)
    assert drawn == driver.sample(PROMPT, 2, 4, 1.0, 11)
    assert all(len(tokens) == len(log_probs) for tokens, log_probs in drawn)
    assert driver.prompt_log_probs(PROMPT)[0] is None
    rows = [
        (
            [*PROMPT, *tokens],
            [0.0] * len(PROMPT) + log_probs,
            [0] * len(PROMPT) + [1] * len(tokens),
            advantage,
        )
        for (tokens, log_probs), advantage in zip(drawn, (1.0, -0.5), strict=True)
    ]
    metrics = driver.step(rows, 2e-6)
    assert metrics["step"] == 1
    assert metrics["grad_norm"] > 0
    assert metrics["loss:sum"] != 0
    assert metrics.get("loss", metrics["loss:sum"]) == metrics["loss:sum"]
    assert driver.publish("step_000001") != first


def test_errors_leave_later_calls_alone(driver: Any) -> None:
    """A failed operation raises with the service's sentence, and the numbers go on."""
    assert "nonsense" in driver.refused()
    row = ([5, 6, 7], [0.0, -2.0, -2.0], [0, 1, 1], 1.0)
    assert driver.step([row], 1e-4)["step"] == 1
    driver.save_and_load()
