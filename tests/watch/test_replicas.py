"""Which ranks are taken to hold the same: wrappers, meshes, sharded systems, and what users say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from watched_script import watch

from shardproof.errors import SelectionError
from shardproof.watch import replica_sets

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("forked_ranks")]


def test_sharded_parameters_are_listed_and_not_compared(command: Any, tmp_path: Path) -> None:
    """FSDP2, FSDP1 and ZeroRedundancyOptimizer, one optimizer after the other."""
    body = """\
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

sharded = fully_shard(make(), mesh=init_device_mesh("cpu", (world,)))
steps(sharded, torch.optim.AdamW(sharded.parameters()))
flat = FullyShardedDataParallel(make(), device_id=torch.device("cpu"), use_orig_params=True)
steps(flat, torch.optim.AdamW(flat.parameters()))
whole = DistributedDataParallel(make())
kept = ZeroRedundancyOptimizer(whole.parameters(), torch.optim.AdamW)
steps(whole, kept)
"""
    code, told, (fsdp2, fsdp1, zero), report = watch(command, tmp_path, body)
    assert (code, report["verdict"]) == (0, "pass"), told
    for seen in (fsdp2, fsdp1):
        assert seen["tracked"] == 0 and seen["steps"] == 3
        assert {*seen["not_compared"].values()} == {"sharded: each rank has a part of it"}
    assert zero["tracked"] == 4 and zero["counts"]["parameters"] == 4
    assert zero["not_compared"] == {"optimizer state": "the optimizer shows no state"}
    assert "optimizer state" not in zero["counts"]
    assert "not compared: " in told and "0.weight" in told


def test_replicas_of_a_mesh_are_compared_where_it_replicates(command: Any, tmp_path: Path) -> None:
    body = """\
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = fully_shard(make(), mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
steps(model, optimizer)
if rank == 3:
    with torch.no_grad():
        model[2].bias.to_local()[0] += 1
steps(model, optimizer)
"""
    code, told, (seen,), report = watch(command, tmp_path, body, "--nproc", "4", "--every", "1")
    assert code == 1 and seen["tracked"] == 4, told
    sentences = [finding["sentence"] for finding in report["findings"]]
    assert any("rank 1 and rank 3" in text and "2.bias [8]" in text for text in sentences), told


#: Each half of the ranks trains a model of its own, and averages over its own group.
TWO_MODELS = """\
torch.manual_seed(rank // 2)
model = make()
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    generator = torch.Generator().manual_seed(rank)
    optimizer.zero_grad()
    model(torch.randn(4, 8, generator=generator)).square().mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=groups[rank // 2])
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [((), 3), (("--replicas", "2"), 0), (("--replicas", "all"), 1)],
    ids=["unsaid", "pairs", "all"],
)
def test_ranks_that_seem_to_hold_parts_are_not_judged_unasked(
    command: Any, tmp_path: Path, options: tuple[str, ...], expected: int
) -> None:
    code, told, _, report = watch(command, tmp_path, TWO_MODELS, "--nproc", "4", *options)
    assert code == expected, told
    first = next(iter(report["findings"]), None)
    if expected == 3:
        assert first is not None and not first["broken"]
        assert "sums are made over ranks 0-1 (group 1) only" in first["sentence"], told
        assert "--replicas" in first["sentence"]
    elif expected == 1:
        assert first is not None and first["kind"] == "initial parameters", told


#: A table that each rank computes, one that batch norm moves, and a generator of each rank's own.
TABLES = """\
import sys
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
        table = torch.linspace(0.5, 2.0, 8) * (1 if rank == 0 or {sound} else 3)
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("seed", torch.tensor(rank))

    def forward(self, x):
        return self.layers(x * self.table)


model = DistributedDataParallel(Net(), broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps(model, optimizer, 5)
"""


@pytest.mark.parametrize("is_sound", [True, False])
def test_a_constant_table_is_equal_on_all_replicas(
    command: Any, tmp_path: Path, is_sound: bool
) -> None:
    body = TABLES.replace("{sound}", str(is_sound))
    code, told, _, report = watch(command, tmp_path, body)
    assert code == (0 if is_sound else 1), told
    sentences = [finding["sentence"] for finding in report["findings"]]
    said = "buffers differ that no step changes: nothing made them equal: rank 0 and rank 1"
    assert sentences == ([] if is_sound else [f"{said} (1 of 3 buffers: table [8])"]), told


def test_sound_scripts_raise_no_alarm(command: Any, tmp_path: Path) -> None:
    """Accumulation without reducing, two optimizers of one model, a schedule, a clipped norm."""
    body = """\
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(make())
weights = [p for p in model.parameters() if p.dim() > 1]
biases = [p for p in model.parameters() if p.dim() == 1]
optimizers = torch.optim.AdamW(weights), torch.optim.SGD(biases, lr=0.1, momentum=0.9)
schedules = [torch.optim.lr_scheduler.LinearLR(o, total_iters=4) for o in optimizers]
generator = torch.Generator().manual_seed(rank)
for _ in range(6):
    with model.no_sync():
        for _ in range(2):
            model(torch.randn(4, 8, generator=generator)).square().mean().backward()
    model(torch.randn(4, 8, generator=generator)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for optimizer, schedule in zip(optimizers, schedules):
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
"""
    code, told, seen, report = watch(command, tmp_path, body, "--every", "1")
    assert (code, report["findings"]) == (0, []), told
    assert [(one["name"], one["tracked"], one["steps"]) for one in seen] == [
        *(("AdamW", 2, 6), ("SGD", 2, 6))
    ]
    for one in seen:
        assert one["counts"]["gradients"] == one["counts"]["optimizer state"] - 1 == 6


def test_two_optimizers_and_what_none_holds(command: Any, tmp_path: Path) -> None:
    """Steps of several optimizers are compared each; unused parameters are named."""
    body = """\
from torch.nn.parallel import DistributedDataParallel

one, two = DistributedDataParallel(make()), DistributedDataParallel(make())
first = torch.optim.SGD([one.module[0].weight, one.module[0].bias], lr=0.1)
second = torch.optim.Adam(two.parameters())
for _ in range(4):
    steps(one, first, 1)
    steps(two, second, 2)
if rank == 1:
    second.param_groups[0]["lr"] = 1.0
steps(two, second, 2)
both = torch.optim.SGD([*two.parameters(), *one.parameters()], lr=0.1)
steps(two, both, 1)
"""
    code, told, (first, second, both), report = watch(command, tmp_path, body, "--every", "1")
    assert code == 1, told
    assert (first["name"], first["steps"], first["tracked"]) == ("SGD", 4, 2)
    assert first["outside"] == ["2.weight", "2.bias"]
    assert (second["name"], second["steps"], second["tracked"]) == ("Adam", 10, 4)
    assert both["tracked"] == 8 and both["not_compared"] == {
        "optimizer state": "the optimizer shows no state"
    }
    kinds = [(finding["kind"], finding["optimizer"]) for finding in report["findings"]]
    assert kinds[:1] == [("hyperparameters", 1)] and ("parameters", 1) in kinds, told
    assert "lr of group 0 is 0.001 on rank 0, 1.0 on rank 1" in told
    assert re.search(r"\(\d of 8 parameters: model 0: 0\.weight \[16x8\]", told), told
    assert "not compared: 2.bias, 2.weight (no optimizer was given them)" in told


def test_nothing_of_the_script_lives_longer_and_new_optimizers_go_on(
    command: Any, tmp_path: Path
) -> None:
    """An optimizer for each epoch is one here; a second model of the same shape is another."""
    body = """\
import gc, weakref
from torch.nn.parallel import DistributedDataParallel

gone = []
for trial in range(2):
    model = DistributedDataParallel(make())
    gone.append(weakref.ref(model.module[0].weight))
    for epoch in range(3):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (1 + epoch))
        gone.append(weakref.ref(optimizer))
        steps(model, optimizer, 2)
del model, optimizer
gc.collect()
assert not [one for one in gone if one() is not None], gone
named = nn.Linear(2, 2)
plain = {"weight": torch.zeros(3, requires_grad=True)}
first = torch.optim.SGD(plain.items(), lr=0.1)
plain["weight"].grad = torch.ones(3)
first.step()
first.param_groups[0]["params"][0] = other = named.weight  # as many, and others
other.grad = torch.full((2, 2), 1.0 + rank)
first.step()
"""
    code, told, (one, two, last), report = watch(command, tmp_path, body, "--every", "1")
    for seen in (one, two):
        assert (seen["name"], seen["made"], seen["steps"]) == ("AdamW", 3, 6)
        assert seen["counts"]["initial parameters"] == 1 and seen["counts"]["gradients"] == 6
    assert "0: AdamW (3 made)" in told
    assert code == 1 and "gradients differ at step 2" in report["reason"], told
    assert "weight [2x2]" in report["reason"] and last["steps"] == 2


@pytest.mark.parametrize(
    ("text", "world", "sets"),
    [
        ("all", 3, ((0, 1, 2),)),
        ("2", 4, ((0, 1), (2, 3))),
        ("0,2/1,3", 4, ((0, 2), (1, 3))),
        ("0-2/3", 4, ((0, 1, 2), (3,))),
        # Copies lie along replicate and context, or, where state is cut, along replicate alone.
        ("replicate=2,context=2,tensor=2", 8, ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("replicate=2,shard=1,context=2", 4, ((0, 2), (1, 3))),
        # Experts differ along their axis; pipe comes first, in whatever order it is written.
        ("expert=2,replicate=2", 4, ((0, 2), (1, 3))),
        ("context=2,pipe=2", 4, ((0, 1), (2, 3))),
    ],
)
def test_sets_are_read(text: str, world: int, sets: tuple[tuple[int, ...], ...]) -> None:
    assert replica_sets.parse(text, world) == sets


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("3", "4 ranks cannot be cut into sets of 3"),
        ("0", "4 ranks cannot be cut into sets of 0"),
        ("0,1/1,2", "a rank is listed twice"),
        ("0,4", "rank 4 does not exist: the job has 4 ranks"),
        ("a/b", "'a' is not a rank"),
        ("0,1/", "a set is empty"),
        ("data=4", "unknown axis 'data'; known: pipe, replicate"),
        ("context=two", "the size of an axis is not a number"),
        ("context=2", "the mesh has 2 ranks, but the job has 4"),
    ],
)
def test_sets_that_make_no_sense_are_refused(text: str, says: str) -> None:
    with pytest.raises(SelectionError, match=says):
        replica_sets.parse(text, 4)
