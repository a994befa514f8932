"""ElasticDistributedSampler: a resume repeats samples and leaves others out."""

import sys

from torch.distributed.elastic.utils.data import ElasticDistributedSampler

SAMPLES, WORLD, EACH = 24, 2, 4


def epoch(start_index: int) -> list[list[int]]:
    """What each rank takes of one epoch."""
    shares = []
    for rank in range(WORLD):
        sampler = ElasticDistributedSampler(
            range(SAMPLES), num_replicas=WORLD, rank=rank, start_index=start_index
        )
        sampler.set_epoch(1)
        shares.append(list(sampler))
    return shares


if __name__ == "__main__":
    before = [sample for share in epoch(0) for sample in share[:EACH]]  # then the job stops
    after = [sample for share in epoch(WORLD * EACH) for sample in share]
    twice = sorted({*before} & {*after})
    lost = sorted({*range(SAMPLES)} - {*before} - {*after})
    present = bool(twice and lost)
    print("expected every sample once in an epoch that is resumed after 8 of 24 samples; came")
    print(f"twice {twice}, never {lost}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
