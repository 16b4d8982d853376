"""Scripts that are stopped and resumed: right ones go on bit for bit, wrong ones are told by what they lose."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

import regress
from regress.cli import main

SCHEMA = Path(regress.__file__).parent / "check/resume.schema.json"
SCRIPT = """
import os, sys
import torch
from torch.optim.lr_scheduler import LinearLR

folder, lost = sys.argv[1], sys.argv[2]
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = LinearLR(optimizer, 1.0, 0.1, 10)
data = torch.Generator().manual_seed(1)
path, start = os.path.join(folder, "checkpoint.pt"), 0
if os.path.exists(path):
    kept = torch.load(path)
    model.load_state_dict(kept["model"])
    start = kept["step"]
    if lost != "moments":
        optimizer.load_state_dict(kept["optimizer"])
    if lost != "schedule":
        schedule.load_state_dict(kept["schedule"])
    if lost != "data":
        data.set_state(kept["data"])
for step in range(start, 8 + (lost == "end" and start > 0)):
    noise = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
    x = torch.rand(3, 4, generator=noise if lost == "seed" and step > 5 else data)
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
    schedule.step()
    if step % 2 and lost != "checkpoint":
        with torch.no_grad():
            weights = {name: value + (lost == "weights") for name, value in model.state_dict().items()}
        kept = {"model": weights, "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save({**kept, "data": data.get_state(), "step": step + 1}, path)
"""
CASES = {
    "nothing": (0, "same: steps 4 to 7 are the same, bit for bit"),
    "moments": (1, "departs: step 4, the first after it resumed, differs in the state of the optimizer"),
    "schedule": (1, "differs in the learning rate"),
    "data": (1, "step 4, the first after it resumed, differs in the gradients: the data"),
    "weights": (1, "the weights that it goes on with are those before no step of the uninterrupted run"),
    "end": (1, "it makes 5 steps more from step 4 on, the uninterrupted run 4"),
    "checkpoint": (2, "it began anew: no checkpoint was written in 5 steps"),
    "seed": (2, "two uninterrupted runs differ in step 6, in the gradients"),
}
DEFAULT = ("nothing", "moments")


def run(folder: Path, lost: str, *options: str) -> Result:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [
        "check",
        "resume",
        "--stop-after",
        "5",
        *options,
        "--",
        sys.executable,
        str(script),
        "{run}",
        lost,
    ]
    return CliRunner().invoke(main, command)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "lost", [pytest.param(one, marks=() if one in DEFAULT else pytest.mark.extended) for one in CASES]
)
def test_what_a_resumed_script_lost_is_told(tmp_path: Path, lost: str) -> None:
    code, said = CASES[lost]
    done = run(tmp_path, lost, "--json", str(tmp_path / "found.json"))
    assert done.exit_code == code, done.output
    assert said in done.output
    tree = json.loads((tmp_path / "found.json").read_text())
    jsonschema.validate(tree, json.loads(SCHEMA.read_text()))
    assert tree["steps"] == 8
    assert tree["exit_code"] == code


def test_a_command_without_a_place_for_the_run_is_refused() -> None:
    done = CliRunner().invoke(main, ["check", "resume", "--", "python", "train.py"])
    assert done.exit_code == 2
    assert "no argument tells where the script writes: put {run} there" in done.output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('no torch here')", "made 0 optimizer steps with torch.optim"),
        ("raise SystemExit('out of luck')", "ended with 1: mend it first; it said: out of luck"),
        ("import time; time.sleep(60)", "ran for more than 1 s"),
    ],
    ids=["no steps", "fails", "hangs"],
)
def test_a_script_that_cannot_be_judged_is_refused(tmp_path: Path, text: str, said: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    options = ["--timeout", "1"] if "sleep" in text else []
    done = CliRunner().invoke(main, ["check", "resume", *options, "--", sys.executable, str(script), "{run}"])
    assert done.exit_code == 2
    assert said in done.output


def test_a_sitecustomize_of_the_user_runs_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('ended')")
    done = CliRunner().invoke(main, ["check", "resume", "--", sys.executable, str(script), "{run}"])
    assert "it said: mine | ended" in done.output
