"""A stale parameter server: two roles, events, drain, and a replay as its oracle."""

from __future__ import annotations

import pytest
from trial_cases import case, results_of
from trial_replay import replayed

from shardproof.contract import Event, OptimizerSpec
from shardproof.oracle.replay import replay
from shardproof.workloads import make

SYSTEM = "trial_systems.parameter_server:ParameterServer"


def test_a_replay_of_its_events_gives_the_servers_numbers() -> None:
    adamw = OptimizerSpec("adamw", lr=1e-3)
    cases = [
        case(SYSTEM, {"replicate": 3}, steps=4),
        case(SYSTEM, {"replicate": 4}, steps=4, optimizer=adamw),
        case(SYSTEM, {"replicate": 3}, backend="gloo"),
    ]
    for result in results_of(replayed, cases):
        assert not result["error"], result["error"]
        assert max(result["errors"]) <= result["bound"], result
        assert result["stale"] >= 1, "nothing was stale: the trial tries nothing"
        assert result["if_fresh"] > 1e3 * result["bound"], "versions do not matter"
        server, *workers = result["losses"]
        assert server is None
        assert None not in workers


def test_events_that_are_no_history_are_named() -> None:
    plain = case(SYSTEM, {"replicate": 3})
    workload = make(plain.workload, plain.dtype, plain.lane)
    for events in ([Event(1, 0, 0, 0)], [Event(0, 0, 0, 1)]):
        with pytest.raises(ValueError, match="update 0 is impossible"):
            replay(workload, plain.optimizer, 2, events)
