"""One step on one device, from what a system shows: what its update, and its buffers, must be.

AdamW divides by the root of a second moment: where that is near ``eps``, round-off of a gradient
is a visible part of the update.  So parameters are never compared across trajectories under AdamW,
and buffers follow parameters: one that leaves its bound is made again from the system's own state.

*Cannot see* a buffer behind a stateful dropout, whose draws are not held: such a one stays wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardproof.checks.causes import fits
from shardproof.contract import OptimizerSpec, is_outer
from shardproof.evidence.assembled import CoordinateEvidence, Evidence
from shardproof.oracle import optimizers, training
from shardproof.oracle.asked import follows_of
from shardproof.workloads import for_case

Tensors = Mapping[str, Tensor]

#: Slot of the optimizer's own copy of a parameter that is held in a narrower dtype.
MASTER = "master"


@dataclass(frozen=True)
class Made:
    """``parameters`` (wide) and ``slots`` after the step; ``terms``: see :func:`largest_terms`;
    of a parameter, where it comes from a sum over ranks.
    """

    parameters: dict[str, Tensor]
    slots: dict[str, Tensor]
    terms: dict[str, Tensor]


@dataclass(frozen=True)
class Update:
    """The state that update ``step`` starts from.

    ``before``: all parameters, wide; ``gradients``, ``slots``: those that there are (no masters).
    """

    spec: OptimizerSpec
    step: int
    trainable: tuple[str, ...]
    before: Tensors
    gradients: Tensors
    slots: Tensors

    def make(self) -> Made:
        """The step."""
        # Copies throughout: a step of torch's works in place, and these are evidence.
        named = {name: torch.nn.Parameter(self.before[name].clone()) for name in self.trainable}
        for name, parameter in named.items():
            gradient = self.gradients.get(name)
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer = optimizers.build_optimizer(self.spec, named)
        optimizers.load_slots(optimizer, named, self.slots)
        optimizers.set_learning_rate(optimizer, self.spec, self.step)
        # Before the step, from what it starts from.
        terms = optimizers.largest_terms(optimizer, named)
        optimizer.step()
        parameters = {**self.before, **{name: p.detach() for name, p in named.items()}}
        return Made(parameters, optimizers.read_slots(optimizer, named), terms)


def update_of(evidence: Evidence, step: int) -> Update:
    """Update ``step`` from the system's own state and the gradients that it shows."""
    rules = follows_of(evidence.case, evidence.declaration)
    spec = rules.spec(evidence.case.optimizer, step)
    spec = replace(spec, lr=spec.lr * evidence.members[step].rate)
    point = "after_clip" if spec.clip_norm is not None else "gradients_final"
    skipped = evidence.truth.steps[step].skipped
    if clips_unseen(evidence, step):
        gradients = {} if skipped else _clipped(evidence, step)
    else:
        gradients = {} if skipped else evidence.observed(step, point, "gradients").first()
    held = evidence.observed(step - 1, "after_update", "optimizer").first() if step else {}
    # Alone, a master would pass for the state of a parameter that nobody has updated yet.
    own = {n: t for n, t in held.items() if not (n.endswith(f".{MASTER}") or is_outer(n))}
    trainable = tuple(evidence.workload.trainable_names)
    return Update(spec, step, trainable, wide(evidence, step - 1), gradients, own)


def clips_unseen(evidence: Evidence, step: int) -> bool:
    """Whether a system clips and updates in one call, so that no rank shows clipped gradients: its
    norm and its update are judged in their place.
    """
    shown = any("after_clip" in record.steps[step].observed for record in evidence.records)
    clips = evidence.case.optimizer.clip_norm is not None
    return clips and not shown and "after_clip" not in evidence.declaration.points


def _clipped(evidence: Evidence, step: int) -> dict[str, Tensor]:
    """The clipped form of the gradients shown before it, by the reported norm."""
    final = evidence.observed(step, "gradients_final", "gradients").first()
    if not final:
        return final
    told = next((r.steps[step].norm for r in evidence.records if r.steps[step].norm), None)
    norm = torch.nn.utils.get_total_norm(list(final.values()), foreach=False)
    norm = norm if told is None else torch.tensor(told, dtype=norm.dtype)
    # As torch does, so that what it multiplies by has the same bits.
    factor = torch.clamp((evidence.case.optimizer.clip_norm or 0.0) / (norm + 1e-6), max=1.0)
    return {name: gradient * factor for name, gradient in final.items()}


def made_of(evidence: Evidence, step: int) -> Made:
    """The expected result of update ``step``: the optimizer's, and after it a meeting's.

    A meeting is that of what the updates of all trajectories make.
    """
    made, meeting = update_of(evidence, step).make(), evidence.meeting
    if meeting is None or not isinstance(evidence, CoordinateEvidence):
        return made
    trained = evidence.workload.trainable_names
    if step:
        held = evidence.observed(step - 1, "after_update", "optimizer").first()
        kept = {name: tensor for name, tensor in held.items() if is_outer(name)}
    else:
        first = evidence.initial("parameters").first()
        kept = meeting.begin({name: first[name] for name in trained})
    if not evidence.truth.steps[step].met:
        return replace(made, slots={**made.slots, **kept})
    others = evidence.base.trajectories
    parameters_of = [update_of(other, step).make().parameters for other in others]
    ends = [{name: parameters[name] for name in trained} for parameters in parameters_of]
    together, after = meeting.meet(ends, kept)
    # A sum over ranks errs by the last place of its terms, however small the sum is.
    starts = [update_of(evidence, step).before, *parameters_of]
    terms = {name: torch.stack([p[name].abs() for p in starts]).amax(0) for name in trained}
    terms |= {slot: terms[slot.rpartition(".")[0]] for slot in after}
    parameters = {**made.parameters, **together}
    return Made(parameters, {**made.slots, **after}, {**made.terms, **terms})


def wide(evidence: Evidence, step: int) -> dict[str, Tensor]:
    """The tensors that the optimizer updates, after ``step`` (-1: initially): masters, if any."""
    if step < 0:
        built = getattr(torch, evidence.case.dtype)
        first = evidence.initial("parameters").first()
        return {name: tensor.to(built) for name, tensor in first.items()}
    held = evidence.observed(step, "after_update", "parameters").first()
    slots = evidence.observed(step, "after_update", "optimizer").first()
    return {name: slots.get(f"{name}.{MASTER}", tensor) for name, tensor in held.items()}


def buffers_after(evidence: Evidence, step: int, replica: int, coordinate: int) -> Tensors:
    """Buffers of copy ``replica``, of ``coordinate``, by the declared rule; empty: it had none."""
    held = fits.state_before(evidence, step)
    rule = evidence.declaration.buffers
    start = {name: copies[min(copies)] for name, copies in held["parameters"].items()}
    for name, copies in held["buffers"].items():
        #     per_rank    each copy goes on from itself
        #     others      all go on from the first copy, which is broadcast, or equal on all ranks
        source = replica if rule == "per_rank" else min(copies)
        if source not in copies:
            return {}
        start[name] = copies[source]
    batches = [share.micro_batches for share in evidence.shares(step)]
    mine = batches[coordinate]
    if rule == "synced":
        # Micro-batches of equal index run as one; only their inputs are asked for.
        joined = zip(*batches, strict=True)
        mine = [replace(one[0], inputs=torch.cat([m.inputs for m in one])) for one in joined]
    return training.buffers_after(for_case(evidence.case), evidence.case.precision, start, mine)
