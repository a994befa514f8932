"""The judge's optimizers: built from an :class:`~shardproof.contract.OptimizerSpec`; named state.

Used by the oracle and by the replay of updates.  Implementations build their own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardproof.contract import OptimizerSpec

#: Trainable parameters by name.
Named = Mapping[str, torch.nn.Parameter]


def build_optimizer(spec: OptimizerSpec, named: Named) -> torch.optim.Optimizer:
    """A torch optimizer over ``named`` trainable parameters, one group per matching pattern.

    ``foreach=False``: one kernel a parameter, so that a sharded update can repeat it bit for bit.
    """
    groups = []
    for group, names in spec.assign(named):
        decay = spec.weight_decay if group.weight_decay is None else group.weight_decay
        params = [named[name] for name in names]
        # The last group, of what no pattern matches, has the spec's.
        own = {
            "lr_scale": group.lr_scale,
            "own_decay": group.weight_decay if group.pattern else None,
        }
        groups.append({"params": params, "weight_decay": decay, **own})
    if spec.name == "sgd":
        return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, foreach=False)
    return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, foreach=False)


def set_learning_rate(optimizer: torch.optim.Optimizer, spec: OptimizerSpec, step: int) -> None:
    """Set every group's learning rate to that of ``step`` times the group's scale.

    Weight decay (of groups without their own), momentum and eps are those of ``spec``, which a
    system may change from step to step (``Capabilities.follows``).
    """
    for group in optimizer.param_groups:
        group["lr"] = spec.lr_at(step) * group["lr_scale"]
        if group["own_decay"] is None:
            group["weight_decay"] = spec.weight_decay
        group.update({name: getattr(spec, name) for name in ("momentum", "eps") if name in group})


def read_slots(optimizer: torch.optim.Optimizer, named: Named) -> dict[str, Tensor]:
    """Optimizer state as ``{"<parameter>.<slot>": tensor}``; empty slots are left out."""
    return {
        f"{name}.{slot}": value
        for name, parameter in named.items()
        for slot, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def largest_terms(optimizer: torch.optim.Optimizer, named: Named) -> dict[str, Tensor]:
    """Per slot that the next step makes a sum of terms of either sign: the largest of them.

    Where terms cancel, the sum's own last place says nothing of the error of adding them.
    """
    largest: dict[str, Tensor] = {}
    names = {parameter: name for name, parameter in named.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if isinstance(optimizer, torch.optim.SGD):
                slot, kept = "momentum_buffer", group["momentum"]
                terms = [parameter.grad, parameter.detach() * group["weight_decay"]]
            else:
                slot, kept = "exp_avg", group["betas"][0]
                terms = [parameter.grad * (1 - kept)]
            before = optimizer.state[parameter].get(slot)
            terms += [] if before is None else [before * kept]
            largest[f"{names[parameter]}.{slot}"] = torch.stack([t.abs() for t in terms]).amax(0)
    return largest


def load_slots(optimizer: torch.optim.Optimizer, named: Named, slots: Mapping[str, Tensor]) -> None:
    """Put state read by :func:`read_slots` (or observed elsewhere) into ``optimizer``."""
    for full_name, value in slots.items():
        name, _, slot = full_name.rpartition(".")
        if name in named:
            optimizer.state[named[name]][slot] = value.clone()
