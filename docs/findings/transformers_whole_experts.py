"""transformers: gradients of experts are divided twice in float64 where fsdp_size = ep_size."""

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
NAMES = {"head": "lm_head.weight", "experts": "model.layers.0.mlp.experts.down_proj"}


def gradients(folder: str, dtype: torch.dtype, tokens: torch.Tensor, factor: int, **given) -> dict:
    """Of the sum of all squared logits, times ``factor``."""
    given |= {"dtype": dtype, "experts_implementation": "eager"}  # others take no float64
    model = Qwen3MoeForCausalLM.from_pretrained(folder, **given)
    (model(input_ids=tokens).logits.square().sum() * factor).backward()
    return {part: model.get_parameter(name).grad for part, name in NAMES.items()}


def work(rank: int, folder: str) -> dict[str, float]:
    """Norms of gradients on RANKS ranks over those of one process."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    tokens, came = torch.arange(8 * RANKS).view(RANKS, 8), {}
    for dtype in (torch.float32, torch.float64):
        one = gradients(folder, dtype, tokens, 1)
        config = DistributedConfig(fsdp_size=RANKS, ep_size=RANKS)
        # FSDP averages over ranks.
        many = gradients(folder, dtype, tokens[[rank]], RANKS, distributed_config=config)
        for part, whole in one.items():
            came[f"{part}, {dtype}"] = round(
                float(many[part].full_tensor().norm() / whole.norm()), 4
            )
    return came


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, get_context("fork").Pool(RANKS) as pool:
        Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**SIZES, **HEADS, num_experts=4, num_experts_per_tok=2)
        ).save_pretrained(place)
        found = pool.starmap_async(work, [(r, place) for r in range(RANKS)], 1).get(90)[0]
    print(f"expected gradients 1 times those of one process; came {found}")
    wrong = {name: times for name, times in found.items() if times != 1}
    print("DEFECT PRESENT" if wrong == {"experts, torch.float64": 0.5} else "defect absent: fixed?")
    sys.exit(wrong != {"experts, torch.float64": 0.5})
