"""The main job: replay recorded steps under every layout; record steps, replay them, and compare bit by bit.

Says in five lines what the commands have shown, and exits with the code of the first one that fails.
``python examples/demo.py [ARGUMENT]...`` takes those of ``regress replay``, in place of the case dense.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

OUTPUTS = Path("outputs")
CASE = "dense"  # which has the most layouts; the tests replay all cases
PAGE = OUTPUTS / "headroom" / "index.html"
BITWISE = OUTPUTS / "demo_bitwise.json"
RUNS = OUTPUTS / "main_job"  # not where a reader of the README trains the same configurations
RECORDED, REPLAYED = (RUNS / name / "debug_dump" for name in ("demo", "demo_replay"))


def main() -> int:
    """Run the commands and tell what they have shown; return the exit code."""
    chosen = sys.argv[1:] or [CASE]
    for command in (
        ["replay", "--matrix", "reduced", "--jobs", "2", "--report", str(PAGE.parent), *chosen],
        ["train", "--config-name", "demo", "--overwrite"],
        ["train", "--config-name", "demo_replay", "--overwrite"],
        ["dump", "show", str(RECORDED)],
        ["compare", "--bitwise", str(RECORDED), str(REPLAYED), "--json", str(BITWISE)],
    ):
        print("\n$", shlex.join(["regress", *command]), flush=True)
        own = {**os.environ, "EXPERIMENT_PATH": str(RUNS)}
        code = subprocess.run([sys.executable, "-m", "regress", *command], check=False, env=own).returncode
        if code:
            return code
    told(json.loads((PAGE.parent / "report.json").read_text()), json.loads(BITWISE.read_text()))
    return 0


def told(replays: dict[str, Any], bitwise: dict[str, Any]) -> None:
    """Print what was shown, from the reports of ``regress replay`` and ``regress compare --bitwise``."""
    layouts = len(replays["variants"])
    near = min(
        (row for row in replays["headroom"] if row["headroom"] is not None), key=lambda row: row["headroom"]
    )
    case, _, layout = near["closest"]["where"].partition("/")
    share = f"{near['closest']['multiple']:.2g} of what is tolerated"
    print(f"""
What this has shown:
  replayed      recorded GRPO steps under {layouts} layouts: {replays["summary"]}
  closest call  {near["quantity"]} of case {case} under layout {layout}, {share}
  left out      {"; ".join(map(short, replays["notes"])) or "nothing"}
  bit by bit    steps recorded on a real task, against their replay: {bitwise["summary"]}
  look at it    open {PAGE} in a browser: each quantity of each rank and microbatch""")


def short(note: str) -> str:
    """Return a note on replays that are not possible without its first words and its remedy."""
    return note.removeprefix("not supported: ").partition("; run ")[0]


if __name__ == "__main__":
    raise SystemExit(main())
