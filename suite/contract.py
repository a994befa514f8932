"""The contract between the judge and a system under test.

The unit is one whole optimizer step, because some systems (DeepSpeed's engine, PyTorch's pipeline
schedules) own forward and backward themselves.  An implementation is handed everything it needs:
the model to build, the initial state, the optimizer as data, a :class:`~shardproof.comm.Mesh` to
communicate over and its options.  It never touches the default process group, the environment or
the global random generator.

The promise under test: with per-token weights that sum to 1 over the *global* batch,
``loss = sum(weight * token_loss)`` over all ranks, so the mathematically right gradient is the
plain **sum** of what the ranks compute, whatever the world size.  A system that divides is
compensated by its adapter.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, get_args

from shardproof.axes import cutting

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from shardproof.comm import Call, Mesh
    from shardproof.schedules import Action, Schedule
    from shardproof.strategies import Strategy

#: Version of this contract.  It grows when an implementation written for the one before could be
#: judged differently or no longer run; ``docs/architecture.md`` tells why each field exists.
CONTRACT = 3

Point = Literal["gradients_final", "after_clip", "after_update"]
POINTS: tuple[Point, ...] = ("gradients_final", "after_clip", "after_update")

#: ``extra``: what :meth:`Implementation.extra_state` shows; the others :meth:`local_state` shows.
Kind = Literal["parameters", "gradients", "optimizer", "buffers", "extra"]
KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer", "buffers")

#: Called by the implementation inside ``step`` at each :data:`Point`, once per step and in order.
#: Traffic inside the call is not counted.  ``after_clip`` is skipped where nothing is clipped.
#: A system that owns its whole step calls it from hooks; it may come from inside foreign code.
Observe = Callable[[Point], None]
#: What a user gives beside an implementation's name: option -> value, checked by who takes it.
Options = Mapping[str, Any]


class Refused(ValueError):
    """An implementation says no: an option, a mesh or a workload outside what it can do.

    Raise it from ``setup`` (or ``step``) with a sentence that names the option and its value
    (``option 'split' = [2, 2]``) or the axis of the mesh (``axis 'tensor'``): then the case ends
    with the verdict ``refused``, any other refusal that was not declared fails.

    What shows only in the model that ``setup`` builds is declined by a word of
    ``Capabilities.declines``; the sentence then says ``declined 'second_derivative'``, and the case
    is a ``skip`` with the declared reason.
    """


# --------------------------------------------------------------------------------------- the work


@dataclass(frozen=True)
class GroupSpec:
    """A parameter group: the parameters whose name matches ``pattern`` (``re.search``).

    The first group that matches wins; parameters that match none take the optimizer's own values.
    """

    pattern: str
    lr_scale: float = 1.0
    weight_decay: float | None = None


@dataclass(frozen=True)
class ScalerSpec:
    """Dynamic loss scaling as data (the rule of ``torch.amp.GradScaler``).

    Every loss is multiplied by the scale and gradients are divided by it, before they are observed.
    If, after the reductions, any rank holds a gradient that is not finite, *all* ranks leave the
    update out (nothing is clipped, and no step counter moves) and multiply the scale by
    ``backoff``; after ``interval`` updates in a row it is multiplied by ``growth``.  Where data
    coordinates train alone, each does so by itself, with a scale of its own.  Factors should
    be powers of two, which round nothing.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000


@dataclass(frozen=True)
class OptimizerSpec:
    """The optimizer as data; the implementation builds it.

    ``lr`` is the peak learning rate, reached after ``warmup_steps`` linear steps (0: constant).
    ``clip_norm`` is the largest allowed global L2 norm of the gradients (``None``: no clipping).
    ``scaler`` is the policy of loss scaling (``None``: losses are not scaled).
    """

    name: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    groups: tuple[GroupSpec, ...] = ()
    clip_norm: float | None = None
    scaler: ScalerSpec | None = None

    @property
    def kind(self) -> type[torch.optim.Optimizer]:
        """torch's optimizer of that name.

        :raises ValueError: no such optimizer.
        """
        import torch

        kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
        if self.name not in kinds:
            raise ValueError(f"unknown optimizer {self.name!r}; known: {', '.join(kinds)}")
        return kinds[self.name]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of :attr:`kind` other than parameters; decay is that of their groups."""
        own: dict[str, Any] = {"momentum": self.momentum}
        if self.name == "adamw":
            own = {"betas": self.betas, "eps": self.eps}
        return {"lr": self.lr, **own}

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step ``step`` (counted from 0), before a group's scale."""
        if self.warmup_steps <= 0:
            return self.lr
        return self.lr * min(1.0, (step + 1) / (self.warmup_steps + 1))

    def assign(self, names: Iterable[str]) -> list[tuple[GroupSpec, list[str]]]:
        """Split parameter ``names`` into groups, in the order of ``groups`` and a last default one.

        Groups that no name matches are left out; inside a group the given order is kept.
        """
        default = GroupSpec(pattern="", weight_decay=self.weight_decay)
        buckets: list[tuple[GroupSpec, list[str]]] = [(g, []) for g in (*self.groups, default)]
        for name in names:
            for group, members in buckets:
                if re.search(group.pattern, name):
                    members.append(name)
                    break
        return [(group, members) for group, members in buckets if members]


@dataclass(frozen=True)
class CrossEntropy:
    """The cross-entropy of ``torch.nn.functional.cross_entropy`` with logits ``(..., classes)``.

    ``label_smoothing`` spreads that share of the target evenly over all classes; a target that
    equals ``ignore_index`` adds nothing.
    """

    label_smoothing: float = 0.0
    ignore_index: int = -100


#: What a module or a parameter is for, where a strategy treats it apart.  ``heads``: a projection
#: to all queries, all keys and all values of an ``attention`` module.  ``column`` and ``row``:
#: layers of a pair, split by output and by input features.  ``classes``: the last layer.
Role = Literal[
    "embedding",
    "positions",
    "attention",
    "core",
    "heads",
    "column",
    "row",
    "classes",
    "router",
    "expert",
]


#: Over which part of a step's batch a loss term is computed: each micro-batch, all micro-batches of
#: one data coordinate, or all of all coordinates.
Scope = Literal["micro-batch", "rank", "global"]


@dataclass(frozen=True)
class LossTerm:
    """A part of the loss that is no sum over targets: a load-balancing loss, for example.

    ``statistics(outputs, micro)`` gives a differentiable vector of ``size`` sums over the targets
    of a micro-batch, in the dtype of its weights; those of several micro-batches add up.
    ``value(statistics)`` gives the scalar term of the sum of these over one part of the batch.  The
    loss has one value for each part that ``scope`` names.
    """

    name: str
    scope: Scope
    size: int
    statistics: Callable[[Tensor, MicroBatch], Tensor]
    value: Callable[[Tensor], Tensor]


class Build(Protocol):
    """Builds the model of a workload; handed to :meth:`Implementation.setup`."""

    #: Dotted names of the repeated blocks, in forward order: units for wrapping and for pipelines.
    units: Sequence[str]

    #: Dotted name of a module or parameter -> what it is for; a parameter without an entry has the
    #: role of its module.  Empty: the workload does not say, and what needs roles is refused.
    roles: Mapping[str, Role]

    #: What :meth:`loss` is, where it is ``sum(micro.weights * cross_entropy)`` of outputs cast to
    #: the dtype of the weights (``None``: another function).  Who holds only some of the classes
    #: may compute that instead of calling :meth:`loss`.
    cross_entropy: CrossEntropy | None

    #: Loss terms that :meth:`loss` leaves out, because one micro-batch does not suffice for them:
    #: those of scope ``rank`` and ``global`` (see :attr:`Capabilities.scopes`).
    terms: Sequence[LossTerm]

    def __call__(self, device: str = "cpu") -> nn.Module:
        """A fresh module on ``device`` (``"meta"`` allowed).

        Its values are *perturbed*, differently on every rank: load ``state`` (see ``setup``), or
        receive it from a rank that did.  The module is called as ``module(inputs) -> outputs``.
        A part of it whose attribute ``differentiates`` is true takes a gradient in its forward,
        through which backward goes, too; one with ``whole_sequence`` must see all positions.

        Of a model whose positions can be cut, only modules of the role ``core`` look at other
        positions: ``core(query, key, value)``, each ``(samples, heads, positions, size)``.  All
        parts that know positions share one object ``span``.  A strategy that cuts positions sets
        ``span.rows``, the positions of this rank, and replaces the forward of the cores;
        ``span.read(inputs)`` and ``span.hides(rows, columns)`` give what is masked.  The module
        still takes the inputs of whole samples, and returns the outputs of these positions.
        """

    def stage(self, module: nn.Module, start: int, stop: int) -> nn.Module:
        """The part of ``module`` (this build's) that computes units ``start`` to ``stop - 1``.

        What comes before the first unit belongs to the part that starts at 0, what comes after the
        last to the part that stops at ``len(units)``; parts chained in order compute what it
        computes.  A part is called with the inputs, or with the one tensor that the part before
        returned.  It holds the same parameter objects under the same names; a tensor that is tied
        over parts stands in each of them, under the name that it has there.
        """

    def loss(self, outputs: Tensor, micro: MicroBatch) -> Tensor:
        """Scalar ``sum(micro.weights * token_loss(outputs, micro.targets))``, and the terms of
        scope ``micro-batch``; differentiable.
        """


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of one data coordinate.

    ``inputs`` is what the module is called with; ``targets`` and ``weights`` have the same shape
    (one entry a token or sample; weight 0 masks it); ``sample_ids`` has shape ``(samples,)``.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor
    sample_ids: Tensor


@dataclass(frozen=True)
class Batch:
    """The share of one data coordinate in one optimizer step.

    ``windows`` is a list of schedule calls, each a list of micro-batches.  All ranks of one data
    coordinate get the same list; lists may differ in length between coordinates and may be empty.
    """

    step: int
    windows: tuple[tuple[MicroBatch, ...], ...]

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """All micro-batches of the step in order, over all windows."""
        return [micro for window in self.windows for micro in window]


# -------------------------------------------------------------------------------------- the answer


@dataclass
class StepResult:
    """The result of ``step``.

    ``loss`` is the detached share of this rank's data coordinate (the shares of all coordinates sum
    to the global loss), ``None`` on a rank that never learns it (a pipeline's other stages, a
    server); ranks of one coordinate that know it must agree.  ``norm`` is the global L2 gradient
    norm before clipping (``None`` if nothing was clipped).

    Under a :class:`ScalerSpec` ``metrics`` tell ``scale``, by which this step's losses were
    multiplied, and ``skipped``: 1 if the update was left out because of an overflow, else 0.
    """

    loss: Tensor | None
    norm: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """A part of one named tensor that this rank holds.

    Give ``slices`` (one ``(start, stop)`` per dimension of ``global_shape``) or ``flat_range``
    (``(start, stop)`` in the flattened tensor).  A rank gives several pieces of one name where what
    it holds is no single block (the query, key and value rows of a fused projection).

    ``replica`` numbers the copies of *this name*: within one replica every element must be owned
    exactly once over all ranks, and names may have different numbers of copies (under tensor
    parallelism a norm has as many as there are tensor ranks, a split weight one).
    Optimizer slots are named ``"<parameter>.<slot>"`` with torch's slot names.  A slot that is one
    number for a whole parameter (Adam's ``step``) is given by every rank that keeps one, whole, as
    a replica numbered by that rank.

    ``incomplete``: this copy need not cover the whole tensor, for the ranks hold some parts of it
    more often than others (KV heads that tensor ranks share); what it lacks, replica 0 has.

    ``source`` is the tensor that the rank really holds, where ``tensor`` had to be computed from it
    (a gradient that is unscaled on its way to the optimizer): its bytes are the ones that count.
    """

    name: str
    global_shape: tuple[int, ...]
    tensor: Tensor
    slices: tuple[tuple[int, int], ...] | None = None
    flat_range: tuple[int, int] | None = None
    replica: int = 0
    source: Tensor | None = None
    incomplete: bool = False

    @classmethod
    def whole(cls, name: str, tensor: Tensor, replica: int = 0) -> Piece:
        """The piece of a rank that holds all of ``tensor``."""
        shape = tuple(tensor.shape)
        return cls(name, shape, tensor, slices=tuple((0, n) for n in shape), replica=replica)

    @classmethod
    def of_dtensor(cls, name: str, tensor: Any) -> Piece:
        """The piece of a ``torch.distributed.tensor.DTensor`` that the calling rank holds."""
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mesh, placements = tensor.device_mesh, tensor.placements
        shape, starts = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        slices = tuple((at, at + size) for at, size in zip(starts, shape, strict=True))
        replica, place = 0, mesh.get_coordinate() or ()
        for at, size, placed in zip(place, mesh.shape, placements, strict=True):
            replica = replica * size + at if isinstance(placed, Replicate) else replica
        local = tensor.to_local().detach()
        return cls(name, tuple(tensor.shape), local, slices=slices, replica=replica)


@dataclass(frozen=True)
class Event:
    """One update in a system without a common step: what a replay needs to compute it again.

    ``order`` is the place in the sequence of all updates (from 0); ``worker`` the data coordinate
    whose gradient was applied, computed on its batch of ``step`` (whose learning rate the update
    uses, too) from the parameters as they were after ``version`` updates.

    ``keys``: the parameters that it updates (empty: all), where several servers own some each; then
    orders and versions count the updates of these.  Several events of one order are one update, by
    the sum of their gradients in the order of workers.

    No gradient may be more than ``Capabilities.max_staleness`` steps behind.  The judge reads one
    option of such systems: ``dies: {worker, turns}`` is the one excuse for a gradient that never
    comes.
    """

    order: int
    worker: int
    step: int
    version: int
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Now:
    """The arguments of :meth:`Implementation.given_state`: ``step``, and whole tensors after it.

    ``was``: further state, and moved buffers, before the update; ``step`` -1, without any: right
    after ``setup``.  ``buffers``: those of each data coordinate, as its forwards left them.
    """

    step: int
    was: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    buffers: Sequence[Mapping[str, Tensor]]


def average(decay: float) -> str:
    """The rule of an average of parameters (``Capabilities.follows``) that begins as they do."""
    exact = f"{Decimal(repr(float(decay))):f}"  # all digits, and no exponent
    return f"parameter -> {exact} * was + (1 - {exact}) * parameter"


#: How closely a system is held to its strategy.  ``family``: to what every sound member does, and
#: to bytes between two bounds; ``layout``: to the byte, by the cost model of that strategy;
#: ``own``: to the byte, by the cost model that the class brings.
Depth = Literal["family", "layout", "own"]

#: What a system may need of a backend: ``processes`` (its ranks are no threads), ``values`` (its
#: program depends on what tensors hold), ``cpu`` (tensors lie there), ``sends`` (from one rank to
#: one other), ``any_thread`` (calls from a thread that the system starts).
BackendNeed = Literal["processes", "values", "cpu", "sends", "any_thread"]
Exactness = Literal["bitwise", "reordered-sum", "lower-precision", "lossy", "stale"]
BufferRule = Literal["rank0", "per_rank", "synced", "none"]
#: What becomes of the batch when members join or leave: that of all members stays as it is, or that
#: of each, and then the learning rate grows with their number.
BatchRule = Literal["global", "local"]
OracleKind = Literal["plain", "emulated", "replay"]
Emulated = Literal["step", "round", "trajectory"]
OptimizerState = Literal["shared", "by_worker"]


class _Profiles(Mapping[str, frozenset[str]]):
    def __getitem__(self, strategy: str) -> frozenset[str]:
        return self._records()[strategy].profile

    def __iter__(self) -> Iterator[str]:
        return iter(self._records())

    def __len__(self) -> int:
        return len(self._records())

    def _records(self) -> Mapping[str, Strategy]:
        from shardproof import strategies  # it imports the records of every adapter

        return strategies.in_tree()


#: What claiming a strategy implies, by its name: start your own ``features`` from one of these.
PROFILES: Mapping[str, frozenset[str]] = _Profiles()


@dataclass(frozen=True)
class Capabilities:
    """The declaration of what an implementation can do and how it may be judged.

    ``features`` are checked against the strategy's profile (``shardproof.strategies``);
    ``declines`` maps traits that lie outside the profile to the reason why they are not supported
    (such cases become ``skip``); ``"clipping"``, ``"loss_scale"`` (a scaler of losses) and
    ``"second_derivative"`` (a model that differentiates in its forward: see :class:`Refused`) may
    be declined likewise, and each in one dtype only: ``"clipping@float64"``.

    ``needs``: what a backend must have (:data:`BackendNeed`): a system with state in module globals
    needs ``processes``.  ``denies``: single backends on which it does not run, by name, and why.
    ``backends``: the only ones on which it runs; empty: all that have what it needs, those of other
    packages included.  ``points`` are those that every step reaches on every rank;
    a system without a common step has no moment at which gradients are final.  ``exactness`` and
    ``oracle`` belong together: ``plain`` compares with single-process training, ``emulated`` with
    one that imitates the declared loss of precision, ``replay`` with one that repeats
    :meth:`Implementation.events`.  ``emulates`` says what one call of the emulator is given: the
    gradients of a ``step``, or those of each ``round`` (the n-th micro-batch of every coordinate)
    where the system reduces them by themselves.  Of a ``trajectory`` there is no emulator: every
    coordinate trains alone, and :meth:`Implementation.meeting` says when and how they meet.

    At depth ``family`` the largest share of what is sharded may be ``balance`` times the equal
    share (or one parameter, if that is more), and bytes sent and held ``overhead`` times what a
    plain member sends and what the pieces add up to.

    ``loss_factor``: what the adapter multiplies every loss of a step by, to undo what the system
    divides by: a formula of a case's facts (``"world"``, ``"rounds"``, ``"2 * world"``).
    :attr:`StepResult.loss` is then the system's own loss, that many times the true one.

    ``checkpoints`` are the formats that :meth:`Implementation.save` offers, by the names that the
    option ``checkpoint: {format: ...}`` takes; none: nothing is saved.

    ``max_staleness``: how many steps behind a gradient of a stale system may be; ``None``: it
    promises no bound.  ``optimizer_state`` of such a system is ``shared`` by all workers, or kept
    ``by_worker``: then each of its updates is by one worker's gradient.

    ``batch``: of a system whose members change, what stays as it is (:data:`BatchRule`).  Batch and
    rate are as given for as many members as begin the first step.  The global batch is cut over the
    members, in their order.

    ``follows``: the rule by which each piece of further state follows training, by its name
    (``average.*``: one for each parameter, whose name stands for the ``*``).  State is shown by
    :meth:`Implementation.extra_state`, unless the name is that of a model's buffer, which the
    system moves after the update.  Rules:

    * ``START -> NEXT``, formulas: the value after ``setup``, and after each update that is made.
      Names: ``was``, ``parameter`` and ``gradient`` (the update is done), ``step`` (from 0), and
      ``lr``, ``weight_decay``, ``momentum``, ``eps`` of the spec.  Functions: ``min max abs sign
      sqrt cos power``.  Without ``START ->`` the first value is free.
    * ``given``: what :meth:`Implementation.given_state` computes.
    * ``equal``: anything that is equal on all ranks, in a checkpoint, and changes at least once.

    ``optimizer.weight_decay``, ``optimizer.momentum``, ``optimizer.eps``, ``optimizer.lr``: what
    the update of that step uses in place of :class:`OptimizerSpec`'s.

    ``scopes``: of which scopes the system adds the terms of :attr:`Build.terms` to the loss.

    ``packages`` are modules that the machine may lack: then cases become ``skip``, while options
    are still refused, so :meth:`Implementation.capabilities` must do without them.  ``lacks``: what
    the installed packages have not that these options need, in words; the same becomes of cases.
    """

    axes: tuple[str, ...] = (cutting("samples"),)
    max_world: int | None = None
    dtypes: tuple[str, ...] = ("float64", "float32")
    backends: tuple[str, ...] = ()
    needs: tuple[BackendNeed, ...] = ()
    denies: Mapping[str, str] = field(default_factory=dict)
    exactness: Exactness = "reordered-sum"
    oracle: OracleKind = "plain"
    emulates: Emulated = "step"
    buffers: BufferRule = "rank0"
    initial_state: Literal["rank0", "everywhere"] = "rank0"
    points: tuple[Point, ...] = ("gradients_final", "after_update")
    features: frozenset[str] = frozenset()
    declines: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    lacks: str = ""
    balance: float = 2.0
    overhead: float = 2.0
    loss_factor: str = "1"
    checkpoints: tuple[str, ...] = ()
    max_staleness: int | None = None
    optimizer_state: OptimizerState = "shared"
    batch: BatchRule = "global"
    follows: Mapping[str, str] = field(default_factory=dict)
    scopes: tuple[Scope, ...] = ()


class Emulation(Protocol):
    """An emulator of reductions that keep something, as optimizer slots whose names have an ``@``.

    Of ``<parameter>.residual@<coordinate>``, what that coordinate did not send, the check
    ``compression`` asks whether sent + residual = gradient + old residual.
    """

    #: By coordinate, parameters that have a residual: what was given to the sum in the last call.
    sent: Sequence[Mapping[str, Tensor]]
    #: Other slots after the last call, such as ``<parameter>.factor@<coordinate>``.
    kept: Mapping[str, Tensor]

    def __call__(self, step: int, parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The gradients that are applied, of those by coordinate."""

    # Where members change, also ``regroup(heirs: Sequence[Sequence[int]]) -> None``: coordinate n
    # goes on from the residuals that the coordinates ``heirs[n]`` had before, added up.


#: Begins the names of optimizer slots (``<parameter>.outer_momentum``) that all who meet share.
OUTER = "outer_"


def is_outer(slot: str) -> bool:
    """Whether an optimizer slot is shared by all who meet, whatever its parameter is called."""
    return slot.rpartition(".")[2].startswith(OUTER)


class Meeting(Protocol):
    """Where data coordinates that train alone meet: the oracle of ``emulates="trajectory"``.

    Between meetings each coordinate has parameters, optimizer state and (under a loss scaler) a
    scale of its own, told as replica number ``coordinate``.  Its gradient is that of its share
    times their number: an estimate of the whole batch's.  It is given copies.
    """

    def begin(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """State kept before the first step, as slots ``<parameter>.outer_...``, if anything."""

    def meets(self, step: int) -> bool:
        """Whether the update of ``step`` ends in a meeting."""

    def meet(
        self, ends: Sequence[Mapping[str, Tensor]], kept: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The parameters with which all ranks continue, and the state kept from then on.

        ``ends``: the trained parameters of each coordinate after its own update, in order.
        """


def _untraced(action: Action) -> AbstractContextManager[Any]:
    return nullcontext()


class Implementation(ABC):
    """A system under test.  One object per rank and case; methods are called on every rank.

    ``trace`` is for pipelines: inside ``step`` enter ``self.trace(action)`` around every
    computation of a stage (F, B, W, BW; ``micro`` counts within its window), and around nothing
    else.  The suite replaces it after construction where ledgers are on; left alone it does
    nothing.  Messages need none: the traffic ledger sees them.
    """

    strategy: ClassVar[str]
    #: Whether ``strategy`` names a family or a layout; see :data:`Depth`.
    depth: ClassVar[Depth] = "family"
    #: At depth ``own``: a subclass of ``shardproof.costs.model.CostModel``.
    cost_model: ClassVar[type[Any] | None] = None
    trace: Callable[[Action], AbstractContextManager[Any]] = staticmethod(_untraced)

    @classmethod
    @abstractmethod
    def capabilities(cls, options: Options) -> Capabilities:
        """Say what this class can do with ``options``; raise :class:`Refused` for bad ones."""

    @classmethod
    def role(cls, rank: int, world: int, options: Options) -> str:
        """``"worker"`` for ranks that get data, any other word for those that do not.

        The global batch is cut over the workers, in rank order along the data axes; a rank of
        another role gets batches without windows.  Raise :class:`Refused` where the world cannot
        be divided into roles.
        """
        return "worker"

    @classmethod
    def emulator(
        cls, options: Options
    ) -> Emulation | Callable[[int, Sequence[dict[str, Tensor]]], dict[str, Tensor]]:
        """For ``oracle="emulated"``: what this system's reduction makes of exact gradients.

        A fresh function of (step, gradients by name of each data coordinate, in order), called once
        a step or round (``Capabilities.emulates``); it may keep state from call to call (error
        feedback).  A coordinate that did not use a parameter has no gradient of it; in a round it
        has zeros of what some coordinate uses in another round of the step.  Those of a coordinate
        stand in the order in which its last backward was done with them.  Gives the gradients that
        are applied.

        A system that keeps something of its reductions from step to step gives an
        :class:`Emulation`.
        """
        raise Refused(f"{cls.__name__} has no emulator")

    @classmethod
    def meeting(cls, options: Options) -> Meeting:
        """For ``emulates="trajectory"``: when and how the data coordinates meet."""
        raise Refused(f"{cls.__name__} has no meeting")

    @classmethod
    def schedule(cls, options: Options, ranks: int, micro_batches: int) -> Schedule | None:
        """Return what is run for one window of ``micro_batches`` over ``ranks`` of the pipe axis.

        Asked before any rank is started, once for every size of a window; what is logged through
        ``trace`` must be this, window by window.  ``None``: no pipeline, or an order that cannot be
        told, which is then not judged.  :class:`Refused` for options, ranks or micro-batches that
        make no sound schedule, with what is wrong in words.
        """
        return None

    @abstractmethod
    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Options,
    ) -> None:
        """Build the model, its optimizer and whatever the strategy needs.

        ``state`` maps parameter and buffer names (of ``named_parameters``/``named_buffers``, tied
        tensors once) to initial values.  With ``initial_state="rank0"`` it is ``None`` on every
        rank but global rank 0, which shows a missing broadcast.
        """

    @abstractmethod
    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """One optimizer step: forward, backward, reduction, clipping, update, gradients cleared."""

    @abstractmethod
    def local_state(self, kind: Kind) -> list[Piece]:
        """Return what this rank holds of ``kind``, without communication.

        Gradients are those of the running step (asked for inside ``observe``); a parameter that no
        rank used has none.
        """

    def extra_state(self) -> Mapping[str, Tensor | float] | Sequence[Piece]:
        """Return the part of the state of ``Capabilities.follows`` here, without communication.

        Tensors and numbers by name, of which this rank has a whole copy; or pieces.
        """
        return {}

    @classmethod
    def given_state(cls, now: Now, options: Options) -> Mapping[str, Tensor]:
        """The right values of all state whose rule is ``given``, as a function of ``now`` alone."""
        raise Refused(f"{cls.__name__} has no given_state")

    def load_pieces(self, kind: Kind, pieces: Sequence[Piece]) -> None:
        """Overwrite this rank's state of ``kind``, without communication (teacher forcing).

        ``pieces`` are laid out as :meth:`local_state` gives them; the tensors are to be copied.
        """
        raise Refused(f"{type(self).__name__} has no load_pieces")

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """All of ``kind``, gathered by the implementation itself; of parameters a thing under test,
        after the last step.
        """
        raise Refused(f"{type(self).__name__} has no full_state")

    def evaluate(self, batch: Batch) -> Tensor | None:
        """The loss of this rank's data coordinate in evaluation mode; changes no state.

        Called on every rank, between steps; ``None`` where this rank never learns it.
        """
        raise Refused(f"{type(self).__name__} has no evaluate")

    def save(self, path: Path, extra: Mapping[str, Any]) -> Any:
        """Save into ``path``, a root folder that all ranks share; a collective call, between steps.

        The root may hold several checkpoints of one run, a folder each, and need not exist.
        ``extra`` is the caller's, the same on all ranks, of what JSON holds; it may change when
        this has returned.  Saving changes nothing in the run.  What the model draws from is saved,
        too: torch's default generator, where ranks are processes, and generators in its modules.

        What is returned has a method ``wait``, collective as well: on return the checkpoint is
        committed, on all ranks, and what went wrong on any is raised on all.  Until then training
        may go on, and what it changes is not saved.  ``None``: it is committed already.
        """
        raise Refused(f"{type(self).__name__} has no save")

    def load(self, path: Path) -> Mapping[str, Any]:
        """Load from ``path``, a root (its newest checkpoint) or one checkpoint in it; collective.

        Called on a system that is set up and has no save under way.  All ranks load the same one,
        or all raise and are as before.  Returns the ``extra`` that was given to :meth:`save`.
        """
        raise Refused(f"{type(self).__name__} has no load")

    def drain(self) -> None:
        """Finish work in flight so that an observation sees a settled state.

        Called on every rank after the last step, and before any observation outside of ``step``.
        """

    def events(self) -> list[Event]:
        """Every update that this rank applied so far, for ``oracle="replay"``; others: none."""
        return []

    def reconfigure(self, mesh: Mesh, joined: Sequence[int], left: Sequence[int]) -> None:
        """Go on over ``mesh``, whose ranks differ from before by ``joined`` and ``left``.

        Called between steps on every rank of the new mesh, after ``drain``.  A rank that joins was
        set up just before, alone (a mesh of itself, no state): only here does it meet the others,
        who bring it up to date; what is each rank's own (buffers, the state of generators) it has
        of the first member that stayed.  A rank that left may be gone: nothing can be asked of it.
        Ranks are numbers in the default group.

        A member that dies inside ``step`` ends that step for all: a call that waits for it raises
        :class:`shardproof.comm.PeerGone`, which ``step`` lets through, having committed nothing.
        Then this is called without ``drain``, and the step once more, cut over who is left.
        """
        raise Refused(f"{type(self).__name__} has no reconfigure")

    def hand_over(self, left: Sequence[int]) -> None:
        """Members ``left`` are about to leave: what only they hold goes to the first that stays.

        Called on every member, after ``drain``, while all are there; who dies hands nothing over.
        """

    def progress(self) -> int | None:
        """How many samples all members together have trained on, in committed steps.

        Asked of each member before a step: the batch that it gets a share of begins there, in one
        endless row of epochs.  ``None``: nobody counts, and the judge does.
        """
        return None

    def close(self) -> None:
        """Release everything; the last call on a rank that ended well."""

    def abort(self) -> None:
        """Release what would keep this rank from ending, without waiting for any peer.

        The last call on a rank that ``setup`` or ``step`` left with an exception.
        """


class Untrained(Implementation):
    """A system that trains no model; it has a workload of its own (``suite/cases/kinds/``)."""

    #: What it is, in words, and the workload whose cases judge it.
    about: ClassVar[str]
    workload: ClassVar[str]

    @classmethod
    def not_trained(cls) -> str:
        """Why it is in no case that trains."""
        return f"{cls.about} and trains no model: judge it by a scenario of workload {cls.workload}"

    def setup(self, *given: Any, **named: Any) -> None:
        """Nothing is trained."""
        raise Refused(self.not_trained())

    def step(self, *given: Any, **named: Any) -> StepResult:
        """Nothing is trained."""
        raise Refused(self.not_trained())

    def local_state(self, kind: Kind) -> list[Piece]:
        """Nothing is held."""
        raise Refused(self.not_trained())


class Collectives(Untrained):
    """A backend's operations, or algorithms over them: judged call by call, never trained.

    The check ``collectives`` makes the calls, in cases whose workload is ``calls``.
    """

    strategy = "collectives"
    about, workload = "offers collectives", "calls"
    #: Whether calls go to the backend's own operations: then what that backend does not take
    #: (``Backend.takes``) is not asked.
    hands_on: ClassVar[bool] = False

    @classmethod
    def offers(
        cls, options: Options, backend: str, world: int
    ) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        """Operation -> what it takes of each factor, by its name.

        Factors and their values are those of ``suite/cases/kinds/calls/workload.py``.
        A factor that is not named is taken whole, an operation that is not named is not offered.
        ``options`` are those of :meth:`capabilities`.
        """
        raise Refused(f"{cls.__name__} offers no collective")

    def choose(self, options: Options) -> None:
        """Take ``options``; the first call on a rank."""

    @abstractmethod
    def perform(self, call: Call) -> Sequence[Any]:
        """Make ``call``; the handles to wait for, none where the result is there on return.

        ``call.group`` is what :meth:`group` gave.
        """

    def group(self, group: Any, ranks: Sequence[int]) -> Any:
        """Return the object for calls on members ``ranks`` of ``group``; asked once a group."""
        return group


#: What becomes of samples that ranks cannot share evenly: as few as that takes are repeated
#: (``pad``) or left out (``drop``), or some ranks have one more (``uneven``).
Tail = Literal["pad", "drop", "uneven"]


@dataclass(frozen=True)
class SamplerSpec:
    """A sampler as data: it shares ``samples`` indices (from 0) out over ``world`` ranks.

    ``rank`` is the place among those that get different samples (a data coordinate).  ``shuffle``:
    every epoch has an order of its own, a permutation of all samples that is the same on all ranks
    and depends on ``seed``; without it the order is that of the data set.
    """

    samples: int
    rank: int
    world: int
    shuffle: bool = True
    tail: Tail = "pad"
    seed: int = 0


class Sampling(Untrained):
    """A sampler, which says what each rank trains on in each epoch; judged by itself.

    The check ``data`` asks it, in cases whose workload is ``epochs``.  What it cannot do stands
    under ``Capabilities.declines``: ``shuffle``, ``in_order``, ``seed``, a tail, ``resume`` (in the
    middle of an epoch), ``other_world`` (there), ``read_ahead`` (there), ``again`` (the same epoch
    once more: its order goes on from a generator that its state holds).  The feature
    ``state_by_rank``: each rank has a state of its own, and goes on from that.
    """

    strategy = "sampling"
    about, workload = "is a sampler", "epochs"
    #: What can be declined.
    asked = (
        *("shuffle", "in_order", "seed", *get_args(Tail)),
        *("resume", "other_world", "read_ahead", "again"),
    )

    @abstractmethod
    def start(self, spec: SamplerSpec, options: Options) -> None:
        """Be the sampler that ``spec`` describes; the first call on an object."""

    @abstractmethod
    def epoch(self, number: int) -> Iterable[int]:
        """This rank's samples of epoch ``number`` in order, whatever was asked for before.

        After :meth:`load_state` in the middle of that epoch: those that are left for it.
        """

    def state(self, taken: int) -> Mapping[str, Any]:
        """Progress for a checkpoint, as JSON, the same on all ranks.

        ``taken``: samples that every rank has trained on since :meth:`epoch` was last called (a
        rank with fewer has trained on all of its).  The iterator may be ahead of that, for loaders
        read batches before they are used.
        """
        raise Refused(f"{type(self).__name__} has no state")

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from the ``state`` of ranks, perhaps of another number; called after ``start``."""
        raise Refused(f"{type(self).__name__} has no load_state")


@dataclass(frozen=True)
class StopRule:
    """When training ends, as data; ranks apply it together, by a vote after each evaluation.

    The metric of a vote is that of all data, ``sum(weight * metric) / sum(weight)`` over ranks; a
    rank without data has weight 0, and what it measured counts for nothing.  A vote is better than
    the best one before by a metric that is lower (``best``) by more than ``min_delta``; one whose
    metric is not finite is never better.

    Training ends with the first vote in which a rank asks for it, whose metric is as good as
    ``target``, which is the ``patience``-th in a row that was no better, which is number
    ``budget``, or whose metric is not finite where ``not_finite`` is ``stop`` (0 and ``None``: not
    so).
    """

    best: Literal["lowest", "highest"] = "lowest"
    patience: int = 0
    min_delta: float = 0.0
    target: float | None = None
    budget: int = 0
    not_finite: Literal["count", "stop"] = "count"


@dataclass(frozen=True)
class Ruling:
    """The result of a vote, the same on all ranks.

    ``ends``: training is over.  ``best``: the step of the best vote so far, whose checkpoint is the
    one to keep; ``None``: none had a finite metric.  ``metric``: of this vote; ``why`` it ends.
    """

    ends: bool
    best: int | None
    metric: float
    why: str = ""


class Stopping(Untrained):
    """A rule that decides when training ends, and which checkpoint was the best; judged by itself.

    The check ``stopping`` makes it vote, in cases whose workload is ``votes``.
    """

    strategy = "stopping"
    about, workload = "decides when to stop", "votes"

    @abstractmethod
    def start(self, rule: StopRule, mesh: Mesh, options: Options) -> None:
        """Apply ``rule`` over all ranks of ``mesh``; the first call on an object."""

    @abstractmethod
    def vote(self, step: int, metric: float, weight: float, asks: bool = False) -> Ruling:
        """After the evaluation at ``step``: this rank's metric, of data that weigh ``weight``.

        A collective call.  ``asks``: this rank has to stop, whatever the metric (its time is over).
        """


#: What trains no model, by the strategy that it declares.
UNTRAINED: Mapping[str, type[Untrained]] = {
    kind.strategy: kind for kind in (Collectives, Sampling, Stopping)
}
