"""The GPU that a rank computes on, and the settings that make its numbers comparable."""

from __future__ import annotations

import os
import socket

import torch

#: What a process that hides its GPUs saw before: their number, and what said which they are.
_hidden: tuple[int, str | None] | None = None
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def hide() -> None:
    """Let this process see no GPU from now on; ranks that it forks see theirs (:func:`take`).

    The optimizer of an oracle asks a GPU that it sees whether it captures, and a process that has
    used CUDA cannot fork one that does.
    """
    global _hidden
    if _hidden is None:
        _hidden = torch.cuda.device_count(), os.environ.get(_VISIBLE)
        os.environ[_VISIBLE] = ""
        # Else torch asks CUDA whether there is a GPU, which is a use of it.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def count() -> int:
    """GPUs of this machine that ranks may take."""
    return torch.cuda.device_count() if _hidden is None else _hidden[0]


def _show() -> None:
    global _hidden
    if _hidden is not None:
        _, visible = _hidden
        _hidden = None
        os.environ.pop(_VISIBLE)
        if visible is not None:
            os.environ[_VISIBLE] = visible


def available(world: int = 1, shared: bool = False) -> str | None:
    """Why ``world`` ranks cannot compute on the GPUs of this machine, ``None`` if they can.

    ``shared``: several ranks may take one GPU.  torch asks NVML, so that processes forked
    afterwards may still use CUDA.
    """
    there = count()
    if there >= (1 if shared else world):
        return None
    present = f"{there} GPU{'s' if there > 1 else ''}" if there else "no GPU"
    wanted = "at least one GPU" if shared else f"a GPU for each of {world} rank(s)"
    remedy = "" if there else ": run where `nvidia-smi` lists a GPU, with a torch for CUDA"
    return f"needs {wanted}, but this machine has {present}{remedy}"


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
    _show()
    # cuBLAS reads it when its first handle is made; without it some sums differ between runs.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # TF32, the default of convolutions, keeps 10 bits of a float32; bounds of fp32 assume 23.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.set_device(gpu_of(rank, torch.cuda.device_count()))
    # DeviceMesh chooses a GPU by itself where CUDA is not initialised yet.
    torch.cuda.init()
