"""A user's module and loss as the contract's ``Build``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.contract import CrossEntropy, LossTerm, MicroBatch, Role
from shardproof.workloads.knobs import WorkloadError
from shardproof.workloads.own import OwnWorkload

#: ``loss(outputs, targets)``: the mean over the samples of a micro-batch, or the loss of each.
Loss = Callable[[Tensor, Tensor], Tensor]


class UserModel:
    """Builds copies of ``model``, or hands out ``model`` itself where it is trained ``in_place``.

    ``units``, ``stages`` and ``roles`` are those of :class:`shardproof.OwnWorkload`; unless given,
    units are the repeated blocks of the model.
    """

    cross_entropy: CrossEntropy | None = None
    terms: Sequence[LossTerm] = ()
    #: Called with every module that is built.
    on_build: Callable[[nn.Module], object] = staticmethod(id)

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        *,
        units: Sequence[str] = (),
        stages: Callable[[nn.Module, int, int], nn.Module] | None = None,
        roles: Mapping[str, Role] | None = None,
        in_place: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model {model!r:.60} is not an instance of nn.Module")
        if isinstance(model, nn.parallel.DistributedDataParallel) or any(
            hasattr(parameter, "device_mesh") for parameter in model.parameters()
        ):
            raise ValueError(
                f"the model ({type(model).__name__}) is already distributed by torch: pass the "
                "plain module, before torch splits or wraps it"
            )
        if isinstance(units, str) or len({*units} - {""}) < len(units):
            raise ValueError(
                f"units = {units!r:.60}: give a list of module names without duplicates, "
                "e.g. ['blocks.0', 'blocks.1']; model.named_modules() lists all names"
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                f"the model ({type(model).__name__}) has no parameter that requires a gradient: "
                "there is nothing to train"
            )
        if lazy := [
            n for n, p in model.named_parameters() if isinstance(p, nn.UninitializedParameter)
        ]:
            raise ValueError(
                f"parameter {lazy[0]!r} of the model has no shape yet: call the model once with "
                "an input batch to initialize its lazy layers"
            )
        self.model, self._loss, self._in_place = model, loss, in_place
        self._shapes: dict[str, torch.Size] = {}
        self._shape = OwnWorkload(
            lambda: model, _no_loss, _no_batch, units=units, stages=stages, roles=roles
        )
        self._shape.name = f"the model ({type(model).__name__})"
        self.units: Sequence[str] = self._shape.units(model)
        self.roles: Mapping[str, Role] = self._shape.roles(model)

    @property
    def is_meta(self) -> bool:
        """Whether the model has no values yet, because it is on the device ``meta``."""
        return any(parameter.is_meta for parameter in self.model.parameters())

    @property
    def state(self) -> dict[str, Tensor] | None:
        """Name -> parameter or buffer; a tied tensor has one entry (``None``: it is on meta)."""
        if self.is_meta:
            return None
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: tensor.detach() for name, tensor in named}

    def release(self) -> None:
        """Free the values of the model, once a copy of it is trained; :meth:`take` gives others.

        Shapes are kept: systems build it again to learn what it returns.
        """
        held = {} if self.is_meta else self._named(self.model)
        # In place: systems hold shallow copies of this object.
        self._shapes.update({name: tensor.shape for name, tensor in held.items()})
        for tensor in held.values():
            tensor.data = tensor.data.new_empty(0)

    @staticmethod
    def _named(module: nn.Module) -> dict[str, Tensor]:
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def take(self, state: Mapping[str, Tensor]) -> None:
        """Give the model the values of ``state``."""
        if self.is_meta:
            self.model.load_state_dict(state, strict=False, assign=True)
            return
        named = self._named(self.model)
        self._shapes.clear()
        for name, value in state.items():
            named[name].data = value.to(named[name].device, named[name].dtype)

    def __call__(self, device: str = "cpu") -> nn.Module:
        module = self.model if self._in_place else copy.deepcopy(self.model)
        if self._shapes:
            for name, tensor in self._named(module).items():
                tensor.data = tensor.data.new_zeros(()).expand(self._shapes[name])
        module = module if self.is_meta else module.to(device)
        self.on_build(module)
        return module

    def stage(self, module: nn.Module, start: int, stop: int) -> nn.Module:
        """The part of ``module`` with units ``start`` to ``stop - 1``.

        :raises WorkloadError: nobody knows how to cut it.
        """
        chain = type(module) is nn.Sequential
        if self._shape._stages is None and not chain:
            raise WorkloadError(
                f"a {type(module).__name__} cannot be cut into stages: make it an nn.Sequential, "
                "or pass stages=f, where f(model, start, stop) returns units[start:stop]"
            )
        return self._shape.stage(module, start, stop)

    def loss(self, outputs: Tensor, micro: MicroBatch) -> Tensor:
        """The share of this micro-batch in the mean over the global batch."""
        assert self._loss is not None
        value: Any = self._loss(outputs, micro.targets)
        if not isinstance(value, Tensor):
            raise ValueError(f"loss(outputs, targets) returned {value!r:.60}, expected a tensor")
        if torch.is_grad_enabled() and not value.requires_grad:
            raise ValueError(
                "loss(outputs, targets) returned a tensor that requires no gradient: compute the "
                "loss from outputs, without detach(), item() or torch.no_grad()"
            )
        if value.dim() == 0:
            return value * micro.weights.sum()
        of_samples = value.reshape(len(value), -1).mean(1)
        return (of_samples * micro.weights.to(value.dtype)).sum()


def _no_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    raise NotImplementedError


def _no_batch(size: int, generator: Any) -> Sequence[Tensor]:
    raise NotImplementedError
