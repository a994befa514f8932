"""Host memory for state that does not fit on the device.

Problem.  Optimizer state is the largest part of a model's state and is touched once a step.  It can
rest, and be updated, in host memory; the device keeps what forward and backward compute with
(ZeRO-Offload, arXiv 2101.06840).

    offload       in host memory                                      on the device
    none          -                                                   all
    optimizer     masters, their gradients, optimizer state           parameters, gradients
    parameters    shards of parameters, their gradients and state     what is gathered; gradients

    beside a GPU        pinned host memory
    without one         memory mapped from unlinked files: the pages belong to files and not to the
                        process, copies between host and device are real copies, and the files
                        disappear with their memory, after a crash as well

    update     gradients are copied down in the dtype in which they were summed; the optimizer runs
               on the host; parameters are copied up in the dtype that is computed with (a blocking
               copy_ casts on the host)

Cost: bytes copied a step and rank, over the elements that it updates: gradients down + parameters
up (2 + 2 bytes per element in bf16: ZeRO-Offload, section 4.1).  They are no network traffic.  The
host holds masters, gradients and state of those elements.
Numbers: the optimizer does the same operations on the same values.
Left out: copying gradients bucket by bucket during backward, an update that overlaps with copies,
and disks (NVMe).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


class HostMemory:
    """Memory outside ``device``; files, if any, are created in ``folder``."""

    def __init__(self, device: torch.device | str, folder: Path | None = None) -> None:
        self.pinned = torch.device(device).type != "cpu"
        self.folder = folder

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros in host memory; an empty one takes no memory."""
        elements = torch.Size(shape).numel()
        if self.pinned:
            return torch.zeros(shape, dtype=dtype, pin_memory=True)
        # A file of no bytes cannot be mapped.
        if not elements:
            return torch.empty(shape, dtype=dtype)
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix="host-memory-") as file:
            file.truncate(elements * dtype.itemsize)
            # The mapping outlives the name, which goes here: a crash leaves no file behind.
            flat = torch.from_file(file.name, shared=True, size=elements, dtype=dtype)
        return flat.view(shape)

    def place(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` in host memory."""
        copy = self.zeros(tensor.shape, tensor.dtype)
        return copy.copy_(tensor.detach())

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in host memory."""
        if self.pinned:
            return tensor.device.type == "cpu"
        return not tensor.numel() or tensor.untyped_storage().filename is not None
