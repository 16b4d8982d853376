"""Formulas of the token quantities of an update: the objective and log-softmax, with golden inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import chain, combinations, product
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.hypotheses import Floats, Truth
from regress.compare.diagnosis.related_values import RelatedValues
from regress.compare.diagnosis.softmax_formula import TOKEN_GRADIENTS, softmax_formula
from regress.dump.numpy_arrays import Array
from regress.errors import RegressError
from regress.layout import TokenFrame

if TYPE_CHECKING:
    from torch import Tensor

    from regress.compare.diagnosis.counterfactuals import Compute, Formula
    from regress.grpo.objective import Objective
    from regress.grpo.objective_evaluation import Samples

WHOLE = ("advantages", "weights")
"""Quantities whose values depend on all samples of an update."""
FEW = 1 << 14
"""Most values of a quantity that all its changes are made of: of more, a few samples are asked first."""
_LOSS = ("ratio", "sampler_weights", "kl", "policy_loss", "entropy_loss", "token_loss")
FORMULAS = (*WHOLE, *_LOSS, *TOKEN_GRADIENTS)
"""Quantities that the objective makes of recorded values."""
OF_LOGITS = ("log_probs", "entropy", "logit_gradient")
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
    **dict.fromkeys(("policy_loss", "token_loss", *TOKEN_GRADIENTS), ("loss", "importance_level")),
}
"""Fields that are tried for a quantity where nothing tells the objective."""
_SUMMED = ("token_loss", *TOKEN_GRADIENTS)
"""Quantities that every term of the loss enters."""
_CLIPPED = ("policy_loss", *_SUMMED)
_SHOWN = 1e-6
"""Relative difference up to which a token's loss is that of a ratio."""
_GROUPS = ("interleaved_groups", "one_group", "groups_one_sample_later", "groups_one_sample_earlier")


@dataclass(frozen=True)
class TokenFormulas:
    """Formulas of the token quantities of an update.

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
    related: RelatedValues
    logits: tuple[Floats, NDArray[np.int64]] | None = None
    length: int = 0
    _formulas: dict[str, Formula | None] = field(default_factory=dict)

    def formula(self, quantity: str) -> Formula | None:
        """Return the formula that gives a quantity; None where something that it is made of is unknown."""
        if quantity not in self._formulas:
            self._formulas[quantity] = self._formula(quantity)
        return self._formulas[quantity]

    def _formula(self, quantity: str) -> Formula | None:
        if quantity in OF_LOGITS:
            return self._of_logits
        from regress.grpo import objective_evaluation

        parts: dict[str, Callable[..., Any]] = {
            "advantages": objective_evaluation.advantages_of,
            "weights": objective_evaluation.weights_of,
            **dict.fromkeys(_LOSS, objective_evaluation.loss_of),
            **dict.fromkeys(TOKEN_GRADIENTS, objective_evaluation.gradients_of),
        }
        if quantity not in parts or (quantity == "advantages" and "rewards" not in self.values):
            return None
        of_samples, samples = parts[quantity], self.samples

        def compute(values: Mapping[str, Tensor], settings: Objective) -> Mapping[str, Tensor]:
            found: Mapping[str, Tensor] = of_samples(values, samples, settings)
            return found

        objective = self._in_use or self._found(quantity, of_samples)
        if objective is None:
            return None
        swaps: dict[str, tuple[str, ...]] = {"rewards": (), "groups": _GROUPS}
        if quantity in TOKEN_GRADIENTS:
            swaps["weights"] = ()
        return objective_formula(
            compute,
            self.values,
            objective,
            swaps,
            objective_evaluation.mistakes(of_samples, samples, objective),
        )

    @cached_property
    def objective(self) -> Objective | None:
        """The configured objective, unchecked so that any field may be changed; None unless a valid one is known."""
        from regress.grpo.fields import ObjectiveFields
        from regress.grpo.objective import Objective

        known = {
            spec.name: self.section[spec.name]
            for spec in fields(ObjectiveFields)
            if spec.name in self.section
        }
        try:
            Objective(**known)
        except (RegressError, TypeError, ValueError, AttributeError, LookupError):
            return None  # written by hand, or by another release
        return cast("Objective", ObjectiveFields(**known)) if known else None

    @cached_property
    def _in_use(self) -> Objective | None:
        """The configured objective, with coefficients that adapt as the golden loss of this update tells them."""
        from regress.compare.diagnosis.counterfactuals import Formula, affine
        from regress.grpo.objective_evaluation import loss_of

        golden, objective, samples = self.golden("token_loss"), self.objective, self.samples
        for term in "kl", "entropy":
            if golden is None or objective is None or getattr(objective, f"{term}_controller") != "adaptive":
                continue
            formula = Formula(lambda values, own: loss_of(values, samples, own), self.values, objective)
            if (line := affine(formula, "token_loss", f"{term}_coef")) is not None:
                without, slope = line
                coefficient = float(np.vdot(golden - without, slope) / np.vdot(slope, slope))
                objective = formula.changed(**{f"{term}_coef": coefficient}).settings
        return objective

    @property
    def searched(self) -> dict[str, Any]:
        """Fields of an objective that gives the golden policy loss; none where no such objective is known."""
        formula = self.formula("policy_loss")
        return {} if formula is None else asdict(formula.settings)

    def _found(self, quantity: str, of_samples: Callable[..., Mapping[str, Tensor]]) -> Objective | None:
        """Return an objective that gives the golden values of a quantity: a preset, or a choice of a few fields."""
        from regress.grpo.fields import ObjectiveFields
        from regress.grpo.objective_presets import PRESETS

        golden, searched = self.golden(quantity), _SEARCHED.get(quantity, ())
        if golden is None:
            return None
        spec = {one.name: one for one in fields(ObjectiveFields)}
        values = [
            spec[key].metadata.get("choices") or _CONSTANTS.get(key) or (False, True) for key in searched
        ]
        chosen = [dict(zip(searched, row, strict=True)) for row in product(*values)]
        counts = {"kl_coef": 1.0} if quantity == "kl" else {}
        rows = [*PRESETS.values(), *({**counts, **row} for row in chosen)]
        if quantity in _CLIPPED and self._bounds:
            rows += [{**row, **self._bounds} for row in rows]
        asked = [self]
        if golden.size > FEW and quantity not in WHOLE:
            asked = [self.part(np.flatnonzero(self.loss_mask), FEW, {})[0], self]
        found = (cast("Objective", ObjectiveFields(**row)) for row in rows)
        for objective in chain(found, self._with_terms() if quantity in _SUMMED else ()):
            if all(one._gives(quantity, of_samples, objective) for one in asked):
                return objective
        return None

    @cached_property
    def _bounds(self) -> dict[str, float]:
        """Bounds of the ratio that golden policy losses show where a loss is not that of the token's own ratio.

        One that no token shows lies behind every ratio that counts.
        """
        names = "log_probs", "old_log_probs", "advantages", "policy_loss"
        now, old, advantages, loss = (self.golden(name) for name in names)
        if now is None or old is None or advantages is None or loss is None:
            return {}
        recorded = self.golden("ratio")
        ratio = np.exp(now - old) if recorded is None else recorded
        with np.errstate(divide="ignore", invalid="ignore"):
            used = -loss / advantages
        known = np.isfinite(used)
        free = known & np.isclose(used, ratio, rtol=_SHOWN)
        found = {}
        for name, sign in (("clip_low", -1), ("clip_high", 1)):
            own = sign * advantages > 0
            shown, inside = sign * (used[known & ~free & own] - 1), sign * (ratio[free & own] - 1)
            if shown.size and (np.ptp(shown) > _SHOWN or shown[0] < 0):
                return {}
            found[name] = float(f"{shown[0]:.6g}") if shown.size else float(inside.max(initial=0.0))
        return {} if free[known].all() else found

    def _with_terms(self) -> Iterator[Objective]:
        """Yield the objective whose policy loss and KL were found, with the coefficients that the golden loss tells."""
        from regress.compare.diagnosis.counterfactuals import Formula, affine
        from regress.grpo.objective_evaluation import loss_of

        golden, policy, samples = self.golden("token_loss"), self.formula("policy_loss"), self.samples
        if golden is None or policy is None:
            return
        kl = self.formula("kl") if self.golden("kl") is not None else None
        own = {} if kl is None else {name: getattr(kl.settings, name) for name in _SEARCHED["kl"]}
        formula = Formula(lambda values, own: loss_of(values, samples, own), self.values, policy.settings)
        formula = formula.changed(**own, kl_coef=0.0, entropy_coef=0.0)
        found = {key: affine(formula, "token_loss", key) for key in ("kl_coef", "entropy_coef")}
        lines = {key: line for key, line in found.items() if line is not None}
        if not lines:
            return
        base = next(iter(lines.values()))[0]
        slopes = np.stack([slope for _, slope in lines.values()], axis=1)
        counts = np.linalg.lstsq(slopes, golden - base, rcond=None)[0]
        yield formula.changed(**dict(zip(lines, counts.tolist(), strict=True))).settings

    def _gives(
        self, quantity: str, of_samples: Callable[..., Mapping[str, Tensor]], objective: Objective
    ) -> bool:
        from regress.compare.diagnosis.counterfactuals import Formula, gives

        golden, samples = self.golden(quantity), self.samples
        formula = Formula(
            lambda values, settings: of_samples(values, samples, settings), self.values, objective
        )
        return golden is not None and gives(formula, quantity, golden)

    def golden(self, quantity: str) -> Floats | None:
        """Return the golden values of the loss tokens, ``[K, ...]``; None for a quantity that has none of them."""
        values = next(iter(self.truth.get(quantity, {}).values()), None)
        if values is None:
            return None
        if values.shape[:1] == (self.frame.size,):
            return np.asarray(values[self.loss_mask], np.float64)
        return np.asarray(values, np.float64) if values.shape[:1] == (int(self.loss_mask.sum()),) else None

    def placed(self, values: Floats) -> Floats:
        """Return values of loss tokens in the places of all tokens, NaN elsewhere."""
        whole = np.full((self.frame.size, *values.shape[1:]), np.nan)
        whole[self.loss_mask] = values
        return whole

    def part(
        self, tokens: NDArray[np.int64], most: int, section: Mapping[str, Any]
    ) -> tuple[TokenFormulas, NDArray[np.int64]]:
        """Return the formulas of the first samples with these tokens, and the tokens of these samples."""
        sample = np.repeat(np.arange(len(self.frame.samples)), self.frame.lengths)
        there = [*dict.fromkeys(sample[tokens].tolist())]
        sizes = np.cumsum([self.frame.lengths[one] for one in there])
        chosen = sorted(there[: max(1, int((sizes <= most).sum()))])
        rows = np.flatnonzero(np.isin(sample, chosen))
        frame = TokenFrame(
            tuple(self.frame.samples[one] for one in chosen), tuple(self.frame.lengths[one] for one in chosen)
        )
        size, loss = self.frame.size, self.loss_mask[rows]
        of_loss = np.flatnonzero(np.isin(np.flatnonzero(self.loss_mask), rows))

        def cut(values: Array) -> Array:
            return values[rows] if values.shape[:1] == (size,) else values[of_loss]

        of_tokens = ((size,), (int(self.loss_mask.sum()),))
        truth = {
            quantity: {name: cut(one) for name, one in tensors.items() if one.shape[:1] in of_tokens}
            for quantity, tensors in self.truth.items()
        }
        logits = None if self.logits is None else (self.logits[0][rows], self.logits[1][rows])
        related = replace(self.related.of_tokens(rows), microbatches={})
        return TokenFormulas(truth, frame, loss, section, related, logits, self.length), rows

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """Golden values of the loss tokens, and the rewards of the rollout."""
        import torch

        names = ("log_probs", "old_log_probs", "ref_log_probs", "entropy", "advantages", "weights")
        found: dict[str, NDArray[Any] | None] = {name: self.golden(name) for name in names}
        if self.related.sampler is not None:
            found["sampler_log_probs"] = self.related.sampler[self.loss_mask]
        if self.related.rewards and {*self.frame.samples} <= {*self.related.rewards}:
            found |= {"rewards": np.array([*self.related.rewards.values()], np.float64), **self._groups}
        return {name: torch.from_numpy(each.copy()) for name, each in found.items() if each is not None}

    @property
    def _groups(self) -> dict[str, NDArray[np.int64]]:
        """Return the group of each sample of the rollout, and other groups that may have been taken for them."""
        own = np.unique([group for group, _ in self.related.rewards], return_inverse=True)[1].astype(np.int64)
        index = np.arange(own.size)
        others = index % (int(own.max()) + 1), 0 * index, np.roll(own, 1), np.roll(own, -1)
        return {"groups": own.reshape(-1), **dict(zip(_GROUPS, others, strict=True))}

    @cached_property
    def samples(self) -> Samples:
        """The samples."""
        import torch

        from regress.grpo.objective_evaluation import Samples

        keys, own = [*self.related.rewards], self.frame.samples
        sequence = np.repeat(np.arange(len(own)), self.frame.lengths)[self.loss_mask]
        place = {key: number for number, key in enumerate(keys)}
        numbers = np.array([place.get(key, 0) for key in own], np.int64)
        return Samples(
            torch.from_numpy(sequence.astype(np.int64)),
            len(own),
            torch.from_numpy(numbers),
            [*own] == keys,
            self.length,
            [one.samples.tolist() for one in self.related.microbatches.values()],
            spans=self._spans,
        )

    @property
    def _spans(self) -> list[int]:
        """Return the tokens of each sample from the first sampled one on; 0 for a sample without any."""
        sampled = self.related.sampled()
        own = np.split(self.loss_mask if sampled is None else sampled, np.cumsum(self.frame.lengths)[:-1])
        return [len(one) - int(one.argmax()) if one.any() else 0 for one in own]

    @cached_property
    def _of_logits(self) -> Formula | None:
        policy = self.golden("log_probs")
        if self.logits is None or policy is None or not policy.size:
            return None
        gradients = {name: one for name in TOKEN_GRADIENTS if (one := self.golden(name)) is not None}
        return softmax_formula(*self.logits, np.flatnonzero(self.loss_mask), policy, gradients)


def objective_formula(
    compute: Compute,
    values: Mapping[str, Tensor],
    objective: Objective,
    swaps: Mapping[str, tuple[str, ...]],
    mistakes: Mapping[str, Compute],
) -> Formula:
    """Return quantities that the objective makes of values, with all that may have been otherwise.

    Args:
        swaps: inputs beside log-probs and advantages -> inputs that may have been taken for them.
    """
    from regress.compare.diagnosis.counterfactuals import Formula

    of_policies = {name: tuple(other for other in _LOG_PROBS if other != name) for name in _LOG_PROBS}
    exchanges = [*combinations(_numbers(objective), 2), ("kl_coef", "entropy_coef")]
    inputs = {**of_policies, "advantages": (), **swaps}
    return Formula(compute, values, objective, _choices(objective), exchanges, inputs, mistakes)


def _numbers(objective: Objective) -> list[str]:
    """Return the fields that the policy loss reads, as far as they are numbers."""
    from regress.grpo.policy_losses import LOSSES

    names = "clip_low", "clip_high", *LOSSES[objective.loss].reads
    return [name for name in names if isinstance(getattr(objective, name), float)]


def _choices(objective: Objective) -> dict[str, tuple[Any, ...]]:
    """Return the other values that the fields of an objective may have had."""
    found: dict[str, tuple[Any, ...]] = {}
    for spec in fields(objective):
        known = getattr(objective, spec.name)
        if spec.metadata.get("choices"):
            found[spec.name] = tuple(spec.metadata["choices"])
        elif isinstance(known, bool):
            found[spec.name] = (not known,)
        else:
            default = spec.default if spec.default is not MISSING else None
            off = (type(known)(0),) if known and isinstance(known, int | float) else ()
            found[spec.name] = (*_CONSTANTS.get(spec.name, ()), *off, default)
    return found
