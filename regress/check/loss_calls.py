"""Calls of somebody's loss function on a batch: how its arguments are laid out, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from regress.check.loss_arguments import COUNTS, TERMS, Argument, name_of
from regress.check.objective_batches import LONGEST, Batch
from regress.errors import ConfigError, reason
from regress.grpo.fields import ObjectiveFields

ROWS, FLAT, PACKED = "rows", "loss tokens alone", "packed"
_MASKS = (torch.float64, torch.bool, torch.int64)
_ONLY_IF_USED: Mapping[str, Callable[[ObjectiveFields], bool]] = {
    "ref_log_probs": lambda o: o.kl_in_loss,
    "entropy": lambda o: o.entropy_coef != 0,
    "sampler_log_probs": lambda o: o.sampler_correction != "none" or o.rejection is not None,
    "temperature": lambda o: False,
}
"""Terms that an argument with a default is not given where the objective does not read them."""


@dataclass(frozen=True)
class Form:
    """How tensors are laid out for the function.

    Attributes:
        layout: `ROWS` ([N, T] with a mask), `FLAT` ([K], loss tokens alone) or `PACKED` ([1, tokens]).
        advantages: "token" (like log-probs), "sample" ([N]) or "column" ([N, 1]).
    """

    layout: str
    advantages: str
    mask: torch.dtype

    def shape(self, term: str) -> str:
        """Return the shape of a term, for people."""
        if term in ("rewards", "groups", "lengths", "cu_seqlens"):
            return "[N + 1]" if term == "cu_seqlens" else "[N]"
        if term == "advantages" and self.advantages != "token":
            return {"sample": "[N]", "column": "[N, 1]"}[self.advantages]
        return {ROWS: "[N, T]", FLAT: "[K]", PACKED: "[1, tokens]"}[self.layout]


@dataclass(frozen=True)
class Result:
    """Hold the loss and the gradient of a call.

    Attributes:
        value: [] the loss, or its token losses [N, T], 0 where nothing was asked for.
        gradient: [N, T] gradient of the loss, or of the sum of the token losses at loss tokens, by log-probs.
        by_token: True if the function returned token losses.
    """

    value: Tensor
    gradient: Tensor
    by_token: bool

    @property
    def finite(self) -> bool:
        """True if every gradient is."""
        return bool(torch.isfinite(self.gradient).all())


@dataclass(frozen=True)
class Caller:
    """A loss function with everything that it is called by.

    Attributes:
        given: argument -> value that does not depend on the batch.
        objective: its fields are the values of arguments that name one.
    """

    function: Callable[..., Any]
    arguments: tuple[Argument, ...]
    given: Mapping[str, Any]
    objective: ObjectiveFields

    def forms(self) -> Iterator[Form]:
        """Yield layouts that the function may mean, the usual ones first."""
        terms = {argument.term for argument in self.arguments}
        layouts = [ROWS] if "mask" in terms else [FLAT]
        advantages = ["token", "sample", "column"] if "advantages" in terms else ["token"]
        masks = _MASKS if "mask" in terms else _MASKS[:1]
        for layout, mask, shape in product(layouts, masks, advantages):
            yield Form(layout, shape, mask)

    def used(self) -> list[Argument]:
        """Return the arguments that the function is given: all but those that its default serves as well."""
        return [argument for argument in self.arguments if argument.term and not self._left_out(argument)]

    def _left_out(self, argument: Argument) -> bool:
        if not argument.optional:
            return False
        term = str(argument.term)
        if term in _ONLY_IF_USED:
            return not _ONLY_IF_USED[term](self.objective)
        return term not in TERMS and self.constant(term) is None

    def constant(self, term: str) -> Any:
        """Return the value of a field of the objective, as an argument of that name would be given it."""
        if term == "norm_length":
            return self.objective.norm_length or LONGEST
        return getattr(self.objective, "clip_low" if term == "clip" else term)

    def __call__(self, batch: Batch, form: Form, whole: Batch | None = None) -> Result:
        """Call the function on a batch, of which ``whole`` is what its counts are taken of.

        Raises:
            ConfigError: if the function returns nothing that is a loss. What it raises goes through.
        """
        policy = _laid_out(batch, batch.values["log_probs"], form).clone().requires_grad_()
        by_place, by_name = [], dict(self.given)
        for argument in self.used():
            value = (
                policy
                if argument.term == "log_probs"
                else self._value(argument.term, batch, form, whole or batch)
            )
            value = value.clone() if isinstance(value, Tensor) and value is not policy else value
            if argument.by_place:
                by_place.append(value)
            else:
                by_name[argument.name] = value
        loss = _loss(self.function(*by_place, **by_name), self.function)
        by_token = loss.numel() > 1
        if by_token and loss.shape != policy.shape:
            raise ConfigError(f"""{name_of(self.function)} returns a loss of shape {list(loss.shape)}: return a number,
            or a loss for each token of shape {list(policy.shape)}""")
        total = (loss * _laid_out(batch, batch.mask, form)).sum() if by_token else loss.sum()
        found: tuple[Tensor | None, ...] = (None,)
        if total.requires_grad:
            found = torch.autograd.grad(total, [policy], allow_unused=True)
        gradient = torch.zeros_like(policy) if found[0] is None else found[0]
        value = _laid_back(batch, loss.detach(), form) if by_token else total.detach()
        return Result(value.double(), _laid_back(batch, gradient, form).double(), by_token)

    def tried(self, batch: Batch, form: Form, whole: Batch | None = None) -> Result | str:
        """Return what a call gives, or why it fails."""
        try:
            return self(batch, form, whole)
        except ConfigError:
            raise
        except Exception as error:
            return reason(error)

    def _value(self, term: str | None, batch: Batch, form: Form, whole: Batch) -> Any:
        if term == "mask":
            return _laid_out(batch, batch.mask, form).to(form.mask)
        if term == "advantages" and form.advantages != "token":
            one_each = batch.values["advantages"][:, 0]
            return one_each if form.advantages == "sample" else one_each[:, None]
        if term in batch.values:
            return _laid_out(batch, batch.values[term], form)
        if term in ("rewards", "groups"):
            return batch.rewards if term == "rewards" else batch.groups
        if term in COUNTS:
            counts = {"tokens": whole.tokens, "samples": whole.count, "microbatches": 1}
            return counts.get(term, int(torch.bincount(whole.groups).max()))
        if term == "temperature":
            return 1.0
        if term in ("cu_seqlens", "position_ids", "sequence", "lengths"):
            return _boundaries(term, batch, form)
        return self.constant(str(term))


def _laid_out(batch: Batch, values: Tensor, form: Form) -> Tensor:
    if form.layout == ROWS:
        return values
    return values[batch.mask] if form.layout == FLAT else values[batch.inside][None]


def _laid_back(batch: Batch, values: Tensor, form: Form) -> Tensor:
    """Return the values in rows, 0 where nothing was given."""
    if form.layout == ROWS:
        return values
    found = torch.zeros(batch.mask.shape, dtype=values.dtype)
    found[batch.mask if form.layout == FLAT else batch.inside] = values.flatten()
    return found


def _boundaries(term: str, batch: Batch, form: Form) -> Tensor:
    """Return where the samples lie among the tokens that are given."""
    given = batch.mask if form.layout == FLAT else batch.inside
    lengths = given.sum(1)
    if term == "lengths":
        return lengths
    if term == "cu_seqlens":
        return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
    rows, columns = torch.nonzero(given, as_tuple=True)
    values = rows if term == "sequence" else columns
    if form.layout == ROWS:
        whole = torch.arange(batch.count)[:, None] if term == "sequence" else torch.arange(batch.width)
        return whole.expand(batch.mask.shape)
    return values if form.layout == FLAT else values[None]


def _loss(found: Any, function: Callable[..., Any]) -> Tensor:
    """Return the loss of what a function returned: itself, the first of several, or what is called ``loss``."""
    if isinstance(found, Mapping):
        found = found.get("loss", next(iter(found.values()), None))
    elif isinstance(found, (tuple, list)) and found:
        found = found[0]
    elif not isinstance(found, Tensor):
        found = getattr(found, "loss", found)
    if not isinstance(found, Tensor):
        raise ConfigError(f"""{name_of(function)} returns {type(found).__name__}: return the loss as a tensor, alone or
        first of several""")
    return found


def chosen_form(caller: Caller, batch: Batch) -> Form:
    """Return the layout that the function means: it runs, and a sample's advantage moves no other sample's gradient.

    Raises:
        ConfigError: if the function runs under none.
    """
    first: Exception | None = None
    runs = []
    for form in caller.forms():
        try:
            plain = caller(batch, form).gradient
            if not _leaks(caller, batch, form, plain):
                return form
            runs.append(form)
        except ConfigError:
            raise
        except Exception as error:
            first = first or error
    if runs:
        return runs[0]
    raise ConfigError(
        f"{name_of(caller.function)} cannot be called: {reason(first) if first else 'nothing to give it'}; it was "
        + "given "
        + ", ".join(f"{one.name} as {one.term}" for one in caller.used())
        + ": say what an argument is by --term NAME=TERM, or give its value by --arg NAME=VALUE"
    ) from first


def _leaks(caller: Caller, batch: Batch, form: Form, plain: Tensor) -> bool:
    values = {**batch.values, "advantages": batch.values["advantages"].clone()}
    values["advantages"][0] *= -3
    other = Batch(batch.name, batch.mask, batch.spans, values, batch.rewards, batch.groups)
    moved = caller(other, form).gradient[1:] - plain[1:]
    return bool(moved.abs().max() > 1e-9 * plain.abs().max())


def call_lines(caller: Caller, form: Form) -> Iterator[str]:
    """Yield what each argument was called with."""
    for argument in caller.used():
        yield _call_line(caller, form, argument)
    for name, value in caller.given.items():
        yield f"{name} = {value!r} (as given)"
    used = {argument.name for argument in caller.used()}
    for argument in caller.arguments:
        if argument.name not in used:
            yield f"{argument.name} = {argument.default!r} (its default)"


def _call_line(caller: Caller, form: Form, argument: Argument) -> str:
    term = str(argument.term)
    if term not in TERMS:
        value = caller.constant(term)
        other = argument.optional and argument.default is not None and argument.default != value
        default = f", by default {argument.default!r}" if other else ""
        return f"{argument.name} = {value!r} ({'clip_low' if term == 'clip' else term}{default})"
    scalar = term in ("temperature", "tokens", "samples", "group_size", "microbatches")
    return f"{argument.name} = {term}" + ("" if scalar else f" {form.shape(term)}")
