"""Numbers that a user gives: an error names the value and the values that work."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def require_count(name: str, value: Any, least: int = 1) -> None:
    """Raise unless ``value`` is a whole number of at least ``least``.

    :raises ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} = {value!r:.60}: give a whole number of at least {least}")


def require_positive(name: str, value: Any) -> None:
    """Raise unless ``value`` is a finite number above 0.

    :raises ValueError: it is not.
    """
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not (number and 0 < value < math.inf):
        raise ValueError(f"{name} = {value!r:.60}: give a number above 0")


def require_rate(name: str, value: Any, remedy: str = "") -> float:
    """``value`` as a learning rate, a finite number of at least 0.

    :raises ValueError: it is none.
    """
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not (number and 0 <= value < math.inf):
        remedy = remedy or "give a finite number of at least 0"
        raise ValueError(f"{name} = {value!r:.60}: {remedy}")
    return float(value)
