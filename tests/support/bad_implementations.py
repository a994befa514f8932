"""Implementations that break the contract, each in one way (driven by test_bad_implementations)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardproof.contract import Batch, Capabilities, Kind, Observe, Piece, Refused, StepResult
from shardproof.impls.plain import Plain
from shardproof.impls.reference.naive_ddp import ReferenceNaiveDDP


class NanLoss(Plain):
    def step(self, batch: Batch, observe: Observe) -> StepResult:
        result = super().step(batch, observe)
        return StepResult(loss=result.loss * float("nan"), norm=result.norm)


class SpoilsInputs(Plain):
    """Writes into its copy of the batch, which nobody else may see."""

    def evaluate(self, batch: Batch) -> Tensor | None:
        loss = super().evaluate(batch)
        for micro in batch.micro_batches:
            micro.inputs.zero_()
            micro.weights.zero_()
        return loss


class _Retells(Plain):
    """Tells parameters in other pieces once it has evaluated."""

    evaluated = False

    def evaluate(self, batch: Batch) -> Tensor | None:
        self.evaluated = True
        return super().evaluate(batch)

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        self.evaluated = False
        return super().step(batch, observe)

    def local_state(self, kind: Kind) -> list[Piece]:
        pieces = super().local_state(kind)
        return [*map(self.retold, pieces)] if self.evaluated and kind == "parameters" else pieces

    def retold(self, piece: Piece) -> Piece:
        raise AssertionError


class RetellsFlat(_Retells):
    def retold(self, piece: Piece) -> Piece:
        flat, span = piece.tensor.reshape(-1), (0, piece.tensor.numel())
        return dataclasses.replace(piece, tensor=flat, flat_range=span)


class RetellsFirstElements(_Retells):
    def retold(self, piece: Piece) -> Piece:
        flat = piece.tensor.reshape(-1)[:1]
        return dataclasses.replace(piece, tensor=flat, flat_range=(0, 1))


class RetellsOtherValues(_Retells):
    def retold(self, piece: Piece) -> Piece:
        return dataclasses.replace(piece, tensor=piece.tensor + 1)


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


class NamesNoEmulator(Plain):
    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        return dataclasses.replace(super().capabilities(options), oracle="emulated")


class AsksItsPeers(ReferenceNaiveDDP):
    """Shows what rank 0 holds as its own: a rank that drifts would not be seen."""

    def local_state(self, kind: Kind) -> list[Piece]:
        held = super().local_state(kind)
        for index, piece in enumerate(held):
            tensor = piece.tensor.clone()
            self.mesh.comm("replicate").broadcast(tensor, 0)
            held[index] = dataclasses.replace(piece, tensor=tensor)
        return held


NOT_A_CLASS = 3


class _Wrong(Plain):
    """Returns ``wrong`` from the method ``where``."""

    where: ClassVar[str] = ""
    wrong: ClassVar[Any] = None

    def _or(self, method: str, right: Any) -> Any:
        return self.wrong if self.where == method else right

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Any:
        right = super().capabilities(options)
        field = cls.where.partition(":")[2]
        if cls.where == "capabilities":
            return cls.wrong
        return dataclasses.replace(right, **{field: cls.wrong}) if field else right

    @classmethod
    def role(cls, rank: int, world: int, options: Mapping[str, Any]) -> Any:
        return cls.wrong if cls.where == "role" else super().role(rank, world, options)

    def step(self, batch: Batch, observe: Observe) -> Any:
        if self.where == "observe":
            observe(self.wrong)
        result = super().step(batch, observe)
        if self.where in ("loss", "norm", "metrics"):
            return dataclasses.replace(result, **{self.where: self.wrong})
        return self._or("step", result)

    def local_state(self, kind: Kind) -> Any:
        held = super().local_state(kind)
        if self.where == "piece" and held:
            return [dataclasses.replace(held[0], **self.wrong), *held[1:]]
        if self.where == "generator":
            return (piece for piece in held)
        return self._or("local_state", held)

    def evaluate(self, batch: Batch) -> Any:
        return self._or("evaluate", super().evaluate(batch))

    def full_state(self, kind: Kind) -> Any:
        return self._or("full_state", super().full_state(kind))

    def events(self) -> Any:
        return self._or("events", super().events())


class _Emulated(_Wrong):
    """A system that names an oracle of its own making."""

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Any:
        right = super().capabilities(options)
        return dataclasses.replace(right, oracle="emulated", exactness="lossy")

    @classmethod
    def emulator(cls, options: Mapping[str, Any]) -> Any:
        return cls.wrong


def _raises(*_: object) -> None:
    raise ZeroDivisionError("none of it")


#: Class -> the method, what it returns, and what the verdict says.
WRONG_TYPES: dict[str, tuple[str, Any, str]] = {
    "NoCapabilities": ("capabilities", None, "capabilities(options) returned a NoneType"),
    "TextAxes": (":axes", "replicate", "axes='replicate', expected a tuple of str"),
    "NoPoints": (":points", None, "points=None, expected a tuple of str"),
    "BoolWorld": (":max_world", True, "max_world=True, expected an int or None"),
    "NumberedDtypes": (":dtypes", (torch.float64,), "expected a tuple of str"),
    "MisspeltAxis": (":axes", ("replicte",), "axes: 'replicte' is not a known word; did you mean"),
    "MisspeltDtype": (":dtypes", ("fp64",), "dtypes: 'fp64' is not a known word; valid: bfloat16"),
    "ListedDeclines": (":declines", ["tied"], "expected a mapping of str"),
    "NoBuffers": (":buffers", None, "buffers=None, expected a str"),
    "NoRole": ("role", None, "role(rank, world, options) returned None, expected a str"),
    "TextStep": ("step", "done", "step 0 returned str, expected a StepResult"),
    "TextLoss": ("loss", "0.5", "step 0: loss returned str, expected a Tensor of one number"),
    "BoolLoss": ("loss", True, "loss returned bool"),
    "WideLoss": (
        "loss",
        torch.zeros(2, dtype=torch.float64),
        "loss returned a torch.float64 tensor of shape [2]",
    ),
    "ListedNorm": ("norm", [1.0], "norm returned list"),
    "NoMetrics": ("metrics", None, "metrics returned None, expected a dict"),
    "TextMetrics": ("metrics", {"scale": "1"}, "metrics returned str, expected named numbers"),
    "UnknownPoint": ("observe", "gradient_final", "observe('gradient_final'): not in contract"),
    "NoState": ("local_state", None, "local_state('parameters') returned None, expected a list"),
    "TextState": ("local_state", "all", "local_state('parameters') returned str"),
    "GeneratedState": ("generator", None, "returned generator, expected a list of Piece"),
    "TensorsAsState": ("local_state", [torch.zeros(1)], "returned a list that contains a Tensor"),
    "UnnamedPiece": ("piece", {"name": None}, "with name=None, expected a str that UTF-8"),
    "HalfAPair": ("piece", {"name": "w\udc80"}, r"a piece 'w\udc80' with name='w\udc80', expected"),
    "NumberedPiece": ("piece", {"tensor": 1.0}, "with tensor=1.0, expected a Tensor"),
    "BoolReplica": ("piece", {"replica": True}, "with replica=True, expected an int"),
    "NoShape": ("piece", {"global_shape": None}, "with global_shape=None, expected a tuple"),
    "OpenSlices": ("piece", {"slices": ((0, 1),) * 9}, "expected a (start, stop) per dimension"),
    "FlatText": ("piece", {"slices": None, "flat_range": "ab"}, "with flat_range='ab'"),
    "BackwardRange": ("piece", {"slices": None, "flat_range": (3, 1)}, "flat_range=(3, 1)"),
    "TextEvaluation": ("evaluate", "0.5", "evaluate(batch) returned str"),
    "NoFullState": ("full_state", None, "full_state('parameters') returned None"),
    "TextFullState": (
        "full_state",
        {"w": "x"},
        "returned {'w': str}, expected a dict of named tensors",
    ),
    "NoEvents": ("events", None, "events() returned None, expected a list of Event"),
    "TextEvents": ("events", ["x"], "events() returned str"),
    "NoEmulator": ("emulator", None, "emulator(options) returned None, expected a function"),
    "EmptyEmulator": ("emulator", lambda *_: None, "(step, gradients) returned None"),
    "RaisingEmulator": ("emulator", _raises, "emulator(options) raised ZeroDivisionError"),
}
for _name, (_where, _value, _) in WRONG_TYPES.items():
    _base = _Emulated if _where == "emulator" else _Wrong
    _wrong = staticmethod(_value) if callable(_value) else _value
    globals()[_name] = type(_name, (_base,), {"where": _where, "wrong": _wrong})
