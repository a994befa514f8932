"""Checksums of chunks: CRC-32, as in zip and Ethernet, which finds every flipped bit.

Chunks of a tensor are about a 64th of it, from a page (4 KiB, what a disk reads anyway) to 256 KiB.
So who needs a part of a tensor reads and verifies a few percent more at most, and a large tensor
costs few calls, in which other threads run.  Sizes follow from the tensor's; a change of the rule
is a change of the format.
"""

from __future__ import annotations

from array import array

try:  # Intel's ISA-L is 5 times as fast, on processors of others as well
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

PAGE, MOST = 4096, 256 << 10
#: Parts of a tensor.
_PARTS = 64
#: Checksums of one tensor: beyond that chunks are larger.
_MOST_SUMS = 1 << 16


def chunk_for(size: int) -> int:
    """Bytes per chunk of a tensor of ``size`` bytes: a power of two."""
    chunk = 1 << max(size // _PARTS, 1).bit_length() - 1
    chunk = min(max(chunk, PAGE), MOST)
    while chunk * _MOST_SUMS < size:
        chunk *= 2
    return chunk


class Sums:
    """Checksums of the chunks of one tensor, which arrives in blocks of any length."""

    def __init__(self, chunk: int) -> None:
        self.chunk, self.found = chunk, array("I")
        self._filled = self._sum = 0

    def feed(self, block: memoryview) -> None:
        """Add the next bytes."""
        while block:
            part = block[: self.chunk - self._filled]
            self._sum = crc32(part, self._sum)
            self._filled += len(part)
            block = block[len(part) :]
            if self._filled == self.chunk:
                self.end()

    def end(self) -> None:
        """Close the last chunk, which may be shorter."""
        if self._filled:
            self.found.append(self._sum)
            self._filled = self._sum = 0
