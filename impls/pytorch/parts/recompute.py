"""PyTorch's activation checkpointing for the adapters.

torch's ``checkpoint_wrapper`` (not reentrant) goes around every unit: its input is kept, and
backward runs it again.  torch restores the global generators for that, but neither a module's own
generators nor buffers, which would move twice.  ``context_fn`` exists for these and is used here.

Left out: groups of several units (the wrapper holds one).  Not a strategy by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from torch import Generator, Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from shardproof.contract import Refused
from shardproof.impls.reference.engine.options import at_least
from shardproof.impls.reference.engine.recompute import Buffers

#: What torch's checkpoint wrapper adds to names.
CHECKPOINT = "_checkpoint_wrapped_module."


def plain(name: str) -> str:
    """``name`` from before units were checkpointed."""
    return name.replace(CHECKPOINT, "")


def single_unit(recompute_every: int) -> None:
    """:class:`Refused` unless every unit is recomputed by itself, or none is."""
    at_least("recompute_every", recompute_every, 0)
    if recompute_every > 1:
        raise Refused(
            f"option 'recompute_every' = {recompute_every}: torch's checkpoint wrapper "
            "recomputes each unit separately, not groups of units; valid: 0, 1"
        )


def checkpoint_units(module: nn.Module, units: Iterable[str]) -> None:
    """Put torch's wrapper around every unit of ``module`` (dotted names)."""
    chosen = {module.get_submodule(name) for name in units}

    def wrap(unit: nn.Module) -> nn.Module:
        return checkpoint_wrapper(unit, context_fn=partial(contexts, list(unit.modules())))

    apply_activation_checkpointing(
        module, checkpoint_wrapper_fn=wrap, check_fn=lambda child: child in chosen
    )


def contexts(
    modules: Sequence[nn.Module],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of the forward that begins now and of its repetition."""
    values = [value for module in modules for value in vars(module).values()]
    generators = [value for value in values if isinstance(value, Generator)]
    draws = [generator.get_state() for generator in generators]
    return nullcontext(), as_before(generators, draws, Buffers(modules))


@contextmanager
def as_before(
    generators: Sequence[Generator], draws: Sequence[Tensor], buffers: Buffers
) -> Iterator[None]:
    """Set ``generators`` to ``draws`` and bind copies of ``buffers``; restore both afterwards."""
    now = [generator.get_state() for generator in generators]
    for generator, state in zip(generators, draws, strict=True):
        generator.set_state(state)
    try:
        with buffers.as_read():
            yield
    finally:
        for generator, state in zip(generators, now, strict=True):
            generator.set_state(state)
