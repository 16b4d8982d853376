"""Rules for files, samples and datums that are lost, made twice, cut off, or in another order.

Of a file that a mode did not write they name the variable or key to set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from regress.compare.dumps.opened_dump import Side
from regress.dump.request_index import VARIABLES
from regress.interop.modes.discrepancy import CLIENT, SERVICE, TRAINER, Discrepancy, some
from regress.interop.modes.mode_rows import ModeRow
from regress.interop.modes.step_context import Link, StepContext
from regress.interop.nexrl_dumps import NexrlDump
from regress.interop.service_dumps import PER_MICROBATCH, ServiceDump

LOST = (
    "datums-lost",
    "{other} lacks samples that {one} trains on: a chunk or a request was lost, or a filter drops samples with "
    "advantages",
    "with advantages other than 0",
)
TWICE = (
    "datums-twice",
    "{other} has samples more often than {one}: a request was sent again and executed twice, or a batch was filled up "
    "with copies",
    "repeat the tokens of others",
)
STRANGE = (
    "other-samples-sent",
    "{other} has samples that {one} does not have: another batch, or tokens that were changed on the way",
    "with tokens of no sample",
)
"""Rule, cause and proof of samples that do not correspond to each other."""


def presence(context: StepContext) -> Iterator[Discrepancy]:
    """Yield what is wrong with the samples of a step."""
    for link in context.links:
        expected, found = _sides(context, link)
        if link.whose[1] == SERVICE and context.index is None:
            continue  # without an index, datums may as well be in files that were lost
        if any(row.tokens is None for row in (*expected, *found)):
            continue  # nothing tells which samples these are
        yield from _between(link, expected, found)


def dropped(context: StepContext) -> list[str]:
    """Return the names of samples that were left out although that changes nothing: their advantages are all 0."""
    for link in context.links[:1]:
        have = {id(row) for row, _ in link.pairs}
        return [row.name for row in context.trainer if id(row) not in have and _idle(context, row)]
    return []


def _idle(context: StepContext, row: ModeRow) -> bool:
    if "advantages" in row.values:
        return row.idle
    group = [other.reward for other in context.trainer if other.key[0] == row.key[0]]
    return len(group) > 1 and len({*group}) == 1


def _sides(context: StepContext, link: Link) -> tuple[list[ModeRow], list[ModeRow]]:
    rows = {
        TRAINER: [*context.trainer],
        CLIENT: _sent(context, link),
        SERVICE: [*(context.service or ())],
    }
    expected = rows[link.whose[0]]
    if link.whose[0] == TRAINER:
        have = {id(row) for row, _ in link.pairs}
        expected = [row for row in expected if id(row) in have or not _idle(context, row)]
    return expected, rows[link.whose[1]]


def _sent(context: StepContext, link: Link) -> list[ModeRow]:
    """Return the rows of the client as a link has them: as it dumped them, or as the service is to compute them."""
    if context.client is None:
        return []
    return context.client.sent if link.whose[0] == CLIENT else context.client.rows


def _between(link: Link, expected: Sequence[ModeRow], found: Sequence[ModeRow]) -> Iterator[Discrepancy]:
    mine, its = {id(row) for row, _ in link.pairs}, {id(row) for _, row in link.pairs}
    lost = [row for row in expected if id(row) not in mine]
    more = [row for row in found if id(row) not in its]
    cut = _cut(lost, more)
    gone = {id(row) for pair in cut for row in pair}
    lost, more = ([row for row in rows if id(row) not in gone] for rows in (lost, more))
    known = Counter(row.content for row in expected)
    twice = [row for row in more if known[row.content]]
    strange = [row for row in more if not known[row.content]]
    one, other = link.whose
    if cut:
        long, short = cut[0]
        yield Discrepancy(
            "completions-cut-off",
            f"{other} has completions cut off: a smaller limit of tokens, or a datum cut to a length",
            (
                f"{some([a.name for a, _ in cut], 'sample')}: the {short.size} tokens of {short.name} are the first "
                f"of the {long.size} of {long.name}",
            ),
            ("batch_inputs", "coverage", "trajectory"),
        )
    for rows, word, (rule, cause, proof) in (
        (lost, "sample", LOST),
        (twice, "datum", TWICE),
        (strange, "datum", STRANGE),
    ):
        if rows:
            yield Discrepancy(
                rule,
                cause.format(one=one, other=other),
                (f"{some([row.name for row in rows], word)} {proof}",),
                ("coverage", "batch_inputs", "loss", "gradient"),
            )


def _cut(lost: Sequence[ModeRow], more: Sequence[ModeRow]) -> list[tuple[ModeRow, ModeRow]]:
    """Return lost samples with a found one that is the beginning of it, and has a part of its completion."""
    pairs: list[tuple[ModeRow, ModeRow]] = []
    taken: set[int] = set()
    for long in lost:
        for short in more:
            a, b = long.tokens, short.tokens
            if a is None or b is None or id(short) in taken or not 1 < b.size < a.size:
                continue
            if (a[: b.size] == b).all() and (long.mask is None or long.mask[: b.size].any()):
                pairs.append((long, short))
                taken.add(id(short))
                break
    return pairs


def order(context: StepContext) -> Iterator[Discrepancy]:
    """Yield chunks of a step that the service did not execute in the order in which the client sent them."""
    passes = context.passes
    if context.client is None or context.service is None or not passes:
        return
    executed = sorted(passes, key=lambda one: min((part.micro for part in one.parts), default=0))
    sequence = [one.seq_id for one in executed if one.seq_id is not None]
    made = [np.array(datum.tokens, np.int64).tobytes() for one in executed for datum in one.datums]
    sent = [row.content for row in context.client.rows]
    wrong = made != sent and sorted(made) == sorted(
        sent
    )  # of lost datums, and of those made twice, others tell
    if not wrong and sequence == sorted(sequence):
        return
    evidence = []
    if sequence != sorted(sequence):
        evidence.append(f"the requests ran in the order {', '.join(map(str, sequence))} of their seq_id")
    if wrong:
        at = next(i for i, (a, b) in enumerate(zip(made, sent, strict=True)) if a != b)
        evidence.append(
            f"place {at} of the execution has datum {sent.index(made[at])} of the client in place of {at}"
        )
    yield Discrepancy(
        "chunks-permuted",
        "the service did not execute the chunks of a batch in the order of their seq_id, so that gradients were added "
        "up in another order: it has to wait for the lower number, since clients send chunks at once, the first last",
        tuple(evidence),
        ("gradient", "param", "optimizer", "grad_norm"),
    )


ENABLED, DIR, EVERY_N, OPTIONS = VARIABLES
CLIENT_TYPES = ("prepared_trajectories", "datums", "training_metrics")


def files(
    trainer: Side, client: Side | None, service: Side | None, steps: Sequence[int]
) -> Iterator[Discrepancy]:
    """Yield files that are missing from the dumps of client and service."""
    if isinstance(service, ServiceDump):
        yield from _of_service(trainer, service, steps)
    if isinstance(client, NexrlDump):
        yield from _of_client(client, steps)


def _of_service(trainer: Side, service: ServiceDump, steps: Sequence[int]) -> Iterator[Discrepancy]:
    lost = [name for step in steps for name in service.missing(step)]
    if lost:
        yield Discrepancy(
            "files-lost",
            f"files that the service wrote are missing: deleted or not copied out of {DIR}; dump again with "
            f"{ENABLED}=1, {DIR} and {OPTIONS}={','.join(PER_MICROBATCH)}",
            (f"requests.jsonl tells of {some(lost, 'file')}",),
            ("coverage",),
        )
    recorded = {type for one in service.passes if one.step in steps for type in one.types}
    golden = {type for type, where in trainer.entries.values() if where.step in steps}
    off = [type for type in PER_MICROBATCH if type in golden and type not in recorded]
    if recorded and {*off} - {"batch_inputs"}:  # whose tokens and masks the others have, too
        yield Discrepancy(
            "types-not-recorded",
            f"the service did not record {', '.join(off)}: set {OPTIONS}={','.join([*sorted(recorded), *off])} and "
            "start it again",
            (f"requests.jsonl tells of {', '.join(sorted(recorded))} alone",),
            ("coverage",),
        )
    silent = [str(step) for step in steps if not any(o.types for o in service.passes if o.step == step)]
    if silent and len(silent) < len(steps):
        yield Discrepancy(
            "steps-not-recorded",
            f"the service recorded nothing of some steps: set {EVERY_N}=1",
            (f"requests.jsonl tells of no file of step {', '.join(silent)}",),
            ("coverage",),
        )


def _of_client(client: NexrlDump, steps: Sequence[int]) -> Iterator[Discrepancy]:
    for type in CLIENT_TYPES:
        lost = [str(step) for step in steps if client.raw(type, step) is None]
        if lost:
            yield Discrepancy(
                "client-files-lost",
                f"the client's dump lacks {type}: set debug.remote_api_dump_options.{type}=true and "
                "debug.dump_every_n_steps=1, or copy the files again",
                (f"no file of step {', '.join(lost)} in {client.folder}/{type}",),
                ("coverage",),
            )
