"""What ran, when, and where: one column an invocation, without its lists of cases."""

from __future__ import annotations

import shlex
from typing import Any

from shardproof.runs.run_folder import Run

#: Told under other names, or lists that stand elsewhere.
_LISTS = ("planned", "kills", "benches", "scalings")
_KNOWN = ("command", "started", "ended", "exit_code", "suite", "commit", "python")


def environment(run: Run) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Headings (a number for each invocation), and rows of a name and a text for each of them."""
    told = [_flat(invocation) for invocation in run.header["invocations"]]
    names = list(dict.fromkeys(name for facts in told for name in facts))
    headings = [f"invocation {number}" for number, _ in enumerate(told, 1)]
    return headings, [(name, [facts.get(name, "-") for facts in told]) for name in names]


def _flat(invocation: dict[str, Any]) -> dict[str, str]:
    facts = {}
    for name in _KNOWN:
        value = invocation.get(name)
        if name == "command":
            facts[name] = shlex.join(map(str, value or ()))
        else:
            facts[name.replace("_", " ")] = "-" if value is None else str(value)
    for name in _LISTS:
        if invocation.get(name):
            facts[f"{name} (number)"] = f"{len(invocation[name]):,}"
    rest = {k: v for k, v in invocation.items() if k not in (*_KNOWN, *_LISTS)}
    for name, value in rest.items():
        facts |= _leaves(name, value)
    return facts


def _leaves(name: str, value: Any) -> dict[str, str]:
    if isinstance(value, dict):
        found: dict[str, str] = {}
        for key, item in value.items():
            found |= _leaves(f"{name} {key}".removeprefix("packages "), item)
        return found
    if name.endswith("memory_bytes") and isinstance(value, int):
        return {name.removesuffix("_bytes"): f"{value / 2**30:.1f} GiB"}
    if isinstance(value, list):
        return {name.replace("_", " "): ", ".join(map(str, value)) or "-"}
    return {name.replace("_", " "): "-" if value is None else str(value)}
