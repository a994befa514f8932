"""NCCL without a GPU: what it needs is said, nothing passes, and what can be moved is moved."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardproof import workloads
from shardproof.backends import BACKENDS, Joining, base, cuda, joined, logged, nccl
from shardproof.backends.disturbances import Disturbances
from shardproof.case import WorkloadSpec
from shardproof.cases import rank_program
from shardproof.commands import prove
from shardproof.ledgers import program_order, traffic

LoggedNccl = BACKENDS["nccl"].group
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@no_gpu
def test_the_reason_is_named() -> None:
    reason = BACKENDS["nccl"].available(4)
    assert reason is not None
    assert "NCCL" in reason


def test_one_gpu_is_too_few_for_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    nccl = BACKENDS["nccl"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert nccl.available(1) is None
    assert nccl.available(2) == (
        "NCCL needs a GPU for each of 2 rank(s), but this machine has 1 GPU; NCCL refuses two "
        "ranks on one GPU: choose the backend gloo_cuda, whose ranks share GPUs, or at most one "
        "rank per GPU"
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    wanted = "NCCL needs a GPU for each of 2 rank(s), but this machine has no GPU: run where "
    assert (nccl.available(2) or "").startswith(wanted)


def properties(**fields: str) -> Any:
    return lambda gpu: SimpleNamespace(name=f"made up {gpu}", **fields)


def test_a_gpu_is_called_by_its_own_number_or_its_machine_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties(uuid="77-a"))
    assert cuda.identity() == "77-a"
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties())
    monkeypatch.setattr(cuda.socket, "gethostname", lambda: "node7")
    assert cuda.identity() == "node7 GPU 3"


def all_join(gpus: list[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """What each rank hears that joins with one of ``gpus``; torch itself is not asked."""
    joined: list[int] = []
    own = threading.local()
    monkeypatch.setattr(cuda, "identity", lambda: gpus[own.rank])
    monkeypatch.setattr(cuda, "take", lambda rank: None)
    monkeypatch.setattr(
        LoggedNccl, "join_default", classmethod(lambda cls, place: joined.append(place.rank))
    )
    heard = ["joined"] * len(gpus)

    def join(rank: int) -> None:
        own.rank = rank
        try:
            BACKENDS["nccl"].join(Joining(rank, len(gpus), folder / "meeting", 20.0, True))
        except RuntimeError as error:
            heard[rank] = str(error)

    ranks = [threading.Thread(target=join, args=(rank,)) for rank in range(len(gpus))]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    assert [rank for rank, said in enumerate(heard) if said == "joined"] == sorted(joined)
    return heard


def test_ranks_on_one_gpu_are_named_on_every_rank_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    says = "ranks 0,2 use the same GPU (a), but NCCL needs one GPU per rank: choose the backend"
    heard = all_join(["a", "b", "a"], monkeypatch, tmp_path)
    assert all(said.startswith(says) for said in heard), heard


def test_ranks_on_gpus_of_their_own_join(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert all_join(["a", "b", "c"], monkeypatch, tmp_path) == ["joined"] * 3


def test_a_rank_of_nccl_takes_its_gpu_and_settings_before_it_meets_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[str] = []
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # the user's own stays
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: done.append(f"GPU {gpu}"))
    monkeypatch.setattr(torch.cuda, "init", lambda: done.append("init"))
    monkeypatch.setattr(
        nccl, "refuse_shared_gpus", lambda store, rank, world: done.append(f"meet {rank}")
    )
    monkeypatch.setattr(LoggedNccl, "join_default", classmethod(lambda cls, joining: None))
    joined.join("nccl", Joining(5, 8, tmp_path / "meeting", 1.0, ledgers=False))
    assert done[:3] == ["GPU 5", "init", "meet 5"]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_what_nccl_joined_nccl_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[bool] = []
    monkeypatch.setattr(LoggedNccl, "install", lambda ours: left.append(ours))
    base.JOINED.set(BACKENDS["nccl"], process=True)
    assert joined.leave() and left == [False] and base.JOINED.get() is None


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


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> Callable[[], logged.Logged]:
    """Makes the group of NCCL of one rank, with gloo inside."""
    monkeypatch.setattr(LoggedNccl, "native_type", _GlooWithOptions)
    monkeypatch.setattr(LoggedNccl, "torch_name", "gloo")
    monkeypatch.setattr(LoggedNccl, "kind", dist.ProcessGroup.BackendType.GLOO)
    options = SimpleNamespace(_timeout=timedelta(seconds=20))
    return lambda: LoggedNccl(dist.HashStore(), 0, 1, options)


def test_the_wrapper_hands_on_and_logs(wrapper: Callable[[], logged.Logged]) -> None:
    log = program_order.RankLog()
    program_order.install(log, process=True)
    traffic.install(traffic.TrafficLedger(log), process=True)
    try:
        group = wrapper()
        value = torch.tensor([3.0, 4.0])
        group.allreduce([value]).wait()
        ledger = traffic.current()
        assert ledger is not None
        (call,) = [call.to_dict() for call in ledger.calls]
    finally:
        traffic.install(None, process=True)
        program_order.install(None, process=True)
    assert value.tolist() == [3.0, 4.0]
    assert call["operation"] == "all_reduce"
    assert group._timeout == timedelta(seconds=20)


def test_what_torch_asks_of_the_wrapper_the_backend_answers(
    wrapper: Callable[[], logged.Logged], monkeypatch: pytest.MonkeyPatch
) -> None:
    group, value = wrapper(), torch.ones(2)
    group._set_sequence_number_for_group()
    before = group._get_sequence_number_for_group()
    handle = group.allreduce([value])
    assert handle.wait(timedelta(seconds=5)) and handle.exception() is None
    assert group._get_sequence_number_for_group() == before + 1
    assert group._get_backend(torch.device("cpu")) is group.backend
    group.set_timeout(timedelta(seconds=7))
    assert group._timeout == group.backend.options._timeout == timedelta(seconds=7)
    asked: list[tuple[str, Any]] = []

    def answers(name: str) -> Any:
        return lambda *given: asked.append((name, given))

    # What gloo alone cannot show: its own abort, another rank that is late, names before 2.13.
    names = ("monitored_barrier", "abort", "_allgather_base")
    monkeypatch.setattr(group, "native", SimpleNamespace(**{n: answers(n) for n in names}))
    group.monitored_barrier(timedelta(seconds=1), True)
    group.abort()
    group.all_gather_single(value, value)
    assert [name for name, _ in asked] == list(names)
    assert asked[0][1] == (timedelta(seconds=1), True)
    work = SimpleNamespace(_source_rank=lambda: 3)
    monkeypatch.setattr(handle, "_work", work)
    assert handle.source_rank() == 3


def test_a_call_on_the_caller_s_own_stream_has_no_work_and_is_done(
    wrapper: Callable[[], logged.Logged], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL answers a synchronous call since torch 2.8."""
    group, value = wrapper(), torch.ones(2)
    monkeypatch.setattr(group, "native", SimpleNamespace(allreduce=lambda *given: None))
    handle = group.allreduce([value])
    assert handle.wait() and handle.is_completed() and handle.exception() is None
    (result,) = handle.get_future().wait()
    assert result is value


def test_calls_of_a_batch_begin_together_and_end_by_one_work(
    wrapper: Callable[[], logged.Logged], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two ranks that send to each other would wait for each other on their streams."""
    group, done = wrapper(), list[str]()
    work = SimpleNamespace(wait=lambda: done.append("wait"))

    def makes(name: str, answer: Any = None) -> Any:
        return lambda *given: (done.append(name), answer)[1]

    native = {name: makes(name) for name in ("_start_coalescing", "send", "recv")}
    native["_end_coalescing"] = makes("_end_coalescing", work)
    monkeypatch.setattr(group, "native", SimpleNamespace(**native))
    monkeypatch.setattr(group, "backend", SimpleNamespace(supports_coalescing=True))

    def isend(tensor: torch.Tensor, group: Any, tag: int, group_dst: int) -> None:
        group.send([tensor], group_dst, tag)

    def irecv(tensor: torch.Tensor, group: Any, tag: int, group_src: int) -> None:
        group.recv([tensor], group_src, tag)

    monkeypatch.setattr(dist, "isend", isend)
    checked: list[Any] = []
    monkeypatch.setattr(c10d, "_check_p2p_op_list", checked.extend)
    log = program_order.RankLog()
    program_order.install(log, process=True)
    traffic.install(traffic.TrafficLedger(log), process=True)
    try:
        one = {"tensor": torch.ones(2), "group": group, "tag": 0, "group_peer": 0}
        posted: list[Any] = [SimpleNamespace(op=op, **one) for op in (isend, irecv)]
        (together,) = logged._batch(posted)
        assert checked == posted  # by torch, as it does
        began = list(done)
        together.wait()
        ledger = traffic.current()
        assert ledger is not None
        calls = [call.to_dict() for call in ledger.calls]
    finally:
        traffic.install(None, process=True)
        program_order.install(None, process=True)
    assert began == ["_start_coalescing", "send", "recv", "_end_coalescing"]
    assert done == [*began, "wait"]
    assert [call["operation"] for call in calls] == ["send", "recv"]
    assert all(call["waited"] is not None for call in calls)


def test_other_groups_send_a_batch_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(logged, "_TORCH_BATCH", lambda posted: asked.append(posted) or [])
    posted: list[Any] = [SimpleNamespace(group=object())]
    assert logged._batch(posted) == [] and asked == [posted]


def test_the_wrapper_carries_disturbances_out(
    wrapper: Callable[[], logged.Logged], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoggedNccl, "disturbances", Disturbances(skew_s=1e-6, poison=True))
    group, output = wrapper(), torch.ones(2)
    monkeypatch.setattr(group, "native", SimpleNamespace(all_gather_single=lambda *given: None))
    group.all_gather_single(output, torch.zeros(2))
    assert output.isnan().all()  # until the result is there
    assert group.transform is not None


def test_torch_would_build_it_by_name() -> None:
    """torch 2.11 to 2.13 look these names up when they make a group."""
    assert hasattr(c10d, "default_pg_timeout")
    assert issubclass(LoggedNccl, dist.ProcessGroup)
