"""Stand-ins for classes of a user's own, which the leader of a case never imports.

Inside :func:`stand_ins`, ``registry.load`` gives a class that answers as the user's would.  Each of
its answers comes from an informant (``launch/informant.py``), which imports the user's code.  Only
plain data crosses, and it is held against the contract here, where the user's code cannot reach.

    the leader                         the informant
    Declaration.of(stand_in, ...)      Mine.capabilities(...)    a declaration as JSON
    stand_in.schedule(...)             Mine.schedule(...)        a schedule as JSON
    stand_in.emulator(...)(n, parts)   its emulator(n, parts)    tensors
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

from torch import Tensor

from shardproof import contract, registry
from shardproof.case import Case
from shardproof.contract import Capabilities, Collectives, Depth, Implementation, Options, Refused
from shardproof.costs import own
from shardproof.costs.model import CostModel, NoCostModel
from shardproof.costs.model_facts import ModelFacts
from shardproof.costs.own import OwnCosts
from shardproof.files import Stored, from_others
from shardproof.launch import process_control
from shardproof.launch.informant import Informant, NoAnswer, Raised
from shardproof.registry.answers import asked
from shardproof.registry.declaration import BrokenContract, Declaration
from shardproof.schedules import Schedule

Tensors = dict[str, Tensor]
_SEVERAL = (tuple, frozenset)
#: What a class may raise to say something, by name; anything else it raised is :class:`Raised`.
_SAID = {kind.__name__: kind for kind in (Refused, BrokenContract, NoCostModel)}


def needed(case: Case) -> bool:
    """Whether ``case`` names a class of a user's own, or gives one as an option."""
    if case.implementation.startswith(registry.MUTANTS):
        return False  # the suite's own; those of the judge spoil it on purpose
    return registry.is_foreign(case.implementation) or named_in_options(case)


def named_in_options(case: Case) -> bool:
    """Whether an option, or what the case expects, names a module of a user's (``module:name``)."""
    return ":" in json.dumps((case.options, case.expect), separators=(",", "="))


def import_now(case: Case) -> None:
    """Import, in a process of ranks, what ``case`` names of a user's; ranks say what is wrong."""
    if needed(case):
        with suppress(Exception):
            Declaration.of(registry.load(case.implementation), case.options)


@contextmanager
def stand_ins(case: Case, informants: Callable[[float], Informant]) -> Iterator[None]:
    """Inside, what ``case`` names of a user's is imported by an informant, if anything is.

    ``informants``: makes one, whose answers may take so many seconds.
    """
    if not needed(case):
        yield
        return
    every = named_in_options(case)  # a system of the suite's imports what an option names
    with informants(case.deadline) as informant:
        stand_in = cache(lambda name: _stand_in(informant, name))

        def asked_first(name: str) -> type[Implementation] | None:
            return stand_in(name) if every or registry.is_foreign(name) else None

        registry.STAND_INS.append(asked_first)
        process_control.BARRED.append(registry.STAND_INS.clear)
        try:
            yield
        finally:
            process_control.BARRED.remove(registry.STAND_INS.clear)
            registry.STAND_INS.remove(asked_first)


# --------------------------------------------------------------------------------- in the leader


@dataclass(frozen=True)
class About(Stored):
    """The answers of a class itself; ``broken``: why it cannot be used."""

    broken: str = ""
    name: str = ""
    strategy: str = ""
    depth: Any = ""
    reconfigures: bool = False
    hands_on: bool = False


def _stand_in(informant: Informant, path: str) -> type[Implementation]:
    """:raises BrokenImplementation: it cannot be imported, or is no class of the contract."""
    try:
        about = from_others(About, informant.do(about_class, path))
        if not about.strategy and not about.broken:
            raise TypeError("the class has no attribute 'strategy'")
    except NoAnswer as error:
        why = f"cannot be imported: the process that imports it {error}"
        raise registry.BrokenImplementation(path, why) from None
    except (Raised, TypeError) as error:
        raise registry.BrokenImplementation(path, f"cannot be examined: {error!r}") from None
    if about.broken:
        why = about.broken.removeprefix(f"implementation {path!r} ")
        raise registry.BrokenImplementation(path, why)
    own = {"strategy": about.strategy, "depth": about.depth, "hands_on": about.hands_on}
    changed = {"reconfigure": StandIn.ask} if about.reconfigures else {}
    name = about.name if about.name.isidentifier() else "(a class)"
    return type(name, (StandIn,), {"informant": informant, "path": path, **own, **changed})


class StandIn(Implementation):
    """Answers in place of the class at ``path``; no object of it is ever made."""

    informant: ClassVar[Informant]
    path: ClassVar[str]
    hands_on: ClassVar[bool]
    depth: ClassVar[Depth]

    @classmethod
    def ask(cls, function: Callable[..., Any], *given: Any) -> Any:
        """The result of ``function(path, *given)`` there.

        :raises BrokenContract: the process has ended, or gave no answer.
        """
        try:
            return cls.informant.do(function, cls.path, *given)
        except Raised as error:
            if (kind := _SAID.get(error.kind)) is not None:
                raise kind(str(error)) from None
            raise
        except NoAnswer as error:
            what = f"{cls.__name__}.{function.__name__}: the process that imports the class"
            raise BrokenContract(f"{what} {error}") from None

    @classmethod
    def ask_plain(cls, kind: Any, function: Callable[..., Any], *given: Any) -> Any:
        """As :meth:`ask`, of the stored form of ``kind``."""
        told = cls.ask(function, *given)
        try:
            return from_others(kind, told)
        except TypeError as error:
            what = f"{cls.__name__}: {function.__name__} returned {told!r:.80}"
            raise BrokenContract(f"{what}, which cannot be read: {error}") from None

    @classmethod
    def capabilities(cls, options: Options) -> Capabilities:
        """Its declaration; the leader checks types and words against the contract."""
        told = cls.ask_plain(dict[str, Any], declared, dict(options))
        forms = {field.name: type(field.default) for field in dataclasses.fields(Capabilities)}
        if told.keys() != forms.keys():
            came = f"{cls.__name__} declares the fields {', '.join(sorted(told))!r:.200}"
            raise BrokenContract(f"{came}, expected the fields of Capabilities")
        listed = {name: form for name, form in forms.items() if isinstance(told[name], list)}
        several = {name: form(told[name]) for name, form in listed.items() if form in _SEVERAL}
        return Capabilities(**told | several)

    @classmethod
    def schedule(cls, options: Options, ranks: int, micro_batches: int) -> Schedule | None:
        """The schedule, without the messages of objects that only it knows."""
        told = cls.ask_plain(PlainSchedule | None, schedule, dict(options), ranks, micro_batches)
        return None if told is None else Schedule.from_dict(vars(told))

    @classmethod
    def emulator(cls, options: Options) -> AskedEmulation:
        """Its emulator, call by call."""
        return AskedEmulation(cls, cls.ask_plain(int, emulator, dict(options)))

    @classmethod
    def meeting(cls, options: Options) -> AskedMeeting:
        """Its meeting, call by call."""
        return AskedMeeting(cls, cls.ask_plain(int, meeting, dict(options)))

    @classmethod
    def given_state(cls, now: Any, options: Options) -> Any:
        """The right values of further state that no formula gives (contract version 3)."""
        return cls.ask(given_state, vars(now), dict(options))

    @classmethod
    def offers(cls, options: Options, backend: str, world: int) -> Any:
        """The collectives that it offers."""
        form = dict[str, dict[str, tuple[str, ...]]]
        return cls.ask_plain(form, offers, dict(options), backend, world)


@dataclass(frozen=True)
class PlainSchedule(Stored):
    """The stored form of a :class:`~shardproof.schedules.Schedule`."""

    name: str
    micro_batches: int
    place: tuple[int, ...]
    orders: tuple[str, ...]


@dataclass
class AskedEmulation:
    """An emulator, each call of which is made by the informant."""

    system: type[StandIn]
    number: int
    sent: Sequence[Tensors] = ()
    kept: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)

    def __call__(self, step: int, parts: Sequence[Tensors]) -> Any:
        folded, self.sent, self.kept = self.system.ask(fold, self.number, step, [*parts])
        return folded

    def regroup(self, heirs: Sequence[Sequence[int]]) -> None:
        """Members have changed."""
        self.system.ask(called, self.number, "regroup", [[*each] for each in heirs])


@dataclass(frozen=True)
class AskedMeeting:
    """A meeting, each call of which is made by the informant."""

    system: type[StandIn]
    number: int

    def begin(self, parameters: Mapping[str, Tensor]) -> Any:
        """The state before the first step."""
        return self.system.ask(called, self.number, "begin", dict(parameters))

    def meets(self, step: int) -> Any:
        """Whether the update of ``step`` ends in one."""
        return self.system.ask(called, self.number, "meets", step)

    def meet(self, ends: Sequence[Mapping[str, Tensor]], kept: Mapping[str, Tensor]) -> Any:
        """The parameters with which all continue, and the kept state."""
        return self.system.ask(called, self.number, "meet", [*map(dict, ends)], dict(kept))


def own_costs(
    system: type[Implementation], facts: ModelFacts, skipped: Sequence[bool]
) -> OwnCosts | None:
    """The promises of the cost model that ``system`` brings; ``None``: it promises nothing here.

    :raises BrokenContract: it brings none, or it raised.
    """
    name = system.__name__
    try:
        if issubclass(system, StandIn):
            told = system.ask_plain(OwnCosts | None, costs, facts.to_dict(), [*skipped])
            # Once more, of what it told: this raises where it lacks a rank or a step.
            model: Any = partial(own.Answered, told=told)
            return None if told is None else own.answers(model, facts, skipped)
        model = system.cost_model
        if not (isinstance(model, type) and issubclass(model, CostModel)):
            raise BrokenContract(f"{name}.cost_model is {model!r}, not a subclass of CostModel")
        return own.answers(model, facts, skipped)
    except NoCostModel:
        return None
    except BrokenContract:
        raise
    except Exception as error:
        raise BrokenContract(f"{name}.cost_model raised {error!r}") from error


# ------------------------------------------------------------------------------ in the informant

#: Emulators and meetings that were made, by number.
_made: list[Any] = []


def about_class(path: str) -> dict[str, Any]:
    """As :class:`About`."""
    try:
        system = registry.load(path)
    except registry.BrokenImplementation as error:
        return About(broken=str(error)).to_dict()
    changed = system.reconfigure is not Implementation.reconfigure
    hands_on = bool(getattr(system, "hands_on", False))
    return About("", system.__name__, system.strategy, system.depth, changed, hands_on).to_dict()


def declared(path: str, options: Options) -> dict[str, Any]:
    """The fields of its capabilities, whose types have been looked at."""
    told = Declaration.of(registry.load(path), options)
    names = [field.name for field in dataclasses.fields(Capabilities)]
    plain = {name: getattr(told, name) for name in names}
    mappings = {name: dict(value) for name, value in plain.items() if isinstance(value, Mapping)}
    sets = {n: sorted(v) for n, v in plain.items() if isinstance(v, set | frozenset)}
    return plain | mappings | sets


def schedule(path: str, options: Options, ranks: int, size: int) -> dict[str, Any] | None:
    """The schedule that it announces."""
    told = registry.load(path).schedule(options, ranks, size)
    if told is not None and not isinstance(told, Schedule):
        method = f"schedule(options, {ranks}, {size})"
        raise BrokenContract(f"{method} returned a {type(told).__name__}, not a Schedule")
    return None if told is None else told.to_dict()


def emulator(path: str, options: Options) -> int:
    """The number of a fresh emulator."""
    system = registry.load(path)
    made = system.emulator(options)
    _made.append(asked(system, "emulator(options)", made, Callable, "a function"))
    return len(_made) - 1


def meeting(path: str, options: Options) -> int:
    """The number of a fresh meeting."""
    _made.append(registry.load(path).meeting(options))
    return len(_made) - 1


def fold(path: str, number: int, step: int, parts: Sequence[Tensors]) -> list[Any]:
    """An emulator's form of gradients, its sent part and its residual."""
    made = _made[number]
    folded = made(step, parts)
    return [folded, getattr(made, "sent", []), getattr(made, "kept", {})]


def called(path: str, number: int, method: str, *given: Any) -> Any:
    """The result of a method of an emulator or a meeting; of an optional one: nothing."""
    made = _made[number]
    if method == "regroup" and not hasattr(made, method):
        return None
    return getattr(made, method)(*given)


def given_state(path: str, now: Mapping[str, Any], options: Options) -> Any:
    """The right values of further state."""
    return registry.load(path).given_state(contract.Now(**now), options)


def offers(path: str, options: Options, backend: str, world: int) -> Any:
    """The collectives that it offers."""
    system = registry.load(path)
    return system.offers(options, backend, world) if issubclass(system, Collectives) else {}


def costs(path: str, facts: Mapping[str, Any], skipped: Sequence[bool]) -> dict[str, Any] | None:
    """The promises of its cost model."""
    told = own_costs(registry.load(path), ModelFacts.from_dict(facts), skipped)
    return None if told is None else told.to_dict()
