"""Self-hosted training steps fed with exactly what a client sent to a service: the reference of a remote replay.

The engine's own step runs on the datums of the client's dump, in this process, without client, wire, queue or host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regress.dump.taps import at
from regress.engine.run_construction import build
from regress.engine.training_step import train_step
from regress.errors import ReplayError
from regress.golden.golden_case import GoldenCase
from regress.interop.foreign_payloads import read_payload
from regress.layout import BatchPlan
from regress.parallel.distributed_ranks import opened_world
from regress.replay.case_run import no_progress, torch_settings
from regress.replay.replay_configuration import replay_config
from regress.replay.variant import Precision
from regress.replay.variant_table import BASE
from regress.service.host.datum_batch import Limits, prepare
from regress.service.host.service_losses import loss_of, objective_of
from regress.service.replay.remote_replay import RemoteReplay
from regress.service.service_api import Array, Datum, PassRequest

TAKES = {"surrogate": "surrogate_weights", "cross_entropy": "advantages"}
"""Loss -> array of the client's dump that stands for the advantages; the others take advantages and log-probs."""


def replay_sent(case: GoldenCase, replay: RemoteReplay, precision: Precision, folder: Path) -> str:
    """Make the updates whose datums a client's dump holds, from the case's start; returns the dump of the steps.

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
