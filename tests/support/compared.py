"""Runs that nobody made, compared and gated."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import synthetic as made

from shardproof.compare import baseline, policy
from shardproof.compare.compare import RunComparison, compare
from shardproof.compare.gate import Gate, judge
from shardproof.compare.snapshot import Snapshot

TODAY = datetime.date(2026, 11, 22)
Run = Callable[..., Snapshot]
Judge = Callable[..., Gate]


def both(run: Run, old: list[made.Line], new: list[made.Line], **more: Any) -> RunComparison:
    """What differs between two runs of these lines."""
    return compare(run("old", old), run("new", new, **more))


def told_by(found: RunComparison) -> list[str]:
    """Each exact figure that changed, and how."""
    return [f"{change.figure} {change.word}" for change in found.changes]


def states(found: Gate) -> list[tuple[str, str]]:
    """State and rule of each finding."""
    return [(finding.state, finding.rule) for finding in found.findings]


def runs_in(tmp_path: Path) -> Run:
    """Writes lines as a run and reads it as it is compared."""

    def write(name: str, lines: list[made.Line], **more: Any) -> Snapshot:
        return made.snapshot(tmp_path / name, lines, **more)

    return write


def gate_in(tmp_path: Path) -> Judge:
    """Judges ``new`` beside ``old`` by a policy in YAML."""

    def run(
        old: list[made.Line], new: list[made.Line], text: str = "", on: str = "", **more: Any
    ) -> Gate:
        before = baseline.load(str(made.write(tmp_path / "old", old)))
        after = baseline.load(str(made.write(tmp_path / "new", new, **more)))
        path = None
        if text:
            path = tmp_path / "policy.yaml"
            path.write_text(text)
        rules = policy.read(path)
        today = datetime.date.fromisoformat(on) if on else TODAY
        policy.check(rules, before, after, today)
        return judge(compare(before, after), rules, today)

    return run
