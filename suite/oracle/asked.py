"""The answers of a system that takes part in its oracle, checked against the contract.

:raises BrokenContract: an answer is not what is asked, or asking raised something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from shardproof import registry
from shardproof.case import Case
from shardproof.contract import OUTER, Capabilities, Implementation, Options, is_outer
from shardproof.oracle.training import Tensors, copies
from shardproof.registry import follows
from shardproof.registry.answers import asked, broken, followed, tensors
from shardproof.registry.declaration import BrokenContract
from shardproof.registry.follows import Follows


def follows_of(case: Case, declared: Capabilities) -> Follows:
    """The rules of further state of the system of ``case``; its class is loaded where it computes
    some itself.
    """
    found = follows.of_rules(declared.follows, case.optimizer)
    if all(rule.text != follows.GIVEN for rule in found.rules):
        return found
    system = registry.load(case.implementation)
    return replace(found, given=partial(followed, system, case.options))


class _Asked:
    """An object that a method of the system's made; every answer of it is looked at."""

    method: ClassVar[str]

    def __init__(self, system: type[Implementation], options: Options) -> None:
        self.system = system
        name = self.method.partition("(")[0]
        self.made: Any = self._ask(getattr(system, name), options)

    def _ask(self, answer: Callable[..., Any], *given: Any) -> Any:
        try:
            return answer(*given)
        except BrokenContract:  # of its own process, or found there
            raise
        except Exception as error:
            told = f"{self.system.__name__}.{self.method} raised {error!r}"
            raise BrokenContract(told) from error

    def _tensors(self, part: str, value: Any, wanted: str = "a dict of named tensors") -> Tensors:
        return tensors(self.system, f"{self.method}{part}", value, wanted)


class Emulator(_Asked):
    """``emulator(options)``, a :data:`~shardproof.oracle.training.Fold`."""

    method = "emulator(options)"

    def __init__(self, system: type[Implementation], options: Options) -> None:
        super().__init__(system, options)
        asked(system, self.method, self.made, Callable, "a function")
        self.sent: list[Tensors] = []
        self.kept: Tensors = {}

    def __call__(self, step: int, parts: Sequence[Tensors]) -> Tensors:
        folded = self._ask(self.made, step, parts)
        sent = getattr(self.made, "sent", [])
        asked(self.system, f"{self.method}.sent", sent, (list, tuple), "a list")
        self.sent = [self._tensors(".sent", each) for each in sent]
        self.kept = self._tensors(".kept", getattr(self.made, "kept", {}))
        return self._tensors("(step, gradients)", folded)

    def regroup(self, heirs: Sequence[Sequence[int]]) -> None:
        """Members have changed; an emulator that keeps nothing need not know."""
        self._ask(getattr(self.made, "regroup", lambda heirs: None), heirs)


class Meets(_Asked):
    """``meeting(options)``, a :class:`~shardproof.contract.Meeting`."""

    method = "meeting(options)"

    def begin(self, parameters: Mapping[str, Tensor]) -> Tensors:
        """The state before the first step."""
        return self._slots(".begin", self._ask(lambda: self.made.begin(copies(parameters))))

    def meets(self, step: int) -> bool:
        """Whether the update of ``step`` ends in a meeting."""
        found = self._ask(lambda: self.made.meets(step))
        return bool(asked(self.system, f"{self.method}.meets", found, bool, "a bool"))

    def meet(
        self, ends: Sequence[Mapping[str, Tensor]], kept: Mapping[str, Tensor]
    ) -> tuple[Tensors, Tensors]:
        """The parameters with which all continue, and the kept state."""
        met = self._ask(lambda: self.made.meet([copies(end) for end in ends], copies(kept)))
        wanted = "two dicts of named tensors"
        parameters, after = asked(self.system, f"{self.method}.meet", met, tuple, wanted)
        return copies(self._tensors(".meet", parameters, wanted)), self._slots(".meet", after)

    def _slots(self, part: str, kept: Any) -> Tensors:
        wanted = f"slots named <parameter>.{OUTER}..."
        slots = self._tensors(part, kept, wanted)
        for slot in slots:
            if not is_outer(slot):
                raise broken(self.system, f"{self.method}{part}", repr(slot), wanted)
        return copies(slots)
