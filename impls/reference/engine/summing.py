"""How an engine sums gradients over ranks: by the backend, by an algorithm, or compressed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardproof.axes import summing
from shardproof.comm import Mesh
from shardproof.contract import Implementation, OptimizerSpec, Piece, Refused
from shardproof.impls.reference.collectives import options as collectives
from shardproof.impls.reference.collectives.reducer import ByAlgorithm
from shardproof.impls.reference.engine.handle import Handle
from shardproof.impls.reference.parts.compressors import options as compressors
from shardproof.impls.reference.parts.compressors.cast import Cast
from shardproof.impls.reference.parts.compressors.compressor import Compressor
from shardproof.impls.reference.parts.compressors.emulators import emulator
from shardproof.impls.reference.parts.compressors.onebit import OneBit
from shardproof.impls.reference.parts.compressors.powersgd import PowerSGD
from shardproof.impls.reference.parts.compressors.randomk import RandomK
from shardproof.impls.reference.parts.compressors.sign import Sign
from shardproof.impls.reference.parts.compressors.topk import TopK
from shardproof.impls.reference.parts.reducers import Reducer


class Summing(Implementation):
    """The part of an engine that knows how gradients are summed."""

    # What compresses gradients, one for each method.
    cast_type: type[Compressor] = Cast
    topk_type: type[Compressor] = TopK
    randomk_type: type[Compressor] = RandomK
    powersgd_type: type[Compressor] = PowerSGD
    sign_type: type[Compressor] = Sign
    onebit_type: type[Compressor] = OneBit

    given: Mapping[str, Any]
    mesh: Mesh
    spec: OptimizerSpec
    handle: Handle
    reducer: Reducer

    def make_reducer(self) -> Reducer:
        """How this rank's handles sum gradients over ranks: as the options say."""
        options = self.summing(self.given)
        if options is None:
            return Reducer()
        chosen = collectives.of(options)
        reducer = Reducer() if chosen == collectives.Collectives() else ByAlgorithm(chosen)
        along = summing(self.mesh.axes)
        ranks = self.mesh.size(*along)
        if options.compress is None or ranks == 1:  # one rank has nobody to send to
            return reducer
        if self.spec.scaler is not None:
            raise Refused(
                "option 'compress' with a loss scaler: what is kept of one step would have another "
                "scale than the gradients of the next; leave one of the two out"
            )
        place = 0
        for axis in along:
            place = place * self.mesh.size(axis) + self.mesh.coordinate.get(axis, 0)
        kind: type[Compressor] = getattr(self, f"{options.compress.method}_type")
        return kind(options.compress, place, ranks, reducer)

    @classmethod
    def summing(cls, options: Mapping[str, Any]) -> compressors.Compressing | None:
        """The options of the strategy that sums gradients; ``None``: none does."""
        return None

    @classmethod
    def emulator(
        cls, options: Mapping[str, Any]
    ) -> Callable[[int, Sequence[dict[str, Tensor]]], dict[str, Tensor]]:
        """What the option ``compress`` makes of exact gradients."""
        chosen = cls.summing(options)
        if chosen is None or chosen.compress is None:
            return super().emulator(options)
        return emulator(chosen.compress, chosen.reduction)

    def kept_pieces(self) -> list[Piece]:
        """What the reducer carries from step to step, as it is saved."""
        return [self.handle.numbered(piece) for piece in self.reducer.pieces()]
