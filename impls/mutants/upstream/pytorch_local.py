"""Faults around PyTorch's local SGD: the averager's parameters, and the step of its call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.optim import PostLocalSGDOptimizer

from shardproof.impls.mutants import declare
from shardproof.impls.pytorch.post_local_sgd import PyTorchPostLocalSGD

MISSED = ("equivalence", "replicas", "traffic")
#: Meetings after steps 0 and 2, and a step after the last one.
mutant = declare.family(
    PyTorchPostLocalSGD,
    options={"every": 2},
    steps=4,
    killed_by=("equivalence",),
    mesh={"replicate": 3},
)


def average(tensors: Iterable[Any], group: Any) -> None:
    """Compute torch's mean over ``group`` in place."""
    average_parameters(iter([*tensors]), group)


class Averager(PeriodicModelAverager):
    """torch's averager with its meeting in a separate method."""

    def average_parameters(self, params: Iterable[Any]) -> None:
        groups: list[dict[str, Any]] = [*params]
        if self.step % self.period == 0:
            self.meet([p for group in groups for p in group["params"]])
        self.step += 1

    def meet(self, parameters: list[Tensor]) -> None:
        average(parameters, self.process_group)


@mutant(
    "torch_local_averages_clones",
    says="the ranks did not synchronize",
    zoo=("G04",),
    killed_by=MISSED[:2],
)
class AveragesClones(Averager):
    """The averager gets copies of the parameters, which are not trained."""

    def meet(self, parameters: list[Tensor]) -> None:
        super().meet([parameter.detach().clone() for parameter in parameters])


@mutant("torch_local_never_averages", says="the ranks did not synchronize", killed_by=MISSED)
class NeverAverages(Averager):
    """The optimizer steps without its averager, so ranks never average."""

    def meet(self, parameters: list[Tensor]) -> None:
        pass


@mutant("torch_local_takes_the_sum", says="3 times the mean")
class TakesTheSum(Averager):
    """Parameters are summed over ranks and not divided."""

    def meet(self, parameters: list[Tensor]) -> None:
        super().meet(parameters)
        for parameter in parameters:
            parameter.data.mul_(dist.get_world_size(self.process_group))


@mutant("torch_local_divides_by_the_period", says="1.5 times the mean")
class DividesByThePeriod(Averager):
    """The sum over ranks is divided by the steps between meetings instead of the number of
    ranks.
    """

    def meet(self, parameters: list[Tensor]) -> None:
        super().meet(parameters)
        for parameter in parameters:
            parameter.data.mul_(dist.get_world_size(self.process_group) / self.period)


@mutant("torch_local_counts_from_one", says="the ranks did not synchronize", killed_by=MISSED)
class CountsFromOne(PeriodicModelAverager):
    """The averager counts from 1, so meetings come one step early and the first never."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.step = 1


@mutant("torch_local_period_of_one", says="ranks synchronized before", killed_by=MISSED)
class PeriodOfOne(PeriodicModelAverager):
    """The option ``every`` does not reach the averager, so ranks average in every step."""

    def __init__(self, period: int, *args: Any, **more: Any) -> None:
        super().__init__(period, *args, **more)
        self.period = 1


@mutant("torch_local_starts_late", says="the ranks did not synchronize", killed_by=MISSED)
class StartsLate(PeriodicModelAverager):
    """Warm-up steps are requested, but no hook sums the gradients meanwhile."""

    def __init__(self, period: int, process_group: Any) -> None:
        super().__init__(period, warmup_steps=2, process_group=process_group)


@mutant(
    "torch_local_some_of_the_group", says="the ranks did not synchronize|differ", killed_by=MISSED
)
class SomeOfTheGroup(PeriodicModelAverager):
    """The averager's group has only the first two ranks, so the third never meets them."""

    def __init__(self, period: int, process_group: Any) -> None:
        super().__init__(period, process_group=dist.new_group([0, 1]))


@mutant("torch_local_all_but_the_last", says="the ranks did not synchronize", killed_by=MISSED)
class AllButTheLast(Averager):
    """The last parameter is left out of the mean."""

    def meet(self, parameters: list[Tensor]) -> None:
        super().meet(parameters[:-1])


@mutant("torch_local_averages_in_float32", says="differs", killed_by=("equivalence", "traffic"))
class AveragesInFloat32(Averager):
    """The mean is computed in a narrower dtype than that of the parameters."""

    def meet(self, parameters: list[Tensor]) -> None:
        narrow = [parameter.detach().float() for parameter in parameters]
        super().meet(narrow)
        for parameter, mean in zip(parameters, narrow, strict=True):
            parameter.data.copy_(mean)


@mutant(
    "torch_local_averages_before_the_update", says="differs", killed_by=("equivalence", "replicas")
)
class AveragesBeforeTheUpdate(PostLocalSGDOptimizer):
    """Parameters are averaged before the update, so each rank adds its own update afterwards."""

    def step(self) -> None:  # type: ignore[override]
        self.averager.average_parameters(params=self.param_groups)
        self.optim.step()


class _AtMeetings(PostLocalSGDOptimizer):
    """Change the momentum right after a meeting."""

    def step(self) -> None:  # type: ignore[override]
        averager: Any = self.averager
        meets = averager.step % averager.period == 0
        super().step()
        if meets:
            self.at_meeting([slots["momentum_buffer"] for slots in self.optim.state.values()])

    def at_meeting(self, momenta: list[Tensor]) -> None:
        raise NotImplementedError


@mutant(
    "torch_local_averages_momentum",
    says="momentum_buffer' at step 0",
    killed_by=("equivalence", "traffic"),
)
class AveragesMomentum(_AtMeetings):
    """Momentum is averaged too, although each rank must keep its own."""

    def at_meeting(self, momenta: list[Tensor]) -> None:
        average(momenta, self.averager.process_group)


@mutant("torch_local_forgets_momentum", says="momentum_buffer' at step 0")
class ForgetsMomentum(_AtMeetings):
    """Momentum starts again after every meeting."""

    def at_meeting(self, momenta: list[Tensor]) -> None:
        for momentum in momenta:
            momentum.zero_()


@mutant("torch_local_gradient_of_a_share", says="3 times too small")
class GradientOfAShare(PyTorchPostLocalSGD):
    """The adapter treats a rank's share of the batch loss as the whole loss."""

    def parse(self, *args: Any) -> None:
        super().parse(*args)
        self.loss_factor = 1


@mutant("torch_local_warms_up_for_ever", says="though ranks trained alone", killed_by=MISSED)
class WarmsUpForEver(PyTorchPostLocalSGD):
    """Gradients are summed in every step, as in the warm-up of torch's hook, so ranks never
    diverge.
    """

    def finish(self) -> None:
        for parameter in self.updated().values():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.comm.group)
