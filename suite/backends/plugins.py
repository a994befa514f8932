"""Backends of other packages, which name them by entry points of the group ``shardproof.backends``.

An entry point is looked up when its name is used, or when all backends are listed.  One that is
broken breaks nothing else: it is a backend that cannot be used here, and says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING

from shardproof.backends.backend import Backend, Joining
from shardproof.by_path import CannotImport, at_path, entry_points

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "shardproof.backends"


class Broken(Backend):
    """A backend whose entry point leads to none that can be used."""

    def __init__(self, name: str, why: str) -> None:
        self.name, self._why = name, why

    def available(self, world: int = 1) -> str | None:
        """What is wrong with its entry point."""
        return self._why

    def join(self, joining: Joining) -> None:
        """:raises RuntimeError: always; the message says what is wrong with its entry point."""
        raise RuntimeError(self._why)


class Backends(Mapping[str, Backend]):
    """Name -> backend: those of the suite, and those of installed packages.

    A name of the suite keeps its meaning, whatever a package calls its own.
    """

    def __init__(self, *own: Backend) -> None:
        #: Those of the suite, in the order in which they are listed.
        self.own: Mapping[str, Backend] = {backend.name: backend for backend in own}

    def __getitem__(self, name: str) -> Backend:
        return self.own[name] if name in self.own else _loaded(entry_points(GROUP)[name])

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in entry_points(GROUP)

    def __iter__(self) -> Iterator[str]:
        return iter({**self.own, **entry_points(GROUP)})

    def of_record(self, name: str) -> Backend:
        """What a record calls ``name``; the usual properties, if no such backend is known here."""
        return self.get(name) or Broken(name, f"no backend {name!r} is installed here")

    def __len__(self) -> int:
        return sum(1 for _ in self)


@cache
def _loaded(point: EntryPoint) -> Backend:
    """The backend that ``point`` names, or a :class:`Broken` one."""
    try:
        kind = at_path(point.value)
    except CannotImport as error:
        return _broken(point, str(error))
    if not (isinstance(kind, type) and issubclass(kind, Backend)):
        return _broken(point, "is no subclass of shardproof.backends.Backend")
    if lacking := sorted(kind.__abstractmethods__):
        return _broken(point, f"does not define {', '.join(lacking)}")
    named = getattr(kind, "name", None)
    if named != point.name:
        return _broken(point, f"has name = {named!r}, and its entry point is called {point.name!r}")
    return kind()


def _broken(point: EntryPoint, why: str) -> Broken:
    package = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"
    place = f"{point.value} (entry point {point.name!r} of {package}, group {GROUP})"
    remedy = f"correct the class, or pip uninstall {point.dist.name if point.dist else 'it'}"
    return Broken(point.name, f"{place} {why}; {remedy}")
