"""A reducer that uses the collectives of this folder where an option chooses them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardproof.comm import Comm
from shardproof.contract import Refused
from shardproof.impls.reference.collectives.algorithms import ALGORITHMS, all_reduce
from shardproof.impls.reference.collectives.executor import Lanes, Running, in_lanes
from shardproof.impls.reference.engine.choices import Hierarchical, OfBoth
from shardproof.impls.reference.parts.reducers import Bucket, Reducer, Work


class ByAlgorithm(Reducer):
    """Sums and gathers over send and recv; other operations stay with the backend."""

    running_type: type[Running] = Running

    def __init__(self, chosen: OfBoth) -> None:
        self.chosen = chosen
        self.summing = all_reduce(chosen.all_reduce)
        self.scattering = ALGORITHMS["reduce_scatter"].get(chosen.reduce_scatter)
        self.gathering = ALGORITHMS["all_gather"].get(chosen.all_gather)

    def check(self, ranks: int) -> None:
        """Require whole nodes; all other algorithms accept any number of ranks."""
        option = self.chosen.all_reduce
        if isinstance(option, Hierarchical) and ranks % option.ranks_per_node:
            raise Refused(
                "option 'all_reduce' = 'hierarchical' with ranks_per_node = "
                f"{option.ranks_per_node}: the {ranks} ranks of an all-reduce cannot be divided "
                f"into nodes of that size; set ranks_per_node to a divisor of {ranks}, or choose "
                "another algorithm ('rabenseifner' works for any number of ranks)"
            )

    def all_reduce(self, bucket: Bucket, comm: Comm) -> Work:
        """Start the first round; the others run in ``wait``."""
        if self.summing is None:
            return super().all_reduce(bucket, comm)
        return in_lanes(self.summing, bucket.flat, comm, self.running_type)

    def reduce_scatter(self, bucket: Bucket, comm: Comm, shard: Tensor) -> Work:
        """Reduce and scatter in place; a shard that lies elsewhere is copied at the end."""
        # A ring of one has no rounds: the backend's call says whose buffer ``shard`` is meanwhile.
        if self.scattering is None or comm.size == 1:
            return super().reduce_scatter(bucket, comm, shard)
        own = part_of(bucket.flat, comm, shard)
        rounds = self.scattering(comm.rank, comm.size, bucket.flat.numel())
        return self.running_type(rounds, bucket.flat, comm, then=lambda: put(own, shard))

    def all_gather(self, output: Tensor, shard: Tensor, comm: Comm) -> Work:
        """Run all rounds at once.

        A rank without data of its own waits for its gathers sooner than the others, who compute
        meanwhile; it would wait for rounds that nobody carries on.
        """
        if self.gathering is None:
            return super().all_gather(output, shard, comm)
        put(shard, part_of(output, comm, shard))
        rounds = self.gathering(comm.rank, comm.size, output.numel())
        running = self.running_type(rounds, output, comm)
        running.wait()
        return running

    def settle(self, works: Sequence[Work]) -> None:
        """Wait for collectives over send and recv."""
        for work in works:
            if isinstance(work, Running | Lanes):
                work.wait()


def part_of(flat: Tensor, comm: Comm, shard: Tensor) -> Tensor:
    """The view of ``flat`` that ``shard`` belongs to."""
    count = shard.numel()
    return flat.view(-1)[comm.rank * count : (comm.rank + 1) * count]


def put(source: Tensor, target: Tensor) -> None:
    """Copy, unless both share memory."""
    if source.data_ptr() != target.data_ptr():
        target.detach().view(-1).copy_(source.detach().view(-1))
