"""Damaged run folders: each command tells file and remedy, or tolerates what a kill leaves behind.

No command may end in a traceback: the fixture ``command`` lets through exits only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardproof.case import Case
from shardproof.cases.kills import pair
from shardproof.commands import supervision
from shardproof.commands.execution import Execution
from shardproof.commands.verify import verify
from shardproof.compare import baseline
from shardproof.errors import SelectionError
from shardproof.registry import load_mutant
from shardproof.runs.durations import Durations
from shardproof.runs.integrity import damage_is_bad_input
from shardproof.runs.records import Manifest
from shardproof.runs.run_folder import RunFolder
from shardproof.scenarios.budget import fit_cases

CASE = "ddp-gpt::reference/ddp+small_buckets::in_memory::replicate2::sgd::noclip::fp64::quick"


def _cases() -> list[Case]:
    """One that passes, then one that fails."""
    made = pair(load_mutant("ddp_never_reduces"))
    return [made.parent, made.case]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of both cases, the failing one last."""
    path = tmp_path_factory.mktemp("results") / "run"
    durations = Durations(path.parent / "durations.json")
    with RunFolder(path, ["test"]) as folder:
        schedule = fit_cases(_cases(), durations, 1, None)
        assert Execution(folder, schedule, 1, durations).run() == 1
    assert json.loads((path / "cases.jsonl").read_text().splitlines()[-1])["verdict"] == "fail"
    return path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.fixture
def base(made: Path, tmp_path: Path) -> Path:
    path = tmp_path / "base.json"
    baseline.save(baseline.load(str(made)), path)
    return path


# ----------------------------------------------------------------------------------- the damage


def _header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        header = json.loads((run / "run.json").read_text())
        change(header)
        (run / "run.json").write_text(json.dumps(header))

    return damage


def _first_line(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        first, rest = (run / "cases.jsonl").read_text().split("\n", 1)
        line = json.loads(first)
        change(line)
        (run / "cases.jsonl").write_text(json.dumps(line) + "\n" + rest)

    return damage


def _last_line(key: str, value: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        *rest, last = (run / "cases.jsonl").read_text().splitlines()
        lines = [*rest, json.dumps(json.loads(last) | {key: value})]
        (run / "cases.jsonl").write_text("\n".join(lines) + "\n")

    return damage


def _manifest(run: Path) -> None:
    lines = (run / Manifest.NAME).read_bytes().splitlines(keepends=True)
    lines[1] = b'{"file": ["run.json"], "line": null, "sha256": 3, "before": 4}\n'
    (run / Manifest.NAME).write_bytes(b"".join(lines))


def _half_a_line(run: Path) -> None:
    content = (run / "cases.jsonl").read_bytes()
    (run / "cases.jsonl").write_bytes(content[:-100])


def _empty(run: Path) -> None:
    shutil.rmtree(run)
    run.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "manifest": (_manifest, "manifest.jsonl"),
    "no json": (lambda run: (run / "run.json").write_text('{"format": 1, ') and None, "run.json"),
    "no invocations": (_header(lambda told: told.pop("invocations")), "run.json"),
    "empty invocations": (_header(lambda told: told["invocations"].clear()), "run.json"),
    "no packages": (_header(lambda told: told["invocations"][0].pop("packages")), "run.json"),
    "half a line": (_half_a_line, "cases.jsonl"),
    "no verdict": (_first_line(lambda line: line.pop("verdict")), "cases.jsonl"),
    "other checks": (_first_line(lambda line: line.update(checks=[3])), "cases.jsonl"),
    "edited verdict": (_last_line("verdict", "pass"), "cases.jsonl"),
    "empty folder": (_empty, "run"),
}
COMMANDS: dict[str, list[str]] = {
    "report": ["report", "RUN"],
    "markdown": ["report", "RUN", "--format", "markdown"],
    "html": ["report", "RUN", "--format", "html"],
    "badges": ["badges", "RUN", "--output", "OUT/badges"],
    "bundle": ["bundle", "RUN", "--output", "OUT/run.tar.gz"],
    "verify": ["verify", "RUN"],
    "compare": ["compare", "BASE", "RUN"],
    "gate": ["gate", "RUN", "--against", "BASE"],
    "against": ["gate", "MADE", "--against", "RUN"],
    "resume": ["run", "--resume", "--results", "RUN", "-j", "1"],
    "rerun": ["run", "--rerun-failed", "--results", "RUN", "-j", "1"],
}
#: Exit codes by damage, in the order of COMMANDS; 1 is for the failing case, or for the damage.
#: ``None``: a test of its own runs it.
CODES: dict[str, tuple[int | None, ...]] = {
    "manifest": (2, 2, 2, 2, 2, 1, 2, 1, 1, 2, 2),
    "no json": (2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2),
    "no invocations": (2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2),
    "empty invocations": (2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2),
    "no packages": (2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2),
    "half a line": (0, 0, 0, 2, 2, 1, 0, 1, 1, None, 2),
    "no verdict": (2, 2, 2, 2, 2, 1, 2, 2, 2, 2, 2),
    "other checks": (2, 2, 2, 2, 2, 1, 2, 2, 2, 2, 2),
    "edited verdict": (2, 2, 2, 2, 2, 1, 2, 1, 1, 2, 2),
    "empty folder": (2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2),
}


@pytest.mark.parametrize(
    ("name", "damage", "expected"),
    [
        (name, damage, code)
        for damage, codes in CODES.items()
        for name, code in zip(COMMANDS, codes, strict=True)
        if code is not None
    ],
)
def test_a_damaged_run_is_bad_input_or_is_tolerated(
    made: Path,
    run: Path,
    base: Path,
    command: Any,
    tmp_path: Path,
    damage: str,
    name: str,
    expected: int,
) -> None:
    harm, file = DAMAGE[damage]
    harm(run)
    before = (run / "cases.jsonl").read_bytes() if (run / "cases.jsonl").exists() else None
    places = {"RUN": str(run), "MADE": str(made), "BASE": str(base)}
    words = [places.get(word, word.replace("OUT", str(tmp_path))) for word in COMMANDS[name]]
    code, out, err = command(*words)
    assert code == expected, out + err
    if code == 2:
        [*_, told] = err.splitlines()
        known = (file, "no case failed here") if name == "rerun" else (file,)
        assert any(word in told for word in known) and " - " in told
        assert not (tmp_path / "run.tar.gz").exists()
    if before is not None and damage != "half a line":
        assert (run / "cases.jsonl").read_bytes().startswith(before), "nothing written is lost"


def test_a_new_invocation_refuses_a_damaged_manifest_before_it_writes(
    run: Path, command: Any, tmp_path: Path
) -> None:
    """`run`, `mutants` and `bench` open folders in one place."""
    _manifest(run)
    _half_a_line(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for words in (["run", CASE], ["mutants", "--impl", "ddp_never_reduces"]):
        code, _, err = command(*words, "--results", str(run))
        assert code == 2
        assert f"{run / Manifest.NAME}: line 2 is damaged - choose another --results folder" in err
    with pytest.raises(SelectionError, match=r"manifest\.jsonl: line 2 is damaged"):
        supervision.open_folder(run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_what_a_kill_cut_off_is_run_again(run: Path, command: Any) -> None:
    _half_a_line(run)
    assert verify(run).problems
    assert command("run", "--resume", "--results", str(run), "-j", "1")[0] == 1
    assert verify(run).problems == []


def test_a_fault_of_the_suite_is_not_blamed_on_a_sound_run(run: Path) -> None:
    with pytest.raises(KeyError), damage_is_bad_input(run):
        raise KeyError("a bug")
    _half_a_line(run)
    with pytest.raises(SelectionError, match="the last line was cut off"), damage_is_bad_input(run):
        raise KeyError("a part that is missing")
