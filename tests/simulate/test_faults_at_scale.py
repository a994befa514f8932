"""Faults that appear only in large worlds are killed by the sentence that each names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from commands import here

from shardproof import registry
from shardproof.commands.console import is_json
from shardproof.impls.mutants.at_scale import declare
from shardproof.impls.reference.ddp import ReferenceDDP
from shardproof.simulate.planted import command
from shardproof.simulate.planted.faults import Judge, Kill, Planted, faults, sentences

FAULTS = {planted.declared.name: planted for planted in faults()}
#: These are judged in `make test`, also in their small worlds; `make slow` judges all.
SAMPLE = (
    "ddp_votes_in_a_table",
    "zero2_pads_to_the_square_of_ranks",
    "tensor_keeps_head_whole",
    "pipeline_makes_a_group_a_pair",
)


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    """One for all faults, so that parents are simulated once."""
    return Judge()


def test_there_are_enough_faults_of_all_families() -> None:
    assert len(FAULTS) >= 20
    parents = {planted.declared.parent for planted in FAULTS.values()}
    strategies = {registry.load(parent).strategy for parent in parents}
    assert strategies >= {"ddp", "zero1", "zero2", "zero3", "fsdp", "tensor", "pipeline", "context"}
    for planted in FAULTS.values():
        fault, system = planted.declared, registry.load(planted.path)
        parent = registry.load(fault.parent)
        assert issubclass(system, parent) and system is not parent, fault.name
        assert fault.says and fault.summary, fault.name
    # Real runs plant none of them: they would survive.
    assert not {*FAULTS} & {name.rpartition("/")[2] for name in registry.mutant_names()}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in (*FAULTS,)],
)
def test_a_fault_is_killed_by_its_sentence(judge: Judge, name: str) -> None:
    kill = judge.judge(FAULTS[name])
    assert kill.verdict == "killed", (kill.verdict, kill.sentence)
    assert re.match(r"rank [\d,]+: ", kill.sentence)
    assert re.search(FAULTS[name].declared.says, kill.sentence)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_small_world_shows_nothing(name: str) -> None:
    planted = FAULTS[name]
    source = planted.source(planted.path, small=True)
    assert sentences(source, planted.declared.accounting) == []


class Nothing(ReferenceDDP):
    """It does nothing."""


def declared(says: str) -> Planted:
    family = declare.family(ReferenceDDP, mesh={"replicate": 64}, shape=declare.SMALL)
    made = family("ddp_does_nothing", says=says)(Nothing)
    return Planted(made.at_scale, f"{__name__}:Nothing")


def test_a_fault_that_does_nothing_survives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not is_json()
    monkeypatch.setattr(command, "faults", lambda: [declared("all-reduce")])
    assert command.plant() == 1
    said = capsys.readouterr()
    assert "survives" in said.out and "0 of 1 fault killed by their sentence" in said.out
    assert "simulating fault 1 of 1: ddp_does_nothing" in said.err


def test_another_sentence_is_no_kill(judge: Judge) -> None:
    planted = FAULTS["ddp_makes_a_group_a_pair"]
    other = Planted(replace(planted.declared, says="no such words"), planted.path)
    kill = judge.judge(other)
    assert kill.verdict == "killed otherwise" and "process groups" in kill.sentence


def test_a_broken_parent_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = FAULTS["ddp_makes_a_group_a_pair"]
    fault = replace(planted.declared, parent=planted.path)
    kill = Judge().judge(Planted(fault, planted.path))
    assert kill.verdict == "parent broken" and not kill.is_killed


def test_the_table_has_a_row_a_fault() -> None:
    planted = FAULTS["ddp_makes_a_group_a_pair"]
    table = command.table([Kill(planted, "killed", "rank 0: " + "x" * 500)], whole=True)
    ((name, parent, mesh, verdict, sentence, says),) = table.rows
    assert (name, parent, mesh) == (planted.declared.name, "reference/ddp", "replicate=64")
    assert verdict == "killed" and len(str(sentence)) == 508 and says == planted.declared.says
    json.dumps(table.rows)


def test_faults_take_no_model() -> None:
    done = here("simulate", "gpt2", "--faults")
    assert done.returncode == 2 and "--faults names its own models and meshes" in done.stderr
