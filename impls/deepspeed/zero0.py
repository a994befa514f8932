"""DeepSpeed stage 0: data parallelism with DeepSpeed's engine, nothing sharded.

    what                                  where
    parameters, gradients, optimizer      every rank, whole and equal

    step     backward of all micro-batches   gradients add up locally
             end of the last backward        one flat bucket of 500 million elements is all-reduced
             engine.step()                   norm (agreed by one number), clip, update

Cost: 2 (N-1) trainable bytes per step over all ranks, as ``naive_ddp``, and 2 (N-1) of one fp32
number more where gradients are clipped: ``clip_grad_norm_`` averages the norm over the ranks
(``deepspeed/runtime/utils.py``).  Numbers: the mean over ranks of losses times N; the division is
a multiplication by fp32's 1/N (``engine.py``, ``allreduce_bucket``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from shardproof.contract import Piece
from shardproof.impls.deepspeed import engine
from shardproof.impls.deepspeed.engine import Engine
from shardproof.impls.reference.engine.choices import USUAL


class DeepSpeedZero0(Engine):
    """The adapter of stage 0."""

    strategy = "deepspeed_zero0"
    depth = "layout"
    stage = 0
    axis = "replicate"
    features = USUAL | {"accumulation_without_communication"}

    def make_engine(self, module: nn.Module, options: Mapping[str, Any]) -> Any:
        """Make the engine and observe its clipping, because it drops the norm."""
        made = super().make_engine(module, options)
        made.clip_fp32_gradients = self._clip
        return made

    def _clip(self) -> None:
        """``DeepSpeedEngine.clip_fp32_gradients`` with the norm kept."""
        clip = engine.deepspeed.runtime.engine.clip_grad_norm_
        norm = clip(self.module.parameters(), max_norm=self.spec.clip_norm, mpu=self.engine.mpu)
        self._norm = norm.detach().clone()
        if self.observe is not None:
            self.observe("after_clip")

    def norm(self) -> Tensor:
        """The result of ``clip_grad_norm_``."""
        return self._norm

    def gradients(self) -> Iterator[Piece]:
        """Whole gradients on every rank."""
        for name, parameter in self.trainable.items():
            if parameter.grad is not None:
                yield Piece.whole(name, parameter.grad, replica=self.comm.rank)

    def slots(self) -> Iterator[Piece]:
        """Whole slots on every rank."""
        for name, parameter in self.trainable.items():
            for slot, value in self.torch_optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield Piece.whole(f"{name}.{slot}", value, replica=self.comm.rank)


IMPLEMENTATION = DeepSpeedZero0
