"""``from shardproof import simulate``: a published model, or a user's own, from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from torch import nn

from shardproof.costs import shapes
from shardproof.costs.model import JUDGED
from shardproof.costs.shapes import BatchSize
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.ledgers.memory.summary import PHASES
from shardproof.simulate import asked, machines, own
from shardproof.simulate.figures import Figures, figures, looked_at, memory_table
from shardproof.simulate.own import OwnSource
from shardproof.simulate.rank import SimulatedRank
from shardproof.simulate.rank import simulate as run
from shardproof.simulate.seconds import step_seconds
from shardproof.simulate.sources import ShapeSource
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
    source, made = _made(model, mesh, impl, accounting, inputs, work, options)
    found = [figures(one, source.axes) for one in made]
    notes = [*source.about(), f"{accounting}: {shapes.accountings()[accounting]['says']}"]
    return Simulation(source.name, impl, source.axes, found, notes)


def figures_of(training: Mapping[str, Any]) -> dict[str, Fraction]:
    """Figures of the fullest rank and of the slowest one, as a mapping from their names.

    ``training`` has the arguments of :func:`simulate`, ``samples``, ``positions`` and
    ``micro_batches`` in place of ``work``, ``options`` as a mapping, and ``machine`` and ``node``
    (ranks a node).  Bytes: ``parameters``, ``masters``, ``gradients``, ``optimizer_state`` and
    ``host`` after the update, ``communication`` and ``activations`` at most, ``total`` at one
    moment, ``sent`` in a step.  Of time: ``seconds``, ``idle`` (of them, waiting for other stages),
    ``share_of_peak``, ``tokens_per_second``.

    :raises SelectionError: unknown names, or a training that cannot be simulated.
    """
    given = {"impl": shapes.USUAL, "accounting": "A16", "options": {}, **training}
    sizes = ("samples", "positions", "micro_batches")
    work = {name: given.pop(name) for name in sizes if name in given}
    on = machines.machine(str(given.pop("machine", _USUAL)), int(given.pop("node", 0)))
    model, mesh, impl, accounting, options = (given.pop(name, None) for name in _GIVEN)
    if given:
        name = next(iter(given))
        raise SelectionError(Problem("unknown argument", nearest(name, _GIVEN), name))
    source, made = _made(model, mesh or {}, impl, accounting, None, work, options)
    most = max((figures(one, source.axes) for one in made), key=lambda one: one.peak)
    peaks, kept = most.peaks, most.kept
    buffers = [
        peaks.get((phase, "communication"), 0) + peaks.get((phase, "parameters"), 0)
        for phase in PHASES
    ]
    sizes_of: dict[str, Any] = {kind: kept.get(kind, 0) for kind in JUDGED}
    sizes_of |= {
        "communication": max(buffers) - sizes_of["parameters"],
        "activations": max(peaks.get((phase, "activations"), 0) for phase in PHASES),
        "total": most.peak,
        "host": most.host,
        "sent": sum(most.sent.values()),
    }
    time = step_seconds(made, on, source.axes, "fused")
    named = ("seconds", "idle", "share_of_peak", "tokens_per_second")
    return {k: Fraction(v) for k, v in (sizes_of | {n: getattr(time, n) for n in named}).items()}


#: Arguments of a training besides sizes and the machine.
_GIVEN = ("model", "mesh", "impl", "accounting", "options")
_USUAL = "h100"


def _made(
    model: Any,
    mesh: Mapping[str, int],
    impl: str,
    accounting: str,
    inputs: Any,
    work: BatchSize | Mapping[str, int] | None,
    options: Mapping[str, Any],
) -> tuple[ShapeSource | OwnSource, list[SimulatedRank]]:
    """The training, and its simulated ranks, which represent all ranks.

    :raises SelectionError: see :func:`simulate`.
    """
    of_name = isinstance(model, str) and ":" not in model
    if of_name and inputs is not None:
        what = "inputs= belongs to a model of your own"
        raise SelectionError(Problem(what, 'give work={"samples": 2}', str(model)))
    if isinstance(model, str):
        trained = asked.round_off(shapes.model(model)) if of_name else own.model_at(model, inputs)
    else:
        trained = own.own_model(model, inputs=inputs)
    source = asked.source(trained, impl, mesh, accounting, options)
    size = work if isinstance(work, BatchSize) else BatchSize(**work or {})
    source = replace(source, work=size)
    source.require_shared(accounting)
    try:
        return source, run(source, looked_at(source.axes))
    except Exception as error:
        raise SelectionError(asked.refused(impl, error)) from error
