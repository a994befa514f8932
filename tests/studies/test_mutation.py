"""Systematic faults: they are many and compile, each can be planted, a study tells them apart."""

from __future__ import annotations

import ast
import fnmatch
import importlib
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardproof.case import Case
from shardproof.cases.runner import Session
from shardproof.errors import SelectionError
from shardproof.scenarios.load import find
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed
from tools.studies.mutation import earlier, operators, planted, reached, study, untaken
from tools.studies.mutation.operators import Fault

ROOT = Path(__file__).parents[2]
ALONE = study.Planting(jobs=1)


def quick_cases(scenario: str, words: str) -> Sequence[Case]:
    cases = [case for file in find([scenario]) for case in expand(file, installed())]
    return [case for case in cases if case.tier == "quick" and words in case.id]


def named(file: str, operator: str, before: str) -> Fault:
    (found, *_) = [
        fault
        for fault in operators.of_file(operators.ROOT / file)
        if fault.operator == operator and before in fault.before
    ]
    return found


def test_faults_are_many_of_every_operator_and_each_has_a_place() -> None:
    faults = operators.faults()
    assert len(faults) >= 1500
    assert len({fault.name for fault in faults}) == len(faults)
    of = {fault.operator for fault in faults}
    assert {"drop", "twice", "move", "skip once", "turns", "scale", "copy", "manner", "word"} <= of
    for fault in random.Random(1).sample(faults, 60):
        again, tree = operators.planted_code(fault.file, fault.number)
        assert again == fault
        compile(tree, fault.file, "exec")
    with pytest.raises(LookupError):
        operators.planted_code("ddp.py", 100_000)


def test_every_function_with_a_fault_can_be_given_other_code() -> None:
    lost = []
    for path in sorted(operators.ROOT.rglob("*.py")):
        wanted = {fault.function for fault in operators.of_file(path)}
        if not wanted:
            continue
        parts = path.relative_to(operators.ROOT).with_suffix("").parts
        module = importlib.import_module(
            ".".join(("shardproof.impls.reference", *parts)).removesuffix(".__init__")
        )
        lost += [
            f"{path.name}: {name}"
            for name in wanted - {function.__qualname__ for function in planted.functions(module)}
        ]
    assert not lost


def test_a_call_of_super_can_be_dropped() -> None:
    """Without it the function would have no cell of its class, and could not get the code."""
    fault = named("ddp.py", "drop", "super().after_step()")
    assert fault.after == "pass"
    program = f"from tools.studies.mutation import planted as p; p._plant('ddp.py', {fault.number})"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_study_tells_killed_faults_from_those_without_effect_and_those_unreached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = named("naive_ddp.py", "drop", "self.reducer.all_reduce")
    unreached = named("zero3.py", "compare", "")
    idle = named("naive_ddp.py", "twice", "reducer.check(comm.size)")
    monkeypatch.setattr(operators, "faults", lambda: [killed, unreached, idle])
    cases = quick_cases("ddp-gpt", "reference/naive_ddp::in_memory")[:2]
    found = study.run(cases, 3, 1, ALONE)
    assert {one.fault.operator: one.state for one in found.planted} == {
        "drop": "killed",
        "compare": "unreached",
        "twice": "without effect",
    }
    assert "1 killed" in capsys.readouterr().err
    assert "1 killed" in found.sentence()
    document = found.document()
    assert [one["state"] for one in document["left"]] == ["unreached", "without effect"]
    assert "zero3.py" in document["left"][0]["diff"]
    # What is left is planted in other cases, and what was killed counts.
    file = tmp_path / "left.json"
    file.write_text(json.dumps(document))
    cases = quick_cases("zero-gpt", "reference/zero3::in_memory")[:1]
    more = study.run(cases, 9, 7, ALONE, left=earlier.read(file))
    assert [one.fault for one in more.planted] == [unreached, idle]
    assert (more.seed, more.before, more.document()["before"]) == (1, 1, 1)
    assert "with 1 killed before" in more.sentence()
    # What no study has planted is told for ever.
    file.write_text(json.dumps({**document, "left_out": 4}))
    fewer = study.run(cases, 1, 7, ALONE, left=earlier.read(file))
    assert fewer.left_out == 4 and "4 left out" in fewer.sentence()
    # What is not planted again keeps its state, and is still left.
    assert [one["state"] for one in fewer.document()["left"]][-1] == "without effect"
    assert {one["fault"] for one in fewer.document()["left"]} >= {idle.name}


def test_a_file_that_no_study_wrote_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "left.json"
    fault = operators.faults()[0]
    left = {"fault": fault.name, "state": "unreached", "diff": fault.diff()}
    whole = {"seed": 1, "counts": {}, "left": [left]}
    file.write_text(json.dumps(whole))
    assert earlier.read(file).faults() == [fault]
    for text, told in (
        ("[", "no study of faults"),
        (json.dumps({**whole, "seed": "x"}), "(seed: "),
        (json.dumps({**whole, "left": []}), "leaves no fault over"),
        (json.dumps({**whole, "left": [{**left, "state": "odd"}]}), "(left.0.state: "),
        (json.dumps({**whole, "left": [{**left, "diff": "other"}]}), "another fault in this code"),
        (json.dumps({**whole, "left": [{**left, "fault": "gone.py#1"}]}), "gone.py#1 is another"),
    ):
        file.write_text(text)
        with pytest.raises(SelectionError, match=re.escape(told)):
            earlier.read(file)
    with pytest.raises(SelectionError, match="cannot be read"):
        earlier.read(tmp_path / "none.json")


def test_a_fault_that_no_case_need_reach_is_told_with_its_reason() -> None:
    (command, *_), (plain, *_) = (
        operators.of_file(operators.ROOT / file) for file in ("checkpoint/convert.py", "ddp.py")
    )
    (guarded, *_) = [
        fault
        for fault in operators.of_file(operators.ROOT / "parts/consensus.py")
        if untaken.reasons(fault.file).get(fault.line) == untaken.GUARD
    ]
    for fault, state in ((command, "explained"), (guarded, "explained"), (plain, "unreached")):
        one = study.Planted(fault, [])
        assert one.state == state
        assert ("no case: " in one.text()) == (state == "explained")
    assert "shardproof checkpoint convert" in study.Planted(command, []).text()
    both = study.Study(1, 1, [study.Planted(command, []), study.Planted(plain, [], killed_by="x")])
    assert "100.0% killed" in both.sentence(), "what is explained does not count"


def test_a_survivor_tells_what_it_changed() -> None:
    fault = named("naive_ddp.py", "drop", "self.reducer.all_reduce")
    case = quick_cases("ddp-gpt", "reference/naive_ddp")[0]
    one = study.Planted(fault, [study.Home(case, 1.0, {}, {})], tried=1)
    assert one.state == "without effect"
    unsteady = study.Home(case, 1.0, {}, {}, frozenset({"loss"}))
    one.effects = [
        (unsteady, frozenset({"loss"})),
        (one.homes[0], frozenset(f".calls[].{name}" for name in "edcba")),
    ]
    assert one.state == "survived"
    told = f"changed in {case.id}: .calls[].a, .calls[].b, .calls[].c, .calls[].d and 1 more"
    assert one.text().endswith(told)


@pytest.mark.parametrize(
    ("earlier", "homes", "state"),
    [
        ("survived", 0, "survived"),
        ("survived", 1, "survived"),
        ("endless", 1, "endless"),
        ("without effect", 0, "without effect"),
        ("unreached", 0, "unreached"),
        ("unreached", 1, "without effect"),
        ("explained", 1, "without effect"),
    ],
)
def test_what_other_cases_told_stands_where_these_say_nothing(
    earlier: str, homes: int, state: str
) -> None:
    fault = named("naive_ddp.py", "drop", "self.reducer.all_reduce")
    home = study.Home(quick_cases("ddp-gpt", "reference/naive_ddp")[0], 1.0, {}, {})
    one = study.Planted(fault, [home] * homes, tried=homes, earlier=earlier)
    assert one.state == state
    assert study.Planted(fault, [home], 1, earlier, killed_by="x").state == "killed"
    changed = study.Planted(fault, [home], 1, earlier, effects=[(home, frozenset({"loss"}))])
    assert changed.state == "survived"


def test_a_fault_without_end_is_planted_in_two_cases() -> None:
    fault = named("naive_ddp.py", "drop", "self.reducer.all_reduce")
    case = quick_cases("ddp-gpt", "reference/naive_ddp")[0]
    one = study.Planted(fault, [study.Home(case, 1.0, {}, {})] * 9, tried=1, endless=1)
    assert one.is_open
    one.tried, one.endless = 2, 2
    assert not one.is_open
    assert one.state == "endless"


def test_what_is_raised_has_no_faults() -> None:
    path = operators.ROOT / "collectives/reducer.py"
    raised = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Raise)]
    within = {line for n in raised for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)}
    assert len(within) > 3
    assert within.isdisjoint(fault.line for fault in operators.of_file(path))


def test_defaults_have_no_faults_for_they_are_made_before_any_case() -> None:
    path = operators.ROOT / "pipeline/schedules.py"
    (line,) = [
        n for n, text in enumerate(path.read_text().splitlines(), 1) if "chunks: int =" in text
    ]
    assert line not in {fault.line for fault in operators.of_file(path)}


def test_what_more_clean_runs_have_unlike_is_no_effect() -> None:
    fault = named("naive_ddp.py", "drop", "self.reducer.all_reduce")
    cases = quick_cases("ddp-gpt", "reference/naive_ddp::in_memory")[:1]
    (home,) = study.find_homes(cases, ALONE, again=False)
    chance, steady = sorted(home.figures)[:2]
    home.figures = {**home.figures, chance: ["as it happened once"]}
    by_chance = study.Planted(fault, [home], 1, effects=[(home, frozenset({chance}))])
    real = study.Planted(fault, [home], 1, effects=[(home, frozenset({chance, steady}))])
    assert by_chance.state == real.state == "survived"
    with Session(1) as session:
        study._confirm(session, [by_chance, real])
    assert (by_chance.state, real.state) == ("without effect", "survived")
    assert real.effect == (home.case.id, frozenset({steady}))


def test_a_budget_ends_the_planting_and_what_it_leaves_out_is_told() -> None:
    fault = named("naive_ddp.py", "drop", "self.reducer.all_reduce")
    lines = {fault.file: {fault.line}}
    home = study.Home(quick_cases("ddp-gpt", "reference/naive_ddp")[0], 1.0, {}, lines)
    found = study.plant_all([home], [fault], 1, study.Planting(budget=-1.0))
    assert not found.planted
    assert found.left_out == found.document()["left_out"] == 1
    assert "1 left out" in found.sentence()


def test_first_come_cases_with_pairs_of_their_own() -> None:
    fault = named("naive_ddp.py", "drop", "self.reducer.all_reduce")
    reached = {fault.file: {fault.line}}
    plain, traits = (
        quick_cases("ddp-gpt", "reference/naive_ddp::in_memory")[0],
        quick_cases("zero-traits", "")[0],
    )
    homes = [
        study.Home(case, seconds, {}, lines)
        for case, seconds, lines in (
            (plain, 1.0, reached),
            (plain, 1.1, reached),  # nothing new, though it is cheap
            (traits, 3.0, reached),
            (traits, 0.1, {}),  # does not execute the line
        )
    ]
    assert study._homes_of(fault, homes) == [homes[0], homes[2], homes[1]]


def test_times_are_no_effect_nor_is_what_two_clean_runs_do_not_have_alike() -> None:
    def told(time: float, length: int, sent: int) -> study.Figures:
        call = {"began": time, "cpu": time, "length": length, "bytes": sent}
        judged = {"oracle": {"norm": time}, "compared": {"error": time}}
        return study.measured({"figures": {"calls": [call], **judged}})

    first, again = told(1.0, 12, 4), told(2.0, 12, 4)
    assert first == again
    assert set(first) == {".calls[].length", ".calls[].bytes"}
    unsteady = study.unlike(first, told(1.0, 13, 4))
    assert unsteady == {".calls[].length"}
    home = study.Home(quick_cases("ddp-gpt", "")[0], 1.0, first, {}, unsteady)
    assert not home.changed(told(1.0, 99, 4))
    assert home.changed(told(1.0, 12, 5)) == {".calls[].bytes"}
    assert home.changed(study.measured({"figures": {"calls": []}}))


def test_a_case_that_fails_without_a_fault_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planted, "of_case", lambda strategy, number: "reference/no_such")
    cases = quick_cases("ddp-gpt", "reference/naive_ddp::in_memory")[:1]
    assert not study.find_homes(cases, ALONE)
    assert f"left out: {cases[0].id}" in capsys.readouterr().err


def test_lines_are_noted_and_a_generator_is_not_kept(tmp_path: Path) -> None:
    """What it holds goes with it: a case that is noted must not have more memory than others."""
    source = "def twice(*held):\n    yield 1\n    yield 2\n\n\ndef once():\n    return 3\n"
    file = str(operators.ROOT / "made.py")
    program = (
        "from tools.studies.mutation import reached\n"
        f"made = {{}}; exec(compile({source!r}, {file!r}, 'exec'), made)\n"
        "reached.note(7)\n"
        "turns = zip(made['twice'](), made['twice']()); made['once'](); list(turns)\n"
        "import weakref, sys; held = set([1]); gone = weakref.ref(held)\n"
        "left = made['twice'](held); next(left); del left, held; sys.exit(gone() is not None)\n"
    )
    environment = {**os.environ, reached.VARIABLE: str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert reached.lines(tmp_path)[7]["made.py"] == {2, 3, 7}


def test_every_rule_of_untaken_branches_names_a_file_and_a_line_that_there_are() -> None:
    sources = {str(p.relative_to(operators.ROOT)): p for p in operators.ROOT.rglob("*.py")}
    for rule in untaken.rules():
        for glob in rule.file:
            text = [sources[name].read_text() for name in fnmatch.filter(sources, glob)]
            assert text, (glob, rule.reason)
            there = [line.strip() for one in text for line in one.splitlines()]
            for place in rule.at:
                assert fnmatch.filter(there, place), (glob, place, rule.reason)
