"""Steps of a ten-million-parameter model through the training service, against the same steps without it.

Timed: one step, a pass over eight datums and an update. `self-hosted` is the engine's step in this process; the others
send the datums to ``regress serve`` in a process of its own on loopback, so its time includes encoding, the queue, the
journal, and what the client waits between two polls; processor time is that of both processes. `weaver` and `tinker`
are this repository's clients, which poll as the SDKs do by default: nex-weaver 0.5 s after an answer that is not final,
tinker at once. With ``--sdk PYTHON`` the SDK of another environment takes turns, too; its own processor time is not
counted. Losses and gradient norms of all sides are compared bit by bit at every step.

`empty` are heartbeats: what the wire takes for a request that asks nothing of the engine, by one client and by eight;
`tiny` are passes and updates of a model of two layers on one datum of two tokens, with queue, journal and engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.report import Report
from benchmarks.timing import Seconds, Side, alternate, timed
from benchmarks.workload import EOS, PAD, TEN_MILLION, TINY, Size, make_config, make_trajectories
from regress.dump.trajectory import Trajectory
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.mini_batch import TokenBatch
from regress.engine.model_loading import build_model
from regress.engine.optimizer import adamw
from regress.engine.tokenizer import train_tokenizer
from regress.engine.training_step import train_step
from regress.grpo.objective import Objective
from regress.layout import BatchPlan
from regress.service.client import tinker_client, weaver_client
from regress.service.client.client_settings import Endpoint
from regress.service.host.base_models import TOKENS
from regress.service.service_api import AdamParams, Datum

ROUNDS = 5
EMPTY, CLIENTS, SMALL = 300, 8, 60
KEY = "tml-benchmark"
ADAM = AdamParams(1e-4, 0.9, 0.95, 1e-8, 1e-2, 1.0)
OBJECTIVE = Objective(loss="importance_sampling", aggregation="token-sum")
OVERHEAD = 1.1

Step = Callable[[], tuple[float, float]]
"""Makes a step; returns its loss and the norm of its gradient."""


def run(sdks: Sequence[str] = ()) -> Report:
    """Time steps with and without the service, and requests that are empty.

    Args:
        sdks: Python interpreters of environments with nex-weaver or tinker.
    """
    os.environ["NO_PROXY"] = "127.0.0.1"
    weaver_client.POLL = 0.5
    report = Report("service", "steps through the training service")
    rows = _rows(make_trajectories(TEN_MILLION, prompts=2, group_size=4))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        own = _self_hosted(_saved(TEN_MILLION, folder / "big"), rows)
        _saved(TINY, folder / "tiny")
        url, service = stack.enter_context(_served(folder))
        steps: dict[str, Step] = {"self-hosted": own}
        for wire, client in (("weaver", weaver_client.WeaverModel), ("tinker", tinker_client.TinkerModel)):
            endpoint = Endpoint(wire, url, KEY, "big", None, 0, "own", 600.0)
            model = stack.enter_context(closing(client(endpoint)))
            small = stack.enter_context(closing(client(replace(endpoint, base_model="tiny"))))
            steps[wire] = _remote(model, rows)
            report.rows |= _empty(wire, url, model)
            step = _remote(small, [([2, 3, 4], [-4.0] * 3, [0, 1, 1], 1.0)])
            spent = timed(lambda step=step: [step() for _ in range(SMALL)])()
            report.rows[f"{wire}, tiny"] = {"requests/s": round(2 * SMALL / spent.wall, 1)}
        for python in sdks:
            called, step = stack.enter_context(_sdk(python, url, rows, folder))
            steps[called] = step
        seen: dict[str, list[tuple[float, float]]] = {side: [] for side in steps}
        measured = alternate({side: _side(step, seen[side], service) for side, step in steps.items()}, ROUNDS)
    for side, found in seen.items():
        if found != seen["self-hosted"]:
            raise AssertionError(
                f"the steps of {side} are not those of the engine: {found} {seen['self-hosted']}"
            )
    report.facts |= {"datums": len(rows), "tokens": sum(len(row[0]) for row in rows), "rounds": ROUNDS}
    report.add_times(measured, "self-hosted")
    for side in list(steps)[1:]:
        report.rows[side]["requests/s"] = round(2 / measured.wall(side), 2)
        report.goals[f"10M, a step by {side} over a self-hosted one"] = (
            measured.ratio(side, "self-hosted"),
            OVERHEAD,
        )
    return report


def _rows(trajectories: Sequence[Trajectory]) -> list[tuple[list[int], list[float], list[int], float]]:
    """Return tokens, log-probs, loss mask and advantage of each trajectory."""
    log_prob = float(np.float32(-np.log(TEN_MILLION.vocabulary)))
    return [
        ([*row.tokens], [log_prob] * len(row.tokens), [*row.loss_mask], row.reward - 0.5)
        for row in trajectories
    ]


def _datum(tokens: list[int], log_probs: list[float], mask: list[int], advantage: float) -> Datum:
    counted = np.asarray(mask[1:], np.float32)
    inputs = {
        "target_tokens": np.asarray(tokens[1:]),
        "logprobs": np.asarray(log_probs[1:], np.float32),
        "loss_mask": counted,
        "advantages": advantage * counted,
    }
    return Datum(np.asarray(tokens[:-1]), inputs)


def _saved(size: Size, folder: Path) -> PreTrainedModel:
    """Return a seeded model, which lies in a folder with a tokenizer, too."""
    config = make_config(size, make_trajectories(size, prompts=2, group_size=4), ())
    model = build_model(config.model, seed=0, vocab_size=size.vocabulary, pad_id=PAD, eos_id=EOS)
    model.save_pretrained(folder)
    train_tokenizer(["words of a tokenizer"]).save_pretrained(folder)
    return model


def _self_hosted(model: PreTrainedModel, rows: Sequence[Any]) -> Step:
    """Return the step of a model in this process."""
    policy = LocalPolicy(model)
    optimizer = adamw(
        policy.named_parameters(),
        ADAM.learning_rate,
        betas=(ADAM.beta1, ADAM.beta2),
        eps=ADAM.eps,
        weight_decay=ADAM.weight_decay,
    )
    masks = [[0] + [1] * (len(row[0]) - 1) for row in rows]  # as the service's, whose masks are weights of 0
    batch = TokenBatch(
        [
            Trajectory("g", index, row[0], mask, 0.0, 1)
            for index, (row, mask) in enumerate(zip(rows, masks, strict=True))
        ],
        effective=[[0, *row[2][1:]] for row in rows],
    )
    data = [_datum(*row) for row in rows]

    def of(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([datum.inputs[name] for datum in data]))

    counted = of("loss_mask")
    tokens = replace(
        batch.loss_tokens(),
        weights=counted.double(),
        advantages=of("advantages"),
        old_log_probs=torch.where(counted > 0, of("logprobs"), 0.0),
    )

    def step() -> tuple[float, float]:
        made = train_step(
            policy,
            optimizer,
            tokens,
            batch.microbatches(BatchPlan(max_tokens_per_microbatch=TOKENS)),
            OBJECTIVE,
            max_grad_norm=ADAM.grad_clip_norm,
        )
        return made.loss, made.grad_norm

    return step


@contextmanager
def _served(folder: Path) -> Iterator[tuple[str, int]]:
    """Serve the model in a process of its own; yields the address and the process id."""
    options = [f"--model={name}={folder / name}" for name in ("big", "tiny")]
    options += ["--port", "0", "--log-format", "none"]
    options += ["--state-dir", str(folder / "state"), "threads=1", "data.max_seq_length=1024"]
    with subprocess.Popen(
        [sys.executable, "-m", "regress", "serve", *options],
        env={**os.environ, "GRPO_REGRESS_API_KEY": KEY},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline() or "{}")
        if "url" not in told:
            raise RuntimeError("the service does not start: it says why above")
        try:
            yield told["url"], process.pid
        finally:
            process.terminate()


def _remote(model: Any, rows: Sequence[Any]) -> Step:
    data = [_datum(*row) for row in rows]

    def step() -> tuple[float, float]:
        passed = model.forward_backward(data, "importance_sampling", {})
        return passed.metrics["loss:sum"], model.optim_step(ADAM)["grad_norm"]

    return step


def _side(step: Step, seen: list[tuple[float, float]], service: int) -> Side:
    """Return the side of a step, with the processor time of the service, too."""
    here = timed(lambda: seen.append(step()))

    def side() -> Seconds:
        before = _processor_time(service)
        spent = here()
        return replace(spent, cpu=spent.cpu + _processor_time(service) - before)

    return side


def _processor_time(process: int) -> float:
    """Return the processor time of another process, s, as Linux tells it."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _empty(wire: str, url: str, model: Any) -> dict[str, dict[str, Any]]:
    """Return heartbeats per second, by one client and by several at once."""
    if wire == "weaver":
        path, header, body = f"/api/v1/sessions/{model.session}/heartbeat", "X-Weaver-API-Key", {}
    else:
        path, header, body = "/api/v1/session_heartbeat", "X-API-Key", {"session_id": model.session}

    def beat(count: int) -> None:
        with httpx.Client(base_url=url, headers={header: KEY}) as client:
            for _ in range(count):
                client.post(path, json=body).raise_for_status()

    beat(10)
    found = {}
    for clients in (1, CLIENTS):
        start = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(beat, [EMPTY // clients] * clients))
        rate = EMPTY // clients * clients / (time.perf_counter() - start)
        found[f"{wire}, empty, {clients} at once"] = {"requests/s": round(rate, 1)}
    return found


@contextmanager
def _sdk(python: str, url: str, rows: Sequence[Any], folder: Path) -> Iterator[tuple[str, Step]]:
    """Open the SDK of an environment in a process of its own; yields its name with version, and its step."""
    script = Path(__file__).with_name("sdk_side.py")
    given = folder / "rows.json"
    given.write_text(json.dumps({"url": url, "key": KEY, "model": "big", "rows": rows, "adam": vars(ADAM)}))
    quiet = {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    with subprocess.Popen(
        [python, str(script), str(given)],
        env={**os.environ, **quiet},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        write, read = process.stdin, process.stdout

        def told() -> Any:
            line = read.readline()
            if not line:
                raise RuntimeError(f"the SDK of {python} has ended: it says why above")
            return json.loads(line)

        def step() -> tuple[float, float]:
            write.write("step\n")
            write.flush()
            found = told()
            return found["loss"], found["grad_norm"]

        yield str(told()["name"]), step
        write.close()
