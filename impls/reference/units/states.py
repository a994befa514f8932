"""Named states with asserted transitions, for the tensors of a unit.

Whether memory may be read, freed or reduced depends on what happened to it before.  Each object
here is in one named state and knows which states may follow.  Any other order of calls is a bug in
a strategy, and raises at the call that is wrong instead of training on with wrong numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import ClassVar, Generic, TypeVar

S = TypeVar("S", bound=Enum)


class IllegalTransition(RuntimeError):
    """A strategy requested a step that the current state does not allow."""


class Stateful(Generic[S]):
    """An object in one state; ``following`` lists the states that may follow each state."""

    following: ClassVar[Mapping[Enum, tuple[Enum, ...]]]
    what: ClassVar[str]
    state: S

    def enter(self, state: S) -> None:
        """Go to ``state``; :class:`IllegalTransition` if it may not follow the current one."""
        allowed = self.following[self.state]
        if state not in allowed:
            names = ", ".join(str(other.value) for other in allowed)
            raise IllegalTransition(
                f"{self.what} are {self.state.value}, so they cannot become {state.value}; "
                f"valid next states: {names}"
            )
        self.state = state

    def require(self, state: S, action: str) -> None:
        """:class:`IllegalTransition` unless this is ``state``, which ``action`` needs."""
        if self.state is not state:
            raise IllegalTransition(
                f"{self.what} are {self.state.value}, but must be {state.value} for {action}"
            )
