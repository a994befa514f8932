"""``ElasticDistributedSampler`` of torch's elastic package, used as in its example.

    epoch    set_epoch, then all that it gives
    stop     how many samples all ranks trained on
    resume   a new sampler with that as its ``start_index``; the epochs after it begin at 0 again

Torch documents no more of ``start_index`` than "which index of the dataset to start sampling from".
A resume is what it is for, so it is judged as one.

Cost: nothing is sent.  Numbers: exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed.elastic.utils.data import ElasticDistributedSampler

from shardproof.contract import Capabilities, Options, Refused, SamplerSpec, Sampling


class TorchElasticSampler(Sampling):
    """The adapter: one sampler per epoch."""

    depth = "layout"

    @classmethod
    def capabilities(cls, options: Options) -> Capabilities:
        if options:
            raise Refused(f"unknown option {next(iter(options))!r}; this sampler has no options")
        declines = {
            **dict.fromkeys(("drop", "uneven"), "the sampler always pads"),
            "in_order": "the sampler always shuffles",
            "seed": "the order depends only on the epoch",
        }
        return Capabilities(needs=("cpu",), declines=declines)

    def start(self, spec: SamplerSpec, options: Options) -> None:
        self.spec = spec
        self.current = self.resumed = self.position = 0

    def epoch(self, number: int) -> Iterator[int]:
        self.current = number
        begin = self.position if number == self.resumed else 0
        sampler: ElasticDistributedSampler[int] = ElasticDistributedSampler(
            range(self.spec.samples),  # type: ignore[arg-type]
            num_replicas=self.spec.world,
            rank=self.spec.rank,
            start_index=begin,
        )
        sampler.set_epoch(number)
        return iter(sampler)

    def state(self, taken: int) -> Mapping[str, Any]:
        begin = self.position if self.current == self.resumed else 0
        position = min(begin + taken * self.spec.world, self.spec.samples)
        return {"epoch": self.current, "start_index": position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.resumed, self.position = state["epoch"], state["start_index"]


IMPLEMENTATION = TorchElasticSampler
