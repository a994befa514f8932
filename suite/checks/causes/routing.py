"""A cause of a wrong loss: tokens that a router sent elsewhere."""

from __future__ import annotations

import torch

from shardproof.evidence.assembled import Evidence
from shardproof.workloads import for_case

#: Buffers of a mixture of experts, and what it means that one differs.
_SAID = {
    "load": "tokens chose other experts than in the oracle",
    "dropped": "other tokens were dropped than in the oracle",
}


def of_choices(evidence: Evidence, step: int) -> str:
    """A sentence on tokens that went elsewhere in ``step``; empty: none did, or no layer
    counts."""
    truth = evidence.truth.steps[step]
    layers = [*truth.routed[0]] if truth.routed else []
    held = evidence.observed(step, "after_update", "buffers").tensors if layers else {}
    for name, said in ((f"{layer}.{leaf}", _SAID[leaf]) for layer in layers for leaf in _SAID):
        for coordinate, own in enumerate(truth.buffers):
            copies = held.get(name, {})
            # As many copies of each coordinate: ranks of other axes hold the same.
            each = max(1, len(copies) // len(truth.buffers))
            found, expected = copies.get(coordinate * each), own[name].tolist()
            if found is not None and found.tolist() != expected:
                counts = f"expected {expected}, found {found.tolist()}"
                return f"{said}: {name!r} of data coordinate {coordinate}: {counts}"
    return ""


def of_experts(evidence: Evidence, step: int) -> str:
    """A sentence on a wrong loss of ``step`` where all experts were chosen as often as due."""
    truth, workload = evidence.truth.steps[step], for_case(evidence.case)
    layers = [*truth.routed[0]] if truth.routed else []
    if not layers or workload.family.terms(workload.params) or of_choices(evidence, step):
        return ""
    # A system that moves biases starts to count again, and one may show no buffers: then no count
    # tells anything.
    held = evidence.observed(step, "after_update", "buffers").tensors
    counts = [own[f"{layer}.load"] for own in truth.buffers for layer in layers]
    if not {f"{layer}.load" for layer in layers} <= {*held} or not any(map(torch.any, counts)):
        return ""
    return (
        "every expert was chosen as often as in the oracle (buffers 'load'): most likely the "
        "outputs of the experts, their order or their weights are wrong"
    )
