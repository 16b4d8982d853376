"""`regress compare` from the command line, with the options and the report sections of NexRL's script."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from regress.cli import main
from regress.dump import Recorder, at, recording, tap
from regress.dump.dump_manifest import Provenance
from regress.layout import Segment, TokenLayout

Setup = Callable[..., Any]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])


def strict(path: Path) -> Any:
    """JSON without bare NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"bare {name}")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_equal_dumps(nexrl: Setup, tmp_path: Path) -> None:
    golden, actual = nexrl("golden").self_hosted(), nexrl("actual", format="jsonl").self_hosted()
    done = run(golden.folder, actual.folder, "--report", tmp_path / "out", "--json", tmp_path / "a.json")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "all within tolerance" in done.output
    assert (tmp_path / "out" / "index.html").is_file()
    tree = strict(tmp_path / "a.json")
    assert (tree["exit_code"], tree["failed"]) == (0, 0)


def test_a_difference_is_named(nexrl: Setup, sampled: Setup, tmp_path: Path) -> None:
    samples = sampled()
    samples[2].values["log_probs"][samples[2].prompt] -= 1e-4
    folders = nexrl("golden").self_hosted().folder, nexrl("actual", samples).self_hosted().folder
    done = run(*folders, "--json", tmp_path / "report.json")
    assert done.exit_code == 1
    assert f"sample {samples[2].group}/{samples[2].run}, position {samples[2].prompt}" in done.output
    assert "✗" in done.output
    (table,) = strict(tmp_path / "report.json")["tokens"]
    (column,) = (column for column in table["values"] if column["quantity"] == "log_probs")
    pairs = zip(table["ids"], column["golden"], column["actual"], strict=True)
    off = [token for token, g, a in pairs if g is not None and abs(a - g) > column["tolerance"]]
    assert off == [samples[2].tokens[samples[2].prompt]]


def test_the_terminal_names_a_cause_once_and_what_is_affected(
    nexrl: Setup, sampled: Setup, tmp_path: Path
) -> None:
    samples = sampled()
    samples[2].values["log_probs"][samples[2].prompt] -= 1e-4
    folders = nexrl("golden").self_hosted().folder, nexrl("actual", samples).self_hosted().folder
    done = run(*folders, "--json", tmp_path / "report.json")
    (causes,) = strict(tmp_path / "report.json")["diagnoses"].values()
    told = " ".join(done.output.split())
    assert causes
    assert [told.count(f"probably: {cause['cause']}") for cause in causes] == [1] * len(causes)
    (affected,) = (line for line in done.output.splitlines() if line.startswith("affected: "))
    assert f"only sample {samples[2].group}/{samples[2].run}" in affected


def test_the_options_of_the_script_and_its_sections(nexrl: Setup, sampled: Setup, tmp_path: Path) -> None:
    samples = sampled()
    samples[5].values["log_probs"][samples[5].prompt] -= 0.05
    output = tmp_path / "report.json"
    done = run(
        *("--self_hosted_dir", nexrl("sh", format="jsonl").self_hosted().folder),
        *("--remote_api_dir", nexrl("ra", sampled()[::-1]).remote_api().folder),
        *("--weaver_dir", nexrl("wv", samples).weaver().folder),
        *("--step", 0, "--num_ranks", 2, "--num_micros", 1, "--output", output),
    )
    assert done.exit_code == 1
    assert "log_probs" in done.output
    tree = strict(output)
    assert (tree["step"], tree["num_ranks"], tree["num_micros"]) == (0, 2, 1)
    found = {section["section"]: section for section in tree["sections"]}
    assert [*found] == [
        *("trajectories", "forward_data_all", "loss_data_all", "is_loss_debug_all", "datums_analysis"),
    ]
    trajectories = found["trajectories"]
    assert (trajectories["status"], len(trajectories["trajectory_comparisons"])) == ("compared", 6)
    assert all(
        row["tokens_match"] and row["loss_mask_match"] for row in trajectories["trajectory_comparisons"]
    )
    assert all(row["sh_reward"] == row["ra_reward"] for row in trajectories["trajectory_comparisons"])
    forward = found["forward_data_all"]["comparisons"]
    assert [(row["rank"], row["micro"], row["status"]) for row in forward] == [
        (0, 0, "compared"),
        (1, 0, "compared"),
    ]
    log_probs, entropy, mask = forward[1]["comparisons"]
    assert (log_probs["name"], log_probs["is_close"]) == ("log_probs", False)
    assert log_probs["max_diff"] == pytest.approx(0.05, rel=1e-4)
    assert log_probs.keys() >= {"t1_shape", "t2_shape", "mean_diff", "t1_std", "t2_min", "correlation"}
    assert (entropy["is_close"], mask["is_close"]) == (True, True)
    losses = found["loss_data_all"]["comparisons"]
    assert [row["comparisons"][0]["is_close"] for row in losses] == [True, True]
    debug = found["is_loss_debug_all"]["comparisons"][0]["comparisons"]
    assert [t["name"] for t in debug] == [
        *(
            "log_probs",
            "old_log_probs",
            "advantages",
            "prob_ratio",
            "elementwise_loss",
            "effective_valid",
            "loss",
        ),
    ]
    status = {t["name"]: t["status"] for t in debug}
    assert {status[name] for name in ("log_probs", "old_log_probs", "prob_ratio", "effective_valid")} == {
        "compared"
    }
    assert status["advantages"] == "first_none"  # nothing in a self-hosted dump tells them
    datums = found["datums_analysis"]
    assert (datums["status"], datums["num_datums"]) == ("analyzed", 6)
    assert datums["loss_fn_inputs_keys"] == ["advantages", "logprobs", "loss_mask", "target_tokens"]


def test_the_full_command_on_equal_dumps(nexrl: Setup, sampled: Setup, tmp_path: Path) -> None:
    """A client of a remote trainer has neither ranks nor microbatches, which is not a reason to compare nothing."""
    many = sampled(8)
    dirs = (
        *("--self_hosted_dir", nexrl("sh", many, micros=2).self_hosted().folder),
        *("--remote_api_dir", nexrl("ra", many).remote_api().folder),
        *("--weaver_dir", nexrl("wv", many, micros=2).weaver().folder),
    )
    files = "--output", tmp_path / "failed.json", "--json-calls", tmp_path / "report.json"
    done = run(*dirs, "--step", 0, "--num_ranks", 2, "--num_micros", 2, *files)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    assert "has no ranks, so all of its records were compared" in done.output
    assert {call["where"] for call in strict(tmp_path / "report.json")["calls"]} == {"remote API", "weaver"}
    assert strict(tmp_path / "failed.json")["calls"] == []
    asked = run(*dirs, "--step", 0, "--num_ranks", 3, "--num_micros", 2)
    assert asked.exit_code == 2
    assert "weaver: rank 2 of 3 asked for is not in the actual dump" in asked.output


def test_the_text_of_the_script(nexrl: Setup, sampled: Setup, tmp_path: Path) -> None:
    """Every rank and microbatch and the statistics of section 5.4 are there, also where nothing fails."""
    samples = sampled(8)
    samples[6].values["elementwise_loss"] += 1e-3
    golden, remote = nexrl("sh", sampled(8), micros=2).self_hosted(), nexrl("ra", sampled(8)).remote_api()
    dirs = "--self_hosted_dir", golden.folder, "--remote_api_dir", remote.folder, "--weaver_dir"
    equal = run(*dirs, nexrl("wv", sampled(8), micros=2).weaver().folder, "--step", 0)
    assert equal.exit_code == 0
    for line in (
        "--- TRAJECTORIES ---",
        "✓ tokens: 8 of 8 equal",
        "--- LOSS_DATA_ALL ---",
        "total comparisons: 4",
        "rank1_micro1 loss: ✓ diff=0.000000e+00",
        "rank1_micro1 log_probs: ✓ max diff=0.000000e+00, max ",
        "differences of loss over 4 places: max 0, min 0, mean 0",
        "--- DATUMS_ANALYSIS ---",
        "number of datums: 8",
        "keys of loss_fn_inputs: advantages, logprobs, loss_mask, target_tokens",
    ):
        assert line in equal.output, line
    path = tmp_path / "report.json"
    done = run(*dirs, nexrl("other", samples, micros=2).weaver().folder, "--step", 0, "--output", path)
    assert done.exit_code == 1
    (losses,) = (s for s in strict(path)["sections"] if s["section"] == "loss_data_all")
    offs = [row["comparisons"][0]["diff"] for row in losses["comparisons"]]
    told = losses["statistics"]["loss"]
    assert told == {"count": 4, "max": max(offs), "min": min(offs), "mean": pytest.approx(sum(offs) / 4)}
    assert told["max"] > 1e-5
    assert sum(" loss: ✗ diff=" in line and "_micro" in line for line in done.output.splitlines()) >= 1


def test_other_precisions_are_the_cause(tmp_path: Path) -> None:
    """Two runs whose tensors are all stored in float32, and whose models computed in different dtypes."""
    folders = []
    for dtype, noise in (("float32", 0.0), ("bfloat16", 0.2)):
        told = Provenance(config={"model": {"dtype": dtype}})
        folders.append(tmp_path / dtype)
        values = -1.0 - np.arange(6, dtype=np.float32).reshape(1, 6) * (1 + noise * np.float32(0.37))
        layout = TokenLayout((1, 6), (Segment(0, 0, 6, 0, 0),))
        recorder = Recorder(folders[-1], options={"forward_data": True}, provenance=told)
        with recording(recorder), at(step=0, rank=0, micro=0):
            tap("forward_data", {"log_probs": values}, layout=layout, meta={"samples": [["a", 0]]})
    done = run(*folders)
    assert done.exit_code == 1
    assert "(rule precision;" in " ".join(done.output.split())
    assert "computes in float32, the actual one in bfloat16" in " ".join(done.output.split())


def test_a_difference_of_a_client_of_a_remote_trainer_is_found(nexrl: Setup, sampled: Setup) -> None:
    changed = sampled()
    changed[4].tokens[changed[4].prompt] += 1
    done = run(
        *("--self_hosted_dir", nexrl("sh").self_hosted().folder),
        *("--remote_api_dir", nexrl("ra", changed).remote_api().folder),
        *("--step", 0, "--num_ranks", 2, "--num_micros", 1),
    )
    assert done.exit_code == 1


def test_a_whole_side_that_is_missing_is_no_success(nexrl: Setup, tmp_path: Path) -> None:
    golden = nexrl("sh").self_hosted()
    (tmp_path / "weaver" / "loss").mkdir(parents=True)
    done = run("--self_hosted_dir", golden.folder, "--weaver_dir", tmp_path / "weaver", "--step", 0)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--step", "7"], "have no step in common among those asked for"),
        (["--step", "0:1"], "step 1 was asked for, but neither dump has it"),
        (["--only", "nothing_like_it"], "nothing matches --only nothing_like_it"),
        (["--step", "two"], "is neither a step nor a range of them"),
        (["--step", "3:1"], "begins after it ends"),
        (["--bitwise", "--rtol", "1"], "since each replaces the others"),
        (["--tolerances", "nobody"], "nobody"),
        (["--weaver_dir", "x"], "give GOLDEN and ACTUAL, or --self_hosted_dir"),
        (["--self_hosted_dir", "x"], "not both"),
        (["--num_ranks", "8"], "rank 2, 3, 4, 5, 6, 7 of 8 asked for is not in the actual dump"),
    ],
)
def test_what_cannot_be_compared_is_said_in_a_sentence(
    nexrl: Setup, arguments: list[str], words: str
) -> None:
    golden = nexrl("golden").self_hosted()
    done = run(golden.folder, golden.folder, *arguments)
    assert done.exit_code == 2
    assert words in done.output
    assert "Traceback" not in done.output


def test_self_hosted_alone(nexrl: Setup) -> None:
    done = run("--self_hosted_dir", nexrl("sh").self_hosted().folder)
    assert (done.exit_code, "alone cannot be compared" in done.stderr) == (2, True)


def test_tolerances_that_are_asked_for(nexrl: Setup, sampled: Setup) -> None:
    samples = sampled()
    samples[2].values["entropy"][samples[2].prompt] += 1e-3
    pair = nexrl("golden").self_hosted().folder, nexrl("actual", samples).self_hosted().folder
    assert run(*pair).exit_code == 1
    assert run(*pair, "--atol", "1e-2").exit_code == 0
    assert run(*pair, "--atol", "1e-4").exit_code == 1
    assert run(*pair, "--only", "log_probs", "--bitwise").exit_code == 0
    assert run(*pair, "--only", "entropy", "--bitwise").exit_code == 1
