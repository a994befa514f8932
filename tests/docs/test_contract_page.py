"""The example of docs/contract.md gives what it says, on 2 x 4 ranks, and is counted along data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from local_ranks import threads

from shardproof.backends import errors
from shardproof.ledgers import traffic

PAGE = (Path(__file__).parents[2] / "docs/contract.md").read_text()

pytestmark = pytest.mark.usefixtures("one_thread")


def example(leave_out: str = "") -> Any:
    """The function of the page, without some of its text."""
    found = re.search(r"```python\n# two_levels\.py\n(.*?)```", PAGE, re.DOTALL)
    assert found and leave_out in found[1], "docs/contract.md lost its example"
    space: dict[str, Any] = {}
    exec(found[1].replace(leave_out, ""), space)
    return space["sum_of_ranks"]


def test_it_sums_along_data_and_is_counted_there() -> None:
    run = example()

    def body(rank: int, world: int) -> tuple[float, set[str], int]:
        total = run()
        ledger = traffic.current()
        assert ledger is not None
        return total, {call.axis for call in ledger.calls}, len(ledger.calls)

    found, raised = threads(body, 8, ledgers=True)
    assert not any(raised), raised
    assert found == [(6.0 if rank < 4 else 22.0, {"data"}, 2) for rank in range(8)]


def test_a_rank_that_leaves_a_group_out_is_named() -> None:
    whole, less = example(), example(", 6")
    _, raised = threads(lambda rank, _: less() if rank == 7 else whole(), 8)
    assert all(isinstance(error, errors.CollectiveMismatch) for error in raised)
    says = "calls Mesh.subgroup([6, 7]), but rank 7 calls Mesh.subgroup([0, 2])"
    assert all(says in str(error) for error in raised), raised
