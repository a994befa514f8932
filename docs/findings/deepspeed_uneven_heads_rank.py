"""DeepSpeed: DistributedAttention splits uneven heads by its globals' rank, not its group's."""

import os
import sys
import tempfile
from datetime import timedelta
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch.nn import functional as F

os.environ.setdefault("DS_ACCELERATOR", "cpu")
try:
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention
    from deepspeed.utils import groups
except ImportError:
    print("deepspeed is not installed")
    sys.exit(3)

WORLD = 2


def attention(*heads: torch.Tensor) -> torch.Tensor:
    """Causal attention of (samples, positions, heads, size)."""
    heads = [part.transpose(1, 2) for part in heads]
    return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)


def work(rank: int, store: str) -> list[str]:
    """Errors against one process: of 4 heads, of 3 heads, and of 3 heads with a mesh in globals."""
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_SIZE": str(WORLD)}
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # or it compiles C++
    rest = {"rank": rank, "world_size": WORLD, "timeout": timedelta(seconds=10)}
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), **rest)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, dist_init_required=False)
    mesh = dist.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("sequence_parallel",))
    torch.manual_seed(0)
    came = []
    for count, groups.mesh_device in (4, None), (3, mesh), (3, None):
        heads = torch.randn(3, 2, 8, count, 4, dtype=torch.float64)
        own = [part.chunk(WORLD, 1)[rank].contiguous() for part in heads]
        right = attention(*heads).chunk(WORLD, 1)[rank]
        try:
            split = DistributedAttention(attention, dist.group.WORLD, 2, 1)(*own, 0)
            came.append("right" if (split - right).abs().max() < 1e-12 else "wrong")
        except (RuntimeError, AssertionError) as error:
            came.append(type(error).__name__)
    return came


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, get_context("fork").Pool(WORLD) as pool:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        even, known, unknown = pool.starmap_async(work, arguments, 1).get(90)[1]
    print(f"expected 'right' for 4 heads and for 3; came {even} and {unknown} ({known} by globals)")
    present = even == known == "right" != unknown
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(not present)
