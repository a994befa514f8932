"""Tensors inside of tuples, lists and dictionaries, as modules take and give them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
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


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with what ``change`` makes of each tensor in it, in the order of `tensors_in`.

    Containers in which nothing changes stay the same objects: a module may write into them.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [mapped(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        every = {key: mapped(item, change) for key, item in value.items()}
        changed = {key: new for key, new in every.items() if new is not value[key]}
        made = copy.copy(value) if changed else value  # of its own type
        for key, new in changed.items():
            made[key] = new
        return made
    return value
