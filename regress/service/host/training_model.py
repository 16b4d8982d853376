"""A model in training: its policy, the gradients since the last step, and its optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch.optim import AdamW

from regress.dump.request_index import DumpedRequest, Operation
from regress.dump.taps import at, receiving
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.engine_ranks import World
from regress.engine.optimizer import adamw
from regress.engine.recorded_optimizer_state import load_state
from regress.engine.training_passes import Part
from regress.engine.training_step import StepOutcome, update
from regress.errors import DumpError, NotFinite
from regress.service.host.base_models import Base
from regress.service.host.request_dumps import Dumps, ModelDump
from regress.service.service_api import AdamParams, Json, ModelSpec, OptimResult, PassRequest, ServiceError

_LARGEST = 1e38


@dataclass
class Model:
    """A model in training.

    Attributes:
        step: completed optimizer steps.
        pending: passes whose gradients no step has used.
        passes: their requests.
        micro: microbatches of those passes on this rank, which number those of the next one.
        forwards: microbatches of passes without gradients since the last step, which have numbers of their own.
        unwritten: what kept the last step from being dumped; the next request tells.
    """

    id: str
    spec: ModelSpec
    base: Base
    policy: LocalPolicy
    optimizer: AdamW
    dump: ModelDump
    step: int = 0
    pending: int = 0
    micro: int = 0
    forwards: int = 0
    unwritten: DumpError | None = None
    passes: list[PassRequest] = field(default_factory=list)

    @classmethod
    def made(cls, model_id: str, spec: ModelSpec, base: Base, dumps: Dumps) -> Model:
        """Return a new model; all ranks together."""
        if spec.lora is not None and not (isinstance(spec.lora.rank, int) and spec.lora.rank >= 1):
            raise ServiceError(f"lora_config.rank={spec.lora.rank!r} is not a rank; give 1 or more")
        policy = base.policy(spec.lora)
        return cls(model_id, spec, base, policy, optimizer_of(policy, base), dumps.of_model(model_id))

    def check_dump(self) -> None:
        """Raise what kept the last step from being dumped, once.

        Raises:
            DumpError: if anything did.
        """
        error, self.unwritten = self.unwritten, None
        if error is not None:
            raise error

    @property
    def cut_anywhere(self) -> bool:
        """True if passes one after another add up, bit for bit, to the pass over all of their datums."""
        plan = self.base.plan
        return not self.policy.sums_gradients and plan.micro_batch_size == 1 and plan.row_order == "given"

    def drop_gradients(self) -> None:
        """Drop the passes since the last step."""
        self.policy.zero_grad()
        self.pending = self.micro = self.forwards = 0
        self.passes = []


def optimizer_of(policy: LocalPolicy, base: Base) -> AdamW:
    """Return an AdamW with the state that the base model begins with, if it has one; every step brings its settings."""
    chosen = base.config.optimizer
    optimizer = adamw(policy.named_parameters(), 0.0, implementation=chosen.implementation)
    if chosen.state_path is not None:
        load_state(optimizer, policy, chosen.state_path)
    return optimizer


def optim_step(model: Model, params: AdamParams, where: Json, world: World) -> OptimResult:
    """Make one optimizer step from the gradients since the last one, by all ranks together.

    Raises:
        ServiceError: for settings that AdamW cannot have, or without any gradients; nothing has changed then.
        NotFinite: if the gradient is not finite; the model has not changed, and its gradients are dropped.
    """
    check(params)
    model.check_dump()
    if not model.pending:
        raise ServiceError(
            "there are no gradients since the last optim_step, so it would change nothing; send forward_backward first",
            code="no_gradients",
        )
    for group in model.optimizer.param_groups:
        group["lr"] = params.learning_rate
        group["betas"] = (params.beta1, params.beta2)
        group["eps"] = params.eps
        group["weight_decay"] = params.weight_decay
    limit = params.grad_clip_norm or None
    pattern = model.base.config.debug.target_param_pattern
    records = model.dump.collector(model.step, asked=model.dump.asked)
    try:
        with receiving(records), at(step=model.step, rank=world.rank):
            found = update(
                model.policy, model.optimizer, Part(), world=world, max_grad_norm=limit, target_params=pattern
            )
    except NotFinite as error:
        model.drop_gradients()
        raise ServiceError(
            """the gradient norm of the passes since the last optim_step is not finite; their gradients are dropped and
            the model is as it was: send them again with other datums""",
            code="not_finite",
        ) from error
    model.drop_gradients()
    model.step += 1
    result = OptimResult(model.step, found.grad_norm, _clipped(found, limit), params)
    line = DumpedRequest(
        model.id,
        Operation.OPTIM_STEP,
        model.step - 1,
        seq_id=where.get("seq_id"),
        request_id=where.get("request_id"),
        adam={name: float(value) for name, value in vars(params).items()},
        metrics={"grad_norm": result.grad_norm, "clipped_grad_norm": result.clipped_grad_norm},
    )
    try:
        model.dump.write(records, line)
    except DumpError as error:  # the step is made, and its reply must say so
        model.unwritten = error
    model.dump.stepped()
    return result


def _clipped(found: StepOutcome, limit: float | None) -> float:
    """Return the norm after clipping by `LocalPolicy.clip_grad_norm`."""
    if limit is None:
        return found.grad_norm
    return found.grad_norm * min(1.0, limit / (found.grad_norm + 1e-6))


def check(params: AdamParams) -> None:
    """Refuse settings that AdamW cannot have.

    Raises:
        ServiceError: naming the first one.
    """
    for name, value in vars(params).items():
        upper = 1.0 if name.startswith("beta") else math.inf
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < upper:
            rule = "at least 0 and below 1" if upper == 1.0 else "finite and at least 0"
            raise ServiceError(f"adam_params.{name}={value!r} is not possible; give a number {rule}")
    rate = params.learning_rate
    for name, factor in (
        ("learning_rate", 1.0 / (1.0 - params.beta1)),  # what a step moves, at most
        ("weight_decay", params.weight_decay),
    ):
        if not rate * factor < _LARGEST or not max(params.eps, rate) < _LARGEST:
            raise ServiceError(f"""adam_params.{name}={getattr(params, name)!r} with learning_rate={rate!r} and
            eps={params.eps!r} leaves the range of float32; give usual sizes""")
