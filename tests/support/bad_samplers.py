"""Samplers that break the contract, each in one way; the first is sound."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy
import torch

from shardproof.contract import Capabilities, Options
from shardproof.impls.reference.sampler import Sampler


class Sound(Sampler):
    depth = "family"

    def epoch(self, number: int) -> Iterable[Any]:
        return torch.tensor(list(super().epoch(number)), dtype=torch.int64)


class NeverEnds(Sampler):
    def epoch(self, number: int) -> Iterable[Any]:
        return itertools.cycle(super().epoch(number))


class GivesSamples(Sampler):
    def epoch(self, number: int) -> Iterable[Any]:
        return [0.5 * sample for sample in super().epoch(number)]


class SeedsRandom(Sampler):
    def order(self, epoch: int) -> list[int]:
        random.seed(f"{self.spec.seed}/{epoch}")
        return random.sample(range(self.spec.samples), self.spec.samples)


class SeedsNumpy(Sampler):
    def order(self, epoch: int) -> list[int]:
        numpy.random.seed(1000 * self.spec.seed + epoch)
        return [int(sample) for sample in numpy.random.permutation(self.spec.samples)]


class TellsATensor(Sampler):
    def state(self, taken: int) -> Mapping[str, Any]:
        return {"position": torch.tensor(taken)}


class HasNoState(Sampler):
    state = Sampler.__mro__[1].state  # type: ignore[attr-defined]


class DeclinesNothingKnown(Sampler):
    @classmethod
    def capabilities(cls, options: Options) -> Capabilities:
        return Capabilities(declines={"resumes": "not yet"})


class DeclinesOtherWorlds(Sampler):
    @classmethod
    def capabilities(cls, options: Options) -> Capabilities:
        return Capabilities(declines={"other_world": "not yet"})


class RaisesAfterAResume(Sampler):
    def load_state(self, state: Mapping[str, Any]) -> None:
        raise KeyError("begin")
