"""Bytes between nodes equal the formula, and a group that lies otherwise is seen."""

from __future__ import annotations

import copy
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from made_case import made_case

from shardproof.case import WorkloadSpec
from shardproof.cases.runner import run_cases
from shardproof.checks import Outcome, traffic
from shardproof.checks.results import CaseResult
from shardproof.cluster import reported as report
from shardproof.evidence.account import Account
from shardproof.evidence.assembled import Figures
from shardproof.report import forms
from shardproof.runs.run_folder import RunFolder, read
from shardproof.verdicts import kind

NET = WorkloadSpec("dyadic_mlp", global_batch=8, params={"width": 16, "layers": 4})
CASES = {
    case.id: case
    for case in (
        made_case(
            "reference/fsdp",
            {"replicate": 2, "shard": 2},
            id="hybrid_shard",
            options={"sharding_strategy": "HYBRID_SHARD"},
            workload=NET,
        ),
        made_case(
            "reference/fsdp",
            {"shard": 4},
            id="chunks",
            options={"reshard_after_forward": 2},
            workload=NET,
        ),
        made_case(
            "reference/pipeline",
            {"pipe": 4},
            id="pipeline",
            workload=replace(NET, traits=("tied_over_units",)),
        ),
        made_case(
            "reference/hybrid",
            {"pipe": 2, "shard": 2, "tensor": 2},
            id="hybrid",
            options={"data": "zero2"},
            workload=NET,
        ),
    )
}


@pytest.fixture(scope="module")
def judged() -> dict[str, Figures]:
    """What the ranks of each case left."""
    found = {}

    def keep(_: CaseResult, account: dict[str, Any]) -> None:
        figures = Account.from_dict(account).figures
        assert figures is not None, account
        found[figures.case.id] = figures

    results, _ = run_cases([*CASES.values()], 1, lambda _: None, on_account=keep)
    assert {kind(result.verdict) for result in results} == {"pass"}, results
    return found


def _laid(figures: Figures, ranks_per_node: int) -> Figures:
    """The same, as if so many ranks had shared a node."""
    laid = copy.deepcopy(figures)
    for record in laid.records:
        record.node = record.rank // ranks_per_node
    return laid


def _rows(outcome: Outcome) -> dict[tuple[str, str], tuple[str, str, str | None]]:
    assert outcome.status == "pass", outcome.message
    rows = outcome.figures["between_nodes"]
    return {
        (row["axis"], row["operation"]): (row["lies"], row["across"], row.get("promised"))
        for row in rows
    }


def test_hybrid_shard_gathers_inside_nodes_and_sums_shards_across(
    judged: dict[str, Figures],
) -> None:
    found = _rows(traffic.decide(_laid(judged["hybrid_shard"], 2)))
    for operation in ("all_gather", "reduce_scatter"):
        assert found["shard", operation] == ("inside nodes", "0", "0")
    lies, across, promised = found["replicate", "all_reduce"]
    assert lies == "across nodes" and Fraction(across) > 0 and across == promised


def test_of_a_hybrid_mesh_the_tensor_axis_stays_inside(judged: dict[str, Figures]) -> None:
    found = _rows(traffic.decide(_laid(judged["hybrid"], 2)))
    assert found["tensor", "all_reduce"] == ("inside nodes", "0", "0")
    for axis, operation in (("shard", "reduce_scatter"), ("pipe", "send")):
        lies, across, promised = found[axis, operation]
        assert lies == "across nodes" and Fraction(across) > 0 and across == promised


def test_chunks_of_other_ranks_cross_nodes_and_fail(judged: dict[str, Figures]) -> None:
    """As many bytes in as many calls, along the same axis: only where they go is another."""
    laid = _laid(judged["chunks"], 2)
    lies, across, promised = _rows(traffic.decide(laid))["shard", "all_gather"]
    assert lies == "partly across nodes" and Fraction(across) > 0 and across == promised
    swapped = {(0, 1): (0, 2), (2, 3): (1, 3)}
    for record in laid.records:
        for call in record.traffic:
            call.group = swapped.get(tuple(call.group), call.group)
    outcome = traffic.decide(laid)
    assert outcome.status == "fail"
    assert "axis shard, all_gather: " in outcome.message
    assert "bytes go between nodes over all ranks, fsdp promises" in outcome.message


def test_messages_of_a_pipeline_cross_where_a_boundary_does(judged: dict[str, Figures]) -> None:
    """Of the boundaries of four stages on two nodes one crosses, and so do tied ends."""
    laid = _laid(judged["pipeline"], 2)
    lies, across, promised = _rows(traffic.decide(laid))["pipe", "send"]
    assert lies == "partly across nodes" and Fraction(across) > 0 and across == promised
    for call in laid.records[0].traffic:
        call.peer = 2 if call.peer == 1 else call.peer
    outcome = traffic.decide(laid)
    assert outcome.status == "fail" and "axis pipe, send: " in outcome.message


def test_on_one_machine_nothing_is_told(judged: dict[str, Figures]) -> None:
    for figures in (judged["hybrid"], _laid(judged["hybrid"], 8)):
        assert "between_nodes" not in traffic.decide(figures).figures


def test_the_report_says_which_axis_crosses(judged: dict[str, Figures]) -> None:
    outcome = traffic.decide(_laid(judged["hybrid"], 2))
    results = [CaseResult("c", CASES["hybrid"], "pass", checks=[outcome])]
    rows = {(str(row[2]), str(row[4])): row for row in report.traffic(results).rows}
    assert rows["tensor (2)", "all_reduce"][3] == "inside nodes"
    assert rows["pipe (2)", "send"][3] == "across nodes"
    assert not report.traffic([CaseResult("c", CASES["hybrid"], "pass")]).rows


def test_each_node_tells_what_it_holds(tmp_path: Path) -> None:
    case = CASES["hybrid_shard"]
    held = {str(rank): {"device": {"parameters": 10 + rank, "other": 7}} for rank in range(4)}
    figures = {"resident": held, "promised": {rank: held[rank] for rank in "012"}}
    figures["promised"] |= {"3": {"device": {"parameters": 12}}}
    memory = Outcome("memory", "pass", figures=figures)
    with RunFolder(tmp_path / "run", ["run"]) as folder:
        folder.tell_cluster(
            {"nodes": [{"name": f"node{n}", "ranks": [2 * n, 2 * n + 1]} for n in (0, 1)]}
        )
        folder.plan([case])
        folder.add(CaseResult(case.id, case, "pass", checks=[memory]))
    run = read(tmp_path / "run")
    (table,) = report.tables(run)
    assert [tuple(map(str, row))[4:] for row in table.rows] == [
        ("node0", "0, 1", "21", "= formula"),
        ("node1", "2, 3", "25", "24"),
    ]
    assert '<h2 id="nodes">Nodes</h2>' in forms.html(run)
