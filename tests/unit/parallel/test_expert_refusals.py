"""Refusals of expert parallelism: extents that do not divide the experts, and models without any."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from regress.engine.config.model_config import ModelConfig
from regress.engine.model_loading import build_model
from regress.errors import ConfigError
from regress.parallel import expert_parallel


class ThreeRanks:
    """A mesh of three."""

    def size(self) -> int:
        return 3

    def get_local_rank(self) -> int:
        return 0


def model_of(family: str, **config: Any) -> PreTrainedModel:
    return build_model(ModelConfig(family=family, config=config), seed=3, vocab_size=13, pad_id=0, eos_id=1)


def test_ranks_that_cannot_share_the_experts_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        expert_parallel.apply(model_of("qwen3_moe", num_experts=8), ThreeRanks())  # type: ignore[arg-type]  # only its extent is asked
    assert str(caught.value) == (
        "parallel.ep=3: the model has 8 experts a layer, which 3 ranks cannot share equally; choose a divisor of 8"
    )


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        expert_parallel.apply(model_of("llama"), ThreeRanks())  # type: ignore[arg-type]  # only its extent is asked
    assert str(caught.value) == (
        "parallel.ep=3: LlamaForCausalLM has no experts to share; set parallel.ep=1 or take a mixture-of-experts model"
    )
