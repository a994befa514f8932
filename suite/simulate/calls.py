"""``from shardproof import simulate``: a published model, or a user's own, from Python."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardproof.costs import shapes
from shardproof.costs.shapes import BatchSize
from shardproof.errors import Problem, SelectionError
from shardproof.simulate import asked, own
from shardproof.simulate.figures import Figures, figures, looked_at, memory_table
from shardproof.simulate.rank import simulate as run
from shardproof.workloads.own import OwnWorkload


@dataclass(frozen=True)
class Simulation:
    """Bytes of the second step of each simulated rank (``ranks``), and notes on the model."""

    model: str
    implementation: str
    mesh: Mapping[str, int]
    ranks: Sequence[Figures]
    notes: Sequence[str]

    @property
    def fullest(self) -> Figures:
        """The rank that holds most at one moment."""
        return max(self.ranks, key=lambda each: each.peak)

    @property
    def peak(self) -> int:
        """Most bytes that a simulated rank holds at one moment."""
        return self.fullest.peak

    def __str__(self) -> str:
        shown = " x ".join(f"{axis} {size:,}" for axis, size in self.mesh.items())
        most = self.fullest
        title = f"{self.model} on {shown}, {self.implementation}: rank {most.rank:,}"
        table = memory_table(title, most, self.notes)
        return "\n".join([table.title, "", table.markdown(), *table.notes])


def simulate(
    model: str | nn.Module | OwnWorkload | Callable[[], Any],
    *,
    mesh: Mapping[str, int],
    impl: str = shapes.USUAL,
    accounting: str = "A32",
    inputs: Any = None,
    work: BatchSize | Mapping[str, int] | None = None,
    **options: Any,
) -> Simulation:
    """Run the real code of the ranks at the ends of each axis, on tensors without values.

    ``model``: a name (``shardproof estimate --models``), a path (``package.module:build``), a
    module, a ``shardproof.OwnWorkload``, or a function that returns one of these two, or (module,
    inputs).  A function is better than a module: it takes no memory for values.  ``inputs``: the
    tensor of one micro-batch, of which only shape and dtype count.  ``work``: ``samples`` and
    ``positions`` of a micro-batch, and ``micro_batches`` of each rank in a step.  ``options`` are
    those of the implementation ``impl``, such as ``recompute_every=1``.

    :raises ValueError: unknown names, a mesh or options that do not fit, or a model that reads
        values of tensors; the message names the operator and the line.
    """
    of_name = isinstance(model, str) and ":" not in model
    if of_name and inputs is not None:
        what = "inputs= belongs to a model of your own"
        raise SelectionError(Problem(what, 'give work={"samples": 2}', str(model)))
    if isinstance(model, str):
        trained = asked.round_off(shapes.model(model)) if of_name else own.model_at(model)
    else:
        trained = own.own_model(model, inputs=inputs)
    source = asked.source(trained, impl, mesh, accounting, options)
    size = work if isinstance(work, BatchSize) else BatchSize(**work or {})
    source = replace(source, work=size)
    source.require_shared(accounting)
    try:
        with warnings.catch_warnings():
            # Warnings of torch would repeat at every rank; the user cannot act on them.
            warnings.simplefilter("ignore", FutureWarning)
            made = run(source, looked_at(source.axes))
    except Exception as error:
        raise SelectionError(asked.refused(impl, error)) from error
    found = [figures(one, source.axes) for one in made]
    notes = [*source.about(), f"{accounting}: {shapes.accountings()[accounting]['says']}"]
    return Simulation(source.name, impl, source.axes, found, notes)
