"""ElasticDistributedSampler: fails where less than half as many samples as ranks are left."""

import sys

from torch.distributed.elastic.utils.data import ElasticDistributedSampler
from torch.utils.data.distributed import DistributedSampler

SAMPLES, WORLD = 2, 5


def shares(kind: type) -> list[list[int]] | str:
    """What each rank takes, or what it raises."""
    try:
        return [list(kind(range(SAMPLES), num_replicas=WORLD, rank=r)) for r in range(WORLD)]
    except AssertionError as error:
        return f"AssertionError: {error}"


if __name__ == "__main__":
    plain, elastic = shares(DistributedSampler), shares(ElasticDistributedSampler)
    present = isinstance(plain, list) and isinstance(elastic, str)
    print(f"expected one sample a rank, as of DistributedSampler: {plain}; came {elastic}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
