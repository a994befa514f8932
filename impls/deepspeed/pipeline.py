"""DeepSpeed's ``PipelineEngine``: stages on ranks, 1F1B, the whole optimizer step in one call.

    what                              where
    parameters, gradients, optimizer  the rank of the stage, whole; tied ones on that of each use
    buffers                           with their stage

    step     ``train_batch``   1F1B: even stages send while odd ones receive, all calls wait
                               tied gradients are summed over the stages that use them
                               clip, update
                               the loss goes from the last stage to all

A stage is one layer of a ``PipelineModule``; of the others a rank knows no more than that they are
there.  Ends that share a parameter are ``TiedLayerSpec``, as DeepSpeed documents it.  It divides by
the micro-batches, so that losses are multiplied by their number; a label is the number of its
micro-batch, by which the loss finds targets and weights.

``train_batch`` ends in an optimizer step: one window a step.  Shapes are told once, in the first
message; ``dynamic_shape`` tells them with every message, so that micro-batches may differ.

Cost: every boundary is crossed twice by a micro-batch; two fp32 numbers (losses) are broadcast;
where gradients are clipped one fp32 number is summed.
Numbers: those of one device, micro-batches in ascending order.  **Clipping is wrong** in 0.19.8:
``clip_grad_norm_`` (``deepspeed/runtime/utils.py``) counts the parameters of stage 0 only, unless
others carry the mark ``model_parallel``, which pipeline stages do not get.
Left out: data and tensor parallelism beside the pipeline, recomputation, ZeRO-1, bf16.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Mesh, environment
from shardproof.contract import (
    Batch,
    Build,
    Capabilities,
    Kind,
    MicroBatch,
    Observe,
    OptimizerSpec,
    Piece,
    Refused,
    StepResult,
)
from shardproof.impls.deepspeed import engine
from shardproof.impls.deepspeed.checkpoint import Saved, Saves, offered
from shardproof.impls.deepspeed.engine import NO_SCALE, ZERO_GRADIENT
from shardproof.impls.reference.engine.optimizer import (
    build_optimizer,
    make_slots,
    param_groups,
    set_learning_rate,
    slot_pieces,
)
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.engine.state import copy_pieces, load_state
from shardproof.impls.reference.pipeline.schedules import one_f_one_b
from shardproof.impls.reference.pipeline.stages import cut
from shardproof.schedules import Action, Schedule

BYTES = (
    "RuntimeError: DeepSpeed broadcasts parameters as a view of bytes, and torch cannot view "
    "{} as bytes"
)
#: Of 0.19.8 (runtime/engine.py, _broadcast_model), even where nobody else has the stage.
NO_BYTES = {
    "scalar": BYTES.format("parameters without a dimension"),
    "non_contiguous": BYTES.format("transposed parameters"),
}
ONE_LENGTH = (
    "DeepSpeed sends shapes once per step; dynamic_shape: true sends them with every message"
)
ONE_WINDOW = "DeepSpeed's train_batch ends in an optimizer step, so a step can have only one window"


@dataclass(frozen=True)
class Options(Saved):
    """``split``: units of each stage, in forward order (``[]``: as even as possible, larger first).

    ``dynamic_shape``: DeepSpeed's own; shapes are told with every message.
    """

    split: tuple[int, ...] = ()
    dynamic_shape: bool = False


class Layer(nn.Module):
    """The layer that DeepSpeed sees in place of a stage."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, tensor: Tensor) -> Tensor:
        """Map inputs or hidden states to hidden states or outputs."""
        output: Tensor = self.part(tensor)
        return output


class DeepSpeedPipeline(Saves):
    """The adapter."""

    strategy = "deepspeed_pipeline"
    depth = "layout"

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """fp32 on process backends; every rank gets the initial state and keeps its stage's."""
        chosen = parse_options(Options, options)
        idle = ("unused", "conditional_late_step", "conditional_early_step")
        return Capabilities(
            axes=("pipe",),
            dtypes=("float32",),
            backends=("gloo",),
            buffers="per_rank",
            initial_state="everywhere",
            features=frozenset({"clipping", "accumulation", "stages"}),
            declines={
                **dict.fromkeys(idle, ZERO_GRADIENT),
                **NO_BYTES,
                "loss_scale": NO_SCALE,
                "packed": (
                    "only the first stage receives the inputs, and the positions of documents "
                    "are read from the inputs"
                ),
                "incomplete_window": ONE_WINDOW,
                **({} if chosen.dynamic_shape else {"variable_lengths": ONE_LENGTH}),
            },
            packages=("deepspeed",),
            checkpoints=offered(chosen.checkpoint, False),
        )

    @classmethod
    def schedule(cls, options: Mapping[str, Any], ranks: int, micro_batches: int) -> Schedule:
        """DeepSpeed's ``TrainSchedule``, which computes like 1F1B for any number of
        micro-batches.
        """
        parse_options(Options, options)
        return one_f_one_b(ranks, micro_batches)

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        """Build, load and cut the model; make the engine over all ranks."""
        self.options = parse_options(Options, options)
        self.checkpoints = self.options.checkpoint
        if optimizer.scaler is not None:
            raise Refused(f"optimizer.scaler: {NO_SCALE}; leave the scaler out")
        if mesh.world != torch.distributed.get_world_size():
            raise Refused(
                f"this mesh has {mesh.world} ranks, but DeepSpeed always uses all ranks of the "
                "default process group; use a mesh with all these ranks"
            )
        self.build, self.spec, self.comm = build, optimizer, mesh.comm("pipe")
        whole = build(mesh.device)
        assert state is not None, "initial_state is 'everywhere'"
        load_state(whole, state)
        first = {id(tensor): name for name, tensor in whole.named_parameters()}
        bounds = cut(len(build.units), self.comm.size, self.options.split)
        parts = [build.stage(whole, *span) for span in bounds]
        self.part = parts[self.comm.rank]
        self.tied = tied_names(parts)
        self.named = {first[id(p)]: p for _, p in self.part.named_parameters()}
        self.shared = {
            first[id(self.part.get_parameter(name))] for name in self.tied.get(self.comm.rank, ())
        }
        self.trainable = {name: p for name, p in self.named.items() if p.requires_grad}
        self.torch_optimizer = build_optimizer(optimizer, param_groups(optimizer, self.trainable))
        self.micro_batches: Sequence[MicroBatch] = ()
        self.shape: tuple[int, ...] = ()
        self.observe: Observe | None = None
        self.done = {"F": 0, "BW": 0}
        with self.launched(), contextlib.redirect_stdout(io.StringIO()):
            self.engine = self.make_engine()

    def launched(self) -> contextlib.AbstractContextManager[None]:
        """The environment that DeepSpeed's launcher would set, for the time of a call."""
        return environment(LOCAL_RANK=str(self.comm.rank), LOCAL_SIZE=str(self.comm.size))

    def make_engine(self) -> Any:
        """DeepSpeed's engine for a pipeline with one layer per stage."""
        engine.deepspeed.init_distributed(
            dist_backend="gloo", auto_mpi_discovery=False, dist_init_required=False, verbose=False
        )
        module = engine.deepspeed.pipe.PipelineModule(
            layers=[self.layer(stage) for stage in range(self.comm.size)],
            num_stages=self.comm.size,
            loss_fn=self.loss,
            partition_method="uniform",
            dynamic_shape=self.options.dynamic_shape,
        )
        made, *_ = engine.deepspeed.initialize(
            model=module,
            optimizer=self.torch_optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": self.spec.clip_norm or 0.0,
                "steps_per_print": 2**31,
            },
            dist_init_required=False,
        )
        instructions = dict(made._INSTRUCTION_MAP)
        names = {kind.__name__: kind for kind in instructions}
        for name, op in (("ForwardPass", "F"), ("BackwardPass", "BW")):
            instructions[names[name]] = self.traced(op, instructions[names[name]])
        update = names["OptimizerStep"]
        instructions[update] = self.observed(instructions[update])
        made._INSTRUCTION_MAP = instructions
        made.clip_fp32_gradients = self.clip
        return made

    def layer(self, stage: int) -> Any:
        """The entry for ``stage`` in the list of layers."""
        own = stage == self.comm.rank
        if stage in self.tied:
            names = [f"part.{name}" for name in self.tied[stage]]
            part = self.part if own else None
            spec = engine.deepspeed.pipe.TiedLayerSpec
            return spec("tied", Layer, part, tied_weight_attr=names)
        return Layer(self.part) if own else _elsewhere

    def traced(self, op: str, instruction: Callable[..., None]) -> Callable[..., None]:
        """``instruction``, whose n-th call in a step is logged as ``op`` of micro-batch n.

        The engine does not say which one it takes: the log tells the order of F and BW only.
        """

        def call(*args: Any, **options: Any) -> None:
            with self.trace(Action(op, self.comm.rank, self.done[op])):
                instruction(*args, **options)
            self.done[op] += 1

        return call

    def observed(self, instruction: Callable[..., None]) -> Callable[..., None]:
        """The update, before which gradients are final."""

        def call(*args: Any, **options: Any) -> None:
            assert self.observe is not None
            self.observe("gradients_final")
            instruction(*args, **options)

        return call

    def clip(self) -> None:
        """``DeepSpeedEngine.clip_fp32_gradients`` with the norm kept."""
        clip = engine.deepspeed.runtime.engine.clip_grad_norm_
        parameters = self.engine.module.parameters()
        norm = clip(parameters, max_norm=self.spec.clip_norm, mpu=self.engine.mpu)
        self.norm = norm.detach().clone().reshape(())
        assert self.observe is not None
        self.observe("after_clip")

    def loss(self, outputs: Tensor, number: Tensor) -> Tensor:
        """The loss of micro-batch ``number`` (shape ``(1,)``), times the engine's divisor."""
        loss = self.build.loss(outputs, self.micro_batches[int(number)])
        return loss * len(self.micro_batches)

    # ----------------------------------------------------------------------------------- the step

    def load_batch(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and number of every micro-batch, when the engine is ready for them."""
        if len(batch.windows) != 1:
            raise Refused(
                f"step {batch.step} calls the schedule {len(batch.windows)} times (key 'windows'), "
                f"but {ONE_WINDOW}; set windows to 1"
            )
        shapes = sorted({tuple(micro.inputs.shape) for micro in batch.micro_batches})
        if not self.options.dynamic_shape:
            if len(shapes) > 1:
                raise Refused(
                    f"step {batch.step}: the micro-batches have different shapes "
                    f"({', '.join(map(str, shapes))}); set option 'dynamic_shape' to true"
                )
            if self.shape not in ((), shapes[0]):
                self.engine.reset_activation_shape()
            self.shape = shapes[0]
        self.micro_batches = batch.micro_batches
        numbers = torch.arange(len(self.micro_batches)).split(1)
        inputs = [micro.inputs for micro in self.micro_batches]
        return iter(list(zip(inputs, numbers, strict=True)))

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """Run ``train_batch``, which is the whole step."""
        data = self.load_batch(batch)
        self.observe, self.done = observe, {"F": 0, "BW": 0}
        set_learning_rate(self.torch_optimizer, self.spec, batch.step)
        with self.launched():
            self.engine.set_train_batch_size(len(self.micro_batches))
            loss = self.engine.train_batch(data)
        observe("after_update")
        clips = self.spec.clip_norm is not None
        return StepResult(loss=loss.detach().clone(), norm=self.norm if clips else None)

    def evaluate(self, batch: Batch) -> Tensor | None:
        """Evaluate with the engine, which broadcasts the loss."""
        data = self.load_batch(batch)
        try:
            with self.launched():
                loss = self.engine.eval_batch(data, num_micro_batches=len(self.micro_batches))
        finally:
            self.engine.module.train()
        share: Tensor = loss.detach().reshape(())
        return share

    # ------------------------------------------------------------------------------------ the state

    def local_state(self, kind: Kind) -> list[Piece]:
        """The whole tensors of the stage; tied parameters are copies, numbered by stage."""
        if kind == "optimizer":
            return slot_pieces(
                self.torch_optimizer, lambda n, s, t: Piece.whole(f"{n}.{s}", t, self.copy_of(n))
            )
        named: dict[str, Tensor] = dict(self.part.named_buffers())
        if kind == "parameters":
            named = dict(self.named)
        elif kind == "gradients":
            named = {n: p.grad for n, p in self.trainable.items() if p.grad is not None}
        return [Piece.whole(n, t.detach(), self.copy_of(n)) for n, t in named.items()]

    def copy_of(self, name: str) -> int:
        """Number of this rank's copy of ``name``."""
        return sorted(self.tied).index(self.comm.rank) if name in self.shared else 0

    def load_pieces(self, kind: Kind, pieces: Sequence[Piece]) -> None:
        """Copy into the state of this rank; create missing optimizer slots."""
        left = copy_pieces(self.local_state(kind), pieces)
        if kind == "optimizer":
            make_slots(self.torch_optimizer, left)
            left = copy_pieces(self.local_state(kind), left)
        if left:
            raise Refused(
                f"cannot load {left[0].name!r} ({kind}): this rank's stage has no such tensor"
            )

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """Copies of all stages' tensors on every rank, sent as objects."""
        own = {piece.name: piece.tensor.clone() for piece in self.local_state(kind)}
        whole: dict[str, Tensor] = {}
        for stage in self.comm.all_gather_object(own):
            whole |= stage
        return whole

    def close(self) -> None:
        """Close the engine."""
        self.engine.destroy()


def _elsewhere(tensor: Tensor) -> Tensor:
    """A layer that a different rank holds."""
    raise RuntimeError("this layer belongs to a stage on another rank, so it cannot run here")


def tied_names(parts: Sequence[nn.Module]) -> dict[int, list[str]]:
    """Stage -> its names of parameters that two stages share, in a common order.

    Raises :class:`Refused` where they are not always the same two: a stage is one layer, and a
    ``TiedLayerSpec`` has one key.
    """
    uses: dict[int, list[tuple[int, str]]] = {}
    for stage, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            uses.setdefault(id(parameter), []).append((stage, name))
    shared = [names for names in uses.values() if len(names) > 1]
    pairs = sorted({tuple(stage for stage, _ in names) for names in shared})
    if len(pairs) > 1:
        raise Refused(
            f"parameters are tied between stages {' and between '.join(map(str, pairs))}, but "
            "DeepSpeed allows one such group of stages (a stage has one TiedLayerSpec); choose a "
            "split that puts all tied parameters on the same stages"
        )
    return {
        stage: [dict(names)[stage] for names in shared] for stage in (pairs[0] if pairs else ())
    }


IMPLEMENTATION = DeepSpeedPipeline
