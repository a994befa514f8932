"""How tensors are packed for collectives: flat layouts, buckets and units, as arithmetic on shapes.

Written apart from the implementations' own layouts, so that an error in those shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardproof.contract import Options
from shardproof.costs.model_facts import ITEMSIZE, ModelFacts, TensorFacts
from shardproof.table import grouped

_CONTAINERS = ("ModuleList", "ModuleDict")


@dataclass(frozen=True)
class Flat:
    """Tensors of one dtype laid end to end and cut into ``shards`` equal shards.

    Padding at the end makes them equal: at most ``shards - 1`` elements (FSDP, arXiv 2304.11277,
    section 3.2.1).
    """

    members: tuple[TensorFacts, ...]
    shards: int
    #: Elements that a shard is a multiple of, and at whose multiples members start.
    multiple: int = 1
    alignment: int = 1

    @property
    def dtype(self) -> str:
        """Dtype of the buffer, that of its members."""
        return self.members[0].dtype

    @property
    def numel(self) -> int:
        """Elements without padding at the end."""
        return self.spans[-1][1]

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one shard, padding included."""
        return -(-self.numel // (self.shards * self.multiple)) * self.multiple

    @property
    def padded(self) -> int:
        """Elements of the buffer with its padding, a multiple of the ranks."""
        return self.shard_numel * self.shards

    def padded_bytes(self, dtype: str | None = None) -> int:
        """Bytes of all shards in ``dtype`` (``None``: as built)."""
        return self.padded * ITEMSIZE[dtype or self.dtype]

    def payload(self, dtype: str) -> tuple[int, int]:
        """Elements of all shards, and bytes of one in ``dtype``."""
        return self.padded, ITEMSIZE[dtype]

    def shard_bytes(self, dtype: str | None = None) -> int:
        """Bytes of one shard in ``dtype``."""
        return self.shard_numel * ITEMSIZE[dtype or self.dtype]

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """First element of every member, and the one behind its last."""
        spans, end = list[tuple[int, int]](), 0
        for tensor in self.members:
            start = -(-end // self.alignment) * self.alignment
            end = start + tensor.numel
            spans.append((start, end))
        return spans

    def parts(self, shard: int) -> list[tuple[TensorFacts, int]]:
        """``(tensor, elements)`` of what one shard holds; a tensor of none lies where it starts."""
        #   |a a a a a b|b b c c c .|    11 elements, 2 shards of 6: b lies in both, '.' is padding
        low, high = shard * self.shard_numel, (shard + 1) * self.shard_numel
        held = []
        for tensor, (start, stop) in zip(self.members, self.spans, strict=True):
            first, last = max(start, low), min(stop, high)
            # A tensor without elements at the very end would lie behind the last shard.
            home = min(start // self.shard_numel, self.shards - 1) if self.shard_numel else 0
            if first < last or (start == stop and home == shard):
                held.append((tensor, max(0, last - first)))
        return held


@dataclass(frozen=True)
class Unit:
    """A group that is gathered together: the name of a module (``""``: the root) and its flat
    layouts.
    """

    name: str
    flats: tuple[Flat, ...]

    @property
    def members(self) -> tuple[TensorFacts, ...]:
        """Tensors of the unit, in the order in which its buffers hold them."""
        return tuple(t for flat in self.flats for t in flat.members)

    @property
    def trained(self) -> tuple[Flat, ...]:
        """Buffers of the unit that get gradients."""
        return tuple(f for f in self.flats if f.members[0].trainable)


def chunk(size: int, ranks: int, index: int) -> int:
    """How many of ``size`` the ``index``-th of ``ranks`` has: as many as the first, or the rest."""
    most = -(-size // ranks)
    return max(0, min(most, size - index * most))


def layouts(tensors: Iterable[TensorFacts], shards: int) -> tuple[Flat, ...]:
    """One layout per dtype, trained and frozen apart, in order of first appearance."""
    groups = grouped(((tensor.dtype, tensor.trainable), tensor) for tensor in tensors)
    return tuple(Flat(tuple(members), shards) for members in groups.values())


def buckets(tensors: Sequence[TensorFacts], limit: int, shards: int) -> list[Flat]:
    """``tensors`` in their order, packed into buckets of one dtype and at most ``limit`` bytes.

    A tensor over the limit has a bucket of its own.
    """
    filling: dict[str, list[TensorFacts]] = {}
    full: list[list[TensorFacts]] = []
    for tensor in tensors:
        now = filling.setdefault(tensor.dtype, [])
        if now and sum(t.nbytes for t in now) + tensor.nbytes > limit:
            # Full buckets come first; those that are still filling come after all of them.
            full.append(now)
            now = filling[tensor.dtype] = []
        now.append(tensor)
    return [Flat(tuple(members), shards) for members in [*full, *filling.values()]]


def units(facts: ModelFacts, shards: int) -> list[Unit]:
    """The units of the option ``wrap``, in order of registration; the root unit first.

    A tensor belongs to the innermost unit that holds every module it is registered in; what no
    unit holds, tied parameters over units among it, belongs to the root.
    """
    chosen = unit_names(facts)
    members: dict[str, list[TensorFacts]] = {name: [] for name in ("", *chosen)}
    for tensor in facts.parameters:
        around = ([n for n in chosen if within(owner, n)] for owner in tensor.owners)
        homes = {max(names, key=len, default="") for names in around}
        # A tied parameter with owners in two units must be whole whenever either computes.
        members[homes.pop() if len(homes) == 1 else ""].append(tensor)
    return [Unit(name, layouts(held, shards)) for name, held in members.items() if held]


def unit_names(facts: ModelFacts) -> list[str]:
    """Modules that the option ``wrap`` makes units, as registered; no containers, never called."""
    called = {n: kind for n, kind in facts.modules.items() if n and kind not in _CONTAINERS}
    wrap: Options = facts.options.get("wrap") or {}
    if "units" in wrap:
        wanted = {str(name) for name in wrap["units"]}
        return [name for name in called if name in wanted]
    if "module_class" in wrap:
        classes = {str(name) for name in wrap["module_class"]}
        return [name for name, kind in called.items() if kind in classes]
    if "minimum_parameters" in wrap:
        return _of_size(facts, list(called), int(wrap["minimum_parameters"]))
    return list(facts.units)


def _of_size(facts: ModelFacts, names: Sequence[str], least: int) -> list[str]:
    """Modules with at least ``least`` elements that no unit inside them holds, inner ones first."""
    free = {t.name: t for t in facts.parameters}
    chosen = set()
    # Inner modules choose first: what they take no longer counts for the modules around them.
    for name in sorted(names, key=lambda n: -n.count(".")):
        inside = [t for t in free.values() if all(within(o, name) for o in t.owners)]
        if sum(t.numel for t in inside) >= least:
            chosen.add(name)
            for tensor in inside:
                del free[tensor.name]
    return [name for name in names if name in chosen]


def within(owner: str, name: str) -> bool:
    """Whether the module ``owner`` is ``name`` or lies inside of it."""
    return owner == name or owner.startswith(f"{name}.")
