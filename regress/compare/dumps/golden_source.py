"""A golden case as a source of its recorded updates and rollouts."""

from __future__ import annotations

import atexit
import re
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from io import BytesIO
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.element_names import TokenText
from regress.compare.diagnosis.related_values import RelatedValues
from regress.compare.dumps.truth_source import TruthSide
from regress.dump.coordinates import Coordinates
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record
from regress.dump.trajectory import Trajectory, to_record
from regress.errors import ConfigError, GoldenError
from regress.golden.golden_case import GoldenCase
from regress.golden.golden_directory import GoldenStore, golden_directory
from regress.golden.golden_files import parse_where
from regress.layout import TokenFrame

PREFIX = "golden:"
_REVISION = re.compile(
    r"(?P<case>(.*/)?[\w.-]+)@(?P<revision>[^-].*)"
)  # none that git would read as an option
_KEPT = 2  # updates whose values are kept


def is_golden(source: str) -> bool:
    """Distinguish a golden case from a folder or URL."""
    return source.startswith(PREFIX)


def located(source: str, folder: Path | None) -> str:
    """Name the golden directory in a source that does not; other sources stay as they are."""
    if folder is None or not is_golden(source) or "/" in _split(source)[0]:
        return source
    return f"{PREFIX}{folder / source.removeprefix(PREFIX)}"


def _split(source: str) -> tuple[str, str]:
    """Return what a source says of the case, and the revision, which is empty without one."""
    text = source.removeprefix(PREFIX)
    found = _REVISION.fullmatch(text)
    return (text, "") if found is None or Path(text).is_dir() else (found["case"], found["revision"])


def golden_case(source: str) -> GoldenCase:
    """Open the case of ``golden:CASE``, ``golden:FOLDER/CASE`` or either ``@REVISION``, as git has it.

    Raises:
        GoldenError: if there is no such case, or git has none of this revision.
    """
    name, revision = _split(source)
    if revision == "pending":
        raise ConfigError(f"""{source}: nothing waits for review beside a case any more; {PREFIX}{name} is what lies
        there, and {PREFIX}{name}@HEAD what was committed""")
    path = Path(name)
    root = path.parent if "/" in name else golden_directory()
    return GoldenStore(_at_revision(root, path.name, revision) if revision else root).case(path.name)


def _at_revision(root: Path, name: str, revision: str) -> Path:
    """Return a golden directory with one case as a revision of git has it; it goes with this process."""
    try:
        commit = _git(root, "rev-parse", "--verify", f"{revision}^{{commit}}").decode().strip()
        return _extracted(root, name, commit)
    except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
        said = (getattr(error, "stderr", b"") or b"").decode(errors="replace").splitlines() or [error]
        raise GoldenError(
            f"git has no {root / name} of {revision} ({said[-1]}): name a commit in which the case is"
        ) from None


@cache
def _extracted(root: Path, name: str, commit: str) -> Path:
    folder = Path(mkdtemp(prefix="regress-golden-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    with tarfile.open(fileobj=BytesIO(_git(root, "archive", "--format=tar", commit, "--", name))) as archive:
        archive.extractall(folder, filter="data")
    return folder


def _git(root: Path, *command: str) -> bytes:
    done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, check=True, timeout=60)
    return done.stdout


class GoldenSide(TruthSide):
    """The recorded updates of a case, and its rollouts."""

    def __init__(self, source: str) -> None:
        self.case = golden_case(source)
        self.folder = self.case.folder
        self.config = self.case.config
        self._values: dict[str, dict[str, dict[str, Array]]] = {}
        if not self.case.wheres():
            raise GoldenError(
                f"{self.folder} has no recorded updates to compare with: run regress golden record {self.case.name}"
            )

    @cached_property
    def entries(self) -> Mapping[str, tuple[str, Coordinates]]:
        """Its records, in the order of computation."""
        places = (Coordinates(step) for step in self._trajectories)
        rollouts = {f"trajectory/{place.stem}": ("trajectory", place) for place in places}
        return rollouts | {**super().entries}

    def read(self, name: str) -> Record:
        """Read one record."""
        record_type, place = self.entries[name]
        return (
            to_record(self._trajectories[place.step], place.step)
            if record_type == "trajectory"
            else super().read(name)
        )

    @cached_property
    def places(self) -> dict[str, Coordinates]:
        """Step and number of each recorded update, by its name in the case."""
        return {where: place for where in self.case.wheres() if (place := parse_where(where)) is not None}

    def frame(self, where: str) -> TokenFrame:
        """Return the samples of an update.

        Raises:
            GoldenError: if rollouts and configuration do not come to the recorded update.
        """
        found = self._frames.get(where)
        if found is None:
            raise GoldenError(f"""{self.folder}: the rollouts and trainer.epochs and trainer.mini_batch_size of
            case.yaml do not come to the recorded update {where}; record the case again""")
        return found

    def truth(self, where: str, quantity: str) -> Mapping[str, Array]:
        """Return the canonical values of one quantity by tensor name, every byte verified."""
        if where not in self._values:
            while len(self._values) >= _KEPT:
                del self._values[next(iter(self._values))]
            self._values[where] = {}
        known = self._values[where]
        if quantity not in known:
            known[quantity] = self.case.truth_of(where, quantity)
        return known[quantity]

    def recorded(self, where: str) -> Mapping[str, Sequence[str]]:
        """Return the tensor names of each quantity of one update."""
        return self._recorded[where]

    def related(self, where: str) -> RelatedValues:
        """Return rewards, the sampler's log-probs, and the updates before and after."""
        samples = self._trajectories.get(self.places[where].step, [])
        names = [*self.places]
        number = names.index(where)
        return RelatedValues(
            rewards={sample.key: float(sample.reward) for sample in samples},
            sampler=sampler_log_probs(self.frame(where), samples),
            before=self.values(names[number - 1]) if number else {},
            after=self.values(names[number + 1]) if number + 1 < len(names) else {},
        )

    @cached_property
    def text(self) -> TokenText | None:
        """Text of a token id, if the case holds a tokenizer."""
        return token_text(self.case)

    @cached_property
    def _trajectories(self) -> dict[int, list[Trajectory]]:
        return self.case.trajectories()

    @cached_property
    def _recorded(self) -> dict[str, dict[str, list[str]]]:
        """Tensor names of each quantity of each update."""
        manifest = self.case.manifest
        assert manifest is not None
        return {
            where: {quantity: [*row[quantity].tensors] for quantity in sorted(row)}
            for where, row in manifest.truth.items()
        }

    @cached_property
    def _frames(self) -> dict[str, TokenFrame]:
        trainer: Any = self.case.config.get("trainer") or {}
        cuts = trainer.get("epochs", 1), trainer.get("mini_batch_size")
        found = {}
        for step, samples in self._trajectories.items():
            keys = tuple(sample.key for sample in samples)
            whole = TokenFrame(keys, tuple(len(sample.tokens) for sample in samples))
            for update, frame in whole.updates(*cuts):
                found[Coordinates(step, update=update).stem] = frame
        return found


def sampler_log_probs(frame: TokenFrame, samples: Sequence[Trajectory]) -> NDArray[np.float64] | None:
    """Return the log-probs that the sampler reported, ``[frame.size]``; None unless it did for every sample."""
    known = {sample.key: sample.log_probs for sample in samples}
    parts = [part for key in frame.samples if (part := known.get(key)) is not None]
    if len(parts) < len(frame.samples) or not parts:
        return None
    return np.concatenate([np.asarray(part, np.float64) for part in parts])


def text_of(*sides: object) -> TokenText | None:
    """Return a function from token ids to text, from the first golden source with a tokenizer; None without one."""
    found = (getattr(side, "text", None) for side in sides)
    return next((text for text in found if text is not None), None)


def token_text(case: GoldenCase) -> TokenText | None:
    """Return a function from token ids to text; None if the case holds no tokenizer."""
    path = Path(case.folder) / "model" / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda token: str(tokenizer.id_to_token(token))
