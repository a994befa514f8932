"""``--shard I/N`` cuts a selection the same everywhere, and ``merge`` puts the parts together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic import case

from shardproof.case import Case
from shardproof.cases import kills
from shardproof.checks.results import CaseResult, Kill, LeftOut
from shardproof.commands.verify import verify
from shardproof.compare.compare import compare
from shardproof.compare.snapshot import of_run
from shardproof.errors import SelectionError
from shardproof.runs import machine, records
from shardproof.runs.header import read_header
from shardproof.runs.integrity import changed
from shardproof.runs.run_folder import RunFolder, read
from shardproof.runs.run_folder import lines as stored
from shardproof.runs.shard import Cut, Shard, deal, parse

CASES = [case(number) for number in range(9)]


# ------------------------------------------------------------------------------------- the cut


def test_parts_are_even_and_do_not_hang_on_the_order_of_what_is_cut() -> None:
    names = [f"s::shard{world}::{clip}" for world in range(2, 15) for clip in ("clip", "noclip")]
    parts = deal({name: name for name in names}, 4)
    assert sorted(Counter(parts.values()).values()) == [6, 6, 7, 7]
    assert deal({name: name for name in reversed(names)}, 4) == parts
    # Every second line of a matrix is alike: a part that had these only would be an odd one.
    assert len({name.rsplit("::", 1)[1] for name, part in parts.items() if part == 1}) == 2
    assert [parts[name] for name in names[:8]] == [4, 4, 4, 4, 3, 2, 4, 3]  # on any machine


def test_what_is_of_one_group_stays_together() -> None:
    groups = {f"fault{number}": f"parent{number % 5}" for number in range(23)}
    parts = deal(groups, 3)
    assert len({(groups[name], part) for name, part in parts.items()}) == 5
    assert sorted(Counter(parts.values()).values()) == [5, 9, 9]


@pytest.mark.parametrize("text", ["0/4", "5/4", "x", "1/0", "1", "-1/4", "1/4/4", ""])
def test_what_is_no_part_is_refused(command: Any, text: str) -> None:
    code, out, err = command("run", "ddp-gpt", "--shard", text, "--dry-run")
    assert (code, out) == (2, "") and "--shard is not of the form I/N" in err and text in err, err
    assert "write I/N with I from 1 to N" in err


def test_more_parts_than_items_are_refused_in_every_part() -> None:
    for index in (1, 3, 10):
        with pytest.raises(SelectionError, match="choose at most 9 parts"):
            _cut(CASES, Shard(index, 10))


def test_every_command_cuts_what_it_has_chosen(command: Any, tmp_path: Path) -> None:
    words = ("run", "ddp-gpt", "--backend", "in_memory", "--dry-run")
    whole = command(*words)[1].split()
    parts = [command(*words, "--shard", f"{index}/3")[1].split() for index in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(whole)
    assert {len(part) - len(whole) // 3 for part in parts} <= {0, 1}
    drawn = command("run", "--campaign", "6", "--shard", "1/2", "--dry-run")[1].split()
    assert len(drawn) == 3


# ------------------------------------------------------------------------------- parts and runs


def _cut(cases: list[Case], shard: Shard) -> Cut:
    lines = (LeftOut(each.id, each, None, "").line() for each in cases)
    return Cut.of(lines, {each.id: each.id for each in cases}, shard)


def _part(folder: Path, text: str, cases: list[Case] = CASES, left: int = 0) -> Path:
    """A part of ``cases`` that was run but for the last ``left`` of them."""
    shard = parse(text)
    cut = _cut(cases, shard)
    own = [each for each in cases if cut.parts[each.id] == shard.index]
    path = folder / text.replace("/", "of")
    with RunFolder(path, ["shardproof", "run", "--shard", text]) as run:
        run.cut(cut, shard, cases)
        run.plan(own)
        for each in own[: len(own) - left]:
            run.add(CaseResult(each.id, each, "pass", record="run.json", data="ab" * 32))
        if not left:
            run.close(0)
    return path


@pytest.fixture
def judged_elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the test puts in is told of this machine from then on."""
    told: dict[str, Any] = {}
    begun = machine.begun

    def elsewhere(*arguments: Any) -> Any:
        invocation = begun(*arguments).model_copy(
            update={key: value for key, value in told.items() if key != "kernels"}
        )
        if "kernels" in told:
            invocation.fingerprint.kernels = told["kernels"]
        return invocation

    monkeypatch.setattr(machine, "begun", elsewhere)
    yield told


def test_a_cut_matrix_put_together_is_the_run_of_the_whole(command: Any, tmp_path: Path) -> None:
    """The acceptance: one list of cases, one verdict, figure and digest of each."""
    words = ("run", "ddp-gpt", "--backend", "in_memory", "-k", "reference/ddp")
    for part in ("1/2", "2/2"):
        code, _, err = command(*words, "--shard", part, "--results", str(tmp_path / part[0]))
        assert code == 0, err
    assert command(*words, "--results", str(tmp_path / "whole"))[0] == 0
    code, out, err = command(
        "merge", str(tmp_path / "2"), str(tmp_path / "1"), "--into", str(tmp_path / "merged")
    )
    assert code == 0 and f"{tmp_path / '1'}: part 1 of 2, " in out, out + err
    assert verify(tmp_path / "merged").problems == []
    whole, merged = read(tmp_path / "whole"), read(tmp_path / "merged")
    comparison = compare(of_run(whole), of_run(merged))
    assert comparison.unchanged and len(comparison.pairs) == len(whole.cases) >= 2
    assert not comparison.notes  # of other planned cases or data sets
    for name in ("report.html", "report.md", "junit.xml"):
        assert (tmp_path / "merged" / name).is_file()
    results = {result.id: result for result in merged.cases}
    for result in whole.cases:
        both = [(whole, result), (merged, results[result.id])]
        one, other = (_digests(run.path / str(of.record)) for run, of in both)
        assert one == other and one
    bundle = str(tmp_path / "m.tar.gz")
    assert command("bundle", str(tmp_path / "merged"), "-o", bundle)[0] == 0
    assert command("verify", bundle)[0] == 0


def _digests(record: Path) -> list[tuple[Any, ...]]:
    rows = records.sections(record, "tensor")["tensor"]
    return [(row["step"], row["point"], row["kind"], row["name"], row["digest"]) for row in rows]


def test_evidence_is_copied_and_told_by_part(
    command: Any, tmp_path: Path, judged_elsewhere: dict[str, Any]
) -> None:
    parts = [_part(tmp_path, "1/2")]
    judged_elsewhere |= {"packages": {"torch": "2.9.1"}, "kernels": {"torch": "AVX512"}}
    parts.append(_part(tmp_path, "2/2"))
    code, out, err = command("merge", *map(str, parts), "--into", str(tmp_path / "merged"))
    assert code == 0, out + err
    assert "the parts ran with different torch: " in out and ", 2.9.1" in out
    assert "the parts ran with different kernels: " in out and "AVX512" in out
    lines = (tmp_path / "merged" / "cases.jsonl").read_bytes().splitlines()
    assert sorted(lines) == sorted(
        line for part in parts for line in (part / "cases.jsonl").read_bytes().splitlines()
    )
    assert list(changed(tmp_path / "merged")) == []
    header = read_header(tmp_path / "merged")
    assert header is not None and header.merged is not None and header.part is None
    told = [(str(one.part), one.run, one.packages["torch"]) for one in header.invocations]
    assert told[1] == ("part 2 of 2", "2of2", "2.9.1") and told[0][:2] == ("part 1 of 2", "1of2")
    # Each result is of the torch that ran it: compare holds it against no other.
    versions = {entry.version.torch for entry in of_run(read(tmp_path / "merged")).cases.values()}
    assert len(versions) == 2


def test_a_missing_part_is_told_and_can_be_run(command: Any, tmp_path: Path) -> None:
    parts = [_part(tmp_path, f"{index}/4") for index in (1, 2, 4)]
    lacking = _cut(CASES, Shard(3, 4)).names(3)
    merged = str(tmp_path / "merged")
    code, out, _ = command("merge", *map(str, parts), "--into", merged)
    assert code == 3
    assert f"part 3 of 4 is missing: {len(lacking)} cases left out" in out
    assert f"{len(CASES) - len(lacking)} judged" in out and f"{len(lacking)} left out" in out
    run = read(Path(merged))
    assert {line.id for line in run.left_out} == lacking and len(run.cases) == 9 - len(lacking)
    assert {line.reason for line in run.left_out} == {"part 3 of 4 is missing"}
    comparison = compare(of_run(run), of_run(run))
    assert comparison.comparable == len(run.cases)
    with RunFolder(Path(merged), ["run"]) as folder:  # as `run --resume --results merged` does
        folder.plan([each for each in CASES if each.id in lacking])


def test_a_part_that_did_not_end_leaves_out_what_it_lacks(command: Any, tmp_path: Path) -> None:
    parts = [_part(tmp_path, "1/2", left=1), _part(tmp_path, "2/2")]
    code, out, _ = command("merge", *map(str, parts), "--into", str(tmp_path / "merged"))
    assert code == 3 and "part 1 of 2 did not end: 1 case left out" in out
    assert not [text for text in verify(tmp_path / "merged").problems if "is missing" in text]


@pytest.mark.parametrize("judged", [True, False])
def test_what_a_part_left_out_is_not_done(judged: bool, command: Any, tmp_path: Path) -> None:
    """As Ctrl-C leaves it: a line for each case, and an end."""
    first, second = _part(tmp_path, "1/2", left=1 if judged else 99), _part(tmp_path, "2/2")
    there = {line["id"] for line in stored(first)}
    own = _cut(CASES, Shard(1, 2)).names(1)
    with RunFolder(first, ["run"]) as run:
        for each in CASES:
            if each.id in own - there:
                run.leave_out(each, "stopped by Ctrl-C")
        run.close(130)
    lacking = len(own - there)
    code, out, err = command("merge", str(first), str(second), "--into", str(tmp_path / "merged"))
    assert code == 3, out + err
    cases = "1 case" if lacking == 1 else f"{lacking} cases"
    assert f"part 1 of 2: stopped by Ctrl-C: {cases} left out" in out
    left = [line for line in stored(tmp_path / "merged") if line["kind"] == "left out"]
    assert len(left) == len({line["id"] for line in left}) == lacking
    assert all("stopped by Ctrl-C" in line["reason"] for line in left)


def test_parts_that_do_not_belong_together_are_refused(
    command: Any, tmp_path: Path, judged_elsewhere: dict[str, Any]
) -> None:
    first, second = _part(tmp_path, "1/2"), _part(tmp_path, "2/2")
    (tmp_path / "other").mkdir()
    third = _part(tmp_path / "other", "2/3")
    other = _part(tmp_path / "other", "2/2", [replace(CASES[0], steps=9), *CASES[1:]])
    again = tmp_path / "again"
    first.rename(tmp_path / "kept")
    again, first = _part(tmp_path, "1/2").rename(again), (tmp_path / "kept").rename(first)
    judged_elsewhere |= {"suite": "0.0.9"}
    older = _part(tmp_path / "other", "1/2")
    judged_elsewhere |= {"suite": _suite(first), "commit": "f" * 40}
    elsewhere = _part(tmp_path / "other", "1/3").rename(tmp_path / "other" / "commit")
    whole = tmp_path / "whole"
    with RunFolder(whole, ["run"]) as folder:
        folder.plan(CASES)
    for runs, says in (
        ((first, third), "the parts have different selections"),
        (
            (first, other),
            f"{first} (9 items in 2 parts, digest {_cut(CASES, Shard(1, 2)).digest[:12]}) and",
        ),
        ((first, again), f"part 1 of 2 is given twice: {first} and {again}"),
        (
            (older, second),
            f"the parts have different versions of the suite: {older} (0.0.9, commit",
        ),
        ((third, elsewhere), f"{elsewhere} ({_suite(first)}, commit {'f' * 40}) and"),
        ((first, whole), f"the run is not a part ({whole})"),
    ):
        into = tmp_path / "into"
        code, out, err = command("merge", *map(str, runs), "--into", str(into))
        assert (code, out) == (2, "") and says in err, err
        assert not into.exists()


def _suite(run: Path) -> str:
    header = read_header(run)
    assert header is not None
    return header.last.suite


def test_damaged_parts_are_refused(command: Any, tmp_path: Path) -> None:
    first, second = _part(tmp_path, "1/2"), _part(tmp_path, "2/2")
    merged = tmp_path / "merged"
    assert command("merge", str(first), str(second), "--into", str(merged))[0] == 0
    code, _, err = command("merge", str(merged), str(second), "--into", str(tmp_path / "x"))
    assert code == 2 and f"the run is merged already ({merged})" in err
    code, _, err = command("merge", str(first), str(second), "--into", str(merged))
    assert code == 2 and f"--into: is not empty ({merged}) - name a new folder" in err
    lines = (second / "cases.jsonl").read_text()
    (second / "cases.jsonl").write_text(lines.replace('"pass"', '"fail"', 1))
    code, _, err = command("merge", str(first), str(second), "--into", str(tmp_path / "x"))
    assert code == 2 and f"{second / 'cases.jsonl'}: line 1 " in err
    (second / "cases.jsonl").write_text(lines)
    selection = (second / "selection.jsonl").read_text()
    for damage in (selection[:-9], "[]\n", '{"part": 1}\n', '{"kind":"a","id":"b","case":[1]}\n'):
        (second / "selection.jsonl").write_text(damage)
        with pytest.raises(SelectionError, match="is damaged or missing"):
            Cut.read(second)
        code, _, err = command("merge", str(first), str(second), "--into", str(tmp_path / "x"))
        assert code == 2 and f"{second / 'selection.jsonl'}: was changed" in err
    (second / "selection.jsonl").write_text(selection)
    header = json.loads((first / "run.json").read_text()) | {"format": 5}
    (first / "run.json").write_text(json.dumps(header))
    code, _, err = command("merge", str(first), str(second), "--into", str(tmp_path / "x"))
    assert code == 2 and "evidence format 5" in err and not (tmp_path / "x").exists()


def test_a_part_stays_a_part(command: Any, tmp_path: Path) -> None:
    """Going on with it, it has its own cases and no others."""
    part = _part(tmp_path, "1/2", left=2)
    own = _cut(CASES, Shard(1, 2)).names(1)
    for words in (("--resume",), ("--rerun-failed",)):
        code, _, err = command("run", *words, "--results", str(part), "--shard", "1/2")
        assert code == 2 and "--shard is only for a new run (1/2) - leave --shard out" in err
    code, out, err = command("run", "--resume", "--results", str(part), "--dry-run")
    assert code == 0 and len(out.split()) == 2 and set(out.split()) <= own, err
    with RunFolder(part, ["run", "--resume"]) as folder:
        with pytest.raises(SelectionError, match="this run is part 1 of 2, which does not contain"):
            folder.plan([next(each for each in CASES if each.id not in own)])
        folder.plan([each for each in CASES if each.id in out])
    header = read_header(part)
    assert (
        header is not None and [str(one.part) for one in header.invocations] == ["part 1 of 2"] * 2
    )
    assert header.invocations[0].key == header.invocations[1].key
    for shard, says in ((Shard(2, 2), "this run is part 1 of 2"), (Shard(1, 3), "of another")):
        with RunFolder(part, ["run"]) as folder, pytest.raises(SelectionError, match=says):
            folder.cut(_cut(CASES, shard), shard, CASES)


# ----------------------------------------------------------------------------- faults and times


def test_faults_are_cut_by_their_parents(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No parent is run twice, and a part that is missing leaves its faults out by name."""

    def killed(pairs: Sequence[kills.PlantedPair], *_: Any) -> list[Kill]:
        open_ends = [kills.judge_kill(pair, None, None) for pair in pairs]
        return [replace(kill, killed=True, verdict="fail", why_not="") for kill in open_ends]

    monkeypatch.setattr(kills, "run_mutants", killed)
    words = ("mutants", "--impl", "reference/zero1", "--shard")
    planned = []
    for part in ("1/2", "2/2"):
        code, _, err = command(*words, part, "--results", str(tmp_path / part[0]))
        assert code == 0, err
        header = read_header(tmp_path / part[0])
        assert header is not None
        planned.append(header.last)
    assert not {*planned[0].planned} & {*planned[1].planned}
    assert abs(len(planned[0].kills) - len(planned[1].kills)) <= 2
    code, out, err = command("merge", str(tmp_path / "2"), "--into", str(tmp_path / "merged"))
    lacking = {*planned[0].kills}
    assert code == 3 and f"part 1 of 2 is missing: {len(lacking)} faults left out" in out, err
    run = read(tmp_path / "merged")
    assert {kill.name for kill in run.kills if kill.left_out} == lacking
    assert {kill.name for kill in run.kills if kill.killed} == {*planned[1].kills}
