"""Every cause is asked of every kind of system, with a truth that the system does not meet.

A cause that raises takes no failure's place, but says nothing: what it must find is then lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from made_case import made_case
from torch import Tensor

from shardproof.case import Case, WorkloadSpec
from shardproof.cases.leader import judge_case
from shardproof.checks.causes import gradients, scalars, state, terms, updates
from shardproof.checks.causes.buffers import of_buffers
from shardproof.contract import OptimizerSpec
from shardproof.evidence.assembled import Evidence
from shardproof.oracle.truth import TruthStep

SUPPORT = Path(__file__).parents[1] / "support"
GPT = WorkloadSpec("charnames_gpt", params={"layers": 2, "width": 16, "seq": 8}, global_batch=12)
CNN = WorkloadSpec("digits_cnn", global_batch=12, params={"layers": 1})
CLIPPED = OptimizerSpec(clip_norm=0.05, momentum=0.9, weight_decay=0.1)
ALONE: dict[str, Any] = {"options": {"every": 2}}

#: System -> mesh, and fields of its case.
SYSTEMS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "reference/naive_ddp": ({"replicate": 3}, {"workload": CNN}),
    "reference/ddp": ({"replicate": 2}, {"workload": CNN, "optimizer": CLIPPED}),
    "pytorch/ddp": ({"replicate": 2}, {"workload": CNN}),
    "reference/zero1": ({"shard": 3}, {"optimizer": CLIPPED}),
    "reference/zero2": ({"shard": 2}, {"optimizer": OptimizerSpec("adamw")}),
    "reference/zero3": ({"shard": 2}, {"optimizer": CLIPPED}),
    "reference/fsdp": ({"shard": 3}, {"optimizer": CLIPPED}),
    "reference/tensor": ({"tensor": 2}, {"optimizer": CLIPPED}),
    "reference/pipeline": ({"pipe": 2}, {"optimizer": CLIPPED}),
    "reference/hybrid": ({"pipe": 2, "tensor": 2}, {"optimizer": CLIPPED}),
    "reference/local_sgd": ({"replicate": 2}, {"optimizer": CLIPPED, **ALONE}),
    "reference/diloco": ({"replicate": 2}, ALONE),
    "reference/elastic": ({"replicate": 3}, {"membership": {"1": (0, 2)}}),
    "spoilt_buffers:Hides": ({"replicate": 2}, {"workload": CNN, "optimizer": CLIPPED}),
    "spoilt_buffers:NothingPromised": ({"replicate": 2}, {"workload": CNN}),
}
FOLLOWED = {"average": 0.9, "decay_rate": 0.5}
DROPOUT = replace(CNN, traits=("dropout_stateful",))
EXPERTS = WorkloadSpec(
    "digits_experts", global_batch=12, params={"channels": 4, "layers": 2, "scope": "global"}
)
LOSSY = {"compress": {"method": "topk", "density": 0.25}}
CASES = {
    **{name: made_case(name, mesh, id=name, **own) for name, (mesh, own) in SYSTEMS.items()},
    **{
        name: made_case("reference/ddp", {"replicate": 2}, id=name, **own)
        for name, own in {
            "compressed": {"options": LOSSY},
            "followed": {"options": FOLLOWED, "optimizer": CLIPPED},
            "stateful dropout": {"workload": DROPOUT},
            "loss terms": {"workload": EXPERTS},
        }.items()
    },
}


def _case(name: str) -> Case:
    case = replace(CASES[name], checks=("equivalence",), steps=3)
    return replace(case, workload=GPT) if case.workload.name == GPT.name else case


def _moved(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor + 1
    generator = torch.Generator().manual_seed(1)
    return tensor + torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)


def _spoilt(step: TruthStep) -> TruthStep:
    """A truth from which the system is far."""

    def moved(tensors: Any) -> Any:
        return None if tensors is None else {name: _moved(t) for name, t in tensors.items()}

    kinds = {kind: moved(getattr(step, kind)) for kind in ("gradients", "clipped", "parameters")}
    buffers = [moved(own) for own in step.buffers]
    return replace(step, loss=step.loss * 1.37, buffers=buffers, **kinds)


def _asked(evidence: Evidence) -> Iterator[Any]:
    """Each cause, ready to be asked."""
    initial = {name: _moved(t) for name, t in evidence.truth.initial.items()}
    yield partial(state.of_start, evidence, evidence.initial("parameters"), initial)
    buffers = evidence.initial("buffers")
    moved = {name: _moved(t) for name, t in buffers.first().items()}
    yield partial(state.of_start, evidence, buffers, moved, "buffers")
    yield partial(state.of_buffers_at_start, evidence)
    for step, truth in enumerate(evidence.truth.steps):
        evidence.truth.steps[step] = _spoilt(truth)
        shares = {n: 1.37 * loss for n, loss in enumerate(truth.losses)}
        yield partial(scalars.of_loss, evidence, step, shares)
        yield partial(terms.of_terms, evidence, step, 1.37 * truth.loss)
        yield partial(gradients.beside_loss, evidence, step, "", 1.37)
        if not evidence.case.changes_members:
            yield partial(scalars.of_evaluation, evidence, step, 1.37 * truth.loss, truth.loss)
        for own in evidence.trajectories:
            observed = own.observed(step, "gradients_final", "gradients")
            yield partial(gradients.of_gradients, own, step, observed)
            if truth.clipped is not None:
                clipped = own.observed(step, "after_clip", "gradients")
                yield partial(gradients.of_clipping, own, step, clipped)
            yield partial(updates.of_update, own, step, own.truth.steps[step].parameters)
        for rank in evidence.ranks:
            norm = float(truth.norm)
            yield partial(scalars.of_norm, evidence, step, rank, 1.37 * norm, norm)
        held = evidence.observed(step, "after_update", "buffers").first()
        for name in list(truth.buffers[0] if truth.buffers else ())[:2]:
            if name in held:
                yield partial(of_buffers, evidence, step, name, 0, held[name])
                # What nothing explains: every try is made.
                yield partial(of_buffers, evidence, step, name, 0, _moved(held[name]))
        yield partial(state.of_reload, evidence, evidence, step)
        evidence.truth.steps[step] = truth


@pytest.mark.parametrize("name", CASES)
def test_no_cause_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.syspath_prepend(str(SUPPORT))
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    account, result = judge_case(_case(name), tmp_path, tmp_path / "oracles")
    evidence = account.figures
    assert isinstance(evidence, Evidence), result.reason
    assert result.verdict == "pass", result.reason
    asked = list(_asked(evidence))
    assert len(asked) >= 15
    for ask in _asked(evidence):
        assert isinstance(ask(), str)
