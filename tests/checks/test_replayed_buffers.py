"""Buffers may follow parameters that AdamW has moved apart, and no other rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from made_case import made_case
from torch import Tensor

from shardproof.case import WorkloadSpec
from shardproof.cases.rank_program import workload_facts
from shardproof.checks import equivalence
from shardproof.checks.numbers import Differs, relative_frobenius
from shardproof.checks.one_update import buffers_after
from shardproof.contract import BufferRule, OptimizerSpec
from shardproof.evidence.assembled import Assembled, Evidence
from shardproof.evidence.records import ComparisonRow
from shardproof.oracle.training import Way, train
from shardproof.oracle.truth import Truth
from shardproof.workloads import make

SPEC = WorkloadSpec("digits_cnn", global_batch=12, micro_batches=1)
COORDINATES, STEPS = 3, 3
CASE = made_case("reference/ddp", {"replicate": COORDINATES}, workload=SPEC, steps=STEPS)
RULES: tuple[BufferRule, ...] = ("rank0", "per_rank", "synced")


@dataclass
class Declared:
    buffers: BufferRule


class Held(Evidence):
    """A system whose ranks hold what ``own`` says, beside the oracle ``truth``."""

    def __init__(self, own: Truth, truth: Truth, rule: BufferRule) -> None:
        super().__init__(CASE, [], truth, workload_facts(make(SPEC)), {})
        self.own, self.rule = own, rule

    @property
    def steps(self) -> list[int]:
        return list(range(STEPS))

    @property
    def declaration(self) -> Any:
        return Declared(self.rule)

    def observed(self, step: int, point: str, kind: str) -> Assembled:
        at = self.own.steps[step]
        copies: dict[str, dict[int, Tensor]] = (
            {name: dict(enumerate(b[name] for b in at.buffers)) for name in at.buffers[0]}
            if kind == "buffers"
            else {name: {0: value} for name, value in at.parameters.items()}
        )
        return Assembled(copies)


def _trained(rule: BufferRule, spread: float = 0.0) -> Truth:
    """The oracle, or one whose gradients are off by ``spread``: what AdamW makes of round-off."""

    def fold(step: int, parts: Any) -> dict[str, Tensor]:
        return {n: sum(p[n] for p in parts) * (1 + spread * (-1) ** step) for n in parts[0]}

    spec = replace(OptimizerSpec(), name="adamw")
    return train(make(SPEC), spec, COORDINATES, STEPS, rule, Way(fold=fold))


@pytest.mark.parametrize("rule", RULES)
def test_a_step_is_replayed_by_the_declared_rule(rule: BufferRule) -> None:
    own = _trained(rule)
    held = Held(own, own, rule)
    others = [_trained(other) for other in RULES if other != rule]
    for step in range(1, STEPS):
        for coordinate, buffers in enumerate(own.steps[step].buffers):
            made = buffers_after(held, step, coordinate, coordinate)
            for name, value in buffers.items():
                assert torch.allclose(made[name], value, rtol=1e-13), (rule, name)
        name = "blocks.0.norm.running_mean"
        apart = [
            other
            for other in others
            if not torch.allclose(
                other.steps[step].buffers[2][name], own.steps[step].buffers[2][name]
            )
        ]
        assert len(apart) == 2, "the rules cannot be told apart here"


@pytest.mark.parametrize("rule", RULES)
def test_buffers_may_follow_parameters_that_adamw_moved_apart(rule: BufferRule) -> None:
    truth, own = _trained(rule), _trained(rule, spread=1e-6)
    held = Held(own, truth, rule)
    compare = relative_frobenius(1e-12)
    rows: list[ComparisonRow] = []
    with pytest.raises(Differs, match="buffer differs"):
        equivalence._buffers(held, 2, compare, rows, False)
    equivalence._buffers(held, 2, compare, rows, True)
    own.steps[2].buffers[1]["blocks.0.norm.running_mean"] *= 1 + 1e-9
    with pytest.raises(Differs, match="buffer differs"):
        equivalence._buffers(held, 2, compare, rows, True)
