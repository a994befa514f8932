"""The consensus of ``impls/reference/parts/consensus.py`` as a system under test."""

from __future__ import annotations

from shardproof.comm import Mesh
from shardproof.contract import Capabilities, Options, Refused, Ruling, Stopping, StopRule
from shardproof.impls.reference.parts.consensus import Consensus


class ReferenceStopping(Stopping):
    """Votes over the replicate axis."""

    depth = "layout"
    consensus_type: type[Consensus] = Consensus

    @classmethod
    def capabilities(cls, options: Options) -> Capabilities:
        if options:
            raise Refused(
                f"unknown option {next(iter(options))!r}; reference/stopping has no options"
            )
        return Capabilities(needs=("cpu",))

    def start(self, rule: StopRule, mesh: Mesh, options: Options) -> None:
        self.consensus = self.consensus_type(rule, mesh.comm("replicate"))

    def vote(self, step: int, metric: float, weight: float, asks: bool = False) -> Ruling:
        return self.consensus.vote(step, metric, weight, asks)


IMPLEMENTATION = ReferenceStopping
