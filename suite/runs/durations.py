"""How long each case took in its last runs: plans fit cases into a budget with it.

A cache, no evidence: of a user and a machine, not of a run.  ``~/.cache/shardproof``, or
``$XDG_CACHE_HOME/shardproof``.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from pathlib import Path

from shardproof.files import DAMAGE, from_others, read_input, write_whole

#: Durations of a case, and cases.
_KEPT, _CASES = 5, 20_000


class Durations:
    """Those in the file ``path``; ``None``: none are kept."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._known: dict[str, list[float]] = {}
        # Estimates are a convenience: without them the defaults do.
        with contextlib.suppress(OSError, *DAMAGE):
            stored = json.loads(read_input(path)) if path is not None else {}
            self._known = from_others(dict[str, list[float]], stored)

    @classmethod
    def of_user(cls) -> Durations:
        """Those of the user who runs this; a user without a home keeps none."""
        given = os.environ.get("XDG_CACHE_HOME", "")
        try:
            caches = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
        except RuntimeError:
            return cls(None)
        return cls(caches / "shardproof" / "durations.json")

    def estimate(self, identifier: str) -> float | None:
        """Median of the last durations of case ``identifier``, or ``None``."""
        values = self._known.get(identifier)
        return statistics.median(values) if values else None

    def note(self, identifier: str, seconds: float) -> None:
        """Case ``identifier`` took that long; the cases noted last are kept."""
        values = [*self._known.pop(identifier, []), round(seconds, 4)]
        self._known[identifier] = values[-_KEPT:]

    def save(self) -> None:
        """Write the file; where that is not possible, the next run does with the defaults."""
        if self.path is None:
            return
        last = dict(list(self._known.items())[-_CASES:])
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(last, indent=0) + "\n")
