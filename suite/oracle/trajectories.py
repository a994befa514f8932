"""The oracle of a system whose data coordinates train alone and meet at times.

One process goes through the coordinates' steps one after the other, each with a model, an
optimizer, buffers and a loss scale of its own.  A coordinate's gradient is that of its share of the
batch times their number.  Where the system's :class:`~shardproof.contract.Meeting` says so,
parameters become one; nothing else does.
"""

from __future__ import annotations

from dataclasses import replace

from shardproof.contract import Meeting, OptimizerSpec
from shardproof.oracle.training import Trainee, buffers_of, copies, force
from shardproof.oracle.truth import Truth, TruthStep
from shardproof.workloads import Workload


class _Coordinate:
    """One data coordinate of several, as if it were alone."""

    def __init__(self, workload: Workload, spec: OptimizerSpec, number: int, count: int) -> None:
        self.workload, self.spec, self.number, self.count = workload, spec, number, count
        self.model = Trainee(workload, spec, {}, number)

    def step(self, step: int) -> TruthStep:
        """One step from this coordinate's own parameters."""
        batch = self.workload.batch(step, self.count)[self.number]
        losses, (gradients,) = self.model.device.accumulate(batch)
        whole = {name: gradient * self.count for name, gradient in gradients.items()}
        done = self.model.update(step, self.spec, whole, losses)
        return replace(done, buffers=[buffers_of(self.model.module)])


def train_apart(
    workload: Workload, spec: OptimizerSpec, coordinates: int, steps: int, meeting: Meeting
) -> Truth:
    """Train ``steps`` steps of ``coordinates`` that meet as ``meeting`` says; record everything."""
    alone = [_Coordinate(workload, spec, number, coordinates) for number in range(coordinates)]
    record, trained = Truth(copies(alone[0].model.parameters)), alone[0].model.named
    kept = meeting.begin({name: record.initial[name] for name in trained})
    for number in range(steps):
        apart = [one.step(number) for one in alone]
        met = meeting.meets(number)
        if met:
            ends = [{name: step.parameters[name] for name in trained} for step in apart]
            together, kept = meeting.meet(ends, kept)
            for one in alone:
                force(one.model.named, together)
            apart = [replace(step, parameters={**step.parameters, **together}) for step in apart]
        slots = [{**step.optimizer, **kept} for step in apart]
        apart = [replace(s, optimizer=o, met=met) for s, o in zip(apart, slots, strict=True)]
        losses = [step.loss for step in apart]
        buffers = [step.buffers[0] for step in apart]
        record.steps.append(
            replace(apart[0], loss=sum(losses), losses=losses, buffers=buffers, apart=apart)
        )
    return record
