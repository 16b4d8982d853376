"""Records that a dump lacks although others of the same dump, or those of the other one, tell that they were made."""

from __future__ import annotations

from regress.compare.dumps.opened_dump import Side
from regress.compare.quantities import MICRO_TYPES
from regress.dump.coordinates import Place

NAMED = 4
"""Most gaps that are named one by one."""


def absent_records(golden: Side, actual: Side) -> tuple[str, ...]:
    """Return what the actual dump lacks of the steps that both have, a phrase each.

    A microbatch counts as computed if any type of record has it, so a type that others have at a place was lost there.
    Ranks and microbatches of the golden dump alone are named, too, where no manifest lists the actual files: either
    they were lost, or the layout is another one.
    """
    known, other = _places(golden), _places(actual)
    own_steps, steps = ({at.step for at in set().union(*side.values())} for side in (known, other))
    steps &= own_steps
    made = {at for places in other.values() for at in places if at.step in steps}
    record_types = [
        record_type for record_type in known if record_type not in other and actual.writes(record_type)
    ]
    gaps = [f"all records of {record_type}, which the golden dump has" for record_type in record_types]
    gaps += [
        f"{record_type} of {_words(at)} (which {', '.join(having)} ha{'s' if len(having) == 1 else 've'})"
        for record_type, places in other.items()
        for at in sorted(made - places)
        for having in [[name for name, there in other.items() if at in there]]
    ]
    if actual.system == "regress":  # its manifest would tell of lost files
        known = {}
    expected = {at for places in known.values() for at in places if at.step in steps}
    ranks = sorted({at.rank or 0 for at in expected} - {at.rank or 0 for at in made}) if made else []
    gaps += [f"all records of rank {rank}, which the golden dump has" for rank in ranks]
    lost = sorted(at for at in expected - made if at.rank not in ranks) if made else []
    gaps += [f"all records of {_words(at)}, which the golden dump has" for at in lost]
    more = [f"and {len(gaps) - NAMED} more"] if len(gaps) > NAMED else []
    return (*gaps[:NAMED], *more)


def _places(side: Side) -> dict[str, set[Place]]:
    """Return the places of each type of records of microbatches."""
    found: dict[str, set[Place]] = {}
    for record_type, where in side.entries.values():
        if record_type in MICRO_TYPES and where.micro is not None:
            found.setdefault(record_type, set()).add(where.counted)
    return found


def _words(at: Place) -> str:
    update = f", update {at.update}" if at.update else ""
    return f"step {at.step}{update}, rank {at.rank}, microbatch {at.micro}"
