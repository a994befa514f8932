"""From what ranks left to findings and one verdict; pure but for reading the folder."""

from __future__ import annotations

import platform
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from shardproof.backends.errors import members_of, name_ranks
from shardproof.backends.heartbeat import Noted
from shardproof.errors import Problem, SelectionError
from shardproof.launch import autopsy, process_control, stacks
from shardproof.launch.autopsy import Standing
from shardproof.launch.outcome import RankOutcome, mark_consequences, root_cause
from shardproof.launch.process_control import signal_name
from shardproof.verdicts import Verdict
from shardproof.watch import calls, flight_recorder, record
from shardproof.watch.record import End, Finding, RankRecord

#: Seconds over which ranks that run are looked at; the share of a core above which one computes.
LOOK_SECONDS, _IDLE_SHARE = 1.0, 0.05


def of_outcomes(
    outcomes: Sequence[RankOutcome],
    ends: Mapping[int, End],
    logs: Mapping[int, Sequence[calls.Call]],
) -> list[Standing]:
    """How ranks stood that have ended, or were ended."""
    found = []
    for outcome in outcomes:
        made, end = logs.get(outcome.rank, ()), ends.get(outcome.rank)
        how: autopsy.How = "stands"
        if outcome.status in ("ok", "early"):
            how = "ended"
        elif end is not None and end.stopped:
            how = "stopped"
        elif outcome.is_comm_error:
            how = "waits"
        elif outcome.status != "hung":
            how = "gone"
        place = (end.place if end else "") or _line(made)
        words = outcome.sentence().removeprefix(f"rank {outcome.rank} ")
        found.append(Standing(outcome.rank, how, words, noted(made), place=place))
    return found


# A job that `shardproof watch` did not start goes on while it is looked at, on this machine only:
# nothing is done to its ranks but that they are asked for their stacks.
def of_running(
    folder: Path,
    records: Mapping[int, RankRecord],
    logs: Mapping[int, Sequence[calls.Call]],
) -> list[Standing] | None:
    """How ranks stand whose script still runs here; ``None``: none does, or they make calls."""
    alive = {
        rank: left.pid
        for rank, left in records.items()
        if left.host == platform.node() and not (left.ended or left.error)
        if process_control.state_of(left.pid) != "Z"
    }
    if not alive:
        return None
    before = {rank: process_control.activity_of(pid)[1] for rank, pid in alive.items()}
    time.sleep(LOOK_SECONDS)
    now = {rank: calls.read(folder / f"rank{rank}.calls") for rank in logs}
    if any(len(now[rank]) and now[rank][-1] != logs[rank][-1] for rank in logs if logs[rank]):
        return None
    stands = _stacks(folder, alive)
    found = []
    for rank, left in records.items():
        made, pid = now.get(rank, []), alive.get(rank)
        place, waits = stands.get(rank, ("", False))
        how: autopsy.How = "stands"
        if pid is None:
            how = "ended" if left.ended else "gone"
        elif process_control.state_of(pid) in "Tt":
            how = "stopped"
        elif waits or calls.state(folder / f"rank{rank}.calls").waits:
            how = "waits"
        elif process_control.activity_of(pid)[1] - before[rank] > _IDLE_SHARE * LOOK_SECONDS:
            how = "computes"
        words = f"raised {left.error_type}" if left.error else "has ended, or runs elsewhere"
        place = place or left.place or _line(made)
        found.append(Standing(rank, how, words, noted(made), place=place))
    return found


def noted(made: Sequence[calls.Call]) -> list[Noted]:
    """Calls of a log as the autopsy takes them; it numbers those of a group from 0, the log from 1.

    A call's digest stands for all calls of the group up to it.
    """
    return [
        Noted(
            call.number,
            zlib.crc32(call.group.encode()),
            call.in_group + 1 if call.in_group else 0,
            call.chain,
            f"{call.text} on {call.group}",
        )
        for call in made
    ]


def _line(made: Sequence[calls.Call]) -> str:
    """Where the last of these calls was made."""
    return f"at {made[-1].place}" if made and made[-1].place else ""


def _stacks(folder: Path, alive: Mapping[int, int]) -> dict[int, tuple[str, bool]]:
    """Rank -> its line of the script, and whether it waits there for others, of those that answer.

    A script runs on the main thread of its process.
    """
    paths = {rank: folder / f"rank{rank}.stacks" for rank in alive}
    sizes = {rank: path.stat().st_size for rank, path in paths.items() if path.exists()}
    stacks.ask({alive[rank]: paths[rank] for rank in sizes})
    found = {}
    for rank, size in sizes.items():
        if paths[rank].stat().st_size == size:
            continue
        for stack in stacks.read(paths[rank])[0].values():
            if place := calls.place_in_script(stack.frames):
                found[rank] = place, stack.waits or stack.in_backward
    return found


#: Gravest cause first: what comes later may follow from it.
ORDER: Final[tuple[record.Kind, ...]] = (
    *("hyperparameters", "initial parameters", "buffers", "collectives", "non-finite", "gradients"),
    *("optimizer state", "parameters", "steps", "rank", "shapes", "not compared"),
)
#: Kinds that rest on which ranks hold the same.
_OF_REPLICAS = frozenset({"initial parameters", "gradients", "optimizer state", "parameters"})
_SUMS = ("all_reduce", "reduce_scatter", "reduce")


@dataclass(frozen=True)
class Judged:
    """A watched run: what was found, and what it comes to."""

    verdict: Verdict
    reason: str
    findings: Sequence[Finding]
    records: Mapping[int, RankRecord]
    #: How many times each kind was compared and held, in words.
    held: Sequence[str] = field(default_factory=tuple)


def judge(folder: Path) -> Judged:
    """Judge what the ranks left in ``folder``.

    :raises SelectionError: there is nothing of a watched run, or a file is damaged.
    """
    try:
        records, ends = record.read(folder), record.read_ends(folder)
        paths = {rank: folder / f"rank{rank}.calls" for rank in records}
        logs = {rank: calls.read(path) for rank, path in paths.items() if path.exists()}
    except ValueError as error:
        remedy = "watch again; damaged records cannot be repaired"
        raise SelectionError(Problem(str(error), remedy)) from None
    if not records and flight_recorder.files(folder):
        return _of_dumps(folder)
    if not records:
        remedy = "name the folder that `shardproof watch` or `import shardproof.watch` wrote"
        raise SelectionError(Problem("no record of a watched run", remedy, str(folder)))
    running = None if ends else of_running(folder, records, logs)
    return decide(records, ends, logs, running)


def _of_dumps(folder: Path) -> Judged:
    """The findings in dumps of the Flight Recorder, of a job that was not watched.

    :raises SelectionError: a file is no dump.
    """
    try:
        found = autopsy.find(flight_recorder.standings(folder))
    except ValueError as error:
        remedy = "remove the file: only plain values are read, and no code is run"
        raise SelectionError(Problem(str(error), remedy)) from None
    if found is None:
        why = "all ranks made the same calls, by the Flight Recorder's dumps"
        return Judged("undecidable", why, [Finding("not compared", why, broken=False)], {})
    finding = Finding("rank", found.sentence)
    return Judged("hang", found.sentence, [finding], {})


def decide(
    records: Mapping[int, RankRecord],
    ends: Sequence[End],
    logs: Mapping[int, list[calls.Call]],
    running: Sequence[Standing] | None = None,
) -> Judged:
    """``running``: the state of the ranks of a script that still runs here, where they make no
    calls.
    """
    steps = _of_steps(records, ends)
    findings = [*_of_records(records, bool(steps)), *steps]
    findings += _of_collectives(logs)
    hung, broke = _of_ranks(records, ends, logs)
    if running and not (hung or (broke and broke[0].broken)):
        hung = _of_running(running)
    findings += [*hung, *broke]
    findings = [_assumed(finding, records) for finding in findings]
    order = _order(findings, records)
    findings.sort(key=lambda f: (not f.broken, order.index(f.kind), f.step or 0, f.optimizer))
    held = _held(records, findings)
    broken = [finding for finding in findings if finding.broken]
    verdict: Verdict = "undecidable"
    if broken:
        own = [finding for finding in broken if finding.kind != "rank"]
        verdict, why = "fail" if own else "hang" if hung else "crash", broken[0].sentence
    elif nothing := _nothing(records):
        why = nothing
    elif findings:
        why = findings[0].sentence
    elif not any(seen.counts for one in records.values() for seen in one.optimizers):
        why = "replicas were not judged: no comparison was completed"
    else:
        verdict, why = "pass", f"equal on all replicas: {', '.join(held)}"
    return Judged(verdict, why, findings, records, held)


# ---------------------------------------------------------------------------------------- findings


def _of_records(records: Mapping[int, RankRecord], is_counted: bool) -> list[Finding]:
    """The findings of ranks, each once; ``is_counted``: different numbers of steps are reported."""
    found: dict[tuple[str, str, int], Finding] = {}
    infinite: dict[int, Finding] = {}
    for rank, one in records.items():
        for finding in one.findings:
            if finding.kind == "steps" and is_counted:
                continue  # told better by the numbers of all
            if finding.kind == "non-finite":
                infinite[rank] = finding
            else:
                found.setdefault((finding.kind, finding.sentence, finding.optimizer), finding)
    if infinite:
        first = min(finding.step or 0 for finding in infinite.values())
        ranks = [rank for rank, finding in infinite.items() if finding.step == first]
        finding = infinite[ranks[0]]
        where = f"on {name_ranks(ranks)}"
        sentence = f"a value of the {finding.name} is not finite {where} {finding.sentence}"
        found["non-finite", "", 0] = replace(finding, sentence=sentence)
    return list(found.values())


def _of_steps(records: Mapping[int, RankRecord], ends: Sequence[End]) -> list[Finding]:
    """Whether all ranks that ended in order made as many steps."""
    if not all(one.ended for one in records.values()) or any(end.reason for end in ends):
        return []
    steps = {rank: [seen.steps for seen in one.optimizers] for rank, one in records.items()}
    if len({tuple(counts) for counts in steps.values()}) == 1:
        return []
    by_count: dict[str, list[int]] = {}
    for rank, counts in steps.items():
        by_count.setdefault(" and ".join(map(str, counts)) or "no", []).append(rank)
    words = "; ".join(f"{name_ranks(ranks)} made {n}" for n, ranks in by_count.items())
    head = "ranks made different numbers of steps"
    if {*map(len, steps.values())} == {1}:
        counts_of = {rank: counts[0] for rank, counts in steps.items()}
        most = max(counts_of.values())
        lacks = sorted({most - n for n in counts_of.values() if n < most})
        if len(lacks) == 1:
            fewer = name_ranks([rank for rank, n in counts_of.items() if n < most])
            number = "one step" if lacks[0] == 1 else f"{lacks[0]} steps"
            head = f"{fewer} made {number} fewer"
    behind = _behind_at(records)
    since = f" (first seen at step {behind})" if behind else ""
    return [Finding("steps", f"{head}: {words}{since}", step=behind or None)]


def _behind_at(records: Mapping[int, RankRecord]) -> int:
    """The first compared step that ranks counted alike at different places of the script."""
    return min(
        (o.behind_at for one in records.values() for o in one.optimizers if o.behind_at), default=0
    )


def _order(
    findings: Sequence[Finding], records: Mapping[int, RankRecord]
) -> tuple[record.Kind, ...]:
    """The gravest cause first: a step left out explains what differs from then on, not before."""
    behind = _behind_at(records)
    kinds = {finding.kind for finding in findings if finding.broken}
    earlier = any(f.broken and f.step and f.step < behind for f in findings)
    if "steps" not in kinds or not behind or earlier or "collectives" in kinds:
        return ORDER
    return ("steps", *(kind for kind in ORDER if kind != "steps"))


def _of_collectives(logs: Mapping[int, list[calls.Call]]) -> list[Finding]:
    difference = calls.first_difference(dict(logs))
    if difference is None:
        return []
    head = f"call {difference.in_group} on {difference.group} differs"
    if difference.earlier:
        head += ", or an earlier one, which the logs no longer hold, differs as well"
    by_text: dict[str, list[int]] = {}
    for rank, call in difference.calls.items():
        place = f" at {call.place}" if call.place else ""
        by_text.setdefault(f"{call.text}{place}", []).append(rank)
    each = ", ".join(f"{name_ranks(r)} made {text}" for text, r in by_text.items())
    return [Finding("collectives", f"{head}: {each}")]


def _of_ranks(
    records: Mapping[int, RankRecord],
    ends: Sequence[End],
    logs: Mapping[int, list[calls.Call]],
) -> tuple[list[Finding], list[Finding]]:
    """(the ranks stand still, a rank failed or left nothing): at most one fault altogether."""
    by_rank = {end.rank: end for end in ends}
    ranks = sorted({*records, *by_rank})
    outcomes = mark_consequences([_outcome(r, records.get(r), by_rank.get(r)) for r in ranks])
    cause = root_cause(outcomes)
    if cause is None:
        return [], [*_without_end(records, ends), *_without_record(records)]
    missing = _without_record(records)
    if cause.error_type == "PeerTimeout" and cause.is_comm_error:
        found = autopsy.find(of_outcomes(outcomes, by_rank, logs))
        if found is not None:
            told = f"{cause.sentence()}: {found.sentence}{_apart(logs)}"
            return [Finding("rank", told)], missing
    if cause.status == "hung":
        return [Finding("rank", _standstill(outcomes, by_rank, logs) + _apart(logs))], missing
    if cause.status == "early":
        return [], [Finding("rank", _early(outcomes, logs) + _apart(logs)), *missing]
    left = (records.get(cause.rank), by_rank.get(cause.rank))
    place = next((one.place for one in left if one is not None and one.place), "")
    sentence = cause.sentence() + (f" {place}" if place else "")
    if cause.status in ("killed", "exited") and cause.last_call:
        sentence += f"; its last call: {cause.last_call}"
    others = [o for o in outcomes if o.consequence and o.rank != cause.rank]
    if others:
        sentence += f"; {name_ranks([o.rank for o in others])} could not continue without it"
    return [], [Finding("rank", sentence), *missing]


def _of_running(running: Sequence[Standing]) -> list[Finding]:
    """Why ranks that run wait; one that computes is late, and that is no fault."""
    found = autopsy.find(running)
    if found is None:
        return []
    if [one.how for one in running if one.rank == found.rank] == ["computes"]:
        words = found.sentence.removeprefix("desync: ")
        return [Finding("rank", f"slow rank, not a hang: {words}", broken=False)]
    return [Finding("rank", f"the ranks stand still: {found.sentence}")]


def _without_end(records: Mapping[int, RankRecord], ends: Sequence[End]) -> list[Finding]:
    """Ranks with an unknown end: their last steps were not compared."""
    left = {end.rank for end in ends if end.exit_code is not None}
    open_ = [rank for rank, one in records.items() if not one.ended]
    gone = "they left Python at once, as os._exit and os.exec do"
    found = []
    for is_left, why in ((False, "interrupted, killed or still running"), (True, gone)):
        if ranks := [rank for rank in open_ if (rank in left) is is_left]:
            sentence = f"{name_ranks(ranks)} did not reach the end of the script: {why}"
            found.append(Finding("rank", sentence, broken=False))
    return found


def _without_record(records: Mapping[int, RankRecord]) -> list[Finding]:
    world = max((one.world for one in records.values()), default=0)
    missing = sorted({*range(world)} - {*records})
    sentence = f"{name_ranks(missing)} left no record: their state is unknown"
    return [Finding("rank", sentence, broken=False)] if missing else []


def _outcome(rank: int, left: RankRecord | None, end: End | None) -> RankOutcome:
    if end is None and (left is None or not left.error):  # still there, or nobody knows
        return RankOutcome(rank, "ok")
    last = end or End(rank)
    # A script that came to its end did so before its process, by as much as nobody knows: its peers
    # may have lost it in between.
    ended = 0.0 if left is not None and left.ended else last.ended
    known = RankOutcome(rank, "ok", last_call=last.last_call, calls=last.calls, ended=ended)
    if left is not None and left.error:
        told = {key: getattr(left, key) for key in ("error_type", "is_comm_error", "consequence")}
        return replace(known, status="raised", message=left.error, **told)
    if last.reason:
        how = "its process was stopped" if last.stopped else f"still {last.place or 'running'}"
        waits = last.waits or last.reason == "grace"
        return replace(known, status="hung", message=how, is_comm_error=waits)
    if last.signal is not None:
        name = signal_name(last.signal)
        return replace(known, status="killed", error_type=name, message=name, signal=last.signal)
    if last.exit_code:
        why = left.refused if left is not None else ""
        said = f"the script rejected its arguments: {why}" if why else ""
        return replace(known, status="exited", exit_code=last.exit_code, message=said)
    return known


def _early(outcomes: Sequence[RankOutcome], logs: Mapping[int, list[calls.Call]]) -> str:
    """Ranks have ended the script in order that others still needed."""
    ended = name_ranks([o.rank for o in outcomes if o.status in ("early", "ok")])
    failed = [o.rank for o in outcomes if o.status == "raised"]
    head = f"{ended} ended the script" + _never_came(calls.behind(dict(logs)))
    return f"{head}; {name_ranks(failed)} could not continue without it" if failed else head


def _apart(logs: Mapping[int, list[calls.Call]]) -> str:
    """Where ranks whose calls do not fit left one another: calls alike, made at other lines."""
    if (parting := calls.first_apart(dict(logs))) is None:
        return ""
    each = ", ".join(f"rank {rank} {c.text} at {c.place}" for rank, c in parting.calls.items())
    what = f"call {parting.in_group} on {parting.group}"
    return f"; {what} is the first that ranks make at different lines: {each}"


def _never_came(missing: calls.Difference | None) -> str:
    """`` and never came to call 9 on ranks 0-1, barrier() at train.py:3``; ``""``: unknown."""
    if missing is None:
        return ""
    call = next(iter(missing.calls.values()))
    where = f" at {call.place}" if call.place else ""
    return f" and never reached call {missing.in_group} on {missing.group}, {call.text}{where}"


def _standstill(
    outcomes: Sequence[RankOutcome],
    ends: Mapping[int, End],
    logs: Mapping[int, list[calls.Call]],
) -> str:
    """The place of each rank, the one that the others wait for first."""
    found = autopsy.find(of_outcomes(outcomes, ends, logs))
    if found is not None:
        return f"the ranks stand still: {found.sentence}"
    missing = calls.behind(dict(logs))
    late = {*members_of(missing.group)} - {*missing.calls} if missing else set()
    words = []
    for outcome in sorted(outcomes, key=lambda o: (o.rank not in late, o.rank)):
        end, text = ends.get(outcome.rank), f"rank {outcome.rank} has ended its script"
        if end is not None and outcome.status != "ok":
            how = "waits" if end.waits else "stands"
            last = f", its last call {end.last_call}" if end.last_call else ""
            text = f"rank {outcome.rank} {how} {end.place or 'at no line of its own'}{last}"
            text = f"the process of rank {outcome.rank} was stopped" if end.stopped else text
        words.append(text)
    head = "the ranks stand still"
    if missing and late:
        head += f": {name_ranks(sorted(late))}{_never_came(missing).removeprefix(' and')}"
    return f"{head}; {'; '.join(words)}"


# ----------------------------------------------------------------------------------------- weighed


def _assumed(finding: Finding, records: Mapping[int, RankRecord]) -> Finding:
    """A difference of replicas that only habit calls so, where ranks seem to hold parts."""
    doubtful = finding.broken and finding.assumed and finding.kind in _OF_REPLICAS
    if not doubtful or not (why := _seems_cut(records)):
        return finding
    remedy = "state with --replicas which ranks hold the same (`--replicas all`: all)"
    return replace(finding, broken=False, sentence=f"{finding.sentence}; but {why}: {remedy}")


def _seems_cut(records: Mapping[int, RankRecord]) -> str:
    """Traffic that data parallel ranks do not have."""
    totals = [total for one in records.values() for total in one.totals]
    if any(total.operation in ("send", "recv") for total in totals):
        return "ranks send to one another, as stages of a pipeline do"
    world = max(one.world for one in records.values())
    for total in totals:
        size = len(members_of(total.group))
        if total.operation in _SUMS and "float" in total.dtype and 1 < size < world:
            return f"sums are made over {total.group} only, as ranks that hold parts do"
    return ""


def _held(records: Mapping[int, RankRecord], findings: Sequence[Finding]) -> list[str]:
    """The values compared and found equal, with the number of times."""
    broken: set[str] = {finding.kind for finding in findings}
    if "initial parameters" in broken:
        broken.add("parameters")  # told once, where they first differed
    counts: dict[str, int] = {}
    for one in records.values():
        for seen in one.optimizers:
            if seen.tracked:
                for kind, times in seen.counts.items():
                    counts[kind] = max(times, counts.get(kind, 0))
    held = {kind: kind + (f" at {n} steps" if n > 1 else "") for kind, n in counts.items()}
    if any(one.totals for one in records.values()):
        held["collectives"] = "order and shapes of collectives"
    if counts:
        held |= {"hyperparameters": "hyperparameters", "non-finite": "finite values"}
    return [words for kind, words in held.items() if kind not in broken]


def _nothing(records: Mapping[int, RankRecord]) -> str:
    """Why nothing was judged; empty: something was."""
    ranks = list(records.values())
    if not any(one.initialised for one in ranks):
        return "nothing was judged: no rank called init_process_group"
    if max(one.world for one in ranks) < 2:
        return "nothing was judged: one rank has no replicas"
    if not any(seen.steps for one in ranks for seen in one.optimizers):
        return "nothing was judged: no step of an optimizer of torch.optim was seen"
    if not any(seen.tracked for one in ranks for seen in one.optimizers):
        return "replicas were not judged: no parameter has known replicas"
    return ""
