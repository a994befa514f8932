"""NVML's answers recorded and played back, so that tests need no GPU.

    python tests/support/nvml_recording.py --record tests/data/nvml-NAME.json   on a GPU machine

A recording holds the answers and the errors of every call over some seconds of rest, work and rest,
without serial numbers; :class:`Player` answers from it as ``pynvml`` does.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardproof.bench.telemetry import nvml
from shardproof.files import write_whole

FORMAT = 1
_INVALID_ARGUMENT, _NOT_SUPPORTED = 2, 3


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
    api, why = nvml.start(api)
    if api is None:
        raise RuntimeError(f"nothing to record: {why}")
    try:
        devices = nvml.handles(api)
        told: dict[str, Any] = {
            "format": FORMAT,
            "made": _made(api),
            "devices": [_raw(api, handle, nvml.FIXED) for handle in devices],
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
        nvml.stop(api)
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
    return {"pci": nvml.pci_of(torch.cuda.get_device_properties(0)), "allocator": nvml.allocator()}


def _raw(api: Any, handle: Any, calls: Mapping[str, nvml.Call]) -> dict[str, Any]:
    """Figure -> value, or the error as ``{"error": code, "text": ...}``."""
    found = {}
    for figure, call in calls.items():
        value, refusal = nvml.ask(api, handle, call)
        found[figure] = value if refusal is None else {"error": refusal.code, "text": refusal.text}
    return found


def _sample_for(
    seconds: float, began: float, api: Any, devices: Iterable[Any], every: float, to: list[Any]
) -> list[float]:
    """Append samples for so long; how many seconds each one took."""
    costs = []
    until = time.monotonic() + seconds
    while (now := time.monotonic()) < until:
        sample = [_raw(api, handle, nvml.SAMPLED) for handle in devices]
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
        if not any(function == call.function for call in (nvml.FIXED | nvml.SAMPLED).values()):
            raise AttributeError(function)

        def answer(handle: int, *arguments: int) -> Any:
            return self._answer(function, handle, arguments)

        return answer

    def _answer(self, function: str, handle: int, arguments: tuple[int, ...]) -> Any:
        known = {
            (call.function, call.arguments): name
            for name, call in (nvml.FIXED | nvml.SAMPLED).items()
        }
        figure = known.get((function, arguments))
        if figure is None:
            raise PlayedError(_INVALID_ARGUMENT, f"{function}{arguments} was not recorded")
        if figure in self._lacking:
            raise PlayedError(_NOT_SUPPORTED, "Not Supported")
        if figure in nvml.FIXED:
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


# ------------------------------------------------------------------------------- as a command


def main(arguments: Sequence[str] | None = None) -> int:
    """Record what NVML answers here; exit code 2 where there is nothing to record."""
    name = "python tests/support/nvml_recording.py"
    parser = argparse.ArgumentParser(prog=name, description=main.__doc__)
    parser.add_argument("--record", metavar="FILE", type=Path, required=True, help="JSON to write")
    parser.add_argument("--rest", metavar="S", type=float, default=2.0, help="before and after")
    parser.add_argument("--busy", metavar="S", type=float, default=6.0, help="seconds of work")
    parser.add_argument("--every", metavar="S", type=float, default=0.2, help="between two looks")
    parser.add_argument("--no-work", action="store_true", help="leave out the matrix products")
    options = parser.parse_args(arguments)
    if not (options.rest > 0 and options.busy > 0 and options.every > 0):
        parser.error("--rest, --busy and --every are seconds, more than 0")
    work = None if options.no_work else multiply
    try:
        told = record(options.record, None, work, options.rest, options.busy, options.every)
    except (RuntimeError, OSError) as error:
        print(f"{options.record}: {error}", file=sys.stderr)
        return 2
    cost = told["sample_seconds"]
    print(
        f"{options.record}: {len(told['samples'])} samples of {len(told['devices'])} GPU(s), "
        f"{told['busy']['steps']} steps of work; a sample took {1e3 * cost['median']:.2f} ms "
        f"(at most {1e3 * cost['max']:.2f})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
