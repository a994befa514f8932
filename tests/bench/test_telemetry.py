"""NVML recorded and played back, figures made of it, and a sampler that always ends.

``tests/data/nvml-synthetic*.json`` are in the form of a recording, but made up from NVML's
documentation: no GPU was at hand.  A recording of one (``python tests/support/nvml_recording.py
--record tests/data/nvml-<name>.json``) is judged by the same tests as soon as it lies there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import nvml_recording
import pytest

from shardproof.bench import evidence, session, sides
from shardproof.bench.launches import AloneRecord
from shardproof.bench.lines import NoFigures, PairLine, Telemetry
from shardproof.bench.telemetry import nvml, sampling

DATA = Path(__file__).parents[1] / "data"
#: Recordings, and what stands for them.
RECORDINGS = sorted(DATA.glob("nvml-*.json"))
PCI = {"domain": 0, "bus": 3, "device": 0}


def made_up(seconds: int = 5, watts: float = 250.0, throttle: int = 0) -> dict[str, Any]:
    """A GPU that draws ``watts``, one sample a second."""
    fixed = {"name": "Made Up 9000", "pci": PCI, "power_limit": 300_000}
    fixed |= {"sm_clock_limit": 2000, "memory_clock_limit": 1500}
    samples = [
        {
            "seconds": float(second),
            "devices": [
                {
                    "utilisation": {"gpu": 10 * second, "memory": second},
                    "memory": {"total": 2**34, "used": 2**30 * second},
                    "power": int(1e3 * watts),
                    "sm_clock": 1800 - second,
                    "memory_clock": 1500,
                    "temperature": 40 + second,
                    "energy": int(1e6 + 1e3 * watts * second),
                    "throttle": throttle if second % 2 else 1,
                }
            ],
        }
        for second in range(seconds)
    ]
    return {"format": nvml_recording.FORMAT, "devices": [fixed], "samples": samples}


def seen_of(player: nvml_recording.Player, count: int) -> sampling.Seen:
    """What a sampler sees of ``player``, a look a second, at clocks 0, 1, ..."""
    seen = sampling.Seen()
    devices = nvml.handles(player)
    for number, device in enumerate(devices):
        fixed, seen.missing[number] = nvml.answers(player, device, nvml.Fixed)
        seen.fixed.append(fixed)
    for clock in range(count):
        gpus = []
        for number, device in enumerate(devices):
            sampled, reasons = nvml.answers(player, device, nvml.Sampled)
            gpus.append(sampled)
            seen.missing[number].update(reasons)
        seen.samples.append(sampling.Sample(float(clock), 1000 + clock, gpus))
    seen.seconds, seen.cpu_seconds = float(count), 0.01 * count
    return seen


def at_clocks(seen: sampling.Seen, recording: dict[str, Any]) -> list[sampling.Sample]:
    """The samples at the seconds of the recording."""
    return [
        dataclasses.replace(look, clock=sample["seconds"])
        for look, sample in zip(seen.samples, recording["samples"], strict=True)
    ]


# ------------------------------------------------------------------------------------ recordings


def test_what_no_gpu_said_is_called_synthetic() -> None:
    """Made up answers say so; a recording names the driver that gave them."""
    assert len(RECORDINGS) >= 2
    for path in RECORDINGS:
        told = json.loads(path.read_text())
        assert ("synthetic" in told) == path.stem.startswith("nvml-synthetic"), path
        assert "synthetic" in told or told["made"]["nvmlSystemGetDriverVersion"], path


def test_figures_of_the_synthetic_gpu() -> None:
    """Watts, joules a step and the power cap of the file, worked out from its numbers."""
    recording = json.loads((DATA / "nvml-synthetic.json").read_text())
    seen = seen_of(nvml_recording.Player(recording), len(recording["samples"]))
    seen.samples = at_clocks(seen, recording)
    inside = [s["devices"][0] for s in recording["samples"] if 2.0 <= s["seconds"] <= 8.0]
    counters = [device["energy"] / 1e3 for device in inside]
    record = AloneRecord(0, 1, recording["torch"]["allocator"], None, 2.0, 8.0, 1200)
    told = sampling.of_side(seen, [record])
    assert told.joules_per_step == pytest.approx((counters[-1] - counters[0]) / 1200)
    (gpu,) = told.gpus
    assert gpu.power_watts == pytest.approx(sum(d["power"] for d in inside) / len(inside) / 1e3)
    capped = sum(device["throttle"] == 4 for device in inside)
    assert capped and gpu.throttled == {"power cap": capped / len(inside)}
    assert gpu.sm_clock_least_mhz == 1755 and gpu.utilisation_percent == 98
    assert (told.allocator or {})["allocated_peak"] == 384 * 2**20

    other = json.loads((DATA / "nvml-synthetic-without.json").read_text())
    seen = seen_of(nvml_recording.Player(other), len(other["samples"]))
    seen.samples = at_clocks(seen, other)
    told = sampling.of_side(seen, [record])
    (gpu,) = told.gpus
    assert gpu.energy_source == "power x time" and gpu.power_limit_watts is None
    assert told.joules_per_step == pytest.approx(6 * gpu.power_watts / 1200)
    assert gpu.missing == {
        "power_limit": "Not Supported",
        "energy": "Not Supported",
        "throttle": "Insufficient Permissions",
    }


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_what_was_recorded_answers_again(path: Path) -> None:
    """Every figure is a number in its unit's range, or has a reason."""
    recording = json.loads(path.read_text())
    api, why = nvml.start(nvml_recording.Player(recording))
    assert api is not None and not why
    seen = seen_of(api, len(recording["samples"]))
    seen.samples = at_clocks(seen, recording)
    busy = recording["busy"]
    told = sampling.summary(seen, window=(busy["from"], busy["to"]))
    for gpu in told.gpus:
        limit = gpu.power_limit_watts
        ranges = {
            "utilisation_percent": (0, 100),
            "memory_busy_percent": (0, 100),
            "memory_used_bytes": (1, 2**40),
            "power_watts": (1, 1.5 * limit if limit else 2000),
            "sm_clock_mhz": (100, 5000),
            "temperature_celsius": (10, 110),
            "energy_joules": (1, 2000 * (busy["to"] - busy["from"])),
        }
        for figure, (least, most) in ranges.items():
            assert getattr(gpu, figure) is None or least <= getattr(gpu, figure) <= most, figure
        gone = [figure for figure in nvml.SAMPLED if figure in gpu.missing]
        for figure, key in (("power", "power_watts"), ("sm_clock", "sm_clock_mhz")):
            assert (getattr(gpu, key) is None) == (figure in gone)
        assert gpu.throttled is None or all(0 < s <= 1 for s in gpu.throttled.values())
    if busy["steps"]:
        assert max(gpu.utilisation_percent or 100 for gpu in told.gpus) > 5
    nvml.stop(api)
    assert api.open == 0


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_torch_and_nvml_name_the_same_gpu(path: Path) -> None:
    """What torch told of the GPU that worked names one of NVML's; its allocator has our figures."""
    recording = json.loads(path.read_text())
    told = recording["torch"]
    if told is None:
        assert recording["busy"]["steps"] == 0
        return
    if told["pci"] is not None:
        assert told["pci"] in [device["pci"] for device in recording["devices"]]
    found = sampling.worst([told["allocator"]])
    assert found is not None and 0 < found["allocated_peak"] <= found["reserved_peak"]


def test_recording_and_playing_are_inverse(tmp_path: Path) -> None:
    """A recording of a player holds what the player was made of, errors included."""
    path = tmp_path / "again.json"
    player = nvml_recording.Player(made_up(400), lacking=["energy"])
    told = nvml_recording.record(path, player, lambda seconds: 7, rest=0.05, busy=0.05, every=0.01)
    again = json.loads(path.read_text())
    assert again == json.loads(json.dumps(told)) and player.open == 0
    assert again["devices"] == made_up()["devices"] and again["busy"]["steps"] == 7
    first = made_up()["samples"][0]["devices"][0]
    assert again["samples"][0]["devices"][0] == first | {
        "energy": {"error": 3, "text": "Not Supported"}
    }
    sampled, reasons = nvml.answers(nvml_recording.Player(again), 0, nvml.Sampled)
    assert dataclasses.asdict(sampled) == first | {"energy": None} and reasons == {
        "energy": "Not Supported"
    }


def test_work_that_fails_records_nothing(tmp_path: Path) -> None:
    def work(seconds: float) -> int:
        raise ValueError("no card")

    player = nvml_recording.Player(made_up())
    with pytest.raises(RuntimeError, match="no card"):
        nvml_recording.record(tmp_path / "r.json", player, work, rest=0.01, busy=0.01, every=0.01)
    assert not list(tmp_path.iterdir()) and player.open == 0


def test_the_command_says_what_it_lacks(tmp_path: Path) -> None:
    """Where there is no NVML the recorder ends with a sentence and exit code 2."""
    if nvml.start()[0] is not None:
        pytest.skip("there is a GPU here")
    command = [
        sys.executable,
        "tests/support/nvml_recording.py",
        "--record",
        str(tmp_path / "r.json"),
    ]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and "nothing to record" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--rest", "--busy", "--every"])
def test_seconds_of_a_recording_are_positive(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        nvml_recording.main(["--record", str(tmp_path / "r.json"), option, "0"])
    assert ended.value.code == 2 and "more than 0" in capsys.readouterr().err


def test_a_recording_of_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="format 99"):
        nvml_recording.Player(made_up() | {"format": 99})


# ------------------------------------------------------------------------------------- NVML lacks


def test_no_nvml_is_a_reason() -> None:
    class Absent(nvml_recording.Player):
        def nvmlInit(self) -> None:
            raise nvml_recording.PlayedError(12, "NVML Shared Library Not Found")

    assert nvml.start(Absent(made_up())) == (None, "NVML: NVML Shared Library Not Found")
    none = nvml_recording.Player(made_up() | {"devices": []})
    assert nvml.start(none) == (None, "NVML sees no GPU") and none.open == 0


class Stuck(nvml_recording.Player):
    """A driver that does not come back from the calls in ``never``, until ``over`` is set."""

    def __init__(self, *never: str) -> None:
        super().__init__(made_up())
        self.never, self.over = never, threading.Event()

    def nvmlInit(self) -> None:
        super().nvmlInit()
        self._wait("init")

    def nvmlShutdown(self) -> None:
        self._wait("shutdown")
        super().nvmlShutdown()

    def _wait(self, call: str) -> None:
        if call in self.never:
            assert self.over.wait(60)


def test_a_driver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the beginning and at the end: each wait has a deadline, and says so."""
    first, last = Stuck("init"), Stuck("shutdown")
    assert nvml.start(last) == (last, "")
    monkeypatch.setattr(nvml, "PATIENCE_SECONDS", 0.05)
    given_up = "NVML: no answer in 0.05 s: it was given up"
    assert nvml.start(first) == (None, given_up)
    assert nvml.stop(last) == given_up
    first.over.set()
    last.over.set()


def test_a_session_ends_though_the_driver_hangs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stuck = Stuck("shutdown")
    with session.Session(stuck):
        monkeypatch.setattr(nvml, "PATIENCE_SECONDS", 0.05)
    assert "telemetry: NVML: no answer in 0.05 s" in capsys.readouterr().err
    stuck.over.set()


def test_work_that_does_not_end_is_no_recording(tmp_path: Path) -> None:
    over = threading.Event()

    def work(seconds: float) -> int:
        assert over.wait(60)
        return 1

    player = nvml_recording.Player(made_up())
    more = {"rest": 0.01, "busy": 0.01, "every": 0.01, "patience": 0.05}
    with pytest.raises(RuntimeError, match="had not ended"):
        nvml_recording.record(tmp_path / "r.json", player, work, **more)
    over.set()
    assert not list(tmp_path.iterdir()) and player.open == 0


@pytest.mark.parametrize("figure", list(nvml.SAMPLED))
def test_a_figure_that_is_not_supported_is_none_with_its_reason(figure: str) -> None:
    seen = seen_of(nvml_recording.Player(made_up(), lacking=[figure]), 5)
    (gpu,) = sampling.summary(seen, window=(0.0, 4.0)).gpus
    everything = seen_of(nvml_recording.Player(made_up()), 5)
    (whole,) = sampling.summary(everything, window=(0.0, 4.0)).gpus
    assert gpu.missing == {figure: "Not Supported"} and whole.missing == {}
    figures = gpu.to_dict()
    lacks = {key for key, value in figures.items() if value is None}
    assert (
        lacks
        == {
            "utilisation": {"utilisation_percent", "memory_busy_percent"},
            "memory": {"memory_used_bytes"},
            "power": {"power_watts"},
            "sm_clock": {"sm_clock_mhz", "sm_clock_least_mhz"},
            "memory_clock": {"memory_clock_mhz"},
            "temperature": {"temperature_celsius"},
            "energy": set(),  # power x time stands for it
            "throttle": {"throttled"},
        }[figure]
    )
    others = {key for key in figures if not key.startswith(("energy", "miss"))}
    kept = {key: figures[key] for key in others - lacks}
    assert kept == {key: getattr(whole, key) for key in kept}
    text = "\n".join(sampling.texts(Telemetry(launches=sampling.summary(seen))))
    assert f"no {figure}: Not Supported" in text


def test_neither_counter_nor_power_is_no_energy() -> None:
    seen = seen_of(nvml_recording.Player(made_up(), lacking=["energy", "power"]), 5)
    (gpu,) = sampling.summary(seen, window=(0.0, 4.0)).gpus
    assert gpu.energy_joules is None and gpu.energy_source is None


def test_an_older_pynvml_is_asked_by_the_older_name() -> None:
    class Older(nvml_recording.Player):
        def __getattr__(self, function: str) -> Any:
            if function == "nvmlDeviceGetCurrentClocksEventReasons":
                raise AttributeError(function)
            if function == "nvmlDeviceGetCurrentClocksThrottleReasons":
                return lambda handle: 4
            return super().__getattr__(function)

    assert nvml.ask(Older(made_up()), 0, nvml.SAMPLED["throttle"]) == (4, None)

    class Neither(Older):
        def __getattr__(self, function: str) -> Any:
            if function.endswith("ThrottleReasons"):
                raise AttributeError(function)
            return super().__getattr__(function)

    value, why = nvml.ask(Neither(made_up()), 0, nvml.SAMPLED["throttle"])
    assert value is None and why is not None and "this pynvml has no" in why.text


def test_pynvml_has_what_is_asked() -> None:
    """The pinned package knows every function, and its numbers are those written down here."""
    pynvml = pytest.importorskip("pynvml")
    for call in (nvml.FIXED | nvml.SAMPLED).values():
        assert callable(getattr(pynvml, call.function))
    assert nvml._CLOCK_SM == pynvml.NVML_CLOCK_SM
    assert nvml._CLOCK_MEMORY == pynvml.NVML_CLOCK_MEM
    assert nvml._TEMPERATURE_GPU == pynvml.NVML_TEMPERATURE_GPU
    assert nvml_recording._NOT_SUPPORTED == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert nvml._FUNCTION_NOT_FOUND == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    names = {
        "GpuIdle": "idle",
        "ApplicationsClocksSetting": "application clocks",
        "SwPowerCap": "power cap",
        "HwSlowdown": "hardware slowdown",
        "SyncBoost": "sync boost",
        "SwThermalSlowdown": "thermal (software)",
        "HwThermalSlowdown": "thermal (hardware)",
        "HwPowerBrakeSlowdown": "power brake",
        "DisplayClockSetting": "display clocks",
    }
    for suffix, name in names.items():
        assert nvml.THROTTLE[getattr(pynvml, f"nvmlClocksThrottleReason{suffix}")] == name


# -------------------------------------------------------------------------------------- summaries


def test_figures_by_hand() -> None:
    seen = seen_of(nvml_recording.Player(made_up(throttle=0x4 | 0x20)), 5)
    told = sampling.summary(seen)
    (gpu,) = told.gpus
    assert told.resident_bytes == 1004 and told.samples == 5
    assert told.cost.to_dict() == {
        "looks": 5,
        "cpu_seconds": 0.05,
        "share_of_a_core": pytest.approx(0.01),
    }
    assert gpu.utilisation_percent == 20 and gpu.memory_used_bytes == 4 * 2**30
    assert gpu.power_watts == 250 and gpu.power_limit_watts == 300
    assert gpu.sm_clock_mhz == 1798 and gpu.sm_clock_least_mhz == 1796
    assert gpu.temperature_celsius == 44
    assert gpu.throttled == {"idle": 0.6, "power cap": 0.4, "thermal (software)": 0.4}
    assert "energy_joules" not in gpu.to_dict()  # between launches nobody asks
    text = "\n".join(sampling.texts(Telemetry(launches=told)))
    assert "slowed down: power cap in 40% of looks, thermal (software) in 40%" in text
    assert "1.00% of a core" in text


def test_a_reason_that_nobody_knows_is_told() -> None:
    assert sampling.throttled([1 << 40, 0]) == {"unknown to this suite": 0.5}
    assert sampling.throttled([0, 0]) == {} and sampling.throttled([]) is None


@pytest.mark.parametrize("window", [(1.0, 3.0), (1.25, 3.75), (0.0, 4.0), (-1.0, 6.0)])
def test_energy_is_watts_times_seconds(window: tuple[float, float]) -> None:
    """250 W for so long, between looks and beyond them, by the counter and without it."""
    expected = pytest.approx(250 * (window[1] - window[0]))
    for lacking, source in ((), "counter"), (("energy",), "power x time"):
        seen = seen_of(nvml_recording.Player(made_up(), lacking), 5)
        (gpu,) = sampling.summary(seen, window=window).gpus
        assert (gpu.energy_joules, gpu.energy_source) == (expected, source)


def test_only_the_gpus_of_the_ranks_count() -> None:
    two = made_up()
    other = {**two["devices"][0], "pci": PCI | {"bus": 4}, "name": "The Other"}
    two["devices"].append(other)
    for sample in two["samples"]:
        sample["devices"].append({**sample["devices"][0], "power": 1000})
    seen = seen_of(nvml_recording.Player(two), 5)
    assert [gpu.name for gpu in sampling.summary(seen, [other["pci"]]).gpus] == ["The Other"]
    assert len(sampling.summary(seen).gpus) == 2
    record = AloneRecord(0, 10, None, PCI, 1.0, 3.0, 50)
    told = sampling.of_side(seen, [record])
    assert told.joules_per_step == pytest.approx(250 * 2 / 50)
    both = [record, dataclasses.replace(record, pci=other["pci"], resident=30)]
    assert sampling.of_side(seen, both).joules_per_step == pytest.approx(2 * 250 * 2 / 50)
    assert sampling.of_side(seen, both).resident_bytes == 30


def test_a_side_on_the_cpu_has_no_energy() -> None:
    record = AloneRecord(0, 2**20, None, None, 1.0, 1.0, 0)
    told = sampling.of_side(sampling.Seen(), [record])
    assert told.joules_per_step is None and told.allocator is None and told.gpus == []
    (text,) = sampling.texts(Telemetry(launches=None, sides={"a": told}))
    assert text == "A alone, worst rank: 1 MiB resident added, advisory"
    (text,) = sampling.texts(
        Telemetry(launches=None, sides={"b": NoFigures(problem="a rank raised")})
    )
    assert text == "B alone: no figures: a rank raised"


def test_the_worst_rank_counts() -> None:
    first = {"allocated_bytes.all.peak": 5, "reserved_bytes.all.peak": 9, "num_alloc_retries": 1}
    second = {"allocated_bytes.all.peak": 7, "reserved_bytes.all.peak": 8}
    found = sampling.worst([first, second])
    assert found is not None and (found["allocated_peak"], found["reserved_peak"]) == (7, 9)
    assert found["retries"] == 1 and found["out_of_memory"] == 0
    assert sampling.worst([None, None]) is None


# ---------------------------------------------------------------------------------------- sampler


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "telemetry"]


def test_a_sampler_sees_ranks_and_gpus_and_ends() -> None:
    player = nvml_recording.Player(made_up())
    with sampling.Sampler(lambda: [os.getpid()], player, every=0.01) as sampler:
        deadline = time.monotonic() + 10
        while len(sampler.seen.samples) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threads()
    seen = sampler.seen
    assert not threads() and len(seen.samples) >= 4 and not seen.problem
    assert all((sample.resident or 0) > 2**20 for sample in seen.samples)
    clocks = [sample.clock for sample in seen.samples]
    assert clocks == sorted(clocks) and seen.seconds > 0 and seen.cpu_seconds >= 0
    assert [(s.gpus[0].utilisation or {})["gpu"] for s in seen.samples[:3]] == [0, 10, 20]


def test_a_sampler_ends_when_its_block_raises() -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        sampling.Sampler(list, None, every=60.0) as sampler,
    ):
        raise KeyboardInterrupt
    assert not threads() and sampler.seen.samples


def test_a_rank_that_has_ended_is_no_fault() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    with sampling.Sampler(lambda: [gone.pid], None, every=0.01) as sampler:
        time.sleep(0.05)
    assert not sampler.seen.problem and sampler.seen.samples[-1].resident is None


def test_a_sampler_that_cannot_go_on_says_so_and_stops_nobody() -> None:
    class Lost(nvml_recording.Player):
        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            raise nvml_recording.PlayedError(15, "GPU is lost")

    with sampling.Sampler(list, Lost(made_up()), every=0.01) as sampler:
        time.sleep(0.05)
    assert not threads() and "GPU is lost" in sampler.seen.problem
    assert sampling.texts(Telemetry(launches=sampling.summary(sampler.seen)))[-1] == (
        "telemetry: stopped looking: PlayedError: GPU is lost"
    )


def test_a_driver_that_hangs_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    class Hangs(nvml_recording.Player):
        def nvmlDeviceGetCount(self) -> int:
            release.wait(30)
            return 0

    monkeypatch.setattr(sampling, "PATIENCE_SECONDS", 0.1)
    with sampling.Sampler(list, Hangs(made_up()), every=0.01) as sampler:
        pass
    assert "given up" in sampler.seen.problem
    release.set()
    sampler._thread.join(10)
    assert not threads()


def test_ranks_say_who_they_are(tmp_path: Path) -> None:
    assert sampling.pids_in(tmp_path) == []
    sampling.announce(tmp_path, 12)
    sampling.announce(tmp_path, 345)
    sampling.announce(tmp_path, 12)  # a thread of the same process
    assert sorted(sampling.pids_in(tmp_path)) == [12, 345]


def test_what_was_seen_in_several_launches_adds_up() -> None:
    one, two = (seen_of(nvml_recording.Player(made_up()), count) for count in (2, 3))
    both = sampling.Seen()
    both.add(one)
    both.add(two)
    told = sampling.summary(both)
    assert told.samples == 5 and told.cost.cpu_seconds == pytest.approx(0.05)
    assert told.cost.share_of_a_core == pytest.approx(0.01)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_session_asks_nvml_where_ranks_compute_on_gpus(backend: str, tmp_path: Path) -> None:
    """The line of a comparison has the GPUs of its ranks, or says why it has none."""
    (first, *_) = sides.read(["peers"])
    pair = dataclasses.replace(first, backend=backend)
    measured = session.Measured(pair)
    with session.Session(nvml_recording.Player.read(DATA / "nvml-synthetic.json")) as bench:
        with bench._sampler(measured, tmp_path) as sampler:
            pass
        measured.seen.add(sampler.seen)
    assert bench._given_api.open == 0  # NVML is let go of
    line = evidence.result(measured)
    assert isinstance(line, PairLine) and line.telemetry is not None
    told = line.telemetry
    assert told.launches is not None
    if backend == "nccl":
        assert [gpu.name for gpu in told.launches.gpus] == ["Synthetic GPU"]
        assert told.no_gpu is None
    else:
        assert told.launches.gpus == [] and told.no_gpu == "gloo computes on the CPU"


def test_without_nvml_a_session_says_so(tmp_path: Path) -> None:
    measured = session.Measured(dataclasses.replace(sides.read(["peers"])[0], backend="nccl"))
    none = nvml_recording.Player(made_up() | {"devices": []})
    with session.Session(none) as bench, bench._sampler(measured, tmp_path):
        pass
    assert measured.no_gpu == "NVML sees no GPU" and none.open == 0
