"""A sub-matrix covers what it claims, and a scenario of calls is checked as any other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from shardproof.case import WorkloadSpec
from shardproof.cases import kinds
from shardproof.cases.kinds.calls import covering
from shardproof.cases.kinds.calls import workload as calls
from shardproof.cases.kinds.calls import wrong as wrong_calls
from shardproof.comm import Send
from shardproof.workloads import WorkloadError


@pytest.mark.parametrize("operation", calls.OPERATIONS)
@pytest.mark.parametrize(("world", "layouts"), [(1, "all"), (3, "dense"), (4, "spread")])
def test_every_combination_that_some_call_can_have_is_covered(
    operation: str, world: int, layouts: str
) -> None:
    factors = calls.factors_of(operation, world, layouts, {})
    fits = calls.fits_for(operation)
    whole = [
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    ]
    possible = [row for row in whole if fits(row)]
    rows = covering.covering(factors, 2, fits, "0")
    assert all(row in possible for row in rows)
    assert _held(rows, 2) == _held(possible, 2)
    assert len(rows) <= max(len(possible), 1)


def _held(rows: list[dict[str, str]], strength: int) -> set[covering.Combination]:
    return {held for row in rows for held in itertools.combinations(row.items(), strength)}


def test_three_wise_holds_every_triple() -> None:
    factors = calls.factors_of("scatter", 4, "dense", {"dtype": ("float32", "uint8", "bool")})
    fits = calls.fits_for("scatter")
    whole = [
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    ]
    possible = [row for row in whole if fits(row)]
    rows = covering.covering(factors, 3, fits, "0")
    assert _held(rows, 3) == _held(possible, 3)
    assert len(rows) < len(possible)
    assert rows == covering.covering(factors, 3, fits, "0")


def test_fewer_factors_than_the_strength_give_every_row_and_none_that_cannot_be() -> None:
    rows = covering.covering(
        {"a": ["1", "2"], "b": ["x", "y"]}, 3, lambda row: row != {"a": "1", "b": "y"}, ""
    )
    assert sorted(map(tuple, (row.values() for row in rows))) == [
        ("1", "x"),
        ("2", "x"),
        ("2", "y"),
    ]


def test_unknown_knobs_and_values_are_refused() -> None:
    with pytest.raises(WorkloadError, match="did you mean 'strength'"):
        kinds.CALLS.check(WorkloadSpec("calls", params={"strenght": 2}))
    with pytest.raises(WorkloadError, match="must be one of 'all_reduce'"):
        kinds.CALLS.check(WorkloadSpec("calls", params={"operation": "allreduce"}))
    with pytest.raises(
        WorkloadError, match="size = 'large' is allowed only with operation: broadcast"
    ):
        kinds.CALLS.check(WorkloadSpec("calls", params={"operation": "gather", "size": "large"}))
    with pytest.raises(
        WorkloadError, match="source = 'any' is allowed only with operation: send_recv"
    ):
        kinds.CALLS.check(WorkloadSpec("calls", params={"operation": "batch", "source": "any"}))
    with pytest.raises(WorkloadError, match="no traits"):
        kinds.CALLS.check(WorkloadSpec("calls", traits=("tied",)))


def test_each_operation_but_a_barrier_has_wrong_calls_and_each_way_to_differ_has_a_world() -> None:
    for operation in calls.OPERATIONS:
        forms = set(calls.OPERATIONS[operation]["form"])
        found = list(wrong_calls.mistakes(operation, "all", {}))
        ways = {
            cell["differs"]
            for world in range(2, 6)
            for cell in wrong_calls.differing(operation, world, "one", {})
        }
        assert {cell["form"] for cell in found} <= forms
        assert bool(found) == bool(ways) == (operation != "barrier")
        assert ways == set(wrong_calls._DIFFERS[operation])
        assert not list(wrong_calls.differing(operation, 1, "one", {}))


@pytest.mark.parametrize("operation", [name for name in calls.OPERATIONS if name != "barrier"])
def test_one_rank_differs_from_the_others_and_only_it(operation: str) -> None:
    for world in range(2, 6):
        (cell,) = wrong_calls.differing(operation, world, "one", {})
        given = [wrong_calls.arguments(cell, rank, world) for rank in range(world)]
        shown = [_shown(one, operation in ("gather", "scatter")) for one in given]
        assert len({*shown[1:-1]}) <= 1
        assert shown[-1] not in shown[1:-1]
        assert shown[0] != shown[-1]


def _shown(given: dict[str, Any], one_sided: bool) -> str:
    """Arguments without what every rank has of its own: peers, and lists that only a root has."""
    if "transfers" in given:
        sent = [one for one in given["transfers"] if isinstance(one, Send)]
        return str([(one.tensor.shape, one.tensor.dtype) for one in sent])
    held = [*given["inputs"][:1], *given["outputs"][:1]]
    dtypes, sizes = {t.dtype for t in held}, [t.numel() for t in held]
    words = [dtypes, given.get("reduce"), given.get("root")]
    return str(words if one_sided else [*words, sizes])
