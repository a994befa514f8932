"""PyTorch's ``DistributedDataParallel`` with any optimizer.

    step     forward, backward, clip    as pytorch/ddp: gradients are all-reduced
             update                     the optimizer's affair, with all that it sends

``optimizer`` is ``package.module:name`` of a function ``make(groups, settings)``: ``groups`` are
what torch's optimizers take as parameters, ``settings`` the optimizer as data
(:class:`~shardproof.contract.OptimizerSpec`; its ``kind`` and ``arguments`` are torch's class of
that name and what it takes).  What it gives has ``step``, ``zero_grad`` and ``param_groups``, whose
learning rates are set before every step.

It must do what torch's optimizer of these settings does.  Its state is looked for by parameter
(``optimizer.state[p]``, there or in an optimizer that it holds), and may lie on any ranks.  Where
none is found by torch's names, the case is refused: SGD without momentum needs none.

Cost: nothing is promised.  Numbers: as DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardproof.contract import (
    Batch,
    Capabilities,
    Depth,
    Kind,
    Observe,
    OptimizerSpec,
    Piece,
    Point,
    Refused,
    StepResult,
)
from shardproof.impls.pytorch.ddp import Options as DDPOptions
from shardproof.impls.pytorch.ddp import PyTorchDDP
from shardproof.impls.reference.engine.optimizer import build_optimizer, param_groups
from shardproof.impls.reference.engine.options import own_function_of, parse_options

#: Of an optimizer: attributes in which wrappers keep the one that they wrap.
WRAPPED = ("optim", "optimizer", "_optimizer", "base_optimizer", "inner")
#: What is asked of one.
ASKED = ("step", "zero_grad", "param_groups")


def usual(groups: list[dict[str, Any]], settings: OptimizerSpec) -> torch.optim.Optimizer:
    """torch's own optimizer."""
    return build_optimizer(settings, groups)


@dataclass(frozen=True)
class Options(DDPOptions):
    """DDP's options, and the path of the function that makes the optimizer.

    DDP finds unused parameters unless told otherwise: an optimizer has to leave them alone.
    """

    find_unused_parameters: bool = True
    optimizer: str = "shardproof.impls.pytorch.ddp_optimizer:usual"

    def maker(self) -> Callable[..., Any]:
        """The function that makes the optimizer; torch's own classes take other arguments."""
        gives = "an optimizer with step, zero_grad and param_groups"
        found = own_function_of("optimizer", self.optimizer, "groups", "settings", gives=gives)
        if isinstance(found, type) and found.__module__.startswith("torch."):
            raise Refused(
                f"option 'optimizer' = {self.optimizer!r}: this class of torch cannot be called "
                "with (groups, settings); name a function of (groups, settings) that returns e.g. "
                f"{found.__name__}(groups, **settings.arguments)"
            )
        return found


class DDPWithOptimizer(PyTorchDDP):
    """The adapter for DDP with another optimizer."""

    strategy = "ddp_optimizer"
    depth: ClassVar[Depth] = "family"
    options_type: ClassVar[type[Options]] = Options
    options: Options

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """DDP's capabilities; the optimizer can be imported."""
        parse_options(Options, options).maker()
        return super().capabilities(options)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer over all trained parameters."""
        make = self.options.maker()
        groups = param_groups(self.spec, self.trainable)
        plain = [{**group, "params": [p for _, p in group["params"]]} for group in groups]
        for group in plain:
            group.pop("param_names", None)
        made: torch.optim.Optimizer = make(plain, self.spec)
        lacking = [name for name in ASKED if not hasattr(made, name)]
        if lacking:
            raise self._refused(
                f"it must return an optimizer, but returned a {type(made).__name__}, "
                f"which has no {' or '.join(lacking)}"
            )
        if any("lr_scale" not in group for group in made.param_groups):
            raise self._refused(
                "the optimizer's param_groups must keep all keys of the param_groups passed to "
                "it, e.g. 'lr_scale'"
            )
        #: Slot -> the ranks that hold it.
        self.holders: dict[str, list[int]] = {}
        return made

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """Step like DDP; before the state is read, ranks exchange which parts they hold."""

        def observing(point: Point) -> None:
            if point == "after_update":
                self._tell_holders()
            observe(point)

        return super().step(batch, observing)

    def _tell_holders(self) -> None:
        held = self.comm.all_gather_object([piece.name for piece, _ in self._slots()])
        self.holders = {}
        for rank, names in enumerate(held):
            for name in names:
                self.holders.setdefault(name, []).append(rank)
        slots = {name.rpartition(".")[2] for name in self.holders}
        wanted = {"step", "exp_avg", "exp_avg_sq"}
        if self.spec.name == "sgd":
            wanted = {"momentum_buffer"} if self.spec.momentum else set()
        if slots != wanted and not (slots <= wanted and self.scaler.is_enabled()):
            raise self._refused(
                f"the optimizer's state has the entries {', '.join(sorted(slots)) or 'none'}, "
                "but torch's optimizer has the entries "
                f"{', '.join(sorted(wanted)) or 'none'}; use the names of torch's entries, or "
                "test SGD without momentum, which has no state"
            )

    def local_state(self, kind: Kind) -> list[Piece]:
        """DDP's pieces; of the optimizer's state, the parts found here."""
        if kind != "optimizer":
            return super().local_state(kind)
        return [piece for piece, _ in self._slots()]

    def _slots(self) -> Iterator[tuple[Piece, str]]:
        """This rank's whole state, with the name of the slot."""
        state = self._state()
        for name, parameter in self.trainable.items():
            for slot, value in state.get(parameter, {}).items():
                alike = isinstance(value, Tensor) and value.shape in (parameter.shape, ())
                if alike:
                    full = f"{name}.{slot}"
                    ranks = self.holders.get(full, [])
                    own = self.comm.rank
                    number = ranks.index(own) if value.dim() and own in ranks else own
                    yield Piece.whole(full, value, replica=number), slot

    def _state(self) -> Mapping[Any, Any]:
        """State by parameter, of the optimizer or of the first one inside it that has state."""
        seen: Any = self.optimizer
        for _ in range(8):
            state = getattr(seen, "state", None)
            if isinstance(state, Mapping) and any(isinstance(key, Tensor) for key in state):
                return state
            inner = next((getattr(seen, n) for n in WRAPPED if hasattr(seen, n)), None)
            if inner is None:
                return {}
            seen = inner
        return {}

    def _refused(self, what: str) -> Refused:
        return Refused(f"option 'optimizer' = {self.options.optimizer!r}: {what}")


IMPLEMENTATION = DDPWithOptimizer
#: Argument of ``prove`` that this adapter takes as the option of that name.
TAKES = "optimizer"
