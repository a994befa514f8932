"""Host memory: real files without names, moves that are seen and counted, formulas."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.contract import OptimizerSpec, Refused
from shardproof.costs import ModelFacts, cost_model_of
from shardproof.costs.model_facts import TensorFacts
from shardproof.impls.reference.engine.masters import Masters
from shardproof.impls.reference.engine.offload import HostMemory
from shardproof.impls.reference.engine.optimizer import (
    build_optimizer,
    param_groups,
    seed_state,
    set_learning_rate,
    slot_pieces,
)
from shardproof.impls.reference.zero1 import ReferenceZero1
from shardproof.impls.reference.zero2 import ReferenceZero2
from shardproof.ledgers.memory.log import MemoryLog
from shardproof.ledgers.memory.recorder import MemoryLedger
from shardproof.ledgers.memory.summary import summary


def test_files_without_names(tmp_path: Path) -> None:
    host = HostMemory("cpu", tmp_path)
    first = host.place(torch.arange(6.0).view(2, 3))
    empty, number = host.zeros((0, 3), torch.float32), host.zeros((), torch.float64)
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]] and number.item() == 0
    assert host.holds(first) and host.holds(number) and host.holds(empty)
    assert not host.holds(torch.ones(1))
    assert first.untyped_storage().nbytes() == 24
    assert not list(tmp_path.iterdir()), "nothing is left behind, whatever happens"


def test_the_ledger_sees_every_file_and_every_move(tmp_path: Path) -> None:
    phase = "setup"
    ledger = MemoryLedger(lambda: phase)
    with ledger, tempfile.NamedTemporaryFile(dir=tmp_path) as file:
        file.truncate(400)
        device = torch.ones(100)
        host = HostMemory("cpu", tmp_path).zeros((100,), torch.float32)
        other = torch.empty(0).set_(torch.UntypedStorage.from_file(file.name, True, 400))
        ledger.mark("born")
        phase, ledger.step = "update", 0
        host.copy_(device)  # down
        host.copy_(host * 2)  # down: what is computed lies where torch puts it
        other.copy_(host)  # stays
        device.copy_(other)  # up
        host[:10].to(torch.bfloat16)  # up, in the device's dtype
        torch.ones(3, dtype=torch.int64).copy_(torch.zeros(3, dtype=torch.int64))
        phase = "observe"
        host.clone()
    log = MemoryLog.from_dict(ledger.log.to_dict())
    assert log.moved == {(0, "update", "down"): 800, (0, "update", "up"): 420}
    born = [row for row in summary(log) if (row.where, row.device) == ("born", "file")]
    assert sum(row.bytes for row in born if row.kind != "all") == 800


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_an_update_on_the_host_is_the_same_update(name: Any, dtype: torch.dtype) -> None:
    spec = OptimizerSpec(name=name, lr=0.1, weight_decay=0.1)
    found = {}
    for host in (None, HostMemory("cpu")):
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(40, generator=generator).to(dtype)
        idle = torch.ones(3, dtype=dtype)
        groups: list[Mapping[str, Any]] = [{"params": [("w", weight), ("idle", idle)]}]
        masters = Masters(groups, {"w": torch.float32, "idle": torch.float32}, host)
        optimizer = build_optimizer(spec, [{"lr_scale": 1.0, **g} for g in masters.groups])
        for _ in range(3):
            weight.grad = torch.randn(40, generator=generator).to(dtype)
            masters.copy_down()
            if host:
                seed_state(optimizer, spec, host)
            optimizer.step()
            masters.copy_up()
        state = [v for slots in optimizer.state.values() for v in slots.values()]
        assert host is None or all(host.holds(value) for value in state)
        found[host is None] = [weight, idle, *state]
    assert len(found[True]) == len(found[False])
    for here, there in zip(*found.values(), strict=True):
        assert torch.equal(here, there)


def plan(strategy: str, offload: str, ranks: int = 2, **more: Any) -> Any:
    options = {"offload": offload, "wrap": {"units": []}, **more}
    axes = {"shard": ranks}
    tensors = (
        TensorFacts("a", (5, 3), "float32", owners=("",)),
        TensorFacts("b.c", (4,), "float32", owners=("b",)),
    )
    modules = {"": "Net", "b": "Block"}
    made = ModelFacts(
        axes, options, tensors, modules=modules, micro_batches=(2, 1), optimizer="adamw"
    )
    cost_model = cost_model_of(strategy, made)
    assert cost_model is not None
    return cost_model


def test_formulas_by_hand() -> None:
    # 19 elements, 20 with padding, 10 a rank; rank 1 updates 9 of 2 parts or fewer.
    zero1 = plan("zero1", "optimizer")
    assert zero1.resident(0, 0, 0)["optimizer_state"] == zero1.resident(0, 0, 0)["masters"] == 0
    assert sum(zero1.host(rank, 0, 0)["masters"] for rank in (0, 1)) == 4 * 19
    assert zero1.host(0, 0, -1)["optimizer_state"] == 0
    moved = [zero1.host_traffic(rank, 0, 0) for rank in (0, 1)]
    assert [sum(m[way] for m in moved) for way in ("down", "up")] == [4 * 19, 4 * 19]
    assert zero1.host_traffic(0, 1, 0) == {"down": 0, "up": 0}, "a skipped update moves nothing"
    narrow = plan("zero2", "optimizer", precision={"parameters": "bfloat16", "reduce": "float32"})
    moved = [narrow.host_traffic(rank, 0, 0) for rank in (0, 1)]
    assert [sum(m[way] for m in moved) for way in ("down", "up")] == [4 * 19, 2 * 19]
    zero3 = plan("zero3", "parameters")
    assert set(zero3.resident(0, 0, 0).values()) == {0}
    assert zero3.host(0, 0, 0)["parameters"] == 40
    # Two rounds, each gathers twice.
    assert zero3.host_traffic(0, 0, 0) == {"down": 40, "up": 4 * 40}
    # The root of FSDP stays whole until backward is over; a unit does so if it is kept.
    unit = {"wrap": {"units": ["b"]}}
    moved = [
        plan("fsdp", "parameters", **unit, **options).host_traffic(0, 0, 0)["up"]
        for options in (
            {},
            {"sharding_strategy": "SHARD_GRAD_OP"},
            {"sharding_strategy": "SHARD_GRAD_OP", "accumulate_without_communication": True},
            {"accumulate_without_communication": True},
        )
    ]
    root, block = 4 * 8, 4 * 2
    twice, once = 2 * root + 4 * block, 2 * root + 2 * block
    assert moved == [twice, once, root + block, twice]
    # What is cut over neighbours meanwhile rests on the device; over all ranks it is the shards.
    for ranks, times in ((2, 4), (4, 2)):
        cut = plan("fsdp", "parameters", ranks, **unit, reshard_after_forward=2)
        root, block = (4 * -(-n // ranks) for n in (15, 4))
        assert cut.host_traffic(0, 0, 0)["up"] == 2 * root + times * block
    assert plan("zero3", "none").host_traffic(0, 0, 0) == {"down": 0, "up": 0}
    assert plan("zero3", "none").payload() == zero3.payload()


@pytest.mark.parametrize("implementation", [ReferenceZero1, ReferenceZero2])
def test_whole_parameters_cannot_rest_on_the_host(implementation: Any) -> None:
    with pytest.raises(Refused, match="'offload' = 'parameters'"):
        implementation.capabilities({"offload": "parameters"})
    with pytest.raises(Refused, match="none, optimizer, parameters"):
        implementation.capabilities({"offload": "disk"})


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_rank_without_elements_has_an_optimizer(name: str) -> None:
    """With more ranks than elements the last shards are empty."""
    spec = OptimizerSpec(name)
    optimizer = build_optimizer(spec, param_groups(spec, {}))
    set_learning_rate(optimizer, spec, 0)
    optimizer.step()
    assert slot_pieces(optimizer, lambda *_: pytest.fail("there is no slot")) == []
