"""Golden case: its folder, opened, with every byte verified before use."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from pathlib import Path

from regress.dump.arrays import Array
from regress.dump.coordinates import parse_stem
from regress.dump.damage import Damage
from regress.dump.jsontext import Json
from regress.dump.reader import detect_format
from regress.dump.trajectory import Trajectory, from_record
from regress.errors import DumpError, GoldenError
from regress.golden import truth
from regress.golden.casefile import parse_case
from regress.golden.files import RESTORE, is_stamped, read_stamped, read_unstamped
from regress.golden.manifest import Manifest, Truth, read_manifest
from regress.golden.names import CASE_FILE, input_files, where_order
from regress.golden.tolerance import ToleranceEntry

_TRAJECTORIES = "trajectories"
GREEDY = "greedy"
"""Folder of the greedy completions of a sampled case."""


class GoldenCase:
    """One case, as it was when it was opened.

    Args:
        folder: folder of the case, named like it.
        allow_changed_inputs: open it although `case.yaml`, the model or the trajectories are not those that were
            recorded, as whoever records them anew must.

    Attributes:
        manifest: manifest of the recording, or None while nothing is recorded.

    Raises `GoldenError` naming the file when `case.yaml` or the manifest is missing, damaged or changed.
    """

    def __init__(self, folder: Path, *, allow_changed_inputs: bool = False) -> None:
        self.folder = folder
        self.name = folder.name
        self.manifest: Manifest | None = read_manifest(folder)
        self._allow_changed_inputs = allow_changed_inputs
        self._truth_folders = [folder]
        self._file = parse_case(self._read_input(CASE_FILE), folder / CASE_FILE)

    def proposed(self, manifest: Manifest, folder: Path) -> GoldenCase:
        """Return the case as a pending update would make it.

        Args:
            folder: folder of the update, which holds its new truth files.
        """
        found = copy(self)
        found.manifest, found._truth_folders = manifest, [folder, self.folder]
        return found

    @property
    def reason(self) -> str:
        """Reason why this case exists."""
        return self._file.reason

    @property
    def claims(self) -> list[str]:
        """Signals that the case claims to have, such as `tool_tokens`."""
        return self._file.claims

    @property
    def config(self) -> dict[str, Json]:
        """Engine configuration, as overrides of the defaults."""
        return self._file.config

    @property
    def recipe(self) -> dict[str, Json]:
        """Settings that the inputs were made with."""
        return self._file.recipe

    @property
    def precisions(self) -> list[str]:
        """Precisions that the case is replayed in; none for all."""
        return self._file.precisions

    @property
    def leaves_out(self) -> list[str]:
        """Quantities that are not recorded."""
        return self._file.leaves_out

    @property
    def sampled(self) -> bool:
        """True if replays sample the rollouts, which must be the recorded ones."""
        return self._file.rollouts == "sampled"

    def verify_inputs(self) -> None:
        """Raise `GoldenError` naming the first input that is missing, changed, or not part of the recording."""
        for problem in self.input_problems():
            raise GoldenError(problem)

    def input_problems(self) -> Iterable[str]:
        """Yield a sentence for each input that is missing, changed, or not part of the recording."""
        if self.manifest is None:
            return
        for path, stamp in sorted(self.manifest.inputs.items()):
            try:
                if not is_stamped(self.folder / path, stamp):
                    yield f"{self.folder / path} is not the file that was recorded: {RESTORE}"
            except GoldenError as error:
                yield str(error)
        for path in input_files(self.folder):
            if path not in self.manifest.inputs:
                yield (
                    f"{self.folder / path} is not of the recording, but would be read with it: move it away, or record "
                    f"the case again with regress golden record {self.name}"
                )

    def wheres(self) -> list[str]:
        """Return the recorded optimizer updates, in order; none while nothing is recorded."""
        return sorted(self._truth, key=where_order)

    def quantities(self, where: str) -> list[str]:
        """Return the recorded quantities of an update."""
        self._check_where(where)
        return sorted(self._truth[where])

    def truth(self, where: str) -> dict[str, dict[str, Array]]:
        """Return quantity -> tensor name -> values, every byte verified."""
        return {quantity: self.truth_of(where, quantity) for quantity in self.quantities(where)}

    def truth_of(self, where: str, quantity: str) -> dict[str, Array]:
        """Return tensor name -> values of one quantity, every byte verified."""
        if quantity not in self.quantities(where):
            raise GoldenError(
                f"{self.folder} has no {quantity!r} at {where}: recorded are {', '.join(self.quantities(where))}"
            )
        try:
            return truth.read(self._truth_folders, self._truth[where][quantity], quantity)
        except GoldenError:
            if len(self._truth_folders) == 1 and read_manifest(self.folder) != self.manifest:
                raise GoldenError(f"{self.folder} was updated while it was in use: run again") from None
            raise

    def trajectories(self) -> dict[int, list[Trajectory]]:
        """Return the sampled completions of every step, in recorded order, every byte verified.

        Raises `GoldenError` naming the file or folder for anything missing, damaged or changed.
        """
        return self._steps(_TRAJECTORIES)

    def greedy(self) -> dict[int, list[Trajectory]]:
        """Return the greedy completions of a sampled case at every step, under the weights before its updates.

        Raises `GoldenError` as `trajectories` does.
        """
        return self._steps(GREEDY)

    def _steps(self, below: str) -> dict[int, list[Trajectory]]:
        names = [path for path in self._inputs() if path.startswith(f"{below}/")]
        if not names:
            raise GoldenError(
                f"{self.folder / below} holds no trajectories: make the inputs of the case with regress golden "
                f"record {self.name} --inputs"
            )
        steps: dict[int, list[Trajectory]] = {}
        for name in names:
            for step, found in _trajectories(self._read_input(name), self.folder / name):
                if step in steps:
                    raise GoldenError(
                        f"{self.folder / name} holds step {step}, which another file holds: keep one"
                    )
                steps[step] = found
        return dict(sorted(steps.items()))

    def tolerance(self, quantity: str, precision: str) -> ToleranceEntry | None:
        """Return the recorded tolerance; None where none was measured."""
        if self.manifest is None:
            return None
        return self.manifest.tolerances.get(quantity, {}).get(precision)

    @property
    def _truth(self) -> Truth:
        return {} if self.manifest is None else self.manifest.truth

    def _check_where(self, where: str) -> None:
        if where not in self._truth:
            recorded = ", ".join(self.wheres()) or f"none yet: run regress golden record {self.name}"
            raise GoldenError(f"{self.folder} has no optimizer update {where!r}: recorded are {recorded}")

    def _inputs(self) -> list[str]:
        """Return the paths of the inputs within the case: the recorded ones, or the present ones while
        nothing is recorded.
        """
        if self.manifest is None or self._allow_changed_inputs:
            return input_files(self.folder)
        return sorted(self.manifest.inputs)

    def _read_input(self, name: str) -> bytes:
        path = self.folder / name
        if self.manifest is not None and not self._allow_changed_inputs:
            if name not in self.manifest.inputs:
                raise GoldenError(f"{path} is not of the recording: {RESTORE}")
            return read_stamped(path, self.manifest.inputs[name])
        return read_unstamped(path)


def _trajectories(data: bytes, path: Path) -> Iterable[tuple[int, list[Trajectory]]]:
    found = detect_format(data)
    if found is None:
        raise GoldenError(f"{path} is no record of trajectories: {RESTORE}")
    try:
        records = found.decode(data)
        for record in records:
            where = parse_stem(path.stem)
            if where is not None and where.step != record.step:
                raise GoldenError(f"{path} holds step {record.step}: it was renamed; give it back its name")
        return [(record.step, from_record(record)) for record in records]
    except (Damage, DumpError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise GoldenError(f"{path} is no intact record of trajectories ({error}): {RESTORE}") from None
