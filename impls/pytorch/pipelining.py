"""PyTorch's ``torch.distributed.pipelining`` under each of its schedules, unmodified.

    what                              where
    parameters, gradients, optimizer  the rank that the stage lies on, whole
    buffers                           with their stage; every data coordinate has its own
    received activations, gradients   buffers of every micro-batch, kept from step to step

    step     each window             ``schedule.step``: torch splits the inputs, sends and receives
             all windows done        gradients are final
             clip, update            one fp64 number is summed over the stages, the rest is local

    option           class                           stages of rank r of p
    gpipe            ``ScheduleGPipe``               r
    1f1b             ``Schedule1F1B``                r
    interleaved      ``ScheduleInterleaved1F1B``     r, p+r, ... (``chunks`` of them)
    looped_bfs       ``ScheduleLoopedBFS``           the same
    interleaved_zb   ``ScheduleInterleavedZeroBubble``  the same
    zb_v             ``ScheduleZBVZeroBubble``       r and 2p-1-r
    dualpipe_v       ``ScheduleDualPipeV``           r and 2p-1-r

torch keeps the outputs of a window until the next one unless ``return_outputs=False``.  Losses are
sums, hence ``scale_grads=False``; torch's own default divides by the micro-batches.  A target is
the number of its micro-batch, by which the loss finds targets and weights.

``shapes: inferred`` is torch's default: in the first call of a schedule every stage runs forward
(in training mode, on memory that nobody has written) and sends its neighbour the shapes.
Generators move on and running statistics are spoilt.  ``given``: the adapter runs that forward in
evaluation mode, and torch is handed the shapes.

The announced schedule is torch's ``pipeline_order_with_comms`` where it exists, except for the
first stage, which never splits its backward (``backward_one_chunk``): its W is the whole backward.
``Schedule1F1B`` exports another order than it runs (``_get_pipeline_order`` counts the last stage's
micro-batches from 1), so schedules with one stage a rank are written down here.  Evaluation runs a
copy of that order with only the forwards, because ``schedule.eval`` of a V asks a stage for
gradients that nothing computed.

Cost: every boundary between two ranks is crossed twice by a micro-batch, as ``reference/pipeline``.
Numbers: gradients add up in ascending order of micro-batches, bit for bit as on one device;
``looped_bfs`` goes backwards through them.
A split backward detaches what a stage gave in place (``stage_backward_input``), which fails for a
stage whose last operation makes a view.
Left out: skip connections, ``dw_builder``, tied parameters on two ranks (torch exchanges no
gradients), an initial broadcast (stages have nothing in common), mixed precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torch_schedules

from shardproof import comm
from shardproof.comm import Mesh
from shardproof.contract import (
    Batch,
    Build,
    Capabilities,
    Depth,
    Kind,
    MicroBatch,
    Observe,
    OptimizerSpec,
    Piece,
    Refused,
    StepResult,
)
from shardproof.impls.pytorch.checkpoint.options import SHARDED, Saved, offered
from shardproof.impls.pytorch.checkpoint.saves import Saves
from shardproof.impls.pytorch.parts.scaling import make_scaler, update
from shardproof.impls.reference.engine.norm import clip_factor, power_sum
from shardproof.impls.reference.engine.optimizer import (
    build_optimizer,
    make_slots,
    param_groups,
    slot_pieces,
)
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.engine.state import copy_pieces, load_state
from shardproof.impls.reference.pipeline.schedules import gpipe, one_f_one_b
from shardproof.impls.reference.pipeline.stages import cut
from shardproof.schedules import Action, Schedule

#: Option -> torch's class, where the installed torch has it.
CLASSES: dict[str, Any] = {
    name: getattr(torch_schedules, kind)
    for name, kind in {
        "gpipe": "ScheduleGPipe",
        "1f1b": "Schedule1F1B",
        "interleaved": "ScheduleInterleaved1F1B",
        "looped_bfs": "ScheduleLoopedBFS",
        "interleaved_zb": "ScheduleInterleavedZeroBubble",
        "zb_v": "ScheduleZBVZeroBubble",
        "dualpipe_v": "ScheduleDualPipeV",
    }.items()
    if hasattr(torch_schedules, kind)
}
SINGLE, V_SHAPED = ("gpipe", "1f1b"), ("zb_v", "dualpipe_v")
#: torch's words for actions, and ours.
OPS = {
    "F": "F",
    "I": "B",
    "W": "W",
    "B": "BW",
    "SEND_F": "SF",
    "RECV_F": "RF",
    "SEND_B": "SB",
    "RECV_B": "RB",
}
#: What is left of an order in evaluation.
FORWARD = ("F", "SF", "RF")
#: torch's word for making a stage under ``fully_shard`` whole.
GATHER = "UNSHARD"

TORN = "torch does not exchange the gradients of a tied parameter between two ranks"
TORN_STATE = "torch cannot gather one full state dict from stages on several ranks"
ONE_SHAPE = "torch's schedules cut a window into parts of equal shape"
UNSEEN = (
    "only the first stage receives the inputs, and the positions of documents are read from the "
    "inputs"
)
INFERENCE = "torch infers shapes with a forward in training mode; set shapes: given"


Name = Literal["gpipe", "1f1b", "interleaved", "looped_bfs", "interleaved_zb", "zb_v", "dualpipe_v"]


@dataclass(frozen=True)
class Chunked:
    """A schedule with a number of stages per rank (0: 1 for gpipe and 1f1b, else 2)."""

    name: Name
    chunks: int = 0


@dataclass(frozen=True)
class Options(Saved):
    """``schedule``: a name, or ``{name: interleaved, chunks: 3}``.

    ``split``: units of each stage, in forward order (``[]``: evenly, the larger first).
    """

    schedule: Name | Chunked = "1f1b"
    split: tuple[int, ...] = ()
    shapes: Literal["inferred", "given"] = "inferred"

    def __post_init__(self) -> None:
        if self.name not in CLASSES:
            raise Refused(
                f"option 'schedule' = {self.name!r}: torch {torch.__version__} does not have "
                f"this schedule; valid: {', '.join(CLASSES)}"
            )
        wanted = {**dict.fromkeys(SINGLE, 1), **dict.fromkeys(V_SHAPED, 2)}.get(self.name)
        if self.chunks < 1 or self.chunks != (wanted or self.chunks):
            valid = "at least 1" if wanted is None else str(wanted)
            raise Refused(
                f"option 'schedule.chunks' = {self.chunks}: for {self.name}, chunks (the "
                f"number of stages per rank) must be {valid}"
            )

    @property
    def name(self) -> Name:
        """The name of the schedule."""
        return self.schedule.name if isinstance(self.schedule, Chunked) else self.schedule

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        given = self.schedule.chunks if isinstance(self.schedule, Chunked) else 0
        return given or (1 if self.name in SINGLE else 2)

    @property
    def kind(self) -> Any:
        """torch's class."""
        return CLASSES[self.name]

    @property
    def is_single(self) -> bool:
        """Whether it takes one stage instead of a list."""
        return self.name in SINGLE

    def place(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage along the pipe axis."""
        return place(self, ranks)

    def declines(self) -> dict[str, str]:
        """Traits that torch does not support under these options."""
        torn = {} if self.name in V_SHAPED else {"tied_over_units": TORN}
        kept = ("rebound_buffer", "dropout_stateful")
        spoilt = dict.fromkeys(kept, INFERENCE) if self.shapes == "inferred" else {}
        return torn | spoilt | {"variable_lengths": ONE_SHAPE, "packed": UNSEEN}


class Stage(pipelining.PipelineStage):
    """torch's stage, whose computations are traced."""

    trace: Any

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """F."""
        with self.trace(Action("F", self.stage_index, fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: Any = False,
    ) -> None:
        """BW or B; the B of the first stage only keeps the tensors for its W."""
        op = "BW" if full_backward else "B"
        traced = self.trace(Action(op, self.stage_index, bwd_chunk_id))
        with nullcontext() if op == "B" and self.is_first else traced:
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """W, which is the whole backward of the first stage."""
        with self.trace(Action("BW" if self.is_first else "W", self.stage_index, bwd_chunk_id)):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


class Pipelining(Saves):
    """The adapter."""

    strategy = "torch_pipelining"
    depth: ClassVar[Depth] = "layout"
    options_type: ClassVar[type[Any]] = Options
    stage_type: ClassVar[type[Stage]] = Stage
    features: ClassVar[frozenset[str]] = frozenset({"clipping", "accumulation", "stages"})

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """One axis; every rank gets the initial state and keeps that of its stages."""
        chosen = parse_options(Options, options)
        return Capabilities(
            axes=("pipe",),
            exactness="reordered-sum" if chosen.name == "looped_bfs" else "bitwise",
            buffers="per_rank",
            initial_state="everywhere",
            features=cls.features,
            declines=chosen.declines(),
            **offered(chosen.checkpoint, SHARDED, TORN_STATE),
        )

    @classmethod
    def schedule(cls, options: Mapping[str, Any], ranks: int, micro_batches: int) -> Schedule:
        """The schedule that torch will run, if torch reports it."""
        return plan(parse_options(cls.options_type, options), ranks, micro_batches)

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        """Build, load and cut the model; keep this rank's parts."""
        self.options = parse_options(self.options_type, options)
        self.build, self.spec, self.mesh = build, optimizer, mesh
        self.comm = mesh.comm("pipe")
        self.device = torch.device(mesh.device)
        self.place = self.options.place(self.comm.size)
        whole = build(mesh.device)
        self.begin(whole, state, mesh)
        bounds = cut(len(build.units), len(self.place), self.options.split)
        parts = [build.stage(whole, *span) for span in bounds]
        refuse_torn(parts, self.place)
        mine = [s for s, rank in enumerate(self.place) if rank == self.comm.rank]
        self.parts = {s: self.prepare(parts[s]) for s in mine}
        self.trainable = {n: p for n, p in self.named("parameters") if p.requires_grad}
        self.optimizer = build_optimizer(optimizer, param_groups(optimizer, self.trainable))
        self.scaler = make_scaler(optimizer, mesh.device, self.comm.group)
        self.schedules: dict[tuple[int, ...], Any] = {}
        self.window: tuple[MicroBatch, ...] = ()

    def modules(self) -> list[nn.Module]:
        """The stages of this rank."""
        return list(self.parts.values())

    def begin(self, whole: nn.Module, state: Mapping[str, Tensor] | None, mesh: Mesh) -> None:
        """Give ``whole`` its initial values."""
        assert state is not None, "initial_state is 'everywhere'"
        load_state(whole, state)

    def prepare(self, part: nn.Module) -> nn.Module:
        """Prepare a stage of this rank for torch."""
        return part

    @property
    def tells_loss(self) -> bool:
        """Whether this rank has the last stage."""
        return len(self.place) - 1 in self.parts

    def named(self, kind: Literal["parameters", "buffers"]) -> Iterator[tuple[str, Any]]:
        """This rank's tensors, tied ones once, under their first names."""
        seen = set[int]()
        for part in self.parts.values():
            for name, tensor in getattr(part, f"named_{kind}")():
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield name, tensor

    # ------------------------------------------------------------------------------- the schedule

    def make_schedule(self, window: Sequence[MicroBatch]) -> Any:
        """torch's schedule for windows of this shape, because it holds buffers of their shapes."""
        shapes = self.shapes(window[0].inputs) if self.options.shapes == "given" else {}
        stages = [self.make_stage(number, shapes) for number in self.parts]
        given = stages[0] if self.options.is_single else stages
        try:
            return self.options.kind(given, len(window), loss_fn=self.loss, scale_grads=False)
        except (AssertionError, TypeError, ValueError) as error:
            raise Refused(
                f"option 'schedule' = {self.options.name!r}: torch rejects the schedule: {error}"
            ) from error

    def make_stage(self, number: int, shapes: Mapping[int, tuple[Tensor, Tensor]]) -> Stage:
        """Stage ``number``; ``shapes`` has its inputs and outputs (empty: infer them)."""
        inputs, outputs = shapes.get(number, (None, None))
        made = self.stage_type(
            self.parts[number],
            number,
            len(self.place),
            self.device,
            input_args=inputs,
            output_args=outputs,
            group=self.comm.group,
        )
        made.trace = self.trace
        return made

    @torch.no_grad()
    def shapes(self, inputs: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """Meta tensors of the inputs and outputs of each stage here for ``inputs``.

        Stage by stage in evaluation mode, on zeros; a stage tells the next one's rank its sizes.
        """
        shapes: dict[int, tuple[Tensor, Tensor]] = {}
        hidden = inputs
        integers = {"dtype": torch.int64, "device": inputs.device}
        for number, part in self.parts.items():
            if number and self.place[number - 1] != self.comm.rank:
                message = comm.control([0] * (MOST_DIMENSIONS + 1), **integers)
                self.comm.recv(message, self.place[number - 1])
                dimensions, *size = message.tolist()
                size = size[:dimensions]
                hidden = torch.zeros(size, dtype=self.dtype, device=inputs.device)
            with evaluating([part]):
                output = part(hidden)
            shapes[number] = meta(hidden, grad=number > 0), meta(output)
            if number + 1 < len(self.place) and self.place[number + 1] != self.comm.rank:
                sizes = [output.dim(), *output.shape]
                sizes += [0] * (MOST_DIMENSIONS + 1 - len(sizes))
                self.comm.send(comm.control(sizes, **integers), self.place[number + 1])
            hidden = output
        return shapes

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations: that of the parameters."""
        return next(p.dtype for _, p in self.named("parameters"))

    def loss(self, outputs: Tensor, number: Tensor) -> Tensor:
        """Scaled loss of micro-batch ``number`` (shape ``(1,)``) of the window."""
        loss: Tensor = self.scaler.scale(self.build.loss(outputs, self.window[int(number)]))
        return loss

    def schedule_for(self, window: tuple[MicroBatch, ...]) -> Any:
        """The schedule kept for windows of this length and shape."""
        key = (len(window), *window[0].inputs.shape)
        if key not in self.schedules:
            self.schedules[key] = self.make_schedule(window)
        return self.schedules[key]

    def run(self, window: tuple[MicroBatch, ...], call: Any) -> list[Tensor]:
        """Call a schedule's ``step`` or ``eval``; return scaled losses on the last stage's rank."""
        self.window, losses = window, list[Tensor]()
        inputs = [torch.cat([micro.inputs for micro in window])] if 0 in self.parts else []
        target = torch.arange(len(window)) if self.tells_loss else None
        given = losses if self.tells_loss else None
        call(*inputs, target=target, losses=given, return_outputs=False)
        return losses

    # ----------------------------------------------------------------------------------- the step

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """Run each window through its schedule, then clip and update."""
        refuse_unequal(batch)
        self.scaler.scale(torch.zeros((), device=self.device))  # made where it is not used
        losses: list[Tensor] = []
        for window in batch.windows:
            losses += self.run(window, self.schedule_for(window).step)
        self.finish()
        norm, metrics = update(
            self.scaler, self.optimizer, self.spec, self.clip, batch.step, observe
        )
        total = self.total(losses)
        if total is not None:
            total = total / metrics.get("scale", 1.0)
        self.steps_done = batch.step + 1
        return StepResult(loss=total, norm=norm, metrics=metrics)

    def finish(self) -> None:
        """Complete the gradients after the last window."""

    def total(self, losses: Sequence[Tensor]) -> Tensor | None:
        """The sum of the losses; ``None`` if they are unknown."""
        if not self.tells_loss:
            return None
        if not losses:
            return torch.zeros((), dtype=self.dtype, device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    @torch.no_grad()
    def clip(self, limit: float) -> Tensor:
        """Scale gradients to a norm over all stages of at most ``limit``; return the norm
        before.
        """
        gradients = [p.grad for p in self.trainable.values() if p.grad is not None]
        norm = self.norm(gradients)
        for gradient in gradients:
            gradient.mul_(clip_factor(norm, limit).to(gradient.dtype))
        return norm

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of the gradients of all stages (float64 scalar)."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for gradient in gradients:
            total += power_sum(gradient)
        self.comm.all_reduce(total)
        return total.sqrt()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor | None:
        """The loss in evaluation mode on the last stage, with temporary stages and buffers."""
        refuse_unequal(batch)
        losses: list[Tensor] = []
        with evaluating(self.parts.values()):
            for window in batch.windows:
                schedule = self.make_schedule(window)
                leave_forwards(schedule)
                losses += self.run(window, schedule.eval)
        total = self.total(losses)
        return total if total is None else total / self.scaler.get_scale()

    # ------------------------------------------------------------------------------------ the state

    def local_state(self, kind: Kind) -> list[Piece]:
        """The whole tensors of the stages on this rank."""
        if kind == "optimizer":
            return slot_pieces(self.optimizer, lambda n, s, t: self.pieces(f"{n}.{s}", t))
        if kind == "gradients":
            named = [(n, p.grad) for n, p in self.trainable.items() if p.grad is not None]
        else:
            named = [] if kind == "extra" else list(self.named(kind))
        return [piece for name, tensor in named for piece in self.pieces(name, tensor)]

    def pieces(self, name: str, tensor: Tensor) -> list[Piece]:
        """The whole tensor or slot."""
        return [Piece.whole(name, tensor.detach())]

    def load_pieces(self, kind: Kind, pieces: Sequence[Piece]) -> None:
        """Copy into the state of this rank; create missing optimizer slots."""
        left = copy_pieces(self.local_state(kind), pieces)
        if kind == "optimizer":
            make_slots(self.optimizer, left)
            left = copy_pieces(self.local_state(kind), left)
        if left:
            raise Refused(
                f"cannot load {left[0].name!r} ({kind}): this rank's stages have no such tensor"
            )

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """Copies of all stages' tensors on every rank, sent as objects."""
        own = {piece.name: piece.tensor.clone() for piece in self.local_state(kind)}
        state: dict[str, Tensor] = {}
        for stage in self.comm.all_gather_object(own):
            state |= stage
        return state


# ---------------------------------------------------------------------------------------- as data


def place(options: Options, ranks: int) -> tuple[int, ...]:
    """The rank of each stage along the pipe axis."""
    stages = range(ranks * options.chunks)
    if options.name in V_SHAPED:
        return tuple(s if s < ranks else 2 * ranks - 1 - s for s in stages)
    return tuple(s % ranks for s in stages)


def plan(options: Options, ranks: int, micro_batches: int) -> Schedule:
    """The actions that torch runs for one window. :class:`Refused` if it cannot run them."""
    name = options.name
    if name == "1f1b" and micro_batches < ranks:
        raise Refused(
            "option 'schedule' = '1f1b': torch needs at least as many micro-batches as stages, "
            f"but there are {micro_batches} micro-batches and {ranks} stages; use at least {ranks} "
            "micro-batches"
        )
    if name in SINGLE:
        return (gpipe if name == "gpipe" else one_f_one_b)(ranks, micro_batches)
    made = outline(options, ranks, micro_batches)
    orders = told_orders(made, ranks)
    # The schedule of that name takes groups of as many micro-batches as there are ranks.
    textbook = name == "interleaved" and micro_batches % ranks == 0
    shown = name if textbook else type(made).__name__
    return Schedule(shown, micro_batches, place(options, ranks), orders)


def outline(options: Any, ranks: int, micro_batches: int) -> Any:
    """A schedule with several stages per rank that compute nothing."""
    form = {"num_stages": ranks * options.chunks, "group_size": ranks, "group_rank": 0}
    stages = [SimpleNamespace(submod=nn.Identity(), **form) for _ in range(options.chunks)]
    try:
        return options.kind(stages, micro_batches, scale_grads=False)
    except (AssertionError, TypeError, ValueError) as error:
        raise Refused(
            f"option 'schedule' = {options.name!r}: torch rejects the schedule: {error}"
        ) from error


def told_orders(made: Any, ranks: int) -> tuple[tuple[Action, ...], ...]:
    """The order of each rank that a schedule of torch's runtime reports."""
    return tuple(tuple(translated(made.pipeline_order_with_comms[rank])) for rank in range(ranks))


def translated(order: Sequence[Any]) -> Iterator[Action]:
    """torch's actions in the suite's terms, overlapping ones one after another.

    The first stage has nobody to send a gradient to: torch does nothing in its I, all in its W
    (``stage.py``, ``backward_one_chunk``), so that is its BW.
    """
    for action in order:
        for part in action.sub_actions or (action,):
            op, stage = OPS.get(part.computation_type.value), part.stage_index
            if stage == 0 and op in ("B", "W"):
                op = None if op == "B" else "BW"
            if op is not None:
                yield Action(op, stage, part.microbatch_index)


def leave_forwards(schedule: Any) -> None:
    """Remove everything except forwards and their messages from ``schedule``, if it has its own
    order.

    Of a stage under ``fully_shard`` the first gather stays, too.
    """
    orders = getattr(schedule, "pipeline_order_with_comms", {})
    for rank, order in orders.items():
        gathered, kept = set[int](), []
        for action in order:
            for part in action.sub_actions or (action,):
                kind, stage = part.computation_type.value, part.stage_index
                if kind == GATHER and stage not in gathered:
                    gathered.add(stage)
                    kept.append(part)
                elif OPS.get(kind) in FORWARD:
                    kept.append(part)
        orders[rank] = kept


# --------------------------------------------------------------------------------------- the parts

#: Of an activation.
MOST_DIMENSIONS = 8


def refuse_torn(parts: Sequence[nn.Module], place: Sequence[int]) -> None:
    """Raise :class:`Refused` if a parameter is used in parts on different ranks."""
    owner: dict[int, int] = {}
    for part, rank in zip(parts, place, strict=True):
        for name, parameter in part.named_parameters():
            if owner.setdefault(id(parameter), rank) != rank:
                raise Refused(f"{name!r} is tied between stages on two ranks: {TORN}")


def refuse_unequal(batch: Batch) -> None:
    """Raise :class:`Refused` for inputs that a schedule would cut elsewhere than at
    micro-batches.
    """
    for window in batch.windows:
        shapes = sorted({tuple(micro.inputs.shape) for micro in window})
        if len(shapes) > 1:
            raise Refused(
                f"step {batch.step}: the micro-batches of a schedule call have different shapes "
                f"({', '.join(map(str, shapes))}), but torch's schedules need equal shapes; "
                "choose a global_batch that is a multiple of the number of micro-batches"
            )


def meta(tensor: Tensor, grad: bool = True) -> Tensor:
    """``tensor`` without its values."""
    return torch.empty_like(tensor, device="meta").requires_grad_(grad)


@contextmanager
def evaluating(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Set ``parts`` to evaluation mode and restore their modes afterwards."""
    before = [(part, part.training) for part in parts]
    for part, _ in before:
        part.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.train(training)


IMPLEMENTATION = Pipelining
