"""ZeRO-1 and ZeRO-2: equal to DDP, in shards, whoever computes how much; what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from local_ranks import succeed
from pieces import assembled
from torch import Tensor, nn

from shardproof import registry, workloads
from shardproof.case import WorkloadSpec
from shardproof.comm import Mesh
from shardproof.contract import KINDS, Batch, MicroBatch, OptimizerSpec, Piece, Point, Refused
from shardproof.impls.reference import ddp, zero1, zero2
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.parts.sharded_update import ShardedUpdate
from shardproof.ledgers import program_order, traffic
from shardproof.workloads import Workload, suggested_groups

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"bucket_bytes": 2_000}
AXES = {"reference/ddp": "replicate", "reference/zero1": "shard", "reference/zero2": "shard"}
MIXED = (
    *("unused", "frozen", "conditional_by_rank", "conditional_by_micro_batch"),
    *(
        "conditional_late_step",
        "conditional_early_step",
        "unequal_tokens",
        "unequal_micro_batches",
        "two_groups",
    ),
    *("scalar", "one_element", "empty", "prime_sized", "smaller_than_world", "non_contiguous"),
)
ZEROS = ("reference/zero1", "reference/zero2")
Rank = dict[str, Any]


def workload(*traits: str, **knobs: Any) -> Workload:
    """A GPT of width 8 and 2 layers."""
    sizes = {"width": 8, "heads": 2, "seq": 8, "layers": 2}
    knobs = {"global_batch": 12, "micro_batches": 2} | knobs
    return workloads.make(WorkloadSpec("charnames_gpt", traits=traits, params=sizes, **knobs))


def make(
    name: str, work: Workload, spec: OptimizerSpec, rank: int, world: int, **options: Any
) -> Engine:
    """The implementation on this rank, set up; rank 0 alone has the state."""
    system = registry.load(name)()
    assert isinstance(system, Engine)
    state = work.state() if rank == 0 else None
    mesh = Mesh({AXES[name]: world})
    system.setup(work.build_for(rank), state, spec, mesh, SMALL | options)
    return system


def pieces(held: list[Piece]) -> list[dict[str, Any]]:
    """Copies, as the judge makes them."""
    return [vars(piece) | {"tensor": piece.tensor.clone()} for piece in held]


def drive(system: Engine, batches: list[Batch]) -> list[dict[str, Any]]:
    """Steps over ``batches``; what the rank held at every point."""
    moments = []
    for batch in batches:
        seen: dict[str, Any] = {}

        def observe(point: Point, seen: dict[str, Any] = seen) -> None:
            for kind in KINDS:
                seen[f"{point} {kind}"] = pieces(system.local_state(kind))

        system.step(batch, observe)
        assert not system.local_state("gradients"), "gradients must be cleared"
        moments.append(seen)
    return moments


def whole(ranks: list[list[dict[str, Any]]], step: int, moment: str) -> dict[str, Tensor]:
    """What the ranks held, put together; every element once."""
    state = assembled({rank: moments[step][moment] for rank, moments in enumerate(ranks)})
    assert not state.problems, state.problems
    return state.first()


MOMENTS = ("gradients_final gradients", "after_update parameters", "after_update optimizer")


@pytest.mark.parametrize(("world", "optimizer"), [(1, "sgd"), (3, "adamw"), (5, "sgd")])
def test_zero1_is_ddp_bit_for_bit(world: int, optimizer: Any) -> None:
    spec = OptimizerSpec(optimizer, 0.01, weight_decay=0.1, groups=suggested_groups(MIXED))
    work = workload(*MIXED)

    def body(name: str) -> Callable[[int, int], Any]:
        def run(rank: int, size: int) -> Any:
            system = make(name, work, spec, rank, size)
            moments = drive(system, [work.batch(step, size)[rank] for step in range(3)])
            system.close()
            return moments

        return run

    ddp, zero = (succeed(body(name), world) for name in ("reference/ddp", "reference/zero1"))
    for step in range(3):
        for moment in MOMENTS:
            want, have = whole(ddp, step, moment), whole(zero, step, moment)
            assert set(want) == set(have), moment
            differing = [name for name in want if not torch.equal(want[name], have[name])]
            assert not differing, f"step {step}, {moment}"


@pytest.mark.parametrize("name", ZEROS)
def test_state_is_sharded(name: str) -> None:
    """Each rank has 1/N of the optimizer's elements, and of ZeRO-2's gradients in memory."""
    work, spec, world = workload(), OptimizerSpec("adamw", 0.01), 3

    def body(rank: int, size: int) -> tuple[int, int, int]:
        system = make(name, work, spec, rank, size)
        drive(system, [work.batch(0, size)[rank]])
        slots = [p for p in system.local_state("optimizer") if p.name.endswith(".exp_avg")]
        buckets = system.handle.buckets  # type: ignore[attr-defined]
        full = sum(0 if b.full is None else b.full.numel() for b in buckets)
        padded = sum(b.layout.padded_numel for b in buckets)
        return sum(p.tensor.numel() for p in slots), full, padded

    sizes = succeed(body, world)
    total = sum(p.numel() for p in work.model("meta").parameters())
    assert sum(own for own, _, _ in sizes) == total
    for own, full, padded in sizes:
        assert own <= padded // world
        assert full == (padded if name == "reference/zero1" else 0)


@pytest.mark.parametrize("name", ZEROS)
def test_ranks_without_micro_batches_take_part(name: str) -> None:
    """Rank 1 has nothing to do in step 0, nobody has in step 1: no gradients, no update."""
    work, spec = workload(), OptimizerSpec("sgd", 0.1, clip_norm=0.05)

    def body(rank: int, size: int) -> Any:
        system = make(name, work, spec, rank, size)
        first = work.batch(0, size)[rank]
        idle = Batch(0, ())
        return drive(
            system, [first if rank == 0 else idle, Batch(1, ()), work.batch(2, size)[rank]]
        )

    ranks = succeed(body, 2)
    assert whole(ranks, 0, "gradients_final gradients")
    assert not whole(ranks, 1, "gradients_final gradients")
    before, after = (whole(ranks, step, "after_update parameters") for step in (0, 1))
    assert all(torch.equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("name", ZEROS)
def test_state_can_be_gathered_and_put_back(name: str) -> None:
    """A system that is given another's state goes on as that one does."""
    work, spec = workload("scalar", "empty", "frozen"), OptimizerSpec("adamw", 0.01)

    def body(rank: int, size: int) -> None:
        batches = [work.batch(step, size)[rank] for step in range(2)]
        old = make(name, work, spec, rank, size)
        drive(old, batches[:1])
        new = make(name, work, spec, rank, size)
        for kind in ("parameters", "buffers", "optimizer"):
            new.load_pieces(kind, old.local_state(kind))  # type: ignore[arg-type]
        loss, gathered = old.evaluate(batches[1]), old.full_state("optimizer")
        assert torch.equal(loss, new.evaluate(batches[1]))
        assert {n: t.shape for n, t in gathered.items()} == {
            f"{n}.{slot}": () if slot == "step" else p.shape
            for n, p in work.model("meta").named_parameters()
            if p.requires_grad
            for slot in ("step", "exp_avg", "exp_avg_sq")
        }
        mine = {p.name: p for p in old.local_state("optimizer")}
        for slot, piece in mine.items():
            start, stop = piece.flat_range or (0, 1)
            assert torch.equal(gathered[slot].view(-1)[start:stop], piece.tensor.view(-1))
        drive(old, batches[1:])
        drive(new, batches[1:])
        for kind in ("parameters", "optimizer"):
            want, have = old.full_state(kind), new.full_state(kind)  # type: ignore[arg-type]
            assert set(want) == set(have)
            assert all(torch.equal(want[n], have[n]) for n in want)
        with pytest.raises(ValueError, match="does not hold 'nobody'"):
            new.load_pieces("parameters", [Piece.whole("nobody", torch.zeros(1))])
        with pytest.raises(KeyError, match="does not update 'nobody'"):
            new.load_pieces("optimizer", [Piece.whole("nobody.step", torch.zeros(1))])

    succeed(body, 3)


def reductions(name: str, work: Workload, world: int, steps: int) -> list[list[traffic.LoggedCall]]:
    """The reduce-scatters of each rank in its last step."""

    def body(rank: int, size: int) -> list[traffic.LoggedCall]:
        system = make(name, work, OptimizerSpec("sgd", 0.1), rank, size)
        ledger, log = traffic.current(), program_order.current()
        assert ledger is not None
        assert log is not None
        for step in range(steps):
            first = len(ledger.calls)
            with log.step(step):
                system.step(work.batch(step, size)[rank], lambda point: None)
        return [call for call in ledger.calls[first:] if call.operation == "reduce_scatter"]

    return succeed(body, world, ledgers=True)


@pytest.mark.parametrize(("name", "rounds"), [("reference/zero1", 1), ("reference/zero2", 2)])
def test_buckets_leave_during_backward(name: str, rounds: int) -> None:
    for calls in reductions(name, workload(), 2, 1):
        assert len(calls) >= 4 * rounds
        assert all(call.inside_backward for call in calls)


@pytest.mark.parametrize(("name", "rounds"), [("reference/zero1", 1), ("reference/zero2", 2)])
def test_unused_parameters_hold_up_their_own_bucket_only(name: str, rounds: int) -> None:
    """From the second step on: the first one shows which bucket is never full."""
    work = workload("conditional_by_rank")
    for calls in reductions(name, work, 2, 2):
        late = [call for call in calls if not call.inside_backward]
        assert len(late) <= 2 * rounds < len(calls)


def test_late_buckets_are_the_same_everywhere() -> None:
    work = workload("conditional_by_rank", "unused")

    def body(rank: int, size: int) -> tuple[set[int], list[str]]:
        system = make("reference/zero1", work, OptimizerSpec("sgd", 0.1), rank, size)
        drive(system, [work.batch(step, size)[rank] for step in range(2)])
        handle = system.handle
        assert isinstance(handle, zero1.Zero1)
        return handle.late, [bucket.layout.names[0] for bucket in handle.queue]

    queues = succeed(body, 3)
    assert queues[0][0]
    assert all(one == queues[0] for one in queues)


def test_several_dtypes_in_one_model() -> None:
    """Each dtype has buckets of its own."""

    def body(rank: int, size: int) -> None:
        torch.manual_seed(0)
        for module in (zero1, zero2):
            net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
            handle = module.apply(
                net, {"shard": Mesh({"shard": size}).comm("shard")}, _small(module)
            )
            assert {b.layout.dtype for b in handle.buckets} == {torch.float32, torch.float64}
            handle.before_step(1)
            handle.accumulate(is_last=True)
            net[1](net[0](torch.ones(1, 3)).double()).sum().backward()
            handle.finish()
            held = sum(p.tensor.numel() for p in handle.pieces("gradients"))
            assert 24 // size - 4 <= held <= 24 // size + 4

    def _small(module: Any) -> Any:
        return module.Options(bucket_bytes=64)

    succeed(body, 3)


def test_reduction_in_another_dtype_than_computation() -> None:
    """bf16 parameters, gradients that are summed in fp32: the targets' gradients are fp32."""
    precision = {"parameters": "bfloat16", "reduce": "float32"}
    work = workload()

    def one(name: str, rank: int, size: int) -> set[torch.dtype]:
        system = make(name, work, OptimizerSpec("sgd", 0.1), rank, size, precision=precision)
        handle = system.handle
        assert isinstance(handle, ShardedUpdate)
        assert {p.dtype for p in handle.module.parameters()} == {torch.bfloat16}
        seen: set[torch.dtype] = set()

        def observe(point: Point) -> None:
            seen.update(g.dtype for g in handle.gradients().values())

        system.step(work.batch(0, size)[rank], observe)
        return seen

    def body(rank: int, size: int) -> None:
        for name in ZEROS:
            assert one(name, rank, size) == {torch.float32}

    succeed(body, 2)


@pytest.mark.parametrize("module", [ddp, zero1, zero2])
def test_a_gradient_after_its_bucket_was_sent_is_an_error(module: Any) -> None:
    def body(rank: int, size: int) -> None:
        axis = "replicate" if module is ddp else "shard"
        comms = {axis: Mesh({axis: size}).comm(axis)}
        handle = module.apply(nn.Linear(2, 2), comms, module.Options())
        handle.before_step(1)
        handle.accumulate(is_last=True)
        handle.module(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="after its bucket was sent"):
            handle.module(torch.ones(1, 2)).sum().backward()

    succeed(body, 1)


@pytest.mark.parametrize("module", [zero1, zero2])
def test_frozen_model_takes_its_steps(module: Any) -> None:
    def body(rank: int, size: int) -> None:
        comms = {"shard": Mesh({"shard": size}).comm("shard")}
        net = nn.Linear(2, 2).requires_grad_(False)
        handle = module.apply(net, comms, module.Options())
        for _ in range(2):
            handle.before_step(0)
            handle.finish()
            assert not handle.pieces("gradients")
            handle.after_update()
            handle.after_step()

    succeed(body, 2)


@pytest.mark.parametrize("name", ZEROS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_bytes": 0}, "'bucket_bytes' must be at least 1"),
        ({"offload": "parameters"}, "set offload to 'none' or 'optimizer'"),
        ({"bucket_byte": 1}, "did you mean 'bucket_bytes'"),
    ],
)
def test_options_that_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        registry.load(name).capabilities(options)


def test_micro_batches_may_be_of_any_number() -> None:
    """Three ranks with 0, 1 and 3 micro-batches: ZeRO-2 reduces three times, to the same sum."""
    work = workload(global_batch=12, micro_batches=4)
    micros: list[MicroBatch] = work.batch(0, 1)[0].micro_batches
    shares = [micros[:0], micros[:1], micros[1:]]

    def body(rank: int, size: int) -> Any:
        moments = {}
        for name in ZEROS:
            system = make(name, work, OptimizerSpec("sgd", 0.1), rank, size)
            moments[name] = drive(system, [Batch(0, (tuple(shares[rank]),))])
        return moments

    ranks = succeed(body, 3)
    one, two = (whole([t[n] for t in ranks], 0, MOMENTS[0]) for n in ZEROS)
    assert all(torch.allclose(one[n], two[n], rtol=1e-12, atol=1e-15) for n in one)
