"""How long each case took in its last runs: plans fit cases into a budget with it."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from shardproof.files import read_input, write_whole

_KEPT = 5


class Durations:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, list[float]] = {}
        try:
            stored = json.loads(read_input(path))
        except (OSError, ValueError, RecursionError):
            stored = {}  # estimates are a convenience: without them the defaults do
        if isinstance(stored, dict):
            self._known = {
                key: [float(v) for v in values][-_KEPT:]
                for key, values in stored.items()
                if isinstance(values, list) and all(isinstance(v, (int, float)) for v in values)
            }

    def estimate(self, identifier: str) -> float | None:
        """Median of the last durations of case ``identifier``, or ``None``."""
        values = self._known.get(identifier)
        return statistics.median(values) if values else None

    def note(self, identifier: str, seconds: float) -> None:
        values = self._known.setdefault(identifier, [])
        values.append(round(seconds, 4))
        del values[:-_KEPT]

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(self._known, indent=0, sort_keys=True) + "\n")
