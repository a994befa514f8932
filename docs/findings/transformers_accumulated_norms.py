"""transformers: tensor parallelism reduces accumulated gradients of query and key norms again."""

import os
import sys
import tempfile
from multiprocessing import get_context

import torch
import torch.distributed as dist

try:
    import accelerate  # noqa: F401  (from_pretrained needs it to place parameters)
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.distributed import DistributedConfig
except ImportError as error:
    print(f"{error.name} is not installed")
    sys.exit(3)

RANKS = 2
SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "moe_intermediate_size": 8}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
NAME = "model.layers.0.self_attn.q_norm.weight"


def gradient(folder: str, passes: int, **given) -> torch.Tensor:
    """The gradient of the norm after ``passes`` equal backwards, over their number."""
    given |= {"dtype": torch.float32, "experts_implementation": "eager"}
    model = Qwen3MoeForCausalLM.from_pretrained(folder, **given)
    for _ in range(passes):
        model(input_ids=torch.arange(8)[None]).logits.square().sum().backward()
    return model.get_parameter(NAME).grad / passes


def work(rank: int, folder: str) -> list[float]:
    """Norms on RANKS ranks over those of one process: of one backward, and of two."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    one = gradient(folder, 1).norm()
    config = DistributedConfig(tp_size=RANKS)
    many = [gradient(folder, passes, distributed_config=config) for passes in (1, 2)]
    return [round(float(found.norm() / one), 3) for found in many]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, get_context("fork").Pool(RANKS) as pool:
        config = Qwen3MoeConfig(**SIZES, **HEADS, num_experts=4, num_experts_per_tok=2)
        Qwen3MoeForCausalLM(config).save_pretrained(place)
        once, twice = pool.starmap_async(work, [(r, place) for r in range(RANKS)], 1).get(90)[0]
    print(f"expected 1 times the gradient of one process; one backward: {once}, two: {twice}")
    present = once == 1 and twice == 1.5
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(not present)
