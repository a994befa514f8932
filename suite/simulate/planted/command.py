"""``shardproof simulate --faults``: plant each fault at scale and see which promise it breaks."""

from __future__ import annotations

import time

from shardproof.commands.console import echo, is_json, make_console, print_line
from shardproof.errors import shorten
from shardproof.simulate.planted.faults import Judge, Kill, Planted, faults
from shardproof.table import Table, number
from shardproof.verdicts import BROKEN, HELD

#: Characters of a sentence in the table for people.
_SHOWN = 160


def plant() -> int:
    """Judge all faults, print a table, and return the exit code: 1 unless each is killed."""
    judge, found, since = Judge(), faults(), time.monotonic()
    kills = []
    for count, planted in enumerate(found, 1):
        if not is_json():
            passed = f"{time.monotonic() - since:.0f} s"
            told = f"simulating fault {count} of {len(found)}: {planted.declared.name}, {passed}"
            echo(told, err=True)
        kills.append(judge.judge(planted))
    console = make_console()
    console.print(table(kills, whole=is_json()))
    killed = sum(kill.is_killed for kill in kills)
    if not is_json():
        print_line(console, f"{killed} of {number(len(kills), 'fault')} killed by their sentence")
    return HELD if killed == len(kills) else BROKEN


def table(kills: list[Kill], whole: bool) -> Table:
    """A row a fault; ``whole``: sentences are not shortened, and the expected ones are shown."""
    columns = ["fault", "parent", "mesh", "verdict", "sentence"]
    rows = [_row(kill.planted, kill, whole) for kill in kills]
    return Table("Faults at scale", columns + ["says"] * whole, rows)


def _row(planted: Planted, kill: Kill, whole: bool) -> tuple[str, ...]:
    fault = planted.declared
    mesh = ",".join(f"{axis}={size}" for axis, size in fault.mesh.items())
    sentence = kill.sentence if whole else shorten(kill.sentence, _SHOWN)
    row = fault.name, fault.parent, mesh, kill.verdict, sentence
    return (*row, fault.says) if whole else row
