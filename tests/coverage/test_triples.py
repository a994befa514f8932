"""Triples of what touches communication: what a case meets, and what could be met."""

from __future__ import annotations

from dataclasses import replace

from test_pairs import case, shipped

from shardproof.case import WorkloadSpec
from shardproof.contract import OptimizerSpec
from tools import triples

BUCKETS = case(options={"bucket_bytes": 4096}, workload=WorkloadSpec("charnames_gpt", ("unused",)))
STRATEGY = "strategy reference/ddp"


def test_a_case_meets_each_circumstance_with_each_way_of_its_strategy() -> None:
    clipped = replace(BUCKETS, optimizer=OptimizerSpec(name="sgd", clip_norm=1.0))
    met = triples.of(clipped)
    assert ("trait unused", "bucket_bytes", STRATEGY) in met
    assert ("ranks threads", "clipping", STRATEGY) in met
    assert ("batch several-micro-batches", "clipping", STRATEGY) in met
    assert {way for _, way, _ in met} == {"bucket_bytes", "clipping"}
    assert "mesh two-ranks" not in {one for one, _, _ in met}, "it changes no call"
    processes = triples.of(replace(BUCKETS, backend="gloo"))
    assert ("ranks processes", "bucket_bytes", STRATEGY) in processes
    assert not triples.of(case())


def test_a_triple_that_nobody_with_the_way_can_meet_is_not_possible() -> None:
    found = triples.table([BUCKETS])
    assert ("trait unused", "bucket_bytes", STRATEGY) in found.quick
    assert ("mesh odd", "bucket_bytes", STRATEGY) in found.open
    assert ("ranks processes", "bucket_bytes", STRATEGY) in found.open
    assert not {one for one, _, _ in found.open} & {
        *("mesh axis-of-one", "batch fewer-than-stages", "trait unused")
    }
    possible = len(found.met) + len(found.open)
    assert f"{possible} possible triples" in found.sentence()


def test_what_only_other_cases_have_is_possible_and_not_met() -> None:
    found = triples.table([case()], [BUCKETS])
    assert not found.met
    assert ("trait unused", "bucket_bytes", STRATEGY) in found.open


def test_most_triples_of_the_scenarios_are_met() -> None:
    found = triples.table(shipped())
    share = len(found.met) / (len(found.met) + len(found.open))
    assert share >= 0.94, f"{found.sentence()}: run `python -m tools.cover --triples`"
