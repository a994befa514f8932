"""Where a failing case first differs from its oracle."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from shardproof import axes, registry, verdicts, workloads
from shardproof.backends.errors import few_spans
from shardproof.case import Case
from shardproof.cases.leader import judge_case
from shardproof.checks.results import CaseResult
from shardproof.contract import Implementation
from shardproof.evidence.account import Account
from shardproof.evidence.assembled import Evidence
from shardproof.launch.ranks import root_cause
from shardproof.ledgers import places
from shardproof.locate import calls, finding, known
from shardproof.locate.finding import Finding, Place, nothing, place_of, spelt_places
from shardproof.locate.host import RecordingHost
from shardproof.locate.observed import Moments, Shown
from shardproof.locate.recorded import Event, Recording
from shardproof.locate.walk import Suspect, Walk
from shardproof.oracle.kinds import Ran, oracle_of

#: Wrong tensors from which the walk starts at most, in each moment.
MOST_STARTS = 24
#: How many times the CPU seconds of a case its recorded run may take.
SLOWER = 20
#: The note of a finding that was made from a part of the run.
TRUNCATED = "the recording was full before the run ended, so a later difference is not seen"
#: Lanes whose values are no good as names of themselves.
_OTHER_LANES = ("dyadic", "bitwise")


def locate(case: Case, folder: Path) -> Finding:
    """Run ``case`` once more, recorded, in ``folder``, and say where it first differs."""
    note = ""
    if case.lane in _OTHER_LANES and case.lowest_dtype == "float64":
        note = f"located in lane fp64 instead of {case.lane}, where values name themselves"
        case = replace(case, lane="fp64")
    host, oracles = RecordingHost(case.implementation, case.steps), folder / "oracles"
    # What memory is weighed by would record itself.
    kept = tuple(check for check in case.checks if check != "memory")
    recorded = replace(case, checks=kept or case.checks, deadline=case.deadline * SLOWER)
    work = Path(tempfile.mkdtemp(dir=folder))
    found = _Search(recorded, *judge_case(recorded, work, oracles, host), host, note).found()
    if found.kind != "nothing" or len(kept) in (0, len(case.checks)):
        return found
    plain = Path(tempfile.mkdtemp(dir=folder))
    _, result = judge_case(replace(case, checks=("memory",)), plain, oracles)
    return found if verdicts.kind(result.verdict) in verdicts.GREEN else unplaced(result, note)


def unplaced(
    result: CaseResult, note: str, why: str = "no recorded tensor or call differs"
) -> Finding:
    """The finding of a case that does not pass, and whose difference has no place."""
    reason = (result.reason.splitlines() or ["no reason"])[0]
    sentence = f"the difference could not be placed: {why}; the case says: {reason}"
    return Finding(result.case.id, "unplaced", result.verdict, sentence, note=note)


@dataclass
class _Search:
    """One case with what was recorded of it."""

    case: Case
    account: Account
    result: CaseResult
    host: RecordingHost
    note: str
    _known: dict[int, known.Known] = field(default_factory=dict)

    @cached_property
    def system(self) -> type[Implementation]:
        return registry.load(self.case.implementation)

    @cached_property
    def recordings(self) -> dict[int, Recording]:
        """Those of the first launch, by rank."""
        first = next(iter(self.host.launches.values()), [])
        if any(recording.truncated for recording in first):
            self.note = "; ".join(filter(None, (self.note, TRUNCATED)))
        return {recording.rank: recording for recording in first}

    def found(self) -> Finding:
        """The first difference."""
        case, verdict = self.case, self.result.verdict
        if verdicts.kind(verdict) in verdicts.GREEN - {"xfail", "skip"}:
            return nothing(case.id, verdict, self.note)
        if verdicts.kind(verdict) not in (*verdicts.RED, "xfail", "undecidable"):
            return self._unplaced(f"the recorded run ended as {verdict}")
        cause = root_cause(self.account.outcomes)
        if cause is not None:
            return self._end(cause.place)
        evidence = self.account.figures
        if not isinstance(evidence, Evidence):
            return self._unplaced("the case left nothing to compare")
        if evidence.truth.steps and (finding := self._numbers(evidence)) is not None:
            return finding
        whole = not any(recording.truncated for recording in self.recordings.values())
        if whole and (difference := calls.first(evidence, self.recordings)) is not None:
            place = place_of(difference.event.places, self.system)
            return replace(
                self._base("calls", difference.event, place),
                right=difference.right,
                wrong=difference.wrong,
                sentence=f"{difference.right}; {difference.wrong}{_at(place)}",
            )
        return self._last_written() or self._unplaced("no recorded tensor or call differs")

    def _last_written(self) -> Finding | None:
        """Of a tensor that a check names and the oracle does not have: who wrote it last."""
        failed = (o.worst for o in self.result.checks if o.status == "fail")
        for worst in (each for each in failed if each is not None):
            point, _, kind = worst.phase.rpartition(" ")
            seen = [
                event
                for recording in self.recordings.values()
                for event in recording.events
                if event.kind == "seen" and event.name == worst.name and event.more["what"] == kind
            ]
            there = [e for e in seen if e.step == worst.step and e.more["point"] == point]
            before = [e for e in seen if e.step == worst.step < 0]
            for event in there or before or seen[-1:]:
                recording = self.recordings[event.rank]
                writer = next(recording.writers(event.reads[0], event.number), None)
                if writer is not None:
                    return self._written(worst.name, kind, event, writer)
        return None

    def _written(self, name: str, kind: str, event: Event, writer: Event) -> Finding:
        place = place_of(writer.places, self.system)
        right = f"no earlier tensor is wrong than the {kind} {name!r} on rank {event.rank}"
        wrong = f"it was last written by {_operation(self._cause(writer))}{_at(place)}"
        return replace(
            self._base("operation", writer, place),
            operation=self._cause(writer).name,
            right=right,
            wrong=wrong,
            sentence=f"{right}; {wrong}{_where(writer)}",
            tensor=name,
            point=event.more["point"],
        )

    # -------------------------------------------------------------------------------- numbers

    def _numbers(self, evidence: Evidence) -> Finding | None:
        moments = Moments(evidence, self.recordings)
        for step, point, shown in moments:
            wrong = [each for each in shown if each.is_wrong]
            if wrong:
                return self._moment(evidence, max(step, 0), point, shown, wrong)
        return None

    def _walk(self, evidence: Evidence, last: int) -> tuple[Walk, list[known.Contributions]]:
        case = self.case
        oracle = oracle_of(case, self.system, evidence.declaration, workloads.for_case(case))
        shares = {record.steps[0].share for record in evidence.records} - {None}
        events = [event for record in evidence.records for event in record.history]
        with tempfile.TemporaryDirectory() as empty:
            values, contributions = known.collect(
                evidence, lambda: oracle.trained(Path(empty), Ran(len(shares), events)), last
            )
        return Walk(self.recordings, values, self._peers()), contributions

    def _peers(self) -> dict[int, list[list[int]]]:
        """The ranks with which each splits the computation of a sample, by axis and by all."""
        mesh = self.case.mesh
        along = axes.combining(mesh)
        sets = {(axis,) for axis in along} | {tuple(along)}
        found: dict[int, list[list[int]]] = {rank: [] for rank in self.recordings}
        for chosen in (each for each in sets if axes.size(mesh, each) > 1):
            for group in places.groups_along(mesh, "+".join(chosen)):
                for rank in group:
                    found.setdefault(rank, []).append(list(group))
        return found

    def _moment(
        self, evidence: Evidence, step: int, point: str, shown: Sequence[Shown], wrong: list[Shown]
    ) -> Finding:
        walk, contributions = self._walk(evidence, step)
        starts = _spread(wrong)
        suspects: list[tuple[Suspect, Shown]] = []
        for start in starts:
            region = start.event.reads[0]
            suspects += [(one, start) for one in walk.suspects(start.event, region)]
        if suspects:
            suspect, start = _choose(suspects)
            return self._operation(walk, suspect, start, wrong)
        start = starts[0]
        own = contributions[step] if step < len(contributions) else None
        return self._moved(walk, start, shown, wrong, own)

    def _operation(
        self, walk: Walk, suspect: Suspect, start: Shown, wrong: Sequence[Shown]
    ) -> Finding:
        place = place_of(suspect.at.places, self.system)
        what, operation = _what(start), _operation(suspect.at)
        if suspect.steps_back == 0:
            right, first = f"{what} is right before {operation}", f"wrong after it{_at(place)}"
        else:
            right = f"{what} is wrong at {start.point}: every value is right before {operation}"
            first = f"its result is wrong{_at(place)}"
        if suspect.broke:
            right += " (the result is not the sum of what its members gave)"
        origin, words = self._origin(walk, suspect.at)
        return replace(
            _seen(self._base("operation", suspect.at, place), start, wrong),
            operation=suspect.at.name,
            right=right,
            wrong=first,
            sentence=f"{right}, and {first}{words}{_where(suspect.at)}",
            origin=origin,
        )

    def _origin(
        self, walk: Walk, event: Event, numbers: Sequence[float] = ()
    ) -> tuple[Place | None, str]:
        """The line from which an operation has its numbers or values, and that in words."""
        before = self.recordings[event.rank].events[: event.number]
        mine = [each for each in reversed(before) if self._is_own(each)]
        if event.more.get("updates"):
            return self._settings(event, before, mine)
        for number in (*event.more.get("scalars", ()), *numbers):
            wanted = [number, -number, *([1 / number] if number else [])]
            for each in mine:
                if each.kind == "returned" and each.more["value"] in wanted:
                    place = spelt_places(each.places[:1])[0]
                    return place, f"; the number {number:g} comes from{_at(place)}"
        if not self._is_own(event):
            own = walk.upstream(event, self._is_own)
            if own is not None:
                at = place_of(own.places, self.system)
                return at, f"; what it works on comes from{_at(at)}"
        return None, ""

    def _settings(
        self, event: Event, before: Sequence[Event], mine: Sequence[Event]
    ) -> tuple[Place | None, str]:
        """The line from which an update has its settings: of the system's own file the last."""
        evidence = self.account.figures
        is_skipped = isinstance(evidence, Evidence) and evidence.truth.steps[event.step].skipped
        kinds = ("decided",) if is_skipped else ("set", "returned")
        what = "the settings of the optimizer come from"
        if is_skipped:
            what = "gradients overflowed, and the update is made nevertheless, by"
        for kind in kinds:
            if (last := next((e for e in mine if e.kind == kind), None)) is not None:
                return (place := place_of(last.places, self.system)), f"; {what}{_at(place)}"
        if (last := next((e for e in reversed(before) if e.kind == "set"), None)) is not None:
            return (place := place_of(last.places, self.system)), f"; {what}{_at(place)}"
        return None, ""

    def _is_own(self, event: Event) -> bool:
        """Whether the file of the system's own class stands on the stack of ``event``."""
        own = finding.own_files(self.system)[:1]
        return any(Path(file).resolve() in own for file, _, _ in event.places)

    def _moved(
        self,
        walk: Walk,
        start: Shown,
        shown: Sequence[Shown],
        wrong: Sequence[Shown],
        own: known.Contributions | None,
    ) -> Finding:
        """Every value is right, but not here: a step was left out, or put it at a wrong place."""
        event = start.event
        recording = self.recordings[event.rank]
        writer = next(recording.writers(event.reads[0], event.number), None)
        held = _identity(start, own)
        others = _others(self.recordings, start, shown)
        last = f"{_what(start)} holds {held or 'right values of something else'}"
        done = "" if writer is None else f", last written by {_operation(self._cause(writer))}"
        done += "" if writer is None else _at(place_of(writer.places, self.system))
        if held and others is not None:
            place = place_of(others.places, self.system)
            lacks = f"{_operation(self._cause(others))}, which other tensors get{_at(place)}"
            origin, words = self._origin(walk, writer or others)
            return replace(
                _seen(self._base("missing", others, place), start, wrong),
                operation=self._cause(others).name,
                right=f"{last}{done}",
                wrong=f"it lacks {lacks}",
                sentence=f"{last}{done}{words}; it lacks {lacks}",
                origin=origin,
            )
        at = writer or others or event
        place = place_of(at.places, self.system)
        times = start.times
        if times is not None:
            last = f"{_what(start)} is {times:g} times the expected one"
        origin, words = self._origin(walk, at, [] if times is None else [times])
        return replace(
            _seen(
                self._base("scaled" if times else "missing" if held else "moved", at, place),
                start,
                wrong,
            ),
            operation=self._cause(at).name,
            right="every value is right somewhere",
            wrong=f"{last}{done}",
            sentence=f"{last}{done}{words}",
            origin=origin,
        )

    def _cause(self, event: Event) -> Event:
        return (
            self.recordings[event.rank].events[event.more["call"]]
            if event.kind == "done"
            else event
        )

    # ---------------------------------------------------------------------------------- others

    def _base(self, kind: str, event: Event, place: Place | None) -> Finding:
        return Finding(
            self.case.id,
            kind,  # type: ignore[arg-type]
            self.result.verdict,
            "",
            place=place,
            calls=spelt_places(event.places),
            unit=event.unit,
            phase=event.phase,
            note=self.note,
            ranks=(event.rank,),
            step=event.step,
            operation=event.name,
        )

    def _end(self, place: str) -> Finding:
        file, _, rest = place.partition(":")
        line, _, function = rest.partition(" in ")
        at = None
        if line.isdigit():
            at = spelt_places([(file, int(line), function)])[0]
        where = f" at {at}" if at else ""
        reason = (self.result.reason.splitlines() or ["no reason"])[0]
        sentence = f"a rank did not end well{where}: {reason}"
        lines = (at,) if at else ()
        return Finding(
            self.case.id,
            "end",
            self.result.verdict,
            sentence,
            place=at,
            calls=lines,
            note=self.note,
        )

    def _unplaced(self, why: str) -> Finding:
        return unplaced(self.result, self.note, why)


def _spread(wrong: Sequence[Shown]) -> list[Shown]:
    """A few of the wrong tensors, of every rank in turn."""
    by_rank: dict[int, list[Shown]] = {}
    for each in wrong:
        by_rank.setdefault(each.event.rank, []).append(each)
    found: list[Shown] = []
    for turn in range(max(map(len, by_rank.values()))):
        found += [own[turn] for own in by_rank.values() if turn < len(own)]
    return found[:MOST_STARTS]


def _choose(suspects: Sequence[tuple[Suspect, Shown]]) -> tuple[Suspect, Shown]:
    """The operation that most of what is wrong comes from; of several the earliest."""
    votes = Counter((s.at.name, s.at.places) for s, _ in suspects)
    most = max(votes.values())
    best = [pair for pair in suspects if votes[pair[0].at.name, pair[0].at.places] == most]
    return min(best, key=lambda pair: (pair[0].at.step, pair[0].at.number, pair[0].at.rank))


def _identity(start: Shown, own: known.Contributions | None) -> str:
    """The name of what the wrong elements are instead, in words; empty: nothing that has a name."""
    if start.before is not None and start.is_as(start.before):
        return "its value before the update"
    return "" if own is None or start.kind != "gradients" else own.named(start)


def _others(recordings: dict[int, Recording], start: Shown, shown: Sequence[Shown]) -> Event | None:
    """The last writer of most right tensors of the same kind at this moment."""
    alike = [s for s in shown if s.kind == start.kind and not s.is_wrong and bool(s.expected.any())]
    mine = [s for s in alike if s.event.rank == start.event.rank] or alike
    writers = []
    for each in mine:
        event = each.event
        writer = next(recordings[event.rank].writers(event.reads[0], event.number), None)
        writers += [writer] if writer is not None else []
    if not writers:
        return None
    votes = Counter((w.name, w.places) for w in writers)
    [(most, _)] = votes.most_common(1)
    return next(w for w in writers if (w.name, w.places) == most)


def _seen(finding: Finding, start: Shown, wrong: Sequence[Shown]) -> Finding:
    """``finding`` with what was seen to be wrong."""
    ranks = sorted({each.event.rank for each in wrong if each.name == start.name})
    return replace(
        finding, tensor=start.name, step=start.step, point=start.point, ranks=tuple(ranks)
    )


_NOUNS = {
    "gradients": "the gradient of {}",
    "parameters": "the parameter {}",
    "optimizer": "the optimizer state {}",
    "buffers": "the buffer {}",
    "norm": "the global norm",
    "loss": "the loss",
}


def _what(start: Shown) -> str:
    noun = _NOUNS.get(start.kind, "the state {}").format(start.name)
    return f"on rank {start.event.rank}, {noun}"


def _operation(event: Event) -> str:
    """An operation in words."""
    if event.kind == "call":
        axis = f" over axis {event.more['axis']}" if event.more["axis"] else ""
        ranks = few_spans(event.more["group"])
        return f"{event.name} number {event.more['number']}{axis} of ranks {ranks}"
    return f"the operator {event.name}"


def _where(event: Event) -> str:
    unit = f", in unit {event.unit}" if event.unit else ""
    when = f"step {event.step}, {event.phase}" if event.step >= 0 else event.phase
    return f" [{when}{unit}]"


def _at(place: Place | None) -> str:
    return "" if place is None else f" ({place} in {place.function})"
