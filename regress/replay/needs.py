"""Optional packages that replays need, and what is said where one is absent."""

from __future__ import annotations

from collections.abc import Iterator

from regress.extras import install, missing
from regress.golden.case import GoldenCase
from regress.replay.configure import overlaid
from regress.replay.variants import Variant


def unmet(case: GoldenCase, variant: Variant) -> str | None:
    """Return why a case cannot be replayed under a variant with what is installed here; None if it can."""
    return next((f"it {why}" for extra in _extras(case, variant) if (why := missing(extra))), None)


def unusable_tracker(variant: Variant) -> str | None:
    """Return why a tracker that a variant opens cannot be used here; None if each can."""
    trackers = variant.overrides.get("tracking.trackers")
    if not trackers:
        return None
    from regress.engine.tracking.availability import unusable

    found = ((name, unusable(name)) for name in trackers)
    return next((f"{name} {why}; run {install(name)}" for name, why in found if why), None)


def _extras(case: GoldenCase, variant: Variant) -> Iterator[str]:
    from regress.engine.adapters.settings import is_adapter

    model = overlaid(case.config, variant.overrides).get("model") or {}
    if is_adapter(case.folder / "model") or (model.get("lora") or {}).get("r"):
        yield "lora"
