"""Provenance of sampled tokens: the weights, and the routing of experts, that each was drawn with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from typing import Any, TypeAlias

from regress.dump.file_damage import Damage

Version: TypeAlias = str | int | None
"""A version as the sampler names it; None for a token that was not sampled, or whose version is unknown."""

PROVENANCE = ("weight_versions", "route_versions")
"""Fields of a trajectory with a version for each token."""
NAMES: Mapping[str, tuple[str, ...]] = {
    "weight_versions": (
        *("weight_versions", "weights_versions", "weight_version", "weights_version"),
        *("policy_versions", "policy_version"),
    ),
    "route_versions": ("route_versions", "route_version", "routing_versions", "routing_version"),
}
"""Names that systems give to these fields."""


def take_versions(fields: dict[str, Any], mask: Sequence[int], prompt: int) -> dict[str, list[Version]]:
    """Remove the versions from the fields of a sample, and return them for each of its S tokens.

    They are one for the sample, or one for each of its tokens, of its completion's, or of those in the loss.

    Args:
        mask: S values, 1 at loss tokens; ``prompt`` tokens that were given come first.

    Raises:
        Damage: for versions of another number or type, or under two names.
    """
    found = {}
    for name, others in NAMES.items():
        given = [other for other in others if fields.get(other) is not None]
        if len(given) > 1:
            raise Damage(f"it tells {' and '.join(given)}, which are one thing")
        if given:
            found[name] = spread(fields.pop(given[0]), mask, prompt, given[0])
    return found


def spread(versions: Any, mask: Sequence[int], prompt: int, name: str) -> list[Version]:
    """Return a version for each token of a sample; see `take_versions`."""
    values = list(versions) if isinstance(versions, list | tuple) else [versions]
    if not all(isinstance(value, str | int | None) and not isinstance(value, bool) for value in values):
        raise Damage(f"its {name} are not texts or whole numbers")
    size, loss = len(mask), sum(map(bool, mask))
    if len(values) == size:
        return values
    if len(values) == size - prompt:
        return [None] * prompt + values
    if len(values) == 1:
        return [values[0] if counted else None for counted in mask]
    if len(values) == loss:
        own = iter(values)
        return [next(own) if counted else None for counted in mask]
    raise Damage(
        f"its {name} are {len(values)} for {size} tokens, {size - prompt} of the completion and {loss} in the loss"
    )


def runs(values: Sequence[Version]) -> list[list[Any]]:
    """Return versions as ``[version, number of tokens]``, one for each run of equal ones."""
    return [[value, len([*same])] for value, same in groupby(values)]


def unrolled(repeated: Any) -> list[Version]:
    """Return the version of each token, from what `runs` returned."""
    return [*chain.from_iterable([value] * int(count) for value, count in repeated)]


def stale(values: Sequence[Version], sampled: Sequence[int]) -> tuple[int, Version, int] | None:
    """Return the number of sampled tokens of older weights, the newest version and the first such token.

    Returns:
        None where all are of one version, or versions are not numbers, so that nothing tells which is newer.
    """
    own = [(index, value) for index, value in enumerate(values) if sampled[index] and value is not None]
    numbers = [(index, int(value)) for index, value in own if str(value).lstrip("-").isdigit()]
    newest = max((value for _, value in numbers), default=None)
    older = [index for index, value in numbers if value != newest]
    return (len(older), newest, older[0]) if older and len(numbers) == len(own) else None
