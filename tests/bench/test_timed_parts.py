"""Parts of a selection that was timed, and bundles of times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic import bench

from shardproof.bench import evidence, session
from shardproof.bench.subjects import Pair, Side
from shardproof.case import WorkloadSpec
from shardproof.commands import verify
from shardproof.contract import OptimizerSpec
from shardproof.runs import machine
from shardproof.runs.bundle.packing import pack
from shardproof.runs.header import Fingerprint
from shardproof.runs.run_folder import RunFolder, read
from shardproof.runs.run_folder import lines as stored
from shardproof.runs.shard import Cut, Shard


@pytest.fixture
def judged_elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the test puts in is told of this machine from then on."""
    told: dict[str, Any] = {}
    begun = machine.begun
    monkeypatch.setattr(machine, "begun", lambda *given: begun(*given).model_copy(update=told))
    yield told


def test_pairs_are_cut_into_parts(command: Any) -> None:
    pairs = command("bench", "--dry-run")[1].split("\n")
    halves = [command("bench", "--dry-run", "--shard", f"{n}/2")[1].split("\n") for n in (1, 2)]
    assert sorted({*halves[0], *halves[1]}) == sorted(set(pairs)) and halves[0] != halves[1]
    code, _, err = command("bench", "reference/ddp", "pytorch/ddp", "--shard", "1/2")
    assert code == 2 and "--shard is not an option of `bench pair`" in err


def test_raw_times_are_judged_again_from_a_bundle(tmp_path: Path) -> None:
    side = Side("reference/ddp")
    pair = Pair(
        name="speed",
        a=side,
        b=side,
        backend="gloo",
        world=2,
        workload=WorkloadSpec("charnames_gpt"),
        optimizer=OptimizerSpec(),
    )
    with RunFolder(tmp_path / "run", ["shardproof", "bench"]) as folder:
        line = evidence.result(session.Measured(pair, problem=("precondition", "not today")))
        times = evidence.write_times(folder, pair.id, [])
        folder.add(line.to_dict() | {"times": times}, "bench")
    found, listing = verify.verify_archive(pack(tmp_path / "run", tmp_path / "b.tgz", {}).path)
    assert found.problems == [] and [*found.others.values()] == [1]
    assert times in [f"{member.name}" for member in listing.members]


def test_times_of_two_machines_are_not_put_together(
    command: Any, tmp_path: Path, judged_elsewhere: dict[str, Any]
) -> None:
    lines = [bench(f"pair{number}") for number in range(4)]
    left_out = [
        {"kind": "left out", "reason": "", "id": line["id"], "pair": line["pair"]} for line in lines
    ]

    def part(name: str, index: int) -> str:
        cut = Cut.of(left_out, {line["id"]: line["id"] for line in lines}, Shard(index, 2))
        own = cut.names(index)
        with RunFolder(tmp_path / name, ["bench"]) as folder:
            folder.cut(cut, Shard(index, 2))
            folder.plan_others([line["id"] for line in lines if line["id"] in own])
            for line in lines:
                if line["id"] in own:
                    folder.add(line, "bench")
            folder.add({"id": "report", "comparisons": {}}, "bench report")
        return str(tmp_path / name)

    first, second = part("first", 1), part("second", 2)
    merged = tmp_path / "merged"
    code, out, err = command("merge", first, second, "--into", str(merged))
    assert code == 0, out + err
    assert {line["id"] for line in read(merged).others["bench"]} == {line["id"] for line in lines}
    # One report over all: how differences stand beside all others is of the whole.
    reports = [line for line in stored(merged) if line["kind"] == "bench report"]
    assert [len(line["comparisons"]) for line in reports] == [4]
    code, out, _ = command("merge", second, "--into", str(tmp_path / "half"))
    assert code == 3 and "part 1 of 2 is missing: 2 comparisons left out" in out
    judged_elsewhere["fingerprint"] = Fingerprint(cpu="Another 1", cores=64)
    code, _, err = command("merge", first, part("third", 2), "--into", str(tmp_path / "x"))
    assert (
        code == 2
        and "the parts have different machines: " in err
        and "(Another 1, 64 cores)" in err
    )
