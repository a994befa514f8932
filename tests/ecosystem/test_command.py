"""``deploy/ecosystem.py``: its overlay, its table and its errors; nothing is installed here."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import synthetic as made

from shardproof.scenarios.load import find
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed
from shardproof.verdicts import GREEN

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with an overlay of this test's own."""
    spec = importlib.util.spec_from_file_location("ecosystem", ROOT / "deploy/ecosystem.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "OVERLAY", tmp_path)
    module.site_packages().mkdir(parents=True)
    return module


def test_every_extra_is_pinned_and_has_a_scenario_of_its_name(command: ModuleType) -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    for extra in command.EXTRAS:
        assert re.split(r"[<>=]", command.requirement(extra))[0] in pins
    scenarios = {path.stem for path in (ROOT / "scenarios/ecosystem").glob("*.yaml")}
    assert scenarios == {*command.EXTRAS, "compiled", "picotron"}
    assert command.versions(None).keys() == {*command.EXTRAS, "compiled"}


def test_picotron_needs_a_checkout(
    command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "PICOTRON=path" in command.link_picotron(None)
    with pytest.raises(SystemExit) as ended:
        command.link_picotron(str(tmp_path))
    assert ended.value.code == 2
    assert "no checkout of picotron" in capsys.readouterr().err
    (tmp_path / "picotron/pipeline_parallel").mkdir(parents=True)
    assert command.link_picotron(str(tmp_path)) == ""
    link = command.site_packages() / "picotron.pth"
    assert link.read_text() == f"{tmp_path}\n"
    command.link_picotron(None)
    assert not link.exists()


def test_what_is_not_judged_is_a_row_of_the_table(command: ModuleType) -> None:
    rows = command.not_judged()
    assert len(rows) == len(command.NOT_JUDGED) and all("| skip: " in row for row in rows)
    assert {row.count(" | ") for row in rows} == {4}, "columns of the table"


def has_ended(pid: int) -> bool:
    """Gone, or dead and not collected yet."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_what_takes_too_long_ends_with_all_that_it_started(
    command: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "made-of").write_text("anything")
    pids = tmp_path / "pids"
    script = f"sleep 600 & echo $! > {pids}; wait"
    with pytest.raises(subprocess.TimeoutExpired):
        command.run_or_kill(["sh", "-c", script], 1.0)
    child = int(pids.read_text())
    deadline = time.monotonic() + 30
    while not has_ended(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert has_ended(child)
    assert not (tmp_path / "made-of").exists(), "half an overlay is made anew"
    assert command.run_or_kill(["sh", "-c", "echo ERROR: no such >&2; exit 3"], 30.0) == (
        3,
        "ERROR: no such\n",
    )


def line(system: str, verdict: str, xfail: str | None = None, says: tuple[str, ...] = ()) -> str:
    case: dict[str, Any] = {"implementation": system, "label": "", "scenario": "accelerate"}
    case["mesh"] = {"shard": 2, "tensor": 2 if verdict == "fail" else 1}
    case |= {"xfail": xfail, "xfail_says": says}
    return json.dumps({"case": case, "verdict": verdict})


def test_the_table_tells_what_was_expected_and_what_came(
    command: ModuleType, tmp_path: Path
) -> None:
    lines = [line("one", "pass"), line("one", "fail"), line("two", "xfail", "why", ("a: b", "c"))]
    (tmp_path / "cases.jsonl").write_text("\n".join(lines))
    assert command.table(tmp_path, {"accelerate": "1.0"})[2:] == [
        "| one | 1.0 | 2, 4 | pass | 1 fail, 1 pass |",
        "| two | 1.0 | 2 | fail: a: b ... c | 1 fail, as expected |",
    ]


#: In place of the overlay's interpreter: as ``shardproof run``, all that it judges passes; as
#: pytest, it notes what it is asked and fails where a file says so.
RUNS = """\
#!/bin/sh
if [ "$2" = pytest ]; then echo "$PICOTRON $*" >> {pytest}; test ! -e {false}; exit; fi
while [ "$1" != --results ]; do shift; done
mkdir -p "$2" && cp {cases} "$2/cases.jsonl"
exit {code}
"""


@pytest.fixture
def ends(
    command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int, dict[str, str]], int]:
    """Runs the command beside what could not be installed; from a folder that is not ROOT."""
    (tmp_path / "one.jsonl").write_text(line("one", "pass"))
    user = tmp_path / "user"
    user.mkdir()
    monkeypatch.chdir(user)
    monkeypatch.setattr(command, "make_overlay", lambda: None)
    monkeypatch.setattr(command, "PYTHON", tmp_path / "python")

    def main(code: int, lacking: dict[str, str]) -> int:
        monkeypatch.setattr(command, "install", lambda extra, until: lacking.get(extra, ""))
        asked, false = tmp_path / "pytest", tmp_path / "false"
        script = RUNS.format(cases=tmp_path / "one.jsonl", code=code, pytest=asked, false=false)
        (tmp_path / "python").write_text(script)
        (tmp_path / "python").chmod(0o755)
        return int(command.main(["--results", "mine/run"]))

    return main


def test_what_could_not_be_installed_is_told_last(
    command: ModuleType,
    ends: Callable[[int, dict[str, str]], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A relative --results is the user's; nothing installed is nothing judged."""
    none = dict.fromkeys(command.EXTRAS, "ERROR: no network")
    most = {extra: why for extra, why in none.items() if extra != "torchft"}
    for code, lacking, wanted in [(0, {}, 0), (0, most, 0), (0, none, 3), (1, none, 1)]:
        assert ends(code, lacking) == wanted
        told = capsys.readouterr().out.splitlines()
        assert (Path("mine/run") / "cases.jsonl").is_file()
        assert "| one | - | 2 | pass | 1 pass |" in told
        count = len(lacking) + 1
        verb = "system could not be installed and was" if count == 1 else "systems could not"
        assert told[-1].startswith(f"{count} {verb}"), told[-1]
        assert all(f"{extra} (ERROR: no network)" in told[-1] for extra in lacking)
        assert "picotron (no checkout given: make ecosystem PICOTRON=path)" in told[-1]


def test_findings_about_these_systems_are_tried_too(
    command: ModuleType, ends: Callable[[int, dict[str, str]], int], tmp_path: Path
) -> None:
    assert ends(0, {}) == 0
    asked = (tmp_path / "pytest").read_text()
    assert asked.startswith(" -m pytest tests/docs/test_findings.py -k ")
    systems = {"accelerate", "fabric", "fairscale", "picotron"}
    scripts = {path.stem.split("_")[0] for path in (ROOT / "docs/findings").glob("*.py")}
    assert systems <= scripts and all(name in asked for name in systems)
    (tmp_path / "false").touch()
    for code, wanted in [(0, 1), (3, 1), (1, 1), (2, 2)]:
        assert ends(code, {}) == wanted, "a finding that is no longer true is red"


def test_the_version_of_a_checkout_under_home(
    command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    git = ["git", "-C", str(tmp_path / "checkout")]
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    (tmp_path / "checkout").mkdir()
    for words in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    assert command.versions("~/checkout")["picotron"] == head.stdout.strip() != ""


def test_the_table_goes_between_markers_of_a_file(
    command: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """That is looked at before anything is installed or run."""
    page = tmp_path / "page.md"
    for text, says in ((None, "No such file"), ("nothing\n", "no lines <!-- ecosystem:begin -->")):
        if text is not None:
            page.write_text(text)
        with pytest.raises(SystemExit) as ended:
            command.main(["--into", str(page)])
        assert ended.value.code == 2 and says in capsys.readouterr().err
    page.write_text(f"before\n{command.BEGIN}\nold\n{command.END}\nafter\n")
    made.write(tmp_path / "run", made.results(1))
    rows = command.table(tmp_path / "run", {})
    command.put(page, tmp_path / "run", rows, "0 systems were skipped")
    assert page.read_text().startswith(f"before\n{command.BEGIN}\n| system | version |")
    assert "\n0 systems were skipped.\n" in page.read_text() and "old" not in page.read_text()
    assert page.read_text().endswith(f"{command.END}\nafter\n")


def test_the_committed_table_has_every_system_and_its_expectation(command: ModuleType) -> None:
    """Which a run has given: of each scenario all systems, with the verdict that is known of it."""
    page = (ROOT / "results/README.md").read_text()
    part = page.partition(command.BEGIN)[2].partition(command.END)[0]
    rows = [row.strip("| ").split(" | ") for row in part.splitlines() if row.startswith("| ")][2:]
    cases = [c for f in find([str(ROOT / "scenarios/ecosystem")]) for c in expand(f, installed())]
    expected = Counter(
        (c.system, f"fail: {' ... '.join(c.xfail_says)}" if c.xfail else "pass") for c in cases
    )
    told = {(row[0], row[3]): row[4] for row in rows if row[0] not in command.NOT_JUDGED}
    assert len(rows) == len(told) + len(command.NOT_JUDGED)
    assert told.keys() == expected.keys(), "make it again: its command stands above the table"
    for key, verdicts in told.items():
        known = ("fail, as expected",) if key[1] != "pass" else GREEN
        counts = re.findall(r"(\d+) (fail, as expected|[^,]+)", verdicts)
        assert sum(int(count) for count, _ in counts) == expected[key], (key, verdicts)
        assert all(verdict in known for _, verdict in counts), (key, verdicts)
