"""Bytes of ranks that train alone against counts made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof.costs import cost_model_class
from shardproof.costs.model_facts import ModelFacts, TensorFacts

#: 6 and 4 elements of 8 bytes; a frozen one is never sent.
TENSORS = (
    TensorFacts("a", (2, 3), "float64"),
    TensorFacts("b", (4,), "float64"),
    TensorFacts("c", (5,), "float64", trainable=False),
)


def facts(**fields: Any) -> ModelFacts:
    usual: dict[str, Any] = {"axes": {"replicate": 3}, "options": {"every": 2}}
    return ModelFacts(parameters=TENSORS, micro_batches=(1, 1, 0), steps=4, **(usual | fields))


@pytest.mark.parametrize("strategy", ["local_sgd", "diloco"])
def test_parameters_are_sent_where_ranks_meet_and_nothing_in_between(strategy: str) -> None:
    sent = [cost_model_class(strategy)(facts(step=step)).payload() for step in range(4)]
    assert sent == [0, 2 * 2 * 80, 0, 2 * 2 * 80]
    (flow,) = cost_model_class(strategy)(facts(step=1)).flows()
    assert (flow.axis, flow.operation, flow.calls) == ("replicate", "all_reduce", 3)
    assert cost_model_class(strategy)(facts()).control_limit() == 0


def test_what_the_outer_optimizer_keeps_counts_as_state() -> None:
    """Momentum of SGD is one copy of 80 bytes, the start and the outer momentum two more."""
    held = cost_model_class("diloco")(facts()).resident(0, 1, 1)
    assert held == {"parameters": 120, "masters": 0, "gradients": 80, "optimizer_state": 3 * 80}
    without = cost_model_class("diloco")(facts(options={"outer_momentum": 0})).resident(0, 1, 1)
    assert without["optimizer_state"] == 2 * 80
    assert cost_model_class("local_sgd")(facts()).resident(0, 1, 1)["optimizer_state"] == 80


def test_a_rank_without_data_has_no_gradients_and_no_state() -> None:
    held = cost_model_class("local_sgd")(facts()).resident(2, 1, 1)
    assert (held["gradients"], held["optimizer_state"]) == (0, 0)
