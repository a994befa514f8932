"""torch's ring attention adds float64 results in float32: a cast that should widen narrows."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

WORLD, POSITIONS = 2, 8
KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def work(rank: int, store: str) -> list[float]:
    """Largest errors of result and query gradient, by default and then without the cast."""
    file, time = dist.FileStore(store, WORLD), timedelta(seconds=60)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=WORLD, timeout=time)
    torch.manual_seed(0)
    heads = torch.randn(4, 2, 3, POSITIONS, 4, dtype=torch.float64)
    *whole, gradient = heads
    leaf = whole[0].clone().requires_grad_()
    right = torch.nn.functional.scaled_dot_product_attention(leaf, *whole[1:], is_causal=True)
    right.backward(gradient)
    part = slice(rank * POSITIONS // WORLD, (rank + 1) * POSITIONS // WORLD)
    query, key, value, back = (tensor[:, :, part].contiguous() for tensor in heads)
    ring._cp_options.enable_load_balance = False
    errors = []
    for narrow in (None, False):
        if narrow is not None:
            ring._cp_options.convert_to_f32 = narrow
        group = dist.group.WORLD
        out, lse = ring._templated_ring_attention(
            group, 2, KERNEL, query, key, value, is_causal=True
        )
        of_query, *_ = ring._templated_ring_attention_backward(
            *(group, 2, BACKWARD, back, "grad_out", query, key, value, out, lse),
            is_causal=True,
            dropout_p=0.0,
        )
        assert out.dtype == of_query.dtype == torch.float64
        for came, wanted in (out, right.detach()), (of_query, leaf.grad):
            errors.append(float((came - wanted[:, :, part]).abs().max()))
    return errors


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder, fork.Pool(WORLD) as pool:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        came = pool.starmap_async(work, arguments, 1).get(60)[1]
    default, exact = came[:2], came[2:]
    print(f"expected errors below 1e-14 in float64; came {default} by default")
    print(f"and {exact} with convert_to_f32 = False")
    present = max(exact) < 1e-14 and min(default) > 1e-10
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
