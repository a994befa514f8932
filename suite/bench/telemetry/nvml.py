"""NVIDIA's management library (NVML) as this suite asks it.

Every figure is one call of ``pynvml`` (package nvidia-ml-py).  A figure that the GPU, its driver or
the container does not support is ``None`` with the reason beside it; the other figures stay.

Source: NVML API reference, NVIDIA, chapter 5 "Device Queries" and "NvmlClocksEventReasons".
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

_CLOCK_SM, _CLOCK_MEMORY, _TEMPERATURE_GPU = 1, 2, 0
_FUNCTION_NOT_FOUND = 13
#: Seconds that NVML may take to start or stop: a driver that hangs must not hang the suite.
PATIENCE_SECONDS = 30.0


@dataclass(frozen=True)
class Call:
    """``pynvml.<function>(handle, *arguments)``; ``fields`` of a structure; an ``older`` name."""

    function: str
    arguments: tuple[int, ...] = ()
    fields: tuple[str, ...] = ()
    older: str = ""


@dataclass(frozen=True)
class Refusal:
    """Why NVML gave no answer: its error code and its text."""

    code: int
    text: str


@dataclass(frozen=True)
class Fixed:
    """What does not change while a run lasts."""

    name: Annotated[str | None, Call("nvmlDeviceGetName")]
    pci: Annotated[
        dict[str, int] | None, Call("nvmlDeviceGetPciInfo", fields=("domain", "bus", "device"))
    ]
    power_limit: Annotated[int | None, Call("nvmlDeviceGetEnforcedPowerLimit")]  # mW
    sm_clock_limit: Annotated[int | None, Call("nvmlDeviceGetMaxClockInfo", (_CLOCK_SM,))]  # MHz
    memory_clock_limit: Annotated[int | None, Call("nvmlDeviceGetMaxClockInfo", (_CLOCK_MEMORY,))]


@dataclass(frozen=True)
class Sampled:
    """A GPU at one moment; energy is counted since the driver was loaded."""

    utilisation: Annotated[  # per cent
        dict[str, int] | None, Call("nvmlDeviceGetUtilizationRates", fields=("gpu", "memory"))
    ]
    memory: Annotated[  # bytes
        dict[str, int] | None, Call("nvmlDeviceGetMemoryInfo", fields=("total", "used"))
    ]
    power: Annotated[int | None, Call("nvmlDeviceGetPowerUsage")]  # mW
    sm_clock: Annotated[int | None, Call("nvmlDeviceGetClockInfo", (_CLOCK_SM,))]  # MHz
    memory_clock: Annotated[int | None, Call("nvmlDeviceGetClockInfo", (_CLOCK_MEMORY,))]
    temperature: Annotated[  # degrees Celsius
        int | None, Call("nvmlDeviceGetTemperature", (_TEMPERATURE_GPU,))
    ]
    energy: Annotated[int | None, Call("nvmlDeviceGetTotalEnergyConsumption")]  # mJ
    throttle: Annotated[
        int | None,
        Call(
            "nvmlDeviceGetCurrentClocksEventReasons",
            older="nvmlDeviceGetCurrentClocksThrottleReasons",
        ),
    ]


F = TypeVar("F", Fixed, Sampled)
#: Figure -> its call.
FIXED, SAMPLED = (
    {
        figure: hint.__metadata__[0]
        for figure, hint in get_type_hints(kind, include_extras=True).items()
    }
    for kind in (Fixed, Sampled)
)
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


def within(seconds: float, action: Callable[[], Any]) -> Any:
    """What ``action`` returns, or raises; after ``seconds`` its thread is left to itself.

    :raises TimeoutError: it had not ended by then.
    """
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((action(), None))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="with a deadline", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer in {seconds:g} s: it was given up")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def start(api: Any = None) -> tuple[Any, str]:
    """Initialise NVML; ``(pynvml, "")``, or ``(None, why)`` where that fails.

    ``api`` stands in for ``pynvml``.
    """
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
    """Shut NVML down; an error text, or nothing."""
    try:
        within(PATIENCE_SECONDS, api.nvmlShutdown)
    except (api.NVMLError, TimeoutError) as error:
        return f"NVML: {error}"
    return ""


def handles(api: Any) -> list[Any]:
    return [api.nvmlDeviceGetHandleByIndex(index) for index in range(api.nvmlDeviceGetCount())]


def ask(api: Any, handle: Any, call: Call) -> tuple[Any, Refusal | None]:
    """The answer as JSON has it, or ``None`` and why there is none."""
    answer, refusal = None, None
    for name in filter(None, (call.function, call.older)):
        function = getattr(api, name, None)
        if function is None:  # another release of pynvml; an old driver would answer the same
            refusal = Refusal(_FUNCTION_NOT_FOUND, f"this pynvml has no {name}")
            continue
        try:
            answer, refusal = function(handle, *call.arguments), None
        except api.NVMLError as error:
            refusal = Refusal(int(error.value), str(error))
        if refusal is None or refusal.code != _FUNCTION_NOT_FOUND:
            break
    if refusal is not None:
        return None, refusal
    if call.fields:
        return {name: int(getattr(answer, name)) for name in call.fields}, None
    return answer.decode() if isinstance(answer, bytes) else answer, None


def answers(api: Any, handle: Any, kind: type[F]) -> tuple[F, dict[str, str]]:
    """Figures (``None`` where there is no answer), and figure -> why there is none."""
    calls = FIXED if kind is Fixed else SAMPLED
    asked = {figure: ask(api, handle, call) for figure, call in calls.items()}
    reasons = {figure: refusal.text for figure, (_, refusal) in asked.items() if refusal}
    return kind(**{figure: value for figure, (value, _) in asked.items()}), reasons


def pci_of(properties: Any) -> dict[str, int] | None:
    """Where torch's GPU is, as NVML calls ``pci``; ``None`` where torch does not say."""
    names = {"domain": "pci_domain_id", "bus": "pci_bus_id", "device": "pci_device_id"}
    if not all(hasattr(properties, name) for name in names.values()):
        return None
    return {key: int(getattr(properties, name)) for key, name in names.items()}


def allocator() -> dict[str, int]:
    """Figures of torch's caching allocator for this process's current GPU; zeros are left out."""
    import torch

    return {key: int(v) for key, v in torch.cuda.memory_stats().items() if v}
