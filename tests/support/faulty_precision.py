"""ZeRO-1 with faults in its precisions (driven by test_precision and test_scaler)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shardproof.comm import Mesh
from shardproof.contract import Build, OptimizerSpec
from shardproof.impls.reference.engine.masters import Masters
from shardproof.impls.reference.engine.scaler import LossScaler
from shardproof.impls.reference.zero1 import ReferenceZero1


class _Changed(ReferenceZero1):
    """Setup as usual; then ``change``."""

    def setup(
        self,
        build: Build,
        state: dict[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: dict[str, object],
    ) -> None:
        super().setup(build, state, optimizer, mesh, self.asked(options))
        self.change()

    def asked(self, options: dict[str, object]) -> dict[str, object]:
        return options

    def change(self) -> None:
        raise AssertionError


class _Truncating(Masters):
    @torch.no_grad()
    def copy_up(self) -> None:
        for working, master in self.pairs.values():
            cut = master.view(torch.int32).bitwise_and(-65536).view(torch.float32)
            working.copy_(cut)
            master.grad = None


class TruncatesMasters(_Changed):
    """Cuts the lower half of an fp32 master off instead of rounding it."""

    def change(self) -> None:
        assert self.masters is not None
        self.masters.__class__ = _Truncating


class _Restarting(Masters):
    def copy_down(self) -> None:
        for working, master in self.pairs.values():
            with torch.no_grad():
                master.copy_(working)
        super().copy_down()


class ForgetsMasters(_Changed):
    """Starts every update from the rounded parameter."""

    def change(self) -> None:
        assert self.masters is not None
        self.masters.__class__ = _Restarting


class _Deaf(LossScaler):
    def overflowed(self, gradients: Iterable[Tensor | None]) -> bool:
        return any(not bool(g.isfinite().all()) for g in gradients if g is not None)


class AsksNobody(_Changed):
    """Looks for an overflow in its own shard only."""

    def change(self) -> None:
        assert self.scaler is not None
        self.scaler.__class__ = _Deaf


class _Stubborn(LossScaler):
    def adapt(self, skipped: bool) -> None:
        pass


class KeepsScale(_Changed):
    """Never changes the scale."""

    def change(self) -> None:
        assert self.scaler is not None
        self.scaler.__class__ = _Stubborn


class CountsSkipped(ReferenceZero1):
    """A skipped step is an update with gradients of zero: moments decay, counters move."""

    def unscale(self) -> dict[str, float]:
        metrics = super().unscale()
        if metrics["skipped"]:
            for tensor in self.updated:
                if tensor.grad is not None:
                    tensor.grad.zero_()
            self.update()
        return metrics


class ForgetsScale(ReferenceZero1):
    """Does not divide by the scale."""

    def unscale(self) -> dict[str, float]:
        assert self.scaler is not None
        scale = self.scaler.scale
        metrics = super().unscale()
        self.scale_gradients(torch.tensor(scale, dtype=torch.float64))
        return metrics


class TellsNothing(ReferenceZero1):
    """Scales, but does not tell."""

    def unscale(self) -> dict[str, float]:
        super().unscale()
        return {}


class IgnoresThePolicy(_Changed):
    """Trains as if no policy of precision had been asked for."""

    def asked(self, options: dict[str, object]) -> dict[str, object]:
        return {**options, "precision": {}}

    def change(self) -> None:
        """Nothing more."""
