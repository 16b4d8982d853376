"""Numbers of the service for Prometheus: its own, and those of the application."""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Mapping

PREFIX = "regress_service_"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Counters:
    """Counts of answered requests, by wire, route and status."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._seconds: Counter[tuple[str, str]] = Counter()

    def add(self, wire: str, route: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        with self._lock:
            self._requests[wire, route, status] += 1
            self._seconds[wire, route] += seconds  # type: ignore[assignment]

    def text(self, service: Mapping[str, float]) -> str:
        """Return all numbers in Prometheus' text format."""
        lines = []
        for name, value in sorted(service.items()):
            bare, brace, labels = name.partition("{")
            lines.append(f"{PREFIX}{re.sub(r'[^a-zA-Z0-9_]', '_', bare)}{brace}{labels} {_number(value)}")
        with self._lock:
            lines.append(f"# TYPE {PREFIX}http_requests_total counter")
            for (wire, route, status), count in sorted(self._requests.items()):
                labels = f'wire="{wire}",route="{route}",status="{status}"'
                lines.append(f"{PREFIX}http_requests_total{{{labels}}} {count}")
            lines.append(f"# TYPE {PREFIX}http_seconds_total counter")
            for (wire, route), seconds in sorted(self._seconds.items()):
                labels = f'wire="{wire}",route="{route}"'
                lines.append(f"{PREFIX}http_seconds_total{{{labels}}} {_number(seconds)}")
        return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
