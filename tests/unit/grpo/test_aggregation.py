"""Weights by hand, and what they sum to."""

from typing import Any

import pytest
import torch

from regress.errors import ConfigError
from regress.grpo.argument_checks import InputError
from regress.grpo.loss_aggregation import token_weights
from regress.grpo.objective import Objective
from regress.grpo.objective_catalogue import AGGREGATIONS
from regress.grpo.objective_presets import make_objective

# samples of 2, 0, 1 and 3 tokens
SEQUENCE = torch.tensor([0, 0, 2, 3, 3, 3])


def weights(**fields: Any) -> list[float]:
    found = token_weights(SEQUENCE, 4, make_objective(**fields), max_completion_length=10)
    assert found.dtype == torch.float64
    return found.tolist()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"aggregation": "token-mean"}, [1 / 6] * 6),
        ({"aggregation": "token-sum"}, [1.0] * 6),
        ({"aggregation": "seq-mean-token-mean"}, [1 / 8, 1 / 8, 1 / 4, 1 / 12, 1 / 12, 1 / 12]),
        (
            {"aggregation": "seq-mean-token-mean", "count_empty_rows": False},
            [1 / 6, 1 / 6, 1 / 3, 1 / 9, 1 / 9, 1 / 9],
        ),
        ({"aggregation": "seq-mean-token-sum"}, [1 / 4] * 6),
        ({"aggregation": "seq-mean-token-sum", "count_empty_rows": False}, [1 / 3] * 6),
        ({"aggregation": "seq-mean-token-sum-norm"}, [1 / 40] * 6),
        ({"aggregation": "seq-mean-token-sum-norm", "norm_length": 5}, [1 / 20] * 6),
    ],
)
def test_weights_by_hand(fields: dict[str, Any], expected: list[float]) -> None:
    assert weights(**fields) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("count_empty_rows", [True, False])
def test_a_batch_without_tokens_has_no_weights_and_no_division_by_zero(
    aggregation: str, count_empty_rows: bool
) -> None:
    objective = make_objective(aggregation=aggregation, count_empty_rows=count_empty_rows)
    assert token_weights(torch.zeros(0).long(), 3, objective, max_completion_length=4).shape == (0,)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"aggregation='token_mean' is unknown.*did you mean 'token-mean'"):
        token_weights(SEQUENCE, 4, Objective(aggregation="token_mean"), max_completion_length=4)
    with pytest.raises(InputError, match=r"length 0 cannot divide a loss: set norm_length to at least 1"):
        token_weights(SEQUENCE, 4, make_objective("dr_grpo"), max_completion_length=0)
    with pytest.raises(InputError, match=r"sequence_K names sample 3, but there are 3"):
        token_weights(SEQUENCE, 3, Objective(), max_completion_length=4)
