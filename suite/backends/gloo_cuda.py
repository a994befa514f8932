"""gloo with tensors on GPUs, which it copies through the host."""

from __future__ import annotations

from typing import ClassVar

from shardproof.backends.backend import Algorithms, Takes
from shardproof.backends.gloo import Gloo


class GlooCuda(Gloo):
    """Ranks may share a GPU, which NCCL refuses; torch's gloo sends no CUDA tensor to one rank."""

    name = "gloo_cuda"
    torch_name = Gloo.name
    title = "gloo with CUDA tensors"
    device = "cuda"
    shares_devices = True
    sends = False
    takes_over = True
    skips_if_missing = True
    has_own_calls = True
    algorithms: ClassVar[Algorithms | None] = None
    takes: ClassVar[Takes] = {
        **Gloo.takes,
        "all_reduce": {"form": ("tensor",)},  # "unsupported device type cuda"
        "all_to_all": {"form": ("tensor", "uneven")},  # before torch 2.13
        "send_recv": None,
        "batch": None,
    }
    remedy = "run on a machine with a GPU, with a build of torch with CUDA; skipped until then"
