"""A bench session: fresh ranks for every launch, and what they measured.

The command line calls :class:`Bench`, whose tasks run in leaders (:mod:`shardproof.bench.tasks`);
:mod:`shardproof.bench.evidence` judges and keeps what was measured.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardproof.backends import BACKENDS
from shardproof.bench import tasks
from shardproof.bench.model import measurement, scorecard
from shardproof.bench.sides import LETTERS, Pair, natural_mesh
from shardproof.bench.telemetry import nvml, sampling
from shardproof.case import split
from shardproof.cases.runner import JUDGING_SECONDS
from shardproof.launch.fork_server import Task
from shardproof.launch.pool import Pool
from shardproof.registry.declaration import Answer

#: Called with the number of blocks that have ended so far, over all launches.
OnBlocks = Callable[[int], None]
_LOOK_SECONDS = 1.0
#: Seconds that a look at progress may take before its thread is left to itself (a full pipe).
_PATIENCE_SECONDS = 5.0


@dataclass
class Measured:
    """What a comparison has measured so far; complete or not, it can be judged.

    ``records`` are what ranks returned, one list a launch; ``problem`` is (verdict, sentence).
    ``seen`` belongs to the launches, ``sides`` are passes of one side alone.
    """

    pair: Pair
    meshes: dict[str, dict[str, int]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    records: list[list[dict[str, Any]]] = field(default_factory=list)
    memory: dict[str, Any] | None = None
    profile: dict[str, Any] | None = None
    seen: sampling.Seen = field(default_factory=sampling.Seen)
    sides: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Why there are no figures of GPUs.
    no_gpu: str = ""
    on_threads: bool = False
    #: What each side claims to be, and what was probed for its scorecard (bench.model.scorecard).
    strategies: dict[str, str] = field(default_factory=dict)
    probed: dict[str, Any] | None = None
    problem: tuple[str, str] | None = None
    seconds: float = 0.0


class Bench:
    """Runs comparisons, one launch at a time; leaving the ``with`` block ends every process."""

    def __init__(self, api: Any = None) -> None:
        self._asked, self._api, self._no_gpu = api, None, ""
        self._pool = Pool(1, tasks=(tasks.time_sides,))
        self._made = 0

    def __enter__(self) -> Bench:
        self._pool.__enter__()
        self._api, self._no_gpu = nvml.start(self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._pool.__exit__()
        finally:
            if self._api is not None and (why := nvml.stop(self._api)):
                print(f"telemetry: {why}", file=sys.stderr)

    def examine(self, pairs: Sequence[Pair]) -> list[Measured]:
        """Ask the implementations what they can do, before anything is timed.

        :raises SelectionError: a side refuses its options, or the world cannot be put on its axes.
        """
        from shardproof.errors import Problem, SelectionError

        found = []
        for pair in pairs:
            workdir = self.folder()
            told = self._lead(tasks.examine_sides, pair, workdir, {}, 120.0)
            measured = Measured(pair)
            for letter in LETTERS:
                side = pair.side(letter)
                if "problem" in told:
                    answer = Answer(missing=told["problem"][1])
                else:
                    answer = Answer.from_dict(told[letter])
                if answer.refused:
                    what = f"{side.implementation}: {answer.refused}"
                    raise SelectionError(Problem(what, f"correct --option-{letter}", pair.name))
                declared = answer.declaration
                if answer.missing or declared is None:
                    why = f"{side.implementation}: {answer.missing}"
                    measured.problem = ("precondition", why)
                    break
                measured.meshes[letter] = dict(side.mesh) or natural_mesh(declared.axes, pair.world)
                measured.strategies[letter] = declared.strategy
                on_threads = "in_memory" in declared.backends
                measured.on_threads = on_threads and (letter == "a" or measured.on_threads)
            measured.meshes["twin"] = measured.meshes.get("a", {})
            found.append(measured)
        return found

    def time(self, measured: Measured, on_blocks: OnBlocks) -> None:
        """All launches of a comparison; what has been measured stays, however this is left."""
        pair, began, done = measured.pair, time.monotonic(), 0
        first = 0
        for launch, count in enumerate(split(pair.blocks, pair.launches)):
            workdir = self.folder()
            more = {"launch": launch, "blocks": list(range(first, first + count))}
            first += count
            sampler = self._sampler(measured, workdir)
            try:
                with Watch(workdir, on_blocks, done), sampler:
                    told = self._lead(tasks.time_sides, pair, workdir, measured.meshes | more)
            finally:
                measured.seen.add(sampler.seen)
                measured.rows += read_times(workdir)
                measured.seconds = time.monotonic() - began
            if "problem" in told:
                measured.problem = told["problem"]
                return
            measured.records.append(told["records"])
            done += count
            on_blocks(done)

    def alone(self, measured: Measured) -> None:
        """Each side in passes of its own that nobody times: bytes, and what a GPU tells."""
        pair = measured.pair
        if not BACKENDS[pair.backend].threads:
            for letter in LETTERS:
                workdir = self.folder()
                with self._sampler(measured, workdir) as sampler:
                    told = self._lead(
                        tasks.run_alone, pair, workdir, _side(measured, letter), 300.0
                    )
                if "problem" in told:
                    measured.sides[letter] = {"problem": told["problem"][1]}
                else:
                    measured.sides[letter] = sampling.of_side(sampler.seen, told["records"])
        measured.memory = self._ledger(measured) if measured.on_threads else _resident(measured)

    def _ledger(self, measured: Measured) -> dict[str, Any]:
        """Peak bytes of a step on threads, where they are counted exactly."""
        worst: dict[str, int] = {}
        for letter in LETTERS:
            side = _side(measured, letter)
            told = self._lead(tasks.weigh_side, measured.pair, self.folder(), side, 300.0)
            if "problem" in told:
                return {"problem": told["problem"][1]}
            worst[letter] = max(record["ledger"] for record in told["records"])
        return {"kind": "ledger", **worst, "ratio": worst["a"] / worst["b"]}

    def _sampler(self, measured: Measured, workdir: Path) -> sampling.Sampler:
        """Who looks at the ranks of ``workdir``, and at GPUs if these compute there."""
        on_gpu = BACKENDS[measured.pair.backend].device == "cuda"
        measured.no_gpu = self._no_gpu if on_gpu else f"{measured.pair.backend} computes on the CPU"
        return sampling.Sampler(lambda: sampling.pids_in(workdir), self._api if on_gpu else None)

    def score(self, measured: Measured) -> None:
        """Both sides beside their predictions, probed in a launch of its own."""
        pair = measured.pair
        reasons = {
            letter: scorecard.unscored(pair.backend, measured.meshes[letter]) for letter in LETTERS
        }
        letters = [each for each in LETTERS if not reasons[each]]
        probed: dict[str, Any] = {"sides": {}}
        if letters:
            workdir = self.folder()
            subjects = [measurement.Subject(pair, each, measured.meshes[each]) for each in letters]
            payload = {
                "subjects": [subject.to_dict() for subject in subjects],
                "rounds": measurement.ROUNDS,
                "workdir": str(workdir),
            }
            told = self.lead(measurement.lead, pair.id, payload, 2 * pair.deadline)
            if "problem" in told:
                why = told["problem"]
                measured.probed = {"problem": why if isinstance(why, str) else why[1]}
                return
            probed = scorecard.digest(pair.backend, letters, told)
        probed["sides"] |= {each: {"problem": why} for each, why in reasons.items() if why}
        measured.probed = probed

    def profile(self, measured: Measured) -> None:
        """Where a mean step's time goes, by side."""
        found = {}
        for letter in LETTERS:
            more = {"side": letter, "mesh": measured.meshes[letter]}
            told = self._lead(tasks.profile_side, measured.pair, self.folder(), more)
            if "problem" in told:
                measured.profile = {"problem": told["problem"][1]}
                return
            rows = [{k: v for k, v in r.items() if k != "rank"} for r in told["records"]]
            found[letter] = max(rows, key=lambda row: float(row["wall"]))
        measured.profile = found

    def folder(self) -> Path:
        """A fresh work folder, not yet made."""
        self._made += 1
        return self._pool.folder / f"launch{self._made}"

    def _lead(
        self,
        task: Task,
        pair: Pair,
        workdir: Path,
        more: Mapping[str, Any],
        deadline: float | None = None,
    ) -> dict[str, Any]:
        """Run ``task`` in a leader; what it returned, or ``{"problem": (verdict, sentence)}``."""
        payload = {"pair": pair.to_dict(), "workdir": str(workdir), **more}
        return self.lead(task, pair.id, payload, deadline or pair.deadline)

    def lead(
        self, task: Task, name: str, payload: Mapping[str, Any], deadline: float
    ) -> dict[str, Any]:
        """Run ``task`` in a leader; what it returned, or ``{"problem": (verdict, sentence)}``.

        ``payload`` names the ``workdir``; ``deadline`` is in seconds, without the leader's own.
        """
        items = iter([(name, dict(payload), deadline + JUDGING_SECONDS)])
        with closing(self._pool.run(task, items)) as ends:
            (end,) = list(ends)
        if end.value is not None:
            value: dict[str, Any] = end.value
            return value
        verdict = "hang" if end.timed_out else "crash"
        return {"problem": (verdict, f"the measuring process {end.why_no_value}")}


def _side(measured: Measured, letter: str) -> dict[str, Any]:
    return {"side": letter, "mesh": measured.meshes[letter]}


def _resident(measured: Measured) -> dict[str, Any]:
    """Resident memory that each side added on its worst rank: advisory."""
    if not measured.sides:
        return {"problem": "one side cannot run on threads, where bytes are counted"}
    for side in measured.sides.values():
        if "resident_bytes" not in side:
            return {"problem": side["problem"]}
    told = {letter: int(side["resident_bytes"]) for letter, side in measured.sides.items()}
    if min(told.values()) <= 0:
        return {"problem": "a side added nothing to what was resident before its set-up"}
    return {"kind": "resident", **told, "ratio": told["a"] / told["b"]}


class Watch:
    """Tells now and then how many blocks the first rank of a launch has ended."""

    def __init__(self, workdir: Path, tell: OnBlocks, before: int) -> None:
        self._path, self._tell, self._before = workdir / "times0.jsonl", tell, before
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="bench progress", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(_PATIENCE_SECONDS)

    def _look(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            if self._path.exists():
                lines = self._path.read_text().splitlines()
                blocks = {json.loads(line)["block"] for line in lines if line.endswith("}")}
                self._tell(self._before + len(blocks - {-1}))


def read_times(workdir: Path) -> list[dict[str, Any]]:
    """The raw times that ranks left in ``workdir``; a line that was cut off is left out."""
    found = []
    for path in sorted(workdir.glob("times*.jsonl")):
        lines = path.read_bytes().splitlines(keepends=True)
        found += [json.loads(line) for line in lines if line.endswith(b"\n")]
    return found
