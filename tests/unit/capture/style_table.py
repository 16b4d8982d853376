"""Write docs/styles.md: every style of trainer, and what `regress compare` says of faults planted in it.

python tests/unit/capture/style_table.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from click.testing import CliRunner

from regress.cli import main
from regress.errors import CaptureError

sys.path.insert(0, str(Path(__file__).parent))
from styles import FAULTS, STYLES, train

HEAD = """# Styles of trainers

Small trainers of our own, each with another way from logits to log-probs and none with a module that tells its head,
recorded by `record(folder, model, token_gradient=True)`. Microbatches of 8, 3 and 1 samples, padded to their own
longest, have to be equal in every one. Then each of these faults is planted, and `regress compare` has to say what it
is: FAULTS.

`python tests/unit/capture/style_table.py` writes this page.

| style | log-probs | equal | named |
|---|---|---|---|
"""
PAGE = Path(__file__).parents[3] / "docs/styles.md"


def head() -> str:
    """The page without its rows."""
    return HEAD.replace("FAULTS", ", ".join(FAULTS))


def start(style: str) -> str:
    """The first cells of a style."""
    kind, log_probs = STYLES[style]
    doc = (kind if style == "past hooks" else log_probs).__doc__ or ""
    return f"| {style} | {doc.splitlines()[0].rstrip('.')} |"


def row(style: str, folder: Path) -> str:
    """The row of a style."""
    for size in (8, 3, 1):
        train(folder / str(size), style, size)
    equal = all(not compare(folder / "8", folder / str(size))[0] for size in (3, 1))
    train(folder / "right", style, 4, tapped=True)
    named, refused = 0, []
    for fault, says in FAULTS.items():
        try:
            train(folder / fault, style, 4, fault, tapped=True)
        except CaptureError:
            refused.append(fault)
        else:
            named += says in compare(folder / "right", folder / fault)[1]
    more = f", refused with a sentence: {', '.join(refused)}" if refused else ""
    return f"{start(style)} {'yes' if equal else 'no'} | {named} of {len(FAULTS)}{more} |"


def compare(golden: Path, actual: Path) -> tuple[int, str]:
    """Exit code and text of the command."""
    done = CliRunner().invoke(main, ["compare", str(golden), str(actual)])
    return done.exit_code, " ".join(done.output.split())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        PAGE.write_text(head() + "\n".join(row(style, Path(made) / style) for style in STYLES) + "\n")
