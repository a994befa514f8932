"""By which norm a rank clipped: over which ranks squares were summed, and of which gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations

import torch

from shardproof.checks.causes import fits
from shardproof.checks.causes.fits import some
from shardproof.checks.causes.words import factor
from shardproof.contract import Piece
from shardproof.evidence.assembled import Evidence

#: How close a norm must come to a try, by dtype.
_CLOSE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 0.01, "float16": 0.005}


def of_norm(evidence: Evidence, step: int, rank: int, held: float, true: float) -> str:
    """A sentence on the norm ``held`` that ``rank`` reports of ``step``, in place of ``true``."""
    within = _CLOSE[evidence.case.lowest_dtype]
    if not math.isfinite(held) or not true:
        return ""
    if held == 0:
        return "the norm is 0: there was no gradient in it"
    own = dict(fits.pieces(evidence, step, "gradients_final", "gradients"))
    tries = chain(
        [
            (
                math.sqrt(_square_once(own, list(own))),
                "this is the norm of the gradients that are shown: they are wrong, not the norm",
            )
        ],
        _multiples(fits.known(evidence, step), true),
        _over_axes(evidence, own, rank),
    )
    if found := fits.nearest(held, true, tries, within):
        return found
    if evidence.case.lowest_dtype != "float64":
        return ""  # among so many, one fits by chance
    near = [
        told
        for value, sentence in _local(evidence, step)
        if (told := fits.nearest(held, true, [(value, sentence)], within))
    ]
    return near[0] if len(near) == 1 else ""


def _multiples(known: Mapping[str, float], true: float) -> Iterator[tuple[float, str]]:
    """Multiples that a forgotten scale, or copies that were counted, make."""
    for number in {n for n in known.values() if n > 1}:
        for value in (float(number), 1 / number):
            sentence = factor(value, known).replace("every gradient is", "the norm is")
            yield value * true, sentence
        names = [name for name, size in known.items() if size == number]
        # n equal squares make n times the square, so sqrt(n) times the norm.
        root = math.sqrt(number)
        yield (
            root * true,
            f"the norm is {root:.4g} times the true one, the root of {number:g} "
            f"({' = '.join(names)}): equal gradients were counted on every rank",
        )


def _over_axes(
    evidence: Evidence, own: Mapping[int, Sequence[Piece]], rank: int
) -> Iterator[tuple[float, str]]:
    """Sums of squares over some axes of the mesh, with every copy counted or none."""
    #     squares of the ranks of a 2 x 2 mesh     a b     rank 0 clips by the root of
    #                                              c d
    #         a + b + c + d    all axes: right where no two ranks hold the same piece
    #         a + b            the inner axis only
    #         a                what the rank holds itself
    mesh = {axis: size for axis, size in evidence.case.mesh.items() if size > 1}
    where = {at: record.coordinate for at, record in evidence.ranks.items()}
    for count in range(len(mesh) + 1):
        for axes in combinations(mesh, count):
            peers = [r for r in own if _meets(where[rank], where[r], axes)]
            over = f"over {_named(axes)}" if axes else "over no axis"
            squares = [_square(own[peer]) for peer in peers]
            missing = [axis for axis in mesh if axis not in axes]
            if axes:
                norms = [math.sqrt(square) for square in squares]
                yield sum(norms), f"the norms of ranks {peers} were added, not their squares"
                yield sum(norms) / len(norms), f"the norms of ranks {peers} were averaged"
                rest = [axis for axis in mesh if axis not in axes]
                inner = [
                    _square_once(own, [p for p in own if _meets(where[r], where[p], rest)])
                    for r in peers
                ]
                yield (
                    sum(map(math.sqrt, inner)),
                    f"norms were added over {_named(axes)}, not their squares",
                )
                yield (
                    math.sqrt(sum(squares)),
                    f"the squares were summed {over}, with every copy that its ranks hold",
                )
            if missing:
                alone = (
                    f"this is the norm of what rank {rank} holds itself"
                    if not axes
                    else f"the squares were summed {over} only, not over {_named(missing)}"
                )
                yield math.sqrt(_square_once(own, peers)), alone


def _local(evidence: Evidence, step: int) -> Iterator[tuple[float, str]]:
    """Norms of gradients that had not been reduced, or not all, or not yet come."""
    truth = evidence.truth.steps[step].gradients
    names = list(truth)
    true = {n: float(truth[n].double().square().sum()) for n in names}
    whole = sum(true.values())
    for number, share in enumerate(fits.parts(evidence, step)):
        squares = {
            n: float(torch.stack([m[n].double() for m in share if n in m]).sum(0).square().sum())
            for n in names
            if any(n in m for m in share)
        }
        yield (
            math.sqrt(sum(squares.values())),
            f"this is the norm of data coordinate {number}'s own gradients: not yet reduced",
        )
        for some_names in _runs(names):
            left = whole - sum(true[n] for n in some_names)
            yield (
                math.sqrt(max(0.0, left + sum(squares.get(n, 0.0) for n in some_names))),
                f"the norm was taken before the gradients of {some(some_names)} were reduced",
            )
    for some_names in _runs(names):
        left = whole - sum(true[n] for n in some_names)
        yield math.sqrt(max(0.0, left)), f"the gradients of {some(some_names)} are not in the norm"


def _runs(names: Sequence[str]) -> Iterator[list[str]]:
    """One of them, the first few, or the last few, but never all."""
    yield from ([name] for name in names)
    yield from (list(names[:number]) for number in range(2, len(names)))
    yield from (list(names[number:]) for number in range(1, len(names) - 1))


def _meets(one: Mapping[str, int], other: Mapping[str, int], axes: Sequence[str]) -> bool:
    """Whether two ranks differ along ``axes`` at most."""
    return all(one[axis] == other[axis] for axis in one if axis not in axes)


def _named(axes: Sequence[str]) -> str:
    return " and ".join(map(repr, axes))


def _square(pieces: Sequence[Piece]) -> float:
    return float(sum(piece.tensor.double().square().sum() for piece in pieces))


def _square_once(own: Mapping[int, Sequence[Piece]], ranks: Sequence[int]) -> float:
    """The square of all that ``ranks`` hold, every element once."""
    seen: dict[tuple[object, ...], float] = {}
    for rank in ranks:
        for piece in own[rank]:
            place = (piece.name, piece.slices, piece.flat_range)
            # By place: a copy on another rank has the same key, and counts once.
            seen[place] = float(piece.tensor.double().square().sum())
    return sum(seen.values())
