"""One estimate: what the fullest rank holds, and what a step sends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from shardproof import axes, strategies
from shardproof.axes import growing
from shardproof.contract import Options
from shardproof.costs import CostModel, NoCostModel, cannot_fit, cost_model_class
from shardproof.costs.ddp import DDP
from shardproof.costs.model import JUDGED
from shardproof.costs.model_facts import ModelFacts
from shardproof.costs.offload import asked
from shardproof.costs.schedules import FORMS
from shardproof.costs.schedules import Setting as Window
from shardproof.costs.shapes import BatchSize, Shape, accountings, activations, facts_of, itemsize
from shardproof.costs.stages import schedule_name, stages_of
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.table import Table

#: Ranks times parameters up to which every rank is looked at.  Beyond it ranks at the ends of each
#: axis stand for all: a rank between them may hold a few step counters more.
_LOOKED_AT = 200_000
#: Ranks of the largest mesh: each has an entry in the model facts.
_MOST_RANKS = 1_000_000
_GB = 10**9
_ONE = BatchSize()


@dataclass(frozen=True)
class Estimate:
    """Bytes of the rank that holds most, and bytes that each rank sends in a step on average.

    ``communication`` is the most that gathered units, buckets and what collectives receive take at
    once.  ``host``: what offload keeps in host memory.  Where the layers are not known, neither
    that nor ``activations`` is: both are ``None``, and ``total`` is without them.  ``kept`` are the
    activations that are there when forward ends: fewer where layers are computed again.  ``sent``
    is ``None`` without a formula.
    """

    model: str
    elements: int
    implementation: str
    strategy: str
    mesh: Mapping[str, int]
    accounting: str
    parameters: int
    masters: int
    gradients: int
    optimizer_state: int
    communication: int | None
    activations: int | None
    kept: int | None
    host: int
    whole: int
    sent: float | None
    source: str
    notes: Sequence[str] = field(default=())

    @property
    def state(self) -> int:
        """Parameters, masters, gradients and optimizer state together."""
        return self.parameters + self.masters + self.gradients + self.optimizer_state

    @property
    def total(self) -> int:
        """State, activations and communication together."""
        return self.state + (self.communication or 0) + (self.activations or 0)

    @property
    def ratio(self) -> Fraction:
        """How many times less state than under full replication."""
        return Fraction(self.whole, self.state or 1)

    def table(self) -> Table:
        """Every part with its bytes a parameter."""
        rows = [(name, size) for name, size in self.parts() if size is not None]
        lines = [(name, _size(n), f"{n / self.elements:.2f}") for name, n in rows]
        title = f"{self.on_ranks()}, {self.implementation}"
        headings = ("on the fullest rank", "GB", "bytes a parameter")
        says = str(accountings().get(self.accounting, {}).get("says", "as the model is built"))
        less = f"{float(self.ratio):.2f}x less state than full replication"
        sent = () if self.sent is None else (f"each rank sends {_size(self.sent)} GB a step",)
        notes = (f"{self.accounting}: {says}", less, *sent, *self.notes, self.source)
        return Table(title, headings, lines, notes=notes, align="lrr")

    def on_ranks(self) -> str:
        """The model and the number of ranks, in words."""
        ranks = math.prod(self.mesh.values())
        return f"{self.model} on {ranks:,} rank{'s' * (ranks > 1)}"

    def parts(self) -> Iterator[tuple[str, int | None]]:
        """Each part by its name."""
        names = ("parameters", "masters", "gradients", "optimizer_state", "state")
        for name in (*names, "communication", "activations", "total", "host"):
            if name != "host" or self.host:
                yield name.replace("_", " "), getattr(self, name)

    def __str__(self) -> str:
        table = self.table()
        return "\n".join([table.title, "", table.markdown(), *table.notes])


def _size(size: float) -> str:
    return f"{size / _GB:,.2f}" if size >= _GB / 100 or not size else f"{size / _GB:,.3g}"


def mesh_of(strategy: str, gpus: int | None, given: Mapping[str, int]) -> dict[str, int]:
    """The mesh: ``given``, and what is left of ``gpus`` along a data axis of the strategy.

    :raises SelectionError: the mesh does not divide the number of GPUs, or is not the strategy's.
    """
    own = strategies.of(strategy).axes
    for name, size in given.items():
        if name not in own:
            what = f"strategy {strategy} has no axis {name}"
            raise SelectionError(Problem(what, nearest(name, own, "axes"), name))
        if type(size) is not int or size < 1:
            what = f"axis {name} needs a number of ranks"
            raise SelectionError(Problem(what, f"write {name}=2", str(size)))
    inner = math.prod(given.values())
    gpus = inner if gpus is None else gpus
    if type(gpus) is not int or not 1 <= gpus <= _MOST_RANKS:
        what, remedy = "no number of GPUs", f"give 1 to {_MOST_RANKS:,}"
        raise SelectionError(Problem(what, remedy, str(gpus)))
    left, rest = divmod(gpus, inner)
    if rest:
        shown = " x ".join(f"{name} {size}" for name, size in given.items())
        fits = list(range(inner, 4 * inner + 1, inner))
        what = f"{gpus} GPUs are not a multiple of {inner}, the ranks of mesh {shown or '1'}"
        remedy = f"give a multiple of {inner}: {', '.join(map(str, fits))}; or shrink an axis"
        raise SelectionError(Problem(what, remedy, f"--gpus {gpus}"))
    along = [name for name in growing(own) or own[:1] if name not in given]
    if left == 1 or not along:
        if left > 1:
            what = f"the mesh has {inner} ranks, and strategy {strategy} has no other axis"
            raise SelectionError(Problem(what, f"write --gpus {inner}", f"--gpus {gpus}"))
        return dict(given) or {along[0] if along else axes.cutting("samples"): 1}
    both = {**given, along[0]: left}
    return {name: both[name] for name in axes.names() if name in both}


def of_shape(
    shape: Shape,
    strategy: str,
    mesh: Mapping[str, int],
    accounting: str = "A16",
    batch: BatchSize = _ONE,
    options: Options | None = None,
    recompute: str | int = activations.NONE,
    implementation: str = "",
) -> Estimate:
    """The estimate of a published shape.

    :raises SelectionError: the mesh cannot share the model, or no formula tells.
    """
    options = dict(options or {})
    if isinstance(recompute, int):
        options["recompute_every"] = recompute
    facts = facts_of(shape, mesh, options, accounting, batch)
    kept, tokens = None, batch.samples * (batch.positions or shape.seq)
    without_formula = shape.mixture is not None or shape.latent is not None
    if shape.layers and not without_formula:
        sequence = bool(options.get("sequence_parallel", False))
        ranks, cut = facts.parts("widths"), facts.parts("positions")
        how = activations.LayerSetting(itemsize(facts), ranks, sequence, recompute, cut)
        given = float(how.item * how.tokens(shape, batch) * shape.hidden)
        one = activations.of_layer(shape, batch, how), given
        units = [activations.UnitBytes(*one)] * shape.layers
        kept = kept_of(facts, units, activations.of_ends(shape, batch, how), recompute)
    elif not shape.layers and (
        facts.parts("widths") * facts.parts("layers") > 1 or recompute != activations.NONE
    ):
        what = f"{shape.name} is only a parameter count: it has no layers to split or recompute"
        raise SelectionError(Problem(what, "name a model from --models, e.g. 7b", shape.name))
    found = estimated(facts, shape.name, strategy, accounting, kept, implementation)
    about = f"{shape.layers} layers of width {shape.hidden:,}, {tokens:,} positions a micro-batch"
    if not shape.layers:
        about = "no layers, so communication and activations are not counted; a model has them"
        found = replace(found, communication=None)
    if without_formula:
        about += "; no formula for its activations: shardproof simulate counts them"
    return replace(found, notes=(f"{shape.name}: {found.elements:,} parameters, {about}",))


def kept_of(
    facts: ModelFacts,
    units: Sequence[activations.UnitBytes],
    ends: tuple[float, float],
    recompute: str | int,
) -> activations.KeptBytes:
    """Activations of the rank that has most of them; ``ends``: what lies around the blocks.

    :raises SelectionError: a schedule without a closed form.
    """
    found = [*_by_stage(facts, units, ends, recompute)]
    return activations.KeptBytes(max(k.by_forward for k in found), max(k.peak for k in found))


def _require_blocks(facts: ModelFacts) -> None:
    """Blocks enough for the stages, and for groups that are computed again."""
    stages = len(stages_of(facts).place) if facts.parts("layers") > 1 else 1
    units, every = len(facts.units), int(facts.option("recompute_every", 0))
    if stages > max(1, units):
        what = f"the model has {units} blocks, too few for {stages} stages"
        raise SelectionError(Problem(what, "write fewer stages", str(dict(facts.axes))))
    if not 0 <= every <= units:
        what = f"the model has {units} blocks, too few for recomputed groups of {every}"
        raise SelectionError(Problem(what, f"give a number up to {units}", str(every)))


def _require_counted(facts: ModelFacts, strategy: str) -> None:
    """Raise where the formulas count other dtypes than those of ``facts``.

    :raises SelectionError: the accounting is one that the system cannot train in.
    """
    counted = cost_model_class(strategy).unmixed
    for dtype in {t.dtype for t in facts.parameters} if counted else ():
        if {dtype, facts.compute(dtype), facts.reduction(dtype)} != {dtype} & {*counted}:
            fitting = [
                name
                for name, about in accountings().items()
                if about["built"] in counted and not {"parameters", "trains"} & {*about}
            ]
            what = f"its formulas count parameters as built, in {' or '.join(counted)}"
            remedy = f"choose the accounting {' or '.join(fitting)}"
            raise SelectionError(Problem(what, remedy, strategy))


def _by_stage(
    facts: ModelFacts,
    units: Sequence[activations.UnitBytes],
    ends: tuple[float, float],
    recompute: str | int,
) -> Iterator[activations.KeptBytes]:
    """Activations of each rank of the pipeline (one, where there is none)."""
    first, last = ends
    ranks = facts.parts("layers")
    if ranks == 1:
        yield activations.of_units(first, units, last, recompute)
        return
    stages, form = stages_of(facts), FORMS.get(schedule_name(facts.options) or "")
    if form is None:
        remedy = nearest(str(facts.options.get("schedule")), FORMS, "schedules")
        raise SelectionError(Problem("no memory formula for this schedule", remedy))
    window = Window(ranks, facts.rounds, len(stages.place) // ranks)
    for rank in range(ranks):
        held, own = form.held(window, rank), stages.of(rank)
        if held is None:
            continue
        chunks = []
        for part in (stages.units[stage] for stage in own):
            # What a stage sends on stays until its gradient comes back.
            given = units[part.stop].input if part.stop < len(units) else 0
            of_part = units[part.start : part.stop]
            chunks.append(activations.of_units(given, of_part, 0, recompute))
        # In flight counts chunks; the largest chunk of a rank bounds them.
        most = max(chunks, key=lambda chunk: chunk.peak)
        one = first * (0 in own) + last * (len(stages.place) - 1 in own)
        kept = held * most.by_forward + one * min(held, ranks)
        yield activations.KeptBytes(kept, kept + most.peak - most.by_forward)


def _ranks(facts: ModelFacts) -> Iterator[int]:
    """Ranks of every stage and split, and of each data axis the first and the last ones."""
    if facts.world * len(facts.parameters) <= _LOOKED_AT:
        yield from range(facts.world)
        return
    dividing = axes.dividing(facts.axes)
    seen: set[tuple[int, ...]] = set()
    for rank in range(facts.world):
        at = facts.coordinate(rank)
        size = {name: facts.axes[name] for name in at}
        edge = all(n in dividing or at[n] < 2 or at[n] >= size[n] - 2 for n in at)
        key = tuple(at[name] for name in dividing)
        if edge and (key not in seen or facts.parts("layers") * facts.parts("widths") <= 64):
            seen.add(key)
            yield rank


def estimated(
    facts: ModelFacts,
    model: str,
    strategy: str,
    accounting: str,
    kept: activations.KeptBytes | None,
    implementation: str = "",
    notes: Sequence[str] = (),
) -> Estimate:
    """The estimate of ``facts``; ``kept``: activations.

    :raises SelectionError: the mesh cannot share the model, or no formula tells.
    """
    if reason := cannot_fit(facts, strategy):
        shown = ", ".join(f"{name}={size}" for name, size in facts.axes.items())
        raise SelectionError(Problem(reason, "choose another size of that axis", shown))
    _require_blocks(facts)
    try:
        _require_counted(facts, strategy)
        cost_model = asked(cost_model_class(strategy), facts)
        held = {rank: _complete(cost_model, rank) for rank in _ranks(facts)}
        fullest = max(held, key=lambda rank: sum(held[rank].values()))
        moving = max(_moving(cost_model, rank, held[rank]) for rank in held)
        sent = _sent(cost_model)
    except NoCostModel as error:
        raise SelectionError(Problem(str(error), "leave that option out", strategy)) from error
    own = held[fullest]
    return Estimate(
        model=model,
        elements=sum(t.numel for t in facts.parameters),
        implementation=implementation or strategy,
        strategy=strategy,
        mesh=dict(facts.axes),
        accounting=accounting,
        **{kind: own.get(kind, 0) for kind in JUDGED},
        communication=moving,
        activations=None if kept is None else round(kept.peak),
        kept=None if kept is None else round(kept.by_forward),
        host=max(sum(cost_model.host(rank, 0, 0).values()) for rank in held),
        # Of one copy: every rank holds the same, so no world of them is looked through.
        whole=DDP(replace(facts, axes=axes.replicas(1))).total(),
        sent=sent,
        source=cost_model.source,
        notes=notes,
    )


def _complete(cost_model: CostModel, rank: int) -> dict[str, int]:
    """Bytes by class on ``rank`` once all state exists, as the check ``memory`` compares them."""
    return cost_model.resident(rank, 0, 0) | cost_model.at_point(rank, "after_update", 0)


def _moving(cost_model: CostModel, rank: int, held: Mapping[str, int]) -> int:
    """Most bytes of gathered parameters and of buffers in a phase: the upper bounds of the check
    ``memory``.
    """
    most = 0
    for phase in ("forward", "backward", "update"):
        bounds = cost_model.peaks(rank, phase, 0)
        gathered = bounds["parameters"].high - held["parameters"] if "parameters" in bounds else 0
        buffers = bounds["communication"].high if "communication" in bounds else 0
        most = max(most, gathered + buffers)
    return most


def _sent(cost_model: CostModel) -> float | None:
    try:
        return float(cost_model.payload() / cost_model.facts.world)
    except NoCostModel:
        return None
