"""Shapes that a system reads from a parameter of the model."""

from __future__ import annotations

import torch
from torch import nn

from shardproof.contract import Refused


def shape_of(module: nn.Module, name: str, what: str) -> torch.Size:
    """The shape of the parameter ``name``, by which a pipeline knows ``what``.

    :raises Refused: the model has no such parameter.
    """
    found = dict(module.named_parameters()).get(name)
    if found is None:
        raise Refused(
            f"this model has no parameter {name!r}, but the pipeline reads {what} from the "
            "shape of this parameter; use the system reference/pipeline or pytorch/pipelining"
        )
    return found.shape
