"""Bytes of parameter servers against counts made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof.costs import NoCostModel, cost_model_class
from shardproof.costs.model import CostModel
from shardproof.costs.model_facts import ModelFacts, TensorFacts

#: 6, 4 and 3 elements of 8 bytes; a frozen one is never sent.
TENSORS = (
    TensorFacts("a", (2, 3), "float64"),
    TensorFacts("b", (4,), "float64"),
    TensorFacts("c", (3,), "float64"),
    TensorFacts("d", (5,), "float64", trainable=False),
)
#: One worker's pull or push: 13 elements, a flag for each of 3 parameters, a version a server.
ONE, TWO = 8 * (13 + 3 + 1), 8 * (13 + 3 + 2)


def model(step: int = 0, ranks: int = 4, **options: Any) -> CostModel:
    facts = ModelFacts({"replicate": ranks}, options, TENSORS, steps=6, step=step)
    return cost_model_class("parameter_server")(facts)


def sent(ranks: int = 4, **options: Any) -> list[int]:
    """Messages of each step, in bytes of one."""
    one = TWO if options.get("servers") == 2 else ONE
    return [int(model(step, ranks, **options).payload() / one) for step in range(6)]


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        # Three workers pull and push in every step.
        ({"max_staleness": 0, "order": "in_turn"}, [6] * 6),
        ({"max_staleness": 0, "order": "in_turn", "servers": 2}, [4] * 6),
        # Pushes of three; pulls of the two that are fast, and of the slow one two steps later.
        ({"max_staleness": 2}, [3 + 2, 3 + 2, *[3 + 3] * 4]),
        # Worker 0 is met in every step, the others in every second one, two steps at once.
        ({"order": "burst"}, [3 + 1, 3 + 1 + 4] * 3),
        # Its second pull is its last turn: in step 1 it is answered, and pushes nothing.
        (
            {"max_staleness": 0, "order": "in_turn", "dies": {"worker": 0, "turns": 3}},
            [6, 3 + 2, 4, 4, 4, 4],
        ),
    ],
)
def test_messages_of_each_step(options: dict[str, Any], messages: list[int]) -> None:
    assert sent(**options) == messages
    assert model(**options).control_limit() == 0


@pytest.mark.parametrize(
    ("options", "copies"),
    [
        ({"max_staleness": 2}, [2, 2, 3]),  # the slow one pushes first in step 2
        ({"order": "burst", "max_staleness": 1}, [1, 3, 3]),
        ({"dies": {"worker": 0, "turns": 1}}, [1, 2, 2]),  # it pulls, and pushes nothing
    ],
)
def test_state_of_each_worker_is_there_from_its_first_push(
    options: dict[str, Any], copies: list[int]
) -> None:
    own = [model(momentum="by_worker", **options).resident(0, step, step) for step in range(3)]
    assert [held["optimizer_state"] // (8 * 13) for held in own] == copies
    assert model(**options).resident(0, 2, 2)["optimizer_state"] == 8 * 13


@pytest.mark.parametrize("order", ["slow", "burst"])
def test_one_worker_is_met_in_every_step(order: str) -> None:
    assert sent(2, order=order) == [2] * 6


@pytest.mark.parametrize(
    "options",
    [
        {"order": "all_orders"},
        {"order": [0, 0, 1, 1]},
        {"order": "burst", "dies": {"worker": 1, "turns": 2}},
        # No fast worker is left: the slow one comes more often.
        {"servers": 2, "dies": {"worker": 0, "turns": 2}},
    ],
)
def test_other_orders_follow_no_formula(options: dict[str, Any]) -> None:
    with pytest.raises(NoCostModel, match="no traffic formula"):
        model(**options).payload()


def test_a_server_holds_what_it_owns_and_a_worker_everything() -> None:
    """Of two, the first has the largest; SGD's momentum is one copy."""
    two = model(servers=2)
    assert two.resident(0, 1, 1) == {
        "parameters": 8 * (6 + 5),
        "masters": 0,
        "gradients": 0,
        "optimizer_state": 8 * 6,
    }
    assert two.resident(1, 1, 1)["parameters"] == two.resident(1, 1, 1)["optimizer_state"] == 8 * 7
    worker = two.resident(2, 1, 1)
    assert (worker["parameters"], worker["gradients"], worker["optimizer_state"]) == (144, 104, 0)
    assert dict(two.local(1).parameters) == {"b": 4, "c": 3} and not two.local(2).parameters
    assert model(servers=2, order=[0, 1]).why_not_measured()
    dead = model(servers=2, dies={"worker": 0, "turns": 0})
    assert dead.resident(2, 1, 1)["gradients"] == 0
