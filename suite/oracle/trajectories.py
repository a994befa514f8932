"""The oracle of a system whose data coordinates train alone and meet at times.

One process goes through the coordinates' steps one after the other, each with a model, an
optimizer, buffers and a loss scale of its own.  A coordinate's gradient is that of its share of the
batch times their number.  Where the system's :class:`~shardproof.contract.Meeting` says so,
parameters become one; nothing else does.
"""

from __future__ import annotations

from dataclasses import replace

from shardproof.contract import Meeting, OptimizerSpec
from shardproof.oracle.optimizers import build_optimizer, read_slots
from shardproof.oracle.training import Device, buffers_of, copies, force, update
from shardproof.oracle.truth import Truth, TruthStep
from shardproof.workloads import Workload


class _Coordinate:
    """One data coordinate, as if it were alone."""

    def __init__(
        self, workload: Workload, spec: OptimizerSpec, coordinate: int, coordinates: int
    ) -> None:
        # Models draw apart only where they have a stateful dropout; values are loaded.
        build = workload.build_for(0, coordinate)
        self.module = build()
        workload.load(self.module)
        self.module.train()
        self.spec, self.workload = spec, workload
        self.coordinate, self.coordinates = coordinate, coordinates
        self.device = Device(self.module, build.loss, {}, spec.scaler)
        self.parameters = self.device.masters
        self.named = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.optimizer = build_optimizer(spec, self.named)

    def step(self, step: int) -> TruthStep:
        """One step from this coordinate's own parameters."""
        batch = self.workload.batch(step, self.coordinates)[self.coordinate]
        (loss,), (gradients,) = self.device.accumulate(batch)
        for name, gradient in gradients.items():
            self.named[name].grad = self.device.unscaled(name, gradient * self.coordinates)
        scale, skipped = self.device.scale, self.device.overflowed(self.named.values())
        final, norm, clipped = update(self.optimizer, self.spec, step, self.named, skipped)
        return TruthStep(
            loss=loss,
            losses=[loss],
            norm=norm,
            gradients=final,
            clipped=clipped,
            parameters=copies(self.parameters),
            optimizer=copies(read_slots(self.optimizer, self.named)),
            buffers=[buffers_of(self.module)],
            scale=scale,
            skipped=skipped,
        )


def train_apart(
    workload: Workload, spec: OptimizerSpec, coordinates: int, steps: int, meeting: Meeting
) -> Truth:
    """Train ``steps`` steps of ``coordinates`` that meet as ``meeting`` says; record everything."""
    alone = [_Coordinate(workload, spec, c, coordinates) for c in range(coordinates)]
    record = Truth(copies(alone[0].parameters))
    kept = meeting.begin({name: record.initial[name] for name in alone[0].named})
    for number in range(steps):
        apart = [one.step(number) for one in alone]
        met = meeting.meets(number)
        if met:
            ends = [{name: step.parameters[name] for name in alone[0].named} for step in apart]
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
