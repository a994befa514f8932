"""Reducers for options beyond the backend's own collectives."""

from __future__ import annotations

from shardproof.axes import summing
from shardproof.comm import Mesh
from shardproof.contract import OptimizerSpec, Refused
from shardproof.impls.reference.collectives.reducer import ByAlgorithm
from shardproof.impls.reference.engine.choices import Compressing, OfBoth, collectives_of
from shardproof.impls.reference.parts.compressors.cast import Cast
from shardproof.impls.reference.parts.compressors.compressor import Compressor
from shardproof.impls.reference.parts.compressors.onebit import OneBit
from shardproof.impls.reference.parts.compressors.powersgd import PowerSGD
from shardproof.impls.reference.parts.compressors.randomk import RandomK
from shardproof.impls.reference.parts.compressors.sign import Sign
from shardproof.impls.reference.parts.compressors.topk import TopK
from shardproof.impls.reference.parts.reducers import Reducer


class Summing:
    """Make reducers: by an algorithm of collectives/, or compressed."""

    # What compresses gradients, one for each method.
    cast_type: type[Compressor] = Cast
    topk_type: type[Compressor] = TopK
    randomk_type: type[Compressor] = RandomK
    powersgd_type: type[Compressor] = PowerSGD
    sign_type: type[Compressor] = Sign
    onebit_type: type[Compressor] = OneBit

    def reducer(self, options: Compressing, spec: OptimizerSpec, mesh: Mesh) -> Reducer:
        """The reducer that the strategy's ``options`` choose.

        :raises Refused: ``compress`` together with a loss scaler.
        """
        chosen = collectives_of(options)
        reducer = Reducer() if chosen == OfBoth() else ByAlgorithm(chosen)
        along = summing(mesh.axes)
        ranks = mesh.size(*along)
        if options.compress is None or ranks == 1:  # one rank has nobody to send to
            return reducer
        if spec.scaler is not None:
            raise Refused(
                "option 'compress' with a loss scaler: the compression error of one step is added "
                "to the gradients of the next step, which may have a different loss scale; leave "
                "out 'compress' or the scaler"
            )
        place = 0
        for axis in along:
            place = place * mesh.size(axis) + mesh.coordinate.get(axis, 0)
        kind: type[Compressor] = getattr(self, f"{options.compress.method}_type")
        return kind(options.compress, place, ranks, reducer)
