"""A made-up update in canonical form, and the records of it that any layout would give, element by element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from regress.compare.quantities import quantity_named
from regress.compare.verdicts.tolerance import EXACT, Tolerance
from regress.dump.coordinates import Coordinates
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record
from regress.layout import BatchPlan, TokenFrame, TokenLayout, plan_microbatches

TOKEN_TENSORS = {
    "advantages": "advantages",
    "weights": "weights",
    "log_probs": "log_probs",
    "entropy": "entropy",
    "old_log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_probs",
    "kl": "kl",
    "ratio": "prob_ratio",
    "policy_loss": "policy_loss",
    "token_loss": "elementwise_loss",
    "token_gradient": "token_gradient",
    "entropy_gradient": "entropy_gradient",
}
SHARES = {"loss": "token_loss", "pg_loss": "policy_loss", "kl_loss": "kl"}
HIDDEN, EXPERTS, VOCABULARY = 3, 2, 5


@dataclass
class World:
    """One optimizer update of samples of these lengths.

    Attributes:
        order: in which the samples are dealt out to microbatches.
        truth: ``quantity -> name -> array``, as the golden store has it.
        loss_mask: ``[frame.size]``; of each sample the last tokens, at most all but the first.
    """

    lengths: Sequence[int]
    seed: int = 0
    order: Sequence[int] | None = None
    truth: dict[str, dict[str, Array]] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        count = len(self.lengths)
        self.frame = TokenFrame(tuple((f"{i // 2:03d}", i % 2) for i in range(count)), tuple(self.lengths))
        size = self.frame.size
        self.loss_mask = np.concatenate(
            [np.arange(n) >= rng.integers(1, n) if n > 1 else np.zeros(1, bool) for n in self.lengths]
        )
        K = int(self.loss_mask.sum())
        self.truth = {
            "batch_inputs": {
                "input_ids": rng.integers(0, VOCABULARY, size),
                "position_ids": np.concatenate([np.arange(n) for n in self.lengths]),
                "attention_mask": np.ones(size, bool),
                "response_mask": self.loss_mask.astype(np.int64),
            },
            **{
                quantity: {tensor: np.where(self.loss_mask, rng.standard_normal(size), 0.0)}
                for quantity, tensor in TOKEN_TENSORS.items()
            },
            "activations": {
                "model.layers.0": rng.standard_normal((size, HIDDEN)),
                "model.layers.0.router": rng.standard_normal((size, EXPERTS)),
                "lm_head": rng.standard_normal((K, VOCABULARY)),
            },
            "logit_gradient": {"logit_gradient": rng.standard_normal((K, VOCABULARY))},
            "gradient": {name: rng.standard_normal(shape) for name, shape in self.parameters.items()},
            "grad_norm": {"grad_norm": np.array(1.5)},
            "param": {name: rng.standard_normal(shape) for name, shape in self.parameters.items()},
            "optimizer": {
                **{f"{name}/exp_avg": rng.standard_normal(shape) for name, shape in self.parameters.items()},
                **{f"{name}/step": np.array(11.0, np.float32) for name in self.parameters},
            },
        }
        terms = {name: self.token("weights") * self.token(quantity) for name, quantity in SHARES.items()}
        self.truth["loss"] = {name: np.array(term.sum()) for name, term in terms.items()}

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        return {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}

    def token(self, quantity: str) -> Array:
        (values,) = self.truth[quantity].values()
        return values

    def layouts(self, plan: BatchPlan) -> list[TokenLayout]:
        order = range(len(self.lengths)) if self.order is None else self.order
        dealt = plan_microbatches([self.lengths[i] for i in order], plan)
        return [
            TokenLayout(layout.shape, tuple(s._replace(sample=order[s.sample]) for s in layout.segments))
            for layout in dealt
        ]

    def planned(self, plan: BatchPlan, ranks: int = 1) -> list[tuple[int, int]]:
        return [(i % ranks, i // ranks) for i in range(len(self.layouts(plan)))]

    def records(self, plan: BatchPlan, ranks: int = 1, dtype: str = "float64") -> list[Record]:
        """Return the records of a trainer that assigns microbatches to its ranks in turn."""
        found: list[Record] = []
        for layout, (rank, micro) in zip(self.layouts(plan), self.planned(plan, ranks), strict=True):
            found += self.micro_records(layout, rank, micro, dtype)
        used = sorted({rank for rank, _ in self.planned(plan, ranks)})
        for rank in used:
            place = Coordinates(0, rank=rank)
            found.append(Record.of("gradient", place, self._cast("gradient", dtype), {"grad_norm": 1.5}))
            found += [
                Record.of(record_type, place, self._cast(record_type, dtype))
                for record_type in ("param", "optimizer")
            ]
        return found

    def _cast(self, quantity: str, dtype: str) -> dict[str, Array]:
        tensors = self.truth[quantity]
        return {n: a.astype(dtype) if a.dtype == np.float64 else a for n, a in tensors.items()}

    def micro_records(
        self, layout: TokenLayout, rank: int, micro: int, dtype: str = "float64"
    ) -> list[Record]:
        """The records of one microbatch, filled one token at a time."""
        B, T = layout.shape
        places = [
            (int(self.frame.offsets[s.sample]) + position, s.row, s.col + position - s.start)
            for s in layout.segments
            for position in range(s.start, s.stop)
        ]

        def grid(values: Array, only_loss: bool = False) -> Array:
            out = np.zeros((B, T, *values.shape[1:]), dtype if values.dtype == np.float64 else values.dtype)
            for flat, row, col in places:
                if not only_loss or self.loss_mask[flat]:
                    out[row, col] = values[flat]
            return out

        order = np.cumsum(self.loss_mask) - 1
        rows = [order[flat] for flat, _, _ in places if self.loss_mask[flat]]
        inputs = {name: grid(values) for name, values in self.truth["batch_inputs"].items()}
        tokens = {q: grid(self.token(q), only_loss=True) for q in TOKEN_TENSORS}
        hidden = self.truth["activations"]
        shares = {
            name: np.array(
                sum(
                    (self.token("weights")[f] * self.token(q)[f] for f, _, _ in places if self.loss_mask[f]),
                    0.0,
                ),
                dtype,
            )
            for name, q in SHARES.items()
        }
        # every rank numbers its own samples, here in reverse
        own = sorted({s.sample for s in layout.segments}, reverse=True)
        local = TokenLayout(
            layout.shape, tuple(s._replace(sample=own.index(s.sample)) for s in layout.segments)
        )
        meta = {"layout": local.to_json(), "samples": [self.frame.samples[s.sample] for s in layout.segments]}
        debug = (
            "advantages",
            "weights",
            "old_log_probs",
            "ref_log_probs",
            "kl",
            "ratio",
            "policy_loss",
            "token_loss",
        )
        record_types = {
            "batch_inputs": inputs,
            "activations": {
                "model.layers.0": grid(hidden["model.layers.0"]),
                "model.layers.0.router": grid(hidden["model.layers.0.router"]).reshape(B * T, EXPERTS),
                "lm_head": hidden["lm_head"][rows].reshape(1, len(rows), VOCABULARY).astype(dtype),
            },
            "forward_data": {
                "log_probs": tokens["log_probs"],
                "entropy": tokens["entropy"],
                "response_mask": inputs["response_mask"],
                "input_ids": inputs["input_ids"],
            },
            "is_loss_debug": {
                "log_probs": tokens["log_probs"],
                **{TOKEN_TENSORS[q]: tokens[q] for q in debug},
                "effective_valid": inputs["response_mask"],
                "loss": shares["loss"],
            },
            "loss": shares,
            "token_gradient": {
                "token_gradient": tokens["token_gradient"],
                "entropy_gradient": tokens["entropy_gradient"],
                "logit_gradient": self.truth["logit_gradient"]["logit_gradient"][rows][None].astype(dtype),
            },
        }
        place = Coordinates(0, rank=rank, micro=micro)
        return [Record.of(record_type, place, tensors, meta) for record_type, tensors in record_types.items()]


@pytest.fixture(scope="session")
def make_world() -> Callable[..., World]:
    """Make the canonical values of an update."""
    return World


@pytest.fixture(scope="session")
def tolerances() -> Callable[[str], Tolerance]:
    """Provide the tolerances of a float64 comparison."""

    def of(quantity: str) -> Tolerance:
        return EXACT if quantity_named(quantity).exact else Tolerance(1e-12, reason="a test")

    return of
