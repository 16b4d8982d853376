"""Log-probs, entropies and gradients do not depend on how the vocabulary is cut."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import vocabularies

Done = list[dict[str, Any]]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return ranks.results("vocabularies", 4, vocabularies.JOBS, tmp_path_factory)


@pytest.mark.parametrize("name", vocabularies.EXACT)
def test_float64_agrees_with_the_whole_vocabulary(name: str, done: Done) -> None:
    """1e-12: values are of order 1 (300 with large logits, of which 1e-12 is 15 times the last bit)."""
    for rank, results in enumerate(done):
        found = results[name]
        for quantity in ("log_probs", "entropy", "gradient"):
            assert found[quantity] <= 1e-12, (rank, quantity)
        assert found["signal"] > 0.1
        assert found["idle"] == 0.0
        assert found["replicas"]
        assert found["no_grad"] == (name == "no entropy gradient")


@pytest.mark.parametrize(("name", "bound"), [("float32", 2e-6), ("bfloat16", 1e-2)])
def test_lower_precisions_accumulate_in_float32(name: str, bound: float, done: Done) -> None:
    """Gradients of bfloat16 logits are rounded to bfloat16: 2^-8 of values of order 1."""
    for results in done:
        found = results[name]
        assert found["dtype"] == "torch.float32"
        assert max(found["log_probs"], found["entropy"]) <= 2e-6
        assert found["gradient"] <= bound
        assert found["replicas"]
