"""What the coefficients of a fit mean, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_CLOSE = 1e-5
_SHOWN = 3
#: Said where several numbers of the case may be the factor.
_ALIKE = ", as many here: another number of ranks tells which"


def said(
    rows: Sequence[Sequence[float | None]],
    before: float,
    known: Mapping[str, float] | None = None,
    digits: int = 6,
) -> str:
    """What the coefficients mean: ``rows[coordinate][micro-batch]``, and that of the step before.

    ``None``: there was nothing to count.  Empty where all are 1.
    """
    found = [value for row in rows for value in row if value is not None]
    largest = max(map(abs, (*found, before)), default=0.0)

    def snapped(value: float) -> float:
        return float(f"{value:.{digits}g}") if abs(value) > 10.0**-digits * largest else 0.0

    #     rows[coordinate][micro-batch]      None: the micro-batch has no gradient there
    # What is not there counts as whatever stands beside it.
    usual = next((value for value in found), 1.0)
    filled = []
    for row in rows:
        own = next((value for value in row if value is not None), usual)
        filled.append([snapped(own if value is None else value) for value in row])
    values, before = [value for row in filled for value in row], snapped(before)
    if before and not any(values):
        times = "" if close(before, 1.0) else f", {before:.4g} times"
        return f"this is the gradient of the step before{times}"
    also = f"that of the step before is in it {before:.4g} times" if before else ""
    if all(close(value, 1.0) for value in values):
        return also
    cause = _of_parts(filled, values, known or {}, 10.0 ** (1 - digits))
    return "; ".join(filter(None, (cause, also)))


def _of_parts(
    rows: Sequence[Sequence[float]],
    values: Sequence[float],
    known: Mapping[str, float],
    within: float,
) -> str:
    if all(close(value, values[0]) for value in values):
        return factor(values[0], known, within)
    #     1 1      differs by coordinate      1 0      differs by micro-batch
    #     0 0                                 1 0
    if all(close(value, row[0]) for row in rows for value in row):
        return _by("data coordinate", [row[0] for row in rows if row])
    depth = max(map(len, rows))
    last = [[float(at == len(row) - 1) for at in range(len(row))] for row in rows]
    if _agree(rows, last):
        return "only the last micro-batch is in it"
    if _agree(rows, [[float(at == 0) for at in range(len(row))] for row in rows]):
        return "only the first micro-batch is in it"
    by_micro = [[row[at] for row in rows if at < len(row)] for at in range(depth)]
    if all(close(value, column[0]) for column in by_micro for value in column):
        return _by("micro-batch", [column[0] for column in by_micro])
    odd = [
        f"micro-batch {at} of data coordinate {number} counts {value:.4g} times"
        for number, row in enumerate(rows)
        for at, value in enumerate(row)
        if not close(value, 1.0)
    ]
    return "; ".join(odd[:_SHOWN]) + (f"; {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else "")


def _by(what: str, values: Sequence[float]) -> str:
    present = [number for number, value in enumerate(values) if value]
    if len(present) == 1 and len(values) > 1:
        value = values[present[0]]
        times = "" if close(value, 1.0) else f", {value:.4g} times"
        if what == "data coordinate":
            return f"this is the gradient of {what} {present[0]} alone{times}: it was not reduced"
        return f"only {what} {present[0]} is in it{times}"
    missing = [number for number in range(len(values)) if number not in present]
    odd = [
        f"{what} {number} counts {values[number]:.4g} times"
        for number in present
        if not close(values[number], 1.0)
    ]
    lacks = [f"the share of {what} {number} is missing" for number in missing]
    return "; ".join((*lacks, *odd)[: 2 * _SHOWN])


def factor(value: float, known: Mapping[str, float], within: float = _CLOSE) -> str:
    """What a factor of all gradients means, by the numbers that factors are made of."""
    if abs(value) < 1e-9:
        return "every gradient is zero"
    if value < 0:
        return f"every gradient has the wrong sign ({value:.4g} times the true one)"
    #     value      4         1/4        the ratio of both is 4: it is looked up in ``known``
    #     in words   too large too small
    large = value > 1
    size = f"{number(value if large else 1 / value)} times too {'large' if large else 'small'}"
    ratio = max(value, 1 / value)
    names = [n for n, k in known.items() if k > 1 and abs(ratio - k) <= within * k]
    of = f" ({ratio:.4g} = {' or '.join(names)}{_ALIKE * (len(names) > 1)})" if names else ""
    return f"every gradient is {size}{of}"


def number(value: float) -> str:
    """``value`` with four digits, or what it is more or less than 1 where these do not tell."""
    short = f"{value:.4g}"
    more = value - 1
    return short if short != "1" or not more else f"1 {'-+'[more > 0]} {abs(more):.2g}"


def same_of_loss(loss: str, gradients: str) -> bool:
    """Whether what is said of the ``loss`` says what is said of ``gradients``, too."""
    by_weight = "counts the same" in loss or "window" in loss
    if by_weight and "every gradient" not in gradients:
        return True  # other weights of micro-batches: the fit tells how often each is counted
    whole = [("the loss of", "the share of"), ("the gradient of", "the share of")]
    for words, plain in (*whole, ("every gradient", "it"), ("the loss", "it")):
        loss, gradients = loss.replace(words, plain), gradients.replace(words, plain)
    return gradients.removesuffix(": it was not reduced") == loss


def close(value: float, number: float, within: float = _CLOSE) -> bool:
    """Whether ``value`` is ``number`` but for noise."""
    return abs(value - number) <= within * max(abs(number), 0.1)


def _agree(rows: Sequence[Sequence[float]], pattern: Sequence[Sequence[float]]) -> bool:
    return all(
        close(value, wanted)
        for row, wants in zip(rows, pattern, strict=True)
        for value, wanted in zip(row, wants, strict=True)
    )
