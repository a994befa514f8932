"""Untrusted pickles, read with no more memory than their size explains."""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

#: Times its bytes that the values of a pickle may have, each as often as it is reached.
_MOST_UNFOLDED = 256


def read_pickle(data: bytes, reader: type[pickle.Unpickler]) -> Any:
    """The result of ``reader`` on a pickle.

    :raises ValueError: it claims sizes that it does not have, or names values again and again.
    """
    # The C reader reserves what an opcode claims; this one reads it first.
    for number, (code, value, _) in enumerate(pickletools.genops(data)):
        named = isinstance(value, int) and 0 <= value <= number
        if code.name.endswith("PUT") and not named:
            raise ValueError(
                f"damaged pickle: instruction {code.name} refers to memo entry {value}, which "
                "does not exist"
            )
    found = reader(io.BytesIO(data)).load()
    if _unfolded(found, most := _MOST_UNFOLDED * (len(data) + 256)) > most:
        raise ValueError("the pickle refers to the same value too many times")
    return found


def _unfolded(value: Any, most: int) -> int:
    """Number of values in ``value``, each counted as often as it is reached, texts by length; or
    more than ``most``.

    :raises ValueError: it contains itself.
    """
    known: dict[int, int] = {}
    entered, waiting = set(), [value]
    while waiting:
        one = waiting[-1]
        parts = [] if id(one) in known else _parts(one)
        if todo := [part for part in parts if id(part) not in known]:
            if id(one) in entered:
                raise ValueError("a value of the pickle contains itself")
            entered.add(id(one))
            waiting += todo
            continue
        waiting.pop()
        if id(one) not in known:
            own = len(one) if isinstance(one, (str, bytes, bytearray)) else 1
            known[id(one)] = min(most + 1, own + sum(known[id(part)] for part in parts))
    return known[id(value)]


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [*value]
    return [] if isinstance(value, type) else [*getattr(value, "__dict__", {}).values()]
