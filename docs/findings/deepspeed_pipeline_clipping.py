"""DeepSpeed's pipeline engine clips gradients by the norm of stage 0 alone."""

import multiprocessing
import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

try:
    import deepspeed
except ImportError:
    print("deepspeed is not installed")
    sys.exit(3)

WORLD, LIMIT = 2, 0.1


def train(rank: int, store: str) -> float:
    """The sum of squares of this stage's clipped gradients; SGD at rate 1 shows them."""
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles C++
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    model = deepspeed.pipe.PipelineModule(layers, WORLD, loss_fn=nn.functional.mse_loss)
    own = list(model.parameters())
    before = [p.detach().clone() for p in own]
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": LIMIT}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(own, lr=1.0), config=config, dist_init_required=False
    )
    engine.train_batch(iter([(torch.randn(8, 4), 10 * torch.ones(8, 4))]))
    return sum(float(((p - old) ** 2).sum()) for p, old in zip(own, before, strict=True))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        with multiprocessing.get_context("fork").Pool(WORLD) as pool:
            squares = pool.starmap_async(train, arguments, 1).get(100)
    norm, first = sum(squares) ** 0.5, squares[0] ** 0.5
    present = norm > 1.01 * LIMIT and abs(first - LIMIT) < 0.01 * LIMIT
    print(f"expected a clipped norm of {LIMIT}; came {norm:.4f}, that of stage 0 alone {first:.4f}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
