"""Token gradients of the released TRL, recorded from outside, against TRL's own derivatives; and what they explain.

`GRPOTrainer` is unmodified but for its sampling; its own d loss / d log-prob is read with a hook on the log-probs that
it computes. What is recorded knows nothing of them: it comes from the gradient of the last hidden states.
"""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_world import GROUP_SIZE, MAX_COMPLETION_LENGTH, Sample, World
from test_trl import Case, make_trainer
from torch import Tensor

from regress import explain_dump
from regress.capture.recording import record
from regress.dump.dump_reader import DumpReader
from regress.dump.record import Record
from regress.dump.recorder import Recorder
from regress.dump.taps import recording
from regress.dump.trajectory import Trajectory, to_record
from regress.explain.statement import Explanation

pytestmark = pytest.mark.filterwarnings("ignore")

AGGREGATIONS = {
    "grpo": "seq-mean-token-mean/microbatch",
    "sapo": "seq-mean-token-mean/microbatch",
    "bnpo": "token-mean/microbatch",
    "dr_grpo": "seq-mean-token-sum-norm/microbatch",
    "luspo": "seq-mean-token-sum/microbatch",
    "dapo": "token-mean/global",
    "cispo": "token-mean/global",
    "vespo": "token-mean/global",
}
DIVIDED = {
    "group": "divided by the standard deviation of the group (sample deviation)",
    "batch": "divided by the standard deviation of the batch (sample deviation)",
    "none": "not divided",
}


@dataclass(frozen=True)
class Setting:
    """One configuration of `GRPOTrainer`."""

    loss_type: str
    accumulation: int = 1
    temperature: float = 1.0
    beta: float = 0.0
    scale: str = "group"
    entropy: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        parts = [self.loss_type, f"x{self.accumulation}", f"t{self.temperature}", self.scale]
        parts += [f"kl{self.beta}"] * bool(self.beta) + [f"entropy{self.entropy}"] * bool(self.entropy)
        return "-".join([*parts, *self.more])

    @property
    def case(self) -> Case:
        trl = {
            "loss_type": self.loss_type,
            "scale_rewards": self.scale,
            "beta": self.beta,
            "entropy_coef": self.entropy,
            **self.more,
        }
        return Case(
            "trl:dapo", self.id, accumulation=self.accumulation, temperature=self.temperature, trl=trl
        )


def settings() -> list[Setting]:
    found = []
    for number, (loss_type, accumulation) in enumerate((t, a) for t in AGGREGATIONS for a in (1, 2, 4)):
        found.append(
            Setting(
                loss_type,
                accumulation,
                (1.0, 0.7, 1.3)[number % 3],
                (0.0, 0.05)[number % 2],
                ("group", "batch", "none")[(number + number // 3) % 3],
                # its default, 0.2, is a cap of the ratio there, and scales all gradients down
                more={"epsilon_high": 5.0} if loss_type == "cispo" else {},
            )
        )
    found += [
        Setting("dapo", 2, 1.0, 0.05, entropy=0.05),
        Setting("grpo", 4, 0.7, 0.0, entropy=0.02),
        Setting("dapo", 2, 1.3, 0.05, more={"gradient_checkpointing": True}),
        Setting("bnpo", 2, 0.7, more={"dtype": "float32"}),
    ]
    return found


BY_DEFAULT = {"dapo-x2-t1.0-group-kl0.05-entropy0.05"}
SETTINGS = [
    pytest.param(s, id=s.id, marks=() if s.id in BY_DEFAULT else pytest.mark.extended) for s in settings()
]


@dataclass
class Own:
    """TRL's own derivatives of one microbatch, ``[B, completion]``."""

    log_probs: Tensor | None = None
    entropies: Tensor | None = None
    prompt: int = 0


def listen(trainer: Any) -> list[Own]:
    """Listen to the derivatives of a trainer by the log-probs that it computes."""
    own: list[Own] = []
    compute = trainer._get_per_token_logps_and_entropies

    def listening(model: Any, input_ids: Tensor, mask: Tensor, keep: int, *args: Any, **kwargs: Any) -> Any:
        out = compute(model, input_ids, mask, keep, *args, **kwargs)
        if out[0].requires_grad:
            found = Own(prompt=input_ids.shape[1] - keep)
            out[0].register_hook(lambda grad: setattr(found, "log_probs", grad.clone()))
            if out[1] is not None and out[1].requires_grad:
                out[1].register_hook(lambda grad: setattr(found, "entropies", grad.clone()))
            own.append(found)
        return out

    trainer._get_per_token_logps_and_entropies = listening
    return own


def recorded(world: World, samples: list[Sample], folder: Path, setting: Setting) -> tuple[Path, list[Own]]:
    """Record one accumulated step of the trainer, and listen to its own derivatives."""
    more = {key: value for key, value in setting.more.items() if key != "dtype"}
    case = Setting(**{**vars(setting), "more": more}).case
    trainer = make_trainer(world, samples, folder / "trainer", case)
    trainer.model.load_state_dict(world.old.state_dict())
    if setting.more.get("dtype") == "float32":
        trainer.model.float()
    own = listen(trainer)
    trainer.model.train()
    prompts = [{"prompt": f"w{2 + sample.group}"} for sample in samples]
    path = folder / "dump"
    trainer.model.zero_grad()
    given = {"temperature": setting.temperature} if setting.temperature != 1.0 else {}
    with record(path, trainer.model, token_gradient=True, **given) as recorder:
        recorder.put(to_record(trajectories(samples), 0))
        for _ in range(setting.accumulation):
            trainer.training_step(trainer.model, prompts, None)
    return (with_reference(path, trainer._buffered_inputs) if setting.beta else path), own


def with_reference(path: Path, buffered: list[dict[str, Tensor]]) -> Path:
    """The dump with the log-probs of TRL's reference model, as a trainer that taps them would have it."""
    reader = DumpReader(path)
    whole = path.with_name("with_reference")
    with recording(
        Recorder(whole, options=dict.fromkeys({e.type for e in reader.manifest.files.values()}, True))
    ) as out:
        for told in reader:
            out.put(told)
            if told.type == "token_gradient":
                reference = buffered[told.micro or 0]["ref_per_token_logps"]
                values = torch.zeros(told.tensors["token_gradient"].shape, dtype=reference.dtype)
                values[:, -reference.shape[1] :] = reference
                meta = {key: told.meta[key] for key in ("layout", "samples")}
                out.put(Record.of("is_loss_debug", told.where, {"ref_log_probs": values}, meta))
    return whole


def trajectories(samples: list[Sample]) -> list[Trajectory]:
    return [
        Trajectory(
            f"g{sample.group}",
            number % GROUP_SIZE,
            [*sample.prompt, *sample.completion],
            [0] * len(sample.prompt) + list(sample.model_tokens),
            sample.reward,
            len(sample.prompt),
        )
        for number, sample in enumerate(samples)
    ]


@pytest.mark.parametrize("setting", SETTINGS)
def test_recorded_token_gradients_are_those_of_the_trainer(
    world: World, tmp_path: Path, setting: Setting
) -> None:
    path, own = recorded(world, world.plain, tmp_path, setting)
    records = list(DumpReader(path).records("token_gradient"))
    assert len(records) == len(own) == setting.accumulation
    largest = max(float(found.log_probs.abs().max()) for found in own if found.log_probs is not None)
    for found, told in zip(own, records, strict=True):
        assert found.log_probs is not None
        for name, mine in (("token_gradient", found.log_probs), ("entropy_gradient", found.entropies)):
            values = torch.from_numpy(told.tensors[name].astype("float64"))[:, found.prompt :]
            want = torch.zeros_like(values) if mine is None else mine.double()
            assert float((values - want).abs().max()) <= 1e-5 * largest, name
        assert bool(told.tensors["recoverable"].all())


def assert_true(found: Explanation, setting: Setting) -> None:
    """Everything that is said is what the setting says."""
    assert not found.departures, found.to_text()
    said = {statement.subject: statement for statement in found.statements}
    if "temperature" in said:
        assert said["temperature"].values[0] == pytest.approx(setting.temperature, rel=1e-3)
    truth = {
        "mask": "as expected",
        "aggregation": AGGREGATIONS[setting.loss_type],
        "advantages": f"reward minus the mean of the group, {DIVIDED[setting.scale]}",
        "kl": "k3 times the ratio" if setting.beta else "none",
        "entropy": f"token-mean/microbatch: {setting.entropy:.5g}" if setting.entropy else "none",
    }
    for subject, value in truth.items():
        if subject in said:
            assert value in said[subject].values, found.to_text()


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_objective_of_the_trainer_is_read_off(world: World, tmp_path: Path, setting: Setting) -> None:
    path, _ = recorded(world, world.plain, tmp_path, setting)
    found = explain_dump(path)
    assert_true(found, setting)
    for subject in ("temperature", "mask", "aggregation", "advantages"):
        assert found.about(subject) is not None, found.to_text()
    assert max(len(sample.completion) for sample in world.plain) < MAX_COMPLETION_LENGTH


@pytest.mark.extended
@pytest.mark.parametrize(("accumulation", "loss_type"), [(1, "dapo"), (2, "grpo"), (1, "bnpo")])
def test_two_ranks_under_ddp(tmp_path: Path, accumulation: int, loss_type: str) -> None:
    """TRL scales its loss by the ranks because DDP averages: divided out, the objective is that of one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = str(Path(__file__).with_name("trl_ranks.py"))
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(tmp_path), str(accumulation), loss_type],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output[-3000:]
    records = {
        (told.rank, told.micro): told for told in DumpReader(tmp_path / "dump").records("token_gradient")
    }
    assert len(records) == 2 * accumulation
    for rank in range(2):
        for micro, (prompt, mine) in enumerate(torch.load(tmp_path / f"own{rank}.pt")):
            told = records[rank, micro]
            assert told.meta["backward_scale"] == 2.0
            values = torch.from_numpy(told.tensors["token_gradient"].astype("float64"))[:, prompt:]
            assert float((values - mine.double() / 2).abs().max()) <= 1e-5 * float(mine.abs().max())
    setting = Setting(loss_type, accumulation)
    found = explain_dump(tmp_path / "dump")
    assert_true(found, setting)
    for subject in ("temperature", "mask", "aggregation", "advantages"):
        assert found.about(subject) is not None, found.to_text()
