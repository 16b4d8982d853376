"""A training request as passes of the engine, and the gradients of a step however clients have cut it into requests.

On one process with one datum a microbatch, passes one after another are the pass over all of their datums bit for bit.
Elsewhere the plan of the microbatches, and the order in which ranks sum, depend on the datums that lie in one request:
requests of one loss that follow each other are then made again before the step, as the one request that they stand for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from regress.dump.request_index import DumpedDatum, DumpedRequest, Operation
from regress.dump.taps import at, receiving
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.engine_ranks import World
from regress.engine.local_tensor import local
from regress.engine.mini_batch import Microbatch
from regress.engine.training_passes import Part, accumulate, evaluate
from regress.engine.training_step import StepOutcome, step_outcome
from regress.errors import NotFinite
from regress.grpo.objective import Objective
from regress.grpo.policy_losses import LOSSES
from regress.grpo.selective_log_softmax import TokenLogProbs
from regress.grpo.token_losses import TokenLoss
from regress.service.host.datum_batch import Limits, Prepared, prepare, split
from regress.service.host.request_dumps import parts_of
from regress.service.host.service_losses import (
    LOG_PROBS,
    Loss,
    loss_of,
    objective_of,
    same_loss,
    wants_dump,
)
from regress.service.host.training_model import Model
from regress.service.service_api import Array, Json, PassRequest, PassResult, ServiceError


def request_name(where: Json) -> str:
    """Return the name of a request in dumps: that of `regress.dump.request_index.DumpedRequest.key`."""
    seq_id = where.get("seq_id")
    return f"request {seq_id if seq_id is not None else where.get('request_id')}"


def run_pass(model: Model, request: PassRequest, where: Json, world: World) -> PassResult:
    """Run the passes of a request, by all ranks together.

    Raises:
        ServiceError: if the request is refused; nothing has changed then.
        RegressError: if a loss or a dump cannot be computed or written; gradients are exactly as they were.
    """
    loss = loss_of(request)
    objective = objective_of(request, loss)
    asked = wants_dump(request)
    model.check_dump()
    policy = model.policy
    prepared = _prepared(model, request, loss, request_name(where))
    if request.forward_only and objective.entropy_coef:
        raise ServiceError(
            f"entropy_coeff={objective.entropy_coef} has no meaning in a forward pass; leave it out there"
        )
    micros = _planned(model, prepared, world)
    values = _Values(len(prepared.tokens), policy.log_prob_dtype, policy.device)
    first = model.forwards if request.forward_only else model.micro
    records = model.dump.collector(model.step, asked=asked)
    if prepared.several and records is not None:
        raise ServiceError("""a datum has several targets at a position, whose values have no place in a dump; send it
        without enable_debug_dump to a service that dumps on request alone""")
    again = records is None and continues(model, request)

    def run() -> PassResult:
        passes = evaluate if request.forward_only or again else accumulate
        with (
            receiving(records if policy.computes_losses else None),
            at(step=model.step, rank=world.rank, micro=first),
        ):
            part = passes(policy, prepared.tokens, micros, objective, watch=values)
        outcome = _step_outcome(world, part)
        result = _result(request, loss, prepared, outcome.loss, values.whole(world))
        line = _line(model, request, objective, where, prepared, result)
        # of a pipeline the last stage records: it has all that a dump holds of a microbatch
        rows = [[number for _, number in micro.sample_ids] for micro in micros if policy.computes_losses]
        model.dump.write(records, replace(line, parts=parts_of(world.rank, first, rows)))
        return result

    if request.forward_only:
        result = run()
        model.forwards += len(micros)
        return result
    policy.entropy_gradient = objective.entropy_coef != 0.0
    with added(policy):
        result = run()
    model.micro += len(micros)
    model.pending += 1
    model.passes.append(request)
    return result


def continues(model: Model, request: PassRequest) -> bool:
    """Return True if a request is made again with the one before it, as a whole, when the step needs gradients."""
    return not model.cut_anywhere and bool(model.passes) and same_loss(model.passes[-1], request)


def accumulate_whole(model: Model, request: PassRequest, world: World) -> None:
    """Add the gradients of a request whose parts have run before, by all ranks together; nothing is recorded.

    Raises:
        RegressError: if it has no finite loss, or does not fit the microbatches.
    """
    loss = loss_of(request)
    objective = objective_of(request, loss)
    prepared = _prepared(model, request, loss, "requests since the last optim_step")
    micros = _planned(model, prepared, world)
    model.policy.entropy_gradient = objective.entropy_coef != 0.0
    _step_outcome(world, accumulate(model.policy, prepared.tokens, micros, objective))


def _prepared(model: Model, request: PassRequest, loss: Loss, name: str) -> Prepared:
    policy = model.policy
    limits = Limits(policy.architecture.config.vocab_size, model.base.config.data.max_seq_length)
    return prepare(request, loss, limits, name=name, dtype=policy.log_prob_dtype, device=policy.device)


def _step_outcome(world: World, part: Part) -> StepOutcome:
    try:
        return step_outcome(world, part)
    except NotFinite as error:
        why = str(error).partition(", so no update")[0]
        raise ServiceError(
            f"""{why}, because the model's log-probs or their distance to the logprobs sent are not finite; nothing was
            added to the gradients: check logprobs, or load weights from before they diverged""",
            code="not_finite",
        ) from error


def _planned(model: Model, prepared: Prepared, world: World) -> list[Microbatch]:
    try:
        return prepared.batch.microbatches(model.base.plan, world.plan, world.rank)
    except ValueError as error:  # such as a datum that exceeds the tokens of a microbatch
        raise ServiceError(
            f"the datums do not fit the service's microbatches ({error}); shorten them"
        ) from error


def _line(
    model: Model,
    request: PassRequest,
    objective: Objective,
    where: Json,
    prepared: Prepared,
    result: PassResult,
) -> DumpedRequest:
    """Return the request as the index of a dump tells it, without its parts."""
    config: dict[str, float] = {"entropy_coeff": objective.entropy_coef}
    if LOSSES[objective.loss].clips_ratio:
        config |= {"clip_low_threshold": objective.clip_low, "clip_high_threshold": objective.clip_high}
    if "beta" in request.config:
        config["beta"] = float(request.config["beta"])
    samples = zip(prepared.batch.trajectories, request.data, strict=True)
    return DumpedRequest(
        model.id,
        Operation.FORWARD if request.forward_only else Operation.FORWARD_BACKWARD,
        model.step,
        seq_id=where.get("seq_id"),
        request_id=where.get("request_id"),
        loss=request.loss,
        config=config,
        datums=tuple(DumpedDatum(tuple(sample.tokens), datum.id) for sample, datum in samples),
        metrics=dict(result.metrics),
    )


class _Values:
    """Values of the loss tokens of a request, ``[K]`` each, from the microbatches of this rank."""

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        names = "logprobs", "loss", "ratio", "difference", "clipped"
        self._values = {name: torch.zeros(count, dtype=dtype, device=device) for name in names}

    def __call__(self, micro: Microbatch, out: TokenLogProbs, terms: TokenLoss) -> None:
        """Take the values of one microbatch."""
        clipped = terms.clipped_low_K | terms.clipped_high_K
        found: dict[str, Tensor] = {
            "logprobs": out.log_probs.detach(),
            "loss": terms.loss_K.detach(),
            "ratio": terms.ratio_K,
            "difference": terms.log_ratio_K,
            "clipped": clipped,
        }
        for name, values in found.items():
            self._values[name][micro.select] = values.to(self._values[name].dtype)

    def whole(self, world: World) -> dict[str, Array]:
        """Return the values of all ranks."""
        return {name: world.sum(values).cpu().numpy() for name, values in self._values.items()}


def _result(
    request: PassRequest, loss: Loss, prepared: Prepared, total: float, found: Mapping[str, Array]
) -> PassResult:
    shapes = [datum.inputs["target_tokens"].shape for datum in request.data]
    shown = {"logprobs": found["logprobs"]}
    counted = prepared.counted
    weights = prepared.tokens.weights
    assert weights is not None
    metrics = {"tokens:sum": float(counted.sum())}
    if request.loss != LOG_PROBS:
        weighed = weights.cpu().numpy().astype(found["loss"].dtype) * found["loss"]
        shown["elementwise_loss"] = weighed
        own = prepared.tokens.advantages
        assert own is not None
        weight = float(own.double().sum()) if request.loss == "cross_entropy" else float(weights.sum())
        metrics = {"loss:sum": total, **metrics, "weight:sum": weight}
    if loss.ratio:
        metrics |= _ratio_metrics(found, counted)
    rows = {name: split(values, prepared, shapes) for name, values in shown.items()}
    outputs = [{name: rows[name][index] for name in rows} for index in range(len(shapes))]
    return PassResult(outputs, metrics, tuple(datum.id for datum in request.data))


def _ratio_metrics(found: Mapping[str, Array], counted: Array) -> dict[str, float]:
    """Return what the tokens that count tell of the policy's distance from the one that sampled them."""
    gap = np.abs(found["difference"][counted].astype(np.float64))
    ratio = found["ratio"][counted]
    return {
        "ratio:max": float(ratio.max()) if len(ratio) else 0.0,
        "clip:sum": float(found["clipped"][counted].sum()),
        "logprob_diff_abs:max": float(gap.max()) if len(gap) else 0.0,
        "logprob_diff_abs:sum": float(gap.sum()),
    }


def merged(requests: Sequence[PassRequest]) -> list[PassRequest]:
    """Return the requests with those of one loss and its settings, as far as they follow each other, made one."""
    found: list[PassRequest] = []
    for request in requests:
        if found and same_loss(found[-1], request):
            found[-1] = replace(found[-1], data=[*found[-1].data, *request.data])
        else:
            found.append(request)
    return found


def complete(model: Model, world: World) -> None:
    """Make the gradients of a model those of whole passes, by all ranks together.

    Raises:
        RegressError: if that fails; the gradients since the last step are dropped then.
    """
    whole = merged(model.passes)
    if model.cut_anywhere or len(whole) == len(model.passes):
        return
    try:
        model.policy.zero_grad()
        for request in whole:
            with added(model.policy):
                accumulate_whole(model, request, world)
    except BaseException:
        model.drop_gradients()
        raise
    model.passes = whole


@contextmanager
def added(policy: LocalPolicy) -> Iterator[None]:
    """Add the gradients of the passes inside to those that are there; an exception leaves those exactly as they were.

    Where passes end with a sum over ranks, earlier gradients are set aside, because they were summed before. Elsewhere
    each microbatch adds to them, so that the passes may be cut anywhere between microbatches: bit for bit the same.
    """
    named = dict(policy.named_parameters())
    before = {name: p.grad for name, p in named.items() if p.grad is not None}
    known = before if policy.sums_gradients else {name: grad.clone() for name, grad in before.items()}
    if policy.sums_gradients:
        policy.zero_grad()
    try:
        yield
    except BaseException:
        policy.zero_grad()
        for name, grad in known.items():
            named[name].grad = grad
        raise
    if policy.sums_gradients:
        _add(policy, before)


@torch.no_grad()
def _add(policy: LocalPolicy, before: dict[str, Tensor]) -> None:
    for name, parameter in policy.named_parameters():
        if name not in before:
            continue
        earlier = before[name]
        if parameter.grad is not None:
            local(earlier).add_(local(parameter.grad))
        parameter.grad = earlier
