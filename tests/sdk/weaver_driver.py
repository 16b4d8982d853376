"""NexRL's calls of the SDK nex-weaver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from weaver import ServiceClient, types
from weaver.types.tensor import tensor_payload

ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 1e-2, "grad_clip_norm": 1.0}
"""Those of NexRL."""


class WeaverDriver:
    """A model in full parameters, and a sampler of its latest weights."""

    def __init__(self, url: str, key: str, model: str) -> None:
        self._service = ServiceClient(base_url=url, api_key=key)
        self._service.connect()
        self._model = model
        self.trainer = self._service.create_model(base_model=model, training_mode="full_ft")
        self.tokenizer = self.trainer.get_tokenizer()
        self._sampler: Any = None
        self.log_probs: list[list[float]] = []
        """Those of the targets of each datum, as the last step has returned them."""

    def publish(self, name: str) -> str:
        """Save weights for sampling, and sample with them from now on; returns their path."""
        path = str(self.trainer.save_weights_for_sampler(name=name))
        self._sampler = self._service.create_sampling_client(
            model_path=path, base_model=self._model, model_id=self.trainer.model_id
        )
        return path

    def sample(
        self, prompt: Sequence[int], count: int, max_tokens: int, temperature: float, seed: int
    ) -> list[Any]:
        """Return tokens and log-probs of completions."""
        params = types.SamplingParams(max_tokens=max_tokens, temperature=temperature, stop=None, seed=seed)
        found = self._sampler.sample(
            prompt=types.ModelInput.from_ints(list(prompt)),
            num_samples=count,
            sampling_params=params,
            include_prompt_logprobs=False,
            wait=True,
        )
        return [(sequence["tokens"], sequence["logprobs"]) for sequence in found["sequences"]]

    def draw(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], max_tokens: int, temperature: float
    ) -> list[Any]:
        """Return tokens and log-probs of one completion of each prompt."""
        return [
            self.sample(prompt, 1, max_tokens, temperature, seed)[0]
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

    def prompt_log_probs(self, prompt: Sequence[int]) -> list[Any]:
        """Return the log-probs of a prompt."""
        return list(self._sampler.compute_logprobs(prompt=types.ModelInput.from_ints(list(prompt))))

    def step(
        self,
        rows: Sequence[Any],
        learning_rate: float,
        adam: Mapping[str, float] = ADAM,
        entropy_coeff: float = 1e-4,
    ) -> dict[str, float]:
        """Make a step with importance sampling; a row has tokens, log-probs, loss mask and advantage."""
        passed = self.trainer.forward_backward(
            [_datum(*row) for row in rows],
            loss_fn="importance_sampling",
            loss_fn_config={"entropy_coeff": entropy_coeff, "enable_debug_dump": False},
            wait=True,
        )
        params = types.AdamParams(learning_rate=learning_rate, **adam)
        updated = self.trainer.optim_step(params, wait=True)
        self.log_probs = [list(output["logprobs"]["data"]) for output in passed["result"]["loss_fn_outputs"]]
        return {**passed["result"]["metrics"], **updated["metrics"]}

    def refused(self) -> str:
        """Return the error of a setting that the loss does not know; SDKs themselves check its name."""
        try:
            data = [_datum([5, 6], [0.0, -1.0], [0, 1], 1.0)]
            config = {"nonsense": 1.0}
            self.trainer.forward_backward(data, "importance_sampling", loss_fn_config=config, wait=True)
        except Exception as error:
            return str(error)
        raise AssertionError("an unknown setting is not an error")

    def save(self, name: str) -> None:
        """Save weights and optimizer."""
        self.trainer.save_state(name=name, checkpoint_type="weight_and_optimizer")

    def save_and_load(self) -> None:
        """Save weights and optimizer, and load them again."""
        saved = self.trainer.save_state(name="state", checkpoint_type="weight_and_optimizer")
        assert saved.path in [checkpoint.path for checkpoint in self.trainer.list_checkpoints()]
        self.trainer.load_state(saved.path)

    def close(self) -> None:
        """End the session."""
        self._service.close()


def _datum(tokens: list[int], log_probs: list[float], mask: list[int], advantage: float) -> Any:
    inputs = {
        "target_tokens": torch.tensor(tokens[1:]),
        "logprobs": torch.tensor(log_probs[1:]),
        "loss_mask": torch.tensor(mask[1:], dtype=torch.float32),
        "advantages": torch.tensor([advantage * kept for kept in mask[1:]]),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: tensor_payload(values) for name, values in inputs.items()},
    )
