"""The cost of the suite itself: ``python -m tools.studies overhead``."""

from __future__ import annotations

import time

from shardproof.commands.console import echo
from shardproof.impls.reference.pipeline.schedules import SCHEDULES
from shardproof.schedules import problems

#: Stages and micro-batches of the schedules, each of which is to take at most so many seconds.
STAGES, MICRO_BATCHES = 64, 512
LIMIT = 5.0


def run() -> None:
    """Measure the seconds needed to generate and check the largest schedules.

    :raises RuntimeError: a schedule is unsound.
    """
    for name, make in SCHEDULES.items():
        ranks = STAGES // 2 if name in ("interleaved", "zb_v") else STAGES
        begin = time.perf_counter()
        schedule = make(ranks, MICRO_BATCHES)
        wrong = problems(schedule)
        seconds = time.perf_counter() - begin
        if wrong or schedule.stages != STAGES:
            raise RuntimeError(f"{name}: {schedule.stages} stages, {'; '.join(wrong)}")
        verdict = "within" if seconds <= LIMIT else "over"
        echo(
            f"{name}, {STAGES} stages x {MICRO_BATCHES} micro-batches, generated and checked: "
            f"{seconds:.1f} s ({verdict} {LIMIT:g} s)"
        )
