"""Rules for files that a mode did not write, or that were lost: each names the variable or key to set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from regress.compare.dumps.sides import Side
from regress.compare.modes.discrepancy import Discrepancy, some
from regress.dump.requests import VARIABLES
from regress.interop.nexrl import NexrlDump
from regress.interop.service import PER_MICROBATCH, ServiceDump

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
    told = {type for one in service.passes if one.step in steps for type in one.types}
    golden = {type for type, where in trainer.entries.values() if where.step in steps}
    off = [type for type in PER_MICROBATCH if type in golden and type not in told]
    if off and told:
        yield Discrepancy(
            "types-not-recorded",
            f"the service did not record {', '.join(off)}: set {OPTIONS}={','.join([*sorted(told), *off])} and "
            "start it again",
            (f"requests.jsonl tells of {', '.join(sorted(told))} alone",),
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
