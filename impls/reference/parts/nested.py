"""Tensors inside of tuples, lists and dictionaries, as modules take and give them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in ``value``."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def mapped(value: Any, change: Callable[[Tensor], Tensor], keep: bool = True) -> Any:
    """``value`` with what ``change`` makes of each tensor in it, in the order of `tensors_in`.

    With ``keep``, containers in which nothing changes stay the same objects: a module may write
    into them.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [mapped(item, change, keep) for item in value]
        if keep and all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        every = {key: mapped(item, change, keep) for key, item in value.items()}
        changed = {key: new for key, new in every.items() if new is not value[key]}
        made = value if keep and not changed else copy.copy(value)  # of its own type
        for key, new in changed.items():
            made[key] = new
        return made
    return value


class Copies:
    """The lists and dictionaries of ``value`` that are others in ``made``, which `mapped` made.

    Whoever writes into them changes nothing that the caller of `mapped` has.
    """

    def __init__(self, value: Any, made: Any) -> None:
        self.held = [(copied, [*_items(copied)]) for copied in _copied(value, made)]

    def changed(self) -> bool:
        """Whether one has other items than it was made with."""
        return any(
            len(copied) != len(items)
            or any(new is not old for new, old in zip(_items(copied), items, strict=True))
            for copied, items in self.held
        )


def _copied(value: Any, made: Any) -> Iterator[list[Any] | dict[Any, Any]]:
    if made is not value and isinstance(made, (tuple, list, dict)):
        if not isinstance(made, tuple):
            yield made
        for old, new in zip(_items(value), _items(made), strict=True):
            yield from _copied(old, new)


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container
