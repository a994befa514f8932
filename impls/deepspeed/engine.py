"""The common part of the four stages: one ``DeepSpeedEngine``, driven step by step.

    set-up   rank 0 loads the initial state; DeepSpeed broadcasts parameters, this adapter buffers
             torch's optimizer is handed over: DeepSpeed's own compile C++ at their first use
    step     micro-batches but the last   boundary off
             last micro-batch             boundary on: DeepSpeed finishes the reduction in backward
             engine.step()                norm, clip, update, gathered parameters

DeepSpeed keeps its process groups and its configuration in module globals and asks the environment
for ``LOCAL_RANK``: ranks are processes, and the variable is there during calls only.  It divides by
the number of ranks, so the loss is multiplied by it.  Its shared-memory extension, half a minute of
compilation at the first use of gloo, is switched off; gloo's own collectives are used.

Gradients and optimizer state lie in flat partitions inside the engine; each stage says where.
Clipping and update are one call, group by group: a hook keeps the clipped gradients of each group
from being freed, and ``after_clip`` is observed when the last group's are known.

Left out: fp16 and bf16 (a lossy oracle would be needed), NVMe, ZeRO++ and everything else that
needs a compiler or a GPU. fp64 cannot be judged: stages 0 and 3 refuse it, and stages 1 and 2
silently train an fp64 model through an fp32 master (``stage_1_and_2.py``,
``_configure_master_weights``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shardproof.comm import Mesh, environment
from shardproof.contract import (
    Batch,
    Build,
    Capabilities,
    Kind,
    Observe,
    OptimizerSpec,
    Piece,
    Refused,
    StepResult,
)
from shardproof.impls.deepspeed.checkpoint import Saves, offered
from shardproof.impls.deepspeed.json_form import ZeroOptimization, checkpoints, parse, section
from shardproof.impls.reference.engine.optimizer import (
    build_optimizer,
    param_groups,
    set_learning_rate,
    unnamed_groups,
)
from shardproof.impls.reference.engine.state import broadcast_tensors, load_state

#: Why traits are declined.
NO_SCALE = "DeepSpeed scales losses only in fp16, which it does not support on CPUs"
ZERO_GRADIENT = "DeepSpeed replaces a missing gradient by zeros and updates the parameter with them"
#: Traits that no stage supports.
DECLINES: Mapping[str, str] = {
    **dict.fromkeys(("unused", "conditional_late_step", "conditional_early_step"), ZERO_GRADIENT),
    "loss_scale": NO_SCALE,
}
#: Those that stages which reduce in every micro-batch do not support.
EVERY_MICRO_BATCH: Mapping[str, str] = {
    **DECLINES,
    "unequal_micro_batches": "a rank with more micro-batches would start a reduction that the "
    "other ranks do not join",
}

# Imported where the ranks are forked from, once, because it takes more than a second.
if importlib.util.find_spec("deepspeed") is not None:
    # A torch without CUDA has one accelerator; unnamed, it is a warning in front of every command.
    with environment(**({} if torch.version.cuda else {"DS_ACCELERATOR": "cpu"})):
        import deepspeed
        import deepspeed.runtime.engine

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def init_communication() -> None:
    """Let DeepSpeed use the process group that there is; call it as its launcher would."""
    deepspeed.init_distributed(
        dist_backend="gloo", auto_mpi_discovery=False, dist_init_required=False, verbose=False
    )


class Engine(Saves):
    """The frame of the adapter; stages define where gradients and optimizer state lie."""

    stage: ClassVar[int]
    axis: ClassVar[str] = "shard"
    features: ClassVar[frozenset[str]]
    declines: ClassVar[Mapping[str, str]] = DECLINES

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """fp32 on process backends."""
        parse(options, cls.stage)
        return Capabilities(
            axes=(cls.axis,),
            dtypes=("float32",),
            backends=("gloo",),
            buffers="per_rank",
            features=cls.features,
            declines=cls.declines,
            packages=("deepspeed",),
            checkpoints=offered(checkpoints(options), cls.stage > 0),
        )

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        """The engine over all ranks."""
        self.zero: ZeroOptimization = parse(options, self.stage)
        self.checkpoints = checkpoints(options)
        if optimizer.scaler is not None:
            raise Refused(f"optimizer.scaler: {NO_SCALE}; leave the scaler out")
        self.build, self.spec, self.comm = build, optimizer, mesh.comm(self.axis)
        if mesh.world != torch.distributed.get_world_size():
            raise Refused(
                f"this mesh has {mesh.world} ranks, but DeepSpeed always uses all ranks of the "
                "default process group; use a mesh with all these ranks"
            )
        module = build(mesh.device)
        if state is not None:
            load_state(module, state)
        broadcast_tensors(list(module.buffers()), self.comm)
        self.shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        self.trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.torch_optimizer = self.make_optimizer()
        self.rank, self.world = mesh.rank, mesh.world
        with self.launched():
            self.engine = self.make_engine(module, options)
        self.module: nn.Module = self.engine.module
        self.zero_optimizer: Any = self.engine.optimizer
        self.final = False
        self.observe: Observe | None = None

    def launched(self) -> contextlib.AbstractContextManager[None]:
        """The environment that DeepSpeed's launcher would set, for the time of a call."""
        return environment(LOCAL_RANK=str(self.rank), LOCAL_SIZE=str(self.world))

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Torch's optimizer over whole parameters, which DeepSpeed replaces with its partitions."""
        groups = unnamed_groups(param_groups(self.spec, self.trainable))
        return build_optimizer(self.spec, groups)

    def make_engine(self, module: nn.Module, options: Mapping[str, Any]) -> Any:
        """DeepSpeed's engine around ``module``."""
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.spec.clip_norm or 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": self.section(module, options),
            **self.checkpoints.section,
        }
        init_communication()
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=self.torch_optimizer,
            config=config,
            dist_init_required=False,
        )
        return engine

    def section(self, module: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
        """``zero_optimization``, with buckets no larger than the model.

        That changes no call; but 2 GB a rank, DeepSpeed's default, are allocated in every backward,
        and torch fills them where it is asked for determinism.
        """
        given = section(options, self.stage)
        if self.stage:
            elements = sum(math.prod(shape) for shape in self.shapes.values())
            given["reduce_bucket_size"] = min(int(self.zero.reduce_bucket_size), max(elements, 1))
        return given

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """Backward of every micro-batch through the engine, then the engine's step."""
        if not batch.micro_batches:
            what = (
                f"step {batch.step}: this rank has no micro-batch, so the other ranks would wait "
                "in DeepSpeed's collectives"
            )
            raise Refused(f"{what}; give every rank at least 1 micro-batch")
        with self.launched():
            return self.train(batch, observe)

    def train(self, batch: Batch, observe: Observe) -> StepResult:
        """The step itself."""
        total = torch.zeros(())
        micro_batches = batch.micro_batches
        for number, micro in enumerate(micro_batches):
            self.engine.set_gradient_accumulation_boundary(number == len(micro_batches) - 1)
            loss = self.build.loss(self.engine(micro.inputs), micro)
            self.engine.backward(loss * self.comm.size)  # the engine divides by it
            total = total + loss.detach()
        self.final = True
        observe("gradients_final")
        clips = self.spec.clip_norm is not None
        self.observe = observe if clips else None
        set_learning_rate(self.torch_optimizer, self.spec, batch.step)
        self.engine.step()
        self.final = False
        observe("after_update")
        return StepResult(loss=total, norm=self.norm() if clips else None)

    @abstractmethod
    def norm(self) -> Tensor:
        """The global norm before clipping, as the engine computed it."""

    @abstractmethod
    def gradients(self) -> Iterator[Piece]:
        """This rank's part of the running step's gradients."""

    @abstractmethod
    def slots(self) -> Iterator[Piece]:
        """This rank's part of optimizer state."""

    def parameters(self) -> Iterator[Piece]:
        """This rank's parameters: all of them, whole."""
        for name, parameter in self.module.named_parameters():
            yield Piece.whole(name, parameter.detach(), replica=self.comm.rank)

    def local_state(self, kind: Kind) -> list[Piece]:
        """Pieces from the engine's own partitions, without communication."""
        if kind == "buffers":
            named = self.module.named_buffers()
            return [Piece.whole(n, b.detach(), replica=self.comm.rank) for n, b in named]
        if kind == "parameters":
            return list(self.parameters())
        if kind == "optimizer":
            return list(self.slots())
        return list(self.gradients()) if self.final else []

    def piece(self, name: str, of: str, tensor: Tensor, start: int) -> Piece:
        """``tensor`` as the elements from ``start`` of parameter ``of``, flattened."""
        span = (start, start + tensor.numel())
        return Piece(name, self.shapes[of], tensor.detach(), flat_range=span)

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """Copies of the parameters, which are whole here."""
        if kind != "parameters":
            raise Refused(f"full_state({kind!r}): DeepSpeed can gather only parameters")
        return {n: p.detach().clone() for n, p in self.module.named_parameters()}

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """This rank's share of the loss, through the engine."""
        self.engine.eval()
        try:
            with self.launched():
                shares = [self.build.loss(self.engine(m.inputs), m) for m in batch.micro_batches]
        finally:
            self.engine.train()
        return torch.stack(shares).sum() if shares else torch.zeros(())

    def close(self) -> None:
        """Close the engine."""
        self.engine.destroy()
