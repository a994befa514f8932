"""Resident memory of ranks, and what NVML says of GPUs, while sides run: advisory, not judged.

A thread of the process that leads the session looks every half second; no rank ever does.
docs/speed.md says what belongs to all sides and what to one.

Each figure of a GPU is one call of ``pynvml`` (package nvidia-ml-py).  A figure that the GPU, its
driver or the container does not support is ``None`` with the reason beside it; the others stay.
Source: NVML API reference, NVIDIA, chapter 5 "Device Queries".
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shardproof.bench.lines import GpuFigures, NoFigures, SideSummary, Summary, Telemetry
from shardproof.bench.subjects import AloneRecord

#: Figure -> its value, ``None`` where there is no answer.
Figures = Mapping[str, Any]

#: Seconds between two looks.
EVERY_SECONDS = 0.5
#: Seconds that a look may take before the thread is left to itself (a driver that hangs).
PATIENCE_SECONDS = 5.0
#: What is kept of the caching allocator (``torch.cuda.memory_stats``), bytes or counts.
ALLOCATOR = {
    "allocated_bytes.all.peak": "allocated_peak",
    "reserved_bytes.all.peak": "reserved_peak",
    "inactive_split_bytes.all.peak": "split_peak",
    "num_alloc_retries": "retries",
    "num_ooms": "out_of_memory",
}
#: Figure -> its function of ``pynvml`` and, of a structure, the fields: per cent, bytes.
CALLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "name": ("nvmlDeviceGetName", ()),
    "pci": ("nvmlDeviceGetPciInfo", ("domain", "bus", "device")),
    "utilisation": ("nvmlDeviceGetUtilizationRates", ("gpu", "memory")),
    "memory": ("nvmlDeviceGetMemoryInfo", ("total", "used")),
}


def look(api: Any, handle: Any) -> tuple[Figures, dict[str, str]]:
    """All figures of a GPU, and figure -> why there is none."""
    figures: dict[str, Any] = dict.fromkeys(CALLS)
    reasons = {}
    for figure, (function, names) in CALLS.items():
        try:
            answer = getattr(api, function)(handle)
        except (api.NVMLError, AttributeError) as error:
            reasons[figure] = str(error)
            continue
        if names:
            answer = {name: int(getattr(answer, name)) for name in names}
        figures[figure] = answer.decode() if isinstance(answer, bytes) else answer
    return figures, reasons


class Sample(NamedTuple):
    """One look: resident bytes of all ranks, and the GPUs."""

    resident: int | None
    gpus: list[Figures]


@dataclass
class Seen:
    """Samples in their order; ``missing``: GPU -> figure -> why not.

    ``no_gpu``: why there are no GPUs; ``problem``: what ended the looks.
    """

    samples: list[Sample] = field(default_factory=list)
    missing: dict[int, dict[str, str]] = field(default_factory=dict)
    no_gpu: str = ""
    problem: str = ""

    def add(self, other: Seen) -> None:
        """Take in what was seen in another launch."""
        self.samples += other.samples
        for gpu, reasons in other.missing.items():
            self.missing.setdefault(gpu, {}).update(reasons)
        self.no_gpu = self.no_gpu or other.no_gpu
        self.problem = self.problem or other.problem


class Sampler:
    """Looks while its ``with`` block lasts; ``seen`` is whole when the block is left, however.

    ``pids()`` are the ranks of the moment; ``also`` is called at each look.  ``on_gpu``: NVML is
    asked, too, in the same thread, so that a driver that hangs holds up nothing else; ``api``
    stands in for ``pynvml``.
    """

    def __init__(
        self,
        pids: Callable[[], Iterable[int]],
        also: Callable[[], None] = lambda: None,
        on_gpu: bool = False,
        api: Any = None,
        every: float = EVERY_SECONDS,
    ) -> None:
        self.seen = Seen()
        self._pids, self._also, self._on_gpu = pids, also, on_gpu
        self._api, self._every = api, every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="telemetry", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE_SECONDS)
        if self._thread.is_alive():
            self.seen.problem = f"a look took more than {PATIENCE_SECONDS:.0f} s: it was given up"

    def _look(self) -> None:
        seen = self.seen
        try:
            devices = self._devices() if self._on_gpu else []
            while True:
                seen.samples.append(self._sample(devices))
                if self._over.wait(self._every):
                    break
                self._also()
            if devices:
                self._api.nvmlShutdown()
        except Exception as error:  # noqa: BLE001 - no figure is worth a comparison
            seen.problem = f"stopped looking: {type(error).__name__}: {error}"

    def _devices(self) -> list[Any]:
        """Handles of the GPUs; none where NVML cannot be had, which is noted."""
        if self._api is None:
            try:
                import pynvml as api
            except ImportError:
                self.seen.no_gpu = "package nvidia-ml-py is not installed"
                return []
            self._api = api
        try:
            self._api.nvmlInit()
        except self._api.NVMLError as error:
            self.seen.no_gpu = f"NVML: {error}"
            return []
        count = self._api.nvmlDeviceGetCount()
        if not count:
            self.seen.no_gpu = "NVML sees no GPU"
            self._api.nvmlShutdown()
        return [self._api.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    def _sample(self, devices: Sequence[Any]) -> Sample:
        gpus = []
        for number, device in enumerate(devices):
            figures, reasons = look(self._api, device)
            gpus.append(figures)
            self.seen.missing.setdefault(number, {}).update(reasons)
        return Sample(self._resident(), gpus)

    def _resident(self) -> int | None:
        import psutil

        sizes = []
        for pid in set(self._pids()):
            with suppress(psutil.Error):  # this rank has ended
                sizes.append(int(psutil.Process(pid).memory_info().rss))
        return sum(sizes) if sizes else None


def pids_in(workdir: Path) -> list[int]:
    """Ranks that have announced themselves in ``workdir`` (:func:`announce`)."""
    return [int(path.name.partition("-")[2]) for path in workdir.glob("pid-*")]


def announce(workdir: Path, pid: int) -> None:
    """Leave this rank's process id in the name of an empty file, which is never half written."""
    (workdir / f"pid-{pid}").touch()


def pci() -> dict[str, int] | None:
    """Where this process's GPU is, as NVML calls ``pci``; ``None`` where torch does not say."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    names = {name: f"pci_{name}_id" for name in CALLS["pci"][1]}
    if not all(hasattr(properties, name) for name in names.values()):
        return None
    return {key: int(getattr(properties, name)) for key, name in names.items()}


def allocator() -> dict[str, int]:
    """Figures of torch's caching allocator for this process's current GPU; zeros are left out."""
    import torch

    return {key: int(v) for key, v in torch.cuda.memory_stats().items() if v}


def summary(seen: Seen, pcis: Sequence[Mapping[str, int]] | None = None) -> Summary:
    """Figures of all samples; ``pcis`` names the GPUs that count (``None``: all)."""
    samples = seen.samples
    places = [gpu["pci"] for gpu in (samples[0].gpus if samples else ())]
    chosen = [n for n, pci in enumerate(places) if pcis is None or pci is None or pci in pcis]
    return Summary(
        samples=len(samples),
        resident_bytes=max((s.resident for s in samples if s.resident is not None), default=None),
        gpus=[_gpu(seen, number) for number in chosen],
        problem=seen.problem or None,
    )


def _gpu(seen: Seen, number: int) -> GpuFigures:
    def values(figure: str, part: str) -> list[float]:
        answered = [sample.gpus[number][figure] for sample in seen.samples]
        return [float(value[part]) for value in answered if value is not None]

    parts = {part: values("utilisation", part) for part in ("gpu", "memory")}
    means = {part: statistics.fmean(seen) if seen else None for part, seen in parts.items()}
    return GpuFigures(
        gpu=number,
        name=seen.samples[0].gpus[number]["name"],
        utilisation_percent=means["gpu"],
        memory_busy_percent=means["memory"],
        memory_used_bytes=max(values("memory", "used"), default=None),
        missing=dict(seen.missing.get(number, {})),
    )


def of_side(records: Sequence[AloneRecord]) -> SideSummary:
    """Figures of a side that ran alone on the ranks of ``records``."""
    on_gpus = [record.allocator for record in records if record.allocator is not None]
    most = {key: max((s.get(key, 0) for s in on_gpus), default=0) for key in ALLOCATOR}
    return SideSummary(
        resident_bytes=max(record.resident for record in records),
        allocator={name: most[key] for key, name in ALLOCATOR.items()} if on_gpus else None,
    )


def texts(told: Telemetry | None) -> list[str]:
    """Lines below a comparison."""
    if told is None:
        return []
    launches = told.launches
    lines = [] if launches is None else [_gpu_text(gpu) for gpu in launches.gpus]
    if launches is not None and launches.resident_bytes is not None:
        mib = launches.resident_bytes / 2**20
        lines.insert(0, f"all ranks, A, its twin and B alive: {mib:,.0f} MiB resident at most")
    lines += [_side_text(letter, side) for letter, side in told.sides.items()]
    if launches is not None and launches.problem:
        lines.append(f"telemetry: {launches.problem}")
    return lines


def _gpu_text(gpu: GpuFigures) -> str:
    used, busy = gpu.memory_used_bytes, gpu.utilisation_percent
    parts = [f"{used / 2**20:,.0f} MiB used"] if used else []
    parts += [f"{busy:.0f} % busy"] if busy is not None else []
    absent = "; ".join(f"no {figure}: {why}" for figure, why in gpu.missing.items())
    return f"GPU {gpu.gpu} {gpu.name}: {', '.join(parts)}" + (f" ({absent})" if absent else "")


def _side_text(letter: str, side: SideSummary | NoFigures) -> str:
    if isinstance(side, NoFigures):
        return f"{letter.upper()} alone: no figures: {side.problem}"
    parts = [f"{side.resident_bytes / 2**20:,.0f} MiB resident added, advisory"]
    if side.allocator is not None:
        peak, held = (side.allocator[key] / 2**20 for key in ("allocated_peak", "reserved_peak"))
        parts.append(f"{peak:,.0f} MiB allocated on the GPU, {held:,.0f} held")
    return f"{letter.upper()} alone, worst rank: " + "; ".join(parts)
