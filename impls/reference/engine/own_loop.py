"""A strategy in a training loop that is not the engine's: forward, loss, backward, step.

    engine.step          a loop of the user's own
    ------------------   ------------------------------------------
    begin_step,          the first ``loop(inputs)`` of a step
      before_step
    accumulate, forward  every ``loop(inputs)``
    backward             ``loss.backward()``: the strategy's hooks send what is complete
    finish, unscale      ``sync_gradients()``, or ``step()``
    norm, clip           ``clip(limit)``, or ``step()`` if the optimizer's spec says so
    update, after_step   ``step()``

The engine knows before a step how many micro-batches it has; here ``backwards`` says so.
Gradients are divided by the number of ranks with data of their own, as those of DDP are: the loss
of a rank is a mean over its share of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardproof.axes import sharing
from shardproof.contract import Refused
from shardproof.impls.reference.engine.optimizer import set_learning_rate
from shardproof.impls.reference.engine.rates import LoopOptimizer, follows_schedule
from shardproof.impls.reference.engine.state import broadcast_tensors

if TYPE_CHECKING:
    from shardproof.impls.reference.engine.engine import Engine

#: Key of the learning rates in the ``extra`` of a checkpoint.
_RATES = "learning_rates"


def require_string_keys(extra: Any) -> None:
    """Raise if a mapping in ``extra`` has a key that JSON would turn into a string.

    :raises ValueError: it has one.
    """
    if isinstance(extra, Mapping):
        if odd := [key for key in extra if not isinstance(key, str)]:
            raise ValueError(
                f"save: the dictionary key {odd[0]!r} is not a string, and loading would return "
                f"the string {str(odd[0])!r} instead; use only string keys (remove 'milestones' "
                "from the state of a MultiStepLR)"
            )
        extra = [*extra.values()]
    for one in extra if isinstance(extra, list | tuple) else ():
        require_string_keys(one)


class OwnLoop:
    """Drives ``system``, which is set up.

    ``backwards``: backward passes of a step.  ``mean``: whether gradients are divided.
    """

    def __init__(self, system: Engine, backwards: int = 1, mean: bool = True) -> None:
        if why := system.needs_own_step():
            raise Refused(why)
        self.system, self.backwards = system, backwards
        axes = sharing(system.mesh.axes) if mean else ()
        self.factor = 1.0 / system.mesh.size(*axes)
        self.steps = self.forwards = 0
        self.is_final = False  # whether gradients are those that the optimizer gets
        self.norm: Tensor | None = None
        self.whole_step = self.step  # what ``optimizer.step()`` runs

    @cached_property
    def optimizer(self) -> LoopOptimizer:
        """The learning rates, which the loop sets from the first use of this on.

        :raises ValueError: a schedule sets them.
        """
        return LoopOptimizer(self)

    @property
    def sets_rates(self) -> bool:
        """Whether the loop sets learning rates."""
        return "optimizer" in vars(self)

    # ------------------------------------------------------------------------------------ a step

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model's outputs.  Without gradients it is an evaluation; all ranks call it."""
        system = self.system
        if not torch.is_grad_enabled():
            if self.forwards:
                raise RuntimeError(
                    "the model was called under no_grad() between a training forward and its "
                    "step(): call step() first, then evaluate"
                )
            [outputs] = system.handle.evaluate([lambda: self.forward(*inputs, **named)])
            return outputs
        if self.forwards == self.backwards:
            raise RuntimeError(
                f"forward ran {self.forwards + 1} times before step(), but wrap expects "
                f"{self.backwards} forward passes per step: call step(), or pass accumulate="
                f"{self.forwards + 1} to wrap; to evaluate, call the model under no_grad()"
            )
        if not self.forwards:
            self.begin_step()
        self.forwards += 1
        system.handle.accumulate(is_last=self.forwards == self.backwards)
        return self.forward(*inputs, **named)

    def begin_step(self) -> None:
        """Before the first forward of a step."""
        self.system.finish_copies()
        self.system.handle.begin_step(self.steps)
        self.system.handle.before_step(self.backwards)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The module's own, in the dtypes of the precision policy."""
        policy = self.system.precision
        cast = [policy.cast_inputs(one) if isinstance(one, Tensor) else one for one in inputs]
        outputs = self.system.module(*cast, **named)
        return policy.cast_outputs(outputs) if isinstance(outputs, Tensor) else outputs

    def sync_gradients(self) -> None:
        """Wait until gradients are the mean over all ranks; all ranks call it, as in ``step``."""
        if self.is_final:
            return
        if self.forwards != self.backwards:
            raise RuntimeError(
                f"step() was called after {self.forwards} forward and backward passes, but wrap "
                f"expects {self.backwards} passes per step: run {self.backwards} passes on every "
                f"rank, or pass accumulate={self.forwards} to wrap"
            )
        if not self.backwards:  # a rank without data takes part as well
            self.begin_step()
        self.system.handle.finish()
        if self.factor != 1:
            self.system.scale_gradients(torch.tensor(self.factor, dtype=torch.float64))
        self.is_final = True

    def clip(self, limit: float) -> Tensor:
        """Scale gradients so that their global norm is at most ``limit``; the norm before."""
        self.sync_gradients()
        self.norm = self.system.norm()
        self.system.clip(self.norm, limit)
        return self.norm

    def step(self) -> None:
        """Reduce what is left, clip if the optimizer asks for it, update; gradients are cleared."""
        self.update()
        self.end_step()

    def update(self) -> None:
        """All of a step but that gradients are cleared."""
        self.sync_gradients()
        system = self.system
        if system.spec.clip_norm is not None and self.norm is None:
            self.clip(system.spec.clip_norm)
        set_learning_rate(system.optimizer, system.spec, self.steps)
        if self.sets_rates:
            self.optimizer.apply()
        system.set_decay(self.steps)
        system.update()
        self.steps = system.steps_done = self.steps + 1
        system.handle.after_update()

    def end_step(self) -> None:
        """Clear gradients; the next forward begins a step."""
        self.system.handle.after_step()
        if self.system.masters:
            self.system.masters.after_step()
        self.forwards, self.is_final, self.norm = 0, False, None

    def zero_grad(self) -> None:
        """Drop gradients that no ``step`` has used; after one there are none."""
        if self.forwards:
            self.sync_gradients()
            self.end_step()

    # --------------------------------------------------------------------------------- the state

    @torch.no_grad()
    def sync_parameters(self) -> None:
        """Give every rank the values that the first one of its copies holds; all ranks call it."""
        system = self.system
        parameters = system.held_pieces("parameters")
        whole = all(piece.tensor.shape == piece.global_shape for piece in parameters)
        # Shards lie on one rank of their axis each; only the axis of copies has them again.
        axes = sharing(system.mesh.axes) if whole else {"replicate"} & system.mesh.axes.keys()
        held = [piece.tensor for piece in (*parameters, *system.held_pieces("buffers"))]
        for axis in axes:
            broadcast_tensors(held, system.mesh.comm(axis))
        system.settle("parameters")

    def save(self, path: Path, extra: Mapping[str, Any]) -> None:
        """Save into the root ``path``, and wait until it is committed; all ranks call it."""
        require_string_keys(extra)
        rates = {_RATES: self.optimizer.rates()} if self.sets_rates else {}
        self.system.save(path, {**extra, **rates}).wait()

    def load(self, path: Path) -> Mapping[str, Any]:
        """Load the newest checkpoint of ``path``; the ``extra`` that was saved."""
        extra = dict(self.system.load(path))
        self.steps = self.system.steps_done
        # A schedule that was given at the start counts, as all hyperparameters do.
        if (rates := extra.pop(_RATES, None)) and not follows_schedule(self.system.spec):
            self.optimizer.restore(rates)
        return extra
