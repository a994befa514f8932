"""Backend-neutral checks: ``check(rank, world)`` uses torch.distributed only and asserts.

Each compares with what one process computes.  Values are small integers, hence exact in any order,
unless a model is trained.  ``NEUTRAL`` lists all; ``STRICTER`` what gloo cannot do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

NEUTRAL: dict[str, Callable[[int, int], None]] = {}
STRICTER: dict[str, Callable[[int, int], None]] = {}

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)


def neutral(check: Callable[[int, int], None]) -> Callable[[int, int], None]:
    NEUTRAL[check.__name__] = check
    return check


def stricter(check: Callable[[int, int], None]) -> Callable[[int, int], None]:
    STRICTER[check.__name__] = check
    return check


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float64, salt: int = 0) -> Tensor:
    """Distinct small integers that any rank can compute for any other."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    values = (torch.arange(count) * 7 + rank * 3 + salt * 5) % 4 + 1
    return values.to(dtype).reshape(shape)


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def near(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


FOLDS: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda stack: stack.sum(0),
    dist.ReduceOp.MIN: lambda stack: stack.amin(0),
    dist.ReduceOp.MAX: lambda stack: stack.amax(0),
    dist.ReduceOp.PRODUCT: lambda stack: stack.prod(0),
}


# ------------------------------------------------------------------------------- collectives


@neutral
def all_reduce_every_op_and_dtype(rank: int, world: int) -> None:
    for dtype in (*FLOATS, *INTEGERS):
        stack = torch.stack([data(r, 5, dtype=dtype) for r in range(world)])
        for op, folded in FOLDS.items():
            tensor = stack[rank].clone()
            dist.all_reduce(tensor, op=op)
            same(tensor, folded(stack.double()).to(dtype))
    for dtype in (torch.float64, torch.float32):
        stack = torch.stack([data(r, 3, dtype=dtype) * world for r in range(world)])
        tensor = stack[rank].clone()
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        same(tensor, (stack.sum(0) / world))
    bits = [data(r, 4, dtype=torch.int64) for r in range(world)]
    for bit_op, apply in (
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
        (dist.ReduceOp.BXOR, torch.bitwise_xor),
    ):
        expected = bits[0]
        for other in bits[1:]:
            expected = apply(expected, other)
        tensor = bits[rank].clone()
        dist.all_reduce(tensor, op=bit_op)
        same(tensor, expected)


@neutral
def all_reduce_odd_shapes(rank: int, world: int) -> None:
    for shape in ((), (1,), (0,), (2, 0, 3), (3, 1, 2)):
        tensor = data(rank, *shape)
        dist.all_reduce(tensor)
        same(tensor, sum(data(r, *shape) for r in range(world)))
    complex_ = torch.complex(data(rank, 2), data(rank, 2, salt=1))
    dist.all_reduce(complex_)
    same(complex_.real, sum(data(r, 2) for r in range(world)))
    big = data(rank, 7, 5)
    view = big[2:4]
    dist.all_reduce(view)
    same(big[2:4], sum(data(r, 7, 5)[2:4] for r in range(world)))
    same(big[:2], data(rank, 7, 5)[:2])


@neutral
def rooted_collectives_with_every_root(rank: int, world: int) -> None:
    for root in range(world):
        tensor = data(rank, 4)
        dist.broadcast(tensor, root)
        same(tensor, data(root, 4))
        tensor = data(rank, 4)
        dist.reduce(tensor, root)
        if rank == root:
            same(tensor, sum(data(r, 4) for r in range(world)))
        lists = [torch.empty(3, dtype=torch.float64) for _ in range(world)]
        dist.gather(data(rank, 3), lists if rank == root else None, dst=root)
        if rank == root:
            same(lists, [data(r, 3) for r in range(world)])
        output = torch.empty(3, dtype=torch.float64)
        parts = [data(root, 3, salt=r) for r in range(world)]
        dist.scatter(output, parts if rank == root else None, src=root)
        same(output, data(root, 3, salt=rank))


@neutral
def all_gather_forms(rank: int, world: int) -> None:
    everyone = [data(r, 2, 3) for r in range(world)]
    outputs = [torch.empty(2, 3, dtype=torch.float64) for _ in range(world)]
    dist.all_gather(outputs, everyone[rank])
    same(outputs, everyone)
    joined = torch.empty(2 * world, 3, dtype=torch.float64)
    dist.all_gather_into_tensor(joined, everyone[rank])
    same(joined, torch.cat(everyone))
    place = torch.zeros(4 * world, dtype=torch.float64)
    place[4 * rank : 4 * rank + 4] = data(rank, 4)
    dist.all_gather_into_tensor(place, place[4 * rank : 4 * rank + 4])
    same(place, torch.cat([data(r, 4) for r in range(world)]))


@neutral
def reduce_scatter_forms(rank: int, world: int) -> None:
    def full(r: int) -> Tensor:
        return data(r, 2 * world, 3)

    for op, folded in FOLDS.items():
        expected = folded(torch.stack([full(r) for r in range(world)]))[2 * rank : 2 * rank + 2]
        output = torch.empty(2, 3, dtype=torch.float64)
        dist.reduce_scatter_tensor(output, full(rank), op=op)
        same(output, expected)
        output = torch.empty(2, 3, dtype=torch.float64)
        parts = [part.contiguous() for part in full(rank).chunk(world)]
        dist.reduce_scatter(output, parts, op=op)
        same(output, expected)
    output = torch.empty(2, 3, dtype=torch.float64)
    dist.reduce_scatter_tensor(output, full(rank) * world, op=dist.ReduceOp.AVG)
    same(output, sum(full(r)[2 * rank : 2 * rank + 2] for r in range(world)))


@neutral
def all_to_all_single_equal_and_uneven(rank: int, world: int) -> None:
    output = torch.empty(2 * world, dtype=torch.float64)
    dist.all_to_all_single(output, data(rank, 2 * world))
    same(output, torch.cat([data(r, 2 * world)[2 * rank : 2 * rank + 2] for r in range(world)]))
    sends = [r + 1 for r in range(world)]
    takes = [rank + 1] * world
    output = torch.empty(sum(takes), 2, dtype=torch.float64)
    dist.all_to_all_single(output, data(rank, sum(sends), 2), takes, sends)
    start = sum(sends[:rank])
    parts = [data(r, sum(sends), 2)[start : start + rank + 1] for r in range(world)]
    same(output, torch.cat(parts))


@neutral
def asynchronous_handles_and_futures(rank: int, world: int) -> None:
    tensors = [data(rank, 3, salt=k) for k in range(4)]
    handles = [dist.all_reduce(t, async_op=True) for t in tensors]
    for k in (2, 0, 3, 1):
        handles[k].wait()
        same(tensors[k], sum(data(r, 3, salt=k) for r in range(world)))
    output = torch.empty(world, dtype=torch.float64)
    handle = dist.all_gather_into_tensor(output, data(rank, 1), async_op=True)
    handle.wait()
    handle.wait()
    assert handle.is_completed()
    tensor = data(rank, 3)
    future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    same(future.wait(), 2 * sum(data(r, 3) for r in range(world)))
    dist.barrier()
    dist.barrier(async_op=True).wait()


@neutral
def coalesced_calls(rank: int, world: int) -> None:
    tensors = [data(rank, k + 1) for k in range(3)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    same(tensors, [sum(data(r, k + 1) for r in range(world)) for k in range(3)])
    outputs = [torch.empty(world * (k + 1), dtype=torch.float64) for k in range(2)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for k, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, data(rank, k + 1))
    manager.wait()
    same(outputs, [torch.cat([data(r, k + 1) for r in range(world)]) for k in range(2)])
    shards = [torch.empty(k + 1, dtype=torch.float64) for k in range(2)]
    with dist.distributed_c10d._coalescing_manager():
        for k, shard in enumerate(shards):
            dist.reduce_scatter_tensor(shard, data(rank, world * (k + 1)))
    for k, shard in enumerate(shards):
        total = sum(data(r, world * (k + 1)) for r in range(world))
        same(shard, total[(k + 1) * rank : (k + 1) * (rank + 1)])


@neutral
def objects(rank: int, world: int) -> None:
    found: list[Any] = [None] * world
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank})
    assert found == [{"rank": r, "text": "x" * r} for r in range(world)]
    box = [("hello", rank), None]
    dist.broadcast_object_list(box, src=world - 1)
    assert box == [("hello", world - 1), None]
    got: list[Any] = [None] * world
    dist.gather_object(rank * 2, got if rank == 0 else None, dst=0)
    if rank == 0:
        assert got == [2 * r for r in range(world)]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(world)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]


@neutral
def point_to_point(rank: int, world: int) -> None:
    right, left = (rank + 1) % world, (rank - 1) % world
    if world > 1:
        tensor = torch.empty(3, dtype=torch.float64)
        if rank % 2 == 0 and rank + 1 < world:
            dist.send(data(rank, 3), rank + 1)
        elif rank % 2:
            assert dist.recv(tensor, rank - 1) == rank - 1
            same(tensor, data(rank - 1, 3))
        tensors = [torch.empty(3, dtype=torch.float64) for _ in range(2)]
        sent = [dist.isend(data(rank, 3, salt=k), right, tag=k) for k in range(2)]
        got = [dist.irecv(tensors[k], left, tag=k) for k in (1, 0)]
        for handle in (*got, *sent):
            assert handle is not None
            handle.wait()
        same(tensors, [data(left, 3, salt=k) for k in range(2)])
        tensor = torch.empty(2, dtype=torch.float64)
        batch = [
            dist.P2POp(dist.irecv, tensor, left),
            dist.P2POp(dist.isend, data(rank, 2), right),
        ]
        for handle in dist.batch_isend_irecv(batch):
            handle.wait()
        same(tensor, data(left, 2))
    # from anybody
    dist.barrier()
    if rank == 0:
        seen = set()
        for _ in range(world - 1):
            tensor = torch.empty(1, dtype=torch.float64)
            source = dist.recv(tensor)
            assert tensor.item() == source * 11
            seen.add(source)
        assert seen == set(range(1, world))
    else:
        dist.send(torch.full((1,), rank * 11.0, dtype=torch.float64), 0)
    if world > 1 and rank < 2:  # some ranks only, then everybody: no counter may drift
        tensor = data(rank, 1)
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
    dist.barrier()


# ------------------------------------------------------------------------------------ groups


@neutral
def sub_groups(rank: int, world: int) -> None:
    members = [list(range(0, world, 2)), list(range(1, world, 2)) or [0]]
    groups = [dist.new_group(m) for m in members]
    for ranks, group in zip(members, groups, strict=True):
        if rank not in ranks:
            continue
        assert dist.get_rank(group) == ranks.index(rank)
        tensor = data(rank, 3)
        dist.all_reduce(tensor, group=group)
        same(tensor, sum(data(r, 3) for r in ranks))
        tensor = data(rank, 3)
        dist.broadcast(tensor, group_src=len(ranks) - 1, group=group)
        same(tensor, data(ranks[-1], 3))
        if len(ranks) > 1:
            tensor = data(rank, 3)
            if rank == ranks[0]:
                dist.send(tensor, ranks[1], group=group)
            elif rank == ranks[1]:
                dist.recv(tensor, ranks[0], group=group)
                same(tensor, data(ranks[0], 3))
        found: list[Any] = [None] * len(ranks)
        dist.all_gather_object(found, rank, group=group)
        assert found == ranks
    # two groups of the same ranks do not mix
    first, second = dist.new_group(), dist.new_group()
    a, b = data(rank, 2), data(rank, 2, salt=1)
    if rank % 2:
        handles = [
            dist.all_reduce(a, group=first, async_op=True),
            dist.all_reduce(b, group=second, async_op=True),
        ]
    else:
        handles = [
            dist.all_reduce(b, group=second, async_op=True),
            dist.all_reduce(a, group=first, async_op=True),
        ]
    for handle in handles:
        handle.wait()
    same((a, b), tuple(sum(data(r, 2, salt=k) for r in range(world)) for k in range(2)))
    dist.destroy_process_group(first)
    dist.all_reduce(b, group=second)


@neutral
def device_mesh(rank: int, world: int) -> None:
    shape = (2, 2) if world == 4 else (world, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    row, column = divmod(rank, shape[1])
    assert list(mesh.get_coordinate() or ()) == [row, column]
    tensor = data(rank, 3)
    dist.all_reduce(tensor, group=mesh.get_group("shard"))
    same(tensor, sum(data(row * shape[1] + k, 3) for k in range(shape[1])))
    tensor = data(rank, 3)
    dist.all_reduce(tensor, group=mesh.get_group("replicate"))
    same(tensor, sum(data(k * shape[1] + column, 3) for k in range(shape[0])))


@neutral
def functional_collectives(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    same(fc.all_reduce(data(rank, 3), "sum", group) + 0, sum(data(r, 3) for r in range(world)))
    gathered = fc.all_gather_tensor(data(rank, 2), 0, group) + 0
    same(gathered, torch.cat([data(r, 2) for r in range(world)]))
    scattered = fc.reduce_scatter_tensor(data(rank, 2 * world), "sum", 0, group) + 0
    same(scattered, sum(data(r, 2 * world) for r in range(world))[2 * rank : 2 * rank + 2])
    swapped = fc.all_to_all_single(data(rank, world), None, None, group) + 0
    same(swapped, torch.cat([data(r, world)[rank : rank + 1] for r in range(world)]))
    leaf = data(rank, 2).requires_grad_()
    fc.all_gather_tensor_autograd(leaf, 0, group).mul(2).sum().backward()
    same(leaf.grad, torch.full_like(leaf, 2.0 * world))


# -------------------------------------------------------------------------------- training


class Model(nn.Module):
    """Several units and, with small buckets, several buckets; sizes divide by 2, 3 and 4."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.inner = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.inner(torch.tanh(self.first(x)))))


def model(norm: bool = False) -> nn.Module:
    built = Model(norm).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            parameter.mul_(0.4)
    return built


def inputs(rank: int, step: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, 5, generator=generator, dtype=torch.float64)


def reference(world: int, steps: int = 3) -> dict[str, Tensor]:
    """Parameters after ``steps`` on the mean over all ranks' batches."""
    built = model()
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            x, y = inputs(rank, step)
            (nn.functional.mse_loss(built(x), y) / world).backward()
        optimizer.step()
    return dict(built.state_dict())


def train(wrapped: nn.Module, rank: int, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        x, y = inputs(rank, step)
        nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()


@neutral
def ddp(rank: int, world: int) -> None:
    expected = reference(world)
    for options in (
        {},
        {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True, "bucket_cap_mb": 1e-4},
        {"static_graph": True},
    ):
        built = model()
        if rank:
            with torch.no_grad():
                for parameter in built.parameters():
                    parameter.add_(rank)
        train(DistributedDataParallel(built, **options), rank)
        near(dict(built.state_dict()), expected)


@neutral
def ddp_buffers_and_accumulation(rank: int, world: int) -> None:
    built = model(norm=True)
    wrapped = DistributedDataParallel(built, bucket_cap_mb=1e-4)
    x, y = inputs(rank, 0)
    with wrapped.no_sync():
        nn.functional.mse_loss(wrapped(x), y).backward()
    x, y = inputs(rank, 1)
    nn.functional.mse_loss(wrapped(x), y).backward()
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, [p.grad for p in built.parameters()])
    same(gathered[rank], gathered[0])
    # The third forward starts from rank 0's buffers (the second does not: the first was no_sync).
    alone = model(norm=True)
    for source, step in ((0, 0), (0, 1), (rank, 2)):
        x, _ = inputs(source, step)
        alone(x)
    x, _ = inputs(rank, 2)
    wrapped(x)
    near(built.norm.running_mean, alone.norm.running_mean)


@neutral
def ddp_with_a_python_hook(rank: int, world: int) -> None:
    def hook(group, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations here
        tensor = bucket.buffer().div_(world)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    built = model()
    wrapped = DistributedDataParallel(built, bucket_cap_mb=1e-4)
    wrapped.register_comm_hook(dist.group.WORLD, hook)
    train(wrapped, rank)
    near(dict(built.state_dict()), reference(world))


def _fsdp(rank: int, world: int, mesh: Any, reshard: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    built = model()
    for unit in (built.first, built.inner, built.last):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(built, mesh=mesh, reshard_after_forward=reshard)
    train(built, rank)
    found = {name: value.full_tensor() for name, value in built.state_dict().items()}
    near(found, reference(world))


@neutral
def fsdp2_reshard(rank: int, world: int) -> None:
    _fsdp(rank, world, init_device_mesh("cpu", (world,)), True)


@neutral
def fsdp2_keep(rank: int, world: int) -> None:
    _fsdp(rank, world, init_device_mesh("cpu", (world,)), False)


@neutral
def hybrid_sharding(rank: int, world: int) -> None:
    shape = (2, 2) if world == 4 else (world, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    _fsdp(rank, world, mesh, True)


@neutral
def tensor_parallel(rank: int, world: int) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    built = model()
    mesh = init_device_mesh("cpu", (world,))
    parallelize_module(built, mesh, {"inner.0": ColwiseParallel(), "inner.2": RowwiseParallel()})
    alone = model()
    x, y = inputs(0, 0)
    nn.functional.mse_loss(built(x), y).backward()
    nn.functional.mse_loss(alone(x), y).backward()
    for found, expected in zip(built.parameters(), alone.parameters(), strict=True):
        grad = found.grad
        near(grad.full_tensor() if hasattr(grad, "full_tensor") else grad, expected.grad)


@neutral
def dtensor_redistribution(rank: int, world: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    full = data(0, 2 * world + 1, world)
    rows = distribute_tensor(full, mesh, [Shard(0)])
    same(rows.redistribute(mesh, [Shard(1)]).full_tensor(), full)
    same(rows.redistribute(mesh, [Replicate()]).to_local(), full)


def _pipeline(rank: int, world: int, name: str) -> None:
    from torch.distributed import pipelining

    layers = []
    generator = torch.Generator().manual_seed(5)
    for _ in range(world):
        layer = nn.Linear(4, 4).double()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator).double())
        layers.append(layer)
    alone = copy.deepcopy(nn.Sequential(*layers))
    x = torch.randn(4, 4, generator=generator).double()
    y = torch.randn(4, 4, generator=generator).double()
    stage = pipelining.PipelineStage(layers[rank], rank, world, torch.device("cpu"))
    micro = 4
    schedule = getattr(pipelining, name)(stage, micro, loss_fn=nn.functional.mse_loss)
    for _ in range(2):
        layers[rank].zero_grad()
        losses: list[Tensor] = []
        arguments = (x,) if rank == 0 else ()
        last = {"target": y, "losses": losses} if rank == world - 1 else {}
        schedule.step(*arguments, **last)
    nn.functional.mse_loss(alone(x), y).backward()
    for found, expected in zip(layers[rank].parameters(), alone[rank].parameters(), strict=True):
        near(found.grad, expected.grad)


@neutral
def pipeline_1f1b(rank: int, world: int) -> None:
    _pipeline(rank, world, "Schedule1F1B")


@neutral
def pipeline_gpipe(rank: int, world: int) -> None:
    _pipeline(rank, world, "ScheduleGPipe")


@neutral
def zero_redundancy_optimizer(rank: int, world: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    built = model()
    wrapped = DistributedDataParallel(built)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        x, y = inputs(rank, step)
        nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()
    near(dict(built.state_dict()), reference(world))


# ------------------------------------------------------------------- what gloo cannot do


@stricter
def strided_views(rank: int, world: int) -> None:
    base = data(rank, 4, 6)
    view = base.t()[1:3]
    dist.all_reduce(view)
    same(view, sum(data(r, 4, 6).t()[1:3] for r in range(world)))
    same(base.t()[:1], data(rank, 4, 6).t()[:1])
    output = torch.empty(3, 2 * world, dtype=torch.float64).t()
    dist.all_gather_into_tensor(output, data(rank, 3, 2).t())
    same(output, torch.cat([data(r, 3, 2).t() for r in range(world)]))
    shard = torch.empty(3, 2, dtype=torch.float64).t()
    dist.reduce_scatter_tensor(shard, data(rank, 3, 2 * world).t())
    total = sum(data(r, 3, 2 * world) for r in range(world)).t()
    same(shard, total[2 * rank : 2 * rank + 2])


@stricter
def uneven_all_gather(rank: int, world: int) -> None:
    outputs = [torch.empty(r + 1, dtype=torch.float64) for r in range(world)]
    dist.all_gather(outputs, data(rank, rank + 1))
    same(outputs, [data(r, r + 1) for r in range(world)])


@stricter
def in_place_with_any_overlap(rank: int, world: int) -> None:
    full = data(rank, 2 * world)
    dist.reduce_scatter_tensor(full[:2], full)  # not this rank's own chunk, unless rank is 0
    same(full[:2], sum(data(r, 2 * world) for r in range(world))[2 * rank : 2 * rank + 2])
    place = data(rank, world)
    dist.all_to_all_single(place, place)
    same(place, torch.cat([data(r, world)[rank : rank + 1] for r in range(world)]))
    wide = torch.zeros(2 * world, dtype=torch.float64)
    wide[:2] = data(rank, 2)
    dist.all_gather_into_tensor(wide, wide[:2])
    same(wide, torch.cat([data(r, 2) for r in range(world)]))


@stricter
def stacking_all_gather(rank: int, world: int) -> None:
    stacked = torch.empty(world, 2, 3, dtype=torch.float64)
    dist.all_gather_into_tensor(stacked, data(rank, 2, 3))
    same(stacked, torch.stack([data(r, 2, 3) for r in range(world)]))


@stricter
def all_to_all_lists(rank: int, world: int) -> None:
    outputs = [torch.empty(rank + 1, dtype=torch.float64) for _ in range(world)]
    dist.all_to_all(outputs, [data(rank, r + 1) for r in range(world)])
    same(outputs, [data(r, rank + 1) for r in range(world)])


@stricter
def left_fold_in_rank_order(rank: int, world: int) -> None:
    def values(r: int) -> Tensor:
        generator = torch.Generator().manual_seed(r)
        return torch.randn(999, generator=generator) * 10.0 ** (r * 3)

    expected = values(0)
    for r in range(1, world):
        expected = expected + values(r)
    tensor = values(rank)
    dist.all_reduce(tensor)
    same(tensor, expected)
    shard = torch.empty(999)
    dist.reduce_scatter_tensor(shard, values(rank).repeat(world))
    same(shard, expected)


@stricter
def powersgd_with_several_buckets(rank: int, world: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    built = model()
    wrapped = DistributedDataParallel(built, bucket_cap_mb=1e-4)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(wrapped, rank, steps=4)
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, dict(built.state_dict()))
    same(gathered[rank], gathered[0])
