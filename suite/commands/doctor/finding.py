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
