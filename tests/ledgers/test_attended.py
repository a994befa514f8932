"""The work of attention is counted, and what a system computes stays what it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_case import made_case
from test_context_costs import context
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from shardproof import registry
from shardproof.case import WorkloadSpec
from shardproof.checks import active, attends
from shardproof.evidence.records import RankRecord, StepRecord
from shardproof.ledgers import attended
from shardproof.ledgers.attended import Attended
from shardproof.registry.declaration import Declaration

#: Two products of 4 x 8 rows with 8 columns, over 16 features.
WORK = 2 * 2 * 4 * 8 * 8 * 16


class Core(nn.Module):
    """An attention by the function ``of``."""

    def __init__(self, of: Callable[..., Any]) -> None:
        super().__init__()
        self.of = of

    def forward(self, *heads: Tensor) -> Any:
        return self.of(*heads)


def written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).softmax(-1) @ value


def watched(of: Callable[..., Any]) -> tuple[nn.Module, Attended]:
    module, counter = nn.Sequential(Core(of)), Attended()
    counter.watch(module, {"0": "core"})
    return module, counter


def attend(module: nn.Module) -> Tensor:
    result: Tensor = module[0](*torch.ones(3, 2, 2, 8, 16))  # type: ignore[index]
    return result


@pytest.mark.filterwarnings("ignore")  # flex_attention advises to compile it
def test_a_higher_order_operator_is_counted() -> None:
    module, counter = watched(flex_attention)
    assert torch.equal(attend(module), torch.ones(2, 2, 8, 16))
    assert counter.total == WORK


def test_what_is_compiled_stays_compiled() -> None:
    module, counter = watched(torch.compile(written_out, backend="eager", fullgraph=True))
    assert torch.equal(attend(module), torch.ones(2, 2, 8, 16))
    assert counter.total == WORK


def test_a_formula_that_raises_ends_no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> int:
        raise AssertionError("incompatible shapes")

    monkeypatch.setitem(attended._COUNTED, torch.ops.aten.bmm, broken)
    module, counter = watched(written_out)
    assert torch.equal(attend(module), torch.ones(2, 2, 8, 16))
    assert counter.total is None


def test_copies_of_a_module_count_into_the_same() -> None:
    module, counter = watched(written_out)
    attend(copy.deepcopy(module))
    assert counter.total == WORK


def test_only_models_whose_masks_are_known_are_counted() -> None:
    case = made_case("reference/context", {"context": 2}, checks=("active",))
    declared = Declaration.of(registry.load(case.implementation), {})
    assert attends(case, declared)
    for other in (
        replace(case, workload=WorkloadSpec("own_models:ATTENDING")),
        replace(case, depth="family"),
        replace(case, checks=("traffic",)),
        replace(case, mesh={"replicate": 2}),
    ):
        assert not attends(other, declared), other


@pytest.mark.parametrize(("counted", "says"), [(None, ""), (0, ""), (1, "counted 1:")])
def test_what_was_not_counted_is_no_problem(counted: int | None, says: str) -> None:
    declared = Declaration.of(registry.load("reference/context"), {})
    step = StepRecord(0, 0, None, None, attended=counted)
    evidence: Any = SimpleNamespace(
        cost_model=lambda: context(2, "ring"),
        workload=SimpleNamespace(traits=()),
        records=[RankRecord(0, 1, declared, steps=[step])],
        steps=range(1),
    )
    found = active._attention(evidence)
    assert says in found and bool(found) == bool(says)
