"""A strategy's handle as an implementation under test.

All reference strategies share this step:

    step:  before_step
           for each micro-batch: accumulate(is_last) -> forward -> loss -> backward
           finish                      observe("gradients_final")
           norm -> clip                observe("after_clip")
           learning rate -> update -> after_update     observe("after_update")
           after_step
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardproof.comm import Mesh
from shardproof.contract import (
    Batch,
    Build,
    Kind,
    MicroBatch,
    Observe,
    OptimizerSpec,
    Piece,
    StepResult,
)
from shardproof.impls.reference.engine.choices import (
    Checkpoints,
    Compressing,
    OfBoth,
    Saved,
    Training,
    collectives_of,
)
from shardproof.impls.reference.engine.handle import Context, Handle
from shardproof.impls.reference.engine.late import Following
from shardproof.impls.reference.engine.norm import clip_factor, total_norm
from shardproof.impls.reference.engine.optimizer import (
    build_optimizer,
    make_slots,
    seed_state,
    set_learning_rate,
    slot_pieces,
)
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.engine.precision import Precision
from shardproof.impls.reference.engine.state import aliases_of, copy_pieces, load_state
from shardproof.impls.reference.parts.reducers import Reducer, pieces_on

if TYPE_CHECKING:
    from shardproof.impls.reference.checkpoint.checkpointing import Checkpointing
    from shardproof.impls.reference.checkpoint.loading import Loaded
    from shardproof.impls.reference.checkpoint.saver import Saver
    from shardproof.impls.reference.engine.masters import Masters
    from shardproof.impls.reference.engine.recompute import Group


class Engine(Following):
    """An implementation around one :class:`~shardproof.impls.reference.engine.handle.Handle`."""

    #: The dataclass that the options become.
    options_type: type[Any] = Saved
    steps_done = 0
    #: Saves and loads; none before the first of either.
    checkpointing: Checkpointing | None = None

    @abstractmethod
    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        """Apply the strategy to ``module``, whose values are valid on global rank 0 only."""

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        """Build, load the given state, apply the strategy, create the optimizer."""
        module = build(mesh.device)
        if state is not None:
            load_state(module, state)
        self.build, self.spec, self.mesh, self.given = build, optimizer, mesh, options
        self.checkpoints = parse_options(Checkpoints, options.get("checkpoint", {}), "checkpoint.")
        self.aliases = aliases_of(module)
        self.groups = self.recompute(module, options)
        self.precision = parse_options(Precision, options.get("precision", {}), "precision.")
        self.precision.check_norms(module)
        self.precision.cast_buffers(module)
        offloads = options.get("offload", "none") != "none"
        self.host = self.host_type(mesh.device) if offloads else None
        # Before the strategy casts anything: masters have the dtypes as built.
        self.built = {name: parameter.dtype for name, parameter in module.named_parameters()}
        self.frozen = {n for n, p in module.named_parameters() if not p.requires_grad}
        self.reducer = self.make_reducer()
        self.handle = self.transform(module, mesh, options)
        self.module = self.handle.module
        self.scaler = self.scaler_type(optimizer.scaler, mesh) if optimizer.scaler else None
        # Over the strategy's tensors, which are not those that the module was built with.
        self.optimizer = self.make_optimizer()

    def context(self, options: Training) -> Context:
        """The additional inputs of a strategy with ``options``."""
        host = self.host if options.offload == "parameters" else None
        return Context(self.reducer, self.build.units, host)

    def recompute(self, module: nn.Module, options: Mapping[str, Any]) -> list[Group]:
        """Wrap the units that are recomputed in backward."""
        every = options.get("recompute_every", 0)
        if not every:
            return []
        from shardproof.impls.reference.engine.recompute import recompute_units

        return recompute_units(module, self.build.units, every, self.call_type)

    def make_reducer(self) -> Reducer:
        """Create the reducer of this rank's handles as the options say."""
        options = self.summing(self.given)
        if options is None or (options.compress is None and collectives_of(options) == OfBoth()):
            return Reducer()
        return self.summing_type().reducer(options, self.spec, self.mesh)

    @classmethod
    def summing(cls, options: Mapping[str, Any]) -> Compressing | None:
        """The options of the strategy that sums gradients; ``None`` if there is none."""
        chosen = parse_options(cls.options_type, options)
        return chosen if isinstance(chosen, Compressing) else None

    @classmethod
    def emulator(
        cls, options: Mapping[str, Any]
    ) -> Callable[[int, Sequence[dict[str, Tensor]]], dict[str, Tensor]]:
        """The emulator of the option ``compress``, which transforms exact gradients."""
        chosen = cls.summing(options)
        if chosen is None or chosen.compress is None:
            return super().emulator(options)
        from shardproof.impls.reference.parts.compressors.emulators import emulator

        return emulator(chosen.compress, chosen.reduction)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over the tensors that this rank updates, or over their masters."""
        groups = self.handle.param_groups(self.spec)
        self.updated = [tensor for group in groups for _, tensor in group["params"]]
        self.masters: Masters | None = None
        if self.masters_type.wanted(groups, self.built, self.host):
            self.masters = self.masters_type(groups, self.built, self.host)
            groups = self.masters.groups
        self.begin_following(self.summing(self.given), groups)
        return build_optimizer(self.spec, groups)

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """One optimizer step over all micro-batches of all windows."""
        self.handle.begin_step(batch.step)
        self.handle.before_step(len(batch.micro_batches))
        loss = self.backward(batch)
        self.handle.finish()
        # Before anybody looks: final gradients are those of the loss, not of the scaled loss.
        metrics = self.unscale() if self.scaler else {}
        observe("gradients_final")
        norm = None
        if not metrics.get("skipped"):
            if self.spec.clip_norm is not None:
                norm = self.norm()
                self.clip(norm, self.spec.clip_norm)
                observe("after_clip")
            set_learning_rate(self.optimizer, self.spec, batch.step)
            self.set_decay(batch.step)
            self.update()
        self.steps_done = batch.step + 1
        # After a skipped update as well: collectives must be the same in every step.
        self.handle.after_update()
        observe("after_update")
        self.handle.after_step()
        if self.masters:
            self.masters.after_step()
        return StepResult(loss=loss, norm=norm, metrics=metrics)

    def unscale(self) -> dict[str, float]:
        """Remove the loss scale from the gradients; return the scale and whether it overflowed."""
        assert self.scaler is not None
        scale = self.scaler.scale
        skipped = self.scaler.overflowed(tensor.grad for tensor in self.updated)
        self.scale_gradients(torch.tensor(1.0 / scale, dtype=torch.float64))
        self.scaler.adapt(skipped)
        return {"scale": scale, "skipped": float(skipped)}

    def norm(self) -> Tensor:
        """Global norm of the gradients that the optimizer will see."""
        norm = total_norm(self.handle.norm_parts(), self.mesh.comm)
        return norm * self.masters.factor if self.masters else norm

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by ``factor``, at once or when they are copied to the masters."""
        (self.masters or self.handle).scale_gradients(factor)

    def update(self) -> None:
        """One step of the optimizer, on masters if there are any."""
        self.finish_copies()
        if self.masters:
            self.masters.copy_down()
        seed_state(self.optimizer, self.spec, self.host)
        self.optimizer.step()
        if self.averages:
            self.averages.update()
        if self.masters:
            self.masters.copy_up()

    def backward(self, batch: Batch) -> Tensor | None:
        """Forward and backward of every micro-batch; the sum of their detached losses.

        A pipeline runs a schedule instead; ranks that have no loss tell ``None``.
        """
        if self.build.terms:
            return self.terms_type(self).backward(batch)
        total = torch.zeros((), dtype=next(self.module.parameters()).dtype)
        micro_batches = batch.micro_batches
        for number, micro in enumerate(micro_batches):
            self.handle.accumulate(is_last=number == len(micro_batches) - 1)
            loss = self.loss(micro)
            self.handle.backward_begins(loss)
            (loss * self.scaler.scale if self.scaler else loss).backward()
            total = total + loss.detach()
        return total

    def loss(self, micro: MicroBatch) -> Tensor:
        """Weighted loss of one micro-batch; weights sum to 1 over the global batch."""
        return self.loss_of(self.module(self.precision.cast_inputs(micro.inputs)), micro)

    def loss_of(self, outputs: Tensor, micro: MicroBatch) -> Tensor:
        """The loss of the model's ``outputs`` for ``micro``."""
        return self.build.loss(self.precision.cast_outputs(outputs), micro)

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Scale gradients down to ``max_norm``."""
        self.scale_gradients(clip_factor(norm, max_norm))

    def local_state(self, kind: Kind) -> list[Piece]:
        """The state of this rank; state of the reducer counts as the optimizer's."""
        held = self.held_pieces(kind)
        # Not placed like the rest: it is this rank's own, wherever its parameters are split.
        return held + self.kept_pieces() if kind == "optimizer" else held

    def held_pieces(self, kind: Kind) -> list[Piece]:
        """Parameters, gradients, buffers, slots and masters of the optimizer, or averages."""
        if kind == "extra":
            return self.averages.pieces(self.handle.place) if self.averages else []
        if kind == "optimizer":
            slots = slot_pieces(self.optimizer, self.handle.place)
            slots += self.masters.master_pieces(self.handle.place) if self.masters else []
            return slots + self.handle.outer_pieces()
        pieces = self.handle.pieces(kind)
        if kind == "gradients" and self.masters:
            return self.masters.gradient_pieces(pieces)
        return pieces

    @torch.no_grad()
    def load_pieces(self, kind: Kind, pieces: Sequence[Piece]) -> None:
        """Copy into the state of this rank with the same name and place.

        Optimizer slots that do not exist yet, before the first step, are made.
        """
        self.finish_copies()
        if kind == "optimizer":
            # The reducer comes first: what it has yet to make must not become an optimizer slot.
            pieces = self.reducer.load_pieces(pieces_on(self.mesh.device, pieces))
        held = self.extra_state() if kind == "extra" else self.held_pieces(kind)
        rest = copy_pieces(held, pieces)
        self.settle(kind)
        if rest and kind == "optimizer":
            make_slots(self.optimizer, rest, self.host)
            # Before the first step there was nothing to copy into.
            rest = copy_pieces(self.held_pieces(kind), rest)
        if rest:
            name, place = rest[0].name, rest[0].slices or rest[0].flat_range
            raise ValueError(f"this rank does not hold {name!r} ({kind}) at {place}")

    def settle(self, kind: Kind) -> None:
        """Update everything derived from the pieces of ``kind``, whose values were loaded."""
        if kind == "parameters":
            # Buckets first: masters start again from what lies there.
            self.handle.loaded()
            if self.masters:
                self.masters.restart()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor | None:
        """This rank's share of the loss in evaluation mode."""
        self.module.eval()
        try:
            passes = [partial(self.loss, micro) for micro in batch.micro_batches]
            shares = self.handle.evaluate(passes)
        finally:
            self.module.train()
        return torch.stack(shares).sum() if shares else torch.zeros(())

    def kept_pieces(self) -> list[Piece]:
        """The state that the reducer carries between steps, in saved form."""
        return [self.handle.numbered(piece) for piece in self.reducer.pieces()]

    def saves(self) -> Checkpointing:
        """The object that saves and loads this system, created at the first save or load."""
        if self.checkpointing is None:
            self.checkpointing = self.checkpointing_type(self)
        return self.checkpointing

    def save(self, path: Path, extra: Mapping[str, Any]) -> Saver:
        """Save into the root ``path``; waiting for the result ensures that it is committed.

        ``extra`` is anything that JSON holds; progress in the data goes under ``"data"``.

        :raises CheckpointError: nothing is committed.
        """
        return self.saves().save(path, extra)

    def load(self, path: Path) -> Mapping[str, Any]:
        """Load a checkpoint of any reference strategy and mesh; return the saved ``extra``.

        :attr:`loaded` then says what was left out, and what differs.

        :raises CheckpointError: the checkpoint is damaged, or is of another model.
        """
        return self.saves().load(path)

    @property
    def loaded(self) -> Loaded | None:
        """The state that the last load took, and the parts that it left out."""
        return self.checkpointing.loaded if self.checkpointing else None

    def finish_copies(self) -> None:
        """Wait until pending saves have copied the tensors that are about to change."""
        if self.checkpointing:
            self.checkpointing.finish_copies()

    def drain(self) -> None:
        """Finish work in flight."""
        self.handle.drain()

    def abort(self) -> None:
        """Abandon pending saves."""
        if self.checkpointing:
            self.checkpointing.abort()

    def close(self) -> None:
        """Remove the hooks and forwards that were added to the module."""
        if self.checkpointing:
            self.checkpointing.finish_saves()
        self.handle.close()
        while self.groups:
            self.groups.pop().close()
