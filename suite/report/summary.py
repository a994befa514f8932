"""Did it hold?  One line, the figures behind it, and what broke with the command that reruns it."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardproof import verdicts
from shardproof.report import kills, looks
from shardproof.runs import random_kills
from shardproof.runs.blocks import Failure, FailureBlock, blocks, of_result
from shardproof.runs.run_folder import Run

State = Literal["held", "broke", "open"]
#: Verdicts of results of wings that say that something broke, or is open.
BROKEN = ("crash", "hang", "fail")
OPEN = ("inconclusive", "precondition", "undecidable", "over budget")
#: What holds of a run does not hold of what it leaves out: beyond this share it is not decided.
MUCH = 0.1


@dataclass(frozen=True)
class Headline:
    """``sentence`` answers whether it held; ``details`` are shorter sentences behind it."""

    state: State
    sentence: str
    details: tuple[str, ...]


def broken_blocks(run: Run) -> list[FailureBlock]:
    """Everything that broke, a block for each cause: first cases by gravity, then survivors, then
    results of wings.
    """
    broken = [of_result(r) for r in run.cases if verdicts.kind(r.verdict) in verdicts.RED]
    for kill in kills.survivors(run.kills):
        rerun = kills.rerun(kill)
        broken.append(Failure("faults", kill.name, "survives", kill.why_not, rerun))
    # The last command that planned results of a wing makes them again.
    commands = [shlex.join(one.command) for one in run.header.invocations if one.benches] or [""]
    for kind, lines in run.known().items():
        for line in lines:
            if looks.head(line["verdict"]) in BROKEN:
                reason, again = str(line.get("reason") or ""), commands[-1]
                broken.append(Failure(kind.label, line["id"], line["verdict"], reason, again))
    return blocks(broken)


def headline(run: Run) -> Headline:
    """The one line at the top, from the worst of all that was judged."""
    counts = verdicts.count(run.cases)
    judged = sum(n for verdict, n in counts.items() if verdict != "skip")
    planted, timed = kills.judged(run.kills), [*itertools.chain(*run.known().values())]
    heads = Counter(looks.head(line["verdict"]) for line in timed)
    random = random_kills.read(run.path)
    alarms = 0 if random is None else len(random.alarms)
    broke = _told(
        (alarms, "random cases of clean systems failed"),
        (sum(counts[verdict] for verdict in verdicts.RED), f"of {judged} judged cases failed"),
        (len(kills.survivors(run.kills)), f"of {len(planted)} planted faults survive"),
        (sum(heads[word] for word in BROKEN), f"of {len(timed)} timings failed"),
    )
    opened = _told(
        (sum(counts[verdict] for verdict in verdicts.OPEN), f"of {judged} cases are not decided"),
        (sum(heads[word] for word in OPEN), f"of {len(timed)} timings are not decided"),
        (len(run.unfinished), "planned ones have no result"),
    )
    details = tuple(_details(run, counts))
    if broke:
        return Headline("broke", f"Failed: {', '.join([*broke, *opened])}.", details)
    if opened:
        return Headline("open", f"Not decided: {', '.join(opened)}.", details)
    if not (judged or planted or timed):
        if random is not None and random.faults:
            return Headline("held", f"Measured: {random.sentence()}.", details)
        if measured := run.known(judged_only=False):
            told = ", ".join(f"{len(lines)} {kind.label}" for kind, lines in measured.items())
            return Headline("held", f"Measured, with nothing to judge: {told}.", ())
        return Headline("open", "Nothing was judged.", details)
    nouns = ((judged, "judged case"), (len(planted), "planted fault"), (len(timed), "timing"))
    held = _told(*((count, f"{noun}{'s' * (count != 1)}") for count, noun in nouns))
    late = len(run.left_out) + sum(kill.left_out for kill in run.kills)
    every = late + judged + len(planted) + len(timed)
    if late > MUCH * every:
        sentence = f"Nothing failed in {', '.join(held)}, but {late} of {every} were left out."
        return Headline("open", sentence, details)
    return Headline("held", f"Nothing failed: {', '.join(held)}.", details)


def _told(*counts: tuple[int, str]) -> list[str]:
    return [f"{count} {what}" for count, what in counts if count]


def _details(run: Run, counts: Counter[str]) -> Iterator[str]:
    if run.cases or run.left_out:
        yield verdicts.summary(counts, len(run.left_out)) + "."
    if run.kills:
        yield kills.verdict_counts(run.kills)
    for kind, lines in run.known().items():
        heads = Counter(looks.head(line["verdict"]) for line in lines)
        yield f"{kind.title}: {', '.join(f'{n} {word}' for word, n in sorted(heads.items()))}."
    if run.unread:
        yield run.unread
