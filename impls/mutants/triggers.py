"""Triggers of planted faults: small workloads, optimizers, and parts that faults share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from shardproof.case import WorkloadSpec
from shardproof.contract import GroupSpec, OptimizerSpec
from shardproof.impls.reference.engine.norm import NormPart

#: Every norm is larger than this clip.
CLIP = OptimizerSpec(clip_norm=0.05)
#: Of a fault in what a norm adds up: it clips otherwise, and by sums that others do not make.
NORM: Mapping[str, Any] = {"killed_by": ("norm", "equivalence", "traffic"), "optimizer": CLIP}
#: The first step's norm is larger than the clip, the last one's smaller.
BETWEEN = OptimizerSpec("adamw", lr=0.003, clip_norm=2)
ADAMW = OptimizerSpec("adamw", lr=0.003, weight_decay=0.1)
#: Two groups of different weight decay.
GROUPS = OptimizerSpec(
    "adamw",
    lr=0.003,
    weight_decay=0.01,
    groups=(GroupSpec(r"(bias|norm[^.]*\.weight)$", lr_scale=0.5, weight_decay=0.05),),
)
SEQUENCE: Mapping[str, Any] = {"sequence_parallel": True}

_FIELDS = {field.name for field in fields(WorkloadSpec)}


def gpts(**usual: Any) -> Callable[..., WorkloadSpec]:
    """``gpt(*traits, **values)`` with defaults for one family of faults: the byte-level GPT.

    ``values``, and the family's ``usual`` ones, are fields of the workload or knobs of the model.
    """

    def gpt(*traits: str, **values: Any) -> WorkloadSpec:
        values = usual | values
        own = {name: values.pop(name) for name in list(values) if name in _FIELDS}
        return WorkloadSpec("charnames_gpt", traits, params=values, **own)

    return gpt


#: The smallest model at which most faults die: one unit.
gpt = gpts(layers=1, width=16, seq=8, global_batch=12)
#: A second unit, for faults of what happens between two.
deep_gpt = gpts(layers=2, width=16, seq=8, global_batch=12)
#: For faults of three units, of equal buckets, and of a branch that every rank takes.
whole_gpt = gpts()


class Nothing:
    """The handle of a reduction that does not take place."""

    def wait(self) -> None:
        """Return at once."""


def exchange_decays(groups: Sequence[dict[str, Any]]) -> None:
    """Swap the weight decay of the groups."""
    decays = [group["weight_decay"] for group in groups]
    # Groups have no names: nothing but the numbers can show the exchange.
    for group, decay in zip(groups, reversed(decays), strict=True):
        group["weight_decay"] = decay


def exchange_equal(items: list[Any], sizes: Sequence[int]) -> None:
    """Swap the first two ``items`` of equal size, which no backend can tell apart."""
    first = next((i for i, size in enumerate(sizes) if sizes.count(size) > 1), None)
    if first is not None:
        twin = sizes.index(sizes[first], first + 1)
        items[first], items[twin] = items[twin], items[first]


def overflows_here(gradients: Iterable[Tensor | None]) -> bool:
    """Whether this rank's own ``gradients`` hold an infinity or NaN."""
    return any(not bool(g.isfinite().all()) for g in gradients if g is not None)


def own_parts(parts: Iterable[NormPart]) -> list[NormPart]:
    """The parts of a norm, summed over no axis."""
    return [(total, ()) for total, _ in parts]


def spend_a_step(optimizer: torch.optim.Optimizer, tensors: Iterable[Tensor]) -> None:
    """Create the optimizer's state by a step with zero gradients, which counts and applies
    decay.
    """
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    optimizer.step()
    optimizer.zero_grad()
