"""The memory ledger: every storage that a rank's tensors lie in, born, resized and freed.

``recorder`` writes the log of a rank while it runs, ``installed`` holds what must be patched in the
process meanwhile, ``log`` is the written log: plain data that is classed and replayed afterwards.
"""

from suite.ledgers.memory.installed import communicated, watch
from suite.ledgers.memory.log import CLASSES, MemoryLog, Peak
from suite.ledgers.memory.recorder import MemoryLedger
from suite.ledgers.memory.summary import summary, weighable

__all__ = [
    "CLASSES",
    "MemoryLedger",
    "MemoryLog",
    "Peak",
    "communicated",
    "summary",
    "watch",
    "weighable",
]
