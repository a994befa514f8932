"""Every strategy in one place: what its name implies, and where its cost is computed.

A strategy is the name that an implementation claims (``strategy = "zero2"``).  Each has one record:
those of the textbook here, those of upstream systems beside their adapters
(``impls/<family>/strategies.py``).  Checks, cost models and reports ask the record; none of them
compares names.

A package that is not ours adds a strategy by an entry point of the group ``shardproof.strategies``
(docs/strategy-from-outside.md).  Its record is loaded when its name is asked for, not before: an
entry point that is broken ends the cases that use it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from shardproof import axes
from shardproof.by_path import CannotImport, at_path, entry_points
from shardproof.errors import InputError, Problem, nearest

GROUP = "shardproof.strategies"


@dataclass(frozen=True)
class Strategy:
    """The features that a claim of ``name`` implies, and what the suite asks of it.

    ``cost_model``: the path ``package.module:Class`` of a subclass of
    :class:`~shardproof.costs.model.CostModel`, imported when it is first needed.  ``family``: the
    name of the strategy whose bounds hold for all of its kind (``costs/families.py``); empty: no
    bounds are known.  ``profile``: the features that a claim implies; one that is missing from
    ``Capabilities.features`` is a ``fail``.  ``axes``: the mesh axes that it uses.
    """

    name: str
    cost_model: str = ""
    family: str = ""
    profile: frozenset[str] = frozenset()
    axes: tuple[str, ...] = ()
    #: Takes the data axes of a mesh whose other axes cut stages and layers (``costs/hybrid.py``).
    serves_data_axes: bool = False
    #: Sums gradients in buckets, which are fewer than the parameters.
    in_buckets: bool = False
    #: Its options name schedule and stages in the words of ``costs/stages.py``.
    own_stages: bool = False
    #: Its temporaries are bounded by those of one process (``checks/memory/unattributed.py``).
    bounds_temporaries: bool = False
    #: Options with which it shards nothing and is of the family of plain replication.
    unsharded: Mapping[str, Any] = field(default_factory=dict)

    def implied(self, options: Mapping[str, Any]) -> frozenset[str]:
        """The features of the profile, without those that ``options`` turn off."""
        off = (n for n, (key, value) in OFF_BY.items() if options.get(key, not value) == value)
        return self.profile.difference(off)

    @property
    def is_known(self) -> bool:
        """Whether it has a record; :func:`of` gives an empty one for every other name."""
        return bool(self.cost_model)

    def by_system(
        self, name: str, cost_model: str, more: Iterable[str] = (), less: Iterable[str] = ()
    ) -> Strategy:
        """The record of an upstream system that carries out this strategy.

        Its claim implies the features ``more`` in addition, and none of ``less``.
        """
        profile = self.profile.union(more).difference(less)
        family, along, unsharded = self.family, self.axes, self.unsharded
        return Strategy(name, cost_model, family, profile, along, unsharded=unsharded)


def _record(
    name: str, costs: str, family: str, profile: frozenset[str], along: tuple[str, ...], **more: Any
) -> Strategy:
    """A strategy of the textbook; where bounds are known, its reference keeps within them."""
    # A rank of experts or of positions computes with what others sent: no bound is known.
    bounds = family not in ("", "context", "expert")
    path = f"shardproof.costs.{costs}"
    return Strategy(name, path, family, profile, along, bounds_temporaries=bounds, **more)


_BROADCASTS = frozenset({"clipping", "accumulation", "initial_broadcast"})
_ZERO = _BROADCASTS | {"frozen_parameters"}
_DDP = _ZERO | {"accumulation_without_communication", "buffer_broadcast", "overlap"}
_SERVERS = frozenset({"initial_broadcast", "roles", "events"})
_SPLIT = _ZERO | {"tensor"}
#: What the stages of ZeRO shard: stage n the first n of them.
SHARDED = ("sharded_optimizer", "sharded_gradients", "sharded_parameters")
_ZERO1, _ZERO2, _ZERO3 = (_ZERO.union(SHARDED[:stage]) for stage in (1, 2, 3))
_COPIES, _SHARDS = (axes.cutting("samples"),), (axes.cutting("state"),)
_PIPE, _TENSOR = (axes.cutting("layers"),), (axes.cutting("widths"),)
_CONTEXT = (axes.cutting("positions"),)
_EXPERTS = (axes.cutting("experts"),)
_DATA = (*_COPIES, *_SHARDS)
_GRID = (*_PIPE, *_DATA, *_CONTEXT, *_TENSOR)

#: The strategy that others are compared with: whole copies, and the sum of their gradients.
REPLICATION = "ddp"
#: Name, cost model, family, profile, axes.
_RECORDS = (
    _record(
        "single", "ddp:Single", "", _BROADCASTS - {"initial_broadcast"}, (), serves_data_axes=True
    ),
    # Copies of the whole model that sum their gradients in every step.
    _record("naive_ddp", "ddp:NaiveDDP", "ddp", _BROADCASTS, _COPIES),
    _record(REPLICATION, "ddp:DDP", "ddp", _DDP, _COPIES, serves_data_axes=True, in_buckets=True),
    _record("elastic_ddp", "ddp:Elastic", "", _BROADCASTS | {"elastic"}, _COPIES),
    # Copies that train apart, and meet now and then or at a server.
    _record("local_sgd", "local:LocalSGD", "", _ZERO, _COPIES),
    _record("diloco", "local:DiLoCo", "", _ZERO, _COPIES),
    _record("parameter_server", "local:ParameterServer", "", _SERVERS, _COPIES),
    # Shards of the optimizer state, of the gradients, of the parameters.
    _record("zero1", "zero:Zero1", "zero1", _ZERO1, _SHARDS, serves_data_axes=True),
    _record("zero2", "zero:Zero2", "zero2", _ZERO2, _SHARDS, serves_data_axes=True),
    _record("zero3", "zero:Zero3", "zero3", _ZERO3 | {"overlap"}, _SHARDS, serves_data_axes=True),
    _record(
        "fsdp",
        "fsdp:FSDP",
        "zero3",
        _ZERO | {"wrapped_units", "overlap"},
        _DATA,
        serves_data_axes=True,
        unsharded={"sharding_strategy": "NO_SHARD"},
    ),
    # Stages, split layers, split positions, and all of these at once.
    _record(
        "pipeline",
        "pipeline:Pipeline",
        "pipeline",
        _BROADCASTS | {"stages"},
        _PIPE,
        own_stages=True,
    ),
    _record("tensor", "tensor:TensorParallel", "tensor", _SPLIT, _TENSOR),
    _record("context", "context:Context", "context", _ZERO | {"context"}, (*_COPIES, *_CONTEXT)),
    _record("expert", "expert:ExpertParallel", "expert", _ZERO, (*_COPIES, *_EXPERTS)),
    _record("hybrid", "hybrid:Hybrid", "hybrid", _SPLIT | {"stages"}, _GRID, own_stages=True),
)
#: The strategies of the textbook, by name.
TEXTBOOK: Mapping[str, Strategy] = {record.name: record for record in _RECORDS}

#: Every feature that means something to a check.
FEATURES = frozenset({"fp32_reduction", "state_by_rank"}).union(
    *(record.profile for record in _RECORDS)
)

#: Traits that a profile's feature stands for: they cannot be declined by who claims the strategy.
TRAIT_FEATURES: Mapping[str, str] = {
    "clipping": "clipping",
    "frozen": "frozen_parameters",
    "rebound_buffer": "buffer_broadcast",
}
#: Features that an option turns off, whoever has it: its name, and the value that does.
OFF_BY: Mapping[str, tuple[str, bool]] = {"buffer_broadcast": ("broadcast_buffers", False)}


class BrokenStrategy(InputError):
    """An entry point of the group ``shardproof.strategies`` that gives no usable record."""


@cache
def in_tree() -> Mapping[str, Strategy]:
    """Those of the textbook, and of the upstream systems whose adapters lie in ``impls/``.

    A folder of adapters may have a module ``strategies`` with their records, ``STRATEGIES``.
    """
    found = dict(TEXTBOOK)
    for file in sorted(Path(__file__).with_name("impls").glob("*/strategies.py")):
        module = import_module(f"shardproof.impls.{file.parent.name}.{file.stem}")
        found |= {record.name: record for record in module.STRATEGIES}
    return found


def of(name: str) -> Strategy:
    """The record of ``name``: the suite's, else an installed package's, else an empty one.

    :raises BrokenStrategy: the package that registers ``name`` cannot be imported, or registers
        something else.
    """
    if name in in_tree():
        return in_tree()[name]
    return registered(name) if name in entry_points(GROUP) else Strategy(name)


def names() -> list[str]:
    """Every name, those that installed packages register last; loads none of their records."""
    return list(dict.fromkeys((*in_tree(), *registered_names())))


def registered_names() -> list[str]:
    """The names that installed packages register."""
    return sorted(entry_points(GROUP))


@cache
def registered(name: str) -> Strategy:
    """The record that an installed package registers under ``name``.

    :raises BrokenStrategy: it cannot be imported or used, or the name is taken.
    """
    points = entry_points(GROUP)[name]
    if name in in_tree():
        raise broken(name, "has the same name as a built-in strategy")
    if len(points) > 1:
        raise broken(name, "is registered twice")
    try:
        record = at_path(points[0].value)
    except CannotImport as error:
        raise broken(name, str(error)) from error
    if fault := _fault(name, record):
        raise broken(name, fault)
    assert isinstance(record, Strategy)
    return record


def broken(name: str, what: str) -> BrokenStrategy:
    """The error of a record that cannot be used: ``what`` is wrong with that of ``name``."""
    points = entry_points(GROUP).get(name, [])
    owners = [f"{point.dist.name} {point.dist.version}" for point in points if point.dist]
    where = f"strategy {name!r} of {' and '.join(owners) or 'the suite'} {what}"
    remedy = f"correct its entry point in the group {GROUP!r}, or uninstall the package"
    return BrokenStrategy(Problem(where, remedy, ", ".join(point.value for point in points)))


def _fault(name: str, record: object) -> str:
    """The fault of the ``record`` that is registered under ``name``; empty: nothing."""
    if not isinstance(record, Strategy):
        return f"is a {type(record).__name__}, not a shardproof.strategies.Strategy"
    if record.name != name:
        return f"is called {record.name!r} in its record: write one name in both places"
    if not record.cost_model:
        return "has no cost_model: write package.module:Class"
    known = {
        "family": ([record.family], {own.family for own in _RECORDS}),
        "profile": (record.profile, FEATURES),
        "axes": (record.axes, axes.names()),
    }
    for what, (given, valid) in known.items():
        for word in given:
            if word not in valid:
                return f"has {what} {word!r}: {nearest(str(word), valid, 'valid')}"
    return ""
