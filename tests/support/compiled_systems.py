"""Adapters that break where ``torch.compile`` compiled nothing."""

from __future__ import annotations

from torch._dynamo.utils import counters

from shardproof.contract import Batch, Observe, StepResult
from shardproof.impls.pytorch.ddp import PyTorchDDP
from shardproof.impls.pytorch.fsdp1 import PyTorchFSDP1
from shardproof.impls.pytorch.fsdp2 import PyTorchFSDP2


def check_compiled() -> None:
    """:class:`RuntimeError` unless this process has a compiled graph with something in it."""
    graphs, calls = (counters["stats"][name] for name in ("unique_graphs", "calls_captured"))
    if not graphs or calls < graphs:
        raise RuntimeError(f"{graphs} graphs with {calls} calls were compiled")


class CheckedDDP(PyTorchDDP):
    """DDP."""

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        result = super().step(batch, observe)
        check_compiled()
        return result


class CheckedFSDP1(PyTorchFSDP1):
    """FSDP1."""

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        result = super().step(batch, observe)
        check_compiled()
        return result


class CheckedFSDP2(PyTorchFSDP2):
    """FSDP2."""

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        result = super().step(batch, observe)
        check_compiled()
        return result
