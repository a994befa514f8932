"""torch's hooks that compress: what PowerSGD's declines lies beyond it, and why not on threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_case import made_case

from shardproof.case import Case, WorkloadSpec
from shardproof.cases.leader import judge_case
from shardproof.contract import Capabilities, Refused
from shardproof.impls.pytorch.ddp_compressed import DDPCompressed
from shardproof.registry.declaration import Declaration

POWERSGD = {"compress": {"method": "powersgd_hook"}}
SMALL = {"layers": 1, "width": 16, "seq": 8}


def case(world: int = 1, *traits: str, **workload: Any) -> Case:
    fields: dict[str, Any] = {"name": "charnames_gpt", "params": SMALL, "global_batch": 4}
    return made_case(
        "pytorch/ddp_compressed",
        {"replicate": world},
        options=POWERSGD,
        workload=WorkloadSpec(traits=traits, **(fields | workload)),
        steps=3,
        checks=("equivalence",),
    )


@pytest.fixture
def declines_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank is alone with the process's generator."""
    declared = DDPCompressed.capabilities

    def capabilities(options: Any) -> Capabilities:
        return replace(declared(options), declines={}, needs=())

    monkeypatch.setattr(DDPCompressed, "capabilities", capabilities)


@pytest.mark.parametrize(
    ("traits", "verdict", "says"),
    [
        ((), "pass", ""),
        (("scalar",), "crash", "IndexError: tuple index out of range"),
        (("empty",), "crash", "cannot reshape tensor of 0 elements"),
        (("non_contiguous",), "fail", "non_contiguous.weight' at step 2"),
    ],
    ids=lambda value: "+".join(value) or "bare" if isinstance(value, tuple) else "",
)
def test_what_it_declines_lies_beyond_the_hook(
    traits: tuple[str, ...], verdict: str, says: str, tmp_path: Path, declines_nothing: None
) -> None:
    _, result = judge_case(case(1, *traits), tmp_path, tmp_path)
    assert result.verdict == verdict, result.reason
    assert says in result.reason


@pytest.mark.parametrize("trait", ["tied_over_units", "dropout_counter"])
def test_factors_are_drawn_in_the_order_in_which_gradients_arrive(
    trait: str, tmp_path: Path, declines_nothing: None
) -> None:
    """What is built first is used second here, and its matrix has another shape."""
    of_shapes = case(1, trait, name="digits_cnn", params={}, micro_batches=2)
    _, result = judge_case(of_shapes, tmp_path, tmp_path)
    assert result.verdict == "pass", result.reason


@pytest.mark.parametrize("trait", ["scalar", "empty", "non_contiguous"])
def test_it_declines_them(trait: str) -> None:
    declared = Declaration.of(DDPCompressed, POWERSGD)
    reason = declared.excludes_case(replace(case(2, trait), backend="gloo"), "")
    assert reason.startswith(f"declines trait {trait}"), reason


def test_ranks_that_draw_from_one_generator_are_no_threads() -> None:
    reason = Declaration.of(DDPCompressed, POWERSGD).excludes_case(case(2), "")
    assert reason == "needs processes, but in_memory runs its ranks as threads of one process"


def test_hooks_that_round_run_on_threads_and_take_any_shape() -> None:
    casts = Declaration.of(DDPCompressed, {"compress": {"method": "fp16_hook"}})
    assert casts.runs_on_threads
    assert not casts.declines.keys() & {"scalar", "empty", "non_contiguous"}


@pytest.mark.parametrize("method", ["powersgd_hook", "batched_hook"])
def test_powersgd_beside_what_finds_unused_parameters_is_refused(method: str) -> None:
    options = {"find_unused_parameters": True, "compress": {"method": method}}
    with pytest.raises(Refused, match=f"'find_unused_parameters' = True with {method}"):
        DDPCompressed.capabilities(options)
    DDPCompressed.capabilities({**options, "compress": {"method": "fp16_hook"}})
