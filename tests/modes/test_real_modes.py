"""The three modes run for real: trainer, client and service; equal, and no more once a fault is in one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from regress.cli import main
from regress.dump.request_index import VARIABLES
from regress.engine.config import load_config
from regress.engine.config.config_schema import Config
from regress.engine.training_run import train
from regress.service.client import microbatch_datums, remote_api_dumps, remote_trainer
from regress.service.client.remote_run import train as train_remotely
from regress.service.core.executor_choice import opened_host
from regress.service.core.host_executor import InProcess
from regress.service.core.service_limits import Limits
from regress.service.core.training_service import CoreService
from regress.service.service_api import Datum, PassResult
from tests.unit.service.client.in_process_client import LocalModel

QUIET = Console(quiet=True)
COMMON = (
    "max_steps=1",
    "data.prompts_per_step=4",
    "data.group_size=4",
    "evaluation.every_n_steps=0",
    "optimizer.warmup_steps=0",
    "optimizer.weight_decay=0.01",
    "optimizer.max_grad_norm=0.05",
    "algorithm.entropy_coef=0.01",
    "debug.enable_data_dump=true",
    "debug.dump_format=pt",
)
OWN = ("trajectory", "old_log_probs", "forward_data", "loss", "is_loss_debug", "param", "gradient")
"""The first four are those of the document."""
SERVICE = "forward_data,loss,is_loss_debug,batch_inputs,param,gradient"


def config(folder: Path, *overrides: str) -> Config:
    here = (f"output_dir={folder}", f"debug.dump_dir={folder / 'dump'}")
    return load_config(None, "reverse_string", [*COMMON, *here, *overrides], environ={}).config


@dataclass
class Base:
    """A model that has learned a little, and the dump of training it in this process."""

    model: Path
    self_hosted: Path


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    root = tmp_path_factory.mktemp("real")
    warm = ("max_steps=0", "warm_start.steps=40", "debug.enable_data_dump=false")
    train(config(root / "warm", *warm), QUIET)
    options = [f"debug.dump_options.{name}=true" for name in OWN]
    model = root / "warm" / "final"
    train(config(root / "self", *_of(model), *options), QUIET)
    return Base(model, root / "self" / "dump")


def _of(model: Path) -> list[str]:
    return [f"model.path={model}", f"tokenizer.path={model}", "warm_start.steps=0"]


@contextmanager
def serving(base: Base, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CoreService]:
    """A service that dumps, in this process."""
    for name, value in zip(VARIABLES, ("1", str(root / "service"), "1", SERVICE), strict=True):
        monkeypatch.setenv(name, value)
    offered = config(root / "serve", *_of(base.model), "debug.enable_data_dump=false")
    opened = partial(opened_host, {"base": offered}, root / "state")
    service = CoreService(InProcess(opened), root / "state", Limits())
    try:
        yield service
    finally:
        service.close()


def compared(
    base: Base,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    *overrides: str,
    model: type[LocalModel] = LocalModel,
) -> Result:
    """Train through a service, and compare the three dumps."""
    options = [f"debug.remote_api_dump_options.{name}=true" for name in remote_api_dumps.TYPES]
    own = config(
        root / "client",
        "trainer.type=remote",
        f"tokenizer.path={base.model}",
        "warm_start.steps=0",
        *options,
        *overrides,
    )
    with serving(base, root, monkeypatch) as service:
        train_remotely(own, QUIET, connect=lambda _: model(service, "base"))
    directories = ("--self_hosted_dir", base.self_hosted, "--remote_api_dir", root / "client" / "dump")
    more = ("--weaver_dir", root / "service", "--engine", "local", "--step", "0")
    return CliRunner().invoke(main, ["compare", *map(str, (*directories, *more))], catch_exceptions=False)


def test_the_three_modes_are_equal(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = compared(base, tmp_path, monkeypatch)
    assert done.exit_code == 0, done.output


def test_the_options_of_the_document_are_enough(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Note what the documented options leave out, and compare no sum with a mean."""
    monkeypatch.setattr("tests.modes.test_real_modes.SERVICE", "forward_data,loss,is_loss_debug")
    own = [f"debug.dump_options.{name}=true" for name in OWN[:4]]
    train(config(tmp_path / "self", *_of(base.model), *own), QUIET)
    done = compared(replace(base, self_hosted=tmp_path / "self" / "dump"), tmp_path, monkeypatch)
    assert done.exit_code == 0, done.output
    assert "\u2717" not in done.output


CUSTOM = ("algorithm.kl_coef=0.05", "algorithm.entropy_coef=0")


@pytest.fixture(scope="module")
def customized(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Base:
    """The same model, trained in this process with a loss that no wire names."""
    root = tmp_path_factory.mktemp("customized")
    options = [f"debug.dump_options.{name}=true" for name in OWN]
    train(config(root / "self", *_of(base.model), *options, *CUSTOM), QUIET)
    return replace(base, self_hosted=root / "self" / "dump")


def test_a_loss_that_the_client_computes_is_equal(
    customized: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = compared(customized, tmp_path, monkeypatch, *CUSTOM)
    assert done.exit_code == 0, done.output


class Shifted(LocalModel):
    """A client's custom loss whose weights begin with the first token, which nothing predicts."""

    def backward(self, data: Sequence[Datum], gradients: Any, config: Any) -> PassResult:
        return super().backward(data, [moved(values) for values in gradients], config)


class OtherSign(LocalModel):
    """A custom loss sent as that of the other protocol."""

    def backward(self, data: Sequence[Datum], gradients: Any, config: Any) -> PassResult:
        return super().backward(data, [-values for values in gradients], config)


@pytest.mark.extended
@pytest.mark.parametrize(("model", "rule"), [(OtherSign, "advantages-sign"), (Shifted, "advantages-shifted")])
def test_weights_of_a_custom_loss_are_judged(
    customized: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: type[LocalModel], rule: str
) -> None:
    done = compared(customized, tmp_path, monkeypatch, *CUSTOM, model=model)
    told = " ".join(done.output.split())
    assert done.exit_code == 1, done.output
    assert told.count("found: step") == 1, done.output
    assert "weights of log-probs of the service" in told
    assert f"(rule {rule};" in told
    assert "probably:" not in told


def test_several_updates_of_a_rollout_are_refused(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client and a service count updates, so that their step 1 would be compared with another rollout."""
    twice = ("trainer.mini_batch_size=8", "algorithm.entropy_coef=0")
    train(config(tmp_path / "self", *_of(base.model), "debug.dump_options.loss=true", *twice), QUIET)
    done = compared(replace(base, self_hosted=tmp_path / "self" / "dump"), tmp_path, monkeypatch, *twice)
    assert done.exit_code == 2
    assert "several optimizer updates in a rollout step" in " ".join(done.output.split())
    assert "trainer.epochs=1, trainer.mini_batch_size=null" in " ".join(done.output.split())


class WithoutMasks(LocalModel):
    """A wire without masks: advantages tell which tokens count."""

    def _pass(self, request: Any) -> PassResult:
        bare = [
            Datum(d.tokens, {n: v for n, v in d.inputs.items() if n != "loss_mask"}, d.id)
            for d in request.data
        ]
        return super()._pass(replace(request, data=bare))


@pytest.mark.extended
def test_a_wire_without_masks_is_equal(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = compared(base, tmp_path, monkeypatch, "algorithm.entropy_coef=0", model=WithoutMasks)
    told = " ".join(done.output.split())
    assert "has no loss mask" in told
    assert "✗ client and service" not in told
    assert "response_mask" not in "".join(line for line in done.output.splitlines() if line.startswith("✗"))


Change = Callable[[dict[str, Any]], dict[str, Any]]


def changed(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Let the client change the inputs of the loss before it dumps and sends them."""
    whole = microbatch_datums.datums_of

    def of(*arguments: Any) -> list[Datum]:
        return [Datum(d.tokens, change(dict(d.inputs)), d.id) for d in whole(*arguments)]

    monkeypatch.setattr("regress.service.client.remote_policy.datums_of", of)


def moved(values: Any) -> Any:
    return np.concatenate([values[:1] * 0, values[:-1]])


def log_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, lambda i: {**i, "logprobs": moved(i["logprobs"])} if "logprobs" in i else i)


def mask(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("loss_mask", "advantages")
    changed(monkeypatch, lambda i: {**i, **{name: moved(i[name]) for name in names if name in i}})


def entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_trainer, "entropy_coefficient", lambda *_: None)


def loss(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = remote_api_dumps.RemoteDumps.metrics

    def told(self: Any, step: int, update: int, result: PassResult, *rest: Any) -> None:
        known = {key: value for key, value in result.metrics.items() if key != "loss:sum"}
        whole(self, step, update, replace(result, metrics={**known, "loss": 0.0}), *rest)

    monkeypatch.setattr(remote_api_dumps.RemoteDumps, "metrics", told)


def nothing(monkeypatch: pytest.MonkeyPatch) -> None: ...


class WithoutDecay(LocalModel):
    """A client's combined call that drops the weight decay."""

    def optim_step(self, params: Any) -> Any:
        return super().optim_step(replace(params, weight_decay=0.0))


class WithoutClip(LocalModel):
    """A client's combined call that drops the clip."""

    def optim_step(self, params: Any) -> Any:
        return super().optim_step(replace(params, grad_clip_norm=0.0))


class Permuted(LocalModel):
    """Chunks that are executed as they arrive, the first last."""

    def forward_backward(self, data: Sequence[Datum], loss: str, config: Any) -> PassResult:
        size = -(-len(data) // 3)
        chunks = [data[at : at + size] for at in range(0, len(data), size)]
        results = [
            super(Permuted, self).forward_backward(chunk, loss, config) for chunk in (*chunks[1:], chunks[0])
        ]
        outputs = [one for result in (results[-1], *results[:-1]) for one in result.outputs]
        metrics = {
            key: sum(result.metrics[key] for result in results)
            for key in results[0].metrics
            if key.endswith(":sum")
        }
        return PassResult(outputs, metrics, tuple(d.id for d in data))


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], type[LocalModel], str, str]] = {
    "log-probs shifted": (log_probs, LocalModel, "", "log-probs-shifted"),
    "mask shifted": (mask, LocalModel, "", "mask-shifted"),
    "ddof": (nothing, LocalModel, "algorithm.ddof=0", "deviation-ddof"),
    "entropy coefficient": (entropy, LocalModel, "", "entropy-coefficient-lost"),
    "weight decay": (nothing, WithoutDecay, "", "weight-decay-lost"),
    "clip": (nothing, WithoutClip, "", "clipping-lost"),
    "chunks": (nothing, Permuted, "", "chunks-permuted"),
    "loss of zero": (loss, LocalModel, "", "loss-reported-as-zero"),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_client_or_service_is_found(
    name: str, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, model, override, rule = FAULTS[name]
    plant(monkeypatch)
    done = compared(base, tmp_path, monkeypatch, *filter(None, [override]), model=model)
    told = " ".join(done.output.split())
    assert done.exit_code == 1, done.output
    assert f"(rule {rule};" in told, done.output
    assert told.count("found: step") == 1, done.output
