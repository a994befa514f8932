"""A bench session: fresh ranks for every launch, what they measured, and the evidence of it.

The command line calls :class:`Bench`; the functions at the end run in leaders.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from suite import results
from suite.backends import BACKENDS
from suite.case import split
from suite.launch.pool import Pool
from suite.runner import JUDGING_SECONDS, Workspace
from suite.timing import card, nvml, score, stats, telemetry
from suite.timing.losses import alike, by_coordinate, losses_of
from suite.timing.plan import Pair, Side, natural_mesh

#: Verdicts that say that there is nothing to compare; the others are those of ``stats.verdict``.
BROKEN = ("crash", "hang", "fail", "precondition")
#: Side letters of a comparison.
LETTERS = ("a", "b")
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
    seen: telemetry.Seen = field(default_factory=telemetry.Seen)
    sides: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Why there are no figures of GPUs.
    no_gpu: str = ""
    on_threads: bool = False
    #: What each side claims to be, and what was probed for its scorecard (suite.timing.card).
    strategies: dict[str, str] = field(default_factory=dict)
    probed: dict[str, Any] | None = None
    problem: tuple[str, str] | None = None
    seconds: float = 0.0


class Bench:
    """Runs comparisons, one launch at a time; leaving the ``with`` block ends every process."""

    def __init__(self, api: Any = None) -> None:
        self._space = Workspace()
        self._asked, self._api, self._no_gpu = api, None, ""
        self._pool = Pool(1, preload=("suite.timing.session",))
        self._made = 0

    def __enter__(self) -> Bench:
        self._path = self._space.__enter__()
        try:
            self._pool.__enter__()
        except BaseException:
            self._space.__exit__()
            raise
        self._api, self._no_gpu = nvml.start(self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._pool.__exit__()
        finally:
            self._space.__exit__()
            if self._api is not None and (why := nvml.stop(self._api)):
                print(f"telemetry: {why}", file=sys.stderr)

    def examine(self, pairs: Sequence[Pair]) -> list[Measured]:
        """Ask the implementations what they can do, before anything is timed.

        :raises SelectionError: a side refuses its options, or the world cannot be put on its axes.
        """
        from suite.errors import Problem, SelectionError

        found = []
        for pair in pairs:
            workdir = self.folder()
            told = self._lead("examine_sides", pair, workdir, {}, 120.0)
            measured = Measured(pair)
            for letter in LETTERS:
                side, say = pair.side(letter), told.get(letter, {})
                if say.get("refused"):
                    remedy = f"correct --option-{letter}"
                    raise SelectionError(
                        Problem(f"{side.implementation}: {say['refused']}", remedy, pair.name)
                    )
                if say.get("missing") or "problem" in told:
                    why = say.get("missing") or told["problem"][1]
                    measured.problem = ("precondition", f"{side.implementation}: {why}")
                    break
                measured.meshes[letter] = dict(side.mesh) or natural_mesh(say["axes"], pair.world)
                measured.strategies[letter] = say["strategy"]
                measured.on_threads = say["threads"] and (letter == "a" or measured.on_threads)
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
                    told = self._lead("time_sides", pair, workdir, measured.meshes | more)
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
                    told = self._lead("run_alone", pair, workdir, _side(measured, letter), 300.0)
                if "problem" in told:
                    measured.sides[letter] = {"problem": told["problem"][1]}
                else:
                    measured.sides[letter] = telemetry.of_side(sampler.seen, told["records"])
        measured.memory = self._ledger(measured) if measured.on_threads else _resident(measured)

    def _ledger(self, measured: Measured) -> dict[str, Any]:
        """Peak bytes of a step on threads, where they are counted exactly."""
        worst: dict[str, int] = {}
        for letter in LETTERS:
            side = _side(measured, letter)
            told = self._lead("weigh_side", measured.pair, self.folder(), side, 300.0)
            if "problem" in told:
                return {"problem": told["problem"][1]}
            worst[letter] = max(record["ledger"] for record in told["records"])
        return {"kind": "ledger", **worst, "ratio": worst["a"] / worst["b"]}

    def _sampler(self, measured: Measured, workdir: Path) -> telemetry.Sampler:
        """Who looks at the ranks of ``workdir``, and at GPUs if these compute there."""
        on_gpu = BACKENDS[measured.pair.backend].device == "cuda"
        measured.no_gpu = self._no_gpu if on_gpu else f"{measured.pair.backend} computes on the CPU"
        return telemetry.Sampler(lambda: telemetry.pids_in(workdir), self._api if on_gpu else None)

    def score(self, measured: Measured) -> None:
        """Both sides beside their predictions, probed in a launch of its own."""
        pair = measured.pair
        reasons = {
            letter: card.unscored(pair.backend, measured.meshes[letter]) for letter in LETTERS
        }
        letters = [each for each in LETTERS if not reasons[each]]
        probed: dict[str, Any] = {"sides": {}}
        if letters:
            workdir = self.folder()
            subjects = [score.Subject(pair, each, measured.meshes[each]) for each in letters]
            payload = {
                "subjects": [subject.to_dict() for subject in subjects],
                "rounds": score.ROUNDS,
                "workdir": str(workdir),
            }
            told = self.lead("suite.timing.score:run", pair.id, payload, 2 * pair.deadline)
            if "problem" in told:
                why = told["problem"]
                measured.probed = {"problem": why if isinstance(why, str) else why[1]}
                return
            probed = card.digest(pair.backend, letters, told)
        probed["sides"] |= {each: {"problem": why} for each, why in reasons.items() if why}
        measured.probed = probed

    def profile(self, measured: Measured) -> None:
        """Where a mean step's time goes, by side."""
        found = {}
        for letter in LETTERS:
            more = {"side": letter, "mesh": measured.meshes[letter]}
            told = self._lead("profile_side", measured.pair, self.folder(), more)
            if "problem" in told:
                measured.profile = {"problem": told["problem"][1]}
                return
            rows = [{k: v for k, v in r.items() if k != "rank"} for r in told["records"]]
            found[letter] = max(rows, key=lambda row: float(row["wall"]))
        measured.profile = found

    def folder(self) -> Path:
        """A fresh work folder, not yet made."""
        self._made += 1
        return self._path / f"launch{self._made}"

    def _lead(
        self,
        task: str,
        pair: Pair,
        workdir: Path,
        more: Mapping[str, Any],
        deadline: float | None = None,
    ) -> dict[str, Any]:
        """Run ``task`` in a leader; what it told, or ``{"problem": (verdict, sentence)}``."""
        payload = {"pair": pair.to_dict(), "workdir": str(workdir), **more}
        return self.lead(
            f"suite.timing.session:{task}", pair.id, payload, deadline or pair.deadline
        )

    def lead(
        self, task: str, name: str, payload: Mapping[str, Any], deadline: float
    ) -> dict[str, Any]:
        """Run ``task`` in a leader; what it told, or ``{"problem": (verdict, sentence)}``.

        ``payload`` names the ``workdir``; ``deadline`` is in seconds, without the leader's own.
        """
        items = iter([(name, dict(payload), deadline + JUDGING_SECONDS)])
        with closing(self._pool.run(task, items)) as ends:
            (ended,) = list(ends)
        path = Path(payload["workdir"]) / "told.json"
        if path.exists():
            told: dict[str, Any] = json.loads(path.read_text())
            return told
        lines = [line for line in ended.output.splitlines() if line.strip()]
        why = "ran out of time" if ended.timed_out else lines[-1] if lines else "left no word"
        return {"problem": ("hang" if ended.timed_out else "crash", f"the leader {why}")}


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


# ------------------------------------------------------------------------------------- verdicts


def result(measured: Measured) -> dict[str, Any]:
    """The line of ``cases.jsonl``; figures are those of :func:`suite.timing.stats.judge`."""
    pair = measured.pair
    line: dict[str, Any] = {
        "id": pair.id,
        "pair": pair.to_dict(),
        "meshes": measured.meshes,
        "seconds": round(measured.seconds, 3),
        "losses": losses(measured),
        "memory": measured.memory,
        "strategies": measured.strategies,
        "probed": measured.probed,
        "profile": measured.profile,
        "telemetry": _telemetry(measured),
        "problem": None if measured.problem is None else list(measured.problem),
    }
    if measured.records:
        first = measured.records[0]
        line["threads"] = first[0]["threads"]
        line["cores"] = [record["cores"] for record in first]
        line["segment_steps"] = [records[0]["segment_steps"] for records in measured.records]
        line["targets_per_step"] = {
            side: sum(by_coordinate(first, side, "targets")) for side in LETTERS
        }
    return line | conclude(line, measured.rows)


def conclude(line: Mapping[str, Any], rows: Sequence[stats.Row]) -> dict[str, Any]:
    """Verdict, reason and figures that raw times and the rest of the line give."""
    judged = stats.judge(rows)
    reason = ""
    told = line["losses"]
    same, why = alike(told.get("a"), told.get("b"), line["pair"]["dtype"])
    if line["problem"] is not None:
        judged["verdict"], reason = line["problem"]
    elif same is False:
        judged["verdict"], reason = "fail", why
    elif judged["verdict"] == "inconclusive" and "smallest_effect" not in judged:
        reason = f"{judged['blocks']} whole blocks: an interval needs 2"
    elif same is None:
        judged["verdict"], reason = "inconclusive", why
    elif judged["verdict"] == "inconclusive":
        reason = f"effects from {judged['smallest_effect']:.1%} on can be seen with these blocks"
    goal = line["pair"]["goal"]
    known = goal is not None and "high" in judged and same is not None
    met = judged["high"] <= goal if known else None
    rates = {}
    for side, seconds in judged.get("median_seconds", {}).items():
        rates[side] = line["targets_per_step"][side] / seconds if "targets_per_step" in line else 0
    samples = line["pair"]["workload"]["global_batch"]
    return {
        **judged,
        "reason": reason,
        "trained_alike": same,
        "scorecard": card.cards(line) if same else None,
        "goal_met": met,
        "targets_per_second": rates,
        "samples_per_second": {
            side: samples / seconds for side, seconds in judged.get("median_seconds", {}).items()
        },
    }


def _telemetry(measured: Measured) -> dict[str, Any]:
    """What was seen of memory and GPUs, in launches and of each side alone."""
    seen = measured.seen
    places = [r["pci"] for records in measured.records for r in records if r["pci"] is not None]
    return {
        "launches": telemetry.summary(seen, places or None) if seen.samples else None,
        "sides": measured.sides,
        "no_gpu": measured.no_gpu or None,
    }


def losses(measured: Measured) -> dict[str, list[float]]:
    """The global loss of each of the first steps, by side."""
    if not measured.records:
        return {}
    return {side: losses_of(measured.records[0], side) for side in LETTERS}


# --------------------------------------------------------------------------------- in leaders


def examine_sides(payload: dict[str, Any]) -> None:
    """What each side says of itself, without running it."""
    pair = Pair.from_dict(payload["pair"])
    tell(
        payload,
        {
            letter: about(pair.side(letter), pair.backend, pair.dtype, pair.world)
            for letter in LETTERS
        },
    )


def about(side: Side, backend: str, dtype: str, world: int) -> dict[str, Any]:
    """The ``axes`` that a system has, and what is ``missing`` here or that it ``refused``.

    ``threads``: whether it also runs on ``in_memory``, where bytes are counted exactly.
    """
    import importlib.util

    from suite import registry
    from suite.backends import BACKENDS
    from suite.contract import Refused

    try:
        system = registry.load(side.implementation)
        claims = system.capabilities(side.options)
    except registry.BrokenImplementation as error:
        return {"missing": str(error)}
    except Refused as error:
        return {"refused": str(error)}
    missing = BACKENDS[backend].available() or ""
    absent = [name for name in claims.packages if importlib.util.find_spec(name) is None]
    if absent:
        missing = f"package {', '.join(absent)} is not installed"
    elif backend not in claims.backends:
        missing = f"does not run on {backend}, only on {', '.join(claims.backends)}"
    elif dtype not in claims.dtypes:
        missing = f"does not train in {dtype}, only in {', '.join(claims.dtypes)}"
    elif claims.max_world is not None and world > claims.max_world:
        missing = f"runs on at most {claims.max_world} ranks"
    threads = "in_memory" in claims.backends
    return {
        "axes": list(claims.axes),
        "missing": missing,
        "threads": threads,
        "strategy": system.strategy,
    }


def time_sides(payload: dict[str, Any]) -> None:
    """One launch of A, its twin and B."""
    from suite.timing import blocks

    pair = Pair.from_dict(payload["pair"])
    meshes = {side: payload[side] for side in blocks.SIDES}
    workdir = Path(payload["workdir"])
    _on_ranks(
        payload,
        pair,
        pair.backend,
        lambda rank, _: blocks.run(
            pair, meshes, payload["launch"], payload["blocks"], workdir, rank
        ),
    )


def weigh_side(payload: dict[str, Any]) -> None:
    """Memory of one side on threads, which are counted exactly."""
    import dataclasses

    from suite.timing import blocks

    pair = dataclasses.replace(Pair.from_dict(payload["pair"]), backend="in_memory")
    _on_ranks(payload, pair, pair.backend, _of_side(blocks.memory, pair, payload))


def run_alone(payload: dict[str, Any]) -> None:
    """One side on its own ranks, untimed."""
    from suite.timing import blocks

    pair, workdir = Pair.from_dict(payload["pair"]), Path(payload["workdir"])
    program = functools.partial(blocks.alone, workdir=workdir)
    _on_ranks(payload, pair, pair.backend, _of_side(program, pair, payload))


def profile_side(payload: dict[str, Any]) -> None:
    """Phases of one side's step."""
    from suite.timing.profile import profile

    pair = Pair.from_dict(payload["pair"])
    _on_ranks(payload, pair, pair.backend, _of_side(profile, pair, payload))


def _of_side(
    function: Callable[..., dict[str, Any]], pair: Pair, payload: Mapping[str, Any]
) -> Callable[[int, int], dict[str, Any]]:
    return lambda rank, _: function(pair, payload["side"], payload["mesh"], rank)


def _on_ranks(
    payload: Mapping[str, Any],
    pair: Pair,
    backend: str,
    program: Callable[[int, int], dict[str, Any]],
) -> None:
    workdir = Path(payload["workdir"])
    tell(payload, launched(backend, pair.world, pair.deadline, workdir, program))


def launched(
    backend: str,
    world: int,
    deadline: float,
    workdir: Path,
    program: Callable[[int, int], dict[str, Any]],
    ledgers: bool = False,
) -> dict[str, Any]:
    """The ``records`` of ``program`` on fresh ranks, or the ``problem``: (verdict, sentence)."""
    from suite.launch import pack
    from suite.launch.ranks import root_cause, run_ranks

    workdir.mkdir(parents=True)
    outcomes = run_ranks(backend, world, program, workdir, deadline, ledgers=ledgers)
    cause = root_cause(outcomes)
    if cause is None:
        return {"records": [pack.load(o.record) for o in outcomes if o.record is not None]}
    if cause.error_type == "Refused":
        return {"problem": ("precondition", cause.message)}
    verdict = "hang" if cause.status == "hung" else "crash"
    where = cause.traceback.splitlines()[-3:-1] if cause.traceback else []
    return {"problem": (verdict, " ".join([cause.sentence(), *where]))}


def tell(payload: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    """Leave word for the session that waits for this leader."""
    workdir = Path(payload["workdir"])
    workdir.mkdir(parents=True, exist_ok=True)
    partial = workdir / "told.partial"
    partial.write_text(json.dumps(told))
    partial.replace(workdir / "told.json")


# --------------------------------------------------------------------------------- raw times


FOLDER = "times"
_COLUMNS = {
    "launch": "int32",
    "pair": "string",
    "block": "int32",
    "segment": "int32",
    "side": "string",
    "step": "int32",
    "rank": "int32",
    "seconds": "float64",
}


def write_times(run: Path, name: str, rows: Sequence[stats.Row]) -> str:
    """Raw times as a Parquet file under ``run``; its name there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from suite.records import file_name

    (run / FOLDER).mkdir(exist_ok=True)
    schema = pa.schema([(key, getattr(pa, kind)()) for key, kind in _COLUMNS.items()])
    table = pa.Table.from_pylist([{key: row[key] for key in _COLUMNS} for row in rows], schema)
    path = run / FOLDER / f"{file_name(name)}.parquet"
    partial = path.with_suffix(".partial")
    pq.write_table(table, partial, compression="zstd")
    partial.replace(path)
    return str(path.relative_to(run))


def load_times(path: Path) -> list[dict[str, Any]]:
    """What :func:`write_times` wrote.

    :raises RecordError: a file that cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from suite.records import RecordError

    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise RecordError(f"{path}: no readable times: {error}") from None
    return rows


def keep(folder: results.RunFolder, measured: Measured) -> dict[str, Any]:
    """Write raw times and the line of a comparison; the line."""
    line = result(measured)
    if measured.rows:
        line["times"] = write_times(folder.path, measured.pair.id, measured.rows)
        folder.seal(line["times"])
    folder.add(line, "bench")
    return line


def keep_report(folder: results.RunFolder) -> None:
    """Write what stands of all comparisons in the folder when they are shown together."""
    told = stats.family(results.read(folder.path).benches)
    if told:
        folder.add({"id": "report", "comparisons": told}, "bench report")


#: Figures that runs of earlier versions do not have.
_LATER = ("samples_per_second", "trained_alike", "scorecard")


def verify_line(run: Path, line: Mapping[str, Any]) -> str | None:
    """What a stored comparison gives otherwise when it is judged again (``None``: the same)."""
    rows = load_times(run / line["times"]) if line.get("times") else []
    again = json.loads(json.dumps(results.standard(conclude(line, rows))))
    for key, value in again.items():
        if line.get(key) != value and (key in line or key not in _LATER):
            return f"{line['id']}: the raw times give {key} {value!r}, not {line.get(key)!r}"
    return None
