"""Faults of samplers: the share of each rank in an epoch, its order, and its state after a
resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from shardproof.case import WorkloadSpec
from shardproof.contract import Options, SamplerSpec
from shardproof.impls.mutants import declare
from shardproof.impls.pytorch.distributed_sampler import TorchSampler
from shardproof.impls.reference.sampler import Sampler


def of(**knobs: Any) -> Mapping[str, Any]:
    """A case of the workload ``epochs``."""
    return {"workload": WorkloadSpec("epochs", params=knobs)}


mutant = declare.family(
    Sampler,
    TorchSampler,
    mesh={"replicate": 3},
    killed_by=("data",),
    lane="bitwise",
    steps=0,
    **of(),
)
#: A stop in the middle of epoch 1, after which fewer or more ranks go on.
FEWER = {"resume_at": 1, "into": 2, "tail": "uneven"}
MORE = {"resume_at": 1, "into": 5, "tail": "uneven"}


def permutation(samples: int, seed: int) -> list[int]:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tolist()


# ---------------------------------------------------------------------------------- permutations


@mutant(
    "sampler_seeds_by_rank",
    says="ranks draw different permutations: .* seen twice in epoch 0: by ranks",
    zoo=("D19",),
)
class SeedsByRank(Sampler):
    """Every rank adds its rank number to the seed."""

    def order(self, epoch: int) -> list[int]:
        return permutation(self.spec.samples, 1000 * epoch + self.spec.rank)


@mutant("sampler_forgets_the_epoch", says="epoch 1 has the order of epoch 0", zoo=("D19",))
class ForgetsTheEpoch(TorchSampler):
    """``set_epoch`` is never called."""

    def epoch(self, number: int) -> Iterator[int]:
        return iter(self.sampler)


@mutant(
    "sampler_draws_from_the_global_generator",
    says="ranks draw different permutations",
    backend="gloo",
    zoo=("E01",),
)
class DrawsFromTheGlobalGenerator(Sampler):
    """The permutation is drawn from torch's global generator, which differs between ranks."""

    def order(self, epoch: int) -> list[int]:
        return torch.randperm(self.spec.samples).tolist()


@mutant(
    "sampler_seeds_the_global_generator",
    says="global generator of torch",
    backend="gloo",
    zoo=("E01",),
)
class SeedsTheGlobalGenerator(Sampler):
    """The permutation is right, but it is drawn from torch's global generator after seeding it."""

    def order(self, epoch: int) -> list[int]:
        torch.manual_seed(1000 * self.spec.seed + epoch)
        return torch.randperm(self.spec.samples).tolist()


@mutant("sampler_ignores_the_seed", says="the seed does not matter", zoo=("E04",))
class IgnoresTheSeed(Sampler):
    """The permutation depends on the epoch alone."""

    def order(self, epoch: int) -> list[int]:
        return permutation(self.spec.samples, epoch)


@mutant("sampler_goes_on_with_its_generator", says="epoch 0 differs when it is asked for")
class GoesOnWithItsGenerator(Sampler):
    """One generator serves all epochs, so an order depends on the number of earlier draws."""

    def start(self, spec: SamplerSpec, options: Options) -> None:
        super().start(spec, options)
        self.generator = torch.Generator().manual_seed(spec.seed)

    def order(self, epoch: int) -> list[int]:
        return torch.randperm(self.spec.samples, generator=self.generator).tolist()


@mutant(
    "sampler_shuffles_its_own_share", says="every rank takes the same samples in epochs 0 and 1"
)
class ShufflesItsOwnShare(Sampler):
    """The data set is cut once, and each rank shuffles its own share."""

    def dealt(self, order: Sequence[int], begin: int) -> list[int]:
        mine = {*range(self.spec.rank, self.spec.samples, self.spec.world)}
        own = [sample for sample in order if sample in mine]
        longest = self.longest_share(self.spec.samples)
        return [*own, *own[: longest - len(own)]]


@mutant("sampler_shuffles_unasked", says="though nothing is shuffled", **of(shuffle=False))
class ShufflesUnasked(Sampler):
    """Epochs after the first are shuffled, although no shuffling was requested."""

    def order(self, epoch: int) -> list[int]:
        return permutation(self.spec.samples, epoch) if epoch else super().order(epoch)


# ----------------------------------------------------------------------------- who takes what


@mutant(
    "sampler_takes_the_local_rank",
    says="ranks 0,2 take the same samples in epoch 0",
    zoo=("E06",),
    **of(samples=24),
)
class TakesTheLocalRank(Sampler):
    """Ranks are numbered from 0 on every node of two."""

    def dealt(self, order: Sequence[int], begin: int) -> list[int]:
        rest = self.evened(order, order[begin:])
        return rest[self.spec.rank % 2 :: self.spec.world]


@mutant(
    "sampler_takes_the_rank_of_the_world",
    says="ranks 0 and 1 are of one data coordinate, and take different samples",
    mesh={"replicate": 2, "tensor": 2},
    zoo=("E05",),
)
class TakesTheRankOfTheWorld(TorchSampler):
    """The sampler asks the default group for its rank, so ranks of one tensor group differ."""

    def start(self, spec: SamplerSpec, options: Options) -> None:
        every, rank = dist.get_world_size(), dist.get_rank()
        self.sampler: Any = DistributedSampler(range(spec.samples), every, rank, seed=spec.seed)  # type: ignore[arg-type]


@mutant("sampler_pads_a_round_more", says="4 samples are repeated in epoch 0, expected 1")
class PadsARoundMore(Sampler):
    """The padding is one round of all ranks longer than needed."""

    def evened(self, order: Sequence[int], rest: Sequence[int]) -> list[int]:
        even = super().evened(order, rest)
        return [*even, *order[: self.spec.world]]


@mutant(
    "sampler_drops_a_round_more",
    says="5 samples are left out in epoch 0, expected 2",
    zoo=("E02",),
    **of(tail="drop"),
)
class DropsARoundMore(Sampler):
    """The last complete round is dropped too."""

    def evened(self, order: Sequence[int], rest: Sequence[int]) -> list[int]:
        return super().evened(order, rest)[: -self.spec.world]


@mutant("sampler_does_not_pad", says="shares are unequal in epoch 0", zoo=("E03",))
class DoesNotPad(Sampler):
    """Some ranks have one sample more than others, although equal shares are requested."""

    def evened(self, order: Sequence[int], rest: Sequence[int]) -> list[int]:
        return [*rest]


@mutant(
    "sampler_never_gives_the_last_sample", says="sample 46 is seen by no rank in epoch 0, the last"
)
class NeverGivesTheLastSample(Sampler):
    """The permutation is one number short."""

    def order(self, epoch: int) -> list[int]:
        return permutation(self.spec.samples - 1, 1000 * self.spec.seed + epoch)


# ------------------------------------------------------------------------------------- resumes


@mutant(
    "sampler_begins_the_epoch_anew",
    says="epoch 1 starts again after a resume",
    zoo=("E07",),
    **of(resume_at=2),
)
class BeginsTheEpochAnew(Sampler):
    """The state holds the epoch, but not the position in it."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state({**state, "position": 0})


@mutant(
    "sampler_counts_what_was_read_ahead",
    says="lost in a resume in epoch 1: .*a loader had prefetched them",
    zoo=("E08",),
    **of(resume_at=1, read_ahead=1),
)
class CountsWhatWasReadAhead(Sampler):
    """The state counts the samples drawn from the sampler, not those trained on."""

    def epoch(self, number: int) -> Iterator[int]:
        given = super().epoch(number)
        self.given = 0
        return self.counted(given)

    def counted(self, given: Iterator[int]) -> Iterator[int]:
        for sample in given:
            self.given += 1
            yield sample

    def state(self, taken: int) -> Mapping[str, Any]:
        return super().state(self.given)


class _CountsItsOwn(Sampler):
    """The state holds one rank's count, and a load multiplies it by the new number of ranks."""

    def state(self, taken: int) -> Mapping[str, Any]:
        return {**super().state(taken), "position": taken}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state({**state, "position": state["position"] * self.spec.world})


@mutant(
    "sampler_repeats_on_fewer_ranks",
    says="seen twice in epoch 1: before a resume and after it",
    zoo=("E09",),
    **of(**FEWER),
)
class RepeatsOnFewerRanks(_CountsItsOwn):
    """A rank counts its own samples; fewer ranks skip too little."""


@mutant(
    "sampler_skips_on_more_ranks", says="lost in a resume in epoch 1", zoo=("E09",), **of(**MORE)
)
class SkipsOnMoreRanks(_CountsItsOwn):
    """A rank counts its own samples; more ranks skip too much."""


@mutant(
    "sampler_shuffles_the_rest_by_index",
    says="seen twice in epoch 1: before a resume and after it",
    zoo=("E12",),
    **of(**FEWER),
)
class ShufflesTheRestByIndex(Sampler):
    """After a resume, the samples behind the position in the data set are shuffled, not the rest of
    the epoch's order.
    """

    def dealt(self, order: Sequence[int], begin: int) -> list[int]:
        if begin:
            rest = permutation(self.spec.samples - begin, self.current)
            order = [*range(begin), *(begin + sample for sample in rest)]
        return super().dealt(order, begin)


@mutant(
    "sampler_orders_by_the_number_of_ranks",
    says="seen twice in epoch 1: before a resume and after it",
    zoo=("E12",),
    **of(**MORE),
)
class OrdersByTheNumberOfRanks(Sampler):
    """The permutation depends on the number of ranks, but the same length of it is skipped."""

    def order(self, epoch: int) -> list[int]:
        return permutation(self.spec.samples, 1000 * self.spec.world + 10 * epoch + self.spec.seed)


@mutant(
    "sampler_forgets_the_resume_before",
    says="seen twice in epoch 1: before a resume and after it",
    zoo=("E10",),
    **of(samples=60, resume_at=2, resumes=2),
)
class ForgetsTheResumeBefore(Sampler):
    """A second stop in one epoch is counted from the first stop, not from the start of the
    epoch.
    """

    def state(self, taken: int) -> Mapping[str, Any]:
        self.begin = 0
        return super().state(taken)


@mutant(
    "sampler_shortens_all_epochs",
    says="after a resume 6 of 47 samples are seen by no rank in epoch 2",
    zoo=("E11",),
    **of(resume_at=1, tail="uneven"),
)
class ShortensAllEpochs(Sampler):
    """After a resume, every epoch starts at the position of the resumed one."""

    def epoch(self, number: int) -> Iterator[int]:
        self.resumed = number if self.position else self.resumed
        return super().epoch(number)


@mutant(
    "sampler_repeats_the_resumed_epoch",
    says="epoch 2 differs after a resume in epoch 1",
    zoo=("E13", "G08"),
    **of(**MORE),
)
class RepeatsTheResumedEpoch(Sampler):
    """Epochs after a resume are counted from the resumed one, so its permutation comes twice."""

    def order(self, epoch: int) -> list[int]:
        late = bool(self.position) and epoch > self.resumed
        return super().order(epoch - late)


@mutant("sampler_tells_its_rank", says="ranks 0 and 1 report different states", **of(resume_at=1))
class TellsItsRank(Sampler):
    """The state holds per-rank values, and rank 0 writes the checkpoint."""

    def state(self, taken: int) -> Mapping[str, Any]:
        return {**super().state(taken), "next": self.begin + self.spec.rank}


@mutant(
    "sampler_gives_what_was_dropped",
    says="epoch 1 was complete, but continues after a resume",
    **of(tail="drop", resume_at=99, into=2),
)
class GivesWhatWasDropped(Sampler):
    """After a change of world size, a finished epoch continues with the samples it dropped."""

    def state(self, taken: int) -> Mapping[str, Any]:
        whole = self.spec.samples // self.spec.world
        return {"epoch": self.current, "position": min(taken, whole) * self.spec.world}
