"""The first difference of planted faults: the tensor, the operation, and the line."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from shardproof import registry
from shardproof.case import Case
from shardproof.cases.kills import pair
from shardproof.locate.command import exit_code
from shardproof.locate.finding import Finding, Place, path_of
from shardproof.locate.task import locate_all


@dataclass(frozen=True)
class Expected:
    """What the finding of a fault has: ``code`` stands at the named line, or at its origin."""

    kind: str
    tensor: str
    operation: str
    file: str
    code: str
    says: str
    origin: str = ""


#: Faults of different classes: a wrong factor, a lost call, a call that is not promised, a norm, a
#: mask, the settings of an optimizer, a wrong shard, a decision, a loss, integers.
FAULTS = {
    "context_averages_gradients": Expected(
        *("scaled", "embed.token.weight", "aten.div_.Tensor"),
        *("impls/mutants/context/positions.py", "/= self.comm.size", "times the expected one"),
    ),
    "ddp_last_bucket_lost_after_step_3": Expected(
        *("missing", "embed.token.weight", "all_reduce"),
        *("impls/mutants/data/ddp_late.py", "super().reduce", "it lacks all_reduce"),
    ),
    "zero1_all_reduces": Expected(
        *("calls", "", "all_reduce", "impls/mutants/sharded/zero.py", "self.comm.all_reduce"),
        "promises no all_reduce over axis shard",
    ),
    "ddp_clips_up": Expected(
        *("operation", "embed.token.weight", "aten.mul_.Tensor"),
        *("impls/mutants/data/ddp_update.py", "scale_gradients", "right before the operator"),
    ),
    "pipeline_norm_of_one_stage": Expected(
        *("operation", "norm", "aten.pow.Tensor_Scalar"),
        *("impls/mutants/pipeline/pipeline.py", "norm_parts", "the global norm is wrong"),
    ),
    "tensor_embedding_not_masked": Expected(
        *("operation", "embed.token.weight", "all_reduce"),
        *("impls/mutants/tensor/tensor.py", "layer.leave", "right before all_reduce number 1"),
    ),
    "zero2_decay_to_wrong_group": Expected(
        *("operation", "embed.position.weight", "aten.mul_.Tensor"),
        *("impls/reference/engine/engine.py", "optimizer.step", "settings of the optimizer come"),
        origin="return groups",
    ),
    "tensor_identical_shards": Expected(
        *("moved", "embed.token.weight", "aten.clone.default"),
        *("impls/mutants/tensor/tensor.py", "clone()", "right values of something else"),
    ),
    "zero1_overflow_of_own_shard": Expected(
        *("operation", "blocks.0.mlp.up.weight", "aten.lerp_.Scalar"),
        *("impls/reference/engine/engine.py", "optimizer.step", "the update is made nevertheless"),
        origin="return",
    ),
    "pipeline_tells_last_window_only": Expected(
        *("operation", "loss", "aten.add.Tensor"),
        *("impls/mutants/pipeline/pipeline.py", "", "the loss is wrong"),
    ),
    "ddp_gradients_as_integers": Expected(
        *("calls", "", "all_reduce", "impls/mutants/data/ddp_late.py", "all_reduce"),
        "bytes of other data than floats",
    ),
}


@pytest.fixture(scope="module")
def found() -> dict[str, Finding]:
    """The findings of all faults, and of the parent of one."""
    pairs = {name: pair(registry.load_mutant(name)) for name in FAULTS}
    cases = [each.case for each in pairs.values()] + [pairs["zero1_all_reduces"].parent]
    return dict(_findings(cases))


def _findings(cases: list[Case]) -> Iterator[tuple[str, Finding]]:
    for case, finding, _ in locate_all(cases):
        assert isinstance(finding, Finding), f"{case.id}: {finding}"
        yield case.implementation.removeprefix(registry.MUTANTS), finding


def _code(place: Place | None) -> str:
    assert place is not None
    return linecache.getline(path_of(place), place.line).strip()


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_difference_of_a_fault(name: str, found: dict[str, Finding]) -> None:
    finding, expected = found[name], FAULTS[name]
    print(finding.sentence)
    assert (finding.kind, finding.tensor) == (expected.kind, expected.tensor)
    assert finding.operation == expected.operation
    assert finding.place is not None and finding.place.file == expected.file
    assert expected.code in _code(finding.place)
    assert expected.says in finding.sentence and f"({finding.place} in " in finding.sentence
    assert not expected.origin or expected.origin in _code(finding.origin)


def test_nothing_differs_in_a_clean_case(found: dict[str, Finding]) -> None:
    finding = found["reference/zero1"]
    assert finding.kind == "nothing" and finding.verdict == "pass"
    assert finding.sentence == "nothing differs: the case passes" and finding.place is None


def test_a_case_that_is_not_judged_does_not_pass() -> None:
    """The system refuses the dtype or the backend of the case: a skip."""
    clean = pair(registry.load_mutant("zero1_all_reduces")).parent
    refused = replace(clean, implementation="deepspeed/zero1", id="refused", options={})
    [(_, finding)] = _findings([refused])
    assert finding.kind == "unplaced" and "ended as skip" in finding.sentence
    assert exit_code([finding]) == 3


def test_a_case_that_fails_in_memory_only_does_not_pass() -> None:
    fault = pair(registry.load_mutant("zero1_gathers_beside")).case
    others = replace(fault, checks=("equivalence", "memory"))
    [(_, finding)] = _findings([others])
    assert finding.kind == "unplaced" and "memory" in finding.sentence


def test_the_command_prints_the_line_and_exits_with_1(command: Any) -> None:
    code, out, _ = command("locate", "mutants/zero1_all_reduces")
    assert code == 1
    assert "promises no all_reduce over axis shard" in out
    assert "bucket.work = self.comm.all_reduce(" in out and "zero.py:" in out


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mutants/no_such_fault", "--impl matches no fault"),
        ("no-such-run", "no such run"),
        ("no::such::case", "unknown scenario"),
        ("mutants/backend_tags_drift", "the case trains no model"),
    ],
)
def test_an_unknown_case_is_bad_input(name: str, says: str, command: Any) -> None:
    code, _, err = command("locate", name)
    assert code == 2 and says in err


def test_findings_decide_the_exit_code() -> None:
    kinds = {"nothing": 0, "operation": 1, "unplaced": 3}
    made = {kind: Finding("c", kind, "fail", "words") for kind in kinds}  # type: ignore[arg-type]
    assert {kind: exit_code([each]) for kind, each in made.items()} == kinds
    assert exit_code([*made.values()]) == 3
    assert Finding.from_dict(made["operation"].to_dict()) == made["operation"]
