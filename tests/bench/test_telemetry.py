"""Figures of GPUs and ranks, made of answers that are played, and a sampler that always ends."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import played_nvml
import pytest
from played_nvml import Player

from shardproof.bench import evidence, session, sides, telemetry
from shardproof.bench.lines import NoFigures, PairLine, Telemetry
from shardproof.bench.subjects import AloneRecord

PCI = {"domain": 0, "bus": 3, "device": 0}
GPU = {"name": "Made Up 9000", "pci": PCI}


def samples(seconds: int = 5) -> list[list[dict[str, Any]]]:
    """A GPU that is busier from second to second."""
    return [
        [
            {
                "utilisation": {"gpu": 10 * second, "memory": second},
                "memory": {"total": 2**34, "used": 2**30 * second},
            }
        ]
        for second in range(seconds)
    ]


def made_up(*lacking: str) -> Player:
    return Player([GPU], samples(), lacking)


def seen_of(player: Player, count: int) -> telemetry.Seen:
    """What a sampler sees of ``player`` in so many looks."""
    seen = telemetry.Seen()
    for clock in range(count):
        looks = [telemetry.look(player, number) for number in range(player.nvmlDeviceGetCount())]
        for number, (_, reasons) in enumerate(looks):
            seen.missing.setdefault(number, {}).update(reasons)
        gpus = [figures for figures, _ in looks]
        seen.samples.append(telemetry.Sample(1000 + clock, gpus))
    return seen


# ------------------------------------------------------------------------------------- NVML lacks


def of_gpus(api: Player, every: float = 0.01) -> telemetry.Sampler:
    return telemetry.Sampler(list, on_gpu=True, api=api, every=every)


def test_no_nvml_is_a_reason() -> None:
    class Absent(Player):
        def nvmlInit(self) -> None:
            raise played_nvml.PlayedError(12, "NVML Shared Library Not Found")

    none = Player([])
    for api, why in (
        (Absent([GPU]), "NVML: NVML Shared Library Not Found"),
        (none, "NVML sees no GPU"),
    ):
        with of_gpus(api, every=60.0) as sampler:
            pass
        assert sampler.seen.no_gpu == why and not sampler.seen.problem
        assert [sample.gpus for sample in sampler.seen.samples] == [[]], "memory is looked at"
    assert none.open == 0


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlShutdown"])
def test_a_driver_that_hangs_is_given_up(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the beginning and at the end: the thread is left to itself, and the reason is noted."""
    over = threading.Event()
    stuck = made_up()
    setattr(stuck, call, lambda: over.wait(60))
    monkeypatch.setattr(telemetry, "PATIENCE_SECONDS", 0.1)
    with of_gpus(stuck) as sampler:
        pass
    assert "given up" in sampler.seen.problem
    over.set()
    sampler._thread.join(10)
    assert not threads()


@pytest.mark.parametrize(
    ("figure", "lacks"),
    [
        ("utilisation", {"utilisation_percent", "memory_busy_percent"}),
        ("memory", {"memory_used_bytes"}),
    ],
)
def test_a_figure_that_is_not_supported_is_none_with_its_reason(
    figure: str, lacks: set[str]
) -> None:
    seen = seen_of(made_up(figure), 5)
    (gpu,) = telemetry.summary(seen).gpus
    (whole,) = telemetry.summary(seen_of(made_up(), 5)).gpus
    assert gpu.missing == {figure: "Not Supported"} and whole.missing == {}
    figures = gpu.to_dict()
    assert {key for key, value in figures.items() if value is None} == lacks
    kept = {key: value for key, value in figures.items() if key not in lacks | {"missing"}}
    assert kept == {key: getattr(whole, key) for key in kept}
    text = "\n".join(telemetry.texts(Telemetry(launches=telemetry.summary(seen))))
    assert f"no {figure}: Not Supported" in text


def test_a_pynvml_that_lacks_a_call_is_a_reason() -> None:
    class Older(Player):
        def __getattr__(self, function: str) -> Any:
            if function == "nvmlDeviceGetMemoryInfo":
                raise AttributeError(f"no {function}")
            return super().__getattr__(function)

    figures, reasons = telemetry.look(Older([GPU], samples()), 0)
    assert figures["memory"] is None and reasons == {"memory": "no nvmlDeviceGetMemoryInfo"}


def test_pynvml_has_what_is_asked() -> None:
    """The pinned package knows every function, and its numbers are those written down here."""
    pynvml = pytest.importorskip("pynvml")
    for function, _ in telemetry.CALLS.values():
        assert callable(getattr(pynvml, function))
    assert pynvml.NVML_ERROR_NOT_SUPPORTED == played_nvml.NOT_SUPPORTED


# -------------------------------------------------------------------------------------- summaries


def test_figures_by_hand() -> None:
    seen = seen_of(made_up(), 5)
    told = telemetry.summary(seen)
    (gpu,) = told.gpus
    assert told.resident_bytes == 1004 and told.samples == 5
    assert gpu.utilisation_percent == 20 and gpu.memory_used_bytes == 4 * 2**30
    assert gpu.name == "Made Up 9000" and gpu.memory_busy_percent == 2
    text = "\n".join(telemetry.texts(Telemetry(launches=told)))
    assert "GPU 0 Made Up 9000: 4,096 MiB used, 20 % busy" in text


def test_only_the_gpus_of_the_ranks_count() -> None:
    other = GPU | {"pci": PCI | {"bus": 4}, "name": "The Other"}
    both = [[one, {**one, "utilisation": {"gpu": 1, "memory": 1}}] for (one,) in samples()]
    seen = seen_of(Player([GPU, other], both), 5)
    assert [gpu.name for gpu in telemetry.summary(seen, [other["pci"]]).gpus] == ["The Other"]
    assert len(telemetry.summary(seen).gpus) == 2
    told = telemetry.summary(seen, [PCI, other["pci"]])
    assert [one.utilisation_percent for one in told.gpus] == [20, 1]


def test_a_side_on_the_cpu_has_no_gpu() -> None:
    told = telemetry.of_side([AloneRecord(2**20, None), AloneRecord(2**19, None)])
    assert told.allocator is None and told.resident_bytes == 2**20
    (text,) = telemetry.texts(Telemetry(launches=None, sides={"a": told}))
    assert text == "A alone, worst rank: 1 MiB resident added, advisory"
    (text,) = telemetry.texts(
        Telemetry(launches=None, sides={"b": NoFigures(problem="a rank raised")})
    )
    assert text == "B alone: no figures: a rank raised"


def test_the_worst_rank_counts() -> None:
    first = {"allocated_bytes.all.peak": 5, "reserved_bytes.all.peak": 9, "num_alloc_retries": 1}
    second = {"allocated_bytes.all.peak": 7, "reserved_bytes.all.peak": 8}
    records = [AloneRecord(1, first), AloneRecord(1, second), AloneRecord(1, None)]
    found = telemetry.of_side(records).allocator
    assert found is not None and (found["allocated_peak"], found["reserved_peak"]) == (7, 9)
    assert found["retries"] == 1 and found["out_of_memory"] == 0


# ---------------------------------------------------------------------------------------- sampler


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "telemetry"]


def test_a_sampler_sees_ranks_and_gpus_and_ends() -> None:
    player = made_up()
    with telemetry.Sampler(lambda: [os.getpid()], on_gpu=True, api=player, every=0.01) as sampler:
        deadline = time.monotonic() + 10
        while len(sampler.seen.samples) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threads()
    seen = sampler.seen
    assert not threads() and len(seen.samples) >= 4 and not seen.problem
    assert all((sample.resident or 0) > 2**20 for sample in seen.samples)
    assert [s.gpus[0]["utilisation"]["gpu"] for s in seen.samples[:3]] == [0, 10, 20]


def test_a_sampler_ends_when_its_block_raises() -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        telemetry.Sampler(list, every=60.0) as sampler,
    ):
        raise KeyboardInterrupt
    assert not threads() and sampler.seen.samples


def test_a_rank_that_has_ended_is_no_fault() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    with telemetry.Sampler(lambda: [gone.pid], every=0.01) as sampler:
        time.sleep(0.05)
    assert not sampler.seen.problem and sampler.seen.samples[-1].resident is None


def test_a_sampler_that_cannot_go_on_says_so_and_stops_nobody() -> None:
    class Lost(Player):
        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            raise played_nvml.PlayedError(15, "GPU is lost")

    with of_gpus(Lost([GPU])) as sampler:
        time.sleep(0.05)
    assert not threads() and "GPU is lost" in sampler.seen.problem
    assert telemetry.texts(Telemetry(launches=telemetry.summary(sampler.seen)))[-1] == (
        "telemetry: stopped looking: PlayedError: GPU is lost"
    )


def test_ranks_say_who_they_are(tmp_path: Path) -> None:
    assert telemetry.pids_in(tmp_path) == []
    telemetry.announce(tmp_path, 12)
    telemetry.announce(tmp_path, 345)
    telemetry.announce(tmp_path, 12)  # a thread of the same process
    assert sorted(telemetry.pids_in(tmp_path)) == [12, 345]


def test_what_was_seen_in_several_launches_adds_up() -> None:
    one, two = (seen_of(made_up(), count) for count in (2, 3))
    both = telemetry.Seen()
    both.add(one)
    both.add(two)
    told = telemetry.summary(both)
    assert told.samples == 5


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_session_asks_nvml_where_ranks_compute_on_gpus(backend: str, tmp_path: Path) -> None:
    """The line of a comparison has the GPUs of its ranks, or says why it has none."""
    (first, *_) = sides.read(["peers"])
    pair = dataclasses.replace(first, backend=backend)
    measured = session.Measured(pair)
    api = made_up()
    with session.Session(api) as bench:
        with bench._sampler(measured, tmp_path) as sampler:
            pass
        measured.seen.add(sampler.seen)
    assert api.open == 0  # NVML is let go of
    line = evidence.result(measured)
    assert isinstance(line, PairLine) and line.telemetry is not None
    told = line.telemetry
    assert told.launches is not None
    if backend == "nccl":
        assert [gpu.name for gpu in told.launches.gpus] == ["Made Up 9000"]
        assert told.no_gpu is None
    else:
        assert told.launches.gpus == [] and told.no_gpu == "gloo computes on the CPU"


def test_without_nvml_a_session_says_so(tmp_path: Path) -> None:
    measured = session.Measured(dataclasses.replace(sides.read(["peers"])[0], backend="nccl"))
    none = Player([])
    with session.Session(none) as bench, bench._sampler(measured, tmp_path) as sampler:
        pass
    assert sampler.seen.no_gpu == "NVML sees no GPU" and none.open == 0
