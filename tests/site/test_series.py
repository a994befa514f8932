"""A series keeps runs and names the commit of each change; nothing of it is ever lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import synthetic as made
from commands import here

from shardproof.compare import baseline
from shardproof.errors import SelectionError
from shardproof.site import series

Change = Callable[[made.Line], None]


def run(folder: Path, commit: str, *changes: tuple[int, Change], **more: object) -> Path:
    """A run at ``commit`` (a letter) in which each change was done to the result of its number."""
    lines = [*made.results(16), made.kill("ddp_fault"), made.bench("ddp")]
    for number, change in changes:
        lines = made.changed(lines, number, change)
    path = made.write(folder / f"run-{commit}", lines, **more)  # type: ignore[arg-type]
    header = json.loads((path / "run.json").read_text())
    header["invocations"][0]["commit"] = commit * 40
    (path / "run.json").write_text(json.dumps(header))
    made.seal(path)
    return path


def sent(value: str) -> Change:
    return made.figure("traffic", "bytes_sent", value)


def breaks(line: made.Line) -> None:
    line["verdict"], line["reason"] = "fail", "equivalence: differs"


def survives(line: made.Line) -> None:
    line["killed"], line["failing"] = False, []


def moves(paths: Sequence[Path]) -> list[tuple[str, str, str, str, str]]:
    runs = [baseline.load(str(path)) for path in paths]
    found = series.moves(runs)
    return [
        (one.id.split("::")[0], one.figure, one.before, one.after, one.commits) for one in found
    ]


def test_the_commit_of_a_changed_figure_is_named(tmp_path: Path) -> None:
    runs = [run(tmp_path, "a"), run(tmp_path, "b"), run(tmp_path, "c", (3, sent("9000")))]
    assert moves(runs) == [
        ("zero3-gpt0", "traffic.bytes_sent", "4,000", "9,000", f"{'c' * 12} (last at {'b' * 12})")
    ]


def test_verdicts_and_faults_change_at_a_commit_too(tmp_path: Path) -> None:
    runs = [run(tmp_path, "a"), run(tmp_path, "b", (2, breaks), (16, survives))]
    assert moves(runs) == [
        ("zero2-gpt0", "verdict", "pass", "fail", f"{'b' * 12} (last at {'a' * 12})"),
        ("mutants/ddp_fault", "fault", "killed", "survives", f"{'b' * 12} (last at {'a' * 12})"),
    ]


def test_a_case_that_a_run_lacks_is_compared_with_the_run_before(tmp_path: Path) -> None:
    """A budget left it out: its last results are those of two runs ago, at that commit."""
    first, last = run(tmp_path, "a"), run(tmp_path, "c", (3, sent("9000")))
    lines = made.results(16)
    between = made.write(tmp_path / "run-b", lines[:3] + lines[4:])
    assert moves([first, between, last])[-1][-1] == f"{'c' * 12} (last at {'a' * 12})"


def test_figures_that_changed_while_a_case_failed_are_found(tmp_path: Path) -> None:
    runs = [run(tmp_path, "a"), run(tmp_path, "b", (3, breaks))]
    runs.append(run(tmp_path, "c", (3, sent("9000"))))
    figures = [(figure, before, after) for _, figure, before, after, _ in moves(runs)]
    assert figures == [
        ("verdict", "pass", "fail"),
        ("verdict", "fail", "pass"),
        ("traffic.bytes_sent", "4,000", "9,000"),
    ]


def test_another_machine_is_another_series(tmp_path: Path) -> None:
    other = made.MACHINE | {"cpu": "Synthetic 100"}
    runs = [run(tmp_path, "a"), run(tmp_path, "b", (3, sent("9000")), machine=other)]
    assert moves(runs) == []
    runs.append(run(tmp_path, "c", (3, sent("8000"))))
    assert [move[2:4] for move in moves(runs)] == [("4,000", "8,000")]


def test_another_torch_tells_of_verdicts_only(tmp_path: Path) -> None:
    changes = (2, breaks), (3, sent("9000"))
    runs = [run(tmp_path, "a"), run(tmp_path, "b", *changes, torch="2.14.0+cpu")]
    [[name, figure, before, after, _]] = moves(runs)
    assert (name, figure, before) == ("zero2-gpt0", "verdict", "pass")
    assert after == "fail (torch 2.13.0+cpu, now 2.14.0+cpu)"


# --------------------------------------------------------------------------------- the command


def test_runs_are_added_and_shown(tmp_path: Path) -> None:
    first, second = run(tmp_path, "a"), run(tmp_path, "b", (3, sent("9000")))
    folder = tmp_path / "series"
    added = here("history", "add", str(first), "--series", str(folder))
    assert added.returncode == 0, added.stderr
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert here("history", "add", str(second), "--series", str(folder)).returncode == 0
    assert sorted(p.name for p in folder.iterdir()) == ["0001-run-a.json", "0002-run-b.json"]
    assert before.items() <= {p.name: p.read_bytes() for p in folder.iterdir()}.items()
    shown = here("history", "show", "--series", str(folder))
    assert shown.returncode == 0 and "traffic.bytes_sent" in shown.stdout
    assert shown.stdout.splitlines()[-1] == f"2 runs: 1 change, at {'b' * 12}"
    told = here("history", "show", "--series", str(folder), "--format", "markdown").stdout
    assert f"{'b' * 12} (last at {'a' * 12})" in told
    chosen = here("history", "show", "--series", str(folder), "-k", "zero3")
    assert chosen.returncode == 0 and "9,000" in chosen.stdout
    assert here("history", "show", "--series", str(folder), "-k", "pipeline").returncode == 2


def test_what_is_in_a_series_is_read_by_other_commands(tmp_path: Path) -> None:
    folder = tmp_path / "series"
    series.add(folder, [str(run(tmp_path, "a")), str(run(tmp_path, "b"))])
    paths = list(map(str, series.files(folder)))
    assert here("compare", *paths).returncode == 0


def test_a_run_is_not_added_twice(tmp_path: Path) -> None:
    path, folder = str(run(tmp_path, "a")), tmp_path / "series"
    series.add(folder, [path])
    again = here("history", "add", path, "--series", str(folder))
    assert again.returncode == 2 and "the run is in the series" in again.stderr
    assert len(series.files(folder)) == 1


def test_one_bad_run_keeps_all_from_being_added(tmp_path: Path) -> None:
    good, folder = str(run(tmp_path, "a")), tmp_path / "series"
    edited = run(tmp_path, "b")
    lines = (edited / "cases.jsonl").read_text().replace('"pass"', '"fail"', 1)
    (edited / "cases.jsonl").write_text(lines)
    for bad in (str(tmp_path / "nothing"), str(edited)):
        done = here("history", "add", good, bad, "--series", str(folder))
        assert done.returncode == 2, done.stdout
        assert not folder.exists()


def test_a_folder_with_other_files_is_no_series(tmp_path: Path) -> None:
    folder = tmp_path / "series"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    done = here("history", "add", str(run(tmp_path, "a")), "--series", str(folder))
    assert done.returncode == 2 and "notes.txt" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    with pytest.raises(SelectionError, match="no series"):
        series.read(tmp_path / "nothing")
    (folder / "notes.txt").unlink()
    with pytest.raises(SelectionError, match="has no runs"):
        series.read(folder)


def test_a_damaged_file_of_a_series_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "series"
    [path] = series.add(folder, [str(run(tmp_path, "a"))])
    path.write_text(path.read_text()[:-40])
    done = here("history", "show", "--series", str(folder))
    assert done.returncode == 2 and "0001-run-a.json" in done.stderr
