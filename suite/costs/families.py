"""The properties of every sound member of a family of strategies, whatever its layout.

A system of one's own is held to its *family* (contract 2): what is cut, what stands whole on every
rank, and two bounds of the bytes that it sends.  D ranks sum a gradient (fewer where it is an
expert's), F of them hold the shards of a state, R = D/F; m rounds; P and G are bytes of the trained
parameters and of their gradients, as they are sent.

    family    cut                        least bytes a step      a plain member sends
    ddp       nothing                    2 (D-1) G               m 2 (D-1) G + m (D-1) buffers
    zero1     optimizer                  (D-1) (G + P)           m 2 (D-1) G + (D-1) P
    zero2     optimizer, gradients       (D-1) (G + P)           as zero1
    zero3     parameters, too            (D-1) G + R (F-1) P     m (2 (D-1) G + 3 R (F-1) P)
    pipeline  parameters, by stages      a boundary's messages   every boundary's messages
    tensor    some parameters            more than none          what Megatron's layers send
    context   nothing                    as ddp, and some        as ddp, and the dearest attention
    expert    some parameters            as ddp                  as ddp, and 6 times every row
    hybrid    each axis what it cuts     the sum over axes       the sum, once a tensor rank
              (experts: by their option)

Least: D copies become one sum in D-1 additions of G bytes, and what one rank updated reaches D-1
others; an all-reduce moves exactly that much (Patarasuk and Yuan, doi 10.1016/j.jpdc.2008.09.002).
A member may send ``Capabilities.overhead`` times what a plain one sends.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from shardproof import strategies
from shardproof.axes import EXPERT, Cut, cutting, parts, sharded, size, summing
from shardproof.costs.context import Exchange
from shardproof.costs.expert import ExpertParallel, folded
from shardproof.costs.model import Bound, NoCostModel
from shardproof.costs.model_facts import (
    ITEMSIZE,
    ModelFacts,
    TensorFacts,
    shape_key,
    updated_by,
    used,
)
from shardproof.costs.pipeline import Pipeline
from shardproof.costs.tensor import TensorParallel

#: Kinds of state as the contract has them.
_ALL = ("parameters", "gradients", "optimizer")
#: Kind of state -> the parameters that have some of it in a step.
_TENSORS: Mapping[str, Callable[[Iterable[TensorFacts], int], Iterable[TensorFacts]]] = {
    "parameters": lambda parameters, step: parameters,
    "gradients": used,
    "optimizer": updated_by,
}
#: Bytes of single numbers that each rank may send in a step: losses, norms, overflows.
_NUMBERS = 1024
#: More bytes than a step can send: the most of a family where nothing known bounds it.
_NO_LIMIT = 2**62


@dataclass(frozen=True)
class HeldByRank:
    """The holdings of one rank: elements by kind of state and name, and the place of its
    parameters.

    Equal ``places`` are the same elements; different ones share none, as a rule.
    """

    elements: Mapping[str, Mapping[str, int]]
    places: Mapping[str, str]

    def only(self, names: Collection[str]) -> HeldByRank:
        """The holdings of the parameters ``names``."""
        kinds = self.elements.items()
        return replace(
            self, elements={k: {n: c for n, c in own.items() if n in names} for k, own in kinds}
        )


@dataclass(frozen=True)
class Family:
    """``cut``: kinds of state of which no rank along the axis for ``cuts`` may hold all.

    ``whole``: kinds that every rank holds.  ``cut`` kinds are equal shares up to the declared
    balance where ``is_balanced``.  ``bytes`` gives the least that is sent in a step and what a
    plain member sends.
    """

    name: str
    bytes: Callable[[ModelFacts], tuple[Fraction, Fraction]]
    cut: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    cuts: Cut = "state"
    is_balanced: bool = True

    def keeps_activations(self, axes: Mapping[str, int]) -> bool:
        """Whether the outputs of the last window may stay, as pipelines' do."""
        return self.cuts == "layers"

    def along(self, facts: ModelFacts) -> str:
        """The axes that are cut; where none is there for state, those of copies share it."""
        return (facts.sharded or facts.group()) if self.cuts == "state" else cutting(self.cuts)

    def sent(self, facts: ModelFacts, overhead: float, is_exact: bool = True) -> Bound:
        """Fewest and most bytes of a step, over all ranks; what loses precision may send fewer."""
        least, plain = self.bytes(facts)
        if not is_exact:
            # Compression has no least that is known, but some byte must be sent.
            least = min(least, Fraction(1))
        most = int(plain * Fraction(overhead)) + facts.world * _NUMBERS
        return Bound(int(least), min(most, _NO_LIMIT) if facts.world > 1 else 0)

    def problem(self, facts: ModelFacts, shown: Mapping[int, HeldByRank], balance: float) -> str:
        """The problem of the elements that each rank holds; ``""``: none."""
        if facts.size(self.along(facts)) == 1:
            return ""
        for kind in (*self.cut, *self.whole):
            if not any(kind in own.elements for own in shown.values()):
                continue  # its point is none that every step reaches
            having = {t.name: t.numel for t in _TENSORS[kind](facts.parameters, facts.step)}
            numels = [*having.values()]
            # Of parameters that have no such state in this step, frozen ones say, nothing counts.
            others = {t.name for t in facts.parameters} - {*having}
            held = {rank: own.elements.get(kind, {}) for rank, own in shown.items()}
            counts = {r: sum(own[n] for n in {*own} - others) for r, own in held.items()}
            if kind == "optimizer" and not any(counts.values()):
                continue  # SGD without momentum has no state
            if kind in self.cut:
                found = self._not_cut(kind, facts, counts, numels, balance)
            else:
                found = _not_whole(kind, counts, sum(numels))
            if found:
                return found
        return ""

    def _not_cut(
        self, kind: str, facts: ModelFacts, counts: Mapping[int, int], of: list[int], balance: float
    ) -> str:
        """Why the ranks, which hold ``counts`` elements of tensors of sizes ``of``, share none."""
        axis = self.along(facts)
        size, total, largest = facts.size(axis), sum(of), max(of, default=0)
        if total and min(counts.values()) >= total:
            return (
                f"nothing is sharded on any rank: each holds all {total:,} elements of the "
                f"{kind}, but {self.name} cuts them over {size} ranks of the axis {axis!r}"
            )
        rank, most = max(counts.items(), key=lambda item: item[1])
        if total > largest and most >= total:
            return (
                f"rank {rank} holds all {total:,} elements of the {kind}, but {self.name} cuts them"
            )
        # A tensor may lie whole on one rank, however many elements it has.
        limit = max(int(balance * total / size), largest)
        if self.is_balanced and most > limit:
            return (
                f"rank {rank} holds {most:,} of {total:,} elements of the {kind}, at most "
                f"{limit:,} for {size} ranks (declared balance {balance:g})"
            )
        return ""


def _not_whole(kind: str, counts: Mapping[int, int], total: int) -> str:
    for rank, count in counts.items():
        if count != total:
            return f"rank {rank} holds {count:,} of {total:,} elements of the {kind}, expected all"
    return ""


# -------------------------------------------------------------------------------------- bytes sent


def _others(facts: ModelFacts, role: str = "") -> int:
    """D - 1."""
    return size(facts.axes, summing(facts.axes, role)) - 1


def _missing(facts: ModelFacts, role: str = "") -> int:
    """R (F-1) = D - R: where there is no axis for state, all D ranks share it."""
    along = summing(facts.axes, role)
    ranks = size(facts.axes, along)
    return ranks - ranks // size(facts.axes, sharded(facts.axes, role) or along)


def _moved(
    facts: ModelFacts,
    times: Callable[[ModelFacts, str], int],
    tensors: Iterable[TensorFacts],
    dtype: Callable[[str], str],
) -> int:
    """Bytes of ``tensors``, sent in ``dtype`` as often as the role of each says."""
    return sum(times(facts, facts.role(t)) * t.numel * ITEMSIZE[dtype(t.dtype)] for t in tensors)


def _whole_bytes(facts: ModelFacts) -> int:
    """All parameters, frozen and unused ones included, and buffers."""
    own = sum(t.numel * ITEMSIZE[facts.compute(t.dtype)] for t in facts.parameters)
    return own + facts.float_buffer_bytes


def _ddp(facts: ModelFacts) -> tuple[Fraction, Fraction]:
    now = used(facts.parameters, facts.step)
    buffers = _others(facts) * facts.float_buffer_bytes
    plain = 2 * _moved(facts, _others, facts.trainable, facts.reduction) + buffers
    least = 2 * _moved(facts, _others, now, facts.reduction)
    return Fraction(least), Fraction(facts.rounds * plain)


def _zero1(facts: ModelFacts) -> tuple[Fraction, Fraction]:
    least, plain = _ddp(facts)
    now = () if facts.skipped else used(facts.parameters, facts.step)
    moved = _moved(facts, _others, now, facts.compute)
    whole = _moved(facts, _others, facts.parameters, facts.compute)
    # Half of an all-reduce's least is a reduce-scatter's: (D-1) G.
    return least / 2 + moved, plain + whole + _others(facts) * facts.float_buffer_bytes


def _zero3(facts: ModelFacts) -> tuple[Fraction, Fraction]:
    least, plain = _ddp(facts)
    moved = _moved(facts, _missing, used(facts.parameters, facts.step), facts.compute)
    whole = _moved(facts, _missing, facts.parameters, facts.compute)
    whole += _missing(facts) * facts.float_buffer_bytes
    return least / 2 + moved, plain + 3 * facts.rounds * whole


def _pipeline(facts: ModelFacts) -> tuple[Fraction, Fraction]:
    """Of stages that are cut anywhere: the smallest boundaries, or all of them."""
    hidden, item = facts.hidden, ITEMSIZE[facts.compute(facts.parameters[0].dtype)]
    boundaries = facts.parts("layers") - 1
    least = most = 0
    for shape in facts.shapes:
        sizes = sorted(hidden[shape_key(shape)])
        least += 2 * item * sum(sizes[:boundaries])
        most += 2 * item * sum(sizes)
    if boundaries:
        most += sum(message.bytes for message in Pipeline(facts).tied_messages())
        most += 2 * _whole_bytes(facts)
    return Fraction(least), Fraction(most)


def _tensor(facts: ModelFacts) -> tuple[Fraction, Fraction]:
    # A step that trains some layers only sends no more than one that trains all.
    trained = tuple(replace(t, first_use=0, last_use=None) for t in facts.parameters)
    try:
        plain = TensorParallel(replace(facts, options={}, parameters=trained)).payload()
    except (NoCostModel, LookupError, StopIteration):  # a model without Megatron's layers
        plain = Fraction(0)
    return Fraction(int(facts.parts("widths") > 1)), plain + 2 * facts.world * _whole_bytes(facts)


def _context(facts: ModelFacts) -> tuple[Fraction, Fraction]:
    (least, plain), attended = _ddp(facts), _attended(facts)
    return least + (attended > 0), plain + attended


def _attended(facts: ModelFacts) -> Fraction:
    """Of the published ways to attend the one that sends most."""
    if facts.parts("positions") > 1 and not facts.heads:
        return Fraction(_NO_LIMIT)  # the model does not say which of its layers attend
    ways = [Exchange(facts, method).flows() for method in ("ring", "all_gather", "all_to_all")]
    return max(sum((flow.bytes for flow in flows), Fraction(0)) for flows in ways)


def _expert(facts: ModelFacts) -> tuple[Fraction, Fraction]:
    least, plain = _ddp(facts)
    return least, plain + _dispatched(facts)


def _dispatched(facts: ModelFacts) -> int:
    """Every row, wherever its expert is: both ways forward, recomputed and backward."""
    experts = ExpertParallel(facts)
    try:
        rows = ((experts.row_bytes(n), map(sum, experts.chosen(n))) for n in experts.layers)
        return 6 * sum(size * sum(counts) for size, counts in rows)
    except NoCostModel:
        return _NO_LIMIT


# ------------------------------------------------------------------------------------ several axes


@dataclass(frozen=True)
class HybridFamily(Family):
    """Each axis cuts what it is there for, on what the others leave.

    Layers: no stage has all parameters.  Widths: some parameter is held in part.  State: what the
    option ``data`` names, or the declared ``features``; nothing where neither does.
    """

    features: frozenset[str] = frozenset()

    def keeps_activations(self, axes: Mapping[str, int]) -> bool:
        """Whether a rank keeps activations of several micro-batches, as stages do."""
        return parts(axes, "layers") > 1

    def problem(self, facts: ModelFacts, shown: Mapping[int, HeldByRank], balance: float) -> str:
        """The part that an axis must cut and leaves whole, in words; empty: none."""
        layers, widths, data = cutting("layers"), cutting("widths"), self.data(facts)
        tensors = facts.size(widths)
        numels = {tensor.name: tensor.numel for tensor in facts.parameters}
        groups = defaultdict[tuple[int, int], list[int]](list)
        stages = defaultdict[int, set[str]](set)
        for rank in shown:
            groups[facts.place(rank, layers), facts.place(rank, widths)].append(rank)
        local = {
            place: _together(numels, [shown[rank] for rank in ranks])
            for place, ranks in groups.items()
        }
        for (pipe, _), own in local.items():
            stages[pipe].update(own)
        whole = next((p for p, names in stages.items() if names == set(numels)), None)
        if facts.size(layers) > 1 and len(numels) > 1 and whole is not None:
            return (
                f"nothing is cut by stages: ranks with coordinate {whole} of the axis {layers!r} "
                f"hold some of all {len(numels)} parameters, {self.name} gives a stage its own"
            )
        parts = ((n, count) for own in local.values() for n, count in own.items())
        if tensors > 1 and all(count >= numels[name] for name, count in parts):
            return (
                f"nothing is cut along the axis {widths!r}: each of its {tensors} ranks "
                f"holds all elements of its parameters, {self.name} cuts some of them"
            )
        mesh, apart = _folded(facts).axes, _apart(facts)
        of_experts = {name: mesh[name] for name in summing(mesh, EXPERT)}
        cut, named = replace(_EXPERT, name=self.name, is_balanced=True), _data_option(facts, True)
        #      family, its mesh,      its tensors,           over how many ranks others cut them
        each = (data, facts.data_axes, {*numels} - apart, 1), (cut, mesh, apart, 1)
        every = *each, (named, of_experts, apart, size(mesh, [cutting("experts")]))
        for place, own in local.items():
            for family, axes, names, ranks in every:
                held = [t for t in facts.parameters if t.name in own and t.name in names]
                mine = tuple(replace(t, shape=(own[t.name] // ranks,)) for t in held)
                some = replace(facts, axes=axes, parameters=mine)
                those = {rank: shown[rank].only(names) for rank in groups[place]}
                if family and axes and (found := family.problem(some, those, balance)):
                    return found
        return ""

    def data(self, facts: ModelFacts) -> Family | None:
        """The family of the data axes; ``None``: nothing says what they cut."""
        declared = [stage for stage in strategies.SHARDED if stage in self.features]
        if (named := _data_option(facts)) is not None or not declared:
            return named
        family = (_ZERO1, _ZERO2, _ZERO3)[strategies.SHARDED.index(declared[-1])]
        return replace(family, name=self.name)


def _together(numels: Mapping[str, int], ranks: Iterable[HeldByRank]) -> dict[str, int]:
    """Elements of each parameter that the ranks of one stage and tensor coordinate have together.

    What some of them hold alike, as replicas do, counts once.  So it is told which axis cuts.
    """
    parts: dict[str, dict[str, int]] = {}
    for own in ranks:
        for name, count in own.elements.get("parameters", {}).items():
            parts.setdefault(name, {})[own.places[name]] = count
    return {n: min(numels.get(n, 0), sum(places.values())) for n, places in parts.items()}


def _data_option(facts: ModelFacts, of_experts: bool = False) -> Family | None:
    """The family that the option ``data`` names, as the suite's own takes it; that of experts which
    data ranks divide stands with them.
    """
    own = facts.options.get("experts") if of_experts else facts.options
    if not isinstance(own, Mapping) or "data" not in own:
        return None
    named = family_of(str(own["data"]), own.get("data_options") or {})
    return named if named in _OF_DATA else None


def _folded(facts: ModelFacts) -> ModelFacts:
    """The same on the mesh in which experts that data ranks divide have an axis of their own."""
    own = facts.options.get("experts")
    if not isinstance(own, Mapping) or not own.get("ranks"):
        return facts
    mesh = {n: k for n, k in folded(facts).items() if n in {*facts.axes, cutting("experts")}}
    return replace(facts, axes=mesh) if math.prod(mesh.values()) == facts.world else facts


def _apart(facts: ModelFacts) -> set[str]:
    """The parameters of experts, if ranks divide them or they have a data strategy of their own."""
    if parts(_folded(facts).axes, "experts") == 1 and not _data_option(facts, True):
        return set()
    return {t.name for t in facts.parameters if facts.role(t) == EXPERT}


def _data_bytes(facts: ModelFacts, named: Family | None) -> tuple[Fraction, Fraction]:
    """The bounds of the family ``named``, or those within which all families of data axes are."""
    bounds = [family.bytes(facts) for family in ([named] if named else [_DDP, _ZERO1, _ZERO3])]
    return min(low for low, _ in bounds), max(high for _, high in bounds)


def _hybrid(facts: ModelFacts) -> tuple[Fraction, Fraction]:
    """The sum over axes; each tensor rank may send all that is not cut."""
    tensors, mesh, apart = facts.parts("widths"), _folded(facts), _apart(facts)
    dense, stacks = (
        tuple(t for t in facts.parameters if (t.name in apart) is kind) for kind in (False, True)
    )
    least, plain = _data_bytes(replace(mesh, parameters=dense), _data_option(facts))
    low, high = _data_bytes(
        replace(mesh, parameters=stacks, buffers=()), _data_option(facts, of_experts=True)
    )
    least, plain = least + low, tensors * (plain + high)
    if facts.parts("layers") > 1:
        low, high = _pipeline(facts.without("widths"))
        # A split sequence is sent in parts; tied tensors are reduced at either end.
        least, plain = least + low, plain + tensors * high + plain
    if tensors > 1:
        low, high = _tensor(replace(facts, options={"sum_each_backward": True}))
        least, plain = least + low, plain + high
    return least, plain + tensors * (_attended(facts) + _dispatched(mesh))


# ----------------------------------------------------------------------------------------- by name

_DDP = Family("ddp", _ddp, whole=_ALL)
_ZERO1 = Family("zero1", _zero1, cut=("optimizer",), whole=("parameters",))
_ZERO2 = Family("zero2", _zero1, cut=("optimizer", "gradients"), whole=("parameters",))
_ZERO3 = Family("zero3", _zero3, cut=_ALL)
#: Families of the data axes, which others cut beside them.
_OF_DATA = (_DDP, _ZERO1, _ZERO2, _ZERO3)
_PIPELINE = Family("pipeline", _pipeline, ("parameters",), cuts="layers", is_balanced=False)
_TENSOR = Family("tensor", _tensor, ("parameters",), cuts="widths", is_balanced=False)
_CONTEXT = Family("context", _context, whole=_ALL)
_EXPERT = Family("expert", _expert, ("parameters",), cuts="experts", is_balanced=False)

_HYBRID = HybridFamily("hybrid", _hybrid, ("parameters",), cuts="layers", is_balanced=False)

#: By the name that a strategy's record gives (``shardproof.strategies``).
FAMILIES: Mapping[str, Family] = {
    family.name: family for family in (*_OF_DATA, _PIPELINE, _TENSOR, _CONTEXT, _EXPERT, _HYBRID)
}


def family_of(
    strategy: str, options: Mapping[str, object], features: Iterable[str] = ()
) -> Family | None:
    """The family that a system with ``options`` belongs to; ``None``: the name is that of none.

    ``features``, as declared, tell of a system of several axes what its data axes cut.

    A strategy whose options ask it not to shard is DDP by another name.
    """
    record = strategies.of(strategy)
    unsharded = record.unsharded.items()
    if unsharded and all(options.get(name) == value for name, value in unsharded):
        return _DDP
    family = FAMILIES.get(record.family)
    if isinstance(family, HybridFamily):
        return replace(family, features=frozenset(features))
    return family
