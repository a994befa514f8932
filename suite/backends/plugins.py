"""Backends of other packages, which name them by entry points of the group ``shardproof.backends``.

An entry point is looked up when its name is used, or when all backends are listed.  One that is
broken breaks nothing else: it is a backend that cannot be used here, and says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from shardproof.backends.backend import Backend, Joining
from shardproof.by_path import CannotImport, at_path, entry_points

GROUP = "shardproof.backends"


class Broken(Backend):
    """A backend whose entry point leads to none that can be used."""

    def __init__(self, name: str, why: str) -> None:
        self.name, self._why = name, why

    def available(self, world: int = 1) -> str | None:
        """The problem of its entry point."""
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
        return self.own[name] if name in self.own else _loaded(name)

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in entry_points(GROUP)

    def __iter__(self) -> Iterator[str]:
        return iter({**self.own, **entry_points(GROUP)})

    def of_record(self, name: str) -> Backend:
        """The backend that a record calls ``name``; the usual properties, if it is unknown."""
        return self.get(name) or Broken(name, f"no backend {name!r} is installed here")

    def __len__(self) -> int:
        return sum(1 for _ in self)


@cache
def _loaded(name: str) -> Backend:
    """The backend of an entry point, or a :class:`Broken` one."""
    points = entry_points(GROUP)[name]
    kind: Any = None
    try:
        kind = at_path(points[0].value)
    except CannotImport as error:
        fault = str(error)
    else:
        fault = _fault(name, kind)
    if len(points) > 1:
        fault = "shares this name with the backend of another package"
    if not fault:
        return kind()
    owner = f"{dist.name} {dist.version}" if (dist := points[0].dist) else "an unknown package"
    place = f"{points[0].value} (entry point {name!r} of {owner}, group {GROUP})"
    remedy = f"correct it, or uninstall {dist.name if dist else 'the package'}"
    return Broken(name, f"{place} {fault}: {remedy}")


def _fault(name: str, kind: object) -> str:
    """Why ``kind`` is no backend called ``name``; empty: it is."""
    if not (isinstance(kind, type) and issubclass(kind, Backend)):
        return "is not a subclass of shardproof.backends.Backend"
    if lacking := sorted(kind.__abstractmethods__):
        return f"does not define {', '.join(lacking)}"
    own = getattr(kind, "name", None)
    return "" if own == name else f"has name = {own!r}, not the name of its entry point"
