"""Covering arrays: few rows in which every combination of any few factors' values occurs.

A greedy generator (the idea of AETG, Cohen et al. 1997): each row starts from a combination that no
row has yet, then every other factor takes the value that brings most new ones.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

Row = dict[str, str]
#: Whether values of some factors may stand together; asked of parts of rows as well.
Fits = Callable[[Mapping[str, str]], bool]
Combination = tuple[tuple[str, str], ...]


def covering(
    factors: Mapping[str, Sequence[str]], strength: int, fits: Fits, seed: str
) -> list[Row]:
    """Rows that hold every combination of ``strength`` factors' values that some row can hold.

    ``fits`` must not become true again for a row that holds more.  The same ``seed`` gives the same
    rows.  Fewer factors than ``strength``: every row that fits.
    """
    strength, order = min(strength, len(factors)), list(factors)
    left = dict.fromkeys(combinations(factors, strength, fits))
    draw = random.Random(seed)

    def new(row: Row, name: str) -> int:
        """How many combinations with the value of ``name`` no row has yet."""
        others = [(n, row[n]) for n in order if n in row and n != name]
        count = 0
        for some in itertools.combinations(others, strength - 1):
            together = sorted((*some, (name, row[name])), key=lambda item: order.index(item[0]))
            count += tuple(together) in left
        return count

    def filled(row: Row) -> Row | None:
        """A whole row with ``row`` in it, in the factors' order; ``None``: there is none."""
        if (name := next((name for name in order if name not in row), None)) is None:
            return {name: row[name] for name in order}
        values = [v for v in factors[name] if fits({**row, name: v})]
        draw.shuffle(values)
        values.sort(key=lambda value: -new({**row, name: value}, name))
        return next((whole for v in values if (whole := filled({**row, name: v}))), None)

    rows: list[Row] = []
    while left:
        start = next(iter(left))
        if (row := filled(dict(start))) is None:
            del left[start]  # no whole row can hold it
            continue
        rows.append(row)
        for held in itertools.combinations(row.items(), strength):
            left.pop(held, None)
    return rows


def combinations(
    factors: Mapping[str, Sequence[str]], strength: int, fits: Fits
) -> list[Combination]:
    """Every combination of ``strength`` factors' values that fits by itself."""
    return [
        together
        for names in itertools.combinations(factors, strength)
        for values in itertools.product(*(factors[name] for name in names))
        if fits(dict(together := tuple(zip(names, values, strict=True))))
    ]
