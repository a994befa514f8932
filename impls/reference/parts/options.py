"""Options of an implementation: a mapping from a scenario file becomes a frozen dataclass."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from suite.contract import Refused

T = TypeVar("T")


def parse_options(kind: type[T], options: Mapping[str, Any]) -> T:
    """An instance of the dataclass ``kind`` from ``options``.

    Raises :class:`Refused` for an unknown name (with the nearest valid one) or a value of the wrong
    type; an ``int`` is taken where a ``float`` is wanted, a ``bool`` never counts as a number.
    """
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{kind.__name__} is not a dataclass")
    hints = get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]
    for name, value in options.items():
        if name not in names:
            raise Refused(_unknown(name, names))
        allowed = set(get_args(hints[name]) or (hints[name],))
        if float in allowed:
            allowed.add(int)
        if type(value) not in allowed:
            kinds = " or ".join(sorted("null" if t is NoneType else t.__name__ for t in allowed))
            raise Refused(f"option {name!r} must be of type {kinds}, not {value!r}")
    return kind(**options)


def at_least(name: str, value: float, least: float) -> None:
    """Raise :class:`Refused` unless ``value >= least`` (false for NaN)."""
    if not value >= least:
        raise Refused(f"option {name!r} must be at least {least}, not {value!r}")


def _unknown(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown option {name!r}; {hint}valid: {', '.join(sorted(names))}"
