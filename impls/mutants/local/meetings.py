"""Faults of local SGD: the mean, the step of a meeting, and each rank's own state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardproof.case import CheckpointPlan
from shardproof.comm import Comm
from shardproof.contract import Batch, Kind, Observe, OptimizerSpec, ScalerSpec, StepResult
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import CLIP, gpt
from shardproof.impls.reference.checkpoint.agreement import Agreed, State
from shardproof.impls.reference.checkpoint.sharded import Sharded
from shardproof.impls.reference.engine.norm import NormPart
from shardproof.impls.reference.engine.scaler import LossScaler
from shardproof.impls.reference.local_sgd import LocalSGD, ReferenceLocalSGD
from shardproof.impls.reference.parts.alone import mean

MISSED = ("equivalence", "replicas", "traffic")
SCALED = OptimizerSpec(scaler=ScalerSpec(initial=1024, interval=2))
#: Every second step, and a step after the last meeting.
TWICE: Mapping[str, Any] = {"every": 2}

mutant = declare.family(
    ReferenceLocalSGD, options=TWICE, steps=3, killed_by=("equivalence",), mesh={"replicate": 3}
)


@mutant("local_forgets_the_average", says="the ranks did not synchronize", killed_by=MISSED)
class ForgetsTheAverage(LocalSGD):
    """Ranks never average."""

    def meet(self) -> None:
        pass


@mutant("local_averages_a_step_early", says="ranks synchronized before", killed_by=MISSED)
class AveragesAStepEarly(LocalSGD):
    """Steps are counted from 1, so a meeting comes one step early."""

    def after_update(self) -> None:
        if self.step % self.meets.every == 0:
            self.meet()


@mutant("local_averages_in_every_step", says="ranks synchronized before", killed_by=MISSED)
class AveragesInEveryStep(LocalSGD):
    """The option ``every`` has no effect: ranks meet in every step."""

    def after_update(self) -> None:
        self.meet()


@mutant(
    "local_averages_clones",
    says="the ranks did not synchronize",
    zoo=("G04",),
    killed_by=("equivalence", "replicas"),
)
class AveragesClones(LocalSGD):
    """The mean is written into copies of the parameters, which are not trained."""

    @torch.no_grad()
    def meet(self) -> None:
        clones = [parameter.clone() for parameter in self.parameters]
        for clone, value in zip(clones, mean(clones, self.comm), strict=True):
            clone.copy_(value)


@mutant("local_takes_the_sum", says="3 times the mean")
class TakesTheSum(LocalSGD):
    """The sum is not divided by the number of ranks."""

    @torch.no_grad()
    def meet(self) -> None:
        super().meet()
        for parameter in self.parameters:
            parameter.mul_(self.comm.size)


@mutant("local_divides_by_the_steps", says="1.5 times the mean")
class DividesByTheSteps(LocalSGD):
    """The sum over ranks is divided by the number of local steps instead of the number of ranks."""

    @torch.no_grad()
    def meet(self) -> None:
        super().meet()
        for parameter in self.parameters:
            parameter.mul_(self.comm.size / self.meets.every)


@mutant(
    "local_takes_the_first",
    says="parameters of data coordinate 0",
    killed_by=("equivalence", "traffic"),
)
class TakesTheFirst(LocalSGD):
    """A meeting copies the first rank's parameters to all ranks, and the others' training is
    lost.
    """

    @torch.no_grad()
    def meet(self) -> None:
        for parameter in self.parameters:
            self.comm.broadcast(parameter.detach())


@mutant("local_averages_all_but_the_last", says="the ranks did not synchronize", killed_by=MISSED)
class AveragesAllButTheLast(LocalSGD):
    """The last parameter is left out of the mean."""

    @torch.no_grad()
    def meet(self) -> None:
        some = self.parameters[:-1]
        for parameter, value in zip(some, mean(some, self.comm), strict=True):
            parameter.copy_(value)


@mutant(
    "local_averages_in_float32",
    says="differs from the oracle",
    killed_by=("equivalence", "traffic"),
)
class AveragesInFloat32(LocalSGD):
    """The mean is computed in a narrower dtype than that of the parameters."""

    @torch.no_grad()
    def meet(self) -> None:
        narrow = [parameter.float() for parameter in self.parameters]
        for parameter, value in zip(self.parameters, mean(narrow, self.comm), strict=True):
            parameter.copy_(value)


@mutant("local_gradient_of_a_share", says="3 times too small")
class GradientOfAShare(LocalSGD):
    """Gradients are those of a share of the batch: N times too small for a local step."""

    def finish(self) -> None:
        pass


@mutant("local_sums_gradients", says="though ranks trained alone", killed_by=MISSED)
class SumsGradients(LocalSGD):
    """Gradients are summed in every step, as in data parallelism, so ranks never diverge."""

    def finish(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                self.comm.all_reduce(parameter.grad)


@mutant(
    "local_average_skipped_on_overflow",
    says="without joining all_reduce",
    crash_says="without joining all_reduce",
    zoo=("G16",),
    killed_by=("crash",),
    optimizer=SCALED,
    options={"every": 1},
    workload=gpt("overflow_on_one_rank"),
)
class AverageSkippedOnOverflow(ReferenceLocalSGD):
    """The average is part of the update, so a rank that skips its update misses the average and the
    others wait.
    """

    def unscale(self) -> dict[str, float]:
        metrics = super().unscale()
        self.handle.leaves_out = bool(metrics["skipped"])  # type: ignore[attr-defined]
        return metrics

    class handle_type(LocalSGD):
        """Read the decision of the loss scaler."""

        leaves_out = False

        def meet(self) -> None:
            if not self.leaves_out:
                super().meet()


@mutant(
    "local_scale_of_all",
    says="it skipped the update, the oracle did not|bytes of other data than floats",
    killed_by=("loss_scale", "equivalence", "traffic"),
    optimizer=SCALED,
    workload=gpt("overflow_on_one_rank"),
)
class ScaleOfAll(ReferenceLocalSGD):
    """Ranks agree on overflow in every step: all skip the update of one, and bytes are sent between
    meetings.
    """

    scaler_type = LossScaler


@mutant("local_tells_its_steps", says="bytes of other data than floats", killed_by=("traffic",))
class TellsItsSteps(LocalSGD):
    """Ranks signal each other in every step: only the cost is wrong."""

    def finish(self) -> None:
        super().finish()
        self.comm.all_reduce(torch.ones(1, dtype=torch.int32))


@mutant(
    "local_clips_by_the_norm_of_all",
    says="norm",
    killed_by=("norm", "equivalence", "traffic"),
    optimizer=CLIP,
)
class ClipsByTheNormOfAll(LocalSGD):
    """Squares are summed over ranks, as if each rank had a shard of one gradient."""

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        return [(value, ("replicate",)) for value, _ in super().norm_parts(order)]


class _AtMeetings(ReferenceLocalSGD):
    """Change the momentum right after a meeting."""

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        def watched(point: Any) -> None:
            if point == "after_update" and self.handle.meets.after(batch.step):  # type: ignore[attr-defined]
                self.at_meeting([s["momentum_buffer"] for s in self.optimizer.state.values()])
            observe(point)

        return super().step(batch, watched)

    def at_meeting(self, momenta: Iterable[Tensor]) -> None:
        raise NotImplementedError


@mutant(
    "local_averages_momentum",
    says="momentum_buffer' at step 1",
    killed_by=("equivalence", "traffic"),
)
class AveragesMomentum(_AtMeetings):
    """Momentum is averaged too, although each rank must keep its own."""

    def at_meeting(self, momenta: Iterable[Tensor]) -> None:
        momenta = list(momenta)
        for momentum, value in zip(
            momenta, mean(momenta, self.mesh.comm("replicate")), strict=True
        ):
            momentum.copy_(value)


@mutant("local_forgets_momentum", says="momentum_buffer' at step 1")
class ForgetsMomentum(_AtMeetings):
    """Momentum starts again after every meeting."""

    def at_meeting(self, momenta: Iterable[Tensor]) -> None:
        for momentum in momenta:
            momentum.zero_()


@mutant("local_starts_apart", says="initial parameters", killed_by=("equivalence", "replicas"))
class StartsApart(LocalSGD):
    """Ranks start from different values, which the first meeting mixes."""

    def __init__(self, module: Any, comm: Comm, options: Any) -> None:
        before = [p.detach().clone() for p in module.parameters() if p.requires_grad]
        super().__init__(module, comm, options)
        if comm.rank:
            with torch.no_grad():
                for parameter, value in zip(self.parameters, before, strict=True):
                    parameter.copy_(value)


@mutant(
    "local_saves_one_copy",
    says="loaded|load",
    killed_by=("checkpoint",),
    checkpoint=CheckpointPlan(save_at=1),
)
class SavesOneCopy(LocalSGD):
    """One copy of parameters and momentum is saved for all ranks, although they have diverged."""

    @property
    def apart(self) -> frozenset[Kind]:  # type: ignore[override]
        return frozenset()


@mutant(
    "local_saves_by_an_agreement_of_before",
    says="parameters were not loaded",
    killed_by=("checkpoint",),
    options={"every": 2},
    checkpoint=CheckpointPlan(save_at=3, saves=2),
    steps=4,
)
class SavesByAnAgreementOfBefore(Sharded):
    """The plan of which rank writes what is kept from an earlier save, although ranks have diverged
    since.
    """

    def agree(self, state: State, from_rank0: bool = False) -> Agreed:
        if self.agreed is not None:
            self.agreed = replace(self.agreed, apart=state.apart)
        return super().agree(state, from_rank0)


@mutant(
    "local_meets_without_decay",
    says="update|decay",
    optimizer=OptimizerSpec("adamw", lr=0.003, weight_decay=0.1),
    workload=gpt("frozen"),
)
class MeetsWithoutDecay(ReferenceLocalSGD):
    """With frozen parameters, the update before a meeting has no weight decay."""

    def update(self) -> None:
        groups, handle = self.optimizer.param_groups, self.handle
        decays = [group["weight_decay"] for group in groups]
        for group in groups if self.frozen and handle.meets.after(handle.step) else ():  # type: ignore[attr-defined]
            group["weight_decay"] = 0.0
        super().update()
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = decay
