"""The same calls by the SDK tinker, as NexRL's holder for it and the cookbook make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tinker
from tinker import types

ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 1e-2, "grad_clip_norm": 1.0}


class TinkerDriver:
    """A model in full parameters (rank 0), and a sampler of its latest weights."""

    def __init__(self, url: str, key: str, model: str) -> None:
        self._service = tinker.ServiceClient(base_url=url, api_key=key)
        created = self._service.create_lora_training_client(base_model=model, rank=0)
        self.trainer = created.result() if callable(getattr(created, "result", None)) else created
        assert self.trainer.get_info().is_lora is False
        self.tokenizer = self.trainer.get_tokenizer()
        self._sampler: Any = None
        self.log_probs: list[list[float]] = []
        """Those of the targets of each datum, as the last step has returned them."""

    def publish(self, name: str) -> str:
        """Save weights for sampling, and sample with them from now on; returns their path."""
        path = str(self.trainer.save_weights_for_sampler(name=name).result().path)
        created = self._service.create_sampling_client(model_path=path)
        self._sampler = created.result() if callable(getattr(created, "result", None)) else created
        return path

    def sample(
        self, prompt: Sequence[int], count: int, max_tokens: int, temperature: float, seed: int
    ) -> list[Any]:
        """Return tokens and log-probs of completions."""
        params = types.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        found = self._sampler.sample(
            prompt=types.ModelInput.from_ints(list(prompt)), num_samples=count, sampling_params=params
        ).result()
        return [(list(sequence.tokens), list(sequence.logprobs)) for sequence in found.sequences]

    def draw(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], max_tokens: int, temperature: float
    ) -> list[Any]:
        """Return tokens and log-probs of one completion of each prompt; all requests are on their way at once."""
        futures = [
            self._sampler.sample(
                prompt=types.ModelInput.from_ints(list(prompt)),
                num_samples=1,
                sampling_params=types.SamplingParams(
                    max_tokens=max_tokens, temperature=temperature, seed=seed
                ),
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        found = [future.result().sequences[0] for future in futures]
        return [(list(sequence.tokens), list(sequence.logprobs)) for sequence in found]

    def prompt_log_probs(self, prompt: Sequence[int]) -> list[Any]:
        """Return the log-probs of a prompt."""
        return list(self._sampler.compute_logprobs(types.ModelInput.from_ints(list(prompt))).result())

    def step(
        self,
        rows: Sequence[Any],
        learning_rate: float,
        adam: Mapping[str, float] = ADAM,
        entropy_coeff: float = 0.0,
    ) -> dict[str, float]:
        """Make a step with importance sampling, both requests on their way before one is awaited.

        NexRL passes no coefficient of the entropy here.
        """
        assert not entropy_coeff
        passed = self.trainer.forward_backward([_datum(*row) for row in rows], loss_fn="importance_sampling")
        params = types.AdamParams(learning_rate=learning_rate, **adam)
        updated = self.trainer.optim_step(params)
        self.log_probs = [list(output["logprobs"].data) for output in passed.result().loss_fn_outputs]
        return {**passed.result().metrics, **updated.result().metrics}

    def refused(self) -> str:
        """Return the error of a setting that the loss does not know; SDKs themselves check its name."""
        data = [_datum([5, 6], [0.0, -1.0], [0, 1], 1.0)]
        try:
            config = {"nonsense": 1.0}
            self.trainer.forward_backward(data, "importance_sampling", config).result()
        except Exception as error:
            return str(error)
        raise AssertionError("an unknown setting is not an error")

    def save(self, name: str) -> None:
        """Save weights and optimizer."""
        self.trainer.save_state(name=name).result()

    def save_and_load(self) -> None:
        """Save weights and optimizer, load them again, and go on from them in another model."""
        path = self.trainer.save_state(name="state").result().path
        self.trainer.load_state(path).result()
        other = self._service.create_training_client_from_state(path)
        other = other.result() if callable(getattr(other, "result", None)) else other
        assert other.get_info().model_id != self.trainer.get_info().model_id

    def close(self) -> None:
        """End the session, in SDKs that can."""
        if hasattr(self._service, "close"):
            self._service.close("success").result()


def _tensor(values: Sequence[Any], dtype: Any) -> Any:
    return types.TensorData(data=list(values), dtype=dtype, shape=[len(values)])


def _datum(tokens: list[int], log_probs: list[float], mask: list[int], advantage: float) -> Any:
    inputs = {
        "target_tokens": _tensor(tokens[1:], "int64"),
        "logprobs": _tensor(log_probs[1:], "float32"),
        "advantages": _tensor([advantage * kept for kept in mask[1:]], "float32"),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
