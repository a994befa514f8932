"""Bytes and seconds of a candidate in closed form: what prunes and ranks before anything is run.

Bytes      state: the coefficients of its cost model (``probe``), on the fuller of the first and the
           last stage; activations: ``costs/shapes/activations``, for as many micro-batches as the
           schedule's closed form has in flight; gathered units and logits.
Seconds    products and attention on the roofline of the machine; other operators move each byte
           that backward needs :data:`_MOVED` times; the axis that cuts widths sums activations 2
           times a layer forward and 2 backward (Narayanan et al., arXiv 2104.04473, section 3.2);
           a ring of positions passes keys and values on; collectives: ``seconds``.
Hidden     reductions of the data axes behind the backward of one micro-batch, gathers only where
           the strategy promises to overlap them; nothing in a pipeline, and nothing of other axes.
Bubble     the closed form of the schedule (``costs/schedules``), or its order played on a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property, lru_cache
from typing import Any

from shardproof import axes, schedules
from shardproof.costs import shapes
from shardproof.costs.model_facts import ITEMSIZE
from shardproof.costs.schedules import FORMS, Setting
from shardproof.costs.shapes import BatchSize, Shape, activations
from shardproof.costs.stages import V_SHAPED
from shardproof.simulate.machines import Machine
from shardproof.simulate.plan.candidates import Candidate, Job, is_promised, strategy_of, system_of
from shardproof.simulate.plan.probe import Coefficients, coefficients
from shardproof.simulate.seconds import call_seconds, message_seconds

#: Times that a byte which backward needs moves in operators that are no products: written and read
#: in forward, read in backward, and its gradient written and read.
_MOVED = 5
_FP32 = 4
#: Bytes of a logit when its loss goes backward: it, its copy in fp32, their softmax and gradients.
_OF_LOGIT = 20
#: What a norm keeps in fp32 and as a copy, in rows of its input, if it computes in fp32.
_WIDE = 3
#: The part of a name that all experts of a layer share.
_EXPERTS = "experts"
#: Bytes of state that an update reads and writes, over those that it holds.
_UPDATED = 2


@dataclass(frozen=True)
class Estimated:
    """Bytes of the fullest rank, and seconds of a step.

    ``bubble`` and ``exposed``: seconds of the step in which a rank waits for other stages, and for
    calls that nothing hides.
    """

    bytes: float
    seconds: float
    bubble: float
    exposed: float


class Formulas:
    """The formulas for one job on one machine."""

    def __init__(self, job: Job, machine: Machine) -> None:
        # Masks of dropout are not simulated either.
        self.job, self.machine = replace(job, shape=replace(job.shape, dropout=False)), machine
        about: Mapping[str, Any] = shapes.accountings()[job.accounting]
        self.dtype = str(about.get("parameters", about["built"]))
        self.item = ITEMSIZE[self.dtype]
        self.coefficients = lru_cache(maxsize=None)(self._coefficients)
        self.call = lru_cache(maxsize=None)(self._call)

    # ------------------------------------------------------------------------------------- bytes

    @cached_property
    def elements(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Elements of a layer, of what lies before the layers, and behind them: those that ranks
        of the axis for widths divide, and those that each of them has.

        The layer is the last one, since the first ones of a mixture may be dense.  Without experts.
        """
        found, own = [[0, 0], [0, 0], [0, 0]], str(self.job.shape.layers - 1)
        for tensor in shapes.tensors(self.job.shape, ""):
            name = tensor.name.split(".")
            if name[0] == "blocks" and (name[1] != own or _EXPERTS in name):
                continue
            place = {"blocks": 0, "embed": 1}.get(name[0], 2)
            found[place][len(tensor.shape) < 2] += tensor.numel
            if place == 1 and len(tensor.units) > 1:  # tied: the last stage has it as well
                found[2][0] += tensor.numel
        layer, first, last = (tuple(pair) for pair in found)
        return layer, first, last  # type: ignore[return-value]

    @cached_property
    def expert_elements(self) -> int:
        """Elements of all experts of a layer, those that take every token left out."""
        mixture = self.job.shape.mixture
        gates = 3 if self.job.shape.mlp == "swiglu" else 2
        return gates * self.job.shape.hidden * mixture.ffn * mixture.experts if mixture else 0

    @cached_property
    def active(self) -> tuple[Shape, float]:
        """The shape whose MLP is as wide as what a token goes through, and elements that it uses
        of a layer which ranks of the axis for widths divide.
        """
        shape, mixture = self.job.shape, self.job.shape.mixture
        if mixture is None:
            return shape, self.elements[0][0]
        used = self.expert_elements * mixture.top_k / mixture.experts
        width = mixture.ffn * (mixture.top_k + mixture.shared)
        return replace(shape, ffn=width), self.elements[0][0] + used

    def stage(self, plan: Candidate, is_last: bool) -> tuple[int, float]:
        """Layers and elements of the first or the last rank of the stages.

        Experts that data ranks divide are not counted: :meth:`divided` does.
        """
        stages, t = plan.parts("layers") * plan.chunks, plan.parts("widths")
        least, extra = divmod(self.job.shape.layers, stages)
        own = range(plan.parts("layers"))[-1 if is_last else 0 :: plan.parts("layers")]
        layers = sum(
            least + (own[0] + n * plan.parts("layers") < extra) for n in range(plan.chunks)
        )
        layer = self.elements[0][0] / t + self.elements[0][1]
        layer += self.expert_elements / t if plan.experts == 1 else 0
        return layers, layers * layer + self._ends(plan, is_last)

    def _ends(self, plan: Candidate, is_last: bool) -> float:
        """Elements of what lies before or behind the layers of a rank."""
        t = plan.parts("widths")
        first, last = ((a / t + b) for a, b in self.elements[1:])
        if plan.parts("layers") > 1:
            # A schedule that goes there and back has both ends on the first rank.
            return last if is_last else first + last * (plan.schedule in V_SHAPED)
        # A tied weight is there once.
        return first + last - self.elements[1][0] / t * self.job.shape.tied

    def divided(self, plan: Candidate, layers: int) -> float:
        """Elements of experts on a rank, if data ranks divide them."""
        share = plan.experts * plan.parts("widths")
        return layers * self.expert_elements / share if plan.experts > 1 else 0.0

    def _coefficients(self, key: tuple[Any, ...]) -> Coefficients:
        implementation, along, names, values = key
        options = dict(zip(names, values, strict=True))
        about = shapes.accountings()[self.job.accounting]
        if policy := {n: about[n] for n in ("parameters", "reduce") if n in about}:
            options["precision"] = policy
        return coefficients(strategy_of(implementation), dict(along), options, self.job.accounting)

    def of(self, plan: Candidate) -> Coefficients:
        """The coefficients of its data axes."""
        own = {k: v for k, v in plan.options.items() if k in ("data", "sharding_strategy")}
        layers = axes.cutting("layers")
        along = tuple((n, min(2, s) if n == layers else 2) for n, s in plan.mesh.items())
        return self.coefficients((plan.implementation, along, (*own,), (*own.values(),)))

    def bytes(self, plan: Candidate) -> float:
        """Most bytes of a rank."""
        found = self.of(plan)
        shards = axes.size(plan.mesh, axes.sharded(plan.mesh)) or 1
        most = 0.0
        for is_last in {False, plan.parts("layers") > 1}:
            layers, elements = self.stage(plan, is_last)
            state = elements * (found.whole + found.divided / shards)
            # Ranks that hold the same experts hold copies of them.
            state += self.divided(plan, layers) * (found.whole + found.divided)
            if plan.options.get("offload"):
                # Masters and moments rest in host memory; values and gradients do not.
                state -= elements * self._updated / shards
            if found.gathers == "all":
                state += elements * self.item
            elif found.gathers:
                # The ends of the model are a unit that stays, with its gradient; of the layers two.
                one = elements - self._ends(plan, is_last)
                state += 2 * self.item * (one / max(1, layers) + self._ends(plan, is_last))
            most = max(most, state + self._activations(plan, layers, is_last))
        return most

    @property
    def _updated(self) -> float:
        """Bytes of masters and moments for an element."""
        about = shapes.accountings()[self.job.accounting]
        built = ITEMSIZE[about["built"]]
        return built * (2 * (about.get("optimizer", "adamw") != "sgd") + ("parameters" in about))

    def _activations(self, plan: Candidate, layers: int, is_last: bool) -> float:
        shape, stages = self.job.shape, plan.parts("layers")
        work, how = BatchSize(plan.samples, self.job.positions), self._setting(plan)
        layer = self._kept(plan)
        token = how.tokens(shape, work) * shape.hidden * self.item
        unit = activations.UnitBytes(layer, token / (how.tensor if how.sequence_parallel else 1))
        ends = [*activations.of_ends(shape, work, how)]
        # The formula counts the logits once.
        logits = how.tokens(shape, work) * shape.vocab / how.tensor
        ends[1] += (_OF_LOGIT - max(_FP32, self.item)) * logits
        again = plan.recompute or activations.NONE
        if stages == 1:
            return activations.of_units(ends[0], [unit] * layers, ends[1], again).peak
        window = Setting(stages, plan.micro_batches, plan.chunks)
        form = FORMS.get(plan.schedule)
        held = form.held(window, stages - 1 if is_last else 0) if form else None
        of_chunk = activations.of_units(0, [unit] * -(-layers // plan.chunks), 0, again)
        flying = (held or plan.micro_batches) * of_chunk.by_forward
        return flying + of_chunk.peak - of_chunk.by_forward + self._of_end(plan, ends, is_last)

    @staticmethod
    def _of_end(plan: Candidate, ends: Sequence[float], is_last: bool) -> float:
        if plan.schedule in V_SHAPED and not is_last:
            return sum(ends)
        return ends[1] if is_last else ends[0]

    def _kept(self, plan: Candidate) -> float:
        """Bytes that a layer keeps for backward."""
        shape, how = self.active[0], self._setting(plan)
        work = BatchSize(plan.samples, self.job.positions)
        found, tokens = activations.of_layer(shape, work, how), how.tokens(shape, work)
        own = tokens * shape.hidden * self.item
        if how.sequence_parallel and how.tensor > 1:
            # Inputs of products are kept as they were gathered, not as the norms gave them.
            found += 2 * own * (1 - 1 / how.tensor)
        if shape.norm == "rms" and self.item < _FP32:
            found += 2 * _WIDE * own / (how.tensor if how.sequence_parallel else 1)
        if shape.attention == "flash":
            found += _FP32 * tokens * shape.heads / how.tensor  # a number for each row of scores
        if shape.mixture:
            # A row for each choice of a token: what its expert is given, and what it returns.
            rows = tokens * shape.mixture.top_k
            found += 2 * rows * shape.hidden * self.item
        return found

    def _setting(self, plan: Candidate) -> activations.LayerSetting:
        return activations.LayerSetting(
            item=self.item,
            tensor=plan.parts("widths"),
            sequence_parallel=bool(plan.options.get("sequence_parallel", False)),
            cut=plan.parts("positions"),
        )

    # ----------------------------------------------------------------------------------- seconds

    def estimated(self, plan: Candidate) -> Estimated:
        """All of it."""
        size, stages = self.bytes(plan), plan.parts("layers")
        forward, backward, exposed = self._layer(plan)
        layers, elements = self.stage(plan, is_last=False)
        head = self._head(plan)
        chunk = layers / plan.chunks
        # The slowest stage sets the pace: the last one has the head.
        last = self.stage(plan, is_last=True)[0] * (forward + backward) + head
        turn = max(layers * (forward + backward), last)
        bubble = 0.0
        if stages > 1:
            message = self._message(plan)
            bubble = self.bubble(plan, layers * forward + message, layers * backward + message)
        hidden = chunk * plan.chunks * backward
        data = self._data(plan, elements, hidden)
        shards = axes.size(plan.mesh, axes.sharded(plan.mesh)) or 1
        held = elements * (self.of(plan).whole + self.of(plan).divided / shards)
        update = _UPDATED * held / (self.machine.bandwidth_share * self.machine.bandwidth)
        if plan.options.get("offload"):
            # Down and up once a step, over a link that is no faster than that between nodes.
            update += 2 * elements * self._updated / shards / self.machine.inter.bandwidth
        exposed = plan.micro_batches * layers * exposed + data
        seconds = plan.micro_batches * turn + bubble + data + update
        return Estimated(size, seconds, bubble, exposed)

    def _layer(self, plan: Candidate) -> tuple[float, float, float]:
        """Seconds of a layer forward and backward, and those of both in which calls are exposed."""
        shape, t = self.job.shape, plan.parts("widths")
        work, how = BatchSize(plan.samples, self.job.positions), self._setting(plan)
        tokens = how.tokens(shape, work)
        products = 2 * tokens * self.active[1] / t
        # Of the square of positions a causal mask leaves half; two products for each pair.
        scores = 2 * tokens * self.job.positions * shape.hidden / t
        kept, machine = self._kept(plan), self.machine
        rest = _MOVED * kept / (machine.bandwidth_share * machine.bandwidth)
        one = machine.seconds(products, 0, self.dtype)
        one += machine.seconds(scores, 0, self.dtype, is_attention=True)
        hidden = tokens * shape.hidden * self.item
        summed = 2 * self.call(("all_reduce", hidden, self._group(plan, "widths")))
        keys = 2 * tokens * (shape.hidden // shape.heads) * shape.kv * self.item / t
        cut = plan.parts("positions")
        passed = (cut - 1) * self._step(plan, keys) if cut > 1 else 0.0
        travels = self._exchanged(plan, tokens)
        passed += travels
        forward = one + rest * 2 / _MOVED + summed + passed
        # Gradients of keys and values travel with them; those of rows take their place.
        again = 2 * passed - travels
        backward = 2 * one + rest * 3 / _MOVED + summed + again
        calls = 2 * summed + passed + again
        if plan.recompute:
            backward, calls = backward + forward, calls + summed + passed
        return forward, backward, calls

    def _exchanged(self, plan: Candidate, tokens: int) -> float:
        """Seconds in which rows go to their experts, and results come back."""
        mixture = self.job.shape.mixture
        if mixture is None or plan.experts == 1:
            return 0.0
        size = float(tokens * mixture.top_k * self.job.shape.hidden * self.item)
        stride = plan.parts("widths") * plan.parts("positions")
        return 2 * self.call(("all_to_all", size, (stride, plan.experts)))

    def _head(self, plan: Candidate) -> float:
        shape, how = self.job.shape, self._setting(plan)
        tokens = how.tokens(shape, BatchSize(plan.samples, self.job.positions))
        products = 6 * tokens * shape.hidden * shape.vocab / plan.parts("widths")
        logits = 4 * tokens * shape.vocab / plan.parts("widths")
        moved = _MOVED * logits / (self.machine.bandwidth_share * self.machine.bandwidth)
        return self.machine.seconds(products, 0, self.dtype) + moved

    def _data(self, plan: Candidate, elements: float, backward: float) -> float:
        """Seconds of the calls of data axes that nothing hides."""
        found, shown = self.of(plan), 0.0
        overlaps = is_promised(plan.strategy, "overlap")
        shards = axes.size(plan.mesh, axes.sharded(plan.mesh)) or 1
        for sent in found.sent:
            names = sent.axis.split("+")
            group = self._along(plan, names)
            # Copies of shards sum shards: the probe's were a quarter of the model.
            is_apart = bool(axes.sharded(plan.mesh)) and not {*names} & {*axes.sharded(plan.mesh)}
            share = 4 / shards if is_apart else 1.0
            for each, times in ((sent.once, 1), (sent.each, plan.micro_batches)):
                factor = 0.5 if sent.operation == "all_reduce" else 1.0
                size = max(0.0, each) * share * factor * elements
                took = times * self.call((sent.operation, size, group)) if size else 0.0
                can_hide = plan.parts("layers") == 1
                can_hide = can_hide and (overlaps or sent.operation != "all_gather")
                shown += max(0.0, took - times * backward) if can_hide else took
        return shown

    def bubble(self, plan: Candidate, forward: float, backward: float) -> float:
        """Seconds that ranks wait for other stages; these times are of a rank and a micro-batch."""
        ranks = plan.parts("layers")
        half = Fraction(backward / 2).limit_denominator(10**9)
        own = Fraction(forward).limit_denominator(10**9)
        window = Setting(ranks, plan.micro_batches, plan.chunks, own, half, half)
        form = FORMS.get(plan.schedule)
        told = form.makespan(window) if form else None
        if told is not None:
            return float(told)
        # With equal times there may be a closed form; else it is played.
        told = form.makespan(Setting(ranks, plan.micro_batches, plan.chunks)) if form else None
        if told is not None:
            return float(told) / 3 * (forward + backward)
        # As many micro-batches as fill it: each further one adds work.
        few = min(plan.micro_batches, 2 * ranks + plan.micro_batches % ranks)
        return self.played(plan.implementation, plan.schedule, ranks, few) * (forward + backward)

    @staticmethod
    @cache
    def played(implementation: str, schedule: str, ranks: int, micro_batches: int) -> float:
        """The bubble of a schedule in units of a rank's work on one micro-batch."""
        system: Any = system_of(implementation)
        order = system.schedule({"schedule": schedule}, ranks, micro_batches)
        return schedules.simulate(order).makespan / 3 - micro_batches

    def _message(self, plan: Candidate) -> float:
        """Seconds of a message to the next stage."""
        how = self._setting(plan)
        tokens = how.tokens(self.job.shape, BatchSize(plan.samples, self.job.positions))
        size = float(tokens * self.job.shape.hidden * self.item)
        size /= how.tensor if how.sequence_parallel else 1
        apart = self.job.gpus // plan.parts("layers")
        return message_seconds(size, 0, apart, self.machine)

    def _step(self, plan: Candidate, size: float) -> float:
        """Seconds in which a ring of positions passes ``size`` bytes on: of its slowest link."""
        group = self._group(plan, "positions")
        last = (group[1] - 1) * group[0]
        return message_seconds(size, 0, last, self.machine)

    def _group(self, plan: Candidate, what: axes.Cut) -> tuple[int, int]:
        return self._along(plan, [axes.cutting(what)])

    def _along(self, plan: Candidate, names: list[str]) -> tuple[int, int]:
        """Stride and ranks of the groups along neighbouring axes."""
        order = [*plan.mesh]
        inside = [n for n in order if n not in names and order.index(n) > _last(order, names)]
        return axes.size(plan.mesh, inside), axes.size(plan.mesh, names)

    def _call(self, key: tuple[str, float, tuple[int, int]]) -> float:
        operation, size, (stride, ranks) = key
        return call_seconds(operation, size, range(0, stride * ranks, stride), self.machine)


def _last(order: list[str], names: list[str]) -> int:
    return max((order.index(name) for name in names if name in order), default=len(order))
