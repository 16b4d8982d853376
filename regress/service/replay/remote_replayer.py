"""Replays with ``trainer.type=remote``: computed through a service of this machine, judged by what was sent to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regress.compare.diagnosis.run_context import RunContext
from regress.compare.dumps.comparison import Comparison, compare_dumps
from regress.compare.dumps.comparison_options import Options
from regress.compare.dumps.tolerance_bounds import Bounds
from regress.compare.quantities import QUANTITIES
from regress.compare.verdicts.tolerance import BITWISE, Tolerance
from regress.compare.verdicts.tolerance_overrides import Overrides
from regress.compare.verdicts.verdict import Verdict
from regress.dump.coordinates import Place
from regress.dump.dump_location import Location
from regress.dump.taps import at
from regress.engine.run_construction import build
from regress.engine.training_step import train_step
from regress.errors import CompareError, ConfigError, ReplayError
from regress.golden.golden_case import GoldenCase
from regress.interop.foreign_payloads import read_payload
from regress.layout import BatchPlan
from regress.optional_packages import missing
from regress.parallel.distributed_ranks import opened_world
from regress.replay.case_run import no_progress, torch_settings
from regress.replay.replay_configuration import replay_config, unmet, unusable_tracker
from regress.replay.replay_context import commands
from regress.replay.replayer_registry import Judged, Judging, Machine, Replayer
from regress.replay.test_matrix import Item, Replay, is_judged, place_of_test, require_recorded_plan
from regress.replay.variant import Precision
from regress.replay.variant_table import BASE
from regress.report.comparison_report import run_context_of
from regress.service.host.datum_batch import Limits, prepare
from regress.service.host.service_losses import loss_of, objective_of
from regress.service.replay.remote_replay import RemoteReplay
from regress.service.replay.remote_variants import quantities
from regress.service.service_api import Array, Datum, PassRequest

if TYPE_CHECKING:
    from regress.dump.dump_reader import DumpReader


MASKS = ("response_mask", "effective_valid")
"""Tensors of the inputs that Weaver's losses of ratios alone have: elsewhere a weight of 0 leaves a token out."""
SEMANTICS = Tolerance(
    1e-12, reason="float64: a service and the engine's step on the same datums differ by rounding only"
)


def compare_with_truth(
    case: GoldenCase, found: RemoteReplay, *, scale: float = 1.0, overrides: Overrides | None = None
) -> Comparison:
    """Compare what a float32 service computed with the truth of a case, within measured tolerances.

    Args:
        scale: factor on the tolerances.
        overrides: tolerances that the project sets by hand.
    """
    bounds = replace(Bounds.of_case(case, overrides), scale=scale)
    return compare_dumps(f"golden:{case.folder}", str(found.service), Options(bounds=bounds))


def compare_with_reference(reference: str, found: RemoteReplay, precision: Precision) -> Comparison:
    """Compare what a service computed with the engine's step on the same datums: every quantity of both.

    Every byte has to be the same, but in float64, where other ranks may add in another order.
    """
    given = SEMANTICS if precision is Precision.FLOAT64 else BITWISE
    return compare_dumps(reference, str(found.service), Options(bounds=Bounds(given)))


def judged(one: Replay, found: Comparison, *, masked: bool) -> list[Verdict]:
    """Return the verdicts of a comparison at the places of the case.

    Args:
        masked: True if the wire carried the loss mask.

    Raises:
        CompareError: if anything could not be compared, or a quantity of the case was not.
    """
    if found.problems:
        raise CompareError(found.problems[0])
    kept = [v for v in found.verdicts if _belongs(one, v, masked)]
    missing = {*quantities(one.precision)} - {verdict.quantity for verdict in kept}
    if missing:
        raise CompareError(f"""{min(missing)} was not compared: the service's dump {found.actual} has none of it; dump
        it with WEAVER_DEBUG_DUMP_OPTIONS""")
    planned = [update.place for update in one.plan]
    return [replace(verdict, place=_of_case(verdict.place, planned)) for verdict in kept]


def _belongs(one: Replay, verdict: Verdict, masked: bool) -> bool:
    if one.precision is not Precision.FLOAT32:
        return True
    known = masked or verdict.name.rpartition("/")[2] not in MASKS
    return known and verdict.quantity in (*quantities(one.precision), "coverage")


def _of_case(place: Place, planned: Sequence[Place]) -> Place:
    """Return the place of an update in the case; a service counts its updates and knows no rollouts."""
    if place.step is None or place.update is not None or not 0 <= place.step < len(planned):
        return place
    return replace(place, step=planned[place.step].step, update=planned[place.step].update)


def scene_of(one: Replay, found: Comparison) -> RunContext:
    """Return the facts of a replay, for its diagnosis: those that the two compared dumps tell."""
    return replace(run_context_of(found), commands=commands(one))


TAKES = {"surrogate": "surrogate_weights", "cross_entropy": "advantages"}
"""Loss -> array of the client's dump that stands for the advantages; the others take advantages and log-probs."""


def replay_sent(case: GoldenCase, replay: RemoteReplay, precision: Precision, folder: Path) -> str:
    """Make the updates whose datums a client's dump holds, from the case's start; returns the dump of the steps.

    The engine's own step runs on them in this process, without client, wire, queue or host.

    Raises:
        ReplayError: if the dump holds no datums.
    """
    requests = list(_requests(replay))
    if not requests:
        raise ReplayError(f"{replay.client} holds no datums; set debug.remote_api_dump_options.datums=true")
    config = replay_config(case, BASE, precision, len(case.trajectories()), folder)
    with torch_settings(config.threads), opened_world(config) as world, ExitStack() as resources:
        trainer = build(config, resources, no_progress, world).trainer
        policy = trainer.policy
        limits = Limits(policy.architecture.config.vocab_size, config.data.max_seq_length)
        for number, request in enumerate(requests):
            loss = loss_of(request)
            found = prepare(
                request,
                loss,
                limits,
                name=f"update {number}",
                dtype=policy.log_prob_dtype,
                device=torch.device(config.device),
            )
            with at(step=number, rank=0):
                train_step(
                    policy,
                    trainer.optimizer,
                    found.tokens,
                    found.batch.microbatches(BatchPlan(micro_batch_size=1)),
                    objective_of(request, loss),
                    max_grad_norm=config.optimizer.max_grad_norm,
                )
            trainer.scheduler.step()
    return config.debug.dump_dir


def _requests(replay: RemoteReplay) -> Iterator[PassRequest]:
    for path in replay.datums:
        payload = read_payload(path)
        extra: Mapping[str, Any] = payload["extra_info"]
        loss = str(extra["loss_fn"])
        config = {
            name: value for name, value in extra["loss_fn_config"].items() if name != "enable_debug_dump"
        }
        masked = replay.wire == "weaver" and (loss not in TAKES or "entropy_coeff" in config)
        yield PassRequest([_datum(item, loss, masked) for item in payload["datums"]], loss, config)


def _datum(item: Mapping[str, Any], loss: str, masked: bool) -> Datum:
    given = {
        name: np.asarray(values, np.int64 if name == "target_tokens" else np.float32)
        for name, values in item["loss_fn_inputs"].items()
    }
    inputs: dict[str, Array] = {"target_tokens": given["target_tokens"]}
    if loss in TAKES:
        inputs["weights" if loss == "cross_entropy" else TAKES[loss]] = given[TAKES[loss]]
    else:
        inputs |= {name: given[name] for name in ("advantages", "logprobs")}
    inputs |= {"loss_mask": given["loss_mask"]} if masked else {}
    return Datum(np.asarray(item["input_tokens"], np.int64), inputs, item["datum_id"])


@dataclass(frozen=True)
class RemoteReplayer(Replayer):
    """Computes replays through a service; judges them by the truth in float32, else by the step on what was sent."""

    machine: Machine = field(default_factory=Machine)
    leaves: Sequence[str] = ("client", "service", "reference")

    def refuses(self, replay: Replay) -> str | None:
        """Return which package is absent; raises `ConfigError` for a launcher, and for a folder of several nodes."""
        if self.machine.launch is not None or self.machine.work is not None:
            raise ConfigError(f"""variant {replay.variant.name} trains through a service that starts its ranks on this
            machine; leave it out, or --launcher and --work away""")
        absent = missing("service")
        needs = unmet(replay.case, replay.variant) or (None if absent is None else f"it {absent}")
        return needs or unusable_tracker(replay.variant)

    def items(self, replay: Replay) -> Iterator[Item]:
        """Yield the tests of a replay, whose ranks and microbatches are the service's own."""
        require_recorded_plan(replay)
        for update in replay.plan:
            place, recorded = update.place, {*replay.case.quantities(update.where)}
            for quantity in (q.name for q in QUANTITIES):
                over_wire = quantity in quantities(replay.precision) and quantity in recorded
                if quantity == "coverage" or (over_wire and is_judged(replay, quantity)):
                    yield Item(replay, place, quantity)

    def computed_as(self, replay: Replay) -> Replay:
        """Return the replay in float32 for the bitwise one: a wire carries no more."""
        if replay.precision is not Precision.BITWISE:
            return replay
        return Replay(replay.case, replay.variant, Precision.FLOAT32)

    def compute(self, replay: Replay, folder: Path) -> None:
        """Train through a service that lives for this replay."""
        from regress.replay.engine_replayer import import_engine

        import_engine()
        from regress.service.replay.remote_replay import replay_remote

        overrides = None if self.machine.device is None else {"device": self.machine.device}
        replay_remote(replay.case, replay.variant, replay.precision, folder, overrides=overrides)

    def dump_of(self, replay: Replay, folder: Path) -> Location:
        """Raise `ConfigError`."""
        raise ConfigError(f"""{replay.variant.name} trains through a service, which writes dumps of another form; take
        them with --regress-keep-dumps and regress compare""")

    def judge(self, replay: Replay, folder: Path, judging: Judging, reference: DumpReader | None) -> Judged:
        """Judge the dump of the service."""
        from regress.service.replay.remote_replay import RemoteReplay
        from regress.service.replay.remote_replayer import (
            compare_with_reference,
            compare_with_truth,
            judged,
            replay_sent,
            scene_of,
        )

        found = RemoteReplay.of(replay.variant, folder)
        if replay.precision is Precision.FLOAT32:
            golden = judging.golden(replay.case)
            compared = compare_with_truth(golden, found, scale=judging.scale, overrides=judging.overrides)
        else:
            sent = replay_sent(replay.case, found, replay.precision, folder / "reference")
            compared = compare_with_reference(sent, found, replay.precision)
        verdicts = judged(replay, compared, masked=found.masked)
        return Judged(verdicts, scene_of(replay, compared), place_of_test)
