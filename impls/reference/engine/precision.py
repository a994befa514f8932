"""Mixed precision as a policy: the dtypes of compute, reduction, outputs and stored state.

    parameters   what forward and backward compute with, and what is sent when parameters travel
    reduce       what gradients are summed over the ranks in
    output       what the model's floating-point outputs are cast to
    buffers      what floating-point buffers are held in

``None`` leaves a dtype as the model was built; gradients are then summed in the dtype in which
backward made them, that of ``parameters``.  The optimizer always works in the dtype as built.
Strategies that keep whole parameters (ZeRO-1, ZeRO-2) keep them in ``parameters``, and *masters* of
what they update (engine/masters.py): ZeRO's 2 + 2 + 12 bytes a parameter (arXiv 1910.02054, section
3.1), with ``reduce: float32`` Megatron's 2 + 4 + 12.  Strategies that shard parameters (ZeRO-3,
FSDP) keep shards as built, which serve as masters, and cast what they gather.

A batch norm needs weights and running statistics of the same dtype: a policy that casts
``parameters`` must cast ``buffers`` as well.  (FSDP1 leaves batch norms out of the policy and wraps
each one separately.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardproof.contract import Refused

_TORCH = "torch."
#: The dtypes that a policy may name.
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_named(option: str, name: object) -> torch.dtype:
    """The floating-point dtype called ``name``; :class:`Refused` with the valid ones otherwise."""
    if isinstance(name, str) and name in DTYPES:
        return DTYPES[name]
    raise Refused(f"option {option!r} = {name!r} is not a dtype; valid: {', '.join(DTYPES)}, null")


@dataclass(frozen=True)
class Precision:
    """A policy; ``None`` means as built."""

    parameters: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    buffers: torch.dtype | None = None

    def compute(self, built: torch.dtype) -> torch.dtype:
        """The compute dtype of a parameter built as ``built``."""
        return self.parameters or built

    def reduction(self, built: torch.dtype) -> torch.dtype:
        """The reduction dtype of the gradient of such a parameter."""
        return self.reduce or self.compute(built)

    @property
    def as_built(self) -> bool:
        """Whether no cast is needed."""
        return self == Precision()

    def cast_buffers(self, module: nn.Module) -> None:
        """Cast the floating-point buffers of ``module`` to the policy's dtype.

        As in torch's FSDP they are cast once, and updated in that dtype from then on.
        """
        if self.buffers is None:
            return
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    # Bound anew under its name, so that it stays registered where it was.
                    setattr(owner, name, buffer.to(self.buffers))

    def cast_frozen(self, module: nn.Module) -> None:
        """Cast the frozen parameters of ``module`` to the compute dtype.

        For those who keep whole parameters and cast the trained ones on their way into buckets.
        """
        for parameter in module.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(self.compute(parameter.dtype))

    def check_norms(self, module: nn.Module, remedy: str = "") -> None:
        """Raise :class:`Refused` for a batch norm with weights of another dtype than its running
        statistics, which torch cannot compute.
        """
        for name, part in module.named_modules():
            if not isinstance(part, _BatchNorm) or part.weight is None or part.running_mean is None:
                continue
            weights = self.compute(part.weight.dtype)
            statistics = self.buffers or part.running_mean.dtype
            if weights != statistics:
                raise Refused(
                    f"option 'precision.buffers': {name!r} ({type(part).__name__}) would have "
                    f"weights in {weights} and running statistics in {statistics}, which torch "
                    "refuses; "
                    f"{remedy or f'set precision.buffers to {str(weights).removeprefix(_TORCH)}'}"
                )

    def cast_inputs(self, inputs: Tensor) -> Tensor:
        """``inputs`` for forward: floating-point ones in the compute dtype."""
        return cast(inputs, self.parameters)

    def cast_outputs(self, outputs: Tensor) -> Tensor:
        """``outputs`` for the caller (differentiable)."""
        return cast(outputs, self.output)


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``tensor`` cast to ``dtype`` if it is floating-point and ``dtype`` is given."""
    if dtype is None or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)
