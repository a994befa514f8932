"""Resident memory of ranks and NVML's figures of GPUs while sides run: advisory, nothing is judged.

A thread of the process that leads the session looks every half second; no rank ever does.
docs/speed.md says what belongs to all sides and what to one.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardproof.bench.launches import AloneRecord
from shardproof.bench.lines import GpuFigures, LookCost, NoFigures, SideSummary, Summary, Telemetry
from shardproof.bench.telemetry import nvml

#: From and to, by ``time.monotonic``.
Window = tuple[float, float]

#: Seconds between two looks.
EVERY_SECONDS = 0.5
#: Seconds that a look may take before the thread is left to itself (a driver that hangs).
PATIENCE_SECONDS = 5.0
#: Seconds of steps of a side alone, from which energy a step is taken.
ALONE_SECONDS = 3.0
#: What is kept of the caching allocator (``torch.cuda.memory_stats``), bytes or counts.
ALLOCATOR = {
    "allocated_bytes.all.peak": "allocated_peak",
    "reserved_bytes.all.peak": "reserved_peak",
    "inactive_split_bytes.all.peak": "split_peak",
    "num_alloc_retries": "retries",
    "num_ooms": "out_of_memory",
}


@dataclass(frozen=True)
class Sample:
    """One look at ``clock`` (``time.monotonic``): resident bytes of all ranks, and the GPUs."""

    clock: float
    resident: int | None
    gpus: list[nvml.Sampled]


@dataclass
class Seen:
    """Samples by clock, and what taking them cost; ``missing``: GPU -> figure -> why not."""

    samples: list[Sample] = field(default_factory=list)
    fixed: list[nvml.Fixed] = field(default_factory=list)
    missing: dict[int, dict[str, str]] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    problem: str = ""

    def add(self, other: Seen) -> None:
        self.samples += other.samples
        self.fixed = other.fixed or self.fixed
        for gpu, reasons in other.missing.items():
            self.missing.setdefault(gpu, {}).update(reasons)
        self.seconds += other.seconds
        self.cpu_seconds += other.cpu_seconds
        self.problem = self.problem or other.problem


class Sampler:
    """Looks while its ``with`` block lasts; ``seen`` is whole when the block is left, however.

    ``pids()`` are the ranks of the moment; ``api`` is ``pynvml`` after ``nvmlInit``, or ``None``.
    """

    def __init__(
        self, pids: Callable[[], Iterable[int]], api: Any = None, every: float = EVERY_SECONDS
    ) -> None:
        self.seen = Seen()
        self._pids, self._api, self._every = pids, api, every
        self._known: dict[int, Any] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="telemetry", daemon=True)

    def __enter__(self) -> Sampler:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE_SECONDS)
        self.seen.seconds = time.monotonic() - self._began
        if self._thread.is_alive():
            self.seen.problem = f"a look took more than {PATIENCE_SECONDS:.0f} s: it was given up"

    def _look(self) -> None:
        seen, devices = self.seen, []
        try:
            if self._api is not None:
                devices = nvml.handles(self._api)
                for number, device in enumerate(devices):
                    fixed, seen.missing[number] = nvml.answers(self._api, device, nvml.Fixed)
                    seen.fixed.append(fixed)
            while True:
                seen.samples.append(self._sample(devices))
                if self._over.wait(self._every):
                    seen.samples.append(self._sample(devices))  # counters at the end
                    break
        except Exception as error:  # noqa: BLE001 - no figure is worth a comparison
            seen.problem = f"stopped looking: {type(error).__name__}: {error}"
        finally:
            seen.cpu_seconds = time.thread_time()

    def _sample(self, devices: Sequence[Any]) -> Sample:
        gpus = []
        clock = time.monotonic()
        for number, device in enumerate(devices):
            sampled, reasons = nvml.answers(self._api, device, nvml.Sampled)
            gpus.append(sampled)
            self.seen.missing[number].update(reasons)
        return Sample(clock, self._resident(), gpus)

    def _resident(self) -> int | None:
        import psutil

        total = None
        for pid in set(self._pids()):
            try:
                if pid not in self._known:
                    self._known[pid] = psutil.Process(pid)
                total = (total or 0) + int(self._known[pid].memory_info().rss)
            except psutil.Error:
                continue  # this rank has ended
        return total


def pids_in(workdir: Path) -> list[int]:
    """Ranks that have announced themselves in ``workdir`` (:func:`announce`)."""
    return [int(path.name.partition("-")[2]) for path in workdir.glob("pid-*")]


def announce(workdir: Path, pid: int) -> None:
    """Leave this rank's process id in the name of an empty file, which is never half written."""
    (workdir / f"pid-{pid}").touch()


def summary(
    seen: Seen, pcis: Sequence[Mapping[str, int]] | None = None, window: Window | None = None
) -> Summary:
    """Figures of the samples in ``window``.

    ``pcis`` names the GPUs that count; ``None``: all.  Energy is known of a window only: between
    launches nobody asks what a GPU does.
    """
    samples = [s for s in seen.samples if window is None or window[0] <= s.clock <= window[1]]
    chosen = [
        number
        for number, fixed in enumerate(seen.fixed)
        if pcis is None or fixed.pci is None or fixed.pci in list(pcis)
    ]
    return Summary(
        samples=len(samples),
        resident_bytes=max((s.resident for s in samples if s.resident is not None), default=None),
        gpus=[_gpu(seen, samples, number, window) for number in chosen],
        cost=LookCost(
            looks=len(seen.samples),
            cpu_seconds=seen.cpu_seconds,
            share_of_a_core=seen.cpu_seconds / seen.seconds if seen.seconds else None,
        ),
        problem=seen.problem or None,
    )


def _gpu(seen: Seen, samples: Sequence[Sample], number: int, window: Window | None) -> GpuFigures:
    def values(figure: str, part: str = "", scale: float = 1.0) -> list[float]:
        answers = [getattr(sample.gpus[number], figure) for sample in samples]
        return [float(v[part] if part else v) / scale for v in answers if v is not None]

    fixed = seen.fixed[number]
    limit = fixed.power_limit
    figures = GpuFigures(
        gpu=number,
        name=fixed.name,
        utilisation_percent=_mean(values("utilisation", "gpu")),
        memory_busy_percent=_mean(values("utilisation", "memory")),
        memory_used_bytes=max(values("memory", "used"), default=None),
        power_watts=_mean(values("power", scale=1e3)),
        power_limit_watts=None if limit is None else limit / 1e3,
        sm_clock_mhz=_mean(values("sm_clock")),
        sm_clock_least_mhz=min(values("sm_clock"), default=None),
        memory_clock_mhz=_mean(values("memory_clock")),
        temperature_celsius=max(values("temperature"), default=None),
        throttled=throttled([int(v) for v in values("throttle")]),
        missing=dict(seen.missing.get(number, {})),
    )
    if window is None:
        return figures
    joules, source = energy(seen.samples, number, window)
    return figures.model_copy(update={"energy_joules": joules, "energy_source": source})


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def throttled(masks: Sequence[int]) -> dict[str, float] | None:
    """Reason -> share of samples in which NVML gave it; ``None``: it never answered."""
    if not masks:
        return None
    bits = {**nvml.THROTTLE, ~sum(nvml.THROTTLE): "unknown to this suite"}
    counts = {name: sum(bool(mask & bit) for mask in masks) for bit, name in bits.items()}
    return {name: count / len(masks) for name, count in counts.items() if count}


def energy(
    samples: Sequence[Sample], number: int, window: Window
) -> tuple[float | None, str | None]:
    """Joules of GPU ``number`` in ``window``: by its counter, else power times time, else none.

    The counter is read between two looks by a straight line.  Where no look lies outside of the
    window, the mean rate of those inside stands for the rest.
    """
    since, until = window
    points = [
        (sample.clock, counter / 1e3)
        for sample in samples
        if (counter := sample.gpus[number].energy) is not None
    ]
    if len(points) > 1 and points[-1][0] > points[0][0]:
        rate = (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
        joules = _at(points, until, rate) - _at(points, since, rate)
        return joules, "counter"
    powers = [s.gpus[number].power for s in samples if since <= s.clock <= until]
    watts = _mean([power / 1e3 for power in powers if power is not None])
    if watts is not None:
        return watts * (until - since), "power x time"
    return None, None


def _at(points: Sequence[tuple[float, float]], clock: float, rate: float) -> float:
    """The counter at ``clock``, on the line between its neighbours, or at ``rate`` beyond them."""
    import numpy as np  # not for who only reads figures

    clocks, counters = zip(*points, strict=True)
    beyond = min(0.0, clock - clocks[0]) + max(0.0, clock - clocks[-1])
    return float(np.interp(clock, clocks, counters)) + rate * beyond


def of_side(seen: Seen, records: Sequence[AloneRecord]) -> SideSummary:
    """Figures of a side that ran alone on the ranks of ``records``."""
    places = [record.pci for record in records if record.pci is not None]
    window = max(r.began for r in records), min(r.ended for r in records)
    figures = summary(seen, places or None, window)
    joules = [gpu.energy_joules for gpu in figures.gpus if gpu.energy_joules is not None]
    steps = records[0].steps
    whole = bool(joules) and len(joules) == len(figures.gpus)
    return SideSummary(
        **{**dict(figures), "resident_bytes": max(record.resident for record in records)},
        allocator=worst([record.allocator for record in records]),
        steps=steps,
        joules_per_step=sum(joules) / steps if whole else None,
    )


def worst(ranks: Sequence[Mapping[str, int] | None]) -> dict[str, int] | None:
    """The largest of each rank's allocator figures; ``None`` where ranks use no GPU."""
    on_gpus = [stats for stats in ranks if stats is not None]
    if not on_gpus:
        return None
    return {name: max(int(s.get(key, 0)) for s in on_gpus) for key, name in ALLOCATOR.items()}


def texts(telemetry: Telemetry | None) -> list[str]:
    if telemetry is None:
        return []
    lines = []
    launches, sides = telemetry.launches, telemetry.sides
    if launches is not None:
        if launches.resident_bytes is not None:
            mib = launches.resident_bytes / 2**20
            lines.append(f"all ranks, A, its twin and B alive: {mib:,.0f} MiB resident at most")
        lines += [_gpu_text(gpu) for gpu in launches.gpus]
        lines += _slowed(launches.gpus)
        cost = launches.cost
        if cost.share_of_a_core is not None:
            share = cost.share_of_a_core
            lines.append(f"looking at this {cost.looks} times took {share:.2%} of a core")
    lines += [_side_text(letter, side) for letter, side in sides.items()]
    looked = [part for part in (launches, *sides.values()) if isinstance(part, Summary)]
    problems = {part.problem for part in looked if part.problem}
    return lines + [f"telemetry: {problem}" for problem in sorted(problems)]


def _gpu_text(gpu: GpuFigures) -> str:
    figures = (
        (gpu.memory_used_bytes and gpu.memory_used_bytes / 2**20, "{:,.0f} MiB used,"),
        (gpu.utilisation_percent, "{:.0f} % busy,"),
        (gpu.power_watts, "{:.0f} W,"),
        (gpu.sm_clock_mhz, "SM at {:.0f} MHz"),
        (gpu.sm_clock_least_mhz, "(least {:.0f}),"),
        (gpu.temperature_celsius, "{:.0f} degrees at most,"),
    )
    parts = [form.format(value) for value, form in figures if value is not None]
    absent = "; ".join(f"no {figure}: {why}" for figure, why in gpu.missing.items())
    text = " ".join([f"GPU {gpu.gpu} {gpu.name}:", *parts]).rstrip(",")
    return text + (f" ({absent})" if absent else "")


def _slowed(gpus: Sequence[GpuFigures]) -> list[str]:
    lines = []
    for gpu in gpus:
        slow = {name: s for name, s in (gpu.throttled or {}).items() if name in nvml.SLOWS}
        if slow:
            shares = ", ".join(f"{name} in {share:.0%} of looks" for name, share in slow.items())
            lines.append(f"caution: GPU {gpu.gpu} was slowed down: {shares}")
    return lines


def _side_text(letter: str, side: SideSummary | NoFigures) -> str:
    if isinstance(side, NoFigures):
        return f"{letter.upper()} alone: no figures: {side.problem}"
    parts = [f"{(side.resident_bytes or 0) / 2**20:,.0f} MiB resident added, advisory"]
    if side.allocator is not None:
        peak, held = (side.allocator[key] / 2**20 for key in ("allocated_peak", "reserved_peak"))
        parts.append(f"{peak:,.0f} MiB allocated on the GPU, {held:,.0f} held")
    if side.joules_per_step is not None:
        source = side.gpus[0].energy_source
        parts.append(f"{side.joules_per_step:.3g} J a step ({source})")
    return f"{letter.upper()} alone, worst rank: " + "; ".join(parts)
