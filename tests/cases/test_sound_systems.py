"""Sound systems of others pass, and a fault of the same kind beside each is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_case import made_case

from shardproof import prove
from shardproof.case import WorkloadSpec
from shardproof.cases.runner import run_cases
from shardproof.checks import GENERAL
from shardproof.checks.results import CaseResult
from shardproof.contract import OptimizerSpec, ScalerSpec

HERE = Path(__file__).parents[1] / "support"
HERE_IS = "sound_systems:"
ADAMW = OptimizerSpec("adamw", lr=0.003, weight_decay=0.1, clip_norm=0.05)
NARROW = {"lane": "working_precision", "dtype": "bfloat16"}
TABLED, ROOTLESS = ({"workload": WorkloadSpec(f"{HERE_IS}{n}")} for n in ("tabled", "rootless"))
#: System, mesh, fields of the case, verdict, what the reason says.
ROWS: list[tuple[str, dict[str, int], dict[str, Any], str, str]] = [
    *((f"{HERE_IS}DDP", {"replicate": n}, TABLED, "pass", "") for n in (1, 3, 5)),
    (f"{HERE_IS}OtherTable", {"replicate": 2}, TABLED, "fail", "rank 1 starts 'table' from"),
    (f"{HERE_IS}DDP", {"replicate": 2}, {"optimizer": ADAMW}, "pass", ""),
    *((f"{HERE_IS}FSDP2", {"shard": n}, ROOTLESS, "pass", "") for n in (1, 2, 5)),
    (f"{HERE_IS}FSDP2", {"shard": 3}, {"optimizer": ADAMW}, "pass", ""),
    *(("pytorch/fsdp2", {"shard": n}, {**ROOTLESS, "steps": 4}, "pass", "") for n in (2, 3, 5)),
    *(
        ("pytorch/fsdp2", {"shard": 2}, {**ROOTLESS, "steps": 4, "options": options}, "pass", "")
        for options in (
            {"reshard_after_forward": False},
            {"reshard_after_forward": True},
            {"prefetch_backward": 2},
            {"accumulate_without_communication": True},
            {"recompute_every": 1},
        )
    ),
    (
        "pytorch/fsdp2",
        {"shard": 2},
        {
            "workload": WorkloadSpec(f"{HERE_IS}rootless", params={"frozen": True}),
            "options": {"recompute_every": 1},
        },
        "pass",
        "",
    ),
    (
        # Step 1 overflows: its gradients grow by those of the branch, and the momentum in step 2.
        "reference/pipeline",
        {"pipe": 1},
        {
            "workload": WorkloadSpec(
                "charnames_gpt",
                traits=("conditional_late_step", "overflow_on_one_rank"),
                params={"layers": 1, "width": 16, "seq": 8},
            ),
            "optimizer": OptimizerSpec(momentum=0.9, scaler=ScalerSpec(initial=1024.0, interval=2)),
            "backend": "in_memory",
        },
        "pass",
        "",
    ),
    (f"{HERE_IS}ClipsInside", {"replicate": 3}, {"optimizer": ADAMW}, "pass", ""),
    (
        f"{HERE_IS}ClipsInside",
        {"replicate": 3},
        {"optimizer": OptimizerSpec(clip_norm=0.05)},
        "pass",
        "",
    ),
    (f"{HERE_IS}ClipsTwice", {"replicate": 2}, {"optimizer": ADAMW}, "fail", "one-step replay"),
    (
        f"{HERE_IS}MyFSDP",
        {"shard": 2},
        {"workload": WorkloadSpec("digits_penalty")},
        "skip",
        "declines second_derivative: the parameters of a unit are gathered for one forward",
    ),
    (f"{HERE_IS}RingOfPositions", {"tensor": 3}, {}, "pass", ""),
    (
        f"{HERE_IS}DDP",
        {"replicate": 2},
        {"workload": WorkloadSpec(f"{HERE_IS}narrow"), **NARROW},
        "pass (working precision only)",
        "",
    ),
    (
        f"{HERE_IS}DDP",
        {"replicate": 1},
        {"workload": WorkloadSpec(f"{HERE_IS}narrow"), "lane": "bitwise", "dtype": "float32"},
        "pass",
        "",
    ),
    (
        f"{HERE_IS}DDP",
        {"replicate": 2},
        {"workload": WorkloadSpec(f"{HERE_IS}narrow"), "lane": "bitwise", "dtype": "float32"},
        "precondition",
        "has no version in a wider dtype than float32",
    ),
]


@pytest.fixture(scope="module")
def results() -> list[CaseResult]:
    cases = []
    for number, (name, mesh, fields, *_) in enumerate(ROWS):
        usual: dict[str, Any] = {
            "workload": WorkloadSpec("charnames_gpt", params={"layers": 1, "width": 16, "seq": 8}),
            "checks": GENERAL,
            "steps": 3,
        }
        cases.append(made_case(name, mesh, id=f"{number}", **(usual | fields)))
    found: list[CaseResult] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("PYTHONPATH", str(HERE))
        run_cases(cases, 2, found.append)
    return sorted(found, key=lambda result: int(result.id))


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_verdict(results: list[CaseResult], number: int) -> None:
    *_, verdict, says = ROWS[number]
    assert results[number].verdict == verdict, results[number].reason
    assert says in results[number].reason, results[number].reason


def sampled(name: str, backend: str = "gloo") -> dict[str, str]:
    rows = prove(f"{HERE_IS}{name}", workload="epochs", worlds=(1, 2), backends=(backend,))
    return {row.case: f"{row.verdict}: {row.reason}" for row in rows.itertuples()}


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE))


@pytest.mark.usefixtures("importable")
def test_a_loader_draws_one_number_when_it_begins() -> None:
    told = sampled("Loader")
    wrong = {case: said for case, said in told.items() if not said.startswith(("pass", "skip"))}
    assert wrong == {} and any(said.startswith("pass") for said in told.values())


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("name", "says"),
    [("DrawsTwice", "global generator of torch"), ("SeedsByTheLoader", "epoch 0 differs")],
)
def test_no_order_depends_on_it(name: str, says: str) -> None:
    told = sampled(name)
    assert any(said.startswith("fail") and says in said for said in told.values()), told


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(("name", "verdict"), [("Saves", "pass"), ("Forgets", "fail")])
def test_prove_takes_plans_of_checkpoints(name: str, verdict: str) -> None:
    plans = [{"label": "resumed", "save_at": 2}]
    of = {"workload": f"{HERE_IS}tabled", "worlds": (2,), "checkpoints": plans}
    rows = prove(f"{HERE_IS}{name}", **of)
    assert [*rows.verdict] == [verdict], [*rows.reason]
    assert "checkpoint" in rows.rerun[0]
    assert verdict == "pass" or "checkpoint: " in rows.reason[0]


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("name", "says"), [("ByRank", ""), ("ForgetsItsGenerator", "before a resume and after it")]
)
def test_state_and_order_that_are_each_ranks_own(name: str, says: str) -> None:
    told = sampled(name, "in_memory")
    failed = [said for said in told.values() if said.startswith("fail")]
    assert any(said.startswith("pass") for said in told.values()), told
    assert bool(failed) == bool(says) and any(says in said for said in failed or [""]), told


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(("coefficient", "verdict"), [(0.0, "pass"), (0.1, "fail")])
def test_nothing_depends_on_how_the_batch_is_cut(coefficient: float, verdict: str) -> None:
    work = WorkloadSpec(f"{HERE_IS}routed", global_batch=12, params={"coefficient": coefficient})
    rows = prove("reference/ddp", workload=work, worlds=(2,), relation="cut")
    assert [*rows.verdict] == [verdict], [*rows.reason]
    assert verdict == "pass" or "\nrelations: cut does not hold" in rows.reason[0], rows.reason[0]


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("work", "verdict"),
    [
        (WorkloadSpec(f"{HERE_IS}routed", global_batch=12, params={"coefficient": 0.0}), "pass"),
        (WorkloadSpec(f"{HERE_IS}in_batch", global_batch=12), "pass"),
        (WorkloadSpec(f"{HERE_IS}routed", global_batch=12), "fail"),
    ],
)
def test_a_gradient_is_one_of_the_loss_unless_more_is_declared(
    work: WorkloadSpec, verdict: str
) -> None:
    """By default, whoever trains the model; a loss of several samples is the user's own affair."""
    rows = prove("reference/ddp", workload=work, worlds=(2,))
    assert [*rows.verdict] == [verdict], [*rows.reason]
    told = "equivalence: the model's gradient depends on how the batch is cut"
    assert verdict == "pass" or rows.reason[0].startswith(told), rows.reason[0]


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mean", ""),
        ("keeps_numbers", "tensors of each step are kept"),
        ("keeps_objects", "small objects grow in every step"),
    ],
)
def test_what_grows_from_step_to_step(name: str, says: str) -> None:
    rows = prove(hook=f"leaking_hooks:{name}", worlds=(2,))
    assert [*rows.verdict] == ["fail" if says else "pass"], [*rows.reason]
    assert says in rows.reason[0]


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("name", "verdicts"), [("dealt_out", {"pass"}), ("leaves_early", {"hang", "crash"})]
)
def test_a_rank_whose_whole_share_has_no_gradient(name: str, verdicts: set[str]) -> None:
    knobs = {"layers": 1, "width": 16, "seq": 8, "first_step": "head"}
    rows = prove(
        optimizer=f"{HERE_IS}{name}",
        settings="adamw",
        workload=WorkloadSpec("charnames_gpt", params=knobs),
        options={"find_unused_parameters": True},
        worlds=(3,),
    )
    assert {*rows.verdict} <= verdicts, [*rows.reason]


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("name", "verdicts"), [("dealt_out", {"pass"}), ("leaves_early", {"hang", "crash"})]
)
def test_of_several_worlds_the_largest_has_idle_shares(name: str, verdicts: set[str]) -> None:
    rows = prove(optimizer=f"{HERE_IS}{name}", settings="adamw", worlds=(2, 3))
    plain, idle = rows.to_dict("records")
    assert plain["verdict"] == "pass" and plain["case"].startswith("prove::"), plain["reason"]
    assert idle["verdict"] in verdicts, idle["reason"]
    assert idle["case"].startswith("prove[idle-shares]::")
    assert "first_step" in idle["rerun"] and "steps=4" in idle["rerun"]
