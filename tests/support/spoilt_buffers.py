"""Data parallelism whose ranks begin with buffers of their own, driven by test_initial_buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from shardproof.contract import Capabilities
from shardproof.impls.reference.naive_ddp import ReferenceNaiveDDP


class Spoilt(ReferenceNaiveDDP):
    """Every rank but the first fills its running variances."""

    value: ClassVar[float] = 0.5

    def setup(self, build: Any, state: Any, optimizer: Any, mesh: Any, options: Any) -> None:
        super().setup(build, state, optimizer, mesh, options)
        for name, buffer in self.module.named_buffers():
            if mesh.rank and name.endswith("running_var"):
                buffer.fill_(self.value)


class NotFinite(Spoilt):
    value = math.nan


class NothingPromised(Spoilt):
    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        return replace(super().capabilities(options), buffers="none")


class RankZeroSends(Spoilt):
    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        return replace(super().capabilities(options), buffers="rank0")


class KeepsBuilt(ReferenceNaiveDDP):
    """Rank 1 keeps the buffers as they were built."""

    def setup(self, build: Any, state: Any, optimizer: Any, mesh: Any, options: Any) -> None:
        super().setup(build, state, optimizer, mesh, options)
        built = dict(build(mesh.device).named_buffers())
        for name, buffer in self.module.named_buffers():
            if mesh.rank == 1:
                buffer.copy_(built[name])


class Hides(ReferenceNaiveDDP):
    """Shows no buffers, and promises nothing of them."""

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        return replace(super().capabilities(options), buffers="none")

    def local_state(self, kind: Any) -> Any:
        return [] if kind == "buffers" else super().local_state(kind)
