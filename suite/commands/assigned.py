"""Parse words such as ``shard=8`` on the command line: options of a system, and sizes of axes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from shardproof import axes
from shardproof.errors import Problem, SelectionError, nearest

#: The options that say how much a rank computes in a step.
Samples = Annotated[int, typer.Option("--batch", min=1, help="samples in a micro-batch")]
Positions = Annotated[
    int, typer.Option("--seq", min=0, help="sequence length in tokens (0: the model's own)")
]
MicroBatches = Annotated[
    int, typer.Option("--micro-batches", min=1, help="micro-batches of each rank in a step")
]


def assigned(given: Sequence[str], option: str, example: str) -> dict[str, Any]:
    """Key to value of the words ``KEY=VALUE``; a value that is not JSON is a text.

    ``option`` and ``example``: what the error names.

    :raises SelectionError: a word of another form, or a key that is given twice.
    """
    values: dict[str, Any] = {}
    for text in given:
        key, sign, value = text.partition("=")
        if not (key and sign):
            raise SelectionError(Problem(f"{option} is not KEY=VALUE", f"write {example}", text))
        if key in values:
            raise SelectionError(Problem(f"{option} has {key} twice", "give it once", text))
        try:
            values[key] = json.loads(value)
        except ValueError:
            values[key] = value
    return values


def mesh(text: str) -> dict[str, Any]:
    """Axis to its size, as written in ``shard=4,tensor=2``; the caller checks the sizes.

    :raises SelectionError: a word of another form, or no axis of a mesh.
    """
    found = assigned([part for part in text.split(",") if part], "--mesh", "shard=8")
    for name in found:
        if name not in axes.names():
            raise SelectionError(Problem("unknown axis", nearest(name, axes.names(), "axes"), name))
    return found
