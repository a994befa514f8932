"""PyTorch's loss scaling for the adapters.

    loss        ``scale``: times the scale                 backward: so are all gradients
    gradients   ``unscale_``: divided by it; an overflow is looked for in what this rank updates
                and, where that is a shard, agreed on over all shards (one fp32 number)
    update      ``step``: left out after an overflow       ``update``: back off, or grow

Without a policy the scaler is switched off, and all four do nothing more than torch does.
``torch.amp.GradScaler`` knows DTensors and takes the largest over their mesh; FSDP1 has its own
``ShardedGradScaler``.  Not a strategy by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from shardproof.contract import Observe, OptimizerSpec
from shardproof.impls.reference.engine.optimizer import set_learning_rate


def make_scaler(spec: OptimizerSpec, device: str, shards: ProcessGroup | None = None) -> GradScaler:
    """torch's scaler with the policy of ``spec``; gradients are shards over the group ``shards``.

    ``shards=None``: they are whole, or DTensors.
    """
    kind = torch.device(device).type
    if spec.scaler is None:
        return GradScaler(kind, enabled=False)
    policy: dict[str, Any] = {
        "init_scale": spec.scaler.initial,
        "growth_factor": spec.scaler.growth,
        "backoff_factor": spec.scaler.backoff,
        "growth_interval": spec.scaler.interval,
    }
    if shards is not None:
        return ShardedGradScaler(kind, process_group=shards, **policy)
    return GradScaler(kind, **policy)


def _unscale(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Divide the gradients of ``optimizer``; return their scale and whether they overflowed.

    Nothing without a policy.  torch reports an overflow only by skipping the step that follows, too
    late to skip clipping, so what ``unscale_`` noted is read instead.
    """
    if not scaler.is_enabled():
        return {}
    scale = scaler.get_scale()
    scaler.unscale_(optimizer)
    noted = scaler._found_inf_per_device(optimizer).values()
    return {"scale": scale, "skipped": float(any(bool(overflowed) for overflowed in noted))}


def update(
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    spec: OptimizerSpec,
    clip: Callable[[float], Tensor],
    step: int,
    observe: Observe,
) -> tuple[Tensor | None, dict[str, float]]:
    """End a step with summed gradients: unscale, clip, update, clear.

    ``clip`` scales gradients to a norm of at most what it is given, and gives the norm before.  It
    is left out after an overflow.  Returns that norm (``None``: not clipped) and the metrics.
    """
    metrics = _unscale(scaler, optimizer)
    observe("gradients_final")
    norm = None
    if spec.clip_norm is not None and not metrics.get("skipped"):
        norm = clip(spec.clip_norm)
        observe("after_clip")
    set_learning_rate(optimizer, spec, step)
    scaler.step(optimizer)
    scaler.update()
    observe("after_update")
    optimizer.zero_grad()
    return norm, metrics
