"""NCCL without a GPU: what it needs is said, nothing passes, and what can be moved is moved."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardproof import workloads
from shardproof.backends import BACKENDS, nccl
from shardproof.case import WorkloadSpec
from shardproof.cases import rank_program
from shardproof.commands import prove
from shardproof.ledgers import program_order, traffic

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@no_gpu
def test_the_reason_is_named() -> None:
    reason = BACKENDS["nccl"].available(4)
    assert reason is not None
    assert "NCCL" in reason


def test_one_gpu_is_too_few_for_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl.LoggedNccl, "native_type", object)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert nccl.available(1) is None
    assert nccl.available(2) == "NCCL needs a GPU for each of 2 rank(s), this machine has 1 GPU"


@no_gpu
def test_a_case_is_skipped_never_passed() -> None:
    (row,) = prove.prove("reference/ddp", backends=["nccl"], worlds=[1]).to_dict("records")
    assert row["verdict"] == "skip"
    assert "NCCL" in row["reason"]


def test_batches_move_to_the_device() -> None:
    workload = workloads.make(WorkloadSpec("charnames_gpt"), "float64", "fp64")
    batch = workload.batch(0, 2)[0]
    moved = rank_program._placed(batch, "meta", 1.0)
    for micro, original in zip(moved.micro_batches, batch.micro_batches, strict=True):
        for name in ("inputs", "targets", "weights", "sample_ids"):
            assert getattr(micro, name).device.type == "meta"
            assert getattr(micro, name).shape == getattr(original, name).shape


class _GlooWithOptions:
    """gloo behind NCCL's constructor: the calls that NCCL would get, on a CPU."""

    def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)


def test_the_wrapper_hands_on_and_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl.LoggedNccl, "native_type", _GlooWithOptions)
    monkeypatch.setattr(nccl.LoggedNccl, "torch_name", "gloo")
    monkeypatch.setattr(nccl.LoggedNccl, "kind", dist.ProcessGroup.BackendType.GLOO)
    log = program_order.RankLog()
    program_order.install(log, process=True)
    traffic.install(traffic.TrafficLedger(log), process=True)
    try:
        options = SimpleNamespace(_timeout=timedelta(seconds=20))
        group = nccl.LoggedNccl(dist.HashStore(), 0, 1, options)
        value = torch.tensor([3.0, 4.0])
        group.allreduce([value]).wait()
        ledger = traffic.current()
        assert ledger is not None
        (call,) = [call.to_dict() for call in ledger.named_calls()]
    finally:
        traffic.install(None, process=True)
        program_order.install(None, process=True)
    assert value.tolist() == [3.0, 4.0]
    assert call["operation"] == "all_reduce"
    assert group._timeout == timedelta(seconds=20)


def test_torch_would_build_it_by_name() -> None:
    """torch 2.11 to 2.13 look these names up when they make a group."""
    assert hasattr(c10d, "default_pg_timeout")
    assert issubclass(nccl.LoggedNccl, dist.ProcessGroup)
