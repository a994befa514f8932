"""What differs between runs: nothing that changed is missed, nothing that is equal is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import synthetic as made
from compared import Run, both, runs_in, told_by
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.compare import baseline, exact_figures, formats, snapshot, tables
from shardproof.compare.compare import compare
from shardproof.compare.snapshot import strategy_of
from shardproof.runs import run_folder

ROOT = Path(__file__).parents[2]
BASELINES = ROOT / "results" / "baselines"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return runs_in(tmp_path)


# ----------------------------------------------------------------------------------- exact figures


#: Everything that is exact in a result: check, key, another value.
EXACT = [
    ("traffic", "bytes_sent", "1001", "worse"),
    ("traffic", "bytes_sent", "999", "better"),
    ("traffic", "bytes_sent", "2999/3", "better"),
    ("traffic", "calls_per_step", 5, "worse"),
    ("traffic", "setup_bytes", "0", "better"),
    ("traffic", "control_bytes", "593", "worse"),
    ("traffic", "formula", "naive.payload_bytes", "changed"),
    ("traffic", "bytes_expected", "1", "changed"),
    ("traffic", "flows", [], "changed"),
    ("memory", "bytes_held", 69725, "worse"),
    ("memory", "accounting", "A16", "changed"),
    ("memory", "resident", {}, "changed"),
    ("equivalence", "compared", 1338, "worse"),
    ("equivalence", "not_tested", ["more"], "changed"),
    ("overlap", "hidden", 9, "worse"),
    ("overlap", "hidden", 11, "better"),
    ("replicas", "different", 1, "worse"),
]


@pytest.mark.parametrize(("check", "key", "value", "word"), EXACT)
def test_a_changed_figure_is_told_with_its_direction(
    run: Run, check: str, key: str, value: Any, word: str
) -> None:
    old = made.results(3)
    found = both(run, old, made.changed(old, 0, made.figure(check, key, value)))
    assert told_by(found) == [f"{check}.{key} {word}"]
    assert found.changes[0].id == old[0]["id"]
    assert not found.unchanged


@pytest.mark.parametrize(("check", "key"), [("traffic", "source"), ("memory", "source")])
def test_prose_is_no_figure(run: Run, check: str, key: str) -> None:
    old = made.results(1)
    assert both(run, old, made.changed(old, 0, made.figure(check, key, "else"))).unchanged


@settings(max_examples=60)
@given(data=st.data())
def test_a_changed_byte_is_always_told(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Whichever number of whichever rank, phase and class: it shows, with its path."""
    lines = made.results(4)
    number = data.draw(st.integers(0, 3))
    memory = next(c for c in lines[number]["checks"] if c["check"] == "memory")
    peaks = memory["figures"]["peaks"]
    rank = data.draw(st.sampled_from(sorted(peaks)))
    phase = data.draw(st.sampled_from(sorted(peaks[rank])))
    kind = data.draw(st.sampled_from(sorted(peaks[rank][phase])))
    folder = tmp_path_factory.mktemp("runs")
    old = baseline.load(str(made.write(folder / "old", lines)))
    was = peaks[rank][phase][kind]
    peaks[rank][phase][kind] += data.draw(st.sampled_from([-1, 1, 4096]))
    new = baseline.load(str(made.write(folder / "new", lines)))
    found = [change for change in compare(old, new).changes if change.figure == "memory.peaks"]
    assert [change.id for change in found] == [lines[number]["id"]]
    assert found[0].detail == f"{rank}.{phase}.{kind}: {was:,}, now {peaks[rank][phase][kind]:,}"
    # A baseline keeps a digest in place of the mapping: the change shows there, too.
    baseline.save(old, folder / "old.json")
    again = compare(baseline.load(str(folder / "old.json")), new)
    assert "memory.peaks" in {change.figure for change in again.changes}


def test_peaks_of_pipelines_hang_on_messages_and_are_no_figures(run: Run) -> None:
    of = made.case(5, mesh={"pipe": 2})
    old = [made.result(of)]
    peaks = {"0": {"forward": {"all": 1}}}
    assert both(run, old, made.changed(old, 0, made.figure("memory", "peaks", peaks))).unchanged
    held = made.changed(old, 0, made.figure("memory", "bytes_held", 1))
    assert told_by(both(run, old, held)) == ["memory.bytes_held better"]


@pytest.mark.parametrize(
    ("was", "now", "word"),
    [
        ("pass", "fail", "worse"),
        ("fail", "pass", "better"),
        ("pass", "skip", "worse"),
        ("xfail", "xpass", "better"),
        ("pass", "pass (working precision only)", "worse"),
        ("skip", "hang(rank 1 waits)", "worse"),
    ],
)
def test_a_changed_verdict_is_told(run: Run, was: str, now: str, word: str) -> None:
    old = [made.result(made.case(0), 0, was)]
    new = [made.result(made.case(0), 0, now)]
    assert told_by(both(run, old, new)) == [f"verdict {word}"]


def test_a_check_that_no_longer_passes_is_told(run: Run) -> None:
    old = made.results(2)

    def skip(line: made.Line) -> None:
        line["checks"][3]["status"] = "skip"

    assert told_by(both(run, old, made.changed(old, 1, skip))) == ["traffic.status worse"]


def test_a_figure_that_is_gone_is_a_change_and_one_that_is_new_everywhere_a_note(run: Run) -> None:
    """A check that no case asks for any more must not pass for news of the suite."""
    old = made.results(2)

    def lose(line: made.Line) -> None:
        del line["checks"][3]["figures"]["bytes_expected"]

    found = both(run, old, made.changed(old, 0, lose))
    assert [change.detail for change in found.changes] == ["is gone"]
    for line in (new := made.results(2)):
        lose(line)
    found = both(run, old, new)
    assert [change.detail for change in found.changes] == ["is gone"] * 2 and not found.unchanged
    assert found.notes == ["figures that are recorded no longer: traffic.bytes_expected"]
    found = both(run, new, old)
    assert found.unchanged
    assert found.notes == ["figures that are recorded only now: traffic.bytes_expected"]


def test_a_narrow_run_has_lost_no_figures(run: Run) -> None:
    """What its cases never measured is not recorded no longer."""
    old = made.results(3)
    for line in old[:2]:
        line["checks"] = [check for check in line["checks"] if check["check"] != "memory"]
    found = both(run, old, old[:2])
    assert found.notes == [] and not found.changes
    assert both(run, old[:2], old).notes == []


def test_a_note_names_few_figures(run: Run) -> None:
    old, new = made.results(2), made.results(2)
    for line in new:
        del line["checks"][4]["figures"]["source"]
        line["checks"] = [check for check in line["checks"] if check["check"] != "memory"]
    [note] = both(run, old, new).notes
    assert re.search(r"no longer: (\S+, ){3}\S+ and \d+ more$", note)


@pytest.mark.parametrize("verdict", ["fail", "crash(rank 1)", "undecidable"])
def test_figures_of_what_broke_are_neither_better_nor_listed(run: Run, verdict: str) -> None:
    """A case that sends nothing because it broke saves no bytes."""
    old = made.results(9)
    new = made.changed(old, 8, made.figure("traffic", "bytes_sent", "0"))
    new[8]["verdict"], new[8]["reason"] = verdict, "because"
    new = made.changed(new, 1, made.figure("traffic", "bytes_sent", "77777"))
    found = both(run, old, new)
    assert told_by(found) == ["verdict worse", "traffic.bytes_sent worse"], "verdicts first"
    groups = tables.groups(found, "strategy", False)
    [ddp] = [row for row in groups.rows if row[0] == "ddp"]
    assert ddp[-2] == "1,000" and "better" not in tables.sentence(found)
    data = json.loads(formats.json_document(found.before, [found], False))
    [one] = [row for row in data["comparisons"][0]["compared"] if row["id"] == old[8]["id"]]
    assert one["figures"] == 1 and [change["figure"] for change in one["changes"]] == ["verdict"]
    assert told_by(both(run, new, old)) == ["traffic.bytes_sent better", "verdict better"][::-1]


def test_a_surviving_fault_is_told(run: Run) -> None:
    old, new = [made.kill("a"), made.kill("b")], [made.kill("a", False), made.kill("b")]
    assert [change.id for change in both(run, old, new).changes] == ["mutants/a"]


def test_a_fault_that_was_not_planted_is_missing_or_left_out(run: Run) -> None:
    old = [made.kill("a"), made.kill("b"), made.kill("c")]
    late = {**made.kill("c", False), "verdict": "left out", "why_not": "left out: no budget"}
    found = both(run, old, [old[0], late])
    assert found.missing == ["mutants/b"] and not found.unchanged
    assert found.left_out == {"mutants/c": "left out: no budget"}


# ----------------------------------------------------------------------------- what is comparable


def test_what_cannot_be_compared_is_said_with_why(run: Run) -> None:
    old = made.results(3)
    whole = both(run, old, made.changed(old, 0, made.figure("traffic", "bytes_sent", "7")))
    assert whole.comparable == 3
    found = both(run, old, old, torch="2.14.0+cpu")
    assert {*found.apart.values()} == {"torch 2.13.0+cpu, now 2.14.0+cpu"}
    assert found.comparable == 0 and not found.changes
    found = both(run, old, old, suite="9.9.9")
    assert all(why.startswith("suite ") for why in found.apart.values())


def test_another_cell_or_data_set_is_another_case(run: Run) -> None:
    old = made.results(3)

    def batch(line: made.Line) -> None:
        line["case"]["workload"]["global_batch"] = 48

    def data(line: made.Line) -> None:
        line["data"] = "cd" * 32

    def deadline(line: made.Line) -> None:
        line["case"] |= {"deadline": 1.0, "source": "elsewhere.yaml:1", "xfail": "why"}

    [why] = both(run, old, made.changed(old, 0, batch)).apart.values()
    assert why == "another case had this id: workload.global_batch: 24, now 48"
    [why] = both(run, old, made.changed(old, 1, data)).apart.values()
    assert why == "different data sets, by their digests"
    assert both(run, old, made.changed(old, 2, deadline)).unchanged


def test_builds_of_one_release_are_compared_but_for_peaks(run: Run) -> None:
    old = made.results(2)

    def peak(line: made.Line) -> None:
        line["checks"][4]["figures"]["peaks"]["0"]["update"]["all"] += 8

    found = both(run, old, made.changed(old, 0, peak), torch="2.13.0+cu130")
    assert {(c.figure, c.exact) for c in found.changes} == {
        ("memory.peaks", False),
        ("memory.peak_bytes", False),
    }
    found = both(run, old, made.changed(old, 0, peak))
    assert {c.exact for c in found.changes} == {True}


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        ({"cpu": "Intel(R) Xeon(R) Processor"}, "another CPU"),
        ({"kernels": {"torch": "AVX2"}}, "other kernels of torch"),
        ({"cores": 64}, ""),
    ],
)
def test_what_a_cpu_changes_is_shown_on_another_and_not_judged(
    run: Run, machine: dict[str, Any], why: str
) -> None:
    """Temporaries of kernels do change; bytes that are sent, calls and verdicts do not."""
    here = made.MACHINE | {"kernels": {"torch": "AVX512"}}
    old = made.results(3)

    def peak(line: made.Line) -> None:
        line["checks"][4]["figures"]["peaks"]["0"]["update"]["all"] += 8

    new = made.changed(old, 0, peak)
    new = made.changed(new, 1, made.figure("memory", "resident", {"0": 9}))
    new = made.changed(new, 2, made.figure("traffic", "bytes_sent", "7"))
    found = compare(run("old", old, machine=here), run("new", new, machine=here | machine))
    judged = {change.figure for change in found.changes if change.exact}
    shown = {change.figure: change for change in found.changes if not change.exact}
    of_cpu = {"memory.peaks", "memory.peak_bytes"}
    assert "traffic.bytes_sent" in judged and "traffic.bytes_sent" not in shown
    assert shown.keys() >= of_cpu if why else judged >= of_cpu
    told = [note for note in found.notes if "not judged" in note]
    if why:
        assert shown["memory.peaks"].sentence().endswith(f" (not judged: {why})")
        names = "memory.peak_bytes, memory.peaks, memory.resident"
        assert told == [f"{why}: {names} are shown where they differ, not judged"]
    else:
        assert not shown and not told


def test_another_python_pickles_objects_to_other_lengths(run: Run) -> None:
    old = made.results(2)
    new = made.changed(old, 0, made.figure("traffic", "control_bytes", 7))
    for python, exact in (("3.11.7", True), ("3.11.2", False)):
        (change,) = both(run, old, new, python=python).changes
        assert (change.figure, change.exact) == ("traffic.control_bytes", exact)
        (row,) = tables.changes([change]).rows
        assert ("another Python" in str(row[-1])) is not exact


def test_ranks_on_other_nodes_pickle_objects_to_other_lengths(run: Run) -> None:
    """Processes that one process forked share strings, those of several machines do not."""
    old = made.results(2)
    new = made.changed(old, 0, made.figure("traffic", "control_bytes", 7))
    new = made.changed(new, 1, made.figure("traffic", "bytes_sent", 7))
    here, there = run("old", old), run("new", new)
    there.hardware += ", as 2 nodes of 1 core"
    told = {change.figure: change.unlike for change in compare(here, there).changes}
    assert told["traffic.control_bytes"] == "ranks on other nodes"
    assert told["traffic.bytes_sent"] == ""


def test_versions_are_those_of_the_invocation_that_ran_the_case(tmp_path: Path) -> None:
    """A run that was resumed after an upgrade has cases of both versions."""
    lines = made.results(2)
    path = made.write(tmp_path / "run", lines, torch="2.12.0")
    header = json.loads((path / "run.json").read_text())
    later = json.loads(json.dumps(header["invocations"][0]))
    later["packages"]["torch"], later["planned"] = "2.13.0+cpu", [lines[1]["id"]]
    header["invocations"].append(later)
    (path / "run.json").write_text(json.dumps(header))
    old = snapshot.of_run(run_folder.read(path, strict=True))
    new = baseline.load(str(made.write(tmp_path / "new", lines)))
    found = compare(old, new)
    assert [*found.apart] == [lines[0]["id"]]
    assert [pair.id for pair in found.pairs] == [lines[1]["id"]]


def test_missing_new_and_left_out_are_three_things(run: Run) -> None:
    lines = made.results(4)
    left_out = {"kind": "left out", "id": lines[1]["id"], "reason": "no room"}
    found = both(run, lines[:3], [left_out, *lines[2:]])
    assert found.missing == [lines[0]["id"]]
    assert found.left_out == {lines[1]["id"]: "no room"}
    assert found.new == [lines[3]["id"]]


# ------------------------------------------------------------------------------------------ forms


def test_the_page_opens_offline_and_escapes_what_it_shows(run: Run) -> None:
    old = made.results(1)
    new = made.changed(old, 0, made.figure("traffic", "formula", "<script>alert(1)</script>"))
    page = formats.html(tables.report([both(run, old, new)]))
    assert "<script" not in page and "&lt;script&gt;" in page
    assert not re.search(r"(?:src|href)=|https?://|url\(", page)


def test_tables_group_by_strategy_or_backend(run: Run) -> None:
    old = made.results(48)
    found = both(run, old, made.changed(old, 1, made.figure("memory", "bytes_held", 1)))
    by_strategy = tables.groups(found, "strategy", False)
    by_backend = tables.groups(found, "backend", False)
    assert [row[0] for row in by_strategy.rows] == sorted(made.STRATEGIES)
    assert [row[0] for row in by_backend.rows] == ["gloo", "in_memory"]
    changed_only = tables.groups(found, "strategy", True)
    assert [row[0] for row in changed_only.rows] == ["zero1"]


@pytest.mark.parametrize(
    ("implementation", "claimed", "name"),
    [
        ("pytorch/pipelining+1f1b", "torch_pipelining", "pipelining"),
        ("pytorch/pipelining", "", "pipelining"),
        ("pytorch/tensor_parallel+plain", "torch_tensor_parallel", "tensor_parallel"),
        ("deepspeed/zero1+owners", "deepspeed_zero1", "zero1"),
        ("plain", "single", "plain"),
        ("plain+any_option", "", "plain"),
        ("my.package:Trainer", "zero1", "zero1"),
        ("my.package:Trainer", "", "Trainer"),
    ],
)
def test_one_upstream_system_has_one_name(implementation: str, claimed: str, name: str) -> None:
    """Whichever formula its bytes were compared with, also in a baseline that says otherwise."""
    assert strategy_of(implementation, claimed) == name


def test_digests_stand_for_equal_json_only() -> None:
    assert exact_figures.digest({"a": 1, "b": [2]}) == exact_figures.digest({"b": [2], "a": 1})
    assert exact_figures.digest([1, 2]) != exact_figures.digest([2, 1])
    assert exact_figures.first_difference([1, 2], [1]) == "it has 1 entries, not 2"
