"""Peaks of a step beside upstream peers, in bytes of the ledger: a pair of the table of peers, with
a model small enough for a test.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from local_ranks import succeed

from shardproof.bench import sides, timed_ranks
from shardproof.bench.subjects import SideRun, side_run

pytestmark = pytest.mark.usefixtures("one_thread")

#: 1/16 of the 3m model's parameters; with it shrinks what is a size in the options.
SMALL = {"width": 54, "heads": 6, "layers": 5, "seq": 32}


@pytest.mark.parametrize(
    ("name", "options", "meshes"),
    [
        ("zero2", {"bucket_bytes": 2**22 // 16}, ({"shard": 2}, {"shard": 2})),
        ("hybrid", {}, ({}, {})),
    ],
)
def test_the_peak_is_at_most_the_peers(
    name: str, options: dict[str, Any], meshes: tuple[dict[str, int], dict[str, int]]
) -> None:
    (pair,) = [pair for pair in sides.read(["peers"]) if pair.name == name]
    pair = replace(
        pair,
        a=replace(pair.a, options={**pair.a.options, **options}),
        workload=replace(pair.workload, params=SMALL),
    )
    peaks = []
    for letter, axes in zip("ab", meshes, strict=True):
        run = side_run(pair, letter, axes or pair.side(letter).mesh)
        run = replace(run, backend="in_memory")

        def body(rank: int, size: int, run: SideRun = run) -> int:
            return timed_ranks.counted(run, True, rank).held

        peaks.append(max(succeed(body, pair.world, ledgers=True)))
    ours, theirs = peaks
    assert ours <= theirs
