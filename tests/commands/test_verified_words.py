"""What `verify` says of a run whose evidence holds and whose cases do not."""

from __future__ import annotations

from shardproof.commands.verify import Verified


def test_verify_says_how_many_cases_failed() -> None:
    told = Verified(3, 0, 1, [], broken=2).sentence()
    failed = "2 of 3 cases failed, as its evidence shows"
    assert told == f"verified: 3 cases judged again, 1 left out; {failed}"
    assert "failed" not in Verified(3, 0, 1, []).sentence()
