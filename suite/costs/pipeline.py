"""Pipelines: what the stages of a rank hold, and the messages between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import permutations

from shardproof.costs.ddp import Single
from shardproof.costs.model import Flow, norm_flow
from shardproof.costs.model_facts import TensorFacts, shape_key, used
from shardproof.costs.stages import Stages, stages_of

#: Bytes of what a step adds up a micro-batch at a time: its loss, and what is agreed on.
_SCALARS = 64


@dataclass(frozen=True)
class StageMessage:
    """``bytes`` between two places on the pipe axis, ``ends``, in either direction."""

    bytes: int
    ends: tuple[int, int]


class Pipeline(Single):
    """A rank holds its own stages; activations and their gradients go from stage to stage.

    Each micro-batch sends 2 messages over each boundary between ranks: the activation forward, its
    gradient backward.  Neighbouring stages on one rank send none, so interleaved 1F1B with v chunks
    has v times as many boundaries, and ZB-V twice as many.  The norm's scalar is summed over the
    pipe axis.  Ranks that share a tied tensor exchange its gradients once a step.
    """

    strategy = "pipeline"
    frees_gradients = True
    source = (
        "Narayanan et al. (arXiv 2104.04473) sections 2.2 and 3.2.1: bsh elements per micro-batch "
        "and boundary in each direction, v times with v chunks a rank; tied ends: Megatron-LM "
        "sums the gradients of embedding and head"
    )

    @cached_property
    def stages(self) -> Stages:
        """How the units of the model lie on the stages."""
        return stages_of(self.facts)

    def flows(self) -> list[Flow]:
        """2 messages a micro-batch and boundary, gradients of tied tensors, the norm."""
        messages = [*self.messages(), *self.tied_messages()]
        return [*exchanged(messages), *norm_flow(self.facts, "pipe")]

    def messages(self) -> Iterator[StageMessage]:
        """Every message of the step between neighbouring stages, both directions."""
        facts, place = self.facts, self.stages.place
        #     stage 0 --activation--> stage 1 --activation--> stage 2
        #     stage 0 <---gradient--- stage 1 <---gradient--- stage 2
        item = self.item(facts.trainable[0])
        boundaries = [
            (units.stop - 1, (place[stage], place[stage + 1]))
            for stage, units in enumerate(self.stages.units[:-1])
            if place[stage] != place[stage + 1]
        ]
        copies = facts.parts("widths")  # each rank of the tensor axis sends its own
        for shape in facts.shapes:
            hidden = facts.hidden[shape_key(shape)]
            for boundary, ends in boundaries:
                size = hidden[boundary] * item
                both = StageMessage(size, ends), StageMessage(size, ends[::-1])
                yield from both * copies

    def tied_messages(self) -> Iterator[StageMessage]:
        """The gradients that the ranks of a tied tensor send each other."""
        facts = self.facts
        for tensor in used(facts.parameters, facts.step):
            copies = facts.world // facts.size("pipe")
            # Each end sends its gradient to every other and adds up what it gets.
            for ends in permutations(self.stages.ranks(tensor), 2):
                yield from (StageMessage(tensor.numel * self.item(tensor), ends),) * copies

    def held_by(self, rank: int) -> list[TensorFacts]:
        """The parameters of the stages of global ``rank``; one that is tied is held on each end."""
        mine = self.facts.place(rank, "pipe")
        return [t for t in self.facts.parameters if mine in self.stages.ranks(t)]

    def communication_at_rest(self, rank: int, step: int) -> int:
        """Every message has been sent and used by then."""
        return _SCALARS

    def unclassified_limit(self, rank: int, step: int) -> int:
        """Losses of the micro-batches, no activation."""
        return _SCALARS + 8 * self.facts.rounds


def exchanged(messages: Iterable[StageMessage], share: int = 1) -> list[Flow]:
    """The flows of messages between ranks of the pipe axis; of each 1/``share`` is sent."""
    messages = [*messages]
    if not messages:
        return []
    between = dict.fromkeys((message.ends for message in messages), Fraction(0))
    for message in messages:
        between[message.ends] += Fraction(message.bytes, share)
    total, count = sum(between.values(), Fraction(0)), len(messages)
    return [
        Flow("pipe", "send", total, count, between=between),
        # Logical bytes count where they are sent.
        Flow("pipe", "recv", Fraction(0), count),
    ]
