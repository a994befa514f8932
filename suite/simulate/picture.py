"""A picture of memory over time: bytes by class over the program order of a simulated step.

The data (:func:`columns`) comes from the memory ledger: an event for each storage that is made,
resized or freed.  Many events share a column of the picture, which shows the highest moment, so no
peak is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from markupsafe import Markup

from shardproof.ledgers.memory.log import CLASSES, FILE, MemoryLog
from shardproof.ledgers.memory.summary import PHASES
from shardproof.report.drawings import svg

#: Columns of a picture, at most.
MOST = 800
_LEFT, _RIGHT, _TOP = 64.0, 12.0, 26.0
_WIDTH, _HEIGHT, _STRIP, _BELOW = 960.0, 300.0, 10.0, 62.0
#: A colour for each class, light and dark, as in suite/report/templates/report.css; the legend has
#: them in the order in which they are stacked.
_LIGHT = ("#0072b2", "#8a5a9e", "#c45500", "#00805a", "#6f7a85", "#505a64", "#a0457f", "#7a6a00",
          "#b9c2cb")  # fmt: skip
_DARK = ("#4aa8e8", "#c4a1de", "#ff9350", "#37c79b", "#98a3ae", "#a7b1bb", "#ea93c4", "#d3c04b",
         "#59646f")  # fmt: skip
_PHASES = {"forward": "#8ec5ff", "backward": "#5b2a86", "update": "#00694d"}


class Moment(NamedTuple):
    """Bytes by class after an event of ``phase``."""

    phase: str
    sizes: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """Bytes of all classes together."""
        return sum(self.sizes.values())


def moments(log: MemoryLog, step: int) -> Iterator[Moment]:
    """Every moment of ``step`` in program order; state in host memory is left out."""
    kept: dict[str, int] = {}
    for (of_step, phase), levels, changed in log.replay():
        if of_step != step or phase not in PHASES:
            continue
        if not kept or any(kind != "all" and device != FILE for device, kind in changed):
            kept = dict.fromkeys(CLASSES, 0)
            for (device, kind), size in levels.items():
                if kind != "all" and device != FILE:
                    kept[kind] += size
        yield Moment(phase, kept)


def columns(log: MemoryLog, step: int, most: int = MOST) -> list[Moment]:
    """About ``most`` moments of ``step``: the highest of all that share a column.

    A column has moments of one phase, so phases may take a few columns more.
    """
    every = [*moments(log, step)]
    share = max(1, -(-len(every) // most))
    found = list[Moment]()
    for _, of_phase in groupby(every, key=lambda one: one.phase):
        run = [*of_phase]
        found += [
            max(run[at : at + share], key=lambda one: one.bytes) for at in range(0, len(run), share)
        ]
    return found


def picture(title: str, log: MemoryLog, step: int) -> str:
    """The SVG file of ``step``: bytes of the classes, stacked, above a strip of phases."""
    shown = columns(log, step)
    kinds = [kind for kind in CLASSES if any(one.sizes[kind] for one in shown)]
    most = max((one.bytes for one in shown), default=0)
    x = svg.PixelScale(0, max(1, len(shown)), _LEFT, _WIDTH - _RIGHT)
    y = svg.PixelScale(0, max(1, most), _HEIGHT, _TOP)
    highest = max(range(len(shown)), key=lambda at: shown[at].bytes, default=0)
    parts = [_style(), svg.rect(0, 0, _WIDTH, _HEIGHT + _BELOW, "paper"), *_levels(y, most)]
    parts += _areas(shown, kinds, x, y)
    parts += _phases(shown, x)
    if shown:
        peak, at = shown[highest], x(highest + 0.5)
        label = f"peak in {peak.phase}: {peak.bytes / 1e9:,.3f} GB"
        anchor = "end" if at > _WIDTH / 2 else "start"
        parts += [svg.line(at, _TOP, at, _HEIGHT, "peak"), svg.text(at, 18, label, "ink", anchor)]
    parts += _legend(kinds)
    text = ", ".join(f"{_plain(kind)} {shown[highest].sizes[kind]:,}" for kind in kinds)
    size = (_WIDTH, _HEIGHT + _BELOW)
    made = svg.drawing(title, f"Bytes at the peak: {text}.", size, parts, "memory", fixed=True)
    return str(made).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def _areas(
    shown: Sequence[Moment], kinds: Sequence[str], x: svg.PixelScale, y: svg.PixelScale
) -> Iterator[Markup]:
    """A closed area for each class, on top of the classes below it."""
    below = [0] * len(shown)
    for kind in kinds:
        above = [low + one.sizes[kind] for low, one in zip(below, shown, strict=True)]
        yield svg.path([*_steps(above, x, y), *reversed([*_steps(below, x, y)])], f"k-{kind}")
        below = above


def _steps(
    levels: Sequence[int], x: svg.PixelScale, y: svg.PixelScale
) -> Iterator[tuple[float, float]]:
    """Corners of a line that is level over each column."""
    for at, level in enumerate(levels):
        yield x(at), y(level)
        yield x(at + 1), y(level)


def _phases(shown: Sequence[Moment], x: svg.PixelScale) -> Iterator[Markup]:
    """A strip of phases; a phase has its name if there is room."""
    at = 0
    for phase, of_phase in groupby(one.phase for one in shown):
        count = len([*of_phase])
        start, stop = x(at), x(at + count)
        yield svg.rect(start, _HEIGHT + 3, stop - start, _STRIP, f"p-{phase}", phase)
        if stop - start > 8 * len(phase):
            yield svg.text((start + stop) / 2, _HEIGHT + 26, phase, "soft", "middle")
        at += count


def _levels(y: svg.PixelScale, most: int) -> Iterator[Markup]:
    """Lines at round bytes."""
    rounded = (digit * 10**power for power in range(3, 15) for digit in (1, 2, 5))
    step = next((size for size in rounded if most / size <= 6), most or 1)
    for level in range(0, most + 1, step):
        yield svg.line(_LEFT, y(level), _WIDTH - _RIGHT, y(level), "grid")
        yield svg.text(_LEFT - 6, y(level) + 4, f"{level / 1e9:g}", "soft", "end")
    yield svg.text(8, 18, "GB", "soft")


def _legend(kinds: Sequence[str]) -> Iterator[Markup]:
    at = _LEFT
    for kind in kinds:
        yield svg.rect(at, _HEIGHT + 42, 10, 10, f"k-{kind}")
        yield svg.text(at + 14, _HEIGHT + 51, _plain(kind), "ink")
        at += 30 + 6.6 * len(kind)


def _style() -> Markup:
    """Colours of a file that stands alone, light or dark."""

    def colours(palette: Sequence[str], paper: str, ink: str, soft: str, grid: str) -> str:
        fills = [f".k-{k}{{fill:{c}}}" for k, c in zip(CLASSES, palette, strict=True)]
        fills += [f".paper{{fill:{paper}}}.ink{{fill:{ink}}}.soft{{fill:{soft}}}"]
        return "".join([*fills, f".grid{{stroke:{grid}}}.peak{{stroke:{ink};stroke-dasharray:4}}"])

    phases = "".join(f".p-{name}{{fill:{colour}}}" for name, colour in _PHASES.items())
    light = colours(_LIGHT, "#ffffff", "#1b2026", "#505a64", "#d4dae0")
    dark = colours(_DARK, "#171c22", "#e7ebef", "#a7b1bb", "#333d47")
    both = f"text{{font:12px sans-serif}}{phases}{light}"
    return svg.element("style", Markup(f"{both}@media(prefers-color-scheme:dark){{{dark}}}"))


def _plain(kind: str) -> str:
    return kind.replace("_", " ")
