"""Command ``regress track``: metrics of a run, sent to trackers later."""

from __future__ import annotations

from pathlib import Path

import click

from regress.printable_text import echo


@click.group()
def track() -> None:
    """Send the metrics of a run to trackers."""


@track.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--to",
    "tracker",
    required=True,
    metavar="TRACKER",
    help="wandb, tensorboard, trackio, swanlab or another.",
)
@click.option(
    "--all/--missing",
    "whole",
    default=None,
    help="Every step and update once, as a new run; or what the tracker lacks, in the run that it has. Default: what "
    "it lacks if it took part in the run, else everything.",
)
@click.option("--project", help="Project in the tracker; default: that of the run.")
@click.option("--run-name", help="Name of the run in the tracker; default: that of the run.")
@click.option(
    "--run-id", help="Id of the run in the tracker; default: that of the run, or a new one with --all."
)
@click.option("--log-dir", help="Directory of a tracker that keeps files; default: RUN.")
def replay(
    run: Path,
    tracker: str,
    whole: bool | None,
    project: str | None,
    run_name: str | None,
    run_id: str | None,
    log_dir: str | None,
) -> None:
    """Send the metrics of RUN, the output directory of a run, to a tracker.

    \b
    What did not arrive because the tracker was down (wandb_backup/):
      regress track replay outputs/demo --to wandb
    The whole run, as if nothing had interrupted it, to another tracker:
      regress track replay outputs/demo --to tensorboard

    metrics.jsonl is the record of the run, so a tracker can be given all of it at any time.

    Exit codes: 0 sent, 1 the tracker did not take everything, 2 it cannot be used.
    """
    from regress.engine.tracking.metrics_replay import replay as send

    done = send(
        run,
        tracker,
        notice=lambda text: echo(f"note: {text}", err=True),
        whole=whole,
        project=project,
        run_name=run_name,
        run_id=run_id,
        log_dir=log_dir,
    )
    what = "rows of the whole run" if done.whole else "rows that it lacked"
    echo(f"{tracker}: {done.sent} {what} sent to run {done.run_id} of project {done.project}")
