"""An optimizer that shards its state over the ranks, tested inside DDP.

Run: python examples/sharded_optimizer.py
"""

from torch.distributed.optim import ZeroRedundancyOptimizer

from shardproof import prove


def sharded(groups, settings):
    """ZeroRedundancyOptimizer with the settings of the case."""
    return ZeroRedundancyOptimizer(groups, settings.kind, **settings.arguments)


def fixed_rate(groups, settings):
    """The same with other settings than those of the case, which is wrong."""
    return ZeroRedundancyOptimizer(groups, settings.kind, lr=0.1, weight_decay=0.5)


if __name__ == "__main__":
    for optimizer in (sharded, fixed_rate):
        for row in prove(optimizer=optimizer, settings="adamw", worlds=(2,)).itertuples():
            print(f"{optimizer.__name__}, {row.world} ranks: {row.verdict} {row.reason}")
