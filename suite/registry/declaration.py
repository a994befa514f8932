"""The declaration of a system, and its needs that are missing here.

Cases, benches and ``prove`` all ask this module, so that a system is left out for the same reasons
and in the same words everywhere.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, get_args

from shardproof import axes, contract, registry, strategies, workloads
from shardproof.backends import BACKENDS, Backend
from shardproof.case import Case
from shardproof.contract import Capabilities, Depth, Implementation, Options, Refused, Sampling
from shardproof.costs.families import family_of
from shardproof.errors import nearest
from shardproof.files import Form, Stored
from shardproof.registry import follows
from shardproof.workloads.base import DTYPES
from shardproof.workloads.knobs import LIKE_TRAITS
from shardproof.workloads.traits import TRAITS

#: A trait that small batches have as well, where some ranks have fewer samples than micro-batches.
UNEQUAL = "unequal_micro_batches"
#: Dtypes that policies of precision compute or reduce in.
NARROW = frozenset({"bfloat16", "float16"})
#: What can be declined beside traits.
CLIPPING, LOSS_SCALE = "clipping", "loss_scale"
#: As well, by a refusal of the model that names the word.
SECOND_DERIVATIVE = "second_derivative"
_DECLINED = re.compile(r"\bdeclined '(\w+)'")


class BrokenContract(RuntimeError):
    """The implementation did what the contract forbids, or left out what it asks for."""


#: Need of a system -> whether a backend has it, and what a backend without it does.
_NEEDS: Mapping[contract.BackendNeed, tuple[Callable[[Backend], bool], str]] = {
    "processes": (lambda on: not on.threads, "runs its ranks as threads of one process"),
    "values": (lambda on: on.has_values, "has no values"),
    "cpu": (lambda on: on.device == "cpu", "keeps its tensors on another device"),
    "sends": (lambda on: on.sends, "cannot send from one rank to another"),
    "any_thread": (lambda on: on.any_thread, "accepts calls only from the threads of ranks"),
}
_SEVERAL = (tuple, list, set, frozenset), "a tuple of str"
#: Type of a field's default -> what it may be instead.
_KINDS: dict[type, tuple[Any, str]] = {
    str: (str, "a str"),
    NoneType: ((int, NoneType), "an int or None"),
    tuple: _SEVERAL,
    frozenset: _SEVERAL,
    float: ((int, float), "a number above 0"),
}


def missing_package(packages: Iterable[str]) -> str:
    """The first of ``packages`` that is not installed, and the remedy; empty: none."""
    for name in packages:
        # Of ``package.module`` the package: to look for the module would import it here.
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            return f"the optional package {name!r} is not installed: see docs/install-extras.md"
    return ""


@dataclass(frozen=True)
class Declaration(Capabilities, Stored):
    """The capabilities of a system under some options, the ``strategy`` that it claims, and the
    ``depth`` at which it is judged. ``reconfigures``: whether it continues with other members.
    """

    features: Annotated[frozenset[str], Form(frozenset, sorted)] = frozenset()
    strategy: str = ""
    depth: Depth = "layout"
    reconfigures: bool = True

    @property
    def trains_alone(self) -> bool:
        """Whether each data coordinate has a trajectory of its own, until they meet."""
        return self.oracle == "emulated" and self.emulates == "trajectory"

    @property
    def not_trained(self) -> str:
        """The kind of system, if it trains no model; empty: it trains one."""
        kind = contract.UNTRAINED.get(self.strategy)
        return kind.not_trained() if kind else ""

    @classmethod
    def of(cls, system: type[Implementation], options: Options) -> Declaration:
        """The declaration of ``system``.

        :raises Refused: it declines the options.
        :raises BrokenContract: it raises anything else, or gives something else.
        """
        method = f"{system.__name__}.capabilities(options)"
        try:
            capabilities = system.capabilities(options)
        except (Refused, BrokenContract):
            raise
        except Exception as error:
            raise BrokenContract(f"{method} raised {error!r}") from error
        if not isinstance(capabilities, Capabilities):
            came = type(capabilities).__name__
            raise BrokenContract(f"{method} returned a {came}, not Capabilities")
        fields = {}
        for field in dataclasses.fields(Capabilities):
            value = fields[field.name] = getattr(capabilities, field.name)
            kinds, wanted = _KINDS.get(type(field.default), (Mapping, "a mapping of str"))
            right = isinstance(value, kinds) and not isinstance(value, bool)
            right = right and (type(field.default) is not float or 0 < value < math.inf)
            words = value if isinstance(value, Iterable) else ()
            if not right or not all(isinstance(word, str) for word in words):
                came = f"{field.name}={value!r:.80}"
                raise BrokenContract(f"{method} returned {came}, expected {wanted}")
        goes_on = system.reconfigure is not Implementation.reconfigure
        return cls(**fields, strategy=system.strategy, depth=system.depth, reconfigures=goes_on)

    def problem(self) -> str:
        """The declared word that is unknown, or the declined trait that its strategy implies;
        empty: none. A misspelt word must not pass for one that was not declared.
        """
        declinable: Collection[str] = (*TRAITS, CLIPPING, LOSS_SCALE, SECOND_DERIVATIVE)
        if self.strategy == Sampling.strategy:
            declinable = Sampling.asked
        words: dict[str, tuple[Collection[object], Collection[str]]] = {
            "features": (sorted(self.features), strategies.FEATURES),
            "declines": ([key.partition("@")[0] for key in self.declines], declinable),
            "declines in": ([d for k in self.declines if (d := k.partition("@")[2])], DTYPES),
            "axes": (self.axes, axes.names()),
            "dtypes": (self.dtypes, DTYPES),
            "backends": (self.backends, BACKENDS),
            "needs": (self.needs, _NEEDS),
            "points": (self.points, get_args(contract.Point)),
            "exactness": ((self.exactness,), get_args(contract.Exactness)),
            "oracle": ((self.oracle,), get_args(contract.OracleKind)),
            "emulates": ((self.emulates,), get_args(contract.Emulated)),
            "buffers": ((self.buffers,), get_args(contract.BufferRule)),
            "batch": ((self.batch,), get_args(contract.BatchRule)),
            "initial_state": ((self.initial_state,), ("rank0", "everywhere")),
            "optimizer_state": ((self.optimizer_state,), get_args(contract.OptimizerState)),
            "depth": ((self.depth,), get_args(contract.Depth)),
            "scopes": (self.scopes, get_args(contract.Scope)),
        }
        for name, (said, known) in words.items():
            for word in said:
                if word not in known:
                    what = f"{name}: {word!r} is not a known word"
                    return f"{what}; {nearest(str(word), known, 'valid')}"
        if wrong := follows.problem(self):
            return wrong
        if self.depth != "layout":
            return ""  # a family implies no feature
        profile = strategies.of(self.strategy).profile
        for trait in (key.partition("@")[0] for key in self.declines):
            feature = strategies.TRAIT_FEATURES.get(trait)
            if feature in profile:
                return f"declines {trait!r}, but claiming {self.strategy!r} implies {feature!r}"
        return ""

    def missing_here(self, backend: str, world: int) -> str:
        """The backend or the package that this machine lacks; empty: none."""
        reason = BACKENDS[backend].available(world) or self.lacks
        return reason or missing_package(self.packages)

    @property
    def runs_on_threads(self) -> bool:
        """Whether ranks of the system may be threads of one process."""
        return any(b.threads and not self.denied(name) for name, b in BACKENDS.own.items())

    def denied(self, backend: str) -> str:
        """Why it does not run on ``backend``, whatever the case; empty: it does."""
        if self.backends and backend not in self.backends:
            return f"runs on {', '.join(self.backends)} only"
        if backend in self.denies:
            return f"does not run on {backend}: {self.denies[backend]}"
        for need in self.needs:
            has, otherwise = _NEEDS[need]
            if not has(BACKENDS[backend]):
                return f"needs {need}, but {backend} {otherwise}"
        return ""

    def usable(self) -> tuple[str, ...]:
        """Backends on which it runs: those that it names, or else the suite's own."""
        return tuple(name for name in self.backends or BACKENDS.own if not self.denied(name))

    def excludes(
        self, backend: str, dtype: str, world: int, axes: Collection[str] = (), missing: str = ""
    ) -> str:
        """Why it cannot run this way; ``missing`` is :meth:`missing_here`; empty: it can."""
        if reason := self.denied(backend) or missing:
            return reason
        foreign = [axis for axis in axes if axis not in self.axes]
        if foreign:
            return f"has no axis {', '.join(foreign)}; its axes: {', '.join(self.axes)}"
        if self.max_world is not None and world > self.max_world:
            return f"runs at world sizes up to {self.max_world}"
        if dtype not in self.dtypes:
            return f"does not support {dtype}; its dtypes: {', '.join(self.dtypes)}"
        return ""

    def excludes_case(self, case: Case, missing: str) -> str:
        """Why ``case``, which trains, is outside what it declares or what the machine has; empty:
        it is not.
        """
        given = case.backend, case.dtype, case.world, case.mesh, missing
        if reason := self.excludes(*given) or self.not_trained:
            return reason
        if case.checkpoint is not None and not self.checkpoints:
            return "declares no checkpoints"
        if case.changes_members and not self.reconfigures:
            return "has no reconfigure, so it cannot continue with other members"
        # Which of them a policy may take is its own affair: it refuses those that it has not.
        narrow = NARROW.intersection(case.precision.values())
        if narrow and NARROW.isdisjoint(self.dtypes):
            wanted, there = ", ".join(sorted(narrow)), ", ".join(self.dtypes)
            return f"does not support {wanted} of the precision policy; its dtypes: {there}"
        if case.deaths and not BACKENDS[case.backend].outlives_members:
            return f"a member cannot die inside a step on {case.backend}"
        if sending := self._sends(case):
            return f"{sending}, but {case.backend} {_NEEDS['sends'][1]}"
        is_whole = axes.parts(case.mesh, "positions") == 1
        if lacking := workloads.scopes(case.workload, is_whole).difference(self.scopes):
            return f"does not sum loss terms of scope {min(lacking)!r} (Capabilities.scopes)"
        given_knobs = case.workload.params.items()
        asked = [f"trait {trait}" for trait in case.workload.traits]
        asked += [f"trait {LIKE_TRAITS[one]}" for one in LIKE_TRAITS if one in given_knobs]
        asked += [] if case.optimizer.clip_norm is None else [CLIPPING]
        asked += [] if case.optimizer.scaler is None else [LOSS_SCALE]
        for what in asked:
            declined = self._declined(what.removeprefix("trait "), case.dtype)
            if declined is not None:
                return f"declines {what}{declined}"
        counts = case.workload.micro_batch_counts(case.data_coordinates)
        unequal = self._declined(UNEQUAL, case.dtype)
        if unequal is not None and len(set(counts)) > 1:
            samples = f"{case.workload.global_batch} samples do not divide evenly"
            spread = f"{min(counts)} to {max(counts)} micro-batches a rank"
            return f"declines trait {UNEQUAL}, and {samples}: {spread}{unequal}"
        return ""

    def _sends(self, case: Case) -> str:
        """Why ``case`` sends from one rank to one other, if the backend cannot; empty: no such."""
        if BACKENDS[case.backend].sends:
            return ""
        if along := axes.sending(case.mesh):  # one stage as well: PyTorch 2.11's sends to itself
            return f"has {axes.role(along[0])}"
        if "roles" in self.features:
            return "has servers"
        # Options that choose collectives over send and recv (docs/collectives.md).
        inner = case.options.get("data_options")
        given = {**case.options, **(inner if isinstance(inner, Mapping) else {})}
        names = ("all_reduce", "reduce_scatter", "all_gather")
        sums = any(given.get(name, "backend") != "backend" for name in names)
        return "sums by send and recv" if sums else ""

    def declined_by(self, refusal: str, dtype: str) -> str:
        """Why a case is declined whose ``refusal`` names a declined word; empty: it names none."""
        for word in _DECLINED.findall(refusal):
            if (reason := self._declined(word, dtype)) is not None:
                return f"declines {word}{reason}"
        return ""

    def _declined(self, what: str, dtype: str) -> str | None:
        """In which dtype and why ``what`` is declined; ``None``: it is not."""
        for key, where in ((what, ""), (f"{what}@{dtype}", f" in {dtype}")):
            if key in self.declines:
                return f"{where}: {self.declines[key]}"
        return None


#: The mesh axes that a system declares, the backends it runs on, whether parameters may have no
#: gradient in a step, and whether it is held to a family whose ranks own shares of a state.
Places = tuple[Sequence[str], Sequence[str], bool, bool]


def places(system: tuple[str, Options]) -> Places:
    """Task of a leader, for a name and options."""
    name, options = system
    declared = Declaration.of(registry.load(name), options)
    takes = declared.declines.keys().isdisjoint(LIKE_TRAITS.values())
    return declared.axes, declared.usable(), takes, _owns_shares(declared, options)


def _owns_shares(declared: Declaration, options: Options) -> bool:
    """Whether it is held to a family whose ranks own shares of a state, along whichever axis."""
    if declared.depth != "family":
        return False
    family = family_of(declared.strategy, options)
    cuts = family is not None and family.cuts == "state" and bool(family.cut)
    declares = axes.cutting("state") in declared.axes or declared.features & {*strategies.SHARDED}
    return cuts or bool(declares)
