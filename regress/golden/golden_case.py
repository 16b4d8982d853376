"""Golden case: its folder, opened, with every byte verified before use; `case.yaml` says what it is for."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from regress.dump.canonical_json import Json, plain
from regress.dump.coordinates import parse_stem
from regress.dump.dump_reader import detect_format
from regress.dump.file_damage import Damage
from regress.dump.formats import safetensors_format
from regress.dump.numpy_arrays import Array
from regress.dump.trajectory import Trajectory, from_record
from regress.durable_files import unfinished
from regress.errors import DumpError, GoldenError, reason
from regress.golden.case_manifest import Manifest, ToleranceEntry, TruthEntry, kind_of, read_manifest
from regress.golden.golden_files import (
    CASE_FILE,
    RESTORE,
    converted,
    finish_update,
    input_files,
    read,
    stamp_of,
    truth_file,
    where_order,
)

GREEDY = "greedy"
"""Folder of the greedy completions of a sampled case."""

_TRAJECTORIES = "trajectories"
_ROLLOUTS = ("recorded", "sampled")
_LIMIT = 2**20
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+")
_BROKEN = (Damage, DumpError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class CaseFile:
    """Content of `case.yaml`.

    Attributes:
        reason: reason why this case exists.
        claims: signals it promises beyond those of every case, such as `tool_tokens`.
        config: engine configuration, as overrides of the defaults.
        recipe: settings that the inputs were made with, in the form of the program that made them.
        rollouts: ``recorded``: replays read the recorded rollouts; ``sampled``: they sample their own, which must be
            the recorded ones.
        precisions: precisions that it is replayed in; none: all.
        leaves_out: quantities that are not recorded, because other cases have them.
    """

    reason: str
    claims: list[str] = field(default_factory=list)
    config: dict[str, Json] = field(default_factory=dict)
    recipe: dict[str, Json] = field(default_factory=dict)
    rollouts: str = _ROLLOUTS[0]
    precisions: list[str] = field(default_factory=list)
    leaves_out: list[str] = field(default_factory=list)


_KEYS = ("reason", "claims", "rollouts", "precisions", "leaves_out", "config", "recipe")


class GoldenCase:
    """One case, as it was when it was opened; the attributes of its `CaseFile` are its own.

    Args:
        folder: folder of the case, named like it.
        allow_changed_inputs: open it although `case.yaml`, the model or the trajectories are not those that were
            recorded, as whoever records them anew must.

    Attributes:
        manifest: manifest of the recording, or None while nothing is recorded.

    Raises `GoldenError` naming the file when `case.yaml` or the manifest is missing, damaged or changed.
    """

    def __init__(self, folder: Path, *, allow_changed_inputs: bool = False) -> None:
        finish_update(folder.parent)
        self.folder = folder
        self.name = folder.name
        self.manifest: Manifest | None = read_manifest(folder)
        self._allow_changed_inputs = allow_changed_inputs
        found = parse_case(self._read_input(CASE_FILE), folder / CASE_FILE)
        self.reason, self.claims, self.config, self.recipe = (
            found.reason,
            found.claims,
            found.config,
            found.recipe,
        )
        self.precisions, self.leaves_out = found.precisions, found.leaves_out
        self.sampled = found.rollouts == "sampled"

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
                if stamp_of(self.folder / path, stamp.size) != stamp:
                    problem = f"{self.folder / path} is not the file that was recorded: {RESTORE}"
                    yield converted(self.folder / path, stamp) or problem
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
        return sorted({} if self.manifest is None else self.manifest.truth, key=where_order)

    def quantities(self, where: str) -> list[str]:
        """Return the recorded quantities of an update."""
        if self.manifest is None or where not in self.manifest.truth:
            recorded = ", ".join(self.wheres()) or f"none yet: run regress golden record {self.name}"
            raise GoldenError(f"{self.folder} has no optimizer update {where!r}: recorded are {recorded}")
        return sorted(self.manifest.truth[where])

    def truth(self, where: str) -> dict[str, dict[str, Array]]:
        """Return quantity -> tensor name -> values, every byte verified."""
        return {quantity: self.truth_of(where, quantity) for quantity in self.quantities(where)}

    def truth_of(self, where: str, quantity: str) -> dict[str, Array]:
        """Return tensor name -> values of one quantity, every byte verified."""
        if quantity not in self.quantities(where):
            raise GoldenError(
                f"{self.folder} has no {quantity!r} at {where}: recorded are {', '.join(self.quantities(where))}"
            )
        assert self.manifest is not None
        try:
            return read_truth(self.folder, where, quantity, self.manifest.truth[where][quantity])
        except GoldenError:
            if unfinished(self.folder.parent) or read_manifest(self.folder) != self.manifest:
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
            raise GoldenError(f"""{self.folder / below} holds no trajectories: make the inputs of the case with regress
            golden record {self.name} --inputs""")
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
        return None if self.manifest is None else self.manifest.tolerances.get(quantity, {}).get(precision)

    def _inputs(self) -> list[str]:
        """Return the inputs by their paths within the case: the recorded ones, or those that are there."""
        if self.manifest is None or self._allow_changed_inputs:
            return input_files(self.folder)
        return sorted(self.manifest.inputs)

    def _read_input(self, name: str) -> bytes:
        path = self.folder / name
        if self.manifest is None or self._allow_changed_inputs:
            return read(path)
        if name not in self.manifest.inputs:
            raise GoldenError(f"{path} is not of the recording: {RESTORE}")
        return read(path, self.manifest.inputs[name])


def read_truth(folder: Path, where: str, quantity: str, entry: TruthEntry) -> dict[str, Array]:
    """Return the tensors of a truth file, every byte verified; raises `GoldenError` naming the file."""
    path = folder / truth_file(where, quantity)
    data = read(path, entry.stamp)
    try:
        (record,) = safetensors_format.decode(data)
    except _BROKEN as error:
        raise GoldenError(f"{path} is not an intact record ({error}): {RESTORE}") from None
    if record.meta.get("quantity") != quantity or record.where.stem != where:
        raise GoldenError(f"{path} holds {record.where.stem}/{record.meta.get('quantity')}: {RESTORE}")
    found = {name: kind_of(array) for name, array in record.tensors.items()}
    if found != {name: (row.dtype, row.shape) for name, row in entry.tensors.items()}:
        raise GoldenError(f"{path} holds other tensors than its manifest says: {RESTORE}")
    return record.tensors


def _trajectories(data: bytes, path: Path) -> Iterable[tuple[int, list[Trajectory]]]:
    found = detect_format(data)
    if found is None:
        raise GoldenError(f"{path} is not a record of trajectories: {RESTORE}")
    try:
        records = found.decode(data)
        for record in records:
            where = parse_stem(path.stem)
            if where is not None and where.step != record.step:
                raise GoldenError(f"{path} holds step {record.step}: it was renamed; give it back its name")
        return [(record.step, from_record(record)) for record in records]
    except _BROKEN as error:
        raise GoldenError(f"{path} is not an intact record of trajectories ({error}): {RESTORE}") from None


def parse_case(data: bytes, path: Path) -> CaseFile:
    """Parse `case.yaml`; raises `GoldenError` naming `path`, the rule and the remedy for anything malformed."""
    if len(data) > _LIMIT:
        raise GoldenError(
            f"{path} has {len(data)} bytes, but a case is described in at most {_LIMIT}: shorten it"
        )
    try:
        values = plain(yaml.load(data.decode("utf-8"), Loader=_Loader), "the case")
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise GoldenError(f"{path}{line} is not valid YAML ({error.problem}): correct it") from None
    except RecursionError:
        raise GoldenError(f"{path} is nested too deeply: it is not a description of a case") from None
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, DumpError) as error:
        raise GoldenError(f"{path} holds what no case can hold ({reason(error)}): correct it") from None
    if not isinstance(values, dict):
        raise GoldenError(f"{path} must hold a mapping with the key reason: write lines of KEY: VALUE")
    for key in values.keys() - set(_KEYS):
        raise GoldenError(f"{path} has the unknown key {key!r}: a case has {', '.join(_KEYS)}")
    why, rollouts = values.get("reason"), values.get("rollouts", _ROLLOUTS[0])
    if not isinstance(why, str) or not why.strip():
        raise GoldenError(f"{path} has no reason: write one sentence on what this case is for")
    if rollouts not in _ROLLOUTS:
        raise GoldenError(f"{path} has rollouts {rollouts!r}: write {' or '.join(_ROLLOUTS)}")
    given: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
    for key in ("claims", "precisions", "leaves_out"):
        found = given.get(key) or []
        if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
            raise GoldenError(f"{path} has {key} {found!r}: write a list of words")
        given[key] = found
    for key in ("config", "recipe"):
        given[key] = given.get(key) or {}
        if not isinstance(given[key], dict):
            raise GoldenError(f"{path} has {key} {given[key]!r}: write a mapping")
    return CaseFile(**given)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no annotations
    """Loader of plain values only: no tags, aliases (which can grow without bound) or duplicate keys;
    `1e-3` is a number.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "an alias, which no case needs", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} twice", key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        found: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return found


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
