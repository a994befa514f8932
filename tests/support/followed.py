"""Systems with further state or loss terms of their own, sound and with one fault each.

Plain data parallelism, written by hand, as a user's class would be (contract 3).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from shardproof.contract import PROFILES, Capabilities, Implementation, Piece, StepResult, average


class ByHand(Implementation):
    """Every gradient is summed after backward."""

    strategy = "naive_ddp"
    rules: ClassVar = {}
    scopes = ()

    @classmethod
    def capabilities(cls, options):
        declines = {"loss_scale": "not written", "unused": "not written"}
        return Capabilities(
            features=PROFILES["naive_ddp"],
            buffers="per_rank",
            declines=declines,
            follows=cls.rules,
            scopes=cls.scopes,
        )

    @torch.no_grad()
    def setup(self, build, state, optimizer, mesh, options):
        self.build, self.spec, self.comm = build, optimizer, mesh.comm("replicate")
        self.model = build(mesh.device)
        held = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for name, value in (state or {}).items():
            held[name].copy_(value)
        for value in held.values():
            self.comm.broadcast(value)
        self.named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        more = {"weight_decay": optimizer.weight_decay, **optimizer.arguments}
        self.optimizer = optimizer.kind(self.named.values(), **more)
        self.begin()

    def begin(self):
        """Make what follows training."""

    def backward(self, batch):
        total = torch.zeros((), dtype=torch.float64)
        for micro in batch.micro_batches:
            loss = self.build.loss(self.model(micro.inputs), micro)
            loss.backward()
            total += loss.detach()
        return total

    def step(self, batch, observe):
        total = self.backward(batch)
        for p in self.named.values():
            self.comm.all_reduce(p.grad)
        observe("gradients_final")
        self.update(batch)
        observe("after_update")
        self.optimizer.zero_grad()
        return StepResult(total)

    def update(self, batch):
        for group in self.optimizer.param_groups:
            group["lr"] = self.spec.lr_at(batch.step)
        self.optimizer.step()

    def local_state(self, kind):
        state = self.optimizer.state
        slots = {f"{n}.{s}": v for n, p in self.named.items() for s, v in state[p].items()}
        held = {
            "parameters": dict(self.model.named_parameters()),
            "buffers": dict(self.model.named_buffers()),
            "gradients": {n: p.grad for n, p in self.named.items() if p.grad is not None},
            "optimizer": slots,
        }[kind]
        return [Piece.whole(n, t.detach(), replica=self.comm.rank) for n, t in held.items()]


# ----------------------------------------------------------------------------------- further state


class Averaging(ByHand):
    """An average and a counter."""

    rules: ClassVar = {"average.*": average(0.9), "updates": "0 -> was + 1"}

    def begin(self):
        self.average = {f"average.{n}": p.detach().clone() for n, p in self.named.items()}
        self.count = 0

    def update(self, batch):
        super().update(batch)
        self.count += 1
        for name, p in self.named.items():
            self.average[f"average.{name}"].lerp_(p.detach(), 0.1)

    def extra_state(self):
        return {**self.average, "updates": self.count}


class DecaysSlower(Averaging):
    """The average has another decay than is declared."""

    rules: ClassVar = {**Averaging.rules, "average.*": average(0.8)}


class IsTheParameter(Averaging):
    """The average shares its memory with the parameter."""

    def begin(self):
        super().begin()
        self.average = {f"average.{n}": p.detach() for n, p in self.named.items()}


class CountsMicroBatches(Averaging):
    """The counter is moved once a micro-batch."""

    def update(self, batch):
        super().update(batch)
        self.count += len(batch.micro_batches) - 1


class HeldInBfloat16(Averaging):
    """The average is held in a dtype in which the first rule still shows."""

    def begin(self):
        super().begin()
        self.average = {name: own.bfloat16() for name, own in self.average.items()}

    def update(self, batch):
        ByHand.update(self, batch)
        self.count += 1
        for name, p in self.named.items():
            own = self.average[f"average.{name}"]
            own.copy_(own.double().lerp_(p.detach().double(), 0.1))


class FrozenInBfloat16(HeldInBfloat16):
    """Every change of the rule is below the last places of its dtype; it never moves."""

    rules: ClassVar = {"average.*": average(0.9999), "updates": "0 -> was + 1"}

    def update(self, batch):
        ByHand.update(self, batch)
        self.count += 1


class WithoutRules(Averaging):
    """State is shown, and no rule is declared for any: it is equal on all ranks, and moves."""

    rules: ClassVar = {}


class WithoutRulesApart(WithoutRules):
    """Only one rank moves it."""

    def update(self, batch):
        if self.comm.rank == 0:
            super().update(batch)
        else:
            ByHand.update(self, batch)


class WithoutRulesStill(WithoutRules):
    """Nobody moves it."""

    def update(self, batch):
        ByHand.update(self, batch)


class LacksOne(Averaging):
    """One average is not shown."""

    def extra_state(self):
        return dict(list(super().extra_state().items())[1:])


class Invents(Averaging):
    """State without a rule is shown."""

    def extra_state(self):
        return {**super().extra_state(), "more": 1.0}


class Equal(ByHand):
    """A number of which nothing is known but that it moves, and is the same on all ranks."""

    rules: ClassVar = {"temperature": "equal"}

    def begin(self):
        self.temperature = torch.ones(2)

    def update(self, batch):
        super().update(batch)
        self.temperature = self.temperature * 0.5

    def extra_state(self):
        return {"temperature": self.temperature}


class EqualButStill(Equal):
    """It never moves."""

    def update(self, batch):
        ByHand.update(self, batch)


class EqualButApart(Equal):
    """It differs by rank."""

    def update(self, batch):
        super().update(batch)
        self.temperature += self.comm.rank


class Scheduled(ByHand):
    """Weight decay and momentum follow schedules."""

    rules: ClassVar = {
        "optimizer.weight_decay": "0.1 * (1 + cos(pi * step / 4)) / 2",
        "optimizer.momentum": "min(0.9, 0.5 + 0.1 * step)",
    }
    late = 0

    def update(self, batch):
        step = torch.tensor(float(max(0, batch.step - self.late)), dtype=torch.float64)
        self.decay = float(0.1 * (1 + torch.cos(torch.pi * step / 4)) / 2)
        self.momentum = min(0.9, 0.5 + 0.1 * batch.step)
        for group in self.optimizer.param_groups:
            group["weight_decay"], group["momentum"] = self.decay, self.momentum
        super().update(batch)

    def extra_state(self):
        decay = getattr(self, "decay", 0.0)
        return {
            "optimizer.weight_decay": decay,
            "optimizer.momentum": getattr(self, "momentum", 0.0),
        }


class ScheduledLate(Scheduled):
    """The weight decay of the step before is used, and told."""

    late = 1


class ScheduledByDivision(Scheduled):
    """Declares what has no value in the first step."""

    rules: ClassVar = {"optimizer.weight_decay": "0.1 / step"}


class ScheduledByItself(Scheduled):
    """Declares a value that updates use by the one before, which nobody has in the first step."""

    rules: ClassVar = {"optimizer.momentum": "0.9 * was"}


class Given(ByHand):
    """The largest gradient so far, by a function of the class's own."""

    rules: ClassVar = {"largest": "given"}

    @classmethod
    def given_state(cls, now, options):
        if now.step < 0:
            return {"largest": torch.zeros(())}
        sizes = [g.abs().max() for g in now.gradients.values()]
        return {"largest": torch.stack([now.was["largest"].double(), *sizes]).max()}

    def begin(self):
        self.largest = torch.zeros((), dtype=torch.float64)

    def seen(self):
        return torch.stack([p.grad.abs().max() for p in self.named.values()]).max()

    def update(self, batch):
        self.largest = torch.maximum(self.largest, self.seen())
        super().update(batch)

    def extra_state(self):
        return {"largest": self.largest}


class GivenOfOne(Given):
    """Only the last parameter's gradient is looked at."""

    def seen(self):
        return next(reversed(self.named.values())).grad.abs().max()


class MovesBuffer(ByHand):
    """After the update a buffer of the model is moved, by its counts on all ranks together."""

    rules: ClassVar = {"bias": "given", "load": "given"}

    @classmethod
    def given_state(cls, now, options):
        total = sum(own["load"].double() for own in now.buffers)
        moved = now.was["bias"].double() + 0.01 * torch.sign(total.mean() - total)
        return {"bias": moved, "load": torch.zeros_like(total)}

    def total(self):
        total = self.model.load.clone()
        self.comm.all_reduce(total)
        return total

    def update(self, batch):
        super().update(batch)
        total = self.total()
        self.model.bias += 0.01 * torch.sign(total.mean() - total)
        self.model.load.zero_()


class MovesByLocalCounts(MovesBuffer):
    """The counts of this rank alone decide."""

    def total(self):
        return self.model.load.clone()


class ForgetsToMove(MovesBuffer):
    """The buffer stays as it is."""

    def update(self, batch):
        ByHand.update(self, batch)
        self.model.load.zero_()


# ---------------------------------------------------------------------------------------- settings


class DecaysTwice(ByHand):
    """Parameters decay by hand, and in the optimizer once more."""

    @torch.no_grad()
    def update(self, batch):
        for p in self.named.values():
            p.mul_(1 - self.spec.lr_at(batch.step) * self.spec.weight_decay)
        super().update(batch)


class Uses(ByHand):
    """The optimizer has other settings than are given."""

    other: ClassVar = {}

    def begin(self):
        for group in self.optimizer.param_groups:
            group.update(self.other)


class UsesMomentum(Uses):
    """SGD."""

    other: ClassVar = {"momentum": 0.8}


class UsesBetas(Uses):
    """AdamW: one of both."""

    other: ClassVar = {"betas": (0.9, 0.999)}


class UsesEps(Uses):
    """AdamW."""

    other: ClassVar = {"eps": 1e-4}


class RoundsOne(ByHand):
    """The gradient of one parameter is rounded."""

    def step(self, batch, observe):
        def rounding(point):
            p = list(self.named.values())[3]
            if point == "gradients_final":
                p.grad.copy_(p.grad.bfloat16())
            observe(point)

        return super().step(batch, rounding)


# -------------------------------------------------------------------------------------- loss terms


class AddsTerms(ByHand):
    """Forward of all micro-batches, sums of statistics over all ranks, then backward."""

    scopes = ("rank", "global")

    def whole(self, term, own):
        total = own.detach().clone()
        if term.scope == "global":
            self.comm.all_reduce(total)
        return total

    def pull(self, slope):
        return slope

    def share(self, term, value):
        return value / self.comm.size if term.scope == "global" else value

    def backward(self, batch):
        outputs = [self.model(micro.inputs) for micro in batch.micro_batches]
        pairs = list(zip(outputs, batch.micro_batches, strict=True))
        loss = sum(self.build.loss(*pair) for pair in pairs)
        told = loss.detach().clone()
        for term in self.build.terms:
            own = sum(term.statistics(*pair) for pair in pairs)
            total = self.whole(term, own).requires_grad_()
            value = term.value(total)
            [slope] = torch.autograd.grad(value, [total])
            loss = loss + (self.pull(slope) * own).sum()
            told = told + self.share(term, value.detach())
        loss.backward()
        return told


class PullTimesRanks(AddsTerms):
    """The loss is right; the gradient of the term is weighted by the number of ranks."""

    def pull(self, slope):
        return self.comm.size * slope


class PullsNothing(AddsTerms):
    """The loss is right; the gradient of the term is left out."""

    def pull(self, slope):
        return 0 * slope


class PullOfThisRank(AddsTerms):
    """The value is that of the global batch; the gradient is that of this rank's share."""

    def whole(self, term, own):
        self.right = term.value(super().whole(term, own))
        return own.detach().clone()

    def share(self, term, value):
        return super().share(term, self.right)


class TermOfThisRank(AddsTerms):
    """A term over the global batch is computed over this rank's share."""

    def whole(self, term, own):
        return own.detach().clone()


class TermOfMicroBatches(AddsTerms):
    """The term is computed in each micro-batch, and added up."""

    def backward(self, batch):
        total = torch.zeros((), dtype=torch.float64)
        for micro in batch.micro_batches:
            outputs = self.model(micro.inputs)
            loss = self.build.loss(outputs, micro)
            loss = loss + sum(t.value(t.statistics(outputs, micro)) for t in self.build.terms)
            loss.backward()
            total += loss.detach()
        return total


class TermOfEach(AddsTerms):
    """The term is computed over all ranks, and anew for each micro-batch."""

    def backward(self, batch):
        total = torch.zeros((), dtype=torch.float64)
        for micro in batch.micro_batches:
            one = replace(batch, windows=((micro,),))
            total += super().backward(one)
        return total


class TermOfTheFirst(AddsTerms):
    """The term is that of the first micro-batch of all ranks."""

    def backward(self, batch):
        kept, self.build.terms = self.build.terms, []
        total = super().backward(batch)
        self.build.terms = kept
        micro = batch.micro_batches[0]
        with torch.no_grad():
            outputs = self.model(micro.inputs)
            for term in kept:
                value = term.value(self.whole(term, term.statistics(outputs, micro)))
                total += self.share(term, value)
        return total


class TermTimesRanks(AddsTerms):
    """The term is weighted by the number of ranks, as if gradients were averaged."""

    def backward(self, batch):
        kept = self.build.terms
        self.build.terms = [Times(term, self.comm.size) for term in kept]
        try:
            return super().backward(batch)
        finally:
            self.build.terms = kept


class Times:
    """``times`` a term."""

    def __init__(self, term, times):
        self.term, self.times, self.scope = term, times, term.scope

    def statistics(self, outputs, micro):
        return self.term.statistics(outputs, micro)

    def value(self, statistics):
        return self.times * self.term.value(statistics)


class LeavesTermsOut(AddsTerms):
    """The term is not added at all."""

    def backward(self, batch):
        return ByHand.backward(self, batch)


class Version2(ByHand):
    """A class that knows nothing of version 3."""

    @classmethod
    def capabilities(cls, options):
        return replace(super().capabilities(options), follows={}, scopes=())
