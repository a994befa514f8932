"""What a system lost when a fresh instance took over its pieces: told by the first step after."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardproof.evidence.assembled import Assembled, Evidence

Slots = Mapping[str, Tensor]


def of_reload(base: Evidence, reloaded: Evidence, step: int) -> str:
    """A sentence on ``step``, the first after the reload; empty: nothing is certain.

    ``base`` went on without one, and up to this step the two runs were equal.  Each sentence tells
    why parameters are others after the update: where they are not, only something else was lost
    (buffers), and there is none.  Where gradients and optimizer state have the bits of ``base`` and
    parameters do not, the update added the same to something else.
    """
    updated = [run.observed(step, "after_update", "parameters") for run in (base, reloaded)]
    if any(state.problems for state in updated) or _equal(*updated):
        return ""
    gradients = [run.observed(step, "gradients_final", "gradients") for run in (base, reloaded)]
    slots = [run.observed(step, "after_update", "optimizer") for run in (base, reloaded)]
    if any(state.problems for state in (*gradients, *slots)):
        return ""
    if not _equal(*gradients):
        return "the gradients of the first step after the reload are others, before any update"
    here, there = (_slots(state) for state in slots)
    counters = {n: (here[n], there[n]) for n in here if n.endswith(".step") and n in there}
    counted = {(float(was.max()), float(now.max())) for was, now in counters.values()}
    # After one step a fresh counter is 1, whatever the other run counted.
    anew = bool(counted) and all(now == 1.0 < was for was, now in counted)
    others = [name for name in here if not name.endswith(".step")]
    same = [name for name in others if name in there and torch.equal(here[name], there[name])]
    if anew and len(same) == len(others):
        was, now = next(iter(counted))
        return f"the step counter started again: it is {now:g} after the reload, {was:g} without"
    begin = (_begins_with(gradients[1], of, base.case.optimizer.betas[0]) for of in (here, there))
    if (anew or not counters) and [*begin] == [False, True]:
        return "the optimizer state was not loaded: it starts again with the gradients of this step"
    alike = here.keys() == there.keys() and all(was == now for was, now in counted)
    if alike and others and len(same) == len(others):
        return (
            "gradients and optimizer state are the same, so the update began from other values "
            "than were loaded (masters, or another copy of the parameters), or had another rate"
        )
    return ""


def _slots(state: Assembled) -> Slots:
    """One copy of each slot; masters are copies of parameters."""
    return {n: t for n, t in state.first().items() if not n.endswith(".master")}


def _equal(one: Assembled, other: Assembled) -> bool:
    """Whether both hold the same names and bits on every replica."""
    return one.tensors.keys() == other.tensors.keys() and all(
        torch.equal(copy, other.tensors[name][replica])
        for name, copies in one.tensors.items()
        for replica, copy in copies.items()
        if replica in other.tensors[name]
    )


def _begins_with(gradients: Assembled, slots: Slots, beta: float) -> bool:
    """Whether every momentum, or first moment, is that of its gradient alone."""
    # AdamW begins from zero: (1 - beta) g.  torch's SGD takes the first gradient as it is.
    first = {".exp_avg": 1 - beta, ".momentum_buffer": 1.0}
    found = gradients.first()
    pairs = [
        (tensor, found[own] * share)
        for end, share in first.items()
        for name, tensor in slots.items()
        if name.endswith(end) and (own := name.removesuffix(end)) in found
    ]
    return bool(pairs) and all(
        torch.allclose(tensor, made.to(tensor.dtype), rtol=1e-5, atol=0.0) for tensor, made in pairs
    )
