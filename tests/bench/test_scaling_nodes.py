"""Cells on nodes: which links their groups go over, where these are probed, and what is told of
ranks that share cores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from local_ranks import succeed
from made_nodes import MadeNodes
from test_scaling_meshes import cell, figures, line_of, probed

from shardproof.bench import evidence, sides, timed_ranks
from shardproof.bench.arm import everybody
from shardproof.bench.lines import CellProbes
from shardproof.bench.model import probes
from shardproof.bench.model.alpha_beta import Fit, Group
from shardproof.bench.scaling import judge, modelled, tables
from shardproof.bench.scaling.modelled import lies, not_probed
from shardproof.bench.session import Measured, cell_launch, in_order
from shardproof.bench.stats import TimedStep
from shardproof.bench.subjects import ORDER, Cell, RankTimes, Room, WatchedStep

MESH = {"replicate": 2, "shard": 2}


def test_which_groups_lie_across_nodes_by_hand() -> None:
    assert lies(MESH, 2) == {"replicate": "across nodes", "shard": "inside nodes"}
    assert lies(MESH, 1) == {"replicate": "across nodes", "shard": "across nodes"}
    assert lies(MESH, 0) == {"replicate": "inside nodes", "shard": "inside nodes"}
    assert lies({"replicate": 1, "shard": 4}, 2) == {"shard": "partly across nodes"}


@pytest.mark.parametrize(
    ("mesh", "probed", "each", "says"),
    [
        (MESH, MESH, 2, ""),
        ({"replicate": 8, "shard": 2}, MESH, 2, ""),
        ({"replicate": 64}, {"replicate": 2}, 1, ""),
        (MESH, {"replicate": 1, "shard": 2}, 2, "groups along replicate lie across nodes, and"),
        (MESH, {"replicate": 1, "shard": 2}, 0, "probed on 2 ranks, which it does not cut"),
        ({"shard": 4}, {"shard": 2}, 2, "2 ranks, where they lie inside nodes"),
        ({"shard": 8}, {"shard": 4}, 2, ""),
    ],
)
def test_calls_cost_what_a_launch_over_the_same_links_probed(
    mesh: Mapping[str, int], probed: Mapping[str, int], each: int, says: str
) -> None:
    told = not_probed(mesh, probed, each)
    assert told == "" if not says else says in told


def probed_apart(ranks_per_node: int = 2) -> CellProbes:
    """Of 4 ranks: inside nodes 1 ms a message and 1 ns a byte, across 5 ms and 100 ns."""
    inside = {name: Fit(name, 2, 1e-3, 1e-9) for name in ("all_gather", "reduce_scatter")}
    across = {"all_reduce": Fit("all_reduce", 2, 5e-3, 100e-9)}
    along = {"shard": Group(2, inside, {}), "replicate": Group(2, across, {})}
    found = probed(4, {2: 0.02}, nodes=2).model_dump() | {"ranks_per_node": ranks_per_node}
    found["machine"] |= {"fits": {}, "along": along}
    return CellProbes.model_validate(found)


def test_replicas_of_shards_on_two_nodes_are_predicted_from_two_fits(tmp_path: Path) -> None:
    """Gathers and sums of shards inside nodes, and sums of what each rank keeps across them."""
    line = line_of(cell(tmp_path, "hsdp", 4), MESH, "fsdp", probed_apart())
    made = figures(line)
    gathered, scattered = 35_584 + 6 * 50_816, 4 * 47_008
    inside = 7 * 1e-3 + gathered / 2 * 1e-9 + 4 * 2 * 1e-3 + scattered * 1e-9
    across = 4 * 2 * 5e-3 + scattered / 2 * 100e-9
    assert made["communication_seconds"] == pytest.approx(inside + across)
    assert made["compute_seconds"] == pytest.approx(0.02 + 0.01 / 2)
    assert made["step_seconds"] == pytest.approx(0.025 + inside + across)
    assert made["efficiency"] == pytest.approx(0.09 / (4 * made["step_seconds"]))
    assert modelled.scorecard(line, 0.1) is not None
    assert CellProbes.model_validate(line.probed and line.probed.to_dict()) == line.probed


def test_what_was_probed_inside_a_node_says_nothing_of_a_cell_across(tmp_path: Path) -> None:
    few = probed(2, {4: 0.02}).model_copy(update={"ranks_per_node": 2})
    made = figures(line_of(cell(tmp_path, "hsdp", 4), MESH, "fsdp", few))
    assert made["efficiency"] is None
    assert made["problem"].startswith("groups along replicate lie across nodes")


# --------------------------------------------------------------------------- ranks that share cores


def on_nodes(subject: Cell, mesh: dict[str, int], count: int, each: int, cores: int) -> Measured:
    nodes = MadeNodes(count, each)
    room = Room(min(cores, nodes.places), "physical cores")
    return Measured(subject, {"ranks": mesh}, room=room, nodes=nodes)


def test_ranks_share_cores_only_where_no_other_launch_has_their_links(tmp_path: Path) -> None:
    hybrid = cell(tmp_path, "hsdp", 4)
    (one,) = in_order([on_nodes(hybrid, MESH, 2, 2, cores=2)])
    assert one.crowded and one.source is one and one.timed and one.together
    launch = one.launch(0, [0])
    assert launch.first.world == 4 and launch.at_once == 2 and "ranks" in launch.sides
    pair, more = in_order(
        [
            on_nodes(cell(tmp_path, "hsdp", 2), {"replicate": 1, "shard": 2}, 2, 2, cores=2),
            on_nodes(hybrid, MESH, 2, 2, cores=2),
        ]
    )
    assert not pair.refused and pair.launch(0, [0]).at_once == 0
    assert more.crowded, "two ranks of a node do not cross to the other"
    large = cell(tmp_path, "hsdp", 8)
    first, second = in_order(
        [
            on_nodes(hybrid, MESH, 4, 2, cores=2),
            on_nodes(large, {"replicate": 4, "shard": 2}, 4, 2, cores=2),
        ]
    )
    assert first.crowded and not second.crowded and second.source is first
    ddp = cell(tmp_path, "", 2)
    inside, across, more = in_order(
        [on_nodes(ddp.at(world), {"replicate": world}, 2, 2, cores=2) for world in (2, 4, 8)]
    )
    assert not inside.refused and across.crowded and not more.crowded
    assert across.source is across and more.source is across, "8 ranks find no place"


def test_ranks_that_cannot_share_nodes_are_not_timed(tmp_path: Path) -> None:
    """Too few places; or one rank a node, whose two have the links of all."""
    (few,) = in_order([on_nodes(cell(tmp_path, "hsdp", 4), MESH, 2, 1, cores=2)])
    assert few.refused and not few.crowded
    ddp = cell(tmp_path, "", 2).at(4)
    (alike,) = in_order([on_nodes(ddp, {"replicate": 4}, 4, 1, cores=2)])
    assert alike.refused and not alike.crowded and alike.launch(0, [0]).first.world == 2


def rows(seconds: Mapping[str, float]) -> list[TimedStep]:
    """Two blocks in which every step of a side takes as long, on 4 ranks."""
    return [
        TimedStep(0, "scaling", block, segment, side, step, rank, seconds[side])
        for block in range(2)
        for segment, side in enumerate(ORDER)
        for step in range(3)
        for rank in ((0,) if side != "ranks" else range(4))
    ]


def test_a_step_of_ranks_that_share_cores_is_told_and_no_efficiency(tmp_path: Path) -> None:
    losses = {side: [2.0, 1.9] for side in ("plain", "wrapped", "ranks")}
    more: dict[str, Any] = {"losses": losses, "room": Room(2, "physical cores"), "crowded": True}
    line = line_of(cell(tmp_path, "hsdp", 4), MESH, "fsdp", probed_apart()).model_copy(update=more)
    times = {"plain": 0.09, "wrapped": 0.1, "ranks": 0.15}
    judged = judge.conclude(line, rows(times))
    assert (judged.verdict, judged.efficiency, judged.scorecard) == ("oversubscribed", None, None)
    assert judged.reason == "4 ranks, 2 physical cores: no efficiency"
    assert judged.median_seconds == times and judged.trained_alike is True
    assert judged.modelled is not None and judged.modelled.efficiency is not None
    shown = tables.CellLine.model_validate(line.to_dict() | judged.to_dict())
    told = "\n".join(tables.remarks([shown]))
    assert "a step of ranks that share cores took 150.0 ms, by the model one" in told
    row = dict(zip(tables.HEADINGS, tables.table([shown]).rows[0], strict=True))
    assert row["E, plain T1 [95 %]"] == row["tokens/s N"] == row["achieved / predicted"] == "-"
    assert row["T_N ms"] == "150.0" and row["modelled E"].endswith("%")
    other = line.model_copy(update={"losses": losses | {"ranks": [2.5, 1.9]}})
    assert judge.conclude(other, rows(times)).verdict == "fail"
    elsewhere = line.model_copy(update={"measured_in": "another world", "crowded": False})
    assert "ranks" not in judge.conclude(elsewhere, rows(times)).median_seconds


def test_ranks_that_share_cores_compute_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cores, four ranks: the compute of a rank is that of a rank with a core of its own."""
    subject = cell(tmp_path, "hsdp", 4)
    launch = cell_launch(subject, MESH, 0, [0], together=True, at_once=2)
    told: list[tuple[str, int]] = []

    class Alone:
        def __init__(self, run: object, rank: int) -> None:
            self.rank = rank

        def segment(self, count: int, meet: Any) -> None:
            told.append(("begin", self.rank))
            for _ in range(count):
                meet()
            told.append(("end", self.rank))

    monkeypatch.setattr(probes, "Alone", Alone)
    monkeypatch.setattr(probes, "POOL_BYTES", 1 << 12)
    monkeypatch.setattr(probes, "RATE_SECONDS", 1e-4)
    watched = WatchedStep([], 0, [], 0)

    def body(rank: int, world: int) -> None:
        timed_ranks._Probing(launch, watched, everybody("in_memory", world), rank).block()

    succeed(body, 4)
    runs = len(launch.probed)
    assert len(told) == 2 * 4 * runs and sides.SEGMENT_STEPS > 0 and math.prod(MESH.values()) == 4
    for turn in range(2 * runs):
        here = told[4 * turn : 4 * turn + 4]
        assert {rank // 2 for _, rank in here} == {turn % 2}, told


def ended(rank: int) -> RankTimes:
    """What a rank returned: rank 0 was alone on two sides, and each has a quarter of the third."""
    alone = ("plain", "wrapped") if rank == 0 else ()
    losses: dict[str, list[float | None]] = {side: [2.0] for side in alone} | {"ranks": [0.5]}
    return RankTimes(
        rank,
        segment_steps=dict.fromkeys(("plain", "wrapped", "ranks"), 3),
        losses=losses,
        coordinates={"plain": None, "wrapped": None} | dict.fromkeys(alone, 0) | {"ranks": rank},
        targets=dict.fromkeys(losses, 64),
        threads=1,
        cores=[],
    )


def test_the_line_of_ranks_that_shared_cores(tmp_path: Path) -> None:
    """Their losses and their seconds, and no throughput of theirs."""
    (measured,) = in_order([on_nodes(cell(tmp_path, "hsdp", 4), MESH, 2, 2, cores=2)])
    measured.records = [[ended(rank) for rank in range(4)]]
    measured.rows = rows({"plain": 0.09, "wrapped": 0.1, "ranks": 0.15})
    line = evidence.result(measured).to_dict()
    assert (line["verdict"], line["crowded"], line["measured_in"]) == ("oversubscribed", True, None)
    assert set(line["losses"]) == set(line["median_seconds"]) == {"plain", "wrapped", "ranks"}
    assert set(line["targets_per_step"]) == set(line["tokens_per_second"]) == {"plain", "wrapped"}
    assert line["efficiency"] is None and line["trained_alike"] is True
