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


def train_apart(
    workload: Workload, spec: OptimizerSpec, coordinates: int, steps: int, meeting: Meeting
) -> Truth:
    """Train ``steps`` steps of ``coordinates`` that meet as ``meeting`` says; record everything."""
    alone = [Trainee(workload, spec, {}, number) for number in range(coordinates)]
    record, trained = Truth(copies(alone[0].parameters)), alone[0].named

    def one_step(number: int, step: int) -> TruthStep:
        """One step of a coordinate from its own parameters."""
        model, batch = alone[number], workload.batch(step, coordinates)[number]
        losses, (gradients,) = model.device.accumulate(batch)
        whole = {name: gradient * coordinates for name, gradient in gradients.items()}
        done = model.update(step, spec, whole, losses)
        return replace(done, buffers=[buffers_of(model.module)])

    kept = meeting.begin({name: record.initial[name] for name in trained})
    for number in range(steps):
        apart = [one_step(coordinate, number) for coordinate in range(coordinates)]
        if met := meeting.meets(number):
            ends = [{name: step.parameters[name] for name in trained} for step in apart]
            together, kept = meeting.meet(ends, kept)
            for one in alone:
                force(one.named, together)
            apart = [replace(step, parameters={**step.parameters, **together}) for step in apart]
        slots = [{**step.optimizer, **kept} for step in apart]
        apart = [replace(s, optimizer=o, met=met) for s, o in zip(apart, slots, strict=True)]
        losses = [step.loss for step in apart]
        buffers = [step.buffers[0] for step in apart]
        record.steps.append(
            replace(apart[0], loss=sum(losses), losses=losses, buffers=buffers, apart=apart)
        )
    return record
