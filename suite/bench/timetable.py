"""Which comparisons fit into the time there is: ``shardproof bench --budget MINUTES``.

As for cases (``scenarios.budget``): past durations say how long each one takes, what does not fit
is left out by name, and nothing is cut short, for the number of blocks is fixed beforehand.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from shardproof.bench.sides import SEGMENT_SECONDS, WARM_SECONDS, Pair
from shardproof.runs.run_folder import Durations

#: Where nothing is known of a pair nor of its like: segments of one block (A/B and A/A), sides that
#: warm up in a launch, seconds of a launch besides, seconds of the passes of a side alone,
#: seconds of the scorecard of both.
_SEGMENTS, _SIDES, _LAUNCH_SECONDS, _ALONE_SECONDS, _SCORE_SECONDS = 8, 3, 4.0, 4.0, 30.0


@dataclass(frozen=True)
class Timetable:
    """``chosen`` in the order to run; ``seconds`` is what they are expected to take."""

    chosen: list[Pair]
    left_out: list[Pair]
    seconds: float


def name_of(pair: Pair, alone: bool, profile: bool, score: bool = False) -> str:
    """What a duration is remembered by: a comparison with as many blocks and the same passes."""
    named = (("alone", alone), ("profile", profile), ("score", score))
    passes = "+".join(word for word, on in named if on)
    return f"{pair.id}::{pair.blocks}x{pair.launches}::{passes or 'times'}"


def estimates(
    pairs: Sequence[Pair], durations: Durations, alone: bool, profile: bool, score: bool = False
) -> dict[str, float]:
    """Seconds by pair id: the median of the past, else that of its like, else a rough guess."""
    known = {p.id: durations.estimate(name_of(p, alone, profile, score)) for p in pairs}
    told: dict[str, float] = {}
    for pair in pairs:
        alike = [
            seconds
            for other in pairs
            if _like(other) == _like(pair) and (seconds := known[other.id]) is not None
        ]
        typical = statistics.median(alike) if alike else _guess(pair, alone, profile, score)
        own = known[pair.id]
        told[pair.id] = typical if own is None else own
    return told


def plan(
    pairs: Sequence[Pair],
    durations: Durations,
    minutes: float | None,
    alone: bool = True,
    profile: bool = False,
    score: bool = False,
) -> Timetable:
    """Choose from ``pairs``, in their order, what fits into ``minutes`` (``None``: all)."""
    expected = estimates(pairs, durations, alone, profile, score)
    chosen: list[Pair] = []
    left_out: list[Pair] = []
    used = 0.0
    for pair in pairs:
        fits = minutes is None or used + expected[pair.id] <= minutes * 60
        (chosen if fits else left_out).append(pair)
        used += expected[pair.id] if fits else 0.0
    return Timetable(chosen, left_out, used)


def _like(pair: Pair) -> tuple[object, ...]:
    return pair.backend, pair.world, pair.workload.name, pair.size, pair.blocks, pair.launches


def _guess(pair: Pair, alone: bool, profile: bool, score: bool) -> float:
    segments = pair.blocks * _SEGMENTS * SEGMENT_SECONDS
    launches = pair.launches * (_LAUNCH_SECONDS + _SIDES * WARM_SECONDS)
    passes = _ALONE_SECONDS * (alone + profile) * 2 + _SCORE_SECONDS * score
    return segments + launches + passes
