"""A user's module that patches torch spoils its own ranks, and no oracle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_case import made_case

from shardproof.case import WorkloadSpec
from shardproof.cases.runner import run_cases

EPS = """
import torch.nn.functional as F
from shardproof.impls.reference.ddp import ReferenceDDP

_norm = F.layer_norm
F.layer_norm = lambda x, shape, weight=None, bias=None, eps=1e-5: _norm(x, shape, weight, bias, 0.1)


class Mine(ReferenceDDP):
    pass
"""
RATE = """
import torch
from shardproof.impls.reference.ddp import ReferenceDDP

_step = torch.optim.SGD.step


def step(self, closure=None):
    for group in self.param_groups:
        group["lr"] /= 2
    try:
        return _step(self, closure)
    finally:
        for group in self.param_groups:
            group["lr"] *= 2


torch.optim.SGD.step = step


class Mine(ReferenceDDP):
    pass
"""


@pytest.mark.parametrize("text", [EPS, RATE], ids=["another eps", "half the rate"])
def test_a_module_that_patches_torch_fails_alone(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "patching.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    given = {"workload": WorkloadSpec("charnames_gpt"), "checks": ("equivalence",)}
    theirs = made_case("patching:Mine", {"replicate": 2}, **given)
    ours = replace(theirs, id="ours", implementation="reference/ddp")
    results, _ = run_cases([theirs, ours], 1, lambda result: None)
    assert {r.id: r.verdict for r in results} == {theirs.id: "fail", "ours": "pass"}, [
        (r.id, r.reason) for r in results
    ]
