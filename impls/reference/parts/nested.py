"""Tensors inside tuples, lists, dictionaries and dataclasses, in module inputs and outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in ``value``."""
    if isinstance(value, Tensor):
        yield value
    elif is_container(value):
        for item in _items(value):
            yield from tensors_in(item)


def mapped(value: Any, change: Callable[[Tensor], Tensor], keep: bool = True) -> Any:
    """``value`` with ``change`` applied to each tensor in it, in the order of `tensors_in`.

    With ``keep``, containers in which nothing changes stay the same objects: a module may write
    into them.
    """
    if isinstance(value, Tensor):
        return change(value)
    if not is_container(value):
        return value
    items = [mapped(item, change, keep) for item in _items(value)]
    is_same = all(new is old for new, old in zip(items, _items(value), strict=True))
    if is_same and (keep or isinstance(value, tuple)):
        return value
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    made = copy.copy(value)  # of its own type
    for key, item in zip(_keys(value), items, strict=True):
        if is_dataclass(value):
            object.__setattr__(made, key, item)  # also where it is frozen
        else:
            made[key] = item
    return made


def is_container(value: Any) -> bool:
    """Whether ``value`` is searched for tensors."""
    is_record = is_dataclass(value) and not isinstance(value, type)
    return is_record or isinstance(value, (tuple, list, dict))


def alike(one: Any, other: Any, same: Callable[[Tensor, Tensor], bool]) -> bool:
    """Whether both have the same structure and plain values, and tensors that are ``same``."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same(one, other)
    if type(one) is not type(other):
        return False
    if is_container(one):
        pairs = zip(_items(one), _items(other), strict=False)
        return [*_keys(one)] == [*_keys(other)] and all(alike(a, b, same) for a, b in pairs)
    return one is other or (isinstance(one, (bool, int, float, str)) and one == other)


class Copies:
    """The lists, dictionaries and dataclasses of ``value`` whose copies `mapped` made in ``made``.

    Whoever writes into them changes nothing that the caller of `mapped` has.
    """

    def __init__(self, value: Any, made: Any) -> None:
        self.held = [(one, [*_keys(one)], [*_items(one)]) for one in _copied(value, made)]

    def changed(self) -> bool:
        """Whether one has other keys or items than at its creation."""
        return any(
            [*_keys(one)] != keys
            or any(new is not old for new, old in zip(_items(one), items, strict=True))
            for one, keys, items in self.held
        )


def _copied(value: Any, made: Any) -> Iterator[Any]:
    if made is not value and is_container(made):
        if not isinstance(made, tuple):
            yield made
        for old, new in zip(_items(value), _items(made), strict=True):
            yield from _copied(old, new)


def _keys(container: Any) -> Iterable[Any]:
    if is_dataclass(container):
        return (field.name for field in fields(container) if hasattr(container, field.name))
    return container.keys() if isinstance(container, dict) else range(len(container))


def _items(container: Any) -> Iterable[Any]:
    if is_dataclass(container):
        return (getattr(container, name) for name in _keys(container))
    return container.values() if isinstance(container, dict) else container
