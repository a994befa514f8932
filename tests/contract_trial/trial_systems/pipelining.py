"""``torch.distributed.pipelining``: stages on the pipe axis, schedules that own the whole step.

What is new for the contract: a rank holds a part of the model only, most ranks never see the loss,
the schedule splits the batch itself, and the same step runs through several schedule calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from impls.reference.parts.norm import clip_factor, power_sum
from impls.reference.parts.optimizer import (
    build_optimizer,
    param_groups,
    set_learning_rate,
    slot_pieces,
)
from suite.comm import Mesh
from suite.contract import (
    Batch,
    Build,
    Capabilities,
    Implementation,
    Kind,
    MicroBatch,
    Observe,
    OptimizerSpec,
    Piece,
    Refused,
    StepResult,
)

SCHEDULES = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}


class Pipelining(Implementation):
    """Two or more stages; option ``schedule``: ``gpipe`` or ``1f1b``."""

    strategy = "pipeline"

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """One axis; a parameter has its state on its stage only, so state is given everywhere."""
        if options.get("schedule") not in SCHEDULES:
            raise Refused(f"option 'schedule' is one of {', '.join(SCHEDULES)}")
        return Capabilities(
            axes=("pipe",),
            exactness="bitwise",
            initial_state="everywhere",
            features=frozenset({"clipping", "accumulation", "stages"}),
            declines={"tied_over_units": "no gradient exchange between the tied stages"},
        )

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        """Cut the units evenly; this rank keeps its part."""
        assert state is not None
        self.build, self.spec, self.comm = build, optimizer, mesh.comm("pipe")
        self.kind = SCHEDULES[options["schedule"]]
        units, stages = len(build.units), self.comm.size
        if stages > units:
            raise Refused(f"{stages} stages for {units} units")
        bounds = [units * s // stages for s in range(stages + 1)]
        stage = self.comm.rank
        self.module = build.stage(build(mesh.device), bounds[stage], bounds[stage + 1])
        with torch.no_grad():
            for name, tensor in self._named().items():
                tensor.copy_(state[name])
        self.trainable = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.optimizer = build_optimizer(optimizer, param_groups(optimizer, self.trainable))
        self.schedules: dict[tuple[int, ...], Any] = {}

    def _named(self) -> dict[str, Tensor]:
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    def schedule_for(self, window: tuple[MicroBatch, ...]) -> Any:
        """The schedule for windows of this shape (its number of micro-batches is fixed)."""
        key = (len(window), *window[0].inputs.shape)
        if key not in self.schedules:
            stage = pipelining.PipelineStage(
                self.module,
                self.comm.rank,
                self.comm.size,
                torch.device("cpu"),
                group=self.comm.group,
            )
            self.schedules[key] = self.kind(stage, len(window), self.loss, scale_grads=False)
        return self.schedules[key]

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """A schedule passes one target tensor: targets and weights, stacked."""
        targets, weights = target.unbind(1)
        micro = MicroBatch(outputs, targets.to(torch.int64), weights, outputs)
        return self.build.loss(outputs, micro)

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """One schedule call per window, then one update."""
        losses: list[Tensor] = []
        for window in batch.windows:
            if len({micro.inputs.shape for micro in window}) > 1:
                raise Refused("a schedule splits its batch evenly: micro-batches of unequal size")
            self.run(window, losses)
        observe("gradients_final")
        norm = None
        if self.spec.clip_norm is not None:
            norm = self.clip(self.spec.clip_norm)
            observe("after_clip")
        set_learning_rate(self.optimizer, self.spec, batch.step)
        self.optimizer.step()
        observe("after_update")
        self.optimizer.zero_grad()
        is_last = self.comm.rank == self.comm.size - 1
        total = torch.stack([loss.detach() for loss in losses]).sum() if is_last else None
        return StepResult(loss=total, norm=norm)

    def run(self, window: tuple[MicroBatch, ...], losses: list[Tensor]) -> None:
        """One schedule call: inputs go in at the first stage, targets at the last."""
        schedule, found = self.schedule_for(window), []
        inputs = [torch.cat([micro.inputs for micro in window])] if self.comm.rank == 0 else []
        if self.comm.rank == self.comm.size - 1:
            target = torch.stack(
                [
                    torch.cat([micro.targets for micro in window]).to(torch.float64),
                    torch.cat([micro.weights for micro in window]).to(torch.float64),
                ],
                dim=1,
            )
            schedule.step(*inputs, target=target, losses=found)
        else:
            schedule.step(*inputs)
        losses += found

    @torch.no_grad()
    def clip(self, limit: float) -> Tensor:
        """Global norm over all stages."""
        gradients = [p.grad for p in self.trainable.values() if p.grad is not None]
        total = torch.stack([power_sum(gradient) for gradient in gradients]).sum()
        self.comm.all_reduce(total)
        norm = total.sqrt()
        for gradient in gradients:
            gradient.mul_(clip_factor(norm, limit))
        return norm

    def local_state(self, kind: Kind) -> list[Piece]:
        """What this stage owns: the others own the rest."""
        if kind == "optimizer":
            return slot_pieces(self.optimizer, lambda n, s, t: Piece.whole(f"{n}.{s}", t))
        found: dict[str, Tensor] = dict(self.module.named_buffers())
        if kind == "parameters":
            found = dict(self.module.named_parameters())
        elif kind == "gradients":
            found = {n: p.grad for n, p in self.trainable.items() if p.grad is not None}
        return [Piece.whole(name, tensor.detach()) for name, tensor in found.items()]

    @torch.no_grad()
    def load_pieces(self, kind: Kind, pieces: Any) -> None:
        """Teacher forcing of parameters: this stage's own only."""
        if kind != "parameters":
            raise Refused(f"no load_pieces of {kind}")
        named: dict[str, nn.Parameter] = dict(self.module.named_parameters())
        for piece in pieces:
            named[piece.name].copy_(piece.tensor)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor | None:
        """Forwards only, micro-batch by micro-batch, by hand; known on the last stage."""
        self.module.eval()
        total, rank = torch.zeros((), dtype=torch.float64), self.comm.rank
        for micro in batch.micro_batches:
            hidden = micro.inputs
            if rank:
                width = self.module.get_parameter("norm.weight").shape[0] if self._has_norm else 0
                hidden = torch.empty(*micro.inputs.shape, width, dtype=micro.weights.dtype)
                self.comm.recv(hidden, rank - 1)
            hidden = self.module(hidden)
            if rank < self.comm.size - 1:
                self.comm.send(hidden, rank + 1)
            else:
                total += self.build.loss(hidden, micro)
        self.module.train()
        return total if rank == self.comm.size - 1 else None

    @property
    def _has_norm(self) -> bool:
        return "norm.weight" in dict(self.module.named_parameters())

    def save(self, path: Path, extra: Mapping[str, Any]) -> None:
        """Each stage writes its own file; nothing is gathered."""
        state = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "extra": dict(extra)}, path / f"stage{self.comm.rank}.pt")

    def load(self, path: Path) -> Mapping[str, Any]:
        """The counterpart."""
        state = torch.load(path / f"stage{self.comm.rank}.pt", weights_only=True)
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        extra: Mapping[str, Any] = state["extra"]
        return extra
