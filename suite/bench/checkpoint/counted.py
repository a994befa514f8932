"""What was counted while checkpoints were timed, as figures with a limit.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.bench.lines import Counted
from shardproof.bench.subjects import LETTERS, RankTimes

#: Bytes read over bytes needed where one rank less loads; peak above the state while saving, over
#: the largest tensor.
MOST_READ, MOST_ABOVE = 1.05, 1.0
#: Below so many bytes the largest tensor is no measure: Python's own objects take as much.
SMALLEST = 4 << 20


def counted(world: int, launches: Sequence[Sequence[RankTimes]]) -> list[Counted]:
    """The figures of all ``launches``, each of its worst launch."""
    found = [each for ranks in launches if (each := _of_launch(world, ranks))]
    worst = {one.what: one for each in found for one in each}
    for each in found:
        for one in each:
            worst[one.what] = max(worst[one.what], one, key=lambda figure: figure.ratio)
    return list(worst.values())


def _of_launch(world: int, ranks: Sequence[RankTimes]) -> list[Counted]:
    counts = [one.counts for one in ranks if one.counts is not None]
    figures = []
    for letter in LETTERS:
        above = [one.above[letter] for one in counts if letter in one.above]
        if above:
            most, largest = max(above), max(one.largest for one in counts)
            what = f"peak of {letter.upper()} above its state while saving, over the largest tensor"
            judged = letter == "a" and largest >= SMALLEST
            limit = MOST_ABOVE if judged else None
            figures.append(
                Counted(what=what, ratio=most / largest, bytes=(most, largest), limit=limit)
            )
    reads = [(one.read, one.needed) for one in counts if one.read is not None]
    if reads:
        read, needed = (sum(column) for column in zip(*reads, strict=True))
        what = f"bytes read, {world} ranks to {world - 1}, over those needed"
        figures.append(
            Counted(what=what, ratio=read / needed, bytes=(read, needed), limit=MOST_READ)
        )
    return figures
