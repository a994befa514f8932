"""The loss that a wrong cut of positions makes, where ranks share the positions of samples.

Each try trains nothing: the whole model is run with positions, masks, targets or weights as ranks
that know only their own part would have them.  How a system cuts samples is not known here, so
every published cut is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardproof import axes
from shardproof.checks.causes import attention, fits
from shardproof.contract import Batch, MicroBatch
from shardproof.costs.context import Exchange
from shardproof.evidence.assembled import Evidence
from shardproof.oracle import training
from shardproof.oracle.training import Change
from shardproof.workloads import for_case

#: A change of the micro-batches.
Turn = Callable[[MicroBatch], MicroBatch]

_CUTS = ("contiguous", "zigzag", "striped")


class Positions:
    """Losses of a step of ``evidence`` for ranks that know their own positions only."""

    def __init__(self, evidence: Evidence, cut: str) -> None:
        self.evidence, self.cut = evidence, cut
        self.axis = axes.cutting("positions")
        self.ranks = axes.parts(evidence.case.mesh, "positions")

    def held(self, length: int) -> list[Tensor]:
        """The positions of each rank."""
        facts = self.evidence.model_facts
        assert facts is not None
        exchange = Exchange(facts, cut=self.cut)
        return [torch.tensor(exchange.held(r, length), dtype=torch.long) for r in range(self.ranks)]

    def owners(self, length: int) -> Tensor:
        """The rank of each position."""
        owner = torch.zeros(length, dtype=torch.long)
        for rank, own in enumerate(self.held(length)):
            owner[own] = rank
        return owner

    def local(self, length: int) -> Tensor:
        """The number of each position on its rank."""
        number = torch.zeros(length, dtype=torch.long)
        for own in self.held(length):
            number[own] = torch.arange(len(own))
        return number

    # ---------------------------------------------------------------------------------- the batch

    def turns(self) -> Iterator[tuple[str, Turn]]:
        """Other targets and weights, and what they mean."""
        on = f"on every rank of the axis {self.axis!r}"
        yield "targets were shifted after the cut: the last one of each part is wrong", self.late
        yield f"weights were divided by the token count of each rank {on}", self.by_own_tokens
        yield f"targets of one sample were compared with outputs of another {on}", self.in_one_row
        for rank in range(self.ranks):
            left = f"the loss of rank {rank} of the axis {self.axis!r} is missing"
            yield left, partial(self.weighed, rank=rank, times=0.0)
            twice = left.replace("is missing", "counts twice")
            yield twice, partial(self.weighed, rank=rank, times=2.0)

    def late(self, micro: MicroBatch) -> MicroBatch:
        """The next input on the same rank as each target; the last one wraps around."""
        targets = micro.targets.clone()
        for own in self.held(micro.targets.shape[1]):
            targets[:, own] = micro.inputs[:, own.roll(-1)]
        return replace(micro, targets=targets)

    def by_own_tokens(self, micro: MicroBatch) -> MicroBatch:
        """Weights that sum to the same on each rank that has any."""
        weights, whole = micro.weights.clone(), micro.weights.sum()
        for own in self.held(weights.shape[1]):
            held = weights[:, own].sum()
            weights[:, own] *= whole / self.ranks / held if held else 1.0
        return replace(micro, weights=weights)

    def in_one_row(self, micro: MicroBatch) -> MicroBatch:
        """Targets and weights cut from all samples end to end."""
        targets, weights = micro.targets.clone(), micro.weights.clone()
        parts = [own for own in self.held(targets.shape[1]) if len(own)]
        if len({len(own) for own in parts}) == 1:
            for rank, own in enumerate(parts):
                for held, given in ((targets, micro.targets), (weights, micro.weights)):
                    held[:, own] = given.flatten().chunk(len(parts))[rank].view(len(given), -1)
        return replace(micro, targets=targets, weights=weights)

    def weighed(self, micro: MicroBatch, rank: int, times: float) -> MicroBatch:
        """One rank's weights, ``times`` over."""
        weights = micro.weights.clone()
        weights[:, self.held(weights.shape[1])[rank]] *= times
        return replace(micro, weights=weights)

    # ---------------------------------------------------------------------------------- the model

    def changes(self) -> Iterator[tuple[str, Change]]:
        """Other positions and masks, and what they mean."""
        on = f"on every rank of the axis {self.axis!r}"
        yield f"positions count from 0 {on}", self.all_spans(self.from_zero)
        yield f"queries and keys turn by positions that count from 0 {on}", self.turned_from_zero
        yield f"dropout draws the mask of the first positions {on}", self.dropped_from_zero
        yield "positions do not restart with each document", self.all_spans(self.undivided)
        yield f"a document begins where the part of a rank begins, {on}", self.all_spans(self.split)
        alone = "queries see no key of another rank"
        yield f"{alone} of the axis {self.axis!r}", self.all_spans(self.apart)
        seen = f"no mask hides keys of other ranks of the axis {self.axis!r}"
        yield seen, self.all_spans(self.unmasked)
        yield "the mask does not keep documents apart", self.all_spans(self.undocumented)
        off = f"the mask between ranks of the axis {self.axis!r} is off by one rank"
        yield off, self.all_spans(self.shifted)
        order = "gathered keys are masked as if each rank had the next positions"
        yield f"{order}, {on}", self.all_spans(self.gathered)
        yield from attention.of_losses(self.held, self.axis)

    @staticmethod
    def all_spans(change: Callable[[Any], None]) -> Change:
        """``change`` on what all parts of a model share."""

        def on(module: nn.Module) -> None:
            for span in {id(s): s for s in _spans(module)}.values():
                change(span)

        return on

    def from_zero(self, span: Any) -> None:
        """Positions are numbers on the rank."""
        span.places = lambda rows: self.local(len(rows))[rows]

    def turned_from_zero(self, module: nn.Module) -> None:
        """The same, of rotary embeddings alone."""
        for part in module.modules():
            if getattr(part, "is_rotary", False):
                part.span = copy(part.span)
                self.from_zero(part.span)

    def dropped_from_zero(self, module: nn.Module) -> None:
        """The same, of dropout alone."""
        for part in module.modules():
            if hasattr(part, "first_position"):
                part.span = _LocalRows(self)  # type: ignore[assignment]

    def undivided(self, span: Any) -> None:
        """Positions of whole samples."""
        span.places = lambda rows: rows

    def split(self, span: Any) -> None:
        """Documents that also begin where a run of one rank's positions begins."""
        read = span.read

        def reads(inputs: Tensor) -> Tensor:
            tokens: Tensor = read(inputs)
            owner, place = self.owners(tokens.shape[1]), torch.arange(tokens.shape[1])
            begins = torch.cat([torch.ones(1, dtype=torch.bool), owner[1:] != owner[:-1]])
            runs = torch.where(begins, place, 0).cummax(0).values
            if span.starts is not None:
                span.starts = torch.maximum(span.starts, runs)
            return tokens

        span.read = reads

    def apart(self, span: Any) -> None:
        """Keys of the own rank only."""
        self.masked(span, lambda hides, rows, columns, other: hides | other)

    def unmasked(self, span: Any) -> None:
        """A mask between the positions of one rank only."""
        self.masked(span, lambda hides, rows, columns, other: hides & ~other)

    def undocumented(self, span: Any) -> None:
        """A mask of later positions only."""
        span.hides = lambda rows, columns: columns[None] > rows[:, None]

    def shifted(self, span: Any) -> None:
        """Blocks of keys under the mask of the block before."""
        right = span.hides

        def of_block_before(hides: Tensor, rows: Tensor, columns: Tensor, other: Tensor) -> Tensor:
            parts, named = self.held(len(columns)), columns.clone()
            for rank, part in enumerate(parts) if len({*map(len, parts)}) == 1 else ():
                named[part] = parts[(rank - 1) % self.ranks]
            return torch.where(other, right(rows, named), hides)

        self.masked(span, of_block_before)

    def gathered(self, span: Any) -> None:
        """Keys under the masks of those that would stand in their places, in the order of ranks."""
        hides = span.hides
        span.hides = lambda rows, all_: hides(rows, torch.cat(self.held(len(all_))).argsort()[all_])

    def masked(self, span: Any, made: Callable[..., Tensor]) -> None:
        """A mask ``made`` of the right one and of whether a key is another rank's."""
        hides = span.hides

        def other(rows: Tensor, columns: Tensor) -> Tensor:
            owner = self.owners(len(columns))
            apart = owner[rows][:, None] != owner[columns][None]
            return made(hides(rows, columns), rows, columns, apart)

        span.hides = other


class _LocalRows:
    """The rows of a span for dropout, as numbers on their rank."""

    def __init__(self, positions: Positions) -> None:
        self.positions = positions

    @property
    def rows(self) -> Tensor:
        """Numbers on the rank, of as many positions as the batch has."""
        case = self.positions.evidence.case
        length = for_case(case).whole_batch(0).targets.shape[1]
        return self.positions.local(length)


def _spans(module: nn.Module) -> Iterator[Any]:
    """The spans of the parts of ``module``, which know positions by them."""
    return (own for m in module.modules() if (own := getattr(m, "span", None)) is not None)


def gradients(evidence: Evidence, step: int) -> Iterator[tuple[list[Any], str]]:
    """The gradients by data coordinate and micro-batch, made otherwise, and what each means."""
    if axes.parts(evidence.case.mesh, "positions") == 1:
        return
    for cut in _CUTS:
        tries = Positions(evidence, cut)
        for said, change in attention.of_gradients(tries.held, tries.axis):
            yield fits.parts(evidence, step, change), said


def losses(
    evidence: Evidence, states: Sequence[Any], batches: Sequence[Batch], training_mode: bool
) -> Iterator[tuple[float, str]]:
    """The loss of ``batches`` with ``states``, made otherwise, and what each means."""
    case = evidence.case
    if axes.parts(case.mesh, "positions") == 1:
        return
    for cut in _CUTS:
        tries = Positions(evidence, cut)
        plain = training.evaluator(for_case(case), case.precision, training_mode)
        for said, turn in tries.turns():
            micros = [[turn(m) for m in batch.micro_batches] for batch in batches]
            yield sum(plain(s, m) for s, m in zip(states, micros, strict=True)), said
        for said, change in tries.changes():
            loss_of = training.evaluator(for_case(case), case.precision, training_mode, change)
            given = zip(states, batches, strict=True)
            yield sum(loss_of(s, batch.micro_batches) for s, batch in given), said
