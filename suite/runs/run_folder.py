"""A run's folder: evidence that survives a kill, and the durations that plan the next run.

    results/<run-id>/run.json        what ran, where, with which versions; one entry an invocation
                     planned.jsonl   the cases that an invocation was about to run
                     cases.jsonl     one line a case, kill or left-out case, on disk as it ends
                     records/        what each verdict is made of, manifest.jsonl: digests of it all
                     times/          raw step times of comparisons (``shardproof bench``)
                     report.html, report.md, junit.xml   written when an invocation ends
    results/durations.json        the last few durations of every case

Several invocations may write into one folder, one after the other.  A line that was cut off by a
kill is ignored; where one case has several lines, the last counts, but one that was left out
later keeps its result.  Of the machine only an allow-list is recorded; of the environment only the
variables that choose a CPU's kernels (:data:`KERNEL_VARIABLES`).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeGuard

from shardproof import VERSION, old_words
from shardproof.case import Case
from shardproof.errors import Problem, SelectionError
from shardproof.files import UNWRITABLE, write_whole
from shardproof.launch.process_control import cores
from shardproof.runs.records import Manifest, append_line, write

#: What a line of ``cases.jsonl`` is about.
LineKind = Literal["case", "mutant case", "kill", "bench", "bench report", "scaling", "left out"]

#: The evidence format that is written (docs/evidence.md), and those whose lines can be read.
#: Records of format 1 are judged by the suite that wrote them: messages of checks differ.
FORMAT = 2
READABLE = (1, FORMAT)
_PACKAGES = ("torch", "numpy", "pydantic", "PyYAML", "scikit-learn", "scipy")
_KEPT_DURATIONS = 5
#: They make torch, oneDNN and MKL use other kernels than the CPU's best: those round otherwise.
KERNEL_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
)
#: Lists of an invocation: what it was about to run.
_PLANNED = ("planned", "kills", "benches")
_ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Run:
    """A run as read back: ``header`` is ``run.json``; the rest are lines of ``cases.jsonl``."""

    path: Path
    header: dict[str, Any]
    cases: list[dict[str, Any]] = field(default_factory=list)
    mutant_cases: list[dict[str, Any]] = field(default_factory=list)
    kills: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    benches: list[dict[str, Any]] = field(default_factory=list)
    scalings: list[dict[str, Any]] = field(default_factory=list)


class RunFolder:
    """Writes one run; use it as a context manager or call :meth:`close`."""

    def __init__(self, path: Path, command: Sequence[str]) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._header = _read_header(path) or {"format": FORMAT, "id": path.name, "invocations": []}
        if self._header["format"] != FORMAT:
            raise other_format(self._header, path)  # one run, one format
        self._invocation: dict[str, Any] = {
            "command": list(command),
            "started": _now(),
            "ended": None,
            "exit_code": None,
            **_versions(),
            "fingerprint": fingerprint(),
        }
        self._header["invocations"].append(self._invocation)
        self._lines = path / "cases.jsonl"
        self._manifest = Manifest(path)
        self._data: set[str] = set()
        self._closed = False
        self._manifest.mend()
        self._manifest.read()  # a damaged one is refused before anything is written
        self._lines.touch()
        self._mend_last_line()
        self._count = self._lines.read_bytes().count(b"\n")
        self._write_header()

    @classmethod
    def create(cls, root: Path, command: Sequence[str]) -> RunFolder:
        """A new folder under ``root``, named by time (UTC)."""
        name = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
            try:
                (root / f"{name}{suffix}").mkdir(parents=True)
            except FileExistsError:
                continue
            return cls(root / f"{name}{suffix}", command)
        raise FileExistsError(f"{root / name}: a thousand runs in one second")

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close(None)
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            # The header of before stays whole; whoever filled the disk has said so already.
            print(f"{error.filename}: {error.strerror}: no end was noted", file=sys.stderr)

    def plan(self, cases: Sequence[Case], kills: Sequence[str] = ()) -> None:
        """Say what is about to run, so that what is missing later is seen to be missing."""
        self._invocation["planned"] = [case.id for case in cases]
        self._invocation["kills"] = list(kills)
        self._invocation["key"] = comparison_key(cases)
        told = self.path / "planned.jsonl"
        with told.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(case.to_dict()) + "\n" for case in cases)
        self.seal("planned.jsonl")
        self._write_header()

    def plan_benches(self, ids: Sequence[str]) -> None:
        """Say which comparisons or scaling cells are about to be timed."""
        self._invocation["benches"] = list(ids)
        self._write_header()

    def keep(self, result: dict[str, Any], account: Mapping[str, Any]) -> None:
        """Write the record of a case, before :meth:`add` tells its result."""
        name, sha256 = write(self.path, account)
        self._manifest.seal(name, sha256)
        result["record"] = name
        result["data"] = account["data_digest"]
        if account["data_digest"]:
            workload = account["case"]["workload"]["name"]
            self._data.add(f"{workload} {account['data_digest']}")

    def add(self, result: Mapping[str, Any], kind: LineKind = "case") -> None:
        """Append one line; on disk when this returns."""
        line = json.dumps(standard({"kind": kind, **result}), allow_nan=False).encode()
        append_line(self._lines, line)
        self._count += 1
        self._manifest.seal("cases.jsonl", hashlib.sha256(line).hexdigest(), self._count)

    def seal(self, file: str) -> None:
        """Note the digest of a file of this run as it is now."""
        self._manifest.seal(file, hashlib.sha256((self.path / file).read_bytes()).hexdigest())

    def leave_out(self, case: Case, reason: str) -> None:
        """Record a case that was selected and not run."""
        self.add({"id": case.id, "case": case.to_dict(), "reason": reason}, "left out")

    def leave_out_bench(self, pair: Mapping[str, Any], reason: str) -> None:
        """Record a comparison that was planned and not timed; ``pair`` in its JSON form."""
        self.add({"id": pair["id"], "pair": pair, "reason": reason}, "left out")

    def close(self, exit_code: int | None) -> None:
        """Note how the invocation ended; calling it again changes nothing."""
        if self._closed:
            return
        self._closed = True
        self._invocation["ended"] = _now()
        self._invocation["exit_code"] = exit_code
        if "key" in self._invocation and self._data:
            self._invocation["key"]["data"] = _text_digest(sorted(self._data))
        self._write_header()

    def _write_header(self) -> None:
        write_whole(self.path / "run.json", json.dumps(self._header, indent=1) + "\n")
        self.seal("run.json")

    def _mend_last_line(self) -> None:
        """A line that a kill cut off must not swallow the next one; a whole one is listed late."""
        content = self._lines.read_bytes()
        if content and not content.endswith(b"\n"):
            os.truncate(self._lines, content.rfind(b"\n") + 1)
        lines = self._lines.read_bytes().splitlines()
        listed = self._manifest.read()
        if lines and listed and ("cases.jsonl", len(lines)) not in listed:
            digest = hashlib.sha256(lines[-1]).hexdigest()
            self._manifest.seal("cases.jsonl", digest, len(lines))


def comparison_key(cases: Sequence[Case]) -> dict[str, Any]:
    """What two runs must share to be compared, whatever they judge: version, cells, data sets.

    ``data`` is known at the end only.
    """
    judged = ("id", "implementation", "label", "options")
    cells = [{k: v for k, v in case.to_dict().items() if k not in judged} for case in cases]
    told = sorted({json.dumps(cell, sort_keys=True) for cell in cells})
    return {"suite": VERSION, "scenarios": _text_digest(told), "data": None}


def _text_digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def read(path: Path, strict: bool = False) -> Run:
    """The run in folder ``path``; ``strict`` also refuses unreadable lines before the last one.

    :raises SelectionError: no run there, or its ``run.json`` cannot be read.
    """
    header = _read_header(path)
    if header is None:
        raise SelectionError(
            Problem("no run", "name a folder under results/ that holds run.json", str(path))
        )
    last: dict[tuple[str, str], dict[str, Any]] = {}
    for line in _lines(path / "cases.jsonl", strict):
        kill = line["kind"] == "kill"
        key = ("kill", str(line.get("name"))) if kill else ("", str(line.get("id")))
        if not _left_out(line) or _left_out(last.get(key, line)):
            last[key] = line
    run = Run(path, header)
    lists = {
        "case": run.cases,
        "mutant case": run.mutant_cases,
        "kill": run.kills,
        "left out": run.left_out,
        "bench": run.benches,
        "scaling": run.scalings,
    }
    for line in last.values():
        if line["kind"] in lists:
            lists[line["kind"]].append(line)
    return run


def _left_out(line: Mapping[str, Any]) -> bool:
    """A case or a fault that was not run, which takes nothing from what an earlier one found."""
    kind = line["kind"]
    return bool(kind == "left out" or (kind == "kill" and line.get("verdict") == "left out"))


def find_run(name: str | None, root: Path = Path("results")) -> Path:
    """The folder of run ``name`` (a folder or an id under ``root``); ``None``: the newest."""
    if name is None:
        runs = [path.parent for path in root.glob("*/run.json")]
        if not runs:
            raise SelectionError(Problem("no run yet", "run `make bench` first", str(root)))
        return max(runs, key=lambda path: (path / "run.json").stat().st_mtime)
    for path in (Path(name), root / name):
        if (path / "run.json").is_file():
            return path
    raise SelectionError(Problem("no such run", "name a folder or an id under results/", name))


def standard(value: Any) -> Any:
    """``value`` as JSON has it; numbers that are not finite become ``"nan"`` or ``"inf"``."""
    if isinstance(value, Mapping):
        return {str(key): standard(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [standard(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def lines(run: Path) -> Iterable[dict[str, Any]]:
    """Every line of ``cases.jsonl`` in the folder ``run``, in the order they were written."""
    return _lines(run / "cases.jsonl")


def _lines(path: Path, strict: bool = False) -> Iterable[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, 1):
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError):
                if strict and raw.endswith(b"\n"):
                    remedy = "`shardproof verify` tells what else was changed"
                    problem = Problem("is damaged", remedy, file=str(path), line=number)
                    raise SelectionError(problem) from None
                continue  # cut off by a kill
            if isinstance(line, dict) and isinstance(line.get("kind"), str):
                yield old_words.stored_line(line)


def _read_header(path: Path) -> dict[str, Any] | None:
    try:
        header = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        header = None
    if not _is_header(header):
        file = str(path / "run.json")
        raise SelectionError(
            Problem("is damaged", "choose another folder, or a whole copy of it", file=file)
        )
    if header.get("format") not in READABLE:
        raise other_format(header, path)
    for invocation in header["invocations"]:
        if "planned" in invocation:
            planned = map(str, invocation["planned"])
            invocation["planned"] = [old_words.renamed_name(name) for name in planned]
    return header


class OtherFormat(SelectionError):
    """A run whose evidence has a format that cannot be used here."""


def other_format(header: Mapping[str, Any], path: Path) -> OtherFormat:
    """Why the run in ``path`` cannot be used, and which suite can."""
    last = header["invocations"][-1]
    commit = f" (commit {last['commit']})" if last.get("commit") else ""
    what = f"evidence format {header.get('format')!r}; this version ({VERSION}) reads {FORMAT}"
    remedy = f"use the suite that wrote it: shardproof {last.get('suite', 'unknown')}{commit}"
    return OtherFormat(Problem(what, remedy, file=str(path / "run.json")))


def _is_header(told: Any) -> TypeGuard[dict[str, Any]]:
    """Whether ``told`` has at least one invocation, each with what every reader asks of it."""
    invocations = told.get("invocations") if isinstance(told, dict) else None
    sound = isinstance(invocations, list) and all(map(_is_invocation, invocations))
    return sound and bool(invocations)


def _is_invocation(told: Any) -> bool:
    return (
        isinstance(told, dict)
        and isinstance(told.get("command"), list)
        and isinstance(told.get("packages"), dict)
        and isinstance(told.get("fingerprint"), dict)
        and isinstance(told.get("python"), str)
        and all(isinstance(told.get(name, []), list) for name in _PLANNED)
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# --------------------------------------------------------------------------------- the machine


def fingerprint() -> dict[str, Any]:
    """The allow-listed facts about this machine."""
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_bytes": _memory_bytes(),
        "system": platform.system(),
        "machine": platform.machine(),
        "gpus": gpus(),
        "kernels": _kernels(),
    }


def _kernels() -> dict[str, str]:
    """What torch computes with on this CPU, and the variables that were set; ranks inherit both."""
    import torch  # not above: who only reads runs does without

    told = {name: os.environ[name] for name in KERNEL_VARIABLES if name in os.environ}
    return {"torch": torch.backends.cpu.get_cpu_capability(), **told}


def _versions() -> dict[str, Any]:
    packages: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "suite": VERSION,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": packages,
    }


def _commit() -> str | None:
    """The suite's commit, with ``+changes`` if files differ from it; ``None`` outside of git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return done.stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+changes" if changed else "")


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        return platform.processor()
    return platform.processor()


def gpus() -> list[dict[str, str]]:
    """Name, memory and driver of every GPU, as the driver's own tool tells; empty without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    names = ("name", "memory.total", "driver_version")
    command = [tool, f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]
    keys = ("name", "memory", "driver")
    return [dict(zip(keys, row, strict=True)) for row in rows if len(row) == len(keys)]


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


# --------------------------------------------------------------------------------- durations


class Durations:
    """Seconds that each case took in its last runs; plans fit cases into a budget with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, list[float]] = {}
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            stored = {}  # estimates are a convenience: without them the defaults do
        if isinstance(stored, dict):
            self._known = {
                key: [float(v) for v in values][-_KEPT_DURATIONS:]
                for key, values in stored.items()
                if isinstance(values, list) and all(isinstance(v, (int, float)) for v in values)
            }

    def estimate(self, identifier: str) -> float | None:
        """Median of the last durations of case ``identifier``, or ``None``."""
        values = self._known.get(identifier)
        return statistics.median(values) if values else None

    def note(self, identifier: str, seconds: float) -> None:
        """Remember one duration."""
        values = self._known.setdefault(identifier, [])
        values.append(round(seconds, 4))
        del values[:-_KEPT_DURATIONS]

    def save(self) -> None:
        """Write the file, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(self._known, indent=0, sort_keys=True) + "\n")
