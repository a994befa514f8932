"""A distributed sampler: which rank trains on which sample, epoch after epoch.

Run: python examples/sampler.py
"""

from torch.utils.data.distributed import DistributedSampler

from shardproof import prove


class SameOrder(DistributedSampler):
    """Ignores the epoch, so that every epoch has the order of the first."""

    def set_epoch(self, epoch):
        super().set_epoch(0)


if __name__ == "__main__":
    for sampler in (DistributedSampler, SameOrder):
        for row in prove(sampler=sampler, worlds=(2,)).itertuples():
            print(f"{sampler.__name__}, {row.world} ranks: {row.verdict} {row.reason}")
