"""Bytes of a step as `bench` counts them, with a model small enough for a test: peaks against
upstream peers, and the pairs of words.yaml.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
from local_ranks import succeed

from shardproof import registry
from shardproof.bench import sides, timed_ranks
from shardproof.bench.subjects import SideRun, StepBytes, side_run

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


def bytes_of(name: str, letter: str) -> StepBytes:
    """Those of a side of a pair of ``words.yaml``, with a small model, on its worst rank."""
    (pair,) = [pair for pair in sides.read(["words"]) if pair.name == name]
    pair = replace(pair, workload=replace(pair.workload, params=SMALL))
    side = pair.side(letter)
    axes = side.mesh or sides.natural_mesh(
        registry.load(side.implementation).capabilities(side.options).axes, pair.world
    )
    run = replace(side_run(pair, letter, axes), backend="in_memory")

    def body(rank: int, size: int) -> tuple[int, ...]:
        found = timed_ranks.counted(run, True, rank)
        return found.sent, found.held, found.device, found.host

    ranks = [StepBytes(*each) for each in succeed(body, pair.world, ledgers=True)]
    return reduce(StepBytes.or_more, ranks)


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("bf16", 2 / 3),  # 2 + 2 bytes gathered and 4 reduced, of 4 + 4 and 4
        ("recompute", 1),
        ("offload-optimizer", 1),
        ("offload-parameters", 1),
        ("full-shard-over-grad-op", 3 / 2),  # two gathers and one reduce-scatter, of one and one
        ("full-shard-over-grad-op-fsdp2", 3 / 2),
        ("full-shard-over-hybrid", 3 * 3 / 4 / (3 / 2 + 1 / 2)),  # 3 (F-1)/F; and 2 (R-1)/R / F
    ],
)
def test_the_bytes_that_words_send_and_hold(name: str, sent: float) -> None:
    a, b = bytes_of(name, "a"), bytes_of(name, "b")
    assert a.sent / b.sent == pytest.approx(sent, rel=0.03)
    if name.startswith("offload"):
        assert a.host > 0 == b.host and a.device < b.device
    else:
        assert a.host == b.host == 0 and a.device == a.held
    assert a.device < b.device  # of each pair A is the side that saves memory
