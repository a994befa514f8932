"""Implementations that break the contract, each in one way (driven by test_bad_implementations)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from shardproof.contract import Batch, Capabilities, Kind, Observe, Piece, Refused, StepResult
from shardproof.impls.plain import Plain


class NanLoss(Plain):
    def step(self, batch: Batch, observe: Observe) -> StepResult:
        result = super().step(batch, observe)
        return StepResult(loss=result.loss * float("nan"), norm=result.norm)


class RenamedParameters(Plain):
    def local_state(self, kind: Kind) -> list[Piece]:
        return [
            dataclasses.replace(piece, name=f"module.{piece.name}")
            for piece in super().local_state(kind)
        ]


class _Changed(Plain):
    def change(self, piece: Piece) -> list[Piece]:
        raise AssertionError

    def local_state(self, kind: Kind) -> list[Piece]:
        pieces = super().local_state(kind)
        return [p for piece in pieces[:1] for p in self.change(piece)] + pieces[1:]


class OwnedTwice(_Changed):
    def change(self, piece: Piece) -> list[Piece]:
        return [piece, piece]


class OwnedByNobody(_Changed):
    def change(self, piece: Piece) -> list[Piece]:
        rows = piece.global_shape[0]
        bounds = tuple((0, n) for n in piece.global_shape)
        return [
            dataclasses.replace(
                piece, tensor=piece.tensor[: rows - 1], slices=((0, rows - 1), *bounds[1:])
            )
        ]


class MissingParameter(_Changed):
    def change(self, piece: Piece) -> list[Piece]:
        return []


class WrongShape(_Changed):
    def change(self, piece: Piece) -> list[Piece]:
        return [Piece.whole(piece.name, piece.tensor.reshape(-1))]


class WrongDtype(_Changed):
    def change(self, piece: Piece) -> list[Piece]:
        return [dataclasses.replace(piece, tensor=piece.tensor.to(torch.float16))]


class RaisesInStep(Plain):
    def step(self, batch: Batch, observe: Observe) -> StepResult:
        raise ZeroDivisionError("the bucket has no elements")


class RefusesForNoReason(Plain):
    def step(self, batch: Batch, observe: Observe) -> StepResult:
        raise Refused("not today")


class RefusesTheAxis(Plain):
    def step(self, batch: Batch, observe: Observe) -> StepResult:
        raise Refused("more than one rank on the axis 'replicate', please")


class ObservesNothing(Plain):
    def step(self, batch: Batch, observe: Observe) -> StepResult:
        return super().step(batch, lambda point: None)


class ReturnsNonsense(Plain):
    def step(self, batch: Batch, observe: Observe) -> Any:
        super().step(batch, observe)
        return None


class ClaimsTooMuch(Plain):
    strategy = "ddp"


class UnknownStrategy(Plain):
    strategy = "dpd"


class UnknownFeature(Plain):
    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        own = super().capabilities(options)
        return dataclasses.replace(own, features=own.features | {"cliping"})


class MisspeltDecline(Plain):
    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        return dataclasses.replace(super().capabilities(options), declines={"tyed": "why"})


class UnknownBufferRule(Plain):
    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        rule: Any = "rank_0"
        return dataclasses.replace(super().capabilities(options), buffers=rule)


NOT_A_CLASS = 3
