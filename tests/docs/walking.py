"""Walk through the documents' capabilities: the command of each row is run, and its outcome looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regress.dump.metrics_file import read_metrics

ROOT = Path(__file__).parents[2]
Row = tuple[str, str, str, str, str]
"""Document, section, capability, state, and what shows it."""
ROWS: list[Row] = [
    (one["id"], *row)
    for one in tomllib.loads((ROOT / "docs" / "documents.toml").read_text())["document"]
    for row in one["rows"]
]
_ALONE = (
    "WANDB_",
    "REGRESS_",
    "EXPERIMENT_PATH",
    "CURRICULUM_",
    "MAX_",
    "LENGTH_",
    "WORLD_SIZE",
    "RANK",
    "CI",
)

SIZES = "{hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2, head_dim: 8}"
SMALL = (
    f"model.config={SIZES}",
    *("task.train_size=24", "task.eval_size=6", "data.prompts_per_step=4", "data.group_size=4"),
    *("warm_start.steps=2", "warm_start.batch_size=4", "rollout_worker.batch_size=16", "max_steps=2"),
    "optimizer.warmup_steps=0",
)
"""Sizes at which a run takes seconds; what a row is about is in its own arguments, which come later."""


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    output: str
    errors: str

    @property
    def told(self) -> str:
        """All that was printed, in one line: the width of a terminal decides where lines break."""
        return " ".join(f"{self.output} {self.errors}".split())


def forked(
    words: Sequence[str], work: Callable[[], object], folder: Path, *environs: Mapping[str, str]
) -> Done:
    """Do the work of a command in copies of this process, which has loaded torch: one for each environment, at once.

    Returns:
        The first copy that failed, or the first one.
    """
    import regress.parallel.parallel_run  # noqa: F401  # loaded once, for all copies

    with ExitStack() as files:
        copies = []
        for environ in environs:
            printed = [files.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
            sys.stdout.flush(), sys.stderr.flush()
            with warnings.catch_warnings():  # of threads of pytest-xdist, which the copy does not have
                warnings.simplefilter("ignore", DeprecationWarning)
                process = os.fork()
            if process == 0:
                os._exit(_copied(words, work, folder, environ, *(file.fileno() for file in printed)))
            copies.append((process, printed))
        ends = []
        for process, printed in copies:
            _, status = os.waitpid(process, 0)
            for file in printed:
                file.seek(0)
            ends.append(Done(os.waitstatus_to_exitcode(status), *(file.read().decode() for file in printed)))
        return next((end for end in ends if end.code), ends[0])


def _copied(
    words: Sequence[str],
    work: Callable[[], object],
    folder: Path,
    environ: Mapping[str, str],
    output: int,
    errors: int,
) -> int:
    """Do the work of a copy, as a process of its own would; return its exit code."""
    try:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environ)
        for file, number in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (errors, 2)):
            os.dup2(file, number)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115  # for the life of the copy
        sys.argv = list(words)
        work()
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 70
    finally:
        sys.stdout.flush(), sys.stderr.flush()


@dataclass
class Walk:
    """A folder in which commands run; what one command wrote, later rows look at.

    Attributes:
        folder: working directory of every command.
        runs: number of commands that were run.
    """

    folder: Path
    runs: int = 0
    _kept: dict[Any, Done] = field(default_factory=dict)

    def run(self, *command: object, code: int = 0, **environ: str) -> Done:
        """Run a command once, whoever asks for it, and require its exit code."""

        def started(words: tuple[str, ...], own: Mapping[str, str]) -> Done:
            done = subprocess.run(
                words, cwd=self.folder, env=own, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
            )  # fmt: skip
            return Done(done.returncode, done.stdout, done.stderr)

        return self._once(started, tuple(map(str, command)), code, environ)

    def regress(self, *arguments: object, code: int = 0, **environ: str) -> Done:
        """Run ``regress``, in a copy of this process, which has loaded torch."""
        return self._once(self._forked, tuple(map(str, arguments)), code, environ)

    def _once(
        self,
        start: Callable[[tuple[str, ...], Mapping[str, str]], Done],
        words: tuple[str, ...],
        code: int,
        environ: Mapping[str, str],
    ) -> Done:
        key = words, tuple(sorted(environ.items()))
        if key not in self._kept:
            inherited = {name: text for name, text in os.environ.items() if not name.startswith(_ALONE)}
            paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
            own = {"PATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "HF_HUB_OFFLINE": "1"}
            self.runs += 1
            self._kept[key] = start(words, {**inherited, **own, **environ})
        found = self._kept[key]
        assert found.code == code, f"{words}: {found.code}\n{found.output[-3000:]}\n{found.errors[-3000:]}"
        return found

    def _forked(self, words: tuple[str, ...], environ: Mapping[str, str]) -> Done:
        from regress.cli import main

        return forked(
            ["regress", *words], lambda: main(list(words), prog_name="regress"), self.folder, environ
        )

    def train(self, *arguments: object, to: str, code: int = 0, small: bool = True, **environ: str) -> Done:
        """Run ``regress train``, small, into a folder."""
        sizes = SMALL if small else ()
        return self.regress("train", *sizes, f"output_dir={to}", *arguments, code=code, **environ)

    def path(self, name: str) -> Path:
        """Return a file or folder of the walk."""
        return self.folder / name

    def write(self, name: str, text: str) -> Path:
        """Write a file of the user."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def metrics(self, run: str) -> list[Mapping[str, Any]]:
        """Return the read view of a run's metrics."""
        return read_metrics(self.path(run) / "metrics.jsonl")

    def values(self, run: str, name: str) -> list[Any]:
        """Return the values of a metric in a run, which has at least one."""
        found = [row[name] for row in self.metrics(run) if name in row]
        assert found, f"{run} has no {name}"
        return found

    def config(self, *arguments: object, **environ: str) -> dict[str, str]:
        """Return the keys that ``regress train ... --print-config`` shows, with their values and origins."""
        lines = self.regress("train", *arguments, "--print-config", **environ).output.splitlines()
        return dict(line.split(": ", 1) for line in lines if ": " in line)

    def json(self, name: str) -> Any:
        """Return the content of a JSON file."""
        return json.loads(self.path(name).read_text())


Check = Callable[[Walk], None]


@dataclass(frozen=True)
class Shown:
    """A check of some rows."""

    document: str
    capabilities: tuple[str, ...]
    check: Check

    @property
    def rows(self) -> Iterator[Row]:
        """Rows that it shows: one for each beginning of a capability."""
        for text in self.capabilities:
            found = [row for row in ROWS if row[0] == self.document and _begins(row, text)]
            found = [row for row in found if row[2] == text.rpartition("|")[2]] or found
            assert len(found) == 1, f"{self.document}: {text!r} begins {len(found)} rows"
            yield found[0]


def _begins(row: Row, text: str) -> bool:
    section, _, capability = text.partition("|")
    return (row[1] == section and row[2].startswith(capability)) if capability else row[2].startswith(section)


CHECKS: list[Shown] = []


def shows(document: str, *capabilities: str) -> Callable[[Check], Check]:
    """Register the check of the rows whose capabilities begin so; ``section|beginning`` where two do."""

    def register(check: Check) -> Check:
        CHECKS.append(Shown(document, capabilities, check))
        return check

    return register
