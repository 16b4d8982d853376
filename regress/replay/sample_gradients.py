"""Samples' own gradients of an update, computed anew in true float64 from the golden gradients of the logits.

A gradient is linear in those of the logits, so no objective is needed: each sample goes alone through the model that
the update began with, and the golden derivative of the loss by its logits goes back. Nothing of how the judged run
splits, packs, accumulates or reduces enters, which is what these gradients are to prove something about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from regress.dump.numpy_arrays import Array
from regress.dump.trajectory import Trajectory
from regress.engine.adapters.adapter_parameters import trained_parameters
from regress.engine.engine_ranks import SingleProcess
from regress.engine.numeric_types import arithmetic
from regress.engine.run_models import build_policy
from regress.errors import RegressError
from regress.golden.golden_case import GoldenCase
from regress.layout import SampleKey
from regress.replay.case_run import torch_settings
from regress.replay.replay_configuration import replay_config
from regress.replay.replay_plan import PlannedUpdate
from regress.replay.temporary_workspace import Workspace
from regress.replay.variant import Precision
from regress.replay.variant_table import BASE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Floats = NDArray[np.float64]
LIMIT = 1 << 26
"""Most numbers in the gradients of all samples together."""


class OwnGradients:
    """Gradient of each sample's share of the loss, computed when the first one is asked for.

    Args:
        before: the update before it; None for the first, which begins with the weights of the case.
    """

    def __init__(self, case: GoldenCase, update: PlannedUpdate, before: str | None) -> None:
        self._case, self._update, self._before = case, update, before

    def __call__(self, name: str) -> Floats | None:
        """Return the gradients of a parameter, ``[N, ...]``; None where they cannot be computed."""
        return self._all.get(name)

    @cached_property
    def _all(self) -> dict[str, Floats]:
        try:
            return self._computed()
        except (
            RegressError,
            RuntimeError,
            ValueError,
            KeyError,
        ):  # a hint is not worth the loss of the verdicts
            return {}

    def _computed(self) -> dict[str, Floats]:
        truth = self._case.truth(self._update.where)
        rows = truth.get("logit_gradient", {}).get("logit_gradient")
        mask = truth["batch_inputs"]["response_mask"].astype(bool)
        if rows is None or rows.shape[0] != int(mask.sum()):
            return {}
        with Workspace() as folder:
            config = replay_config(self._case, BASE, Precision.FLOAT64, 1, folder)
            with torch_settings(config.threads):
                policy = build_policy(config, _Vocabulary(rows.shape[1]), SingleProcess())
                named = dict(trained_parameters(policy.model))
                if self._before is not None:
                    _load(named, self._case.truth(self._before)["param"])
                samples = {t.key: t for t in self._case.trajectories()[self._update.step]}
                if len(self._update.frame.samples) * sum(p.numel() for p in named.values()) > LIMIT:
                    return {}
                return self._gradients(policy.model, named, samples, mask, rows)

    def _gradients(
        self,
        model: PreTrainedModel,
        named: Mapping[str, torch.nn.Parameter],
        samples: Mapping[SampleKey, Trajectory],
        mask: NDArray[np.bool_],
        rows: Array,
    ) -> dict[str, Floats]:
        frame = self._update.frame
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(mask)])
        found: dict[str, list[Floats]] = {name: [] for name in named}
        for index, key in enumerate(frame.samples):
            start, stop = int(frame.offsets[index]), int(frame.offsets[index + 1])
            places = np.flatnonzero(mask[start:stop])
            upstream = torch.from_numpy(rows[first[start] : first[stop]].astype(np.float64))
            model.zero_grad(set_to_none=True)
            if len(places):
                _backward(model, samples[key].tokens, places, upstream)
            for name, parameter in named.items():
                own = parameter.grad
                found[name].append(np.zeros(tuple(parameter.shape)) if own is None else own.numpy().copy())
        return {name: np.stack(values) for name, values in found.items()}


def _backward(
    model: PreTrainedModel, tokens: Sequence[int], places: NDArray[np.int64], upstream: torch.Tensor
) -> None:
    """Send the derivative by the logits that predict the tokens at these places back through the model."""
    ids = torch.tensor([*tokens])[None]
    with arithmetic(torch.float64):
        out = model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False).logits
        out[0, torch.from_numpy(places - 1)].backward(upstream.reshape(len(places), -1))


def _load(named: Mapping[str, torch.nn.Parameter], values: Mapping[str, Array]) -> None:
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(torch.from_numpy(values[name].astype(np.float64)))


class _Vocabulary:
    """Stands for the tokenizer of a recorded model, whose vocabulary is that of its logits."""

    pad_token_id = 0
    eos_token_id = 0

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size
