"""Learning rates that a loop of the user's own sets: by a number, or by a scheduler of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from shardproof.contract import GroupSpec, OptimizerSpec

if TYPE_CHECKING:
    from shardproof.impls.reference.engine.own_loop import OwnLoop

#: Name of the group of all parameters that no pattern matches.
DEFAULT = "default"


class LoopOptimizer(torch.optim.Optimizer):
    """The optimizer of a loop as schedulers of ``torch.optim.lr_scheduler`` take it.

    ``param_groups`` has a name and a learning rate for each group, on every rank the same.
    Parameters and their state are the strategy's; ``step`` and ``zero_grad`` are the loop's.
    """

    def __init__(self, loop: OwnLoop) -> None:
        self.loop, spec = loop, loop.system.spec
        if follows_schedule(spec):
            raise ValueError(
                "the learning rate cannot be set in the loop, because it already follows a "
                "schedule (lr is a function, or warmup is set): give a number as lr, and leave "
                "warmup out"
            )
        names = [name for name, _ in loop.system.module.named_parameters()]
        groups = [
            {"params": [], "name": name_of(group), "lr": spec.lr * group.lr_scale}
            for group, _ in spec.assign(names)
        ]
        self.scales = {name_of(group): group.lr_scale for group in spec.groups}
        super().__init__(groups, {"lr": spec.lr})

    def set_lr(self, rate: float, group: str | None = None) -> None:
        """Set ``rate`` times its scale in every group, or ``rate`` in the one of this name.

        :raises ValueError: it is no rate, or there is no such group.
        """
        require_rate("lr", rate)
        names = [one["name"] for one in self.param_groups]
        if group is not None and group not in names:
            raise ValueError(f"unknown parameter group {group!r}; valid: {', '.join(names)}")
        for one in self.param_groups:
            if group in (None, one["name"]):
                scale = self.scales.get(one["name"], 1.0) if group is None else 1.0
                one["lr"] = float(rate) * scale

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step of the loop.

        :raises ValueError: a closure, which would run another forward.
        """
        if closure is not None:
            raise ValueError("step() takes no closure: run forward and backward before step()")
        self.loop.whole_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has used."""
        self.loop.zero_grad()

    def rates(self) -> dict[str, float]:
        """Name of a group -> its learning rate.

        :raises ValueError: a scheduler has set something else.
        """
        rates = {one["name"]: one["lr"] for one in self.param_groups}
        for name, rate in rates.items():
            require_rate(f"lr of the parameter group {name!r}", rate)
        return rates

    def restore(self, rates: Mapping[str, float]) -> None:
        """Set the ``rates`` of a checkpoint, for the groups that it has."""
        for one in self.param_groups:
            one["lr"] = rates.get(one["name"], one["lr"])

    def apply(self) -> None:
        """Give the rates to the optimizer that updates this rank's tensors."""
        rates, system = self.rates(), self.loop.system
        for group in system.optimizer.param_groups:
            if group["param_names"]:  # a rank may hold nothing
                [(spec, _)] = system.spec.assign(group["param_names"])
                group["lr"] = rates[name_of(spec)]


def follows_schedule(spec: OptimizerSpec) -> bool:
    """Whether the learning rate is a function of the step."""
    return bool(spec.warmup_steps) or getattr(spec, "schedule", None) is not None


def name_of(group: GroupSpec) -> str:
    """The name of a group: its pattern."""
    return group.pattern or DEFAULT


def require_rate(what: str, rate: Any) -> None:
    """Raise unless ``rate`` is a learning rate.

    :raises ValueError: it is none.
    """
    number = isinstance(rate, Real) and not isinstance(rate, bool)
    if not (number and 0 <= rate < math.inf):
        raise ValueError(f"{what} = {rate!r:.60}: give a finite number of at least 0")
