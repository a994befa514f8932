"""NVML as ``pynvml`` gives it, played from answers that a test makes up: no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from shardproof.bench.telemetry import CALLS

NOT_SUPPORTED = 3
_FIGURES = {function: figure for figure, (function, _) in CALLS.items()}


class PlayedError(Exception):
    """An error of NVML; ``value`` is its code."""

    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


class Player:
    """GPUs that answer; the n-th ask of a figure has the n-th sample's, then the last one's.

    ``devices``: what does not change of each GPU; ``samples``: figures of each at each moment;
    ``lacking``: figures that they do not support.  ``open`` counts ``nvmlInit`` less
    ``nvmlShutdown``.
    """

    NVMLError = PlayedError

    def __init__(
        self,
        devices: Sequence[Mapping[str, Any]],
        samples: Sequence[Sequence[Mapping[str, Any]]] = (),
        lacking: Iterable[str] = (),
    ) -> None:
        self._devices, self._samples, self._lacking = devices, samples, frozenset(lacking)
        self._asked: dict[tuple[int, str], int] = {}
        self.open = 0

    def nvmlInit(self) -> None:
        """Begin."""
        self.open += 1

    def nvmlShutdown(self) -> None:
        """End."""
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        """Number of GPUs."""
        return len(self._devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        """The handle of a GPU is its number."""
        return index

    def __getattr__(self, function: str) -> Callable[[int], Any]:
        if function not in _FIGURES:
            raise AttributeError(function)
        return lambda handle: self._answer(_FIGURES[function], handle)

    def _answer(self, figure: str, handle: int) -> Any:
        if figure in self._lacking:
            raise PlayedError(NOT_SUPPORTED, "Not Supported")
        value = self._devices[handle].get(figure)
        if figure not in self._devices[handle]:
            place = self._asked.get((handle, figure), 0)
            self._asked[handle, figure] = place + 1
            value = self._samples[min(place, len(self._samples) - 1)][handle][figure]
        return SimpleNamespace(**value) if isinstance(value, Mapping) else value
