"""``shardproof doctor``: every backend is told of, each trap has its remedy, no value is shown."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardproof.backends import BACKENDS
from shardproof.backends.gloo import Gloo
from shardproof.doctor import findings as doctor
from shardproof.runs import machine
from shardproof.runs.header import Gpu
from shardproof.wings import Finding

H100 = Gpu(name="NVIDIA H100", memory="81559 MiB", driver="580.65.06")


def by_what(tried: list[Finding] | None = None) -> dict[str, Finding]:
    """The findings of all backends, where those of ``tried`` are about gloo."""
    found = doctor._backends({Gloo: tried or []})
    return {f.what.removeprefix("backend "): f for f in found}


# --------------------------------------------------------------------------------------- backends


def test_every_backend_is_told_of() -> None:
    found = by_what()
    assert found.keys() == BACKENDS.keys()
    for name, finding in found.items():
        reason = BACKENDS[name].available()
        assert finding.state == ("note" if reason else "good"), finding
        assert not reason or (finding.found == reason and finding.remedy)
    assert found["in_memory"].state == "good"


def test_a_backend_without_its_build_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    finding = by_what()["gloo"]
    assert (finding.state, finding.found) == ("note", "this torch is built without gloo")
    assert "install a build of torch" in finding.remedy


def test_what_failed_when_it_was_tried_is_why_a_backend_cannot_run() -> None:
    wrong = Finding("interface of gloo", "bad", "there is no eth77", "unset it")
    finding = by_what([Finding("a", "good", "b"), wrong])["gloo"]
    assert finding.state == "bad" and finding.remedy == "unset it"
    assert finding.found == "interface of gloo: there is no eth77"


def test_nccl_is_told_with_as_many_ranks_as_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for name in ("nccl", "gloo_cuda"):
        monkeypatch.setattr(type(BACKENDS[name]), "available", lambda self, world=1: None)
    assert by_what()["nccl"].found == "can run here, at up to 3 ranks: one per GPU"


# ------------------------------------------------------------------------------------ the machine


@pytest.mark.parametrize(
    ("address", "state"), [("127.0.1.1", "note"), ("10.0.0.7", "good"), (None, "note")]
)
def test_a_name_that_is_the_loopback_is_a_trap_between_machines(
    address: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(name: str) -> str:
        if address is None:
            raise OSError("unknown")
        return address

    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    finding = doctor._name()
    assert finding.state == state and "node7" in finding.found
    assert ("NCCL_SOCKET_IFNAME" in finding.remedy) == (address == "127.0.1.1")


@pytest.mark.parametrize(
    ("total", "free", "state", "says"),
    [(64, 64, "bad", "too small"), (4096, 100, "bad", "remove files"), (4096, 4000, "good", "")],
)
def test_shared_memory_that_is_small_is_no_shared_memory_that_is_full(
    total: int, free: int, state: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = SimpleNamespace(total=total << 20, free=free << 20)
    monkeypatch.setattr(os, "access", lambda *_: True)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: size)
    finding = doctor._shared_memory()
    assert finding.state == state and says in finding.remedy
    assert finding.found == f"{free} of {total} MiB free"


# ------------------------------------------------------------------------------------------- NCCL


def machine_with(
    monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu], usable: bool, built: str | None
) -> None:
    reason = None if usable else "gloo with CUDA tensors needs at least one GPU"
    monkeypatch.setattr(machine, "gpus", lambda: gpus)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(type(BACKENDS["gloo_cuda"]), "available", lambda self: reason)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: built is not None)
    versions: Any = SimpleNamespace(version=lambda: (2, 28, 9))
    monkeypatch.setattr(torch.cuda, "nccl", versions)


def test_gpus_that_torch_cannot_use_are_told_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine_with(monkeypatch, [H100, H100], True, "13.0")
    assert doctor._gpus() == Finding("GPUs", "good", "NVIDIA H100, NVIDIA H100")
    machine_with(monkeypatch, [H100], False, None)
    assert doctor._gpus().state == "bad" and "built without CUDA" in doctor._gpus().found
    machine_with(monkeypatch, [H100], False, "13.0")
    finding = doctor._gpus()
    assert finding.state == "bad" and "torch (CUDA 13.0) can use none" in finding.found
    assert "driver for CUDA 13.0" in finding.remedy and "VISIBLE" not in finding.remedy
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "unset CUDA_VISIBLE_DEVICES" in doctor._gpus().remedy
    machine_with(monkeypatch, [], False, "13.0")
    assert doctor._gpus().state == "note" and "skipped" in doctor._gpus().remedy


def test_driver_and_nccl_are_told_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, [H100, H100], True, "13.0")
    assert doctor._nccl() == Finding("NCCL", "good", "driver 580.65.06; NCCL 2.28.9, CUDA 13.0")
    machine_with(monkeypatch, [], False, "13.0")
    assert doctor._nccl().state == "note" and "install the driver" in doctor._nccl().remedy
    machine_with(monkeypatch, [], False, None)
    assert doctor._nccl().found == "no driver; this torch is built without NCCL"


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(("NCCL_", "TORCH_NCCL_"))]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_variables")
def test_variables_that_nobody_reads_are_named_and_no_value_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert doctor._variables() == Finding("NCCL variables", "good", "none set")
    monkeypatch.setenv("NCCL_DEBUG", "hidden-value")
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "hidden-value")
    assert doctor._variables().found == "NCCL_DEBUG, TORCH_NCCL_TRACE_BUFFER_SIZE"
    monkeypatch.setenv("NCCL_SOKET_IFNAME", "hidden-value")
    monkeypatch.setenv("TORCH_NCCL_BLOKING_WAIT", "hidden-value")
    monkeypatch.setenv("NCCL_XYZZY_PLUGH_QQ", "hidden-value")
    finding = doctor._variables()
    assert finding.state == "note" and "NCCL_DEBUG" not in finding.found
    for words in (
        "NCCL_SOKET_IFNAME: did you mean NCCL_SOCKET_IFNAME?",
        "TORCH_NCCL_BLOKING_WAIT: did you mean TORCH_NCCL_BLOCKING_WAIT?",
        "NCCL_XYZZY_PLUGH_QQ: unset, unless a plugin",
    ):
        assert words in finding.remedy
    assert "hidden" not in str(finding)


def test_variables_of_the_suite_s_own_pages_are_known() -> None:
    page = (Path(__file__).parents[2] / "docs/troubleshooting.md").read_text()
    named = {w.strip("`,.:;()") for w in page.split()}
    assert {"NCCL_SOCKET_IFNAME"} <= named & doctor.known_variables()
