"""What compressed reductions keep: clean systems pass, and wrong residuals are told in words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from made_case import made_case
from torch import Tensor

from shardproof.case import Case, WorkloadSpec
from shardproof.cases.runner import run_cases
from shardproof.checks import compression
from shardproof.checks.causes.gradients import of_kept, of_sent
from shardproof.checks.numbers import FP64_BOUND, relative_frobenius
from shardproof.contract import OptimizerSpec

TOPK = {"method": "topk", "density": 0.1}
ONE_BIT = {"method": "onebit"}


def case(name: str, compress: dict[str, object], seed: int, **fields: object) -> Case:
    small = {"layers": 1, "width": 16, "seq": 8}
    workload = WorkloadSpec("charnames_gpt", (), seed, global_batch=12, params=small)
    usual: dict[str, object] = {
        "options": {"compress": compress},
        "workload": workload,
        "checks": ("equivalence", "compression"),
        "steps": 3,
        "optimizer": OptimizerSpec("adamw", lr=0.01),
    }
    return made_case(name, **(usual | fields))  # type: ignore[arg-type]


def test_clean_systems_pass_over_seeds_and_worlds() -> None:
    """Equal bits are asked of what is only chosen or rounded; one rank keeps nothing."""
    cases = [
        case(
            f"reference/{name}",
            compress,
            seed,
            id=f"{name} {compress['method']} {ranks} {seed}",
            mesh={"replicate" if name == "ddp" else "shard": ranks},
        )
        for name, compress in (("ddp", TOPK), ("zero1", ONE_BIT))
        for ranks in (1, 2, 3, 4, 5)
        for seed in (0, 7)
    ]
    results, _ = run_cases(cases, 2, lambda result: None)
    assert {result.id: (result.verdict, result.reason) for result in results} == {
        each.id: ("pass", "") for each in cases
    }
    for result in results:
        (told,) = [outcome for outcome in result.checks if outcome.check == "compression"]
        if " 1 " in result.id:
            assert told.status == "skip"
        else:
            assert told.status == "pass" and told.figures["compared"] > 0
            assert bool(told.figures["bitwise"]) == ("topk" in result.id)


def test_a_lane_that_holds_no_loss_is_refused() -> None:
    """Elsewhere the system would be held to what loses nothing."""
    lossy = case("reference/ddp", ONE_BIT, 0, mesh={"replicate": 2}, lane="bitwise")
    exact = case("reference/ddp", TOPK, 0, mesh={"replicate": 2}, lane="bitwise", id="exact")
    low = case("reference/ddp", TOPK, 0, mesh={"replicate": 2}, lane="working_precision", id="low")
    results, _ = run_cases([lossy, exact, low], 2, lambda result: None)
    by_id = {result.id: result for result in results}
    assert by_id["exact"].verdict == "pass"
    for name in ("c", "low"):
        assert by_id[name].verdict == "refused"
        assert "write lane: fp64" in by_id[name].reason


def test_nothing_kept_is_nothing_to_judge() -> None:
    told = compression.decide(SimpleNamespace(compared={}))  # type: ignore[arg-type]
    assert told.status == "skip"


WANTED, SENT = torch.tensor([3.0, -2.0, 1.0, 0.5]), torch.tensor([3.0, -2.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("kept", "says"),
    [
        (torch.zeros(4), "the residual is zero"),
        (WANTED, "the residual still contains what was sent"),
        (0.5 * (WANTED - SENT), "the residual is 0.5 times what was not sent"),
        (torch.tensor([9.0, 8.0, 7.0, 6.0]), ""),
    ],
)
def test_a_wrong_residual_is_told_in_words(kept: Tensor, says: str) -> None:
    assert of_kept([("w", kept, WANTED, SENT)]) == says


def test_residuals_that_are_right_only_together_are_told() -> None:
    apart = torch.tensor([1.0, 0.0, -1.0, 2.0])
    left = WANTED - SENT
    two = [("w", left + apart, WANTED, SENT), ("w", left - apart, WANTED, SENT)]
    assert of_kept(two).startswith("each rank keeps the global residual")


@pytest.mark.parametrize(
    ("sums", "says"),
    [
        (2 * SENT, "every gradient is 2 times too large (2 = ranks)"),
        (
            SENT.flip(0),
            "other elements are sent than expected: 2 of 2 expected elements are missing, 2",
        ),
        (SENT.abs(), "signs are lost"),
        (SENT * torch.tensor([-1.0, 1.0, 1.0, 1.0]), "1 of 4 signs are flipped"),
    ],
)
def test_a_wrong_sum_is_told_in_words(sums: Tensor, says: str) -> None:
    assert of_sent({"w": sums}, {"w": SENT}, ["w"], {"ranks": 2}).startswith(says)


@pytest.mark.parametrize(
    ("moved", "off", "ok"),
    [(0.0, 0.9e-12, True), (0.0, 2e-12, False), (1e-10, 5e-10, True), (1e-10, 2e-9, False)],
)
def test_the_bound_of_a_factor_follows_the_condition(moved: float, off: float, ok: bool) -> None:
    factor = torch.ones(8, dtype=torch.float64)

    def kept(by: float) -> SimpleNamespace:
        return SimpleNamespace(steps=[SimpleNamespace(kept={"w.factor@0": factor * (1 + by)})])

    evidence = SimpleNamespace(truth=kept(0.0), rounded=kept(moved))
    close = relative_frobenius(FP64_BOUND)
    compare = compression._conditioned(evidence, 0, "w.factor@0", close)  # type: ignore[arg-type]
    assert compare(factor * (1 + off), factor).ok == ok
