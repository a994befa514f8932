"""The log of collectives: what it keeps, and the first call that two ranks do not share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardproof.backends.request import Request
from shardproof.launch import process_control
from shardproof.watch import calls
from shardproof.watch.calls import Calls
from shardproof.watch.rank import Settings, Watch


def reduce(size: int, operation: str = "all_reduce") -> Request:
    tensor = torch.zeros(size)
    reduces = "sum" if operation == "all_reduce" else None
    return Request(operation, [[tensor]], [[tensor]], reduce=reduces)


def logged(folder: Path, rank: int, sizes: list[int], group: str = "ranks 0-1") -> list[calls.Call]:
    log = Calls(folder / f"rank{rank}.calls")
    for size in sizes:
        log.note(reduce(size), group, 2, rank)
    return calls.read(folder / f"rank{rank}.calls")


def test_a_log_keeps_the_last_calls_and_all_bytes(tmp_path: Path) -> None:
    log = Calls(tmp_path / "log")
    for number in range(calls.ENTRIES + 10):
        log.note(reduce(number % 7 + 1), "ranks 0-1", 2, 0)
    kept = calls.read(tmp_path / "log")
    assert [call.number for call in kept] == list(range(11, calls.ENTRIES + 11))
    assert kept[-1].in_group == calls.ENTRIES + 10
    assert kept[0].text == f"all_reduce(sum, float32[{10 % 7 + 1}])"
    assert "test_calls.py:" in kept[0].place
    (total,) = log.totals.values()
    assert total.calls == calls.ENTRIES + 10
    elements = sum(n % 7 + 1 for n in range(calls.ENTRIES + 10))
    assert (total.payload_bytes, total.logical_bytes) == (4 * elements, 4 * elements)


def test_equal_logs_agree_even_if_one_is_shorter(tmp_path: Path) -> None:
    logs = {0: logged(tmp_path, 0, [1, 2, 3]), 1: logged(tmp_path, 1, [1, 2])}
    assert calls.first_difference(logs) is None
    missing = calls.behind(logs)
    assert missing is not None and missing.in_group == 3 and {*missing.calls} == {0}
    assert missing.calls[0].text == "all_reduce(sum, float32[3])"


def test_the_first_difference_is_found_though_later_calls_agree(tmp_path: Path) -> None:
    logs = {0: logged(tmp_path, 0, [1, 2, 3, 4]), 1: logged(tmp_path, 1, [1, 5, 3, 4])}
    difference = calls.first_difference(logs)
    assert difference is not None and not difference.earlier
    assert (difference.in_group, difference.group) == (2, "ranks 0-1")
    assert difference.calls[1].text == "all_reduce(sum, float32[5])"


def test_a_difference_that_the_logs_have_lost_is_told_as_such(tmp_path: Path) -> None:
    same = [1] * (calls.ENTRIES + 5)
    logs = {0: logged(tmp_path, 0, [2, *same]), 1: logged(tmp_path, 1, [3, *same])}
    difference = calls.first_difference(logs)
    assert difference is not None and difference.earlier


def test_groups_are_counted_apart_and_messages_are_not_compared(tmp_path: Path) -> None:
    both = {}
    for rank in (0, 1):
        log = Calls(tmp_path / f"{rank}")
        log.note(reduce(1), "ranks 0-1", 2, rank)
        log.note(reduce(2 + rank), f"ranks {rank},{rank + 2} (group 3)", 2, rank)
        log.note(Request("send" if rank else "recv", [[torch.zeros(3)]]), "ranks 0-1", 2, rank)
        log.note(reduce(9), "ranks 0-1", 2, rank)
        both[rank] = calls.read(tmp_path / f"{rank}")
    assert calls.first_difference(both) is None and calls.behind(both) is None


def test_sizes_that_may_differ_are_no_difference(tmp_path: Path) -> None:
    both = {}
    for rank in (0, 1):
        log = Calls(tmp_path / f"{rank}")
        parts = [torch.zeros(3), torch.zeros(5)]
        log.note(Request("all_gather", [[parts[rank]]], [parts]), "ranks 0-1", 2, rank)
        log.note(reduce(1 + rank, "all_to_all"), "ranks 0-1", 2, rank)
        both[rank] = calls.read(tmp_path / f"{rank}")
    assert calls.first_difference(both) is None


@pytest.mark.parametrize(
    ("group", "ranks"),
    [("ranks 0-2,5", [0, 1, 2, 5]), ("rank 3", [3]), ("ranks 0,2 (group 12)", [0, 2])],
)
def test_members(group: str, ranks: list[int]) -> None:
    assert calls.members_of(group) == ranks


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"SHPCALLS, or so")
    with pytest.raises(ValueError, match="not a file of recorded calls"):
        calls.read(tmp_path / "log")


def test_a_call_that_is_under_way_is_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``all_reduce(..., async_op=True)`` and computing on keeps no other rank."""
    one, other = Watch(Settings(tmp_path), 0, 2), Calls(tmp_path / "rank1.calls")
    other.note(reduce(3), "ranks 0-1", 2, 1)
    assert one._is_awaited() == ""
    other.wait(True)
    assert one._is_awaited().startswith("rank 1 waits in call 1 on ranks 0-1, all_reduce(sum, ")
    other.wait(False)
    assert one._is_awaited() == ""
    # What DDP calls in a backward it waits for in C++: who computes nothing there waits.
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda _: other.note(reduce(4), "ranks 0-1", 2, 1))
    leaf.sum().backward()
    spent = 0.0
    monkeypatch.setattr(process_control, "activity_of", lambda *_: ("R", spent))
    assert one._is_awaited() == "", "nobody knows yet what it does"
    spent = 1000.0
    assert one._is_awaited() == "", "it computes"
    assert one._is_awaited().startswith("rank 1 waits in call 1 on ranks 0-1")
