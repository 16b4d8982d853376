"""Seeds of the fuzzing corpus: one small valid input of each kind that a reader reads.

They lie in ``corpus/`` as files, so that a change of a writer does not change what is mutated:
``python -m tests.fuzz.seeds [KIND...]`` writes those of some kinds anew. What they are is stated here alone.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from regress.dump.chunk_checksums import file_sums
from regress.dump.dump_files import write_atomically
from regress.dump.dump_manifest import Entry, Manifest, Provenance, write_manifest
from regress.dump.formats import FORMATS
from regress.dump.record import Record
from regress.dump.trajectory import Trajectory, to_record
from regress.layout import Segment, ShardLayout, TokenLayout

CORPUS = Path(__file__).parent / "corpus"
COLUMNS = 6
KEYS = (("g0", 0), ("g0", 1))
_SEEDS: dict[str, Callable[[Path], None]] = {}


def seed(make: Callable[[Path], None]) -> Callable[[Path], None]:
    """Register the maker of a seed, which is called like it."""
    _SEEDS[make.__name__] = make
    return make


def records() -> list[Record]:
    """One update of two samples, with everything that a comparison uses."""
    rng = np.random.default_rng(0)
    layout = TokenLayout((2, COLUMNS), tuple(Segment(i, 0, COLUMNS, i, 0) for i in range(2)))
    meta: dict[str, Any] = {"layout": layout.to_json(), "samples": [[*key] for key in KEYS]}
    mask = np.tile(np.arange(COLUMNS) >= 2, (2, 1)).astype(np.int64)
    ids = rng.integers(3, 50, (2, COLUMNS))
    values = np.where(mask, -rng.exponential(1, (2, COLUMNS)), 0.0)
    advantages = np.where(mask, np.array([[0.5], [-0.5]]), 0.0)
    place: dict[str, Any] = {"rank": 0, "micro": 0}
    shard = {"weight": ShardLayout.whole((4, 3)).to_json()}
    samples = [
        Trajectory(
            *key,
            ids[row].tolist(),
            mask[row].tolist(),
            1.0 - row,
            2,
            log_probs=values[row].astype(np.float32),
        )
        for row, key in enumerate(KEYS)
    ]
    loss = {"loss": np.float64(0.25), "pg_loss": np.float64(0.25)}
    losses = {"num_loss_tokens": 8, "mini_batch_loss_tokens": 8, "backward_scale": 1.0}
    debug = {
        "log_probs": values,
        "old_log_probs": values,
        "advantages": advantages,
        "prob_ratio": mask * 1.0,
        "elementwise_loss": -advantages,
        "effective_valid": mask,
    }
    weight = np.arange(12.0).reshape(4, 3)
    moments = {"weight/exp_avg": weight, "weight/exp_avg_sq": weight**2, "weight/step": np.float32(3)}
    return [
        to_record(samples, 0),
        Record("batch_inputs", 0, {"input_ids": ids, "response_mask": mask}, meta, **place),
        Record(
            "forward_data", 0, {"log_probs": values, "response_mask": mask, "input_ids": ids}, meta, **place
        ),
        Record("is_loss_debug", 0, debug, meta, **place),
        Record(
            "loss", 0, {name: np.asarray(value) for name, value in loss.items()}, {**meta, **losses}, **place
        ),
        Record("gradient", 0, {"weight": weight / 7}, {"shards": shard, "grad_norm": 2.5}, rank=0),
        Record(
            "optimizer", 0, {k: np.asarray(v) for k, v in moments.items()}, {"learning_rates": [0.1]}, rank=0
        ),
        Record("param", 0, {"weight": weight}, {"shards": shard}, rank=0),
    ]


def dump(folder: Path, format: str, *, sums: bool = True) -> None:
    """A dump of ours; without sums as earlier releases wrote it."""
    entries = {}
    for one in records():
        name = f"{one.type}/{one.where.stem}.{format}"
        stamp = write_atomically(folder / name, FORMATS[format].encode(one))
        entries[name] = Entry(one.type, one.where, stamp, file_sums(folder / name) if sums else "")
    told = Provenance(
        {"model": {"dtype": "float32"}}, {"torch": "2.13.0"}, {"variables": {}}, {}, {"world_size": 1}
    )
    write_manifest(folder, Manifest(told, format, entries))


@seed
def own_safetensors(folder: Path) -> None:
    dump(folder, "safetensors")


@seed
def own_old(folder: Path) -> None:
    dump(folder, "safetensors", sums=False)


@seed
def own_pt(folder: Path) -> None:
    import torch  # noqa: F401  # which writes the format

    dump(folder, "pt")


@seed
def own_jsonl(folder: Path) -> None:
    dump(folder, "jsonl")


def _nexrl(folder: Path, format: str, mode: str) -> None:
    from tests.interop.conftest import Nexrl, rollouts

    getattr(Nexrl(folder, rollouts(4), format=format, ranks=1), mode)()


@seed
def nexrl_pt(folder: Path) -> None:
    _nexrl(folder, "pt", "self_hosted")


@seed
def nexrl_jsonl(folder: Path) -> None:
    _nexrl(folder, "jsonl", "self_hosted")


@seed
def nexrl_weaver(folder: Path) -> None:
    _nexrl(folder, "jsonl", "weaver")


@seed
def nexrl_remote(folder: Path) -> None:
    _nexrl(folder, "jsonl", "remote_api")


@seed
def service(folder: Path) -> None:
    """A training service's dump: its index and records."""
    from regress.dump.request_index import INDEX, DumpedDatum, DumpedRequest, Part

    found = {one.type: one for one in records()}
    keys = [["request 1", 0], ["request 1", 1]]
    for type in ("batch_inputs", "forward_data", "is_loss_debug", "loss"):
        one = found[type]
        one.meta["samples"] = keys  # type: ignore[assignment]  # plain JSON
        write_atomically(folder / type / f"{one.where.stem}.safetensors", FORMATS["safetensors"].encode(one))
    ids = found["batch_inputs"].tensors["input_ids"].tolist()
    line = DumpedRequest(
        "model", "forward_backward", 0, 1, "r1", "", "ppo", {}, ("forward_data", "loss"),
        tuple(DumpedDatum(tuple(row)) for row in ids), (Part(0, 0, (0, 1)),), None, {"loss:sum": 1.0},
    )  # fmt: skip
    step = DumpedRequest(
        "model", "optim_step", 0, 2, "r2", adam={"learning_rate": 0.1}, metrics={"grad_norm": 1.0}
    )
    (folder / INDEX).write_bytes(line.line() + step.line())


@seed
def bare_safetensors(folder: Path) -> None:
    from safetensors.numpy import save_file

    weights = {"a.weight": np.arange(6.0).reshape(2, 3), "b": np.ones(4, np.float16)}
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")


@seed
def bare_pt(folder: Path) -> None:
    import torch

    folder.mkdir(parents=True)
    held = {"model": {"a": torch.arange(6.0).reshape(2, 3), "b": [torch.ones(3), 5, "text"]}, "step": 3}
    torch.save(held, folder / "pytorch_model.bin")


@seed
def bare_sharded(folder: Path) -> None:
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name, key in zip(names, "ab", strict=True):
        save_file({key: np.arange(4.0)}, folder / name)
    index = {"metadata": {"total_size": 64}, "weight_map": dict(zip("ab", names, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@seed
def golden(folder: Path) -> None:
    from regress.golden.case_manifest import ToleranceEntry
    from regress.golden.case_update import commit
    from tests.unit.golden.conftest import PROVENANCE, _make_inputs, _truth

    case = _make_inputs(folder / "tiny")
    bound = ToleranceEntry(1e-3, 1e-6, {"perturbation": 1e-6, "kappa": 4}, "measured")
    commit(case, truth=_truth(), tolerances={"log_probs": {"float32": bound}}, provenance=PROVENANCE)


@seed
def exported(folder: Path) -> None:
    """An exported case, as far as its documents go."""
    from safetensors.numpy import save_file

    from regress.replay.case_export import FORMAT, INDEX

    (folder / "rollouts").mkdir(parents=True)
    (folder / INDEX).write_text(json.dumps({"format": FORMAT, "case": "tiny"}))
    update = {"name": "step_000000", "step": 0, "epoch": 0, "mini_batch": 0, "learning_rate": 0.1}
    update |= {"samples": [["g0", 0]], "microbatches": [[["g0", 0]]]}
    algorithm = {"loss": "grpo", "norm_length": 8, "kl_coef": 0.0}
    optimizer = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    objective = {"case": "tiny", "updates": [update], "optimizer_steps": {"a": 3}, "algorithm": algorithm}
    objective |= {
        "optimizer": optimizer,
        "temperature": 1.0,
        "norm_length": 8,
        "max_grad_norm": 1.0,
        "reference": None,
    }
    (folder / "objective.json").write_text(json.dumps(objective))
    row = {"group_id": "g0", "run_id": 0, "prompt_ids": [1, 2], "completion_ids": [3, 4], "loss_mask": [1, 1]}
    row |= {"sampler_log_probs": [-0.5, -0.25], "reward": 1.0, "finish_reason": "stop", "rewards": {"r": 1.0}}
    row |= {"prompt": "p", "response": "r", "old_log_probs": [-0.5, -0.25], "ref_log_probs": None}
    (folder / "rollouts" / "step_000000.jsonl").write_text(json.dumps(row) + "\n")
    save_file({"a/exp_avg": np.ones(2), "a/exp_avg_sq": np.ones(2)}, folder / "optimizer.safetensors")


@seed
def checkpoint(folder: Path) -> None:
    from regress.engine.checkpoint.checkpoint_tensors import write_records
    from tests.unit.doctor.builder import Run

    run = Run(folder)
    for path in sorted(folder.glob("checkpoint-*/regress_state.json")):
        path.write_text(re.sub(r"/(work|root|tmp|home)/[^\"]*", "/somewhere", path.read_text()))
        write_records(
            path.with_name("unfinished.safetensors"),
            [Record("loss", 4, {"value": np.ones(2, np.float32)}, {"update": 1})],
        )
        run.seal(path.parent)


@seed
def metrics(folder: Path) -> None:
    folder.mkdir(parents=True)
    rows = [
        {"segment": 0, "sequence": n, "time": 1.5 + n, "step": n // 2, "update": n, "loss": 0.5}
        for n in range(5)
    ]
    rows.append(
        {"segment": 1, "sequence": 5, "time": 9.0, "step": 1, "update": 2, "resumed_from": "c", "after": 2}
    )
    rows.append(
        {"segment": 1, "sequence": 6, "time": 9.5, "step": 1, "rollouts/returns_mean": None, "note": "x"}
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = {
        "prompt": "1 + 1 =",
        "response": "2",
        "answer": "2",
        "reward": 1.0,
        "is_correct": True,
        "level": 0,
    }
    samples = [{"segment": 0, "sequence": n, "time": 1.0, "step": n, **judged} for n in range(3)]
    (folder / "eval_samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))


@seed
def outcome(folder: Path) -> None:
    """Verdicts of a replay as a worker leaves them."""
    from regress.compare.verdicts.verdict import Status, Verdict, Worst
    from regress.dump.coordinates import Place
    from regress.replay.replay_outcome import Outcome, ReplayOutcome

    folder.mkdir(parents=True)
    worst = Worst((0, 1), "sample g0/0, position 1", 1.0, float("nan"), 0.5, 3.0)
    bad = Verdict(
        Status.DRIFT, "log_probs", "log_probs", Place(0, None, 0, 0), worst=worst, multiple=3.0, count=4
    )
    good = Verdict(Status.OK, "loss", "loss", Place(0, None, 0, 0), count=1)
    found = ReplayOutcome({("step0", "log_probs"): Outcome([bad], good, 2, 8, {"0": 1.5})})
    (folder / "outcome.json").write_text(found.dumps())


@seed
def project(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "x"\n\n[tool.regress]\nreplay = "json:dumps"\nallow_code = ["rewards"]\n\n'
        '[tool.regress.variants.mine]\nwhy = "rows"\noverrides = {"batching.layout" = "packed"}\n\n'
        '[[tool.regress.tolerances]]\nquantity = "log_probs"\nrelative = 1e-2\nreason = "r"\n\n'
        '[tool.pytest.ini_options]\nregress_golden_dir = "golden"\n'
    )


def main(names: list[str]) -> None:
    """Write the seeds of these kinds, or of all."""
    from tests.fuzz import seeds_more  # registers more

    assert seeds_more.seed is seed
    for name in names or [*_SEEDS]:
        folder = CORPUS / name
        shutil.rmtree(folder, ignore_errors=True)
        _SEEDS[name](folder)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{name}: {size} bytes")


if __name__ == "__main__":
    from tests.fuzz.seeds import main as registered

    registered(sys.argv[1:])  # by the module that others import, not by this copy of it
