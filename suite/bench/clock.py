"""What time it is where the work is done: on the host's clock, or on the GPU's.

A call on a GPU returns when its work is queued, so the host's clock would time the queueing.
Events on the current stream are stamped by the GPU as it passes them; reading them waits once, at
the end, so that steps follow each other without a gap, as in training.  Work on other streams
counts from when the current stream waits for it, as after every collective that is not async.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch


def finish(device: str) -> None:
    """Wait until ``device`` has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()


class Clock:
    """Marks in the work of ``device``, and the seconds between them."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Here, after all that was asked for so far; returns without waiting for it."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds from each mark to the next, once the last one has been passed."""
        pairs = itertools.pairwise(self._marks)
        if not self._on_gpu:
            return [after - before for before, after in pairs]
        if self._marks:
            self._marks[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]
