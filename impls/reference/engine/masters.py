"""Masters: copies of tensors in a different dtype or place, which the optimizer updates.

Problem.  A bf16 parameter of size 1 cannot take a step smaller than 1/256, so updates at a usual
learning rate are rounded away.  Forward and backward therefore compute with narrow tensors, and the
optimizer updates wide copies of them.  The same copies serve offloading: where the optimizer's
tensors lie in host memory, it updates masters there.

    what                where
    working tensors     what ``Handle.param_groups`` gives: shards or whole parameters
    masters             beside them, one each; as built, or in host memory
    optimizer state     with the masters

    finish      gradients of the working tensors are final, maybe scaled by a loss scale
    clip        the factor is only remembered: fp16 would lose small gradients to it
    update      per working tensor: gradient times factor -> master.grad (a copy down), free it;
                optimizer step; master -> working tensor (a copy up, rounded)

Cost: bytes for each parameter that this rank updates: 4 for an fp32 master, and as many again for
its gradient, from the copy down until the update has used it.  There is no second gradient where
gradients are summed in the masters' dtype and place; in host memory it is kept, because allocating
there is slow.  ZeRO (arXiv 1910.02054, section 3.1): 2 + 2 + 12 = parameter + gradient + (master,
two moments).
Numbers: a master starts from the working tensor, hence rounded, as in Megatron-LM and DeepSpeed;
from then on the working tensor is its master, rounded once.
Left out: stochastic rounding; masters for a working tensor that has its dtype and place already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardproof.contract import Piece
from shardproof.impls.reference.engine.optimizer import Place, placed

if TYPE_CHECKING:
    from shardproof.impls.reference.engine.offload import HostMemory

SLOT = "master"


def gradient_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that ``tensor.grad`` must have (the tensor's own before torch 2.10)."""
    return getattr(tensor, "grad_dtype", None) or tensor.dtype


class Masters:
    """The layer between a handle's working tensors and the optimizer.

    ``groups`` are torch parameter groups of (name, working tensor) pairs, ``built`` the dtype of
    each name's master.  With ``host`` masters lie there; a tensor that has the built dtype and lies
    where masters do needs none.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        built: Mapping[str, torch.dtype],
        host: HostMemory | None = None,
    ) -> None:
        self.built, self.host = built, host
        self.working: dict[str, Tensor] = {
            name: tensor for group in groups for name, tensor in group["params"]
        }
        #: name -> (working tensor, master), where these are two.
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}
        #: name -> gradient of the master in host memory, kept from step to step.
        self.landed: dict[str, Tensor] = {}
        #: What the optimizer is built over.
        self.groups = [
            {**group, "params": [(name, self._master(name, t)) for name, t in group["params"]]}
            for group in groups
        ]
        self.factor = torch.ones((), dtype=torch.float64)

    @staticmethod
    def wanted(
        groups: Sequence[Mapping[str, Any]],
        built: Mapping[str, torch.dtype],
        host: HostMemory | None = None,
    ) -> bool:
        """Whether any tensor of ``groups`` needs a master."""
        named = (pair for group in groups for pair in group["params"])
        return any(
            host is not None or {tensor.dtype, gradient_dtype(tensor)} != {built[name]}
            for name, tensor in named
        )

    @torch.no_grad()
    def _master(self, name: str, working: Tensor) -> Tensor:
        dtype = self.built[name]
        if self.host is not None and not self.host.holds(working):
            self.landed[name] = self.host.zeros(working.shape, dtype)
        if working.dtype == dtype and (self.host is None or self.host.holds(working)):
            if gradient_dtype(working) == dtype:
                return working
            master = working.detach()  # the same memory, which can have a gradient as built
        elif self.host is None:
            master = working.detach().to(dtype, copy=True)
        else:
            master = self.host.zeros(working.shape, dtype)
            master.copy_(working)
        self.pairs[name] = working, master
        return master

    # ------------------------------------------------------------------------------------ a step

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by ``factor`` when they are copied to the masters."""
        # Where masters are: a number that a GPU has to bring to the host makes the host wait.
        self.factor = self.factor * (factor.cpu() if self.host else factor)

    @torch.no_grad()
    def copy_down(self) -> None:
        """Copy gradients to the masters and free those of the working tensors."""
        for name, working, master in self._all():
            if working.grad is None:
                master.grad = None
                continue
            # The narrow gradient goes before the next one is widened: they are never all held
            # twice.
            gradient, working.grad = working.grad, None
            master.grad = self._wide(name, gradient, master.dtype)

    @torch.no_grad()
    def copy_up(self) -> None:
        """Round the updated masters into the working tensors and free the masters' gradients."""
        for working, master in self.pairs.values():
            # Without a gradient nothing was updated; with the same memory nothing is to be copied.
            if master.grad is not None and working.data_ptr() != master.data_ptr():
                working.copy_(master)
            master.grad = None

    def after_step(self) -> None:
        """Reset the factor of gradients for the next step, even if this step's were not used."""
        self.factor = torch.ones_like(self.factor)

    def _wide(self, name: str, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """``gradient`` times the factor in ``dtype`` and the masters' memory; in place if
        possible.
        """
        if self.host is not None and not self.host.holds(gradient):
            gradient = self.landed[name].copy_(gradient)
        # Widened first: the product with a small factor would be 0 in fp16.
        return gradient.to(dtype).mul_(self.factor.to(dtype))

    def _all(self) -> Iterable[tuple[str, Tensor, Tensor]]:
        """Every updated tensor: its name, itself, and its master (itself if it has none)."""
        for name, working in self.working.items():
            yield name, working, self.pairs.get(name, (working, working))[1]

    # ----------------------------------------------------------------------------------- looking

    def gradient_pieces(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Gradients in the form that the optimizer will use, from those of the working tensors."""
        return [replace(p, tensor=self._seen(p), source=p.tensor) for p in pieces]

    def _seen(self, piece: Piece) -> Tensor:
        dtype = self.built[piece.name]
        return piece.tensor.detach().to(dtype) * self.factor.to(dtype)

    def master_pieces(self, place: Place) -> list[Piece]:
        """Masters with another dtype than their working tensors, as slots
        ``<parameter>.master``.
        """
        return [
            piece
            for name, (working, master) in self.pairs.items()
            if master.dtype != working.dtype
            for piece in placed(place, name, SLOT, master)
        ]

    @torch.no_grad()
    def restart(self) -> None:
        """After a load of parameters, restart the masters that do not round to them."""
        for working, master in self.pairs.values():
            loaded = working.to(master.device)
            rounds = master.to(loaded.dtype) == loaded
            # A master that rounds to what was loaded knows more digits of the same value.
            master.copy_(torch.where(rounds, master, loaded.to(master.dtype)))
