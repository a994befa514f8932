"""docs/options.md names the options that implementations take, no more and no fewer."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardproof import registry
from shardproof.contract import ScalerSpec
from shardproof.impls.deepspeed import checkpoint as deepspeed_checkpoint
from shardproof.impls.deepspeed import json_form, ulysses
from shardproof.impls.deepspeed import pipeline as deepspeed_pipeline
from shardproof.impls.ecosystem import fairscale_sharded_ddp
from shardproof.impls.pytorch import context as pytorch_context
from shardproof.impls.pytorch import ddp as pytorch_ddp
from shardproof.impls.pytorch import (
    ddp_compressed,
    ddp_hook,
    ddp_optimizer,
    distributed_sampler,
    fsdp1,
    fsdp2,
    hybrid,
    own_schedule,
    pipelining,
    post_local_sgd,
    tensor_parallel,
    tensor_plan,
    zero_redundancy_optimizer,
)
from shardproof.impls.pytorch.checkpoint import options as torch_options
from shardproof.impls.reference import (
    async_sgd,
    context,
    ddp,
    diloco,
    elastic,
    expert,
    local_sgd,
    naive_ddp,
    pipeline,
    tensor,
    zero1,
    zero2,
    zero3,
)
from shardproof.impls.reference import hybrid as reference_hybrid
from shardproof.impls.reference.engine.choices import Checkpoints, Compress, OfBoth
from shardproof.impls.reference.engine.precision import Precision
from shardproof.impls.reference.fsdp import schedule
from shardproof.impls.reference.pipeline import schedule_option
from shardproof.impls.reference.units.plan import Wrap

PAGE = (Path(__file__).parents[2] / "docs/options.md").read_text()
#: Implementation -> what its options become.
TAKEN: dict[str, Any] = {
    "reference/naive_ddp": naive_ddp.Options,
    "reference/ddp": ddp.Options,
    "reference/local_sgd": local_sgd.Options,
    "reference/diloco": diloco.Options,
    "reference/async_sgd": async_sgd.Options,
    "reference/elastic": elastic.Options,
    "reference/zero1": zero1.Options,
    "reference/zero2": zero2.Options,
    "reference/zero3": zero3.Options,
    "reference/fsdp": schedule.Options,
    "reference/tensor": tensor.Options,
    "reference/context": context.Options,
    "reference/expert": expert.Options,
    "reference/pipeline": pipeline.Options,
    "reference/hybrid": reference_hybrid.Options,
    "reference/algorithms": OfBoth,
    "pytorch/ddp": pytorch_ddp.Options,
    "pytorch/zero_redundancy_optimizer": zero_redundancy_optimizer.Options,
    "pytorch/post_local_sgd": post_local_sgd.Options,
    "pytorch/fsdp1": fsdp1.Options,
    "pytorch/fsdp2": fsdp2.Options,
    "pytorch/tensor_parallel": tensor_parallel.Options,
    "pytorch/context": pytorch_context.Options,
    "pytorch/pipelining": pipelining.Options,
    "pytorch/hybrid": hybrid.Options,
    "pytorch/ddp_hook": ddp_hook.Options,
    "pytorch/ddp_compressed": ddp_compressed.Options,
    "pytorch/ddp_optimizer": ddp_optimizer.Options,
    "pytorch/own_schedule": own_schedule.Options,
    "pytorch/tensor_plan": tensor_plan.Options,
    "pytorch/distributed_sampler": distributed_sampler.Options,
    "deepspeed/pipeline": deepspeed_pipeline.Options,
    "deepspeed/ulysses": ulysses.Options,
    "ecosystem/fairscale_sharded_ddp": fairscale_sharded_ddp.Options,
}
WITHOUT = {"plain", "pytorch/collectives", "reference/sampler", "reference/stopping"}
WITHOUT |= {"pytorch/elastic_distributed_sampler", "deepspeed/moe"}
WITHOUT |= {name for name in registry.names() if name.startswith("ecosystem/")} - {*TAKEN}


def rows(heading: str) -> list[list[str]]:
    """Cells of the table under the one heading that holds ``heading`` in backticks."""
    (section,) = [s for s in PAGE.split("\n## ")[1:] if f"`{heading}`" in s.partition("\n")[0]]
    lines = re.findall(r"^\| (`.+) \|$", section, re.MULTILINE)
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]


def defaults(found: list[list[str]], column: int) -> dict[str, Any]:
    """Name -> default, of rows."""
    return {row[0].strip("`"): yaml.safe_load(row[column].strip("`")) for row in found}


def fields(kind: Any) -> dict[str, Any]:
    """Name -> default, of a dataclass; a mapping's is empty."""
    found = {field.name: field.default for field in dataclasses.fields(kind)}
    for field in dataclasses.fields(kind):
        if (field.default, field.default_factory) == (dataclasses.MISSING, dataclasses.MISSING):
            found[field.name] = "required"
    found |= {name: {} for name, value in found.items() if value is dataclasses.MISSING}
    return {n: list(value) if isinstance(value, tuple) else value for n, value in found.items()}


def test_every_implementation_is_on_the_page() -> None:
    shown = {*TAKEN, *WITHOUT, *(f"deepspeed/zero{stage}" for stage in range(4))}
    assert shown == set(registry.names())


@pytest.mark.parametrize("name", TAKEN)
def test_names_and_defaults_are_those_of_the_options(name: str) -> None:
    short = name.partition("/")[2]
    own = [row for row in rows(name) if short in row[1].split(", ")]
    assert defaults(own, 3) == fields(TAKEN[name])


def test_keys_of_deepspeed_and_their_stages() -> None:
    found = rows("deepspeed/zero0")
    told = {row[0].strip("`"): tuple(map(int, row[1].split(", "))) for row in found}
    assert told == {"stage": (0, 1, 2, 3), **json_form.STAGES}
    meant = fields(json_form.ZeroOptimization)
    del meant["stage"]
    sizes = {row[0].strip("`"): row[3].strip("`") for row in found if row[2].startswith("size")}
    assert {name: float(size) for name, size in sizes.items()} == {
        name: float(meant.pop(name)) for name in sizes
    }
    others = [row for row in found if row[0].strip("`") in meant]
    assert defaults(others, 3) == meant


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("checkpoint", Checkpoints),
        ("compress", Compress),
        ("powersgd_hook", ddp_compressed.Compress),
        ("torch.distributed.checkpoint", torch_options.Checkpoints),
        ("deepspeed.checkpoint", deepspeed_checkpoint.Checkpoints),
        ("precision", Precision),
        ("wrap", Wrap),
        ("schedule", schedule_option.ScheduleOption),
        ("scaler", ScalerSpec),
    ],
)
def test_keys_of_mappings(heading: str, kind: Any) -> None:
    assert defaults(rows(heading), 1) == fields(kind)
