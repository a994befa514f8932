"""The oracle: the same training in one process, in plain torch.

It accumulates over the same (data coordinate, micro-batch) pieces at the same shapes: inside a
coordinate in the order of its micro-batches, then a left fold over coordinates in rank order.  That
order is what makes bitwise comparison possible at all.

Buffers follow the declared rule:

* ``rank0``: every coordinate starts each step from coordinate 0's buffers (a broadcast at the start
  of the step, as DDP does it);
* ``per_rank``: every coordinate keeps its own;
* ``none``: the same, for a system that promises nothing of buffers, which are not compared;
* ``synced``: batch statistics are those of all coordinates' micro-batches of the same index, which
  run as one (SyncBatchNorm); the coordinates must have equally many.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial, reduce
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import pad_sequence

from shardproof import tensor_bytes
from shardproof.case import Case
from shardproof.contract import (
    Batch,
    BatchRule,
    BufferRule,
    LossTerm,
    MicroBatch,
    Now,
    OptimizerSpec,
    ScalerSpec,
)
from shardproof.oracle.exactness import budget
from shardproof.oracle.members import StepMembers, heirs, sources
from shardproof.oracle.members import of as members_of
from shardproof.oracle.optimizers import build_optimizer, read_slots, set_learning_rate
from shardproof.oracle.truth import Truth, TruthStep
from shardproof.registry import follows
from shardproof.registry.follows import Follows
from shardproof.workloads import Workload, for_case, make, mixture
from shardproof.workloads.draws import read_draws, restore_draws

Tensors = dict[str, Tensor]
#: Policy of mixed precision, as in ``Case.precision``.
Precision = Mapping[str, str]
#: From a step's number and its gradients per coordinate, in order, to the gradient that is applied.
Fold = Callable[[int, Sequence[Tensors]], Tensors]
#: A change of a model before it runs; ``None``: none.
Change = Callable[[nn.Module], None] | None


class NotJoined(ValueError):
    """Data coordinates have unequal numbers of micro-batches, draw apart, or have loss terms."""


@dataclass(frozen=True)
class Way:
    """In what a training differs from the plain one.

    ``precision`` is one device's idea of a mixed-precision policy (``Case.precision``): forward and
    backward in ``parameters``, gradients added up in ``reduce``, updates on masters as built; the
    gradients and parameters of the record are those of the masters.

    ``members``: who takes part in each step, where that changes; ``coordinates`` are all ranks.
    Who joins begins with the buffers and draws of the first member that stayed.

    ``fold(step, parts)`` replaces the sum over coordinates: the oracle of a system that loses
    precision in a declared manner (``Implementation.emulator``).  ``by_round``: it is called for
    every round (the n-th micro-batch of all coordinates), and what it gives adds up.

    ``follows``: further state of the system on which training depends: values that an update uses,
    buffers that are moved after it.

    With ``forced`` (teacher forcing) step ``s`` leaves the parameters ``forced[s]`` behind instead
    of its own.
    """

    precision: Precision = field(default_factory=dict)
    members: Sequence[StepMembers] = ()
    fold: Fold | None = None
    by_round: bool = False
    follows: Follows = follows.NONE
    forced: Sequence[Tensors] = ()


#: One device, all coordinates in every step, gradients added up.
PLAIN = Way()


def train(
    workload: Workload,
    optimizer: OptimizerSpec,
    coordinates: int,
    steps: int,
    buffers_rule: BufferRule = "rank0",
    way: Way = PLAIN,
) -> Truth:
    """Train ``steps`` steps over ``coordinates`` data coordinates and record everything.

    A parameter that no coordinate used has no gradient and is not updated; one that only some used
    counts as 0 for the others.

    :raises NotJoined: ``synced``, of coordinates that one device cannot run as one.
    """
    training = _Training(workload, optimizer, coordinates, buffers_rule, way)
    record = Truth(copies(training.model.parameters))
    for step in range(steps):
        record.steps.append(training.step(step))
        if way.forced:
            force(training.model.parameters, way.forced[step])
        training.model.device.round_masters()
    return record


class Trainee:
    """A model with its optimizer on one device."""

    def __init__(
        self,
        workload: Workload,
        optimizer: OptimizerSpec,
        precision: Precision,
        coordinate: int = 0,
    ) -> None:
        # Models draw apart only where they have a stateful dropout; values are loaded.
        build = workload.build_for(0, coordinate)
        self.module = build()
        workload.load(self.module)
        self.module.train()
        self.build = build
        self.device = Device(self.module, build.loss, precision, optimizer.scaler)
        self.parameters = self.device.masters
        self.named = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.optimizer = build_optimizer(optimizer, self.named)

    def update(
        self, step: int, spec: OptimizerSpec, gradients: Tensors, losses: Sequence[float]
    ) -> TruthStep:
        """Update by reduced ``gradients``, which may be scaled; what the step came to.

        It has no buffers yet.
        """
        for name, gradient in gradients.items():
            self.named[name].grad = self.device.unscaled(name, gradient)
        scale, skipped = self.device.scale, self.device.overflowed(self.named.values())
        final, clipped = self._gradients(), None
        if spec.clip_norm is None or skipped:
            norm = torch.nn.utils.get_total_norm(list(final.values()), foreach=False)
        else:
            held = self.named.values()
            norm = torch.nn.utils.clip_grad_norm_(held, spec.clip_norm, foreach=False)
            clipped = self._gradients()
        set_learning_rate(self.optimizer, spec, step)
        if not skipped:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return TruthStep(
            loss=sum(losses),
            losses=losses,
            norm=norm.detach().clone(),
            gradients=final,
            clipped=clipped,
            parameters=copies(self.parameters),
            optimizer=copies(read_slots(self.optimizer, self.named)),
            buffers=[],
            scale=scale,
            skipped=skipped,
        )

    def _gradients(self) -> Tensors:
        return {name: p.grad.clone() for name, p in self.named.items() if p.grad is not None}


class _Training:
    """All coordinates on one model, with the buffers and draws of each."""

    def __init__(
        self,
        workload: Workload,
        optimizer: OptimizerSpec,
        coordinates: int,
        rule: BufferRule,
        way: Way,
    ) -> None:
        self.workload, self.optimizer, self.rule, self.way = workload, optimizer, rule, way
        self.model = Trainee(workload, optimizer, way.precision)
        self.ranks = way.members[0].begin if way.members else tuple(range(coordinates))
        self.buffers = [buffers_of(self.model.module) for _ in self.ranks]
        self.draws = [read_draws(self.model.module) for _ in self.ranks]
        if self.draws[0]:
            if rule == "synced":
                raise NotJoined(
                    "buffers = 'synced' does not work with dropout: the reference run joins the "
                    "data of all ranks, so it cannot draw a different dropout mask for each rank"
                )
            builds = (workload.build_for(0, number) for number, _ in enumerate(self.ranks))
            self.draws = [read_draws(build("meta")) for build in builds]

    def step(self, step: int) -> TruthStep:
        """One step of all."""
        batches, spec = self._share_out(step)
        spec = self.way.follows.spec(spec, step)
        pulls = self._pulls(batches)
        routed: list[Tensors] = []
        if self.rule == "synced":
            parts = [_joint(self.model.device, batches, self.buffers)]
        else:
            parts = [
                self._accumulate(n, *each, routed)
                for n, each in enumerate(zip(batches, pulls, strict=True))
            ]
        fold = self.way.fold
        total, given, sent = _reduced(step, [gradients for _, gradients in parts], fold)
        kept = copies(getattr(fold, "kept", {}))
        losses = [loss for own, _ in parts for loss in own]
        done = self.model.update(step, spec, total, losses)
        if not done.skipped:
            self._move_buffers(step, done)
        done = replace(done, buffers=list(self.buffers), routed=routed)
        return replace(done, given=given, sent=sent, kept=kept)

    def _move_buffers(self, step: int, done: TruthStep) -> None:
        """Move those that the system moves after its update, alike for all coordinates."""
        if not (names := self.way.follows.moved(self.buffers[0])):
            return
        state = done.parameters, done.gradients, done.optimizer, self.buffers
        moved = self.way.follows.values(names, Now(step, self.buffers[0], *state))
        first = self.buffers[0]
        own = {name: value.to(first[name].dtype) for name, value in moved.items()}
        self.buffers = [{**each, **own} for each in self.buffers]

    def _pulls(self, batches: Sequence[Batch]) -> Pulls:
        """How terms of the loss that span micro-batches pull at those of each coordinate."""
        terms, device = self.model.build.terms, self.model.device
        if not terms:
            return [[] for _ in batches]
        if self.rule == "synced":
            raise NotJoined(
                "buffers = 'synced' does not work with a loss term over several micro-batches: the "
                "reference run joins the data of all ranks, so it cannot compute the term per rank"
            )
        parts = []
        for number, batch in enumerate(batches):
            self._enter(number)
            parts.append(device.statistics(terms, batch))
        return pulls(terms, parts)

    def _enter(self, number: int) -> None:
        """Put the buffers and draws of a coordinate into the model."""
        module = self.model.module
        if number == 0 and self.rule == "rank0":
            self.buffers = [self.buffers[0]] * len(self.ranks)
        force(dict(module.named_buffers()), self.buffers[number])
        restore_draws(module, self.draws[number])

    def _share_out(self, step: int) -> tuple[Sequence[Batch], OptimizerSpec]:
        """The batch of each coordinate, and the optimizer of the step; members may change."""
        if not self.way.members:
            return self.workload.batch(step, len(self.ranks)), self.optimizer
        now = self.way.members[step]
        places = [self.ranks.index(source) for source in sources(self.way.members, step).values()]
        self.buffers = [self.buffers[place] for place in places]
        self.draws = [self.draws[place] for place in places]
        regroup = getattr(self.way.fold, "regroup", None)
        if now.members != self.ranks and regroup is not None:
            regroup(heirs(self.way.members, step))
        self.ranks = now.members
        batches = self.workload.at(now.first, now.size).batch(step, len(self.ranks))
        return batches, replace(self.optimizer, lr=self.optimizer.lr * now.rate)

    def _accumulate(
        self, number: int, batch: Batch, pulled: Sequence[Pull], routed: list[Tensors]
    ) -> tuple[list[float], list[Tensors]]:
        """Loss and gradients of one coordinate, from its own buffers and draws; ``routed`` gets
        what its tokens chose.
        """
        module = self.model.module
        self._enter(number)
        found = self.model.device.accumulate(batch, self.way.by_round, pulled)
        self.buffers[number], self.draws[number] = buffers_of(module), read_draws(module)
        routed.append(self.model.device.routed)
        return found


@dataclass(frozen=True)
class Pull:
    """The effect of a loss term that spans micro-batches on one data coordinate.

    ``slope``: by how much the term changes with the statistics of each of its micro-batches;
    ``share``: of the term's values, so that those of all coordinates add up.
    """

    term: LossTerm
    slope: Tensor
    share: float


Pulls = list[list[Pull]]


def pulls(terms: Sequence[LossTerm], parts: Sequence[Sequence[Sequence[Tensor]]]) -> Pulls:
    """The pulls at each coordinate, from statistics: ``parts[coordinate][term][micro-batch]``."""
    found: Pulls = [[] for _ in parts]
    for place, term in enumerate(terms):
        given = [own[place] for own in parts]
        zeros = torch.zeros_like(next(one for own in given for one in own))
        sums = [torch.stack([zeros, *own]).sum(0) for own in given]
        whole = torch.stack(sums).sum(0)
        for number, own in enumerate(sums):
            over = (own if term.scope == "rank" else whole).clone().requires_grad_()
            value = term.value(over)
            [slope] = torch.autograd.grad(value, [over])
            share = float(value.detach()) / (1 if term.scope == "rank" else len(sums))
            found[number].append(Pull(term, slope, share))
    return found


class Device:
    """One device: ``module`` computes, ``masters`` (name -> tensor, as built) are updated.

    They are the same parameters unless ``precision`` wants others to compute with.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Tensor, MicroBatch], Tensor],
        precision: Precision,
        scaler: ScalerSpec | None,
    ) -> None:
        self.module, self.loss, self.scaler = module, loss, scaler
        self.scale, self.updates = scaler.initial if scaler else 1.0, 0
        self.dtypes = {name: getattr(torch, dtype) for name, dtype in precision.items()}
        self.masters = dict(module.named_parameters())
        if "parameters" in self.dtypes:
            self.masters = {
                name: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
                for name, p in self.masters.items()
            }
            for p in module.parameters():
                p.data = p.data.to(self.dtypes["parameters"])
        for owner in module.modules() if "buffers" in self.dtypes else ():
            for name, buffer in owner.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(owner, name, buffer.to(self.dtypes["buffers"]))
        #: Layer -> choices that each expert carried out, by micro-batch of one coordinate and by
        #: position; -1 behind the last one of a shorter micro-batch.
        self.routed: Tensors = {}
        #: Names in the order in which backwards were done with them; the last one counts.
        self.done: dict[str, None] = {}
        for name, p in module.named_parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(partial(self._is_done, name))

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs in the policy's dtype."""
        outputs = self.module(self._cast(inputs, "parameters"))
        return self._cast(outputs, "output")

    @torch.no_grad()
    def statistics(self, terms: Sequence[LossTerm], batch: Batch) -> list[list[Tensor]]:
        """Of each term the statistics of every micro-batch of one coordinate."""
        found: list[list[Tensor]] = [[] for _ in terms]
        for micro in batch.micro_batches:
            outputs = self.forward(micro.inputs)
            for term, own in zip(terms, found, strict=True):
                own.append(term.statistics(outputs, micro))
        return found

    def accumulate(
        self, batch: Batch, apart: bool = False, pulled: Sequence[Pull] = ()
    ) -> tuple[list[float], list[Tensors]]:
        """Loss and scaled gradients of one coordinate; used parameters only.

        The gradients are one sum, or those of each micro-batch ``apart``.
        """
        total = sum(pull.share for pull in pulled)
        gradients: list[Tensors] = [] if apart else [{}]
        self.routed = {}
        layers = mixture.mixtures(self.module)
        for layer in layers.values():
            layer.carried_out = []
        for micro in batch.micro_batches:
            outputs = self.forward(micro.inputs)
            loss = self.loss(outputs, micro)
            pulling = [(p.slope * p.term.statistics(outputs, micro)).sum() for p in pulled]
            (sum(pulling, loss) * self.scale).backward()
            total += float(loss.detach())
            if apart:
                gradients.append(self.take_gradients({}))
            elif "reduce" in self.dtypes:
                gradients = [self.take_gradients(gradients[0])]
        samples = [len(micro.inputs) for micro in batch.micro_batches]
        for name, layer in layers.items() if samples else ():
            chosen = zip(layer.carried_out or (), samples, strict=True)
            own = [tokens.unflatten(0, (count, -1)).sum(0) for tokens, count in chosen]
            self.routed[name] = pad_sequence(own, batch_first=True, padding_value=-1)
        return [total], gradients if apart else [self.take_gradients(gradients[0])]

    def take_gradients(self, before: Tensors) -> Tensors:
        """``before`` plus the module's gradients, in the dtype of reduction; these are cleared.

        They come in the order in which backwards were done with them.
        """
        taken = dict(before)
        named = dict(self.module.named_parameters())
        for name in dict.fromkeys((*self.done, *named)):
            p = named[name]
            if p.grad is not None:
                gradient, p.grad = self._cast(p.grad, "reduce"), None
                taken[name] = taken.pop(name) + gradient if name in taken else gradient
        self.done.clear()
        return taken

    def _is_done(self, name: str, parameter: Tensor) -> None:
        self.done.pop(name, None)
        self.done[name] = None

    def unscaled(self, name: str, gradient: Tensor) -> Tensor:
        """A reduced gradient as the optimizer sees it."""
        wide = gradient.to(self.masters[name].dtype)
        return wide if self.scale == 1.0 else wide / self.scale

    def overflowed(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether this step is to be skipped; adapts the scale (``torch.amp.GradScaler``)."""
        if self.scaler is None:
            return False
        skipped = any(not bool(p.grad.isfinite().all()) for p in parameters if p.grad is not None)
        self.updates = 0 if skipped else self.updates + 1
        if skipped:
            self.scale *= self.scaler.backoff
        elif self.updates == self.scaler.interval:
            self.scale, self.updates = self.scale * self.scaler.growth, 0
        return skipped

    def round_masters(self) -> None:
        """Compute with the masters' new values."""
        if "parameters" in self.dtypes:
            force(dict(self.module.named_parameters()), self.masters)

    def _cast(self, tensor: Tensor, what: str) -> Tensor:
        dtype = self.dtypes.get(what)
        return tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor


def no_oracle_because(workload: Workload, precision: Precision) -> str:
    """Why one device cannot compute under ``precision`` (empty: it can).

    torch's batch norms want weights and running statistics of one dtype.  A system may leave its
    norms out of the policy; what is true of it then, the policy does not say.
    """
    for name, part in workload.skeleton.named_modules():
        if not isinstance(part, _BatchNorm) or part.weight is None or part.running_mean is None:
            continue
        weights = precision.get("parameters", tensor_bytes.dtype_name(part.weight))
        statistics = precision.get("buffers", tensor_bytes.dtype_name(part.running_mean))
        if weights != statistics:
            dtypes = f"weights in {weights} and running statistics in {statistics}"
            what = f"under this policy {name!r} ({type(part).__name__}) has {dtypes}"
            remedy = f"no baseline exists; set precision.buffers = {weights}"
            return f"{what}, which torch cannot compute on one device either: {remedy}"
    return ""


def force(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy ``values`` into the ``parameters`` of the same names."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])


def _reduced(
    step: int, rounds: Sequence[Sequence[Tensors]], fold: Fold | None
) -> tuple[Tensors, list[Tensors], list[Tensors]]:
    """The gradients that are applied, from those of each coordinate in each of its ``rounds``.

    Also what each coordinate gave, and what ``fold`` says that it sent of that.
    """
    if fold is None:
        return left_fold([own for (own,) in rounds]), [], []
    totals: list[Tensors] = []
    sent: list[list[Tensors]] = [[] for _ in rounds]
    depth = max(map(len, rounds))
    # What another round of the step uses is reduced in this one as well: zeros, and what was kept.
    elsewhere = {n: torch.zeros_like(g) for own in rounds for each in own for n, g in each.items()}
    for number in range(depth):
        now = [own[number] if number < len(own) else {} for own in rounds]
        totals.append(fold(step, [elsewhere | each for each in now] if depth > 1 else now))
        for told, each in zip(sent, getattr(fold, "sent", ()), strict=False):
            told.append(each)
    given = [left_fold(own) for own in rounds]
    return left_fold(totals), given, [left_fold(told) for told in sent if told]


def left_fold(parts: Sequence[Tensors]) -> Tensors:
    """Left fold in rank order; a part without a tensor that another has adds zeros."""
    names = dict.fromkeys(name for part in parts for name in part)
    total: Tensors = {}
    for name in names:
        zeros = torch.zeros_like(next(part[name] for part in parts if name in part))
        total[name] = reduce(torch.add, (part.get(name, zeros) for part in parts))
    return total


def _joint(
    device: Device, batches: Sequence[Batch], buffers: list[Tensors]
) -> tuple[list[float], list[Tensors]]:
    """The ``synced`` rule: micro-batches of equal index run as one; updates ``buffers``."""
    counts = [len(batch.micro_batches) for batch in batches]
    if len(set(counts)) > 1:
        raise NotJoined(f"buffers = 'synced': ranks have different micro-batch counts: {counts}")
    losses = [0.0] * len(batches)
    for parts in zip(*(batch.micro_batches for batch in batches), strict=True):
        outputs = device.forward(torch.cat([micro.inputs for micro in parts]))
        shares = outputs.split([len(micro.inputs) for micro in parts])
        terms = [device.loss(out, micro) for out, micro in zip(shares, parts, strict=True)]
        (torch.stack(terms).sum() * device.scale).backward()
        losses = [a + float(term.detach()) for a, term in zip(losses, terms, strict=True)]
    buffers[:] = [buffers_of(device.module)] * len(batches)
    return losses, [device.take_gradients({})]


def _device(
    workload: Workload, precision: Precision, training_mode: bool = True, change: Change = None
) -> Device:
    """A device without an optimizer, whose model, after a ``change``, is to be given a state."""
    build = workload.build_for(0)
    module = build()
    module.train(training_mode)
    if change is not None:
        change(module)
    return Device(module, build.loss, precision, None)


def evaluator(
    workload: Workload,
    precision: Precision = MappingProxyType({}),
    training_mode: bool = False,
    change: Change = None,
) -> Callable[[Tensors, Sequence[MicroBatch]], float]:
    """Tells the loss of micro-batches with a state (parameters and buffers), in evaluation mode.

    ``change`` is made to the model first.
    """
    device = _device(workload, precision, training_mode, change)

    def loss(state: Tensors, micro_batches: Sequence[MicroBatch]) -> float:
        workload.load(device.module, state)
        with torch.no_grad():
            return sum(float(device.loss(device.forward(m.inputs), m)) for m in micro_batches)

    return loss


def parts(
    workload: Workload,
    precision: Precision,
    state: Tensors,
    batch: Batch,
    pulled: Sequence[Pull] = (),
    alone: bool = False,
    change: Change = None,
) -> list[Tensors]:
    """Gradients (name -> tensor) of each micro-batch of ``batch``, from ``state``, in training
    mode.

    ``alone``: of what is ``pulled`` only, without the loss of the micro-batch.  ``change`` is made
    to the model first.
    """
    device = _device(workload, precision, change=change)
    found = []
    for micro in batch.micro_batches:
        workload.load(device.module, state)
        outputs = device.forward(micro.inputs)
        losses = [] if alone else [device.loss(outputs, micro)]
        losses += [(p.slope * p.term.statistics(outputs, micro)).sum() for p in pulled]
        torch.stack(losses).sum().backward()
        found.append(device.take_gradients({}))
    return found


def statistics(
    workload: Workload,
    precision: Precision,
    state: Tensors,
    batch: Batch,
    terms: Sequence[LossTerm],
) -> list[list[Tensor]]:
    """As :meth:`Device.statistics`, from ``state``, in training mode."""
    device = _device(workload, precision)
    workload.load(device.module, state)
    return device.statistics(terms, batch)


def buffers_after(
    workload: Workload, precision: Precision, state: Tensors, micro_batches: Sequence[MicroBatch]
) -> Tensors:
    """Buffers after forwards of ``micro_batches`` in training mode, from ``state``."""
    device = _device(workload, precision)
    workload.load(device.module, state)
    with torch.no_grad():
        for micro in micro_batches:
            device.forward(micro.inputs)
    return buffers_of(device.module)


def copies(tensors: Mapping[str, Tensor]) -> Tensors:
    """Detached copies (name -> tensor)."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def buffers_of(module: nn.Module) -> Tensors:
    """Copies of the buffers of ``module`` (name -> tensor)."""
    return copies(dict(module.named_buffers()))


# ---------------------------------------------------------------------------------------- cache


def load_or_train(
    case: Case,
    buffers_rule: BufferRule,
    cache_dir: Path,
    batch_rule: BatchRule = "global",
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Truth:
    """The oracle of ``case``, from ``cache_dir`` if it is there, else trained and put there.

    ``settings``: rules of values that updates use (``Follows.fed_back``).

    A file is valid for one version of this code, of torch and of the processor's instruction set.
    It appears by an atomic rename, so that many processes may share the folder; an unreadable file
    is trained anew.
    """
    path = cached(case, buffers_rule, cache_dir, batch_rule, settings)
    if path.is_file():
        try:
            return Truth.from_dict(tensor_bytes.load(path))
        except (OSError, TypeError, tensor_bytes.DamagedFile):
            path.unlink(missing_ok=True)
    workload = for_case(case)
    members = members_of(case, batch_rule) if case.changes_members else ()
    way = Way(case.precision, members, follows=follows.of_rules(settings, case.optimizer))
    size = case.data_coordinates, case.steps
    record = train(workload, case.optimizer, *size, buffers_rule, way)
    if case.lane == "dyadic":
        exact = make(case.workload, "float64", case.lane)
        record.budget = budget(exact, case.optimizer, case.steps)
    cache_dir.mkdir(parents=True, exist_ok=True)
    tensor_bytes.dump(path, record.to_dict())
    return record


def cached(
    case: Case,
    buffers_rule: BufferRule,
    cache_dir: Path,
    batch_rule: BatchRule,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """The file of the oracle of ``case`` in ``cache_dir``."""
    rules = json.dumps(dict(settings), sort_keys=True) if settings else ""
    key = f"{case.oracle_key(buffers_rule, batch_rule)}{rules} {_code()}"
    return cache_dir / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.oracle"


@lru_cache(maxsize=1)
def _code() -> str:
    """Digest of what the numbers depend on besides the case."""
    here = Path(__file__).parent
    files = [here / name for name in ("training.py", "truth.py", "optimizers.py", "exactness.py")]
    files += [here.parent / "registry" / "follows.py"]
    files += sorted((here.parent / "workloads").glob("*.py"))
    versions = f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}".encode()
    return hashlib.sha256(b"".join([versions, *(file.read_bytes() for file in files)])).hexdigest()
