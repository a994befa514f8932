"""Modelled efficiency at worlds that this machine does not have, always labelled "modelled".

One rank's compute is measured, its calls at N ranks follow from the strategy's closed formulas, and
their seconds from the alpha and beta that were probed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardproof.axes import parts, sharing, size, splitting
from shardproof.bench.model.alpha_beta import Links
from shardproof.bench.model.messages import Window
from shardproof.bench.model.step_time import Prediction, Unmodelled, predict, promised
from shardproof.bench.subjects import Call, Mode
from shardproof.costs import CostModel, ModelFacts, NoCostModel, cannot_fit, cost_model_of
from shardproof.costs.schedules import FORMS, Setting
from shardproof.costs.stages import schedule_name, stages_of
from shardproof.schedules import Schedule


@dataclass(frozen=True)
class Compute:
    """One rank's seconds: ``fixed + per_sample * samples`` to the gradients, ``update`` after."""

    fixed: float
    per_sample: float
    update: float

    @classmethod
    def through(cls, gradients: Mapping[int, float], update: float) -> Compute:
        """From seconds to the gradients by number of samples: proportional for one number, else
        the line through the fewest and the most (no part of it negative).

        :raises ValueError: no number of samples, or one below 1.
        """
        if not gradients or min(gradients) < 1:
            raise ValueError(f"a time model needs at least 1 timed sample, got {dict(gradients)}")
        few, many = min(gradients), max(gradients)
        slope = gradients[many] / many
        if few < many:
            slope = max(0.0, min((gradients[many] - gradients[few]) / (many - few), slope))
        return cls(gradients[many] - slope * many, slope, update)

    def seconds(self, samples: float, split: float = 1.0, update_share: float = 1.0) -> float:
        """Of a rank that has so many samples, ``1/split`` of every layer, and updates a share."""
        return (self.fixed + self.per_sample * samples) / split + self.update * update_share


def facts_at(facts: ModelFacts, axis: str, ranks: int, samples: int | None = None) -> ModelFacts:
    """``facts`` with ``ranks`` along ``axis``; every data coordinate has as many micro-batches (and
    shapes) as the busiest one had, but no more than its ``samples`` (``None``: enough for all).

    :raises NoCostModel: layers or stages that cannot be cut so.
    """
    axes = {**facts.axes, axis: ranks}
    coordinates = size(axes, sharing(axes))
    rounds = facts.rounds if samples is None else min(facts.rounds, samples)
    inputs = tuple((step[0],) * coordinates for step in facts.inputs)
    batches = (rounds,) * coordinates
    grown = dataclasses.replace(facts, axes=axes, micro_batches=batches, inputs=inputs)
    if problem := cannot_fit(grown):
        raise NoCostModel(problem)
    if (stages := parts(axes, "layers")) > 1 and not all(stages_of(grown).units):
        raise NoCostModel(
            f"{stages} stages need {stages} units, but the model has {len(facts.units)}"
        )
    return grown


def update_share(cost_model: CostModel) -> float:
    """Share of the trained elements that the busiest rank updates.

    :raises NoCostModel: the cost model does not say what a rank holds on this mesh.
    """
    facts = cost_model.facts
    whole = sum(t.numel for t in facts.trainable)
    some = dict.fromkeys([*range(min(facts.world, 8)), facts.world - 1])
    locals_ = map(cost_model.local, some)
    own = [sum((at.optimizer or at.gradients or at.parameters).values()) for at in locals_]
    if whole and not max(own):
        what = f"no formula for the parameters that a rank updates by {cost_model.strategy}"
        raise NoCostModel(what)
    return min(1.0, max(own) / whole) if whole else 1.0


def pipeline_stretch(facts: ModelFacts) -> float:
    """How many times longer than a rank's own work a pipeline takes: 1 + bubble / ideal, with equal
    times of F, B and W, by the closed form of its schedule.

    :raises NoCostModel: no closed form for the schedule here.
    """
    ranks = facts.parts("layers")
    if ranks == 1:
        return 1.0
    name = schedule_name(facts.options) or "the orders given by the user"
    chunks = max(1, len(stages_of(facts).place) // ranks)
    setting = Setting(ranks, facts.rounds, chunks)
    form = FORMS.get(name)
    bubble = None if form is None else form.makespan(setting)
    if bubble is None:
        raise NoCostModel(f"no formula for the pipeline bubble of {name} on {ranks} ranks")
    return float(1 + bubble / setting.ideal)


@dataclass(frozen=True)
class Ground:
    """The measurements at one world, from which steps at others are modelled.

    Every rank there has what the measured ones had: ``cores_per_rank`` for ``threads`` that compute
    (what is hidden costs core time, too), and a link of the alpha and beta that were probed.
    ``calls`` are those of the measured ranks.  Messages of a pipeline are played where its
    ``schedule`` is that of the measured ranks; elsewhere each costs what it takes alone.
    """

    strategy: str
    facts: ModelFacts
    compute: Compute
    links: Links
    backend: str
    calls: Sequence[Call] = ()
    cores_per_rank: float | None = None
    threads: int = 1
    schedule: Schedule | None = None

    def step_at(self, world: int, axis: str, mode: Mode, samples: int) -> Prediction:
        """A step at ``world`` ranks, without starting one.

        ``axis`` is the one that grows, the sizes of its other axes stay; ``samples`` the global
        batch (strong) or the batch of a data coordinate (weak; on a tensor or pipe axis in both
        modes).

        :raises Unmodelled: no formula, or a batch or a model that so many ranks cannot share.
        """
        facts = self.facts
        shares_batch = mode == "strong" and sharing([axis]) != ()
        ranks = world * facts.size(axis) // facts.world
        mesh = {**facts.axes, axis: ranks}
        shares = size(mesh, sharing(mesh))
        if shares_batch and samples < shares:
            raise Unmodelled(f"{samples} samples are too few for {shares} ranks")
        # The rank that has most samples sets the pace.
        own = math.ceil(samples / shares) if shares_batch else samples
        try:
            cost_model = cost_model_of(self.strategy, facts_at(facts, axis, ranks, own))
            if cost_model is None:
                raise Unmodelled(f"strategy {self.strategy} has no cost formulas")
            return self._predicted(cost_model, own)
        except NoCostModel as error:
            raise Unmodelled(str(error)) from None
        except LookupError as error:  # shapes of other meshes only
            why = f"the formulas of {self.strategy} do not cover this mesh: {error}"
            raise Unmodelled(why) from None

    def _predicted(self, cost_model: CostModel, samples: int) -> Prediction:
        """The step of ``cost_model``, whose busiest rank has so many ``samples``."""
        grown = cost_model.facts
        split = size(grown.axes, splitting(grown.axes))
        stretched = split / pipeline_stretch(grown)
        window, schedule, window_of = None, self.schedule, (grown.parts("layers"), grown.rounds)
        if schedule is not None and (schedule.ranks, schedule.micro_batches) == window_of:
            window = Window(schedule, self.compute.seconds(samples, split, 0.0) / grown.rounds)
        return predict(
            promised(cost_model, self.calls, self.facts.world),
            self.compute.seconds(samples, stretched, update_share(cost_model)),
            self.links,
            self.backend,
            cores_per_rank=self.cores_per_rank,
            threads=self.threads,
            window=window,
        )
