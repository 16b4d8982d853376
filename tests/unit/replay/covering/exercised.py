"""Report on what the cases and variants of a project exercise, and on what they leave out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from regress.golden.golden_case import GoldenCase
from regress.replay.test_matrix import replays
from regress.replay.variant import Extent, Precision, Variant
from tests.unit.replay.covering.coverage import Alike, Missing, Pair, Setting, missing, settings_of, shown
from tests.unit.replay.covering.possible import forbidden
from tests.unit.replay.covering.traced import Reads


@dataclass(frozen=True)
class Unexercised:
    """Settings and pairs that nothing exercises.

    Attributes:
        settings, pairs: those that are possible; pairs with a function that reads both.
        refused: those that no configuration may have, each with the sentence that refuses it.
    """

    settings: tuple[Setting, ...]
    pairs: Mapping[Pair, str]
    refused: Mapping[tuple[Alike, ...], str]

    def lines(self) -> list[str]:
        """Return a line for each setting and pair that is possible, pairs after the function that reads them."""
        found = [str(setting) for setting in self.settings]
        for function in sorted({*self.pairs.values()}):
            pairs = (pair for pair, reader in self.pairs.items() if reader == function)
            found += [f"{function}: {shown(first)} with {shown(second)}" for first, second in pairs]
        return found


def exercised(cases: Sequence[GoldenCase], variants: Mapping[str, Variant]) -> Iterator[frozenset[Setting]]:
    """Yield the settings of every process of every replay of the default matrix."""
    for replay in replays(cases, variants, tuple(Precision), Extent.DEFAULT):
        given = _files(replay.case)
        for overrides in replay.processes:
            yield settings_of(replay.case.config, {**given, **replay.precision.overrides, **overrides})


def _files(case: GoldenCase) -> dict[str, str]:
    """Return the keys that a replay sets to files of the case."""
    files = {"optimizer.state_path": "optimizer.safetensors", "reference.path": "reference"}
    return {key: name for key, name in files.items() if (case.folder / name).exists()}


def unexercised(sets: Iterable[frozenset[Setting]], reads: Reads) -> Unexercised:
    """Return the settings and pairs that none of these sets has, which are those of one replay each."""
    found = missing(sets, reads)
    refused = {alike: sentence for alike in _all(found) if (sentence := _refused(alike)) is not None}
    return Unexercised(
        tuple(setting for setting in found.settings if ((setting,),) not in refused),
        {pair: name for pair, name in found.pairs.items() if pair not in refused},
        refused,
    )


def _all(found: Missing) -> Iterator[tuple[Alike, ...]]:
    yield from (((setting,),) for setting in found.settings)
    yield from found.pairs


def _refused(together: tuple[Alike, ...]) -> str | None:
    """Return the sentence that refuses the first settings of those that are alike, if all are refused."""
    sentence = None
    for chosen in product(*together):
        sentence = forbidden(chosen)
        if sentence is None:
            return None
    return sentence
