"""The GPU that a rank computes on, and the settings that make its numbers comparable."""

from __future__ import annotations

import os
import socket

import torch


def available(world: int = 1, shared: bool = False) -> str | None:
    """Why ``world`` ranks cannot compute on the GPUs of this machine, ``None`` if they can.

    ``shared``: several ranks may take one GPU.  torch asks NVML, so that processes forked
    afterwards may still use CUDA.
    """
    count = torch.cuda.device_count()
    if count >= (1 if shared else world):
        return None
    present = f"{count} GPU{'s' if count > 1 else ''}" if count else "no GPU"
    wanted = "at least one GPU" if shared else f"a GPU for each of {world} rank(s)"
    return f"needs {wanted}, this machine has {present}"


def identity() -> str:
    """The GPU of this process, as no other on any machine is called."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    number = torch.cuda.current_device()
    return str(getattr(properties, "uuid", "") or f"{socket.gethostname()} GPU {number}")


def gpu_of(rank: int, count: int) -> int:
    """The GPU that ``rank`` takes of ``count``: one after the other, then from the first again."""
    return rank % count


def take(rank: int) -> None:
    """Let this process compute on the GPU of ``rank``, in full precision and repeatably.

    Call it before anything else uses CUDA in this process.
    """
    # cuBLAS reads it when its first handle is made; without it some sums differ between runs.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # TF32, the default of convolutions, keeps 10 bits of a float32; bounds of fp32 assume 23.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.set_device(gpu_of(rank, torch.cuda.device_count()))
    # DeviceMesh chooses a GPU by itself where CUDA is not initialised yet.
    torch.cuda.init()
