"""One thing that was looked at, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One look: ``good``, ``note`` (it works, but) or ``bad`` (do what ``remedy`` says first)."""

    what: str
    state: Literal["good", "note", "bad"]
    found: str
    remedy: str = ""


def look(what: str, found: str, remedy: str = "", state: Literal["note", "bad"] = "bad") -> Finding:
    """One look; good, if there is nothing to remedy."""
    return Finding(what, state if remedy else "good", found, remedy)
