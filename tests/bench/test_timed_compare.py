"""Runs with times beside each other: ratios are compared, seconds are not; baselines keep them."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

import pytest
import synthetic as made
from compared import Run, both, runs_in, told_by

from shardproof.compare import baseline, formats, hardware, tables
from shardproof.compare.compare import compare
from shardproof.errors import SelectionError


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return runs_in(tmp_path)


def test_a_run_beside_itself_has_not_changed(run: Run) -> None:
    lines = [*made.results(9), made.bench("zero1", 0.2, 0.4), made.scaling("ddp"), made.kill("x")]
    snapshot = run("one", lines)
    found = compare(snapshot, snapshot)
    assert found.unchanged
    assert not found.changes and not found.apart and not found.notes
    assert {time.verdict for time in found.times} == {"same"}
    assert "nothing changed" in tables.sentence(found)
    assert tables.report([found], only_changed=True).tables[1:] == []


def test_times_are_compared_as_ratios_only(run: Run) -> None:
    """A machine that is ten times slower is equal; a ratio that moved is not."""
    old = [made.bench("zero1", 0.0, 0.02), made.bench("zero2", 0.0, 0.02)]
    slow = [made.bench("zero1", 0.0, 0.02), made.bench("zero2", 0.3, 0.02)]
    for line in slow:
        line["median_seconds"] = {"a": 10.0, "b": 10.0}
    machine = made.MACHINE | {"cpu": "Slow"}
    found = both(run, old, slow, machine=machine)
    assert [(t.id.split("::")[1], t.verdict) for t in found.times] == [
        ("zero1", "same"),
        ("zero2", "slower"),
    ]
    assert not found.changes
    text = formats.markdown(tables.report([found]))
    assert "10.0" not in text and "seconds of two runs" in text


def test_a_lower_efficiency_is_slower(run: Run) -> None:
    old, new = [made.scaling("ddp", -0.05)], [made.scaling("ddp", -0.4)]
    new[0]["wrapping"] = old[0]["wrapping"]
    told = {t.ratio: t.verdict for t in both(run, old, new).times}
    assert told == {
        "efficiency (plain)": "slower",
        "efficiency (wrapped)": "slower",
        "time (wrapped / plain)": "same",
    }
    told = {t.ratio: t.verdict for t in both(run, new, old).times}
    assert told["efficiency (plain)"] == "faster"


def test_a_comparison_that_broke_has_no_ratio(run: Run) -> None:
    old, new = [made.bench("zero1")], [made.bench("zero1", verdict="crash", reason="gone")]
    found = both(run, old, new)
    assert found.times == []
    assert told_by(found) == ["verdict worse"]


def test_ledger_bytes_of_a_comparison_are_exact_and_resident_ones_are_not(run: Run) -> None:
    old = [made.bench("zero1")]
    more = {"kind": "ledger", "a": 1001, "b": 2000, "ratio": 0.5}
    assert told_by(both(run, old, [made.bench("zero1", memory=more)])) == [
        "memory.ledger_bytes_a worse"
    ]
    resident = {"kind": "resident", "a": 7, "b": 9, "ratio": 0.5}
    beside = [made.bench("zero1", memory=resident)]
    other = [made.bench("zero1", memory=resident | {"a": 8})]
    assert not both(run, beside, other).changes


def test_one_lucky_ratio_of_many_is_no_difference(run: Run) -> None:
    """p of 0.02 alone is a difference; the smallest of forty is not."""
    names = [f"pair{number}" for number in range(40)]
    old = [made.bench(name, 0.0, 0.1) for name in names]
    new = [made.bench(name, 0.0, 0.1) for name in names]
    shift = 2.4 * math.sqrt(2 * 0.1**2 / 24)
    new[7]["log"]["mean"] = shift
    assert {t.verdict for t in both(run, old[7:8], new[7:8]).times} <= {"slower"}
    assert "slower" not in {t.verdict for t in both(run, old, new).times}


def test_every_form_tells_the_same(run: Run) -> None:
    old = [*made.results(6), made.bench("zero1", 0.0, 0.01)]
    new = made.changed(old, 2, made.figure("traffic", "bytes_sent", "77777"))
    new[-1] = made.bench("zero1", 0.3, 0.01)
    found = both(run, old, new)
    report = tables.report([found], only_changed=True)
    written = io.StringIO()
    from rich.console import Console

    formats.terminal(report, Console(file=written, width=300))
    data = json.loads(formats.json_document(found.before, [found], True))
    for told in (written.getvalue(), formats.markdown(report), formats.html(report)):
        assert "77,777" in told and "slower" in told
    [only] = data["comparisons"][0]["compared"]
    assert only["changes"][0]["after"] == "77777"
    assert data["comparisons"][0]["times"][0]["verdict"] == "slower"


def test_no_heading_is_empty(run: Run) -> None:
    old = [*made.results(6), made.bench("zero1", 0.0, 0.01), made.scaling("ddp")]
    new = made.changed(old, 2, made.figure("traffic", "bytes_sent", "77777"))[1:]
    new += [made.result(made.case(9), 9)]
    found = both(run, old, new)
    for report in (tables.report([found]), hardware.report(found.before, [found])):
        assert len(report.tables) > 3
        for table in report.tables:
            assert table.title and all(table.headings)
            assert all(len(row) == len(table.headings) for row in table.rows)
        assert not re.search(r"<(th|h1|h2)[^>]*>\s*</", formats.html(report))


def test_across_hardware_each_machine_has_a_column_of_its_own_ratios(run: Run) -> None:
    lines = [*made.results(8), made.bench("zero1", 0.0, 0.02), made.scaling("ddp", -0.05)]
    other = [*made.results(8), made.bench("zero1", 0.4, 0.02), made.scaling("ddp", -0.05)]
    gpu = made.MACHINE | {"cpu": "Fast", "gpus": [{"name": "H100"}]}
    one = run("one", lines)
    two, three = run("two", other, machine=gpu), run("three", lines, torch="2.11.0+cu128")
    report = hardware.report(one, [compare(one, two), compare(one, three)])
    text = formats.markdown(report)
    told = {table.title: table for table in report.tables}
    assert told["Machines"].rows[1][0] == "1 x H100, Fast, 2 cores"
    assert "all" in told["Machines"].rows[1][-1] and "equal" in told["Machines"].rows[1][-1]
    assert told["Machines"].rows[2][-1] == "not comparable: torch 2.13.0+cpu, now 2.11.0+cu128"
    [row] = told["Time against DDP"].rows
    assert row[-2].endswith("slower") and row[-1].endswith("(not comparable)")
    assert len(told["Scaling"].rows) == 3
    assert "exposed share" in text


# --------------------------------------------------------------------------------------- baselines


def test_a_baseline_says_all_that_its_run_says(tmp_path: Path) -> None:
    lines = [*made.results(60), made.bench("zero1", 0.1), made.scaling("ddp"), made.kill("x")]
    told = made.snapshot(tmp_path / "run", lines)
    baseline.save(told, tmp_path / "b.json")
    again = baseline.load(str(tmp_path / "b.json"))
    assert again.cases == told.cases and again.timed == told.timed and again.kills == told.kills
    assert again.versions == told.versions and again.hardware == told.hardware
    found = compare(told, again)
    assert found.unchanged and len(found.pairs) == 62
    size = (tmp_path / "b.json").stat().st_size
    assert size < (tmp_path / "run" / "cases.jsonl").stat().st_size / 5


def test_runs_of_one_machine_are_joined_and_others_are_not(tmp_path: Path) -> None:
    lines = made.results(4)
    one = made.snapshot(tmp_path / "one", lines[:3])
    two = made.snapshot(tmp_path / "two", [*lines[2:], made.bench("zero1")])
    found = baseline.joined([one, two])
    assert len(found.cases) == 4 and len(found.timed) == 1
    with pytest.raises(SelectionError, match="different machines"):
        larger = made.MACHINE | {"cores": 16}
        baseline.joined([one, made.snapshot(tmp_path / "three", lines, machine=larger)])
    with pytest.raises(SelectionError, match="different versions"):
        baseline.joined([one, made.snapshot(tmp_path / "four", lines, torch="2.14.0")])


@pytest.mark.parametrize(
    ("sound", "damaged"),
    [
        ('"versions": [{', '"versions": [], "were": [{'),
        ('"time":[0.02,', '"time":[1e999,'),
        ('"time":[0.02,', '"time":[NaN,'),
        ('"time":[0.02,0.05,24]', '"time":[0.02,0.05,0]'),
        ('"figures": [', '"deep": ' + "[" * 100_000 + "]" * 100_000 + ', "figures": ['),
    ],
)
def test_a_baseline_of_impossible_values_is_refused(
    tmp_path: Path, sound: str, damaged: str
) -> None:
    text = baseline.text(made.snapshot(tmp_path / "one", [*made.results(1), made.bench("zero1")]))
    assert sound in text
    (tmp_path / "b.json").write_text(text.replace(sound, damaged))
    with pytest.raises(SelectionError, match="is damaged"):
        baseline.load(str(tmp_path / "b.json"))
