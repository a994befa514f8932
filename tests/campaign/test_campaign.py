"""Campaigns: every case that is drawn can be run, and can be drawn again from its id."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import here

from shardproof import registry, strategies, workloads
from shardproof.campaign import draws, systems
from shardproof.campaign.varied import other, scaled
from shardproof.case import Case
from shardproof.coverage import features, pairs, triggers
from shardproof.errors import SelectionError
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.units.plan import Wrap, plan_units
from shardproof.registry.declaration import Declaration

SUPPORT = Path(__file__).parents[1] / "support"


#: A seed by which ``DRAWN`` cases of the lists show every value of every option, and ``COUNT`` of a
#: whole campaign every trigger and feature.  The rarest value is of one system, and of one in nine
#: of its cases: each system that is added makes it rarer.
SEED, COUNT, DRAWN = 11, 1200, 2600


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    """Of the lists of systems alone."""
    return [draws.numbered_case(number, SEED) for number in range(DRAWN)]


@pytest.fixture(scope="module")
def first() -> list[Case]:
    """Of a whole campaign: cases of scenarios, varied, among them."""
    return draws.first_cases(COUNT, SEED)


def _declared(case: Case) -> Declaration:
    return Declaration.of(registry.load(case.implementation), case.options)


def test_every_drawn_case_can_be_run(first: list[Case]) -> None:
    for case in first:
        declaration = _declared(case)
        assert not declaration.problem(), case.id
        assert not declaration.excludes_case(case, ""), case.id
        workloads.check(case.workload)
        assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case


def test_no_drawn_option_turns_off_what_a_strategy_implies(first: list[Case]) -> None:
    lacking = {}
    for case in first:
        declared = _declared(case)
        implied = strategies.of(declared.strategy).implied(case.options)
        if declared.depth == "layout" and (missing := implied - declared.features):
            lacking[case.implementation] = (case.options, missing)
    assert not lacking


def test_a_feature_is_asked_for_unless_its_option_is_off() -> None:
    ddp, feature = strategies.of("ddp"), {"buffer_broadcast"}
    assert ddp.profile - ddp.implied({"broadcast_buffers": False}) == feature
    for options in ({}, {"broadcast_buffers": True}, {"other": False}):
        assert ddp.implied(options) == ddp.profile


@pytest.mark.parametrize("name", ["plain", "deepspeed/pipeline", "deepspeed/zero1"])
def test_no_system_without_a_loss_scale_is_given_one(name: str, drawn: list[Case]) -> None:
    base = next(case for case in drawn if not case.optimizer.scaler)
    axis = Declaration.of(registry.load(name), {}).axes[0]
    case = dataclasses.replace(base, implementation=name, options={}, mesh={axis: 1})
    assert scaled(case) == case
    assert "loss_scale" in _declared(case).declines


def test_wrap_policies_and_meshes_fit(drawn: list[Case]) -> None:
    for case in drawn:
        if "wrap" in case.options:
            workload = workloads.for_case(case)
            wrap = parse_options(Wrap, case.options["wrap"])
            assert len(plan_units(workload.model("meta"), wrap, workload.units)) > 1, case.id
        k = case.options.get("reshard_after_forward")
        if k is not None and not isinstance(k, bool):
            assert case.mesh["shard"] % k == 0, case.id


def test_equal_bits_are_asked_for_only_where_they_are_promised(drawn: list[Case]) -> None:
    found = [case for case in drawn if case.lane == "bitwise"]
    assert found
    assert all(case.optimizer.clip_norm is None for case in found)
    for case in found:
        if case.implementation in ("reference/zero2", "reference/zero3"):
            assert case.workload.micro_batches == 1
            assert "unequal_micro_batches" not in case.workload.traits


def test_batch_norms_get_buffers_of_their_dtype(drawn: list[Case]) -> None:
    found = [case for case in drawn if case.workload.name == systems.NORMED and case.precision]
    assert any("buffers" in case.precision for case in found)
    for case in found:
        assert case.implementation != "pytorch/fsdp1", case.id
        assert case.precision.get("buffers") == case.precision.get("parameters"), case.id


def test_ids_differ_and_repeat_the_case(first: list[Case]) -> None:
    assert len({case.id for case in first}) == len(first)
    chosen = next(case for case in first if case.precision and case.options)
    again = [draws.by_id(chosen.id)]
    assert again == [chosen]


def test_a_filter_changes_no_case(first: list[Case]) -> None:
    part = draws.first_cases(10, SEED, ["*/fsdp*"])
    assert part == [case for case in first if "/fsdp" in case.implementation][:10]


def test_every_trigger_and_every_feature_of_the_table_is_drawn(first: list[Case]) -> None:
    """Models, loss scales, checkpoints and members among them; most pairs, whatever the seed."""
    whole = pairs.table(draws.shipped().cases)
    found = pairs.table(first)
    assert {trigger for trigger, _ in found.met} == {*triggers.names()}
    assert {feature for _, feature in found.met} == {feature for _, feature in whole.met}
    assert len(found.met) > 0.85 * len(whole.met), found.sentence()


def test_what_one_rank_takes_alone_stays_on_one_rank() -> None:
    """Compression with a loss scaler: a reason speaks against that pair elsewhere."""
    both = [case for case in draws.shipped().cases if case.optimizer.scaler]
    both = [case for case in both if "compress" in case.options and case.world == 1]
    source = random.Random(0)
    varied = [other(source, case, 3) for case in both for _ in range(40)]
    meshes = {case.world for case in varied if case is not None and case.optimizer.scaler}
    assert both
    assert meshes == {1}


def test_somebody_is_left_to_work_on_another_number_of_ranks() -> None:
    served = [case for case in draws.shipped().cases if case.options.get("servers", 0) > 1]
    source = random.Random(0)
    varied = [other(source, case, 3) for case in served for _ in range(20)]
    worlds = {(case.options["servers"], case.world) for case in varied if case is not None}
    assert {world for _, world in worlds} > {3} and all(n < world for n, world in worlds)


def test_pairs_that_random_cases_meet_are_listed(first: list[Case]) -> None:
    done = here("list", "coverage", "--campaign", "40", "--seed", str(SEED))
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    met = {(trigger, feature) for trigger, feature, _, count, _ in rows if int(count)}
    assert met == pairs.table(first[:40]).met
    wanted = pairs.table(draws.shipped().cases).met
    share = f"{len(met & wanted):,} of {len(wanted):,} pairs that a scenario meets"
    assert f"40 cases drawn from seed {SEED}: {share}" in done.stderr
    assert {why for *_, count, why in rows if not int(count)} >= {"not drawn"}
    refused = here("list", "traits", "--campaign", "3")
    assert refused.returncode == 2
    assert "leave out list traits" in refused.stderr


def test_every_system_and_every_value_of_an_option_is_drawn(drawn: list[Case]) -> None:
    for system in systems.SYSTEMS:
        own = [case for case in drawn if case.implementation == system.name]
        assert own, system.name
    seen = {json.dumps(pair) for case in drawn for pair in case.options.items()}
    wanted = set(_values())
    assert wanted <= seen, wanted - seen


def _values() -> Iterator[str]:
    for system in systems.SYSTEMS:
        for name, choices in system.options.items():
            yield from (json.dumps((name, value)) for value in choices)


def test_every_backend_meets_collectives_over_send_and_recv(drawn: list[Case]) -> None:
    """Of wholes and of shards, also inside of hybrids; MPI gets as many cases as the others."""
    counts = {name: sum(c.backend == name for c in drawn) for name in draws.BACKENDS}
    assert min(counts.values()) > len(drawn) / 6, counts
    seen = {
        (case.backend, name)
        for case in drawn
        for options in (case.options, case.options.get("data_options", {}))
        for name in ("all_reduce", "reduce_scatter", "all_gather")
        if options.get(name, "backend") != "backend"
    }
    assert len(seen) == 3 * len(draws.BACKENDS), seen


def test_a_filter_that_matches_no_system_is_refused() -> None:
    with pytest.raises(SelectionError, match="matches nothing in a campaign"):
        draws.first_cases(1, 0, ["reference/zero9"])


def test_a_batch_too_small_for_equal_numbers_of_micro_batches_is_declared_away(
    drawn: list[Case],
) -> None:
    case = next(c for c in drawn if c.implementation == "pytorch/fsdp1" and c.data_coordinates > 1)
    most = case.data_coordinates * sum(case.workload.window_sizes(0))
    small = dataclasses.replace(case.workload, traits=(), global_batch=most - 1)
    reason = _declared(case).excludes_case(dataclasses.replace(case, workload=small), "")
    assert ("samples do not divide evenly" in reason) == (small.micro_batches * small.windows > 1)


def test_worlds_are_as_large_as_a_backend_takes(drawn: list[Case]) -> None:
    ranks = {math.prod(mesh.values()) for system in systems.SYSTEMS for mesh in system.meshes}
    assert max(ranks) == systems.LARGEST_GRID
    assert systems.MOST_PROCESSES in ranks
    many = [case for case in drawn if case.world > systems.MOST_PROCESSES]
    assert many
    assert {case.backend for case in many} == {"in_memory"}


def test_stages_have_units_and_windows_have_a_schedule(drawn: list[Case]) -> None:
    found = [case for case in drawn if case.mesh.get("pipe", 1) > 1]
    assert {case.implementation for case in found} >= {"reference/hybrid", "pytorch/hybrid"}
    for case in found:
        kind = registry.load(case.implementation)
        for share in case.workload.cut(case.data_coordinates):
            for window in share:
                schedule = kind.schedule(case.options, case.mesh["pipe"], len(window))
                assert schedule is not None, case.id
                assert len(schedule.place) <= case.workload.params["layers"], case.id


def test_ranks_that_serve_leave_some_to_work_and_have_no_data(drawn: list[Case]) -> None:
    served = [case for case in drawn if "servers" in case.options]
    assert {case.options["max_staleness"] for case in served} == {0, 1, 2}
    for case in served:
        setup = systems.Setup(case.options, case.mesh, case.workload.name)
        assert setup.coordinates == case.world - case.options["servers"] > 0, case.id


def test_layers_are_split_where_ranks_can_share_them(drawn: list[Case]) -> None:
    found = [case for case in drawn if case.mesh.get("tensor", 1) > 1]
    assert found
    for case in found:
        ranks, sizes = case.mesh["tensor"], case.workload.params
        assert case.workload.name != systems.NORMED, case.id
        if case.workload.name == systems.DYADIC:
            assert sizes["width"] % ranks == 0, case.id
            continue
        assert sizes["heads"] % ranks == 0, case.id
        upstream = case.implementation.startswith("pytorch/")
        assert not sizes["kv_heads"] % ranks or (not upstream and not ranks % sizes["kv_heads"])
        if upstream and case.options["sequence_parallel"]:
            assert sizes["seq"] % ranks == 0, case.id


def test_upstream_pipelines_get_windows_of_equal_parts(drawn: list[Case]) -> None:
    found = [
        case for case in drawn if case.implementation in ("pytorch/pipelining", "pytorch/hybrid")
    ]
    for case in found:
        shares = case.workload.cut(case.data_coordinates)
        assert all(len(set(window)) == 1 for share in shares for window in share), case.id


def test_a_batch_that_goes_with_nothing_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def has_schedule(name: str, setup: systems.Setup, micro_batches: int) -> bool:
        asked.append(name)
        return name == "plain"

    monkeypatch.setattr(draws, "has_schedule", has_schedule)
    assert draws.numbered_case(1, 5).implementation == "plain"
    assert len(set(asked)) > 1


def test_a_campaign_of_ones_own_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SUPPORT)
    drawn = draws.first_cases(150, 3, ["adopted:GreedyZero1"])
    assert {case.implementation for case in drawn} == {"adopted:GreedyZero1"}
    assert {tuple(case.mesh) for case in drawn} == {("shard",)}
    assert {case.world for case in drawn} == {1, 2, 3, 4, 5}
    assert "bitwise" not in {case.lane for case in drawn}
    assert draws.by_id(drawn[7].id) == drawn[7]
    for case in drawn:
        assert not _declared(case).excludes_case(case, ""), case.id
    models = {name for name in triggers.names() if name.startswith("model ")}
    assert models <= {trigger for case in drawn for trigger in triggers.of(case)}
    asked = {feature for case in drawn for feature in features.of(case)}
    assert {"loss-scaler", "optimizer sgd", "optimizer adamw", "clipping"} <= asked
    # It declares no narrow dtype, and has no reconfigure.
    assert {"precision parameters bfloat16", "precision reduce float32"}.isdisjoint(asked)
    assert all(case.is_borrowed or not case.precision for case in drawn)
    for wrong, says in (
        ("nowhere:Mine", "no module 'nowhere' here or installed"),
        (
            "adopted:Nobody",
            "in adopted; names of its own: (?!.*(Tensor|torch|annotations)).*GreedyZero1",
        ),
    ):
        with pytest.raises(SelectionError, match=says):
            draws.first_cases(1, 0, [wrong])
    with pytest.raises(SelectionError, match="mixes classes and names"):
        draws.first_cases(1, 0, ["adopted:GreedyZero1", "reference/ddp"])


@pytest.mark.parametrize(
    ("name", "code"), [("own_things:CompleteZero1", 0), ("adopted:GreedyZero1", 1)]
)
def test_it_finds_what_a_class_lacks(tmp_path: Path, name: str, code: int) -> None:
    """The second one neither clips nor decays."""
    words = ("run", "--campaign", "4", "--seed", "23", "--impl", name)
    done = here(*words, "--results", str(tmp_path / "run"), paths=[SUPPORT])
    told = done.stdout + done.stderr
    assert done.returncode == code, told
    assert ("used gradients that had not been clipped" in told) == bool(code), told
    assert ("reports no norm" in told) == bool(code), told
