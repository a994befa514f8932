"""Cases named on the page of trigger conditions have the trigger, as plan and model tell."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardproof import axes, workloads
from shardproof.case import Case
from shardproof.impls.reference.parts.buckets import plan_buckets
from shardproof.scenarios.selection import Selection
from shardproof.scenarios.vocabulary import installed
from shardproof.workloads.draws import generators

PAGE = (Path(__file__).parents[2] / "docs/trigger-conditions.md").read_text()
#: Class, and what it is met by now; of checks no case is named.
ROWS = [
    tuple(cell.strip(" |") for cell in (line.split(" | ")[0], line.split(" | ")[2]))
    for line in PAGE.partition("| class | met before by")[2].partition("\n\n")[0].splitlines()[2:]
]
NAMED = r"(?<!check )`([a-z0-9-]+)`(?: \[([a-z0-9_]+)\])?"


def made(case: Case) -> tuple[nn.Module, Callable[[], None]]:
    """Its model, and what trains that once on the first micro-batch of the whole batch."""
    work = workloads.make(case.workload, "float64", "fp64")
    module = work.build_for(0)()
    work.load(module)
    batch = work.whole_batch(0)

    def train() -> None:
        work.family.loss(work.params, module(batch.inputs), batch).backward()

    return module, train


def idle(case: Case) -> bool:
    return not all(case.workload.cut(case.data_coordinates))


def several(case: Case) -> bool:
    return max(len(w) for share in case.workload.cut(case.data_coordinates) for w in share) > 1


def has_an_empty_bucket(case: Case) -> bool:
    parameters = [p for p in made(case)[0].parameters() if p.requires_grad]
    limit = case.options.get("bucket_bytes")
    first = case.options.get("first_bucket_bytes", limit)
    order = range(len(parameters))[::-1]
    buckets = plan_buckets(order, parameters, first, limit) if limit else []
    return any(not any(parameters[i].numel() for i in bucket) for bucket in buckets)


def changes_buffers_in_place(case: Case) -> bool:
    module, train = made(case)
    before = {name: (b.data_ptr(), b.clone()) for name, b in module.named_buffers()}
    train()
    return any(
        before[name][0] == b.data_ptr() and not torch.equal(before[name][1], b)
        for name, b in module.named_buffers()
    )


def is_strided_both_ways(case: Case) -> bool:
    """Inputs of layers that are split by columns, gradients of those that are split by rows."""
    module, train = made(case)
    strided: set[str] = set()

    def note(role: str) -> Callable[..., None]:
        def hook(_: nn.Module, *given: Any) -> None:
            tensors = [t for t in given[-1] if isinstance(t, Tensor)]
            strided.update({role} if any(not t.is_contiguous() for t in tensors) else ())

        return hook

    for name, part in module.named_modules():
        if name.endswith((".up", ".qkv")):
            part.register_forward_pre_hook(note("activations"))
        if name.endswith((".down", ".out")):
            part.register_full_backward_hook(note("gradients"))
    train()
    return strided == {"activations", "gradients"} and axes.parts(case.mesh, "widths") > 1


def shows_a_constant(case: Case) -> bool:
    """Whether the loss changes where a constant joins the hidden state."""
    module, _ = made(case)
    work = workloads.make(case.workload, "float64", "fp64")
    batch, losses = work.whole_batch(0), []
    for constant in (0.0, 1.0):
        last = [*module.get_submodule("blocks").children()][-1]
        handle = last.register_forward_hook(lambda _, __, out, c=constant: out + c)
        losses.append(float(work.family.loss(work.params, module(batch.inputs), batch).detach()))
        handle.remove()
    return abs(losses[0] - losses[1]) > 1e-6


def passes_containers(case: Case) -> bool:
    module, train = made(case)
    found: list[bool] = []
    for part in module.get_submodule("blocks").children():
        part.register_forward_hook(
            lambda _, given, out: found.append(
                not isinstance(out, Tensor) and not isinstance(given[0], Tensor)
            )
        )
    train()
    return bool(found) and all(found)


def calls_a_cell_again(case: Case) -> bool:
    module, train = made(case)
    calls: dict[str, int] = {}
    for name, part in module.named_modules():
        part.register_forward_pre_hook(
            lambda *_, name=name: calls.update({name: calls.get(name, 0) + 1})
        )
    train()
    return max(calls.values()) > 1


def differentiates(case: Case) -> bool:
    return any(getattr(part, "differentiates", False) for part in made(case)[0].modules())


def draws_under_splits(case: Case) -> bool:
    return axes.parts(case.mesh, "widths") > 1 and bool(generators(made(case)[0]))


def some(holds: Callable[[Case], bool]) -> Callable[[Sequence[Case]], bool]:
    return lambda cases: any(map(holds, cases))


def varies_in_mixed_precision(cases: Sequence[Case]) -> bool:
    mixed = [c for c in cases if c.precision and any("conditional" in t for t in c.workload.traits)]
    return len({bool(c.options.get("accumulate_without_communication")) for c in mixed}) == 2


#: Class -> whether the cases that it names have it.
HOLDS: Mapping[str, Callable[[Sequence[Case]], bool]] = {
    "data coordinates without any micro-batch in some steps": some(
        lambda c: idle(c) and "rotating_shares" in c.workload.traits
    ),
    "the same, next to ranks with two stages": some(
        lambda c: (
            idle(c)
            and "rotating_shares" in c.workload.traits
            and axes.parts(c.mesh, "layers") > 1
            and c.options.get("schedule") == "zb_v"
        )
    ),
    "what compression keeps, through a checkpoint": some(
        lambda c: c.checkpoint is not None and bool(c.options.get("compress"))
    ),
    "a bucket that holds parameters without elements alone": some(has_an_empty_bucket),
    "buffers that change in place, several micro-batches in flight, data axes under a pipeline": (
        some(
            lambda c: (
                axes.parts(c.mesh, "layers") > 1
                and c.data_coordinates > 1
                and several(c)
                and c.backend == "in_memory"
                and changes_buffers_in_place(c)
            )
        )
    ),
    "use that varies by step or micro-batch, in mixed precision, reduced in each round and once": (
        varies_in_mixed_precision
    ),
    "loss scales near the largest": some(
        lambda c: c.optimizer.scaler is not None and c.optimizer.scaler.initial > 2.0**512
    ),
    "strided activations and gradients into split layers and collectives": some(
        is_strided_both_ways
    ),
    "a constant on the hidden state, which layer norms hide": some(shows_a_constant),
    "units that take and return tensors inside of containers": some(passes_containers),
    "a model that differentiates twice": some(differentiates),
    "state along the sequence": some(calls_a_cell_again),
    "GPipe; stateful dropout under tensor splits": some(
        lambda c: c.options.get("schedule") == "gpipe" or draws_under_splits(c)
    ),
}


@cache
def cases_of(scenario: str, label: str) -> list[Case]:
    """Those that must pass."""
    chosen = Selection(scenarios=(scenario,), tier="full").cases(installed())
    start = f"{scenario}[{label}]" if label else scenario
    own = [c for c in chosen if c.id.startswith(start)]
    return [c for c in own if not (c.skip or c.xfail or "refuses" in c.expect)]


def test_every_class_that_names_cases_is_judged() -> None:
    assert {name for name, by in ROWS if re.search(NAMED, by) and by != "the same"} == set(HOLDS)


@pytest.mark.parametrize(("name", "by"), [row for row in ROWS if row[0] in HOLDS])
def test_a_named_case_has_the_trigger(name: str, by: str) -> None:
    tier = "quick" if by.endswith(", quick") else ""
    for scenario, label in re.findall(NAMED, by):
        cases = [c for c in cases_of(scenario, label) if c.id.endswith(tier)]
        assert cases and HOLDS[name](cases), f"no case of {scenario} [{label}]"


@pytest.mark.parametrize("relation", ["thawed", "cut", "split"])
def test_a_relation_that_is_named_has_a_case(relation: str) -> None:
    assert f"`{relation}`" in PAGE
    found = [*cases_of("cuts", ""), *cases_of("relations", "")]
    assert any(case.expect.get("relation") == relation for case in found)
