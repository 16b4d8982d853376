"""Errors for people: one sentence that names the culprit, the rule and the remedy.

The command line prints them without a traceback and exits with ``exit_code``. No message holds a credential of a URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from regress.credential_redaction import redacted
from regress.printable_text import printable


class RegressError(Exception):
    """Base of every error that a user can cause or fix; ends of lines in a message are spaces.

    Attributes:
        on_all_ranks: True if every rank of the run raises it, so that one of them can tell it for all.
    """

    exit_code = 2  # 1 tells a difference
    on_all_ranks = False

    def __init__(self, *args: object) -> None:
        super().__init__(*(_printable_message(arg) if isinstance(arg, str) else arg for arg in args))

    def to_json(self) -> dict[str, str]:
        """Return the sentence for a program: its kind, and what is wrong and what helps apart (empty: not said)."""
        sentence = " ".join(" | ".join([str(self), *getattr(self, "__notes__", ())]).split())
        rule, remedy = _apart(sentence)
        return {"type": type(self).__name__, "message": sentence, "rule": rule, "remedy": remedy}


def _printable_message(text: str) -> str:
    """Return a message as it may be shown: one with a name of thousands of characters loses its middle."""
    known = printable(redacted(_LINE_ENDS.sub(" ", text)))
    return known if len(known) <= _LONGEST else f"{known[: _LONGEST // 2]} [...] {known[-_LONGEST // 4 :]}"


def _apart(sentence: str) -> tuple[str, str]:
    """Return what a sentence says is wrong, and what it says to do, which is its last part outside of brackets."""
    depth, cuts = 0, {"; ": -1, ": ": -1}
    for place, letter in enumerate(sentence):
        depth = max(0, depth + (letter in "([{") - (letter in ")]}"))
        for sign in cuts:
            if not depth and sentence.startswith(sign, place):
                cuts[sign] = place
    at = cuts["; "] if cuts["; "] >= 0 else cuts[": "]
    return (sentence, "") if at < 0 else (sentence[:at], sentence[at + 2 :])


_LONGEST = 2000
_LINE_ENDS = re.compile(r"\s*\n\s*")


class ConfigError(RegressError):
    """A configuration key is unknown, of the wrong type, or part of an impossible combination."""


class NotInstalled(ConfigError):  # noqa: N818  # reads as what it says of a package
    """An optional package is not installed; the message holds the command that installs it."""


class CheckpointError(RegressError):
    """A checkpoint is missing, incomplete, damaged, or not one that this run can go on from."""


class CheckError(RegressError):
    """A value is checked in a way that cannot fail, or cannot be stored bit for bit."""


class CompareError(RegressError):
    """Values cannot be brought into canonical form, or cannot be compared at all."""


class DumpError(RegressError):
    """A dump cannot be written, or is missing, incomplete or damaged."""


class CaptureError(RegressError):
    """A trainer cannot be recorded as it is: something cannot be found, is ambiguous or is not supported."""


class GuardError(RegressError):
    """A rule of a healthy training step does not hold, or a trainer cannot be watched as it is asked."""


class GoldenError(RegressError):
    """A golden case is missing, damaged or without signal, or an update of it cannot be made."""


class OracleError(RegressError):
    """Nothing can be computed in true float64 from a dump: it does not tell enough, or of something else."""


class ReplayError(RegressError):
    """Recorded trajectories do not fit the run that asks for them."""


class RankError(ReplayError):
    """A rank of a job raised, died or hangs; notes hold its traceback and what it printed last.

    Attributes:
        rank: the rank, or None where it is unknown.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class NotFinite(RegressError):  # noqa: N818  # reads as what it says of a loss
    """A loss or a gradient is NaN or infinite, so that no update can be made from it."""


class NotSupported(RegressError):  # noqa: N818  # reads as what an adapter says
    """A user's own trainer does not support a variant; the message is the reason."""


class DoctorError(RegressError):
    """A run cannot be examined, or a repair cannot be made or taken back."""


class SystemsError(RegressError):
    """A system under test cannot be found, installed, run or judged."""


class TrackingError(RegressError):
    """A tracker did not take every row that was sent to it."""

    exit_code = 1


class TaskError(RegressError):
    """A task, reward or tokenizer cannot do what the configuration asks."""


def meant(name: str, known: Iterable[str], most: int = 2) -> str:
    """Return ``did you mean a or b? `` for a name that is none of the known ones; empty where none of them is near."""
    from difflib import get_close_matches  # every run of pytest loads this module, and few need it

    near = get_close_matches(name, [*dict.fromkeys(known)], n=most)
    return f"did you mean {' or '.join(near)}? " if near else ""


def reason(error: BaseException, limit: int = 200) -> str:
    """Return another library's error on one line, to stand in brackets in one of our sentences."""
    text = printable(redacted(f"{type(error).__name__}: {' '.join(str(error).split())}"))
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def lost_connection(error: BaseException | None) -> bool:
    """Return True if an error or one of its causes is a communication error, which another rank may have caused."""
    while error is not None:
        text = f"{type(error).__name__} {error}"
        if any(sign in text for sign in _CONNECTION):
            return True
        error = error.__cause__
    return False


_CONNECTION = (
    *(
        "DistNetworkError",
        "DistStoreError",
        "DistBackendError",
        "Connection closed by peer",
        "Connection reset",
    ),
    *(
        "Connection refused",
        "Broken pipe",
        "gloo/transport",
        "Timed out waiting",
        "Wait timeout",
        "wait timeout",
    ),
)
"""Words of gloo and torch.distributed for a peer that is gone or does not answer."""
