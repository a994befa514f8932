"""The object by which the parts of a model know their positions."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardproof.contract import Refused


def find_span(module: nn.Module, ranks: int) -> Any:
    """The object ``span`` that the parts of ``module`` share; ``ranks`` divide the positions.

    :raises Refused: there is none, or a part needs all positions.
    """
    spans = {}
    for name, part in module.named_modules():
        if getattr(part, "whole_sequence", False) and ranks > 1:
            raise Refused(
                f"mesh axis 'context' = {ranks}: {name!r} needs all positions of a sample, but "
                "each rank has only some of these positions; set context to 1"
            )
        if (own := getattr(part, "span", None)) is not None:
            spans[id(own)] = own
    if len(spans) != 1:
        raise Refused(
            "axis 'context' splits the positions of samples: all modules that depend on positions "
            f"must have the same object in 'span', but this model has {len(spans)} different "
            "objects; set 'span' of these modules to one object (see Build.__call__ in "
            "contract.py), or leave the axis 'context' out"
        )
    return next(iter(spans.values()))
