"""Further state and loss terms (contract 3): sound systems pass, each broken promise is seen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardproof import OwnWorkload, contract, prove
from shardproof.case import WorkloadSpec
from shardproof.contract import Capabilities
from shardproof.registry import follows

HERE = "followed"


class Counting(nn.Module):
    """A bias that training never touches, and counts of what forwards have seen."""

    bias: Tensor
    load: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 2)])
        self.register_buffer("bias", torch.zeros(2))
        self.register_buffer("load", torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        scores = self.blocks[0](inputs) + self.bias
        if self.training and torch.is_grad_enabled():
            chosen = scores.detach().argmax(-1)
            self.load += nn.functional.one_hot(chosen, 2).sum(0)
        return scores


def points(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(size, 6, generator=generator)
    return inputs, (inputs[:, :2].sum(1) > 0.3).long()


counting = OwnWorkload(Counting, nn.CrossEntropyLoss(reduction="none"), points)
SMALL = WorkloadSpec("charnames_gpt", global_batch=12, params={"layers": 1, "width": 16, "seq": 8})


def experts(scope: str, micro_batches: int = 2) -> WorkloadSpec:
    params = {"channels": 4, "layers": 2, "scope": scope}
    return WorkloadSpec(
        "digits_experts", global_batch=12, micro_batches=micro_batches, params=params
    )


def judged(name: str, folder: Path, world: int = 2, **more: object) -> tuple[str, str]:
    """Verdict and reason of a class of tests/support/followed.py."""
    more = {"workload": SMALL, "backends": ("in_memory",), **more}
    [row] = prove(f"{HERE}:{name}", worlds=(world,), results=folder, **more).itertuples()  # type: ignore[arg-type]
    return row.verdict, row.reason or ""


@pytest.mark.parametrize("name", ["Averaging", "Equal", "Scheduled", "Given", "Version2"])
@pytest.mark.parametrize("world", [1, 3])
def test_sound_state_passes(name: str, world: int, tmp_path: Path) -> None:
    assert judged(name, tmp_path / "run", world) == ("pass", "")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("CountsMicroBatches", "'updates' was updated 2 times (once a micro-batch"),
        ("LacksOne", "no rank shows 'average."),
        ("Invents", "there is 'more', which has no rule"),
        ("EqualButStill", "'temperature' is after the last step what it was after setup"),
        ("EqualButApart", "replicas"),
        ("ScheduledLate", "the update used optimizer.weight_decay, optimizer.momentum of step 0"),
        ("GivenOfOne", "'largest'"),
    ],
)
def test_each_broken_promise_of_state_is_seen(name: str, says: str, tmp_path: Path) -> None:
    verdict, reason = judged(name, tmp_path / "run")
    assert verdict == "fail"
    assert says in reason


def test_a_buffer_is_moved_after_the_update(tmp_path: Path) -> None:
    work = {"workload": WorkloadSpec("test_extra_state:counting", global_batch=12)}
    for world in (1, 3):
        assert judged("MovesBuffer", tmp_path / f"{world}", world, **work) == ("pass", "")
    for name in ("MovesByLocalCounts", "ForgetsToMove"):
        verdict, reason = judged(name, tmp_path / name, **work)
        assert verdict == "fail" and "'bias'" in reason


@pytest.mark.parametrize("scope", ["global", "rank", "micro-batch"])
def test_terms_of_every_scope_pass(scope: str, tmp_path: Path) -> None:
    for world in (1, 2, 5):
        found = judged("AddsTerms", tmp_path / f"{world}", world, workload=experts(scope))
        assert found == ("pass", "")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("TermOfThisRank", "'balance' is computed over each rank, not over the global batch"),
        ("TermOfMicroBatches", "'balance' is computed over each micro-batch"),
        ("TermTimesRanks", "'balance' counts 2 times"),
        ("LeavesTermsOut", "'balance' was left out"),
    ],
)
def test_each_wrong_term_is_seen(name: str, says: str, tmp_path: Path) -> None:
    verdict, reason = judged(name, tmp_path / "run", workload=experts("global"))
    assert verdict == "fail"
    assert says in reason


def test_a_class_of_version_2_has_terms_of_micro_batches_and_no_others(tmp_path: Path) -> None:
    micro = judged("Version2", tmp_path / "micro", workload=experts("micro-batch"))
    assert micro == ("pass", "")
    verdict, reason = judged("Version2", tmp_path / "global", workload=experts("global"))
    assert verdict == "skip"
    assert "adds up no loss term of scope 'global'" in reason


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"average.*": contract.average(0.99)}, ""),
        ({"a*b": "0 -> was"}, "has a '*' that is not its end"),
        ({"optimizer.betas": "0.9"}, "no value that an update uses"),
        ({"optimizer.lr": "given"}, "write a formula"),
        ({"x": "0 -> __import__('os')"}, "unexpected"),
        ({"x": "was + other"}, "unknown name 'other'"),
    ],
)
def test_rules_are_read_before_anything_runs(rules: dict[str, str], says: str) -> None:
    assert says in (found := follows.problem(Capabilities(follows=rules)))
    assert bool(found) == bool(says)
