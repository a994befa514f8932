"""Caps of nodes in words: rates of the network between them, cores, memory, delays."""

from __future__ import annotations

import re

_UNITS = {"mbit": 10**6, "gbit": 10**9}
#: Bits per second; beyond, the kernel counts in other units, and here nothing sends as fast.
_MOST_RATE = 10 * 10**9
UNLIMITED = "unlimited"


def bits_per_second(text: str) -> int:
    """Of ``100mbit`` or ``1gbit``; 0 of ``unlimited``.

    :raises ValueError: it is no rate.
    """
    if text == UNLIMITED:
        return 0
    found = re.fullmatch(r"(\d{1,5})(mbit|gbit)", text.lower())
    rate = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < rate <= _MOST_RATE:
        raise ValueError(f"{text!r} is no rate of 1mbit to 10gbit, such as 100mbit")
    return rate


def cap_in_words(name: str, value: float) -> str:
    """A cap of a node, by its name in ``run.json``: ``100 mbit/s`` of ``bits_per_second``."""
    if name == "cpus":
        return f"{value:.3g} core" + ("" if value == 1 else "s")
    if name == "memory_bytes":
        return f"{value / 2**20:.0f} MiB" if value else "no limit of memory"
    if name == "delay_seconds":
        return f"{1e3 * value:.4g} ms a message"
    return f"{value / 1e6:.4g} mbit/s"
