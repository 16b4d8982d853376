"""Training on several ranks: the same model as in one process, however it is split, and one error where one fails."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from regress.dump.dump_reader import DumpReader
from regress.dump.metrics_file import metrics_of, read_metrics
from regress.layout import DIMENSIONS
from regress.parallel.launch.rank_pool import RankPool

SMALL = (  # ten samples a step
    "task.train_size=12",
    "task.eval_size=3",
    "data.prompts_per_step=2",
    "data.group_size=5",
    "task.rewards={exact_match: 1.0, character_match: 1.0}",
    "optimizer.learning_rate=3e-3",
)

EVERYTHING = (
    *SMALL,
    "max_steps=2",
    "model.dtype=float64",
    "warm_start.steps=2",
    "warm_start.batch_size=8",
    "trainer.epochs=2",
    "trainer.mini_batch_size=5",
    "batching.micro_batch_size=2",
    "algorithm.kl_coef=0.05",
    "algorithm.entropy_coef=0.01",
    "reference.sync_every_n_steps=1",
    "reference.mixup_alpha=0.3",
    "optimizer.max_grad_norm=0.05",
    "optimizer.weight_decay=0.01",
    "optimizer.eps=1e-6",
)
"""Eight updates in mini-batches of five samples, which no even number of ranks shares equally."""

WIDTHS = "model.config={hidden_size: 32, intermediate_size: 64}"
MODELS = {
    "dense": (WIDTHS,),
    "tied": (WIDTHS, "model.tie_word_embeddings=true"),
    "moe": ("model.config={hidden_size: 32, moe_intermediate_size: 32}", "model.family=qwen3_moe"),
    "gspo": (
        WIDTHS,
        "algorithm.importance_level=sequence",
        *("algorithm.clip_low=0.02", "algorithm.clip_high=0.02"),
    ),
}

CHECKPOINTING = "model.gradient_checkpointing=true"  # computes the same, in another order
ZBV = "pp=2 pp_schedule=zbv_zero_bubble pp_stages_per_rank=2"

LAYOUTS = {
    "dp2": ("dense", "dp=2", "model.compile=eager"),
    "dp4": ("dense", "dp=4"),  # one of four ranks has no sample
    "ddp2": ("dense", "dp=2 data_parallel=ddp", CHECKPOINTING),
    "accelerate2": ("dense", "dp=2 data_parallel=accelerate"),
    "fsdp2": ("dense", "fsdp=2", CHECKPOINTING),
    "hsdp": ("dense", "dp=2 fsdp=2 data_parallel=hsdp"),
    "tp2": ("dense", "tp=2", "optimizer.implementation=foreach"),
    "tp2-sp": ("dense", "tp=2 sequence_parallel=true", "optimizer.implementation=fused", CHECKPOINTING),
    "pp2": ("dense", "pp=2"),
    "pp2-1f1b": ("dense", "pp=2 pp_schedule=1f1b", "batching.micro_batch_size=1"),
    "pp2-zbv": ("dense", ZBV, CHECKPOINTING),
    "pp2-fsdp2": ("dense", "pp=2 fsdp=2"),
    "dp2-tp2": ("dense", "dp=2 tp=2"),
    "cp2": ("dense", "cp=2"),
    "cp2-ring": ("dense", "cp=2 cp_method=ring cp_split=zigzag", CHECKPOINTING),
    "tied-tp2": ("tied", "tp=2", "optimizer.implementation=fused"),
    "tied-pp2": ("tied", "pp=2"),
    "tied-pp2-zbv": ("tied", ZBV),
    "ep2": ("moe", "ep=2", CHECKPOINTING),
    "gspo-cp2": ("gspo", "cp=2"),
    "gspo-cp2-ring": ("gspo", "cp=2 cp_method=ring cp_split=zigzag"),
}
"""Name -> model, section ``parallel``, and what else may differ without another result."""

LAUNCHER = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_DYNAMO_BACKEND": "EAGER",
}
"""Settings that a configuration file of accelerate may hold, and a run must not follow."""


@pytest.fixture(scope="module")
def targets() -> Iterator[Any]:
    """The module of targets, importable as a user's is."""
    folder = str(Path(__file__).parent)
    sys.path.insert(0, folder)
    try:
        import training_ranks

        yield training_ranks
    finally:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


def parallel(text: str) -> list[str]:
    return [f"parallel.{part}" for part in text.split()]


def ranks(overrides: Sequence[str]) -> int:
    given = dict(part.split("=", 1) for part in overrides)
    return math.prod(int(given.get(f"parallel.{name}", 1)) for name in DIMENSIONS)


@pytest.fixture(scope="module")
def alone(pool: RankPool, targets: Any, folder: Path) -> Callable[[str], tuple[list[str], Path]]:
    """``alone(model)``: the overrides of a run on recorded rollouts, and what one process has made of it."""
    known: dict[str, tuple[list[str], Path]] = {}

    def run(model: str) -> tuple[list[str], Path]:
        if model not in known:
            base, home = [*EVERYTHING, *MODELS[model]], folder / model
            dump = (
                *("debug.enable_data_dump=true", "debug.dump_options.trajectory=true"),
                f"debug.dump_dir={home / 'dump'}",
            )
            pool.run(targets.trained, {"folder": home / "recorded", "overrides": [*base, *dump]}, 1)
            mock = [
                *(*base, "rollout_worker.type=mock", "rollout_worker.need_llm_inference=false"),
                f"rollout_worker.trajectory_load_path={home / 'dump'}",
            ]
            pool.run(targets.trained, {"folder": home / "one", "overrides": mock}, 1)
            known[model] = mock, home / "one" / "rank0"
        return known[model]

    return run


def weights(run: Path) -> dict[str, Any]:
    return load_file(run / "final" / "model.safetensors")


def metrics(run: Path) -> list[dict[str, float]]:
    """Metrics of each step and update, without those that tell of the layout itself."""
    rows = [metrics_of(row) for row in read_metrics(run / "metrics.jsonl")]
    return [
        {name: value for name, value in row.items() if not name.startswith(("ddp/", "accelerate/"))}
        for row in rows
    ]


def updates(run: Path) -> list[dict[str, float]]:
    return [row for row in metrics(run) if "training_step/loss" in row]


@pytest.mark.extended
def test_the_run_that_is_compared_with_clips_and_leaves_its_reference(
    alone: Callable[[str], tuple[list[str], Path]],
) -> None:
    rows = updates(alone("dense")[1])
    assert max(row["training_step/grad_norm"] for row in rows) > 0.05
    assert any(row["training_step/clip_ratio/low"] + row["training_step/clip_ratio/high"] for row in rows)
    assert max(row["training_step/kl"] for row in rows) > 1e-3


@pytest.mark.parametrize(
    "name",
    [name if name == "pp2-fsdp2" else pytest.param(name, marks=pytest.mark.extended) for name in LAYOUTS],
)
def test_a_split_run_makes_the_same_model(
    pool: RankPool,
    targets: Any,
    folder: Path,
    alone: Callable[[str], tuple[list[str], Path]],
    name: str,
) -> None:
    model, split, *others = LAYOUTS[name]
    overrides, one = alone(model)
    asked = [*overrides, *parallel(split), *others]
    environment = LAUNCHER if name == "accelerate2" else {}
    arguments = {"folder": folder / name, "overrides": asked, "environment": environment}
    found = pool.run(targets.trained, arguments, ranks(asked), timeout=120)

    assert [path.name for path in (folder / name).iterdir()] == ["rank0"]  # the others write nothing
    expected, actual = weights(one), weights(folder / name / "rank0")
    assert actual.keys() == expected.keys()
    for key, truth in expected.items():
        np.testing.assert_allclose(actual[key], truth, rtol=0, atol=1e-12 * np.abs(truth).max(), err_msg=key)
    for ours, theirs in zip(metrics(folder / name / "rank0"), metrics(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-13)
    assert all(rank["metrics"] == found[0]["metrics"] for rank in found)


SAMPLING = (
    *SMALL,
    "max_steps=3",
    "model.dtype=float64",
    "rollout_worker.batch_size=2",
    "algorithm.old_log_probs=sampler",
    "task.environment=checker",
    "task.max_turns=2",
    "evaluation.every_n_steps=2",
)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("model", "split"),
    [
        ("dense", "dp=2"),
        ("dense", "dp=2 tp=2"),  # more ranks than prompts
        ("dense", "fsdp=2"),
        ("tied", ZBV),
        ("dense", "cp=2"),
        ("moe", "ep=2"),
    ],
)
def test_ranks_sample_what_one_process_would_from_the_policy_as_it_is(
    pool: RankPool, targets: Any, tmp_path: Path, model: str, split: str
) -> None:
    """Other ranks and another batch size, the same tokens: a draw belongs to its sample."""
    overrides = [*SAMPLING, *MODELS[model], *parallel(split)]
    found = pool.run(targets.sampled, {"folder": tmp_path, "overrides": overrides}, ranks(overrides))
    marks = [mark for rank in found for mark in rank["marks"]]
    assert len(marks) == len(set(marks)), "two samples or turns draw the same numbers, or one is drawn twice"
    alone = [*SAMPLING, *MODELS[model], "rollout_worker.batch_size=3"]
    (one,) = pool.run(targets.sampled, {"folder": tmp_path / "alone", "overrides": alone}, 1)
    assert set(marks) == set(one["marks"])
    assert found[0]["rollouts"] == one["rollouts"]
    first, *others = (rank["rollouts"] for rank in found)
    assert [len(step) for step in first] == [10, 10, 10]
    assert all(other == first for other in others)
    for step in updates(tmp_path / "rank0"):
        assert step["training_step/ratio/min"] == pytest.approx(1, abs=1e-5)
        assert step["training_step/ratio/max"] == pytest.approx(1, abs=1e-5)
    assert all(rank["pass_rates"] == found[0]["pass_rates"] for rank in found)
    assert found[0]["pass_rates"].keys() == {0, 2, 3}
    assert found[0]["said"].count("pass rate") == 3
    assert all(rank["said"] == "" for rank in found[1:])


@pytest.mark.extended
def test_all_ranks_are_in_the_stage_of_one_process(pool: RankPool, targets: Any, tmp_path: Path) -> None:
    """A rank that counted evaluations by itself, or missed one, would sample from another stage."""
    stages = (
        "[{name: short, levels: [basic], threshold: 0.01}, {name: long, levels: [advanced], threshold: 1.0}]"
    )
    overrides = [
        *(
            *SAMPLING,
            *MODELS["dense"],
            "task.max_turns=1",
            "task.environment=null",
            "evaluation.every_n_steps=1",
        ),
        *("curriculum.enable=true", f"curriculum.stages={stages}", "curriculum.min_evaluations=1"),
        *("curriculum.full_pass=false", "task.train_size=24", "task.eval_size=16", "warm_start.steps=80"),
        *("warm_start.batch_size=24", "task.params={alphabet: ab}"),
    ]
    (one,) = pool.run(targets.sampled, {"folder": tmp_path / "one", "overrides": overrides}, 1)
    two = pool.run(
        targets.sampled, {"folder": tmp_path / "two", "overrides": [*overrides, "parallel.dp=2"]}, 2
    )
    assert all(rank["rollouts"] == one["rollouts"] for rank in two)
    states = [(tmp_path / name / "rank0" / "curriculum_state.json").read_text() for name in ("one", "two")]
    assert states[0] == states[1]
    assert json.loads(states[0])["current_stage"] == 1
    assert not (tmp_path / "two" / "rank1").exists()


def test_old_weights_would_show(pool: RankPool, targets: Any, tmp_path: Path) -> None:
    overrides = [*SAMPLING, *MODELS["dense"], "parallel.dp=2"]
    pool.run(targets.sampled, {"folder": tmp_path, "overrides": overrides, "stale": True}, 2)
    last = updates(tmp_path / "rank0")[-1]
    assert abs(last["training_step/ratio/max"] - 1) > 1e-3


DUMPED = ("debug.enable_data_dump=true", "debug.dump_options.loss=true", "debug.dump_options.gradient=true")


NO_LOSS = "has no loss, so no update was made: log_probs_K is nan at token 0"

FAILURES: Sequence[tuple[str, int, str, Sequence[str], str]] = (
    ("loss", 1, "dp=2", (), NO_LOSS),
    ("dump", 1, "dp=2", DUMPED, "the disk of this rank is full"),
    ("model", 1, "dp=2", (), "no checkpoint on this machine"),
)
MORE_FAILURES: Sequence[tuple[str, int, str, Sequence[str], str]] = (
    ("publishing", 0, "dp=2", (), "cannot be written (No space left on device)"),
    ("unforeseen", 1, "dp=2", (), "nobody thought of this"),
    ("loss", 0, "fsdp=2", (), NO_LOSS),
    ("loss", 1, "tp=2", (), NO_LOSS),
    ("loss", 1, "pp=2", ("batching.micro_batch_size=5",), "has no loss, so no update was made"),
    ("loss", 1, "cp=2", ("algorithm.importance_level=sequence",), "has no loss, so no update was made"),
    ("sampling", 1, "dp=2", (), "nothing can be sampled for group '000000-0001' run 0 in train step 0"),
    ("dump", 0, "fsdp=2", DUMPED, "the disk of this rank is full"),
    ("metrics", 0, "dp=2", (), "metrics cannot be written"),
    ("checkpoint", 0, "dp=2", ("trainer.save_steps=1",), "earlier checkpoints are as they were"),
)


@pytest.mark.parametrize(
    ("fault", "culprit", "split", "more", "says"),
    [*FAILURES, *(pytest.param(*case, marks=pytest.mark.extended) for case in MORE_FAILURES)],
)
def test_one_rank_that_fails_ends_all_with_its_error(
    pool: RankPool,
    targets: Any,
    tmp_path: Path,
    fault: str,
    culprit: int,
    split: str,
    more: Sequence[str],
    says: str,
) -> None:
    overrides = [*SMALL, *MODELS["dense"], "max_steps=2", *parallel(split), *more]
    if more is DUMPED:
        overrides.append(f"debug.dump_dir={tmp_path / 'dump'}")
    arguments = {"folder": tmp_path / "run", "overrides": overrides, "fault": fault, "culprit": culprit}
    patience = 3.0 if fault == "unforeseen" else 60.0  # the others wait for it until then
    found = pool.run(targets.failing, arguments, 2, timeout=90, patience=patience)
    assert says in found[culprit][1]
    assert found[1 - culprit] == found[culprit]
    assert not (tmp_path / "run" / "rank0" / "final").exists()
    assert not (tmp_path / "dump" / "manifest.json").exists()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("culprit", "split"), [(1, "dp=2"), (0, "dp=2 data_parallel=ddp"), (1, "fsdp=2"), (0, "tp=2")]
)
def test_an_update_that_one_rank_cannot_make_is_left_out_by_all(
    pool: RankPool, targets: Any, tmp_path: Path, culprit: int, split: str
) -> None:
    """The first of two updates a step is lost; a rank that went on alone would wait for the others, or differ."""
    base = (*SMALL, *MODELS["dense"], "max_steps=2", "model.dtype=float64", "optimizer.eps=1e-6")
    overrides = [*base, "trainer.epochs=2", *parallel(split)]
    arguments = {"folder": tmp_path / "two", "overrides": overrides, "culprit": culprit}
    found = pool.run(targets.skipping, arguments, 2, timeout=120)
    alone = {"folder": tmp_path / "one", "overrides": [*base, "trainer.epochs=2"], "culprit": 0}
    pool.run(targets.skipping, alone, 1)

    rows, expected = metrics(tmp_path / "two" / "rank0"), metrics(tmp_path / "one" / "rank0")
    assert [row["training/invalid_loss_count"] for row in rows if "training/invalid_loss_count" in row] == [
        1,
        0,
    ]
    for name in ("training_step/loss", "training_step/grad_norm"):
        (lost, *ours), (also, *theirs) = (
            [row[name] for row in table if name in row] for table in (rows, expected)
        )
        assert lost is also is None
        assert ours == pytest.approx(theirs, rel=1e-10)
    assert found[0]["metrics"] == found[1]["metrics"]
    truth = weights(tmp_path / "one" / "rank0")
    for key, actual in weights(tmp_path / "two" / "rank0").items():
        np.testing.assert_allclose(actual, truth[key], rtol=0, atol=1e-12 * np.abs(truth[key]).max())


def test_accelerate_is_not_asked_for_two_engines(pool: RankPool, targets: Any, tmp_path: Path) -> None:
    overrides = [*SMALL, *MODELS["dense"], "max_steps=1", *parallel("dp=2 data_parallel=accelerate")]
    environment = {"ACCELERATE_USE_FSDP": "true"}
    arguments = {"folder": tmp_path, "overrides": overrides, "environment": environment}
    with pytest.raises(Exception, match=r"asks for another engine \(ACCELERATE_USE_FSDP=true\); start it"):
        pool.run(targets.trained, arguments, 2)


def test_a_stage_without_what_is_dumped_records_the_rest(
    pool: RankPool, targets: Any, tmp_path: Path
) -> None:
    wanted = ("param", "gradient", "optimizer", "activations")
    overrides = [
        *(*SMALL, *MODELS["dense"], "max_steps=1", "parallel.pp=2", "debug.enable_data_dump=true"),
        *(f"debug.dump_options.{name}=true" for name in wanted),
        *("debug.target_param_pattern=lm_head", "debug.target_module_pattern=lm_head"),
        f"debug.dump_dir={tmp_path / 'dump'}",
    ]
    pool.run(targets.trained, {"folder": tmp_path / "run", "overrides": overrides}, 2)
    dump = DumpReader(tmp_path / "dump")
    records = [record for record in dump.records() if record.type in wanted]
    found = {(record.type, record.where.rank): set(record.tensors) for record in records}
    for name in wanted:
        assert found.get((name, 0), set()) == set()
        assert found[name, 1]


def test_no_step_at_all(pool: RankPool, targets: Any, tmp_path: Path) -> None:
    overrides = [*SMALL, *MODELS["dense"], "max_steps=0", "parallel.dp=2", "evaluation.every_n_steps=1"]
    found = pool.run(targets.trained, {"folder": tmp_path, "overrides": overrides}, 2)
    assert found[0]["pass_rates"].keys() == found[1]["pass_rates"].keys() == {0}
    assert (tmp_path / "rank0" / "final" / "model.safetensors").is_file()
