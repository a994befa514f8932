"""The memory ledger: every storage that a rank's tensors lie in, born, resized and freed.

``recorder`` writes the log of a rank while it runs, ``installed`` holds what must be patched in the
process meanwhile, ``log`` is the written log: plain data that is classed and replayed afterwards.
"""

from shardproof.ledgers.memory.installed import at_release, communicated, watch
from shardproof.ledgers.memory.log import MemoryLog
from shardproof.ledgers.memory.recorder import MemoryLedger
from shardproof.ledgers.memory.summary import summary

__all__ = [
    "MemoryLedger",
    "MemoryLog",
    "at_release",
    "communicated",
    "summary",
    "watch",
]
