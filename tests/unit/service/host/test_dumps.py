"""Dumps of a host: documented names and keys, readable, and an index that tells what lies where."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_requests import ADAM, datums, held, offer, ratio_pass, same

from regress.dump.dump_reader import read
from regress.dump.request_index import INDEX, Part, read_requests
from regress.engine.engine_ranks import SingleProcess
from regress.errors import ConfigError
from regress.interop.service_dumps import ServiceDump
from regress.service.host.engine_host import EngineHost
from regress.service.host.request_dumps import DumpSettings
from regress.service.service_api import ModelSpec, PassRequest, SaveKind, ServiceError

EVERYTHING = "forward_data,loss,is_loss_debug,batch_inputs,param,gradient"


def hosted(tmp_path: Path, *, models: int = 1, **environ: str) -> EngineHost:
    """Return a host that dumps everything at every step into ``dump``, unless told otherwise."""
    variables: Mapping[str, str] = {
        "WEAVER_DEBUG_DUMP_ENABLED": "1",
        "WEAVER_DEBUG_DUMP_DIR": str(tmp_path / "dump"),
        "WEAVER_DEBUG_DUMP_OPTIONS": EVERYTHING,
        **environ,
    }
    host = EngineHost({"tiny": offer()}, SingleProcess(), tmp_path / "service", environ=variables)
    for number in range(models):
        host.create(f"s:train:{number}", ModelSpec("tiny"))
    return host


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def where(seq_id: int) -> dict[str, Any]:
    return {"seq_id": seq_id, "request_id": f"r{seq_id}"}


def test_files_have_the_documented_names_and_keys(tmp_path: Path) -> None:
    host, dump = hosted(tmp_path), tmp_path / "dump"
    done = host.run_pass("s:train:0", ratio_pass([9, 5]), where(1))
    host.run_pass("s:train:0", ratio_pass([7], seed=1), where(2))
    host.optim_step("s:train:0", ADAM, where(3))
    tokenwise = "batch_inputs", "forward_data", "is_loss_debug", "loss"
    expected = [f"{name}/step_000000_rank0_micro{micro}.pt" for name in tokenwise for micro in range(3)]
    whole = [f"{name}/step_000000_rank0.pt" for name in ("gradient", "param")]
    assert files(dump) == sorted([*expected, *whole, INDEX])
    debug = read(dump / "is_loss_debug/step_000000_rank0_micro1.pt")
    wanted = {"log_probs", "old_log_probs", "advantages", "prob_ratio", "elementwise_loss", "effective_valid"}
    assert wanted <= debug.tensors.keys()
    assert debug.meta["samples"] == [["request 1", 1]]
    assert (debug.tensors["log_probs"][0, 1:] == done.outputs[1]["logprobs"]).all()
    datum = datums([9, 5])[1]
    assert (debug.tensors["effective_valid"][0, 1:] == datum.inputs["loss_mask"]).all()
    assert (debug.tensors["advantages"][0, 1:] == datum.inputs["advantages"]).all()
    stored = torch.load(dump / "loss/step_000000_rank0_micro2.pt", weights_only=True)
    assert isinstance(stored, dict)
    gradient = read(dump / "gradient/step_000000_rank0.pt")
    assert gradient.tensors.keys() == dict(host._models["s:train:0"].policy.named_parameters()).keys()
    norm = np.sqrt(sum((value.astype(np.float64) ** 2).sum() for value in gradient.tensors.values()))
    assert norm == pytest.approx(gradient.meta["grad_norm"], rel=1e-5)


def test_the_index_tells_what_lies_where(tmp_path: Path) -> None:
    host, dump = hosted(tmp_path), tmp_path / "dump"
    model_id = "s:train:0"
    host.run_pass(model_id, PassRequest(datums([4]), "forward_logprob", forward_only=True), where(1))
    request = ratio_pass([9, 5], loss="ppo", clip_high_threshold=1.5, entropy_coeff=0.25)
    done = host.run_pass(model_id, request, where(2))
    step = host.optim_step(model_id, ADAM, where(3))
    forward, backward, update = read_requests(dump)
    assert (forward.operation, forward.folder) == ("forward", "forward_only")
    assert forward.parts == (Part(0, 0, (0,)),)
    assert (dump / "forward_only/forward_data/step_000000_rank0_micro0.pt").is_file()
    assert backward.parts == (Part(0, 0, (0,)), Part(0, 1, (1,)))
    assert (backward.seq_id, backward.request_id, backward.step) == (2, "r2", 0)
    assert backward.config == {
        "entropy_coeff": 0.25,
        "clip_low_threshold": 0.8,
        "clip_high_threshold": 1.5,
    }
    assert backward.metrics == dict(done.metrics)
    tokens = [*request.data[1].tokens.tolist(), int(request.data[1].inputs["target_tokens"][-1])]
    assert list(backward.datums[1].tokens) == tokens
    assert update.types == ("param", "gradient")
    assert update.adam == {name: float(value) for name, value in vars(ADAM).items()}
    assert update.metrics["grad_norm"] == step.grad_norm


def test_the_reader_of_service_dumps_finds_everything(tmp_path: Path) -> None:
    host, dump = hosted(tmp_path, models=2), tmp_path / "dump"
    for step in range(2):
        host.run_pass("s:train:0", PassRequest(datums([4]), "forward_logprob", forward_only=True), where(1))
        host.run_pass("s:train:0", ratio_pass([9, 5]), where(3 * step + 1))
        host.run_pass("s:train:0", ratio_pass([7], loss="ppo"), where(3 * step + 2))
        host.optim_step("s:train:0", ADAM, where(3 * step + 3))
        host.run_pass("s:train:1", ratio_pass([3]), where(step + 1))
    found = ServiceDump(dump)
    assert [found.missing(step) for step in range(2)] == [[], []]
    read_all = [found.read(name) for name in found.entries]
    assert len(read_all) == 2 * (3 * 4 + 2)
    (dump / "loss/step_000001_rank0_micro2.pt").unlink()
    assert ServiceDump(dump).missing(1) == ["loss/step_000001_rank0_micro2"]


def test_a_failed_request_is_not_in_the_dump(tmp_path: Path) -> None:
    host, dump = hosted(tmp_path), tmp_path / "dump"
    host.run_pass("s:train:0", ratio_pass([9]), where(1))
    before = files(dump)
    broken = datums([5, 7])
    inputs = {**broken[1].inputs, "logprobs": np.full(7, -1e30, dtype=np.float32)}
    broken[1] = type(broken[1])(broken[1].tokens, inputs)
    with pytest.raises(ServiceError):
        host.run_pass("s:train:0", PassRequest(broken, "importance_sampling"), where(2))
    assert files(dump) == before
    host.run_pass("s:train:0", ratio_pass([4]), where(3))
    assert [line.parts[0].micro for line in read_requests(dump)] == [0, 1]


def test_a_dump_that_cannot_be_written_fails_the_request_and_changes_nothing(tmp_path: Path) -> None:
    host, dump = hosted(tmp_path), tmp_path / "dump"
    host.run_pass("s:train:0", ratio_pass([9]), where(1))
    before = held(host, "s:train:0")
    (dump / "loss").rename(dump / "other")
    (dump / "loss").write_text("a file in the place of the folder")
    with pytest.raises(ServiceError, match="cannot be written") as caught:
        host.run_pass("s:train:0", ratio_pass([9], seed=1), where(2))
    assert (caught.value.code, caught.value.category) == ("dump_failed", "server")
    assert same(held(host, "s:train:0"), before)
    assert len(read_requests(dump)) == 1


def test_a_request_may_ask_for_its_dump(tmp_path: Path) -> None:
    host = hosted(tmp_path, WEAVER_DEBUG_DUMP_ENABLED="")
    host.run_pass("s:train:0", ratio_pass([9]), where(1))
    assert not (tmp_path / "dump").exists()
    host.run_pass("s:train:0", ratio_pass([9], enable_debug_dump=True), where(2))
    host.optim_step("s:train:0", ADAM, where(3))
    host.run_pass("s:train:0", ratio_pass([9], enable_debug_dump=False), where(4))
    asked, update, last = read_requests(tmp_path / "dump")
    assert asked.parts == (Part(0, 1, (0,)),)  # the first request has the microbatch 0
    assert "is_loss_debug" in asked.types
    assert update.types == ("param", "gradient")
    assert last.types == ()


@pytest.mark.extended
def test_only_every_n_th_step_is_recorded(tmp_path: Path) -> None:
    host = hosted(tmp_path, WEAVER_DEBUG_DUMP_EVERY_N="2", WEAVER_DEBUG_DUMP_OPTIONS="loss")
    for step in range(3):
        host.run_pass("s:train:0", ratio_pass([9]), where(2 * step + 1))
        host.optim_step("s:train:0", ADAM, where(2 * step + 2))
    names = [f"loss/step_{step:06d}_rank0_micro0.pt" for step in (0, 2)]
    assert files(tmp_path / "dump") == [*names, INDEX]
    assert [line.step for line in read_requests(tmp_path / "dump")] == [0, 0, 1, 1, 2, 2]


@pytest.mark.extended
def test_a_second_model_has_a_dump_of_its_own(tmp_path: Path) -> None:
    host, dump = hosted(tmp_path, models=2), tmp_path / "dump"
    for number in (1, 0):
        host.run_pass(f"s:train:{number}", ratio_pass([9]), where(1))
    assert [line.model_id for line in read_requests(dump)] == ["s:train:1"]
    assert [line.model_id for line in read_requests(dump / "s_train_0")] == ["s:train:0"]


def test_a_model_that_goes_back_takes_its_dump_along(tmp_path: Path) -> None:
    host, dump = hosted(tmp_path), tmp_path / "dump"
    for step in range(2):
        host.run_pass("s:train:0", ratio_pass([9]), where(2 * step + 1))
        host.optim_step("s:train:0", ADAM, where(2 * step + 2))
        host.save("s:train:0", str(tmp_path / f"save{step}"), SaveKind.STATE)
    host.load("s:train:0", str(tmp_path / "save0"), optimizer=True)
    assert [line.seq_id for line in read_requests(dump)] == [1, 2]
    again = hosted(tmp_path, models=0)  # a service that starts anew goes on with the dump
    again.create_from("s:train:0", str(tmp_path / "save0"), optimizer=True)
    again.run_pass("s:train:0", ratio_pass([9]), where(9))
    assert [line.seq_id for line in read_requests(dump)] == [1, 2, 9]


@pytest.mark.parametrize(
    ("name", "value"), [("ENABLED", "maybe"), ("EVERY_N", "0"), ("OPTIONS", "loss,weights"), ("EVERY_N", "x")]
)
def test_a_variable_that_says_nothing_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"WEAVER_DEBUG_DUMP_{name}"):
        DumpSettings.of({f"WEAVER_DEBUG_DUMP_{name}": value}, Path("dump"))
