"""The system, time and machine of a run: one column an invocation, without its lists of cases."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from shardproof.runs.run_folder import Run
from shardproof.table import Table

#: Lists that stand elsewhere: only their lengths are facts.
_LISTS = ("planned", "kills", "benches")
_KNOWN = ("started", "ended", "exit_code", "suite", "commit", "python")


def environment(run: Run) -> Table:
    invocations = [_flat(one.model_dump(exclude_unset=True)) for one in run.header.invocations]
    names = dict.fromkeys(name for facts in invocations for name in facts)
    headings = ("fact", *(f"invocation {number}" for number, _ in enumerate(invocations, 1)))
    rows = [(name, *(facts.get(name, "-") for facts in invocations)) for name in names]
    return Table("Run and machine", headings, rows)


def _flat(invocation: Mapping[str, JsonValue]) -> dict[str, str]:
    command: Any = invocation.get("command") or ()
    facts = {"command": shlex.join(map(str, command))}
    for name in _KNOWN:
        facts |= _leaves(name, invocation.get(name))
    for name in _LISTS:
        listed = invocation.get(name)
        if isinstance(listed, list) and listed:
            facts[f"{name} (number)"] = f"{len(listed):,}"
    for name, value in invocation.items():
        facts |= _leaves(name, value) if name not in ("command", *_KNOWN, *_LISTS) else {}
    return facts


def _leaves(name: str, value: JsonValue) -> dict[str, str]:
    if isinstance(value, dict):
        leaves: dict[str, str] = {}
        for key, item in value.items():
            leaves |= _leaves(f"{name} {key}".removeprefix("packages "), item)
        return leaves
    if name.endswith("memory_bytes") and isinstance(value, int):
        return {name.removesuffix("_bytes"): f"{value / 2**30:.1f} GiB"}
    told = ", ".join(map(str, value)) or "-" if isinstance(value, list) else str(value)
    return {name.replace("_", " "): "-" if value is None else told}
