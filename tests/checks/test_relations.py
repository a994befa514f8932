"""Every relation holds on a sound system and breaks on a fault; stored rows decide the same."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_case import made_case

from shardproof.case import Case, WorkloadSpec
from shardproof.cases.runner import run_cases
from shardproof.checks import relations
from shardproof.contract import OptimizerSpec
from shardproof.errors import ScenarioError
from shardproof.evidence.records import ComparisonRow
from shardproof.registry.declaration import Declaration
from shardproof.scenarios.load import find, load_text
from shardproof.scenarios.matrix import expand, substitute
from shardproof.scenarios.vocabulary import installed

DECAY = OptimizerSpec(weight_decay=0.1)
NUMBERS = itertools.count()
SUPPORT = Path(__file__).parents[1] / "support"
ADAMW = OptimizerSpec("adamw", lr=3e-3, weight_decay=0.1)


def _work(*traits: str, **params: Any) -> WorkloadSpec:
    """Small, because what is asked is whether two runs agree."""
    params = {"layers": 1, "width": 16, "seq": 8} | params
    return WorkloadSpec("charnames_gpt", traits=traits, global_batch=12, params=params)


def _case(name: str, relation: str | dict[str, Any], world: int, **more: Any) -> Case:
    case = made_case(
        name,
        {"replicate": world},
        id=f"{name}-{relations.name_of(relation)}-{world}-{'-'.join(more)}-{next(NUMBERS)}",
        scenario="relations",
        workload=_work("unequal_tokens"),
        optimizer=DECAY,
        checks=("relations",),
        steps=2,
        expect={"relation": relation},
    )
    return dataclasses.replace(case, **more)


def _sharded(name: str, relation: str | dict[str, Any], world: int, **more: Any) -> Case:
    """In fp32, where every bit counts."""
    bits = {"lane": "bitwise", "dtype": "float32", "optimizer": ADAMW, "mesh": {"shard": world}}
    return _case(name, relation, world, **(bits | more))


def _same_as(implementation: str | None = None, **options: Any) -> dict[str, Any]:
    named = {"implementation": implementation} if implementation else {}
    return {"same_as": {**named, "options": options}}


def _moved(mesh: dict[str, int], to: dict[str, int], **more: Any) -> Case:
    """A hybrid whose ranks lie on other axes in the second run."""
    relation = {"same_as": {"options": {}, "mesh": to}}
    name = more.pop("name", "reference/hybrid")
    more |= {"workload": _work("unequal_tokens", layers=2), "optimizer": DECAY}
    return _case(name, relation, 4, mesh=mesh, **more)


AS_DDP = _same_as("reference/ddp")
STARTS_APART = "mutants/hybrid_starts_all_from_rank_0"
WIDE = WorkloadSpec("charnames_gpt", global_batch=24, micro_batches=2)
LOW_RANK = {"bucket_bytes": 8192, "compress": {"method": "powersgd", "rank": 2}}
ODD = _work("non_contiguous", "tied", width=20)
CNN = WorkloadSpec("digits_cnn", global_batch=12, params={"layers": 1})
ENDS = WorkloadSpec(
    "digits_cnn", ("tied_over_units",), global_batch=15, micro_batches=3, params={"layers": 4}
)
CLIP = dataclasses.replace(DECAY, clip_norm=0.05)
HOLD = [
    _case("reference/ddp", "split", 3),
    _case("reference/ddp", "permute", 3),
    _case("reference/ddp", "permute", 3, optimizer=CLIP),
    _case("reference/ddp", "world1", 1),
    _case("reference/ddp", "scale", 2),
    _case("pytorch/ddp", "scale", 2, optimizer=ADAMW, backend="gloo"),
    _case("reference/ddp", "permute", 2, workload=CNN),
    _sharded("reference/zero1", AS_DDP, 3, workload=ODD),
    _sharded("reference/zero1", AS_DDP, 2, workload=CNN),  # other rules for buffers
    _sharded("reference/zero2", AS_DDP, 3, lane="fp64", dtype="float64", optimizer=CLIP),
    _sharded("reference/fsdp", _same_as(sharding_strategy="SHARD_GRAD_OP"), 2),
    _sharded("reference/zero1", "reload", 3, workload=CNN),
    _sharded("reference/fsdp", "reload", 2, optimizer=DECAY),
    _sharded("pytorch/fsdp1", "reload", 2),
    # gloo's order of three numbers hangs on where in the message they lie.
    _case("reference/ddp", "reload", 3, workload=WIDE, backend="gloo", options=LOW_RANK),
    _moved({"pipe": 2, "tensor": 2}, {"replicate": 4}),
    _moved({"replicate": 2, "tensor": 2}, {"pipe": 2, "replicate": 2}),
]
BREAK = [
    (_case("mutants/ddp_mean_of_means", "split", 2), "split does not hold"),
    (_case("mutants/ddp_never_reduces", "permute", 2), "permute does not hold"),
    (_case("mutants/ddp_reduces_in_fp32", "world1", 1), "world1 does not hold"),
    (_case("mutants/ddp_mean_of_means", "scale", 2), "scale does not hold"),
    (
        _sharded("mutants/zero1_averages_then_multiplies", AS_DDP, 3, workload=ODD),
        "same_as does not hold",
    ),
    (_sharded("reference/zero2", AS_DDP, 3), "same_as does not hold"),  # a sum of sums
    (
        _sharded("reference/zero2", _same_as("reference/ddp", bucket_bites=1), 2),
        "the second run cannot be made: unknown option 'bucket_bites'",
    ),
    (
        _sharded("mutants/zero1_reload_restarts_counter", "reload", 2),
        "at step 1, after_update parameters",
    ),
    (
        _sharded("mutants/zero3_reload_drops_new_slots", "reload", 2),
        "the optimizer state was not loaded: it starts again with the gradients of this step",
    ),
    (
        _sharded(
            "mutants/zero1_reload_keeps_masters", "reload", 2, options={"offload": "optimizer"}
        ),
        "the update started from values other than the loaded ones (masters",
    ),
    (
        _moved(
            {"replicate": 4},
            {"replicate": 2, "tensor": 2},
            name="mutants/hybrid_starts_all_from_rank_0",
        ),
        "same_as does not hold",
    ),
]
#: A difference of the second run -> what must not be told as its cause.
NOT_TOLD = [
    (
        _sharded("reloaded:LosesBuffers", "reload", 2, workload=CNN),
        "at step 1, after_update buffers",
        "the update started from values other",
    ),
    (
        _sharded("reloaded:StartsAnywhere", "reload", 2),
        "at step 0, gradients_final",
        "the first step after the reload",
    ),
]
BY_BRANCH = _work("conditional_by_micro_batch")
STATEFUL = _work("dropout_stateful")
SKIP = [
    (_case("reference/ddp", "split", 2, workload=CNN), "by definition"),
    (_case("reference/ddp", "split", 3, workload=BY_BRANCH), "conditional_by_micro_batch"),
    (_case("reference/ddp", "scale", 2, optimizer=CLIP), "clipping off"),
    (_case("reference/ddp", "permute", 1), "nothing to exchange"),
    (_case("pytorch/ddp", "reload", 2), "pytorch/ddp refuses load_pieces: "),
    (_case("reference/ddp", "reload", 2, steps=1), "no middle"),
    (
        _case("reference/ddp", "reload", 3, backend="gloo", lane="bitwise", dtype="float32"),
        "gloo adds up in an order of its own",
    ),
    (_case("reference/ddp", "reload", 2, workload=STATEFUL), "not a piece of local state"),
    (
        _case(
            "reference/pipeline",
            "world1",
            1,
            mesh={"pipe": 1},
            options={"schedule": "zb_v"},
            workload=ENDS,
        ),
        "in another order than one process",
    ),
    (_case("reference/ddp", _same_as("plain"), 2), "plain runs at world sizes up to 1"),
]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    cases = [*HOLD, *(case for case, *_ in (*BREAK, *NOT_TOLD, *SKIP))]
    found: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SUPPORT))
        patch.setenv("PYTHONPATH", str(SUPPORT))
        run_cases(cases, 2, found.append)
    return {result.id: result for result in found}


@pytest.mark.parametrize("case", HOLD, ids=lambda case: case.id)
def test_relations_hold(results: dict[str, dict[str, Any]], case: Case) -> None:
    result = results[case.id]
    assert result.verdict == "pass", result.reason
    assert result.checks[0].figures["compared"] > 20


@pytest.mark.parametrize(("case", "says"), BREAK, ids=[case.id for case, _ in BREAK])
def test_faults_break_them(results: dict[str, dict[str, Any]], case: Case, says: str) -> None:
    result = results[case.id]
    assert result.verdict == "fail", result.reason
    assert says in result.reason


@pytest.mark.parametrize(
    ("case", "where", "cause"), NOT_TOLD, ids=[case.id for case, *_ in NOT_TOLD]
)
def test_a_reload_is_blamed_only_for_what_the_first_step_after_it_shows(
    results: dict[str, dict[str, Any]], case: Case, where: str, cause: str
) -> None:
    result = results[case.id]
    assert result.verdict == "fail", result.reason
    assert where in result.reason and cause not in result.reason, result.reason


@pytest.mark.parametrize(("case", "says"), SKIP, ids=[case.id for case, _ in SKIP])
def test_skips_give_the_reason(results: dict[str, dict[str, Any]], case: Case, says: str) -> None:
    result = results[case.id]
    assert result.verdict == "skip", result.reason
    assert says in result.reason


@pytest.mark.parametrize(
    ("row", "status"),
    [
        ({"error": 1e-15, "bound": 1e-12}, "pass"),
        ({"error": 1e-9, "bound": 1e-12}, "fail"),
        ({"error": float("nan"), "bound": 1e-12}, "fail"),
        ({"problem": "in the second run rank 1 raised"}, "fail"),
        ({"skip": "one share"}, "skip"),
        ({"tested": False}, "undecidable"),
    ],
)
def test_stored_rows_decide(row: dict[str, Any], status: str) -> None:
    place = {"step": 0, "phase": "gradients_final", "name": "w", "owner": "replica 0"}
    case = _case("reference/ddp", "split", 2)
    figures = SimpleNamespace(case=case, compared={"relations": [ComparisonRow(**place | row)]})
    assert relations.decide(figures).status == status  # type: ignore[arg-type]


def test_the_second_run_travels_as_plain_data() -> None:
    case = _case("plain", AS_DDP, 1, shares=(1, 0), loss_scale=2.0, reload_at=1)
    assert Case.from_dict(case.to_dict()) == case


def test_the_scenario_has_a_quick_tier_of_every_relation() -> None:
    (file,) = find([str(Path(__file__).parents[2] / "scenarios/conformance/data/relations.yaml")])
    quick = [case for case in expand(file, installed()) if case.tier == "quick"]
    assert {case.expect["relation"] for case in quick} == {"split", "permute", "world1", "scale"}
    assert len(quick) <= 12


def test_pairs_have_a_quick_tier_of_the_family_and_a_small_full_one() -> None:
    (file,) = find([str(Path(__file__).parents[2] / "scenarios/conformance/data/pairs.yaml")])
    cases = expand(file, installed())
    quick = [case for case in cases if case.tier == "quick"]
    assert {relations.name_of(case.expect["relation"]) for case in quick} == {"same_as", "reload"}
    assert len(quick) <= 8 and len(cases) - len(quick) <= 52
    exact = [case for case in cases if case.lane == "bitwise" and case.label == "is_ddp"]
    assert all(case.backend == "in_memory" or case.world <= 2 for case in exact)


PAIR = """\
name: small
about: an example
sees: [nothing]
workload: {name: charnames_gpt}
matrix:
  implementation:
    - name: reference/fsdp
      label: kept
      options: {reshard_after_forward: true}
      expect: {relation: RELATION}
  backend: in_memory
  mesh: {shard: 2}
  optimizer: sgd
  clip: null
checks: [relations]
"""


def test_other_options_add_to_the_cases_own_and_another_system_has_its_own() -> None:
    for told, wanted in (
        ("{same_as: {options: {prefetch_forward: 0, reshard_after_forward: null}}}", "fsdp"),
        ("{same_as: {implementation: reference/ddp, options: {bucket_bytes: 9}}}", "ddp"),
    ):
        (case,) = expand(load_text(PAIR.replace("RELATION", told)), installed())
        figures: Any = SimpleNamespace(
            case=case, declaration=Declaration(exactness="reordered-sum")
        )
        other, why = relations.derive(figures)
        assert other is not None and not why
        assert other.implementation == f"reference/{wanted}"
        if wanted == "ddp":
            assert other.options == {"bucket_bytes": 9} and other.mesh == {"replicate": 2}
        else:
            assert other.options == {"prefetch_forward": 0, "reshard_after_forward": None}
            assert other.mesh == {"shard": 2}
        assert not substitute([case], "mine:FSDP")  # a stranger has promised no such pair


@pytest.mark.parametrize(
    ("relation", "says"),
    [
        ("nosuch", "expect.relation: unknown value (nosuch)"),
        ("relod", "(relod) - did you mean reload?"),
        ("{sameas: {}}", "unknown key matrix.implementation[0].expect.relation.sameas (sameas)"),
        ("{same_as: {implementation: plian}}", "unknown implementation (plian) - did you mean"),
        ("{same_as: {implementation: reference/fsdp}}", "same_as describes the case itself"),
        ("{same_as: {options: {reshard_after_forward: true}}}", "describes the case itself"),
        ("{same_as: {}}", "describes the case itself"),
        ("{same_as: {mesh: {shard: 2}}}", "describes the case itself"),
        ("{same_as: {mesh: {shard: 3}}}", "same_as runs on 3 ranks, but the case on 2"),
    ],
)
def test_bad_relations_name_the_line_and_the_remedy(relation: str, says: str) -> None:
    with pytest.raises(ScenarioError) as error:
        expand(load_text(PAIR.replace("RELATION", relation), "f.yaml"), installed())
    assert says in str(error.value)
    assert "f.yaml:10: " in str(error.value)
    assert " - " in str(error.value)
