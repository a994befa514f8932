"""Options of an implementation: a mapping from a scenario file as a frozen dataclass."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from shardproof.by_path import CannotImport, at_path
from shardproof.contract import Refused
from shardproof.impls.reference.engine.precision import DTYPES, dtype_named

T = TypeVar("T")


def parse_options(kind: type[T], options: Mapping[str, Any], within: str = "") -> T:
    """An instance of the dataclass ``kind`` from ``options``.

    A field that is a dataclass takes a mapping, one of ``Mapping`` any mapping, one of
    ``tuple[X, ...]`` a list, one of dtypes a name; one without default must be given.  Raises
    :class:`Refused` for an unknown name (with the nearest valid one) or a value of the wrong type;
    an ``int`` is taken where a ``float`` is wanted, a ``bool`` never counts as a number.
    ``within`` is what the message puts before a name.
    """
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{kind.__name__} is not a dataclass")
    hints = get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]
    for name in options:
        if name not in names:
            # A class that hands options on knows where this one belongs.
            elsewhere = getattr(kind, "elsewhere", lambda name: "")(name)
            raise Refused(elsewhere or unknown(str(name), within, names))
    for f in dataclasses.fields(kind):
        missing = (f.default, f.default_factory) == (dataclasses.MISSING, dataclasses.MISSING)
        if missing and f.name not in options:
            choices = ", ".join(map(str, _choices([hints[f.name]])))
            valid = choices or f"any {_kind_name(hints[f.name])}"
            raise Refused(f"option {within + f.name!r} is missing; valid: {valid}")
    return kind(**{n: _value(within + n, hints[n], value) for n, value in options.items()})


def own_thing(name: str, path: str) -> Any:
    """The user's object at ``path`` (``package.module:name``), given as the option ``name``.

    Raises :class:`Refused` where nothing can be imported there.
    """
    try:
        return at_path(path)
    except CannotImport as error:
        raise Refused(f"option {name!r} = {path!r}: {error}") from error


def own_function(name: str, path: str) -> Callable[..., Any]:
    """The user's function, found by :func:`own_thing`; objects that are not callable are
    refused.
    """
    found = own_thing(name, path)
    if not callable(found):
        raise Refused(
            f"option {name!r} = {path!r}: {found!r:.60} cannot be called; name a function or a "
            "class"
        )
    return found


def own_function_of(
    name: str, path: str, *given: str, named: Iterable[str] = (), gives: str
) -> Callable[..., Any]:
    """The user's function, as in :func:`own_function`; refused if it cannot be called with the
    arguments ``given`` and the keywords ``named``.

    ``gives``: what it returns, in words.  The refusal names where it is written.
    """
    found = own_function(name, path)
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # of C, which tells nothing
        return found
    try:
        signature.bind(*given, **dict.fromkeys(named))
    except TypeError:
        shown = f"{getattr(found, '__name__', path)}{signature}"
        raise Refused(
            f"option {name!r} = {path!r}: {shown}{written_at(found)} does not accept the arguments "
            f"({', '.join([*given, *(f'{word}=' for word in named)])}); name a function that "
            f"accepts these arguments and returns {gives}"
        ) from None
    return found


def written_at(function: Callable[..., Any]) -> str:
    """`` (file:line)`` of ``function``, if Python knows it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""


def at_least(name: str, value: float, least: float) -> None:
    """Raise :class:`Refused` unless ``value >= least`` (false for NaN)."""
    if not value >= least:
        raise Refused(f"option {name!r} must be at least {least}, not {value!r}")


def unknown(name: str, within: str, names: Iterable[str]) -> str:
    """The message that there is no option ``name``, only ``names``; ``within`` precedes each."""
    valid = ", ".join(sorted(within + n for n in names))
    return f"unknown option {within + name!r}; {_meant(name, names, within)}valid: {valid}"


def _meant(given: object, names: Iterable[str], within: str = "") -> str:
    """A question with the nearest of ``names``, or nothing."""
    known = {name.lower(): name for name in names}
    near = difflib.get_close_matches(str(given).lower(), known, n=1, cutoff=0.5)
    return f"did you mean {within + known[near[0]]!r}? " if near else ""


def _value(name: str, hint: Any, value: Any) -> Any:
    """``value`` converted for a field of type ``hint``."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for kind in kinds:
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            if isinstance(value, Mapping):
                return parse_options(kind, value, f"{name}.")
        elif kind is torch.dtype:
            if isinstance(value, str):
                return dtype_named(name, value)
        elif get_origin(kind) is Literal:
            if any(type(value) is type(choice) and value == choice for choice in get_args(kind)):
                return value
        elif get_origin(kind) is Mapping:
            if isinstance(value, Mapping):
                return dict(value)
        elif get_origin(kind) is tuple:
            if isinstance(value, list):
                item = get_args(kind)[0]
                return tuple(_value(f"{name}[{i}]", item, v) for i, v in enumerate(value))
        # Not isinstance, by which True would be the number 1.
        elif type(value) is kind or (kind is float and type(value) is int):
            return value
    choices = _choices(kinds)
    meant = _meant(value, map(str, choices)) if isinstance(value, str) else ""
    if len(choices) == sum(len(get_args(kind)) or 1 for kind in kinds):  # nothing but words
        valid = ", ".join(map(str, choices))
        raise Refused(f"option {name!r} = {as_yaml(value)} is not valid; {meant}valid: {valid}")
    names = {_kind_name(kind) for kind in kinds} | ({"int"} if float in kinds else set())
    wanted = " or ".join(sorted(names))
    message = f"option {name!r} must be of type {wanted}, not {as_yaml(value)}; {meant}"
    raise Refused(message.rstrip("; "))


def as_yaml(value: object) -> str:
    """``value`` as a scenario file writes it."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)


def _choices(kinds: Iterable[Any]) -> list[object]:
    """The values that ``kinds`` list, in the form of a scenario file."""
    found = (get_args(k) if get_origin(k) is Literal else () for k in kinds if k is not NoneType)
    return [*itertools.chain(*found), *("null" for kind in kinds if kind is NoneType)]


def _kind_name(kind: Any) -> str:
    if kind is NoneType:
        return "null"
    if kind is torch.dtype:
        return f"dtype ({', '.join(DTYPES)})"
    if get_origin(kind) is Literal:
        return " or ".join(str(choice) for choice in get_args(kind))
    if get_origin(kind) is Mapping:
        return "mapping"
    if get_origin(kind) is tuple:
        return f"list of {_kind_name(get_args(kind)[0])}"
    if dataclasses.is_dataclass(kind):
        return f"mapping (keys: {', '.join(f.name for f in dataclasses.fields(kind))})"
    return str(kind.__name__)
