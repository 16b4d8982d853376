"""Counterfactuals of the objective for the quantities of an update's tokens: `regress.grpo` with one thing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.beside import Beside
from regress.compare.diagnosis.hypotheses import Floats, Hypothesis, Truth, changed
from regress.compare.diagnosis.temperature import temperature
from regress.compare.diagnosis.terms import Term, Terms
from regress.layout import TokenFrame

if TYPE_CHECKING:
    from torch import Tensor

    from regress.compare.diagnosis.counterfactual import Counterfactual, Formula
    from regress.grpo.evaluate import Samples
    from regress.grpo.objective import Objective

_LOSS = ("ratio", "sampler_weights", "kl", "policy_loss", "entropy_loss", "token_loss")
_GRADIENTS = ("token_gradient", "entropy_gradient")
_OF_LOGITS = ("log_probs", "entropy", "logit_gradient")
_LOG_PROBS = ("log_probs", "old_log_probs", "ref_log_probs", "sampler_log_probs")
_CONSTANTS: Mapping[str, tuple[Any, ...]] = {
    "eps": (0.0, 1e-8, 1e-6, 1e-4),
    "whiten_eps": (0.0, 1e-8, 1e-6, 1e-4),
    "ddof": (0, 1),
    "gamma": (1.0,),
    "log_ratio_min": (-20.0, -10.0, -1.0),
    "log_ratio_max": (20.0, 10.0, 1.0),
}
"""Numbers that trainers are known to use; other numbers are left out (0), or solved for where they enter linearly."""
_SEARCHED: Mapping[str, tuple[str, ...]] = {
    "advantages": ("advantage", "scale", "ddof", "eps"),
    "weights": ("aggregation", "count_empty_rows"),
    "kl": ("kl_estimator", "kl_bias_correction"),
    "ratio": ("importance_level",),
    **dict.fromkeys(("policy_loss", "token_loss", *_GRADIENTS), ("loss", "importance_level")),
}
"""Fields that are tried for a quantity where nothing tells the objective."""
_COEFFICIENTS = {"kl_coef": "KL", "entropy_coef": "entropy"}
_REMEMBERED = 1 << 18
"""Most values of a quantity whose counterfactuals are kept: beyond that, hundreds of them fill gigabytes."""


_GROUPS = ("interleaved_groups", "one_group", "groups_one_sample_later", "groups_one_sample_earlier")


@dataclass(frozen=True)
class ObjectiveCounterfactuals:
    """Counterfactuals of the token quantities of an update.

    Attributes:
        loss_mask: ``[frame.size]``.
        section: section ``algorithm`` of the configuration with the fields of its preset, as far as it is known.
        logits: ``[frame.size, V]`` golden logits (NaN where there are none), and the tokens.
        length: longest completion that is allowed; 0 where it is unknown.
    """

    truth: Truth
    frame: TokenFrame
    loss_mask: NDArray[np.bool_]
    section: Mapping[str, Any]
    beside: Beside
    logits: tuple[Floats, NDArray[np.int64]] | None = None
    length: int = 0
    _made: dict[str, list[Counterfactual]] = field(default_factory=dict)
    _formulas: dict[str, Formula | None] = field(default_factory=dict)

    def of(self, quantity: str) -> Iterator[Hypothesis]:
        """Yield what a quantity would be, ``[frame.size]`` or ``[frame.size, V]``."""
        from regress.compare.diagnosis.counterfactual import counterfactuals, gives

        golden = self._golden(quantity)
        formula = None if golden is None else self.formula(quantity)
        if golden is None or formula is None:
            return
        made: Iterable[Counterfactual] = counterfactuals(formula, quantity, golden)
        if golden.size <= _REMEMBERED:  # many tensors of one quantity ask: one for each rank and microbatch
            made = self._made.setdefault(quantity, [*made] if quantity not in self._made else [])
        for found in made:
            yield changed(found, self._placed(found.values))
        for key, coefficient, each in self._terms(quantity):
            without = golden - coefficient * each
            words = f"that with {key} in place of {coefficient:g}:"
            placed = self._placed(without), self._placed(each)
            yield Hypothesis("fitted", placed[0], {"what": words, "id": f"fit:{key}"}, placed[1])
            if coefficient and not gives(
                formula, quantity, golden
            ):  # the golden values are not those of the objective, whatever else it is
                said = {"what": f"that with {key}=0 in place of {coefficient:g}", "id": f"{key}=0"}
                yield Hypothesis("formula", placed[0], said)

    def plain(self, quantity: str) -> Floats | None:
        """Return what the objective makes of the golden inputs; None where that is unknown."""
        formula = self.formula(quantity)
        found = None if formula is None else formula.values(quantity)
        return None if found is None else self._placed(found.double().numpy())

    def sums(self, quantity: str) -> Iterator[Terms]:
        """Yield a quantity as the sum of what each coefficient of the objective adds to it, and of the rest."""
        golden = self._golden(quantity)
        if golden is None or quantity not in ("token_loss", "token_gradient") or not self.formula(quantity):
            return
        rest, terms = golden, []
        for key, coefficient, each in self._terms(quantity):
            if coefficient or key == "entropy_coef":
                rest = rest - coefficient * each
                own = self._placed(coefficient * each if coefficient else each)
                terms.append(Term(f"the {_COEFFICIENTS[key]} term", own, 1.0 if coefficient else 0.0))
        yield Terms("terms", [Term("the policy loss", self._placed(rest)), *terms])

    def _terms(self, quantity: str) -> Iterator[tuple[str, float, Floats]]:
        """Yield each coefficient of the objective, its value, and what each unit of it adds to a quantity."""
        from regress.compare.diagnosis.counterfactual import affine

        formula = self.formula(quantity)
        for key in _COEFFICIENTS if formula is not None and quantity in ("token_loss", *_GRADIENTS) else ():
            line = None if formula is None else affine(formula, quantity, key)
            if formula is not None and line is not None:
                yield key, float(getattr(formula.settings, key)), line[1]

    def _golden(self, quantity: str) -> Floats | None:
        values = next(iter(self.truth.get(quantity, {}).values()), None)
        if values is None:
            return None
        if values.shape[:1] == (self.frame.size,):
            return np.asarray(values[self.loss_mask], np.float64)
        return np.asarray(values, np.float64) if values.shape[:1] == (int(self.loss_mask.sum()),) else None

    def _placed(self, values: Floats) -> Floats:
        whole = np.full((self.frame.size, *values.shape[1:]), np.nan)
        whole[self.loss_mask] = values
        return whole

    def formula(self, quantity: str) -> Formula | None:
        """Return the formula that gives a quantity; None where something that it is made of is unknown."""
        if quantity not in self._formulas:
            self._formulas[quantity] = self._formula(quantity)
        return self._formulas[quantity]

    def _formula(self, quantity: str) -> Formula | None:
        from regress.compare.diagnosis.counterfactual import Formula

        if quantity in _OF_LOGITS:
            return self._of_logits
        from regress.grpo import evaluate
        from regress.grpo.fields.advantages import AdvantageFields
        from regress.grpo.fields.aggregation import AggregationFields
        from regress.grpo.fields.corrections import CorrectionFields
        from regress.grpo.fields.losses import LossFields
        from regress.grpo.fields.terms import TermFields

        parts: dict[str, tuple[Any, tuple[type, ...]]] = {
            "advantages": (evaluate.advantages_of, (AdvantageFields,)),
            "weights": (evaluate.weights_of, (AggregationFields,)),
        }
        parts |= dict.fromkeys(_LOSS, (evaluate.loss_of, (LossFields, TermFields, CorrectionFields)))
        parts |= dict.fromkeys(
            _GRADIENTS, (evaluate.gradients_of, (LossFields, TermFields, CorrectionFields))
        )
        if quantity not in parts or (quantity == "advantages" and "rewards" not in self.values):
            return None
        of_samples, own = parts[quantity]
        samples = self.samples

        def compute(values: Mapping[str, Tensor], settings: Objective) -> Mapping[str, Tensor]:
            found: Mapping[str, Tensor] = of_samples(values, samples, settings)
            return found

        objective = self.objective or self._found(quantity, compute)
        if objective is None:
            return None
        swaps = {name: tuple(other for other in _LOG_PROBS if other != name) for name in _LOG_PROBS}
        swaps |= {"advantages": (), "rewards": (), "groups": _GROUPS}
        if quantity in _GRADIENTS:
            swaps["weights"] = ()
        return Formula(
            compute,
            self.values,
            objective,
            _choices(objective, own),
            [*combinations(_numbers(objective), 2), ("kl_coef", "entropy_coef")],
            swaps,
            evaluate.mistakes(of_samples, samples, objective),
        )

    @cached_property
    def objective(self) -> Objective | None:
        """The configured objective, unchecked so that any field may be changed; None where none is known."""
        from regress.grpo.fields import ObjectiveFields

        known = {
            spec.name: self.section[spec.name]
            for spec in fields(ObjectiveFields)
            if spec.name in self.section
        }
        return cast("Objective", ObjectiveFields(**known)) if known else None

    @property
    def searched(self) -> dict[str, Any]:
        """Fields of an objective that gives the golden policy loss; none where no such objective is known."""
        formula = self.formula("policy_loss")
        return {} if formula is None else asdict(formula.settings)

    def _found(self, quantity: str, compute: Callable[..., Mapping[str, Tensor]]) -> Objective | None:
        """Return an objective that gives the golden values of a quantity: a preset, or a choice of a few fields."""
        from regress.compare.diagnosis.counterfactual import Formula, gives
        from regress.grpo.fields import ObjectiveFields
        from regress.grpo.presets import PRESETS

        golden, searched = self._golden(quantity), _SEARCHED.get(quantity, ())
        spec = {one.name: one for one in fields(ObjectiveFields)}
        values = [
            spec[key].metadata.get("choices") or _CONSTANTS.get(key) or (False, True) for key in searched
        ]
        chosen = [dict(zip(searched, row, strict=True)) for row in product(*values)]
        counts = {"kl_coef": 1.0} if quantity == "kl" else {}
        for row in (*PRESETS.values(), *({**counts, **row} for row in chosen)):
            objective = cast("Objective", ObjectiveFields(**row))
            formula = Formula(compute, self.values, objective)
            if golden is not None and gives(formula, quantity, golden):
                return objective
        return None

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """What is known of the loss tokens, and the rewards of the rollout."""
        import torch

        names = ("log_probs", "old_log_probs", "ref_log_probs", "entropy", "advantages", "weights")
        found: dict[str, NDArray[Any] | None] = {name: self._golden(name) for name in names}
        if self.beside.sampler is not None:
            found["sampler_log_probs"] = self.beside.sampler[self.loss_mask]
        if self.beside.rewards and {*self.frame.samples} <= {*self.beside.rewards}:
            found |= {"rewards": np.array([*self.beside.rewards.values()], np.float64), **self._groups}
        return {name: torch.from_numpy(each.copy()) for name, each in found.items() if each is not None}

    @property
    def _groups(self) -> dict[str, NDArray[np.int64]]:
        """Return the group of each sample of the rollout, and other groups that may have been taken for them."""
        own = np.unique([group for group, _ in self.beside.rewards], return_inverse=True)[1].astype(np.int64)
        index = np.arange(own.size)
        others = index % (int(own.max()) + 1), 0 * index, np.roll(own, 1), np.roll(own, -1)
        return {"groups": own.reshape(-1), **dict(zip(_GROUPS, others, strict=True))}

    @cached_property
    def samples(self) -> Samples:
        """The samples."""
        import torch

        from regress.grpo.evaluate import Samples

        keys, own = [*self.beside.rewards], self.frame.samples
        sequence = np.repeat(np.arange(len(own)), self.frame.lengths)[self.loss_mask]
        place = {key: number for number, key in enumerate(keys)}
        numbers = np.array([place.get(key, 0) for key in own], np.int64)
        return Samples(
            torch.from_numpy(sequence.astype(np.int64)),
            len(own),
            torch.from_numpy(numbers),
            [*own] == keys,
            self.length,
            [one.samples.tolist() for one in self.beside.microbatches.values()],
        )

    @cached_property
    def _of_logits(self) -> Formula | None:
        """Log-probs, entropies and the gradient of logits, at the temperature of the golden log-probs."""
        import torch

        from regress.compare.diagnosis.counterfactual import Formula

        policy = self._golden("log_probs")
        if self.logits is None or policy is None or not policy.size:
            return None
        z, ids = self.logits[0][self.loss_mask], self.logits[1]
        rows = np.flatnonzero(self.loss_mask)
        t, _ = temperature(policy, z, ids[rows])
        inputs = {"logits": torch.from_numpy(z.copy()), "targets": torch.from_numpy(ids[rows])}
        for name, step in (("token_before", -1), ("token_after", 1)):
            inputs[name] = torch.from_numpy(ids[np.clip(rows + step, 0, len(ids) - 1)])
        for name in _GRADIENTS:
            own = self._golden(name)
            if own is not None:
                inputs[name] = torch.from_numpy(own.copy())
        choices = {"temperature": (1.0, t * t, 1 / t)}
        swaps = {"targets": ("token_before", "token_after"), "logits": (), **dict.fromkeys(_GRADIENTS, ())}
        return Formula(_softmax, inputs, _Softmax(t), choices, swaps=swaps)


@dataclass(frozen=True)
class _Softmax:
    temperature: float


def _entropy(normalized: Tensor) -> Tensor:
    return -(normalized.exp() * normalized).sum(-1)


def _softmax(values: Mapping[str, Tensor], settings: _Softmax) -> dict[str, Tensor]:
    """Return log_probs and entropy [K] of logits [K, V], and logit_gradient [K, V] where those by both are known."""
    import torch

    logits = values["logits"].detach().requires_grad_()
    z = logits / settings.temperature
    normalized = z - z.logsumexp(-1, keepdim=True)
    own = normalized.gather(1, values["targets"][:, None])[:, 0]
    entropy = _entropy(normalized)
    found = {"log_probs": own, "entropy": entropy}
    if "token_gradient" not in values:
        return found
    total = (values["token_gradient"] * own).sum()
    if "entropy_gradient" in values:
        total = total + (values["entropy_gradient"] * entropy).sum()
    if not total.requires_grad:
        return found
    return {**found, "logit_gradient": torch.autograd.grad(total, logits)[0]}


def _numbers(objective: Objective) -> list[str]:
    """Return the fields that the policy loss reads, as far as they are numbers."""
    from regress.grpo.policy_losses import LOSSES

    names = "clip_low", "clip_high", *LOSSES[objective.loss].reads
    return [name for name in names if isinstance(getattr(objective, name), float)]


def _choices(objective: Objective, parts: tuple[type, ...]) -> dict[str, tuple[Any, ...]]:
    """Return the other values that the fields of some parts of an objective may have had."""
    found: dict[str, tuple[Any, ...]] = {}
    for part in parts:
        for spec in fields(part):
            known = getattr(objective, spec.name)
            if spec.metadata.get("choices"):
                found[spec.name] = tuple(spec.metadata["choices"])
            elif isinstance(known, bool):
                found[spec.name] = (not known,)
            else:
                default = spec.default if spec.default is not MISSING else None
                found[spec.name] = (*_CONSTANTS.get(spec.name, ()), *((0.0,) if known else ()), default)
    return found
