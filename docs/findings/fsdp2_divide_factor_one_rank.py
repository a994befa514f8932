"""FSDP2: a custom gradient divisor is applied twice where a shard group has one rank."""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

FACTOR = 2.0


def gradient(dtype: torch.dtype, forced_sum: bool) -> float:
    """The gradient of a weight whose gradient is 1 before the division by FACTOR."""
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    fully_shard(model)
    model.set_gradient_divide_factor(FACTOR)
    model.set_force_sum_reduction_for_comms(forced_sum)
    model(torch.ones(1, 1, dtype=dtype)).sum().backward()
    return model.weight.grad.to_local().item()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1
        )
        came = {
            "float32": gradient(torch.float32, False),
            "float64": gradient(torch.float64, False),
            "float16": gradient(torch.float16, False),
            "float32, forced sums": gradient(torch.float32, True),
        }
        dist.destroy_process_group()
    wrong = {name: value for name, value in came.items() if value != 1 / FACTOR}
    print(f"expected a gradient of {1 / FACTOR} in each; came {came}")
    present = wrong == dict.fromkeys(("float64", "float16", "float32, forced sums"), 0.25)
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
