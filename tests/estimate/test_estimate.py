"""An estimate equals what the memory ledger counts here: state exactly, activations within 5 %."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from shardproof import estimate, workloads
from shardproof.case import Case
from shardproof.cases.runner import run_cases
from shardproof.errors import SelectionError
from shardproof.estimate import activations, figures, own, shapes
from shardproof.estimate.shapes import Batch, Shape
from shardproof.scenarios.load import load_text
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed

TEXT = """\
name: asked
about: estimates against the ledger
sees: [nothing]
workload: {name: charnames_gpt, global_batch: 48, micro_batches: 1, params: {width: 64, seq: 32}}
matrix:
  implementation: [reference/ddp, reference/naive_ddp]
  backend: in_memory
  mesh: {replicate: [1, 2, 4]}
  optimizer: adamw
  lane: working_precision
  precision: [{label: A32, built: float32}, {label: B8, built: bfloat16}]
include:
  - reason: shards
    implementation: [reference/zero1, reference/zero2, reference/zero3, reference/fsdp]
    mesh: {shard: [2, 3]}
    precision: {label: A32, built: float32}
checks: [memory]
steps: 2
"""


class WithLoss(nn.Module):
    """A model and its loss: what a step runs forward."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        work = workloads.for_case(case)
        self.model, self.build = work.skeleton, work.build_for(0)
        micro = work.batch(0, case.data_coordinates)[0].windows[0][0]
        self.micro = micro

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.build.loss(self.model(tokens), self.micro)


def test_20_cases_hold_what_is_estimated() -> None:
    cases = expand(load_text(TEXT, "asked.yaml"), installed())
    assert len(cases) == 20
    results, _ = run_cases(cases, 2, lambda result: None)
    for result in results:
        assert result.verdict == "pass", result.reason
        case, found = result.case, result.checks[0].figures
        work = workloads.for_case(case)
        module, micro = work.skeleton, work.batch(0, case.data_coordinates)[0].windows[0][0]
        module = module.to(getattr(torch, case.dtype))
        ours = estimate(module, "adamw", impl=case.implementation, mesh=case.mesh)
        assert ours.state == found["bytes_held"], result.case.id
        assert ours.whole == found["bytes_whole"]
        kept, why_not = own.counted(module, (micro.inputs,), own.facts_of_module(
            module, "adamw", case.mesh, {}
        ))
        assert not why_not
        peaks = [p.get("activations", 0) for p in found["peaks"]["0"].values()]
        print(case.id, kept, peaks)
