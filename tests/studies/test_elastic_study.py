"""``python -m tools.studies elastic``: its scripts, its judge, and two runs of real agents."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from commands import study

from shardproof import tensor_bytes, verdicts
from shardproof.errors import SelectionError
from tools.studies import elastic
from tools.studies.elastic import records
from tools.studies.elastic.agents import Agents
from tools.studies.elastic.history import HISTORIES, JOINS, SPLITS, Event, History
from tools.studies.elastic.judge import (
    Judged,
    committers,
    differs_in,
    judge,
    samples,
    truth_of,
)

BY_NAME = {history.name: history for history in HISTORIES}
MOST_MEMBERS = 4  # of torchrun --nnodes=1:4


# ------------------------------------------------------------------------------------- histories


def test_who_commits_each_step() -> None:
    assert BY_NAME["both"].told() == [
        *[(0, 1, 2)] * 3,
        *[(1, 2)] * 2,
        (1, 2, 3),
        *[(1, 2, 3, 4)] * 2,
    ]
    assert BY_NAME["split"].told() == [(0,), (0,), (1,), (1,)]
    assert BY_NAME["frozen"].told() == [(0,), (0,), (1,), (0, 1), (0, 1)]


@pytest.mark.parametrize("history", HISTORIES, ids=list(BY_NAME))
def test_every_history_can_be_played(history: History) -> None:
    assert History.from_dict(json.loads(json.dumps(history.to_dict()))) == history
    assert [e.step for e in history.events] == sorted(e.step for e in history.events)
    assert all(event.step < history.steps for event in history.events)
    for number, event in enumerate(history.events):
        before, after = history.after(number), history.after(number + 1)
        assert history.halting(number) in before
        assert 1 <= len(after) <= MOST_MEMBERS
        assert (event.member in before) != (event.what in JOINS)
        assert event.what not in SPLITS or len(before) == 1  # who is alone can go on alone
    # Batches are whole, or the learning rate would not follow them.
    whole = history.workload.global_batch
    assert all(whole * world % history.members == 0 for world in history.worlds())


def test_what_the_oracle_is_told_changes_the_numbers() -> None:
    """A comparison that any membership passes would show nothing."""
    history = BY_NAME["worker"]
    one, other = truth_of(history), truth_of(history, [3, 3, 2, 2])
    for name, tensor in one.steps[-1].parameters.items():
        apart = (tensor - other.steps[-1].parameters[name]).norm() / tensor.norm()
        assert apart > 1e-6, name


# ----------------------------------------------------------------------------------------- judge


def wrote(
    folder: Path,
    members: Sequence[int],
    loaded: int,
    made: Mapping[int, Sequence[int]],
    committed: Sequence[int] = (),
) -> None:
    """A generation as its ranks write it; ``made``: step -> samples, which ranks share."""
    path, world = records.new_generation(folder), len(members)
    for rank, member in enumerate(members):
        file = path / f"rank{rank}.jsonl"
        records.append(file, {"member": member, "world": world, "loaded": loaded})
        for step, row in made.items():
            share = list(row)[rank::world]
            line = {"step": step, "samples": share, "loss": 1.0, "digests": {"w": f"{step}"}}
            records.append(file, line)
            if step in committed:
                records.append(file, {"committed": step})


def test_a_step_that_nobody_could_tell_is_that_of_the_last_who_made_it(tmp_path: Path) -> None:
    """All were killed between the commit and their records; the next group loaded it."""
    wrote(tmp_path, [0, 1], 0, {0: range(4)})
    wrote(tmp_path, [0, 1], 0, {0: range(4)})
    wrote(tmp_path, [1], 1, {1: range(4, 8)}, committed=[1])
    problems: list[str] = []
    groups = committers(records.generations(tmp_path), 2, problems)
    assert [group.number for group in groups] == [2, 3] and not problems


def test_two_groups_that_commit_one_step_are_told(tmp_path: Path) -> None:
    wrote(tmp_path, [0], 0, {0: range(4)}, committed=[0])
    wrote(tmp_path, [1], 0, {0: range(4)}, committed=[0])
    problems: list[str] = []
    committers(records.generations(tmp_path), 2, problems)
    assert problems == [
        "step 0: committed by groups 1 and 2, each for itself",
        "step 1: committed by no member",
    ]


def test_samples_that_are_trained_on_twice_are_told(tmp_path: Path) -> None:
    history = replace(BY_NAME["late"], workload=replace(BY_NAME["late"].workload, global_batch=4))
    wrote(tmp_path, [0], 0, {0: range(4)}, committed=[0])
    wrote(tmp_path, [0, 1], 1, {1: range(3, 7)}, committed=[1])
    said = samples(history, records.generations(tmp_path))
    assert said == ["step 1: trained on samples [3, 4, 5, 6], not 4 from 4 on, each once"]


def test_a_line_that_was_cut_off_is_not_read(tmp_path: Path) -> None:
    wrote(tmp_path, [0], 0, {0: range(4)})
    with next(tmp_path.glob("*/rank0.jsonl")).open("a") as file:
        file.write('{"committed": 0')
    (generation,) = records.generations(tmp_path)
    assert generation.has_made(0) and not generation.saw_committed(0)


def test_a_split_that_nobody_refuses_is_told(tmp_path: Path) -> None:
    wrote(tmp_path, [0], 0, {0: range(4), 1: range(4)}, committed=[0, 1])
    history = replace(BY_NAME["split"], steps=2, events=(Event(1, "splits", 0),))
    assert judge(history, tmp_path).problems == ["0 saves were refused, 1 had to be: none"]


def test_bits_that_differ_are_named() -> None:
    one = Judged(digests=[[{"a": "1", "b": "2"}], [{"a": "3", "b": "4"}]])
    other = Judged(digests=[[{"a": "1", "b": "2"}], [{"a": "3", "b": "5"}]])
    assert differs_in(one, one) == ""
    assert differs_in(one, other) == "step 1, rank 0: b has other bits in another run"


# --------------------------------------------------------------------------------------- command


def test_an_unknown_history_and_a_folder_in_use_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match=r"no such history \(lat\) - did you mean late\?"):
        elastic.named(["lat"])
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(SelectionError, match="something is there already"):
            elastic.run([], 1, place)


def test_a_history_that_fails_ends_with_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "_once", lambda history, folder: Judged(["it went wrong"]))
    ended = study("elastic", "--history", "late", "--runs", "1")
    assert ended.returncode == verdicts.BROKEN
    assert "- late: it went wrong" in ended.stdout


# ---------------------------------------------------------------------------------------- agents


def workers(folder: Path) -> list[psutil.Process]:
    """Processes that have ``folder`` in their command line, but for this one."""
    found = psutil.process_iter(["cmdline"])
    return [p for p in found if str(folder) in (p.info["cmdline"] or ()) and p.pid != os.getpid()]


@pytest.mark.launches
@pytest.mark.timeout(600)
def test_a_worker_and_an_agent_are_killed(tmp_path: Path) -> None:
    """What remains trains on as the oracle says; nothing is left running."""
    events = (Event(1, "worker", 0, "inside"), Event(2, "agent", 0, "unsaved"))
    history = replace(BY_NAME["both"], members=2, steps=3, events=events)
    with Agents(history, tmp_path) as agents:
        agents.play()
    assert workers(tmp_path) == []
    judged = judge(history, tmp_path)
    assert not judged.problems
    assert judged.members == [(0, 1), (0, 1), (1,)] and judged.generations == 3
    assert judged.compared > 20 and judged.worst < 1e-12
    spoiled = tmp_path / "generation-003/rank0.end"
    held = tensor_bytes.load(spoiled)
    name = next(iter(held["parameters"]))
    held["parameters"][name] *= 1 + 1e-9
    tensor_bytes.dump(spoiled, held)
    (problem,) = judge(history, tmp_path).problems
    assert f"parameters {name} differs from the oracle's" in problem


@pytest.mark.launches
@pytest.mark.timeout(600)
def test_the_second_of_two_groups_that_save_into_one_folder_is_refused(tmp_path: Path) -> None:
    history = replace(BY_NAME["split"], steps=3, events=(Event(1, "splits", 0, "unsaved"),))
    with Agents(history, tmp_path) as agents:
        agents.play()
    assert workers(tmp_path) == []
    judged = judge(history, tmp_path)
    assert not judged.problems
    assert judged.members == [(0,), (1,), (1,)]
    (said,) = judged.refusals
    assert str(tmp_path / "checkpoints/step-00000002") in said
    assert "was saved by another job, which continues the same run" in said
    assert "end one of the two jobs, or name another folder for one of them" in said
