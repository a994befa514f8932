"""Tensors that the system showed, in program order, compared with the oracle's tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardproof import axes
from shardproof.contract import POINTS, Piece
from shardproof.costs.expression import evaluate
from shardproof.evidence.assembled import Evidence
from shardproof.evidence.held import part
from shardproof.locate.recorded import Event, Recording
from shardproof.oracle.truth import TruthStep
from shardproof.workloads import for_case

#: Relative to the largest element of a tensor: more than other orders of sums explain.
_BOUND = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}


@dataclass(frozen=True)
class Shown:
    """A tensor that a rank showed: what it is, where, and what it should be."""

    event: Event
    step: int
    point: str
    kind: str
    name: str
    held: Tensor
    expected: Tensor
    bound: float
    piece: Piece | None = None
    #: What it was before the step; ``None``: it has no such value.
    before: Tensor | None = None

    def is_as(self, whole: Tensor) -> bool:
        """Whether the wrong elements are those of ``whole``."""
        held, own = self.held.reshape(-1), self.piece_of(whole).reshape(-1).to(self.held.dtype)
        return held.numel() == own.numel() and torch.equal(held[self.wrong], own[self.wrong])

    def piece_of(self, whole: Tensor) -> Tensor:
        """The part of ``whole`` that is shown."""
        return whole if self.piece is None else part(self.piece, whole.contiguous())

    @property
    def wrong(self) -> Tensor:
        """Of each element, flat, whether it is wrong."""
        held, expected = (t.reshape(-1).to(torch.float64) for t in (self.held, self.expected))
        if held.numel() != expected.numel():
            return torch.ones(held.numel(), dtype=torch.bool)
        scale = float(expected.abs().max()) if expected.numel() else 0.0
        return ~((held - expected).abs() <= self.bound * scale + 1e-14)

    @property
    def times(self) -> float | None:
        """The factor between this and what is expected; ``None``: there is no single one."""
        held, expected = (t.reshape(-1).to(torch.float64) for t in (self.held, self.expected))
        square = float(expected.dot(expected)) if held.numel() == expected.numel() else 0.0
        if not square:
            return None
        factor = float(held.dot(expected)) / square
        is_it = torch.allclose(held, expected * factor, rtol=1e-9, atol=1e-13)
        return float(f"{factor:.9g}") if is_it and factor else None

    @property
    def is_wrong(self) -> bool:
        """Whether an element is."""
        return bool(self.wrong.any())


class Moments:
    """Everything that ranks showed up to a step, by the moment."""

    def __init__(self, evidence: Evidence, recordings: Mapping[int, Recording]) -> None:
        self.evidence, self.recordings = evidence, recordings
        self.initial = for_case(evidence.case).state()
        self.zero = evidence.workload.zero_gradient
        self.bound = _BOUND[evidence.case.lowest_dtype]
        self.factor = float(evaluate(evidence.declaration.loss_factor, evidence.facts))

    def __iter__(self) -> Iterator[tuple[int, str, list[Shown]]]:
        """(step, point, what was shown), in program order."""
        by_moment: dict[tuple[int, str], list[Shown]] = {}
        for recording in self.recordings.values():
            for event in recording.events:
                if event.kind == "seen" and (shown := self._shown(event)) is not None:
                    by_moment.setdefault((shown.step, shown.point), []).append(shown)
        points = ["setup", *POINTS[:1], "norm", *POINTS[1:], "loss"]
        for step, point in sorted(by_moment, key=lambda m: (m[0], points.index(m[1]))):
            yield step, point, by_moment[step, point]

    def _shown(self, event: Event) -> Shown | None:
        what, step = event.more["what"], event.step
        held = event.reads[0].content
        if held is None:
            return None
        if what == "result":
            return self._result(event, step, held)
        point = event.more["point"]
        if point not in (*POINTS, "setup") or (step < 0) != (point == "setup"):
            return None
        if (whole := self._truth(event, step, point, what)) is None:
            return None
        more = event.more
        slices = None if more["slices"] is None else tuple(tuple(s) for s in more["slices"])
        flat = None if more["flat"] is None else tuple(more["flat"])
        piece = Piece(event.name, tuple(more["shape"]), held, slices, flat)
        if tuple(whole.shape) != piece.global_shape:
            return None
        expected = part(piece, whole.contiguous())
        if expected.numel() != held.numel():
            return None
        return Shown(
            event,
            step,
            point,
            what,
            event.name,
            held,
            expected,
            self.bound,
            piece,
            self._before(event, what),
        )

    def _result(self, event: Event, step: int, held: Tensor) -> Shown | None:
        if step < 0 or step >= len(self.evidence.truth.steps):
            return None
        truth = self._of_rank(event, step)
        if event.name == "norm":
            clips = truth.clipped is not None
            if not clips:
                return None
            return Shown(event, step, "norm", "norm", "norm", held, truth.norm, self.bound)
        # Ranks that have other positions each tell a part of the loss.
        if axes.parts(self.evidence.case.mesh, "positions") > 1 or truth.skipped:
            return None
        share = self.evidence.records[event.rank].steps[step].share
        if share is None or share >= len(truth.losses):
            return None
        loss = torch.tensor(float(truth.losses[share]), dtype=torch.float64) * self.factor
        return Shown(event, step, "loss", "loss", "loss", held.to(torch.float64), loss, self.bound)

    def _before(self, event: Event, kind: str) -> Tensor | None:
        if kind != "parameters" or event.step < 0:
            return None
        steps, last = self.evidence.truth.steps, event.step - 1
        held = self._of_rank(event, last).parameters if last >= 0 else self.evidence.truth.initial
        return held.get(event.name) if steps else None

    def _of_rank(self, event: Event, step: int) -> TruthStep:
        truth = self.evidence.truth.steps[step]
        if truth.apart:
            return truth.apart[self.evidence.data_coordinate[event.rank]]
        return truth

    def _truth(self, event: Event, step: int, point: str, kind: str) -> Tensor | None:
        name, truth = event.name, self.evidence.truth
        if step < 0:
            return self.initial.get(name) if kind in ("parameters", "buffers") else None
        if step >= len(truth.steps):
            return None
        of = self._of_rank(event, step)
        if kind == "gradients":
            if of.skipped or name in self.zero:
                return None
            tensors = (of.clipped or {}) if point == "after_clip" else of.gradients
            return tensors.get(name)
        if point != "after_update":
            return None
        if kind == "parameters":
            return None if name in self.zero else of.parameters.get(name)
        if kind == "optimizer":
            owner = name.rpartition(".")[0]
            return None if owner in self.zero else of.optimizer.get(name)
        if kind == "buffers" and self.evidence.declaration.buffers != "none":
            coordinate = self.evidence.data_coordinate[event.rank]
            own = of.buffers
            return own[min(coordinate, len(own) - 1)].get(name) if own else None
        return None
