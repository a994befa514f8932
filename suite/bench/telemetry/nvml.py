"""NVIDIA's management library as this suite uses it: ask it, record its answers, play them back.

Every figure is one call of ``pynvml`` (package nvidia-ml-py).  What a GPU, its driver or container
does not support is ``None``, with the reason beside it, and the other figures stay.  A recording
holds the answers and the errors of every call over some seconds of rest, work and rest, without
serial numbers; :class:`Player` answers from it as ``pynvml`` does, so that tests need no GPU.

Needs the standard library only (recording: ``pynvml``; the work: torch with CUDA).
Source: NVML API reference, NVIDIA, chapter 5 "Device Queries" and "NvmlClocksEventReasons".
"""

from __future__ import annotations

import json
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardproof.bench.telemetry.patience import within
from shardproof.files import write_whole

FORMAT = 1
_CLOCK_SM, _CLOCK_MEMORY, _TEMPERATURE_GPU = 1, 2, 0
_INVALID_ARGUMENT, _NOT_SUPPORTED, _FUNCTION_NOT_FOUND = 2, 3, 13
#: Seconds that NVML may take to begin or to end: a driver that hangs shall not hang the suite.
PATIENCE_SECONDS = 30.0


@dataclass(frozen=True)
class Call:
    """``pynvml.<function>(handle, *arguments)``; ``fields`` of a structure; an ``older`` name."""

    function: str
    arguments: tuple[int, ...] = ()
    fields: tuple[str, ...] = ()
    older: str = ""


#: What does not change while a run lasts.
FIXED: dict[str, Call] = {
    "name": Call("nvmlDeviceGetName"),
    "pci": Call("nvmlDeviceGetPciInfo", fields=("domain", "bus", "device")),
    "power_limit": Call("nvmlDeviceGetEnforcedPowerLimit"),  # mW
    "sm_clock_limit": Call("nvmlDeviceGetMaxClockInfo", (_CLOCK_SM,)),  # MHz
    "memory_clock_limit": Call("nvmlDeviceGetMaxClockInfo", (_CLOCK_MEMORY,)),
}
#: What a sample holds.
SAMPLED: dict[str, Call] = {
    "utilisation": Call("nvmlDeviceGetUtilizationRates", fields=("gpu", "memory")),  # per cent
    "memory": Call("nvmlDeviceGetMemoryInfo", fields=("total", "used")),  # bytes
    "power": Call("nvmlDeviceGetPowerUsage"),  # mW
    "sm_clock": Call("nvmlDeviceGetClockInfo", (_CLOCK_SM,)),  # MHz
    "memory_clock": Call("nvmlDeviceGetClockInfo", (_CLOCK_MEMORY,)),
    "temperature": Call("nvmlDeviceGetTemperature", (_TEMPERATURE_GPU,)),  # degrees Celsius
    "energy": Call("nvmlDeviceGetTotalEnergyConsumption"),  # mJ since the driver was loaded
    "throttle": Call(
        "nvmlDeviceGetCurrentClocksEventReasons",
        older="nvmlDeviceGetCurrentClocksThrottleReasons",
    ),
}
#: Bits of ``throttle``.  The first two and the last say how clocks are set, not that they suffer.
THROTTLE: dict[int, str] = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}
#: Those that make a GPU slower than it could be.
SLOWS = frozenset(THROTTLE[bit] for bit in (0x4, 0x8, 0x20, 0x40, 0x80))


def start(api: Any = None) -> tuple[Any, str]:
    """``pynvml`` (or ``api``) with NVML initialised, or ``None``; and why it is ``None``."""
    if api is None:
        try:
            import pynvml
        except ImportError:
            return None, "package nvidia-ml-py is not installed"
        api = pynvml

    def begin() -> int:
        api.nvmlInit()
        count = int(api.nvmlDeviceGetCount())
        if not count:
            api.nvmlShutdown()
        return count

    try:
        count = within(PATIENCE_SECONDS, begin)
    except (api.NVMLError, TimeoutError) as error:
        return None, f"NVML: {error}"
    return (api, "") if count else (None, "NVML sees no GPU")


def stop(api: Any) -> str:
    """Let go of NVML; what it says against that."""
    try:
        within(PATIENCE_SECONDS, api.nvmlShutdown)
    except (api.NVMLError, TimeoutError) as error:
        return f"NVML: {error}"
    return ""


def handles(api: Any) -> list[Any]:
    """A handle for every GPU that NVML sees."""
    return [api.nvmlDeviceGetHandleByIndex(index) for index in range(api.nvmlDeviceGetCount())]


def ask(api: Any, handle: Any, call: Call) -> tuple[Any, str]:
    """The answer as JSON has it, or ``None``; and why it is ``None``."""
    value, error = _ask(api, handle, call)
    return value, "" if error is None else str(error["text"])


def _ask(api: Any, handle: Any, call: Call) -> tuple[Any, dict[str, Any] | None]:
    answer, error = None, None
    for name in filter(None, (call.function, call.older)):
        function = getattr(api, name, None)
        if function is None:  # another release of pynvml, which is what it would say of a driver
            error = {"error": _FUNCTION_NOT_FOUND, "text": f"this pynvml has no {name}"}
            continue
        try:
            answer, error = function(handle, *call.arguments), None
        except api.NVMLError as refused:
            error = {"error": int(refused.value), "text": str(refused)}
        if error is None or error["error"] != _FUNCTION_NOT_FOUND:
            break
    if error is not None:
        return None, error
    if call.fields:
        return {name: int(getattr(answer, name)) for name in call.fields}, None
    return answer.decode() if isinstance(answer, bytes) else answer, None


def answers(
    api: Any, handle: Any, calls: Mapping[str, Call]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Figure -> value (``None`` where there is none), and figure -> why there is none."""
    values, reasons = {}, {}
    for figure, call in calls.items():
        values[figure], why = ask(api, handle, call)
        if values[figure] is None:
            reasons[figure] = why
    return values, reasons


def pci_of(properties: Any) -> dict[str, int] | None:
    """Where torch's GPU is, as NVML calls ``pci``; ``None`` where this torch does not tell."""
    names = {"domain": "pci_domain_id", "bus": "pci_bus_id", "device": "pci_device_id"}
    if not all(hasattr(properties, name) for name in names.values()):
        return None
    return {key: int(getattr(properties, name)) for key, name in names.items()}


def allocator() -> dict[str, int]:
    """What torch's caching allocator tells of this process's current GPU; zeros are left out."""
    import torch

    return {key: int(v) for key, v in torch.cuda.memory_stats().items() if v}


# ------------------------------------------------------------------------------------- recording


def record(
    path: Path,
    api: Any = None,
    work: Callable[[float], int] | None = None,
    rest: float = 2.0,
    busy: float = 6.0,
    every: float = 0.2,
    patience: float = 60.0,
) -> dict[str, Any]:
    """Write to ``path`` what NVML answers during ``rest``, ``busy`` and ``rest`` seconds.

    ``work(seconds)`` keeps the GPU busy and returns its number of steps; it may take ``patience``
    seconds longer (the first use of a GPU takes some).

    :raises RuntimeError: there is no NVML here, or the work failed or did not end.
    """
    api, why = start(api)
    if api is None:
        raise RuntimeError(f"nothing to record: {why}")
    try:
        devices = handles(api)
        told: dict[str, Any] = {
            "format": FORMAT,
            "made": _made(api),
            "devices": [_raw(api, handle, FIXED) for handle in devices],
            "samples": [],
        }
        done: list[int | BaseException] = []

        def run() -> None:
            try:
                done.append(0 if work is None else work(busy))
            except BaseException as error:  # noqa: BLE001 - raised again by the caller
                done.append(error)

        began = time.monotonic()
        costs = _sample_for(rest, began, api, devices, every, told["samples"])
        worker = threading.Thread(target=run, name="work", daemon=True)
        told["busy"] = {"from": time.monotonic() - began}
        worker.start()
        until = time.monotonic() + busy + patience
        while worker.is_alive():
            if time.monotonic() > until:
                raise RuntimeError(f"the work of {busy:g} s had not ended {patience:g} s later")
            costs += _sample_for(every, began, api, devices, every, told["samples"])
        told["busy"] |= {"to": time.monotonic() - began, "steps": 0}
        if done and isinstance(done[0], BaseException):
            raise RuntimeError(f"the work failed: {done[0]!r}") from done[0]
        told["busy"]["steps"] = done[0] if done else 0
        costs += _sample_for(rest, began, api, devices, every, told["samples"])
        told["sample_seconds"] = {"median": statistics.median(costs), "max": max(costs)}
        told["torch"] = _torch()
    finally:
        stop(api)
    write_whole(path, _text(told))
    return told


def _made(api: Any) -> dict[str, Any]:
    import importlib.metadata

    found: dict[str, Any] = {"python": platform.python_version()}
    for package in ("nvidia-ml-py", "torch"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    for name in ("nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion"):
        try:
            version = getattr(api, name, lambda: None)()
        except api.NVMLError as error:
            version = f"unknown: {error}"
        found[name] = version.decode() if isinstance(version, bytes) else version
    return found


def _torch() -> dict[str, Any] | None:
    """What torch says of the GPU that worked, if it worked here."""
    import sys

    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return {"pci": pci_of(torch.cuda.get_device_properties(0)), "allocator": allocator()}


def _raw(api: Any, handle: Any, calls: Mapping[str, Call]) -> dict[str, Any]:
    """Figure -> value, or the error as ``{"error": code, "text": ...}``."""
    found = {}
    for figure, call in calls.items():
        value, error = _ask(api, handle, call)
        found[figure] = value if error is None else error
    return found


def _sample_for(
    seconds: float, began: float, api: Any, devices: Iterable[Any], every: float, to: list[Any]
) -> list[float]:
    """Append samples for so long; how many seconds each one took."""
    costs = []
    until = time.monotonic() + seconds
    while (now := time.monotonic()) < until:
        sample = [_raw(api, handle, SAMPLED) for handle in devices]
        costs.append(time.monotonic() - now)
        to.append({"seconds": round(now - began, 4), "devices": sample})
        time.sleep(max(0.0, min(every - costs[-1], until - time.monotonic())))
    return costs


def _text(told: Mapping[str, Any]) -> str:
    """JSON with a sample a line, so that a recording can be read."""
    head = {key: value for key, value in told.items() if key != "samples"}
    lines = ",\n  ".join(json.dumps(sample) for sample in told["samples"])
    return json.dumps(head, indent=1)[:-2] + f',\n "samples": [\n  {lines}\n ]\n}}\n'


def multiply(seconds: float) -> int:
    """Keep the first GPU busy with matrix products for so long; how many there were.

    :raises RuntimeError: torch sees no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU")
    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    right, steps = torch.randn_like(left), 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        left @ right
        torch.cuda.synchronize()
        steps += 1
    return steps


# ---------------------------------------------------------------------------------- playing back


class PlayedError(Exception):
    """An error that was recorded; ``value`` is NVML's code."""

    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


class _Structure:
    """Fields of an answer as attributes."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.__dict__.update(fields)


class Player:
    """A recording that answers as ``pynvml`` does; the n-th ask of a figure has the n-th sample's.

    After the last sample the last answer stays.  ``lacking``: figures that this GPU shall not
    support, whatever was recorded.  ``open`` counts ``nvmlInit`` less ``nvmlShutdown``.
    """

    NVMLError = PlayedError

    def __init__(self, recording: Mapping[str, Any], lacking: Iterable[str] = ()) -> None:
        if recording.get("format") != FORMAT:
            raise ValueError(f"a recording of format {recording.get('format')}, not {FORMAT}")
        self._recording, self._lacking = recording, frozenset(lacking)
        self._asked: dict[tuple[int, str], int] = {}
        self.open = 0

    @classmethod
    def read(cls, path: Path, lacking: Iterable[str] = ()) -> Player:
        """The recording in the file at ``path``."""
        return cls(json.loads(path.read_text(encoding="utf-8")), lacking)

    def nvmlInit(self) -> None:
        """Begin."""
        self.open += 1

    def nvmlShutdown(self) -> None:
        """End."""
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        """Number of GPUs in the recording."""
        return len(self._recording["devices"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        """The handle of a GPU is its number."""
        return index

    def __getattr__(self, function: str) -> Callable[..., Any]:
        if not any(function == call.function for call in (FIXED | SAMPLED).values()):
            raise AttributeError(function)

        def answer(handle: int, *arguments: int) -> Any:
            return self._answer(function, handle, arguments)

        return answer

    def _answer(self, function: str, handle: int, arguments: tuple[int, ...]) -> Any:
        known = {(call.function, call.arguments): name for name, call in (FIXED | SAMPLED).items()}
        figure = known.get((function, arguments))
        if figure is None:
            raise PlayedError(_INVALID_ARGUMENT, f"{function}{arguments} was not recorded")
        if figure in self._lacking:
            raise PlayedError(_NOT_SUPPORTED, "Not Supported")
        if figure in FIXED:
            value = self._recording["devices"][handle][figure]
        else:
            samples = self._recording["samples"]
            place = self._asked.get((handle, figure), 0)
            self._asked[handle, figure] = place + 1
            value = samples[min(place, len(samples) - 1)]["devices"][handle][figure]
        if isinstance(value, Mapping):
            if "error" in value:
                raise PlayedError(int(value["error"]), str(value["text"]))
            return _Structure(value)
        return value
