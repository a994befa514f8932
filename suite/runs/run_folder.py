"""A run's folder: evidence that survives a kill.

    results/<run-id>/run.json        what ran, where, with which versions; one entry an invocation
                     planned.jsonl   the cases that an invocation was about to run
                     selection.jsonl of a part (``--shard``): each item of the whole, and its part
                     cases.jsonl     one line a case, kill or left-out case, on disk as it ends
                     records/        what each verdict is made of, manifest.jsonl: digests of it all
                     times/          raw times that wings leave, such as those of steps
                     report.html, report.md, junit.xml, coverage.json   when an invocation ends
                     kills-by-n.json   of faults that were planted in random cases

Several invocations may write into one folder, one after the other.  A line that was cut off by a
kill is ignored; where one case has several lines, the last counts, but one that was left out
later keeps its result.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from shardproof import VERSION, table, verdicts
from shardproof.case import Case
from shardproof.checks.results import CaseResult, Kill, LeftOut, rerun
from shardproof.contract import Options
from shardproof.errors import Problem, SelectionError, printable
from shardproof.files import (
    DAMAGE,
    UNWRITABLE,
    damage_of,
    from_others,
    lines_of,
    open_input,
    read_fast_json,
    read_input,
    standard,
    write_whole,
)
from shardproof.runs import code, shard
from shardproof.runs.header import (
    FORMAT,
    NAME,
    ComparisonKey,
    Header,
    Invocation,
    PartOf,
    read_header,
)
from shardproof.runs.records import FOLDER as RECORDS
from shardproof.runs.records import LeadsOut, Manifest, append_line, require_inside, write
from shardproof.runs.shard import Cut, Shard
from shardproof.wings import LineKind, line_kinds

#: A line as JSON; its ``kind`` is one of the core's (:func:`read`) or of a wing's.
Line = dict[str, Any]
#: The file of a line for each result.
LINES = "cases.jsonl"
_PLAN = "planned.jsonl"
#: A file system without locks, as some of clusters are.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


@dataclass
class Run:
    """A run as read back: ``run.json``, and the lines of ``cases.jsonl`` by kind.

    ``others``: results that wings wrote, by kind; also those of wings that this tree lacks.
    ``superseded``: earlier results of cases, as written, which a later line of the id replaces.
    """

    path: Path
    header: Header
    cases: list[CaseResult] = field(default_factory=list)
    mutant_cases: list[CaseResult] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    others: dict[str, list[Line]] = field(default_factory=dict)
    superseded: list[CaseResult] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The run's id, whatever its folder is called."""
        return self.header.id or self.path.name

    @property
    def provenance(self) -> str:
        """Which code ran, with what, where, as a sentence."""
        last = self.header.last
        machine, commit = last.fingerprint, last.commit or "unknown"
        return (
            f"Run `{self.path.name}`: commit {commit[:12]}, torch {last.packages.get('torch')}, "
            f"Python {last.python}, {machine.cpu}, {machine.cores} cores."
        )

    @property
    def ids(self) -> set[str]:
        """Ids of every case and other result that has a line."""
        judged = {result.id for result in (*self.cases, *self.mutant_cases)}
        others = {str(line.get("id")) for lines in self.others.values() for line in lines}
        return judged | {line.id for line in self.left_out} | others

    @property
    def unfinished(self) -> list[str]:
        """Planned cases, faults and other results without a line: a kill came before them."""
        there, faults = self.ids, {kill.name for kill in self.kills}
        absent: list[str] = []
        for one in self.header.invocations:
            # Cases of faults that a budget kept from running are told by the fault.
            planned = [] if one.kills and one.exit_code is not None else one.planned
            absent += [name for name in (*planned, *one.benches) if name not in there]
            absent += [name for name in one.kills if name not in faults]
        return list(dict.fromkeys(absent))

    @property
    def gap(self) -> str:
        """How much of the plan has no result, and what to do about it; empty: all has one."""
        why = (
            "the run ended before, or is still running (`shardproof run --resume --results RUN` "
            "continues with cases; repeat other commands)"
        )
        absent = len(self.unfinished)
        return f"{absent} planned without a result: {why}" if absent else ""

    def invocation_of(self, case: Case) -> Invocation | None:
        """The invocation to which the seal of ``case`` binds it; ``None``: none of this run."""
        sealing = (one for one in self.header.invocations if one.nonce)
        return next((one for one in sealing if case.seal == case.seal_of(one.nonce)), None)

    def told_flaky(self) -> Run:
        """This run, with the verdict ``flaky`` of each case that failed before and does no longer,
        judged by the same code: what was seen once stays.
        """
        broke = verdicts.RED - {"refused"}
        failed = table.grouped(
            (one.id, one) for one in self.superseded if verdicts.kind(one.verdict) in broke
        )
        cases = [self._told_flaky(result, failed.get(result.id, ())) for result in self.cases]
        return replace(self, cases=cases)

    def _told_flaky(self, result: CaseResult, failed: Sequence[CaseResult]) -> CaseResult:
        now = self.invocation_of(result.case) if failed else None
        if now is None or verdicts.kind(result.verdict) in verdicts.RED:
            return result
        system = result.case.implementation
        for one in failed:
            then = self.invocation_of(one.case)
            # Another state of the code may be mended.
            if then is not None and then is not now and then.judges(system) == now.judges(system):
                told = f"{one.verdict} before, then {result.verdict}, by the same code"
                return replace(result, verdict=verdicts.FLAKY, reason=f"{told}: {one.reason}")
        return result

    def known(self, judged_only: bool = True) -> dict[LineKind, list[Line]]:
        """The ``others`` by kind of this tree's wings, in the order in which these list them.

        ``judged_only``: without what was only measured.
        """
        return {
            kind: self.others[kind.name]
            for kind in line_kinds().values()
            if kind.name in self.others and (kind.is_judged or not judged_only)
        }

    @property
    def unread(self) -> str:
        """Which of the ``others`` nothing in this tree reads, in a sentence; empty: none."""
        counts = {n: len(lines) for n, lines in self.others.items() if n not in line_kinds()}
        told = ", ".join(f"{table.number(n, 'line')} of kind {name}" for name, n in counts.items())
        return f"Not shown: {told}; no wing of this installation reads them." if told else ""


def make_folder(root: Path, kind: str = "") -> Path:
    """Make a folder under ``root``, named by time (UTC) and ``kind``, which is no other process's.

    :raises OSError: it cannot be made.
    """
    name = datetime.now(UTC).strftime("%Y%m%d-%H%M%S") + kind
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        with contextlib.suppress(FileExistsError):
            (root / f"{name}{suffix}").mkdir(parents=True)
            return root / f"{name}{suffix}"
    raise FileExistsError(f"folders {root / name} to {name}-999 all exist: try again in a second")


class RunFolder:
    """Writes one run; use it as a context manager or call :meth:`close`."""

    def __init__(self, path: Path, command: Sequence[str]) -> None:
        self.path, self._lines = path, path / LINES
        path.mkdir(parents=True, exist_ok=True)
        _require_no_links(path)
        self._lock = self._locked()
        try:
            self._begin(command)
        except BaseException:
            self._lock.close()
            raise

    def _begin(self, command: Sequence[str]) -> None:
        path, header = self.path, read_header(self.path)
        from shardproof.runs import machine  # who only reads runs does without

        self._header = header or Header(format=FORMAT, id=path.name, invocations=[])
        self._invocation = machine.begun(command, _now())
        if self._header.part is not None:  # whatever goes on with a part stays in it
            self._invocation.part = self._header.part
            self._invocation.key = self._header.key_of_whole
        self._header.invocations.append(self._invocation)
        self._manifest = Manifest(path)
        self._data: set[str] = set()
        self._closed = False
        self._manifest.mend()
        self._manifest.read()  # a damaged one is refused before anything is written
        self._mend_last_line()
        self._count = read_input(self._lines).count(b"\n")
        self._write_header()

    @classmethod
    def create(cls, root: Path, command: Sequence[str]) -> RunFolder:
        """A new folder under ``root``, named by time (UTC)."""
        return cls(make_folder(root), command)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close(None)
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            # The header of before stays whole; whoever filled the disk has said so already.
            print(f"{error.filename}: {error.strerror}: the end was not recorded", file=sys.stderr)
        finally:
            self._lock.close()

    def cut(self, whole: Cut, part: Shard, cases: Sequence[Case] = ()) -> None:
        """Say, before any plan, that this run is ``part`` of ``whole``, which has these ``cases``.

        :raises SelectionError: the run is another part, or has other cases.
        """
        of = PartOf(index=part.index, of=part.of, selected=len(whole.rows), digest=whole.digest)
        before, own = self._header.invocations[:-1], self._header.part
        if any(one.part != of for one in before if one.part or one.planned or one.benches):
            what = f"this run is {own or 'no part of a selection'}"
            what += " of another selection" if own and own.index == part.index else ""
            remedy = "name another --results folder"
            raise SelectionError(Problem(what, remedy, f"--shard {part}", str(self.path)))
        self._invocation.part = of
        if cases:
            self._invocation.key = comparison_key(cases)
        self.write(shard.FILE, whole.text())
        self._write_header()

    def tell_cluster(self, told: dict[str, Any]) -> None:
        """Note in ``run.json`` which machines judge."""
        self._invocation.cluster = told
        self._write_header()

    def tell_code(self, told: dict[str, str], kept: Sequence[CaseResult]) -> list[CaseResult]:
        """Note in ``run.json`` which code is judged; what of ``kept`` other code may have given."""
        self._invocation.code = told
        self._write_header()
        return code.older(kept, told, self._header.invocations[:-1])

    def bind(self, cases: Iterable[Case]) -> list[Case]:
        """``cases``, sealed for this invocation: their records differ from those of any other."""
        nonce = self._invocation.nonce
        return [replace(case, seal=case.seal_of(nonce)) for case in cases]

    def _require_of_part(self, names: Iterable[str]) -> None:
        """:raises SelectionError: the run is a part, and one of ``names`` is not in it."""
        if (part := self._invocation.part) is None:
            return
        own = Cut.read(self.path).names(part.index)
        if other := next((name for name in names if name not in own), None):
            what = f"this run is {part}, which does not contain the case"
            raise SelectionError(Problem(what, "name another run folder", other, str(self.path)))

    def plan(self, cases: Sequence[Case], kills: Sequence[str] = ()) -> None:
        """Say what is about to run, so that what is missing later is seen to be missing.

        :raises SelectionError: this run has another case of the same id, whose result it would hide
            (those of faults are the suite's own, and weighed as their kills need); or it is a part
            of a selection, without these.
        """
        self._require_of_part(kills or [case.id for case in cases])
        new = [json.dumps(case.to_dict()) for case in cases]
        planned = {} if kills else read_plan(self.path)
        for line in new if planned else ():
            case = Case.from_dict(json.loads(line))
            if planned.get(case.id, case) != case:
                what = "this run has another case with the same id"
                remedy = "name another run folder"
                raise SelectionError(Problem(what, remedy, case.id, str(self.path)))
        self._invocation.planned = [case.id for case in cases]
        self._invocation.kills = list(kills)
        if self._invocation.key is None:  # that of a part is the whole's
            self._invocation.key = comparison_key(cases)
        self._plan_more(new)
        self._write_header()

    @property
    def goes_on(self) -> bool:
        """Whether ``run --resume`` can continue this: it runs cases, and their plan was kept."""
        one = self._invocation
        if one.kills or one.benches or one.reproduces or not one.planned:
            return False
        return read_plans(self.path).keys() >= set(one.planned)

    def _plan_more(self, cases: Iterable[str]) -> None:
        file = self.path / _PLAN
        before = read_input(file) if file.exists() else b""
        before = before[: before.rfind(b"\n") + 1]  # without what a kill cut off
        self.write(file.name, before + "".join(f"{line}\n" for line in cases).encode())

    def plan_others(self, ids: Sequence[str]) -> None:
        """Say which results of a wing are about to be made."""
        self._require_of_part(ids)
        self._invocation.benches = list(ids)
        self._write_header()

    def reproduces(self, run: str) -> None:
        """Say, before any plan, whose cases are about to be run again."""
        self._invocation.reproduces = run

    def put_together(self, invocations: Sequence[Invocation], whole: Cut) -> None:
        """Show the ``invocations`` of parts of ``whole`` in place of this one, which runs nothing.

        Their lines and files come by :meth:`copy_line` and :meth:`copy_file`.
        """
        self._header.invocations = list(invocations)
        self._invocation.key = self._header.key_of_whole
        self._header.merged = self._invocation
        cases = (line["case"] for _, line in whole.rows if line.get("case"))
        self._plan_more(json.dumps(case) for case in cases)
        self._write_header()

    def copy_line(self, line: bytes) -> None:
        """Append a line of another run, byte for byte."""
        fields = json.loads(line)
        if data := fields.get("data"):
            self._data.add(f"{fields['case']['workload']['name']} {data}")
        self._append(line)

    def copy_file(self, name: str, content: bytes) -> None:
        """Write a file of another run.

        :raises SelectionError: there is one of that name.
        """
        if (self.path / name).exists():
            what, remedy = "two parts have a file of that name", "name each part once"
            raise SelectionError(Problem(what, remedy, file=str(self.path / name)))
        (self.path / name).parent.mkdir(exist_ok=True)
        self.write(name, content)

    def keep(self, result: CaseResult, account: Line) -> None:
        """Write the record of a case, before :meth:`add` tells its result."""
        result.rerun = rerun(result.case, self._invocation.run_command, self.path)
        result.record, sha256 = write(self.path, account)
        self._manifest.seal(result.record, sha256)
        result.data = account["data_digest"]
        if result.data:
            self._data.add(f"{result.case.workload.name} {result.data}")

    def add(self, result: CaseResult | Kill | LeftOut | Line, kind: str = "case") -> None:
        """Append one line; on disk when this returns."""
        fields = result if isinstance(result, dict) else result.to_dict()
        self._append(json.dumps(standard({"kind": kind, **fields}), allow_nan=False).encode())

    def _append(self, line: bytes) -> None:
        append_line(self._lines, line)
        self._count += 1
        self._manifest.seal(LINES, hashlib.sha256(line).hexdigest(), self._count)

    def write(self, file: str, content: str | bytes) -> None:
        """Write a file of this run, and note its digest; both or, on a full disk, neither."""
        if isinstance(content, str):
            content = printable(content).encode()
        with self._manifest.sealing(file, hashlib.sha256(content).hexdigest()):
            write_whole(self.path / file, content)

    def leave_out(self, case: Case, reason: str) -> None:
        self.add(LeftOut(case.id, case, None, reason), "left out")

    def leave_out_other(self, planned: Options, reason: str) -> None:
        """Record what a wing planned and did not do; ``planned`` in its JSON form."""
        self.add(LeftOut(planned["id"], None, planned, reason), "left out")

    def close(self, exit_code: int | None) -> None:
        """Note how the invocation ended; calling it again changes nothing."""
        if self._closed:
            return
        self._closed = True
        self._invocation.ended = _now()
        self._invocation.exit_code = exit_code
        if self._invocation.key is not None and self._data:
            self._invocation.key.data = _text_digest(sorted(self._data))
        self._write_header()

    def _write_header(self) -> None:
        self.write(NAME, self._header.text())

    def _locked(self) -> BinaryIO:
        """``cases.jsonl``, locked: one process at a time writes; a dead one holds no lock.

        :raises SelectionError: another one does.
        """
        if self._lines.exists():
            open_input(self._lines).close()
        lines = self._lines.open("ab")
        try:
            fcntl.flock(lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lines.close()
            header = read_header(self.path)
            pid = header.last.pid if header is not None else None
            what, remedy = "another process writes into this run", "wait until it ends, or end it"
            raise SelectionError(Problem(what, remedy, f"pid {pid}", str(self.path))) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        return lines

    def _mend_last_line(self) -> None:
        """A line that a kill cut off must not swallow the next one; a whole one is listed late."""
        content = read_input(self._lines)
        os.truncate(self._lines, whole := content.rfind(b"\n") + 1)
        self._invocation.mended = whole < len(content)
        lines, listed = content[:whole].splitlines(), self._manifest.read()
        if lines and listed and (LINES, len(lines)) not in listed:
            self._manifest.seal(LINES, hashlib.sha256(lines[-1]).hexdigest(), len(lines))


def _require_no_links(path: Path) -> None:
    """:raises LeadsOut: a run that is written leads elsewhere, where nothing of it belongs."""
    for place in (path, path / RECORDS):
        for file in place.iterdir() if place.is_dir() else ():
            if file.is_symlink():
                remedy = "remove the link, or copy the whole run again: a run has no links"
                raise LeadsOut(Problem("is a link", remedy, file=str(file)))


def read_plan(path: Path) -> dict[str, Case]:
    """By its id every case that an invocation of the run in ``path`` was about to run."""
    return {name: cases[-1] for name, cases in read_plans(path).items()}


def read_plans(path: Path) -> dict[str, list[Case]]:
    """By its id each case as invocations of the run in ``path`` were about to run it."""
    file = path / _PLAN
    cases: dict[str, list[Case]] = {}
    for raw in read_input(file).splitlines() if file.exists() else ():
        try:
            case = from_others(Case, json.loads(raw))
        except DAMAGE:
            continue  # cut off by a kill, before any case of that invocation ran
        cases.setdefault(case.id, []).append(case)
    return cases


def require_run_or_new(path: Path) -> None:
    """:raises SelectionError: the folder ``path`` holds something, and no run."""
    ours = {LINES, Manifest.NAME}  # all that a disk had room for
    if path.is_dir() and not (path / NAME).exists() and {p.name for p in path.iterdir()} - ours:
        remedy = "name the folder of a run, a new folder or an empty one"
        raise SelectionError(Problem("holds files, but no run.json", remedy, file=str(path)))


def comparison_key(cases: Sequence[Case]) -> ComparisonKey:
    """The values that two runs must share to be compared, whatever they judge."""
    judged = ("id", "implementation", "label", "options", "seal")
    cells = [{k: v for k, v in case.to_dict().items() if k not in judged} for case in cases]
    lines = sorted({json.dumps(cell, sort_keys=True) for cell in cells})
    return ComparisonKey(suite=VERSION, scenarios=_text_digest(lines), data=None)


def _text_digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def read(path: Path, strict: bool = False, damaged: list[Problem] | None = None) -> Run:
    """:func:`read_as_written`, with flaky results marked as such."""
    return read_as_written(path, strict, damaged).told_flaky()


def read_as_written(path: Path, strict: bool = False, damaged: list[Problem] | None = None) -> Run:
    """The run in folder ``path``; ``strict`` also refuses unreadable lines before the last one.

    ``damaged`` takes what is wrong with lines that lack what this version needs: they are left out.

    :raises SelectionError: no run there, its ``run.json`` cannot be read, or it has another format.
    :raises SelectionError: a line lacks what this version needs, and there is no ``damaged``.
    :raises LeadsOut: a line names a file outside of the run.
    """
    header = read_header(path)
    if header is None:
        remedy = "name a folder that holds run.json"
        raise SelectionError(Problem("this is not a run folder", remedy, str(path)))
    last: dict[tuple[str, str], tuple[int, Line]] = {}
    earlier: list[tuple[int, Line]] = []
    for number, line in _lines(path / LINES, strict):
        kill = line["kind"] == "kill"
        key = ("kill", str(line.get("name"))) if kill else ("", str(line.get("id")))
        if not is_left_out(line) or key not in last or is_left_out(last[key][1]):
            if key in last and last[key][1]["kind"] == "case":
                earlier.append(last[key])
            last[key] = number, line
    run = Run(path, header)
    replaced = {number for number, _ in earlier}
    readers: dict[str, Callable[[Line], None]] = {
        "case": lambda line: run.cases.append(CaseResult.from_dict(line)),
        "replaced": lambda line: run.superseded.append(CaseResult.from_dict(line)),
        "mutant case": lambda line: run.mutant_cases.append(CaseResult.from_dict(line)),
        "kill": lambda line: run.kills.append(Kill.from_dict(line)),
        "left out": lambda line: run.left_out.append(LeftOut.from_dict(line)),
    }
    of_wings = line_kinds()
    for number, line in (*earlier, *last.values()):
        for name in (line.get("record"), line.get("times")):
            require_inside(path, name, f"{path / LINES}:{number}")
        kind = of_wings.get(line["kind"])
        word = "replaced" if number in replaced else line["kind"]
        if word in readers or kind is None or kind.is_result:
            try:
                readers.get(word, _keep_in(run, kind))(line)
            except DAMAGE as error:
                name = line.get("id") or line.get("name") or "a line"
                problem = damage_of(error, path / LINES, number, f"{name}: ")
                if damaged is None:
                    raise SelectionError(problem) from None
                damaged.append(problem)
    return run


def _keep_in(run: Run, kind: LineKind | None) -> Callable[[Line], None]:
    """Puts a line of a wing into ``run``; of a ``kind`` that a wing reads, if it is a result."""

    def keep(line: Line) -> None:
        for name in ("id", "verdict") if kind is not None else ():
            if not isinstance(line[name], str):
                raise TypeError(f"{name} must be a string, not {line[name]!r:.80}")
        run.others.setdefault(line["kind"], []).append(line)

    return keep


def is_left_out(line: Line) -> bool:
    """A case or a fault that was not run, which takes nothing from an earlier result."""
    kind = line["kind"]
    return bool(kind == "left out" or (kind == "kill" and line.get("verdict") == "left out"))


def find_run(name: str | None, root: Path = Path("results")) -> Path:
    """The folder of run ``name`` (a folder or an id under ``root``); ``None``: the newest."""
    if name is None:
        runs = [path.parent for path in root.glob("*/run.json")]
        if not runs:
            raise SelectionError(Problem("no run yet", "start one: `shardproof run`", str(root)))
        return max(runs, key=lambda path: (path / "run.json").stat().st_mtime)
    for path in (Path(name), root / name):
        if (path / "run.json").is_file():
            return path
    remedy = "name a folder or an id under results/"
    if "baselines" in Path(name).parts:
        remedy = "only a checkout has baselines; `shardproof compare RUN --save FILE` writes one"
    raise SelectionError(Problem("no such run", remedy, name))


def lines(run: Path) -> Iterator[Line]:
    """Every line of ``cases.jsonl`` in the folder ``run``, in the order they were written."""
    return (line for _, line in _lines(run / LINES))


def _lines(path: Path, strict: bool = False) -> Iterator[tuple[int, Line]]:
    if not path.exists():
        return
    for number, raw in enumerate(lines_of(path), 1):
        try:
            line = read_fast_json(raw)
        except (ValueError, RecursionError):
            if strict and raw.endswith(b"\n"):
                remedy = "run `shardproof verify` to list every change"
                problem = Problem("is damaged", remedy, file=str(path), line=number)
                raise SelectionError(problem) from None
            continue  # cut off by a kill
        if isinstance(line, dict) and isinstance(line.get("kind"), str):
            yield number, line


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
