"""Clean systems keep their promises in worlds of any size; what breaks one is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from shardproof.contract import OptimizerSpec
from shardproof.costs import NoCostModel
from shardproof.costs.shapes import BatchSize, Shape
from shardproof.impls.reference.ddp import ReferenceDDP
from shardproof.simulate import figures
from shardproof.simulate.promised import broken, not_judged
from shardproof.simulate.rank import simulate
from shardproof.simulate.sources import ShapeSource

#: A shape of odd sizes: ranks cannot share its vocabulary and its tensors evenly.
ODD = Shape("odd", layers=4, hidden=64, heads=8, kv_heads=8, vocab=61, seq=16, positions=16,
            bias="all", tied=True, attention="math")  # fmt: skip


def source_of(implementation: str, mesh: Mapping[str, int], micro_batches: int = 1) -> ShapeSource:
    adam, work = OptimizerSpec("adamw", momentum=0.0), BatchSize(1, ODD.seq, micro_batches)
    return ShapeSource(ODD, implementation, mesh, adam, {}, work, torch.float32)


def problems(source: ShapeSource) -> list[str]:
    return broken(source, simulate(source, figures.looked_at(source.axes)))


@pytest.mark.parametrize(
    ("implementation", "mesh", "micro_batches"),
    [
        ("reference/naive_ddp", {"replicate": 3}, 1),
        pytest.param("reference/ddp", {"replicate": 1024}, 1, marks=pytest.mark.slow),
        ("reference/zero1", {"shard": 5}, 2),
        pytest.param("reference/zero2", {"shard": 4096}, 2, marks=pytest.mark.slow),
        pytest.param("reference/zero3", {"shard": 64}, 2, marks=pytest.mark.slow),
        ("reference/fsdp", {"shard": 16384}, 1),
        pytest.param("reference/fsdp", {"replicate": 8, "shard": 8}, 1, marks=pytest.mark.slow),
        ("reference/tensor", {"tensor": 8}, 1),
        ("reference/pipeline", {"pipe": 4}, 8),
        pytest.param("reference/context", {"context": 4}, 1, marks=pytest.mark.slow),
        pytest.param(
            "reference/hybrid", {"pipe": 4, "shard": 16, "tensor": 4}, 4, marks=pytest.mark.slow
        ),
        pytest.param("pytorch/ddp", {"replicate": 64}, 1, marks=pytest.mark.slow),
        ("pytorch/fsdp2", {"shard": 64}, 1),
    ],
    ids=str,
)
def test_clean_systems_keep_their_promises(
    implementation: str, mesh: Mapping[str, int], micro_batches: int
) -> None:
    assert problems(source_of(implementation, mesh, micro_batches)) == []


def test_all_forwards_first_keep_the_loss_of_each_micro_batch() -> None:
    source = source_of("reference/pipeline", {"pipe": 2}, 8)
    # A wide head: what the loss keeps exceeds the layers.
    wide = replace(source.shape, vocab=8192, layers=4, parameters=0)
    assert problems(replace(source, shape=wide, options={"schedule": "gpipe"})) == []


def test_state_in_host_memory_is_judged_there() -> None:
    source = source_of("reference/fsdp", {"shard": 8})
    offloads = replace(source, options={"offload": "parameters"})
    made = simulate(offloads, [0])
    assert broken(offloads, made) == []
    # A system that does not offload, asked to: its state is on the device.
    found = broken(offloads, simulate(source, [0]))
    assert any("bytes in host memory promised, 0 held" in text for text in found)
    assert any(text.startswith("rank 0: after_update: optimizer state: 0 bytes") for text in found)


def test_owners_that_broadcast_unevenly_are_not_judged_by_the_mean() -> None:
    source = source_of("pytorch/zero_redundancy_optimizer", {"shard": 3})
    made = simulate(source, [0])
    assert broken(source, made) == []
    assert not_judged(source, made) == ["broadcast along shard"]


def test_messages_of_a_stage_are_judged_by_its_place() -> None:
    """The last stage sends only gradients, and a message more is one too many."""
    source = source_of("reference/pipeline", {"pipe": 4}, 8)
    made = simulate(source, range(4))
    assert broken(source, made) == not_judged(source, made) == []
    sends = [call for call in made[3].calls[-1] if call.operation == "send" and call.floating]
    assert sends
    made[3].calls[-1].append(sends[0])
    (wrong,) = broken(source, made)
    assert wrong.startswith("rank 3: send along pipe: ")


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("zero1_all_reduces", "all-reduce along shard: "),
        ("zero1_gathers_beside", "communication"),
        ("zero3_keeps_root", "all-gather along shard: "),
        ("zero3_frees_late", "peak in "),
    ],
)
def test_a_broken_promise_is_named(fault: str, says: str) -> None:
    found = problems(source_of(f"mutants/{fault}", {"shard": 16}))
    assert any(says in text for text in found), found
    assert {text.partition(":")[0] for text in found} == {"rank 0", "rank 15"}


class Mine(ReferenceDDP):
    """A system of a strategy that has no formula."""

    strategy = "mine"


def test_what_promises_nothing_is_no_pass() -> None:
    source = source_of(f"{__name__}:Mine", {"replicate": 2})
    with pytest.raises(NoCostModel, match="nothing is promised of"):
        broken(source, simulate(source, [0]))
