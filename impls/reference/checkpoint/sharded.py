"""The format sharded: every rank writes its own state; no tensor is gathered, copied or sent.

    rank 0     describe --+            +-- rank-00000 ---- index --+        +-- manifest
    rank 1     describe --+-- agree ---+-- rank-00001 ---- index --+-- ok --+
    rank 2     describe --+            +-- rank-00002 ---- index --+        +

    agree      who writes which copy of what (agreement.py): messages of names and places only
    write      straight from the tensors that train, one after the other
    ok         every rank's files are on the disk; one that failed makes all fail, nothing counts
    manifest   rank 0 (commit.py); all return when it is there

Cost: with a state of S bytes over all ranks, copies counted once, S is written in all and about
S / N by each of N ranks, where copies allow; 0.2 % of it for checksums.  Memory: none but one
contiguous copy of a tensor that is not contiguous or not in host memory.
Numbers: bits are kept as they are, in the dtype in which a rank holds them.
Source: the idea of one file a rank and planned writes is that of torch.distributed.checkpoint
(docs "Distributed Checkpoint"); what is new is the checksum and that a name is synced before the
manifest that vouches for it (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014).
"""

from __future__ import annotations

from pathlib import Path

from shardproof.impls.reference.checkpoint.agreement import State, own_writes
from shardproof.impls.reference.checkpoint.saver import Saver
from shardproof.impls.reference.checkpoint.writing import stem_of, write_pair


class Sharded(Saver):
    """Save the checkpoints of one run; every rank writes its part before training continues."""

    kind = "sharded"

    def save(self, state: State) -> Path:
        """Save; a collective call. Return the folder of the committed checkpoint.

        :raises CheckpointError: on all ranks, if one cannot; nothing is committed.
        """
        with self.abandoned_if_it_fails():
            agreed = self.agree(state)
            tensors = own_writes(agreed, state, self.rank)
            # Nothing is copied: training waits, so no tensor changes under the writer.
            listed = self.together.all(
                lambda: write_pair(self.layer, agreed, stem_of(self.rank), tensors)
            )
            self.commit_everywhere(agreed, state.about, listed)
        return agreed.folder
