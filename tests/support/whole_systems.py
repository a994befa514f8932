"""Two systems whose ranks hold everything, as an adopter writes them with ``Whole``."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardproof.impls.ecosystem.whole import DDP_FEATURES, Whole


class EachMicroBatch(Whole):
    """DDP that reduces after every micro-batch: sound, and promises nothing else."""

    package = "torch"

    def shard(self, module: nn.Module) -> nn.Module:
        """DDP with its defaults."""
        return DistributedDataParallel(module)


class SaysLast(EachMicroBatch):
    """The same, and says that it reduces with the last micro-batch only."""

    features = DDP_FEATURES
