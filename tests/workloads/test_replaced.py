"""A model that replaces what its cases are judged with is refused before any case."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from made_case import made_case

from shardproof.case import WorkloadSpec
from shardproof.registry import preflight
from shardproof.workloads import own
from shardproof.workloads.knobs import WorkloadError
from shardproof.workloads.wall import standing

MODEL = """
import torch
from torch import nn
from shardproof import OwnWorkload

{first}


def model():
    {inside}
    return nn.Linear(4, 3)


mine = OwnWorkload(
    model=model,
    loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, reduction="none"),
    batch=lambda n, g: (torch.randn(n, 4, generator=g), torch.randint(3, (n,), generator=g)),
)
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes the module ``patching``; what it may replace comes back after the test."""
    for module, name in [(math, "gcd"), (json, "loads"), (torch.optim.SGD, "step")]:
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(first: str = "", inside: str = "pass") -> str:
        sys.modules.pop("patching", None)
        own.load.cache_clear()
        (tmp_path / "patching.py").write_text(MODEL.format(first=first, inside=inside))
        return "patching:mine"

    return write


def tried(path: str) -> tuple[str, list[str]]:
    case = made_case("reference/ddp", {"replicate": 1}, workload=WorkloadSpec(path))
    return preflight.try_workload(case)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import math; math.gcd = lambda *a: 1", "math.gcd"),
        ("import json; json.loads = lambda text: {}", "json.loads"),
        ("torch.optim.SGD.step = lambda self, closure=None: None", "torch.optim.sgd.SGD.step"),
    ],
)
@pytest.mark.parametrize("when", ["first", "inside"])
def test_what_judges_cannot_be_replaced(
    written: Callable[..., str], when: str, text: str, name: str
) -> None:
    fault, _ = tried(written(**{when: text}))
    assert f"workload 'patching:mine' replaces {name}, which the suite needs" in fault


def test_what_belongs_to_a_model_may_be(written: Callable[..., str]) -> None:
    sound = (
        "own = torch.nn.functional.layer_norm",
        "torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1).step()",
        "torch.optim.lr_scheduler.LambdaLR(torch.optim.AdamW([torch.ones(1)]), lambda n: 1.0)",
        "import json.tool, hashlib",
    )
    assert tried(written("\n".join(sound))) == ("", [])


def test_what_is_there_later_is_no_replacement() -> None:
    with standing("mine"):
        sys.modules["shardproof.later"] = ModuleType("shardproof.later")
        sys.modules["shardproof.later"].added = lambda: None  # type: ignore[attr-defined]
    del sys.modules["shardproof.later"]
    with (
        pytest.raises(WorkloadError, match=r"hashlib\.sha256"),
        pytest.MonkeyPatch.context() as patch,
        standing("mine"),
    ):
        patch.setattr(hashlib, "sha256", lambda data: data)
