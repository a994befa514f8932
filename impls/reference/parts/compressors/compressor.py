"""The common part of compressors: gradients are compressed, sent and decompressed.

    all_reduce       [1] what was not sent before is added to the gradients (feedback.py)
                     [2] compress, start to send
                     [3] what was not sent now is remembered
           wait      [4] the sum of what all ranks sent replaces the gradients
    reduce_scatter   the same, at once; this rank keeps its shard of the sum

A compressor finds whole parameters in a bucket, each of which it compresses by itself.  All ranks
end with the same bits: sums that are not the backend's own are made in the order of ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardproof.comm import Comm
from shardproof.contract import Piece
from shardproof.impls.reference.collectives.reducer import part_of, put
from shardproof.impls.reference.engine.choices import Compress
from shardproof.impls.reference.parts.compressors.feedback import Feedback, successor
from shardproof.impls.reference.parts.flat import Part
from shardproof.impls.reference.parts.reducers import Bucket, Reducer, Work, slot_of


class Finish:
    """Collectives in flight, with the work to do on their results."""

    def __init__(self, works: Sequence[Work], then: Callable[[], object]) -> None:
        self.works, self.then = works, then
        self.done = False

    def wait(self) -> None:
        """Wait once; later calls return at once."""
        if self.done:
            return
        for work in self.works:
            work.wait()
        with torch.no_grad():
            self.then()
        # A work holds on to the tensors that it sends.
        self.works, self.then, self.done = (), lambda: None, True


class Compressor(Reducer):
    """A reducer that loses precision as ``chosen`` says.

    ``place``: this rank's number among the ``ranks`` that sum together.  ``gathering`` gathers
    parameters, which nobody compresses.
    """

    feedback_type: type[Feedback] = Feedback

    def __init__(self, chosen: Compress, place: int, ranks: int, gathering: Reducer) -> None:
        self.chosen, self.place, self.ranks, self.gathering = chosen, place, ranks, gathering
        self.feedback = self.feedback_type(place, ranks)
        self.slots = ("residual",) if chosen.feeds_back else ()

    @torch.no_grad()
    def all_reduce(self, bucket: Bucket, comm: Comm) -> Work:
        """Start to replace ``bucket`` by the sum of all ranks' compressed gradients."""
        if self.chosen.feeds_back:
            self.feedback.add_to(bucket)  # [1]
        return self.start(bucket, comm)

    def reduce_scatter(self, bucket: Bucket, comm: Comm, shard: Tensor) -> Work:
        """Compute the whole sum, of which ``shard`` receives this rank's part; done on return."""
        # At once: units are gathered over the same ranks meanwhile, and one without data of its own
        # waits at another place.  What is sent in a wait would then meet calls of another kind.
        self.all_reduce(bucket, comm).wait()
        put(part_of(bucket.flat, comm, shard), shard)
        return Finish((), lambda: None)

    def all_gather(self, output: Tensor, shard: Tensor, comm: Comm) -> Work:
        """Gather parameters without compression."""
        return self.gathering.all_gather(output, shard, comm)

    def settle(self, works: Sequence[Work]) -> None:
        """Wait for the gathers."""
        self.gathering.settle(works)

    @abstractmethod
    def start(self, bucket: Bucket, comm: Comm) -> Work:  # [2], [4] in what it returns
        """Send ``bucket`` compressed and keep the residual; after the wait it holds the sum."""

    def keep(self, bucket: Bucket, left: Tensor) -> None:  # [3]
        """Store ``left``, laid out like ``bucket``: the part that this rank does not send now."""
        if self.chosen.feeds_back:
            for part in filled(bucket.parts):
                self.feedback.keep(part, part.of_shard(left))

    def pieces(self) -> list[Piece]:
        """The state that the next steps depend on."""
        return self.feedback.pieces()

    def wanted(self, names: Sequence[str]) -> list[str]:
        """The saved ``names`` that this rank resumes from."""
        known = [name for name in names if slot_of(name) in self.slots]
        numbers = [int(name.rpartition("@")[2]) for name in known if not name.endswith("@all")]
        saved = 1 + max(numbers, default=0)
        return [name for name in known if successor(name, saved, self.place, self.ranks)]

    def load_pieces(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Load residuals and similar state; return the other pieces."""
        return self.feedback.load_pieces(pieces)


def filled(parts: Sequence[Part]) -> list[Part]:
    """The tensors that have elements."""
    return [part for part in parts if part.numel]
