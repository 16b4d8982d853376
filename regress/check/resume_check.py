"""Check that a script resumes: run through, and run with a stop in the middle, step by step the same bits.

Two uninterrupted runs come first. Up to where these differ the resumed one is judged, and not beyond.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regress.check.check_report import SCHEMA_VERSION
from regress.errors import ConfigError

PLACE = "{run}"
"""Stands for the folder of a run among the arguments of the script."""
SAME, DEPARTS, UNJUDGED = "same", "departs", "cannot be judged"
_WORDS: Mapping[str, str] = {
    "weights": "the weights before the step",
    "moments": "the state of the optimizer",
    "rates": "the learning rate",
    "gradients": "the gradients: the data, or random numbers",
    "updated": "the weights after the step",
}
"""Compared parts of a step, in the order in which they are made."""
Step = Mapping[str, Any]


@dataclass(frozen=True)
class ResumeCheck:
    """A script that was run through, and one that was stopped and resumed.

    Attributes:
        steps: optimizer steps of an uninterrupted run.
        stopped: the step after which it was stopped; None where it was not.
        resumed: the step that it went on with, from 0; None where that is unknown.
        verdict: `SAME`, `DEPARTS` or `UNJUDGED`.
        text: the finding as one sentence.
        error: why nothing was run, as `RegressError.to_json` tells it.
    """

    command: str
    steps: int = 0
    stopped: int | None = None
    resumed: int | None = None
    verdict: str = UNJUDGED
    text: str = ""
    error: Mapping[str, str] | None = None

    @property
    def exit_code(self) -> int:
        """0 the same, 1 it departs, 2 it cannot be judged."""
        return 2 if self.error is not None else {SAME: 0, DEPARTS: 1}.get(self.verdict, 2)

    def to_text(self) -> str:
        """Return the check as a terminal shows it."""
        return f"{self.command}\n  {self.verdict}: {self.text}"

    def dumps(self) -> str:
        """Return the check as JSON."""
        return (
            json.dumps(
                {"schema_version": SCHEMA_VERSION, **vars(self), "exit_code": self.exit_code}, indent=1
            )
            + "\n"
        )


def check_resume(
    command: Sequence[str],
    folder: Path,
    *,
    again: Sequence[str] = (),
    stop_after: int | None = None,
    by: signal.Signals = signal.SIGKILL,
    timeout: float = 600.0,
) -> ResumeCheck:
    """Run a script twice, then stop it and resume it, and judge the steps after.

    Args:
        command: with `PLACE` where the folder goes that the script writes to.
        folder: below which the runs lie; made if missing.
        again: arguments that are added to resume; by default the same command resumes.
        stop_after: optimizer step after which the script is stopped; by default half of them.
        by: signal that stops it.
        timeout: seconds that a run may take.

    Raises:
        ConfigError: if no argument has a place for the folder, or the script fails when it is not stopped.
    """
    if not any(PLACE in part for part in command):
        raise ConfigError(f"""no argument tells where the script writes: put {PLACE} there, such as --output-dir
        {PLACE}, so that each run has a folder of its own""")
    said, runner = " ".join(command), _Runner(command, folder, timeout)
    whole, repeated = runner.through("through"), runner.through("through-again")
    if len(whole) < 2:
        raise ConfigError(
            f"{said} made {len(whole)} optimizer steps with torch.optim: a stop in the middle needs two or more"
        )
    alike = _first_difference(whole, repeated)
    limit = len(whole) if alike is None else alike[0]
    if alike is not None and limit == 0:
        text = f"two uninterrupted runs differ in step 0, in {_WORDS[alike[1]]}"
        return ResumeCheck(said, len(whole), verdict=UNJUDGED, text=text)
    stop = stop_after or max(1, len(whole) // 2)
    runner.stopped("resumed", stop, by)
    resumed = runner.through("resumed", again)
    return _judged(said, whole, resumed, stop, limit, alike)


def _judged(
    said: str, whole: list[Step], resumed: list[Step], stop: int, limit: int, alike: tuple[int, str] | None
) -> ResumeCheck:
    def found(verdict: str, text: str, start: int | None = None) -> ResumeCheck:
        return ResumeCheck(said, len(whole), stop, start, verdict, text)

    if not resumed:
        return found(UNJUDGED, f"after a stop behind step {stop - 1} it made no step more")
    starts = [n for n, step in enumerate(whole) if step["weights"] == resumed[0]["weights"]]
    if not starts:
        return found(
            DEPARTS, "the weights that it goes on with are those before no step of the uninterrupted run"
        )
    start = starts[-1]
    if start == 0:
        return found(
            UNJUDGED,
            f"it began anew: no checkpoint was written in {stop} steps, or nothing tells it to resume (--resume-with)",
            0,
        )
    rest = whole[start:]
    first = _first_difference(rest, resumed)
    if first is None:
        return found(SAME, f"steps {start} to {len(whole) - 1} are the same, bit for bit", start)
    number, name = first
    if start + number >= limit and alike is not None:
        text = f"two uninterrupted runs differ in step {alike[0]}, in {_WORDS[alike[1]]}; up to there it is the same"
        return found(UNJUDGED, text, start)
    if name == "count":
        text = f"it makes {len(resumed)} steps more from step {start} on, the uninterrupted run {len(rest)}"
        return found(DEPARTS, text, start)
    return found(
        DEPARTS, f"step {start + number}, {_nth(number)} after it resumed, differs in {_WORDS[name]}", start
    )


def _nth(number: int) -> str:
    return "the first" if number == 0 else f"{number} behind the first"


def _first_difference(one: Sequence[Step], other: Sequence[Step]) -> tuple[int, str] | None:
    """Return the first step in which two runs differ, and in what; ``count`` where one has more steps."""
    for number, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        for name in _WORDS:
            if mine[name] != theirs[name]:
                return number, name
    return None if len(one) == len(other) else (min(len(one), len(other)), "count")


@dataclass(frozen=True)
class _Runner:
    """Runs of the script, each with a folder and a log of its own."""

    command: Sequence[str]
    folder: Path
    timeout: float

    def through(self, name: str, more: Sequence[str] = ()) -> list[Step]:
        """Run to the end, and return the steps.

        Raises:
            ConfigError: if the script fails.
        """
        done, steps = self._run(name, more, {})
        if done.returncode:
            tail = " | ".join((done.stdout or "").splitlines()[-3:])
            raise ConfigError(
                f"{' '.join(self.command)} ended with {done.returncode}: mend it first; it said: {tail}"
            )
        return steps

    def stopped(self, name: str, after: int, by: signal.Signals) -> None:
        """Run until a step, and stop it there."""
        self._run(name, (), {"GRPO_REGRESS_STOP_AFTER": str(after), "GRPO_REGRESS_STOP_SIGNAL": str(int(by))})

    def _run(
        self, name: str, more: Sequence[str], environ: Mapping[str, str]
    ) -> tuple[subprocess.CompletedProcess[str], list[Step]]:
        place, log = self.folder / name, self.folder / f"{name}-log"
        place.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(log, ignore_errors=True)
        log.mkdir()
        hooks = str(Path(__file__).parent / "step_log")
        paths = [hooks, *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {
            **os.environ,
            **environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "GRPO_REGRESS_STEP_LOG": str(log),
        }
        command = [part.replace(PLACE, str(place)) for part in (*self.command, *more)]
        with subprocess.Popen(
            command,
            env=own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=self.timeout)
            except subprocess.TimeoutExpired:
                raise ConfigError(f"""{" ".join(command)} ran for more than {self.timeout:g} s: give it fewer steps, or
                a longer --timeout""") from None
            finally:
                _end(process)
        return subprocess.CompletedProcess(command, process.returncode, said), [*_steps(log)]


def _end(process: subprocess.Popen[str]) -> None:
    """End what is left of a run: the ranks of a launcher that was killed."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _steps(log: Path) -> Iterator[Step]:
    """Yield the steps of all ranks together, in order."""
    ranks = [
        [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        for path in sorted(log.glob("rank*.jsonl"))
    ]
    for step in zip(*ranks, strict=False):
        yield {name: [one[name] for one in step] for name in _WORDS}
