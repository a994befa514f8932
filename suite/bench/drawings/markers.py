"""Marks of points in drawings of times."""

from __future__ import annotations

from markupsafe import Markup

from shardproof.report.drawings import svg


def marker(kind: str, x: float, y: float, class_: str, size: float = 4.5) -> Markup:
    """A ``circle``, ``square`` or ``diamond`` around a point."""
    if kind == "circle":
        return svg.element("circle", cx=x, cy=y, r=size, class_=class_)
    if kind == "square":
        return svg.rect(x - size * 0.9, y - size * 0.9, size * 1.8, size * 1.8, class_)
    half = size * 1.25
    return svg.path(
        [(x, y - half), (x + half, y), (x, y + half), (x - half, y), (x, y - half)], class_
    )
