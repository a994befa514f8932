"""Inline SVG: elements with escaped text, drawings with a name and a description, scales.

Every drawing has ``role="img"`` with a title and a description, takes its colours from classes of
the page's style sheet (so that they follow dark mode) and scales with its ``viewBox``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape


def element(name: str, *content: object, **attributes: Any) -> Markup:
    """One element; a trailing underscore of an attribute is dropped, inner ones become hyphens.

    Attributes that are ``None`` are left out, numbers get two decimals at most, and ``content`` is
    escaped unless it is :class:`Markup`.
    """
    # Numbers need no escape, which takes most of the time.
    told = {k: escape(v) if isinstance(v, str) else number(v) for k, v in attributes.items()}
    names = {k: k.rstrip("_").replace("_", "-") for k in told if told[k] is not None}
    written = "".join(f' {shown}="{told[key]}"' for key, shown in names.items())
    inner = "".join(escape(part) for part in content)
    return Markup(f"<{name}{written}>{inner}</{name}>" if content else f"<{name}{written}/>")


def number(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return value


def drawing(
    title: str,
    description: str,
    size: tuple[float, float],
    parts: Iterable[Markup],
    class_: str,
    stretch: bool = False,
    fixed: bool = False,
) -> Markup:
    """A drawing of ``size``, its width and height in units.

    ``stretch``: the width alone follows the space; ``fixed``: a unit is a pixel.
    """
    width, height = size
    attributes = {"viewBox": f"0 0 {number(width)} {number(height)}", "class_": class_}
    attributes |= {"preserveAspectRatio": "none"} if stretch else {}
    pixels = {"width": width, "height": height} if fixed else {}
    inside = element("title", title), element("desc", description), *parts
    return element("svg", *inside, role="img", aria_label=title, **attributes, **pixels)


def text(x: float, y: float, label: object, class_: str = "", anchor: str = "start") -> Markup:
    """A label; ``anchor`` is start, middle or end."""
    text_anchor = None if anchor == "start" else anchor
    return element("text", label, x=x, y=y, class_=class_ or None, text_anchor=text_anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def rect(
    x: float, y: float, width: float, height: float, class_: str, hint: str | None = None
) -> Markup:
    content = () if hint is None else (element("title", hint),)
    width = max(width, 0.0)
    return element("rect", *content, x=x, y=y, width=width, height=height, class_=class_)


def path(points: Sequence[tuple[float, float]], class_: str) -> Markup:
    points_text = " L".join(f"{number(x)} {number(y)}" for x, y in points)
    return element("path", d=f"M{points_text}", class_=class_)


@dataclass(frozen=True)
class PixelScale:
    """From values between ``low`` and ``high`` to units; ``log``: equal ratios, equal distances."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        part = (at - low) / (high - low) if high > low else 0.5
        return self.start + part * (self.stop - self.start)
