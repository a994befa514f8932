"""A tensor of which a rank holds several blocks, in the form of torch's checkpoints.

    a fused projection on rank 1 of 2             what a DTensor says     what is so
    rows of queries  4:8   of 0:8                 rows 12:24 of 0:24      4:8, 12:16, 20:24
    rows of keys    12:16  of 8:16
    rows of values  20:24  of 16:24

A DTensor is one block, so a projection whose rows were put in another order to be cut by heads
(``tensor_styles.reorder_fused``) would be saved in that order, and be right for as many ranks only.
:class:`Blocks` answers what torch asks of DTensors (``planner_helpers.py``, ``_Checkpointable``)
with a block for every run of rows.  Tensors are views of what the rank trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardproof.contract import Piece


class Blocks(Tensor):
    """A tensor of ``shape`` without its own elements; ``parts`` are blocks by first element."""

    parts: dict[tuple[int, ...], Tensor]

    @staticmethod
    def __new__(cls, shape: Sequence[int], like: Tensor, pieces: Sequence[Piece]) -> Blocks:
        """Create it with the dtype and device of ``like``."""
        made: Blocks = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=like.dtype, device=like.device
        )
        starts = [tuple(start for start, _ in piece.slices or ()) for piece in pieces]
        made.parts = {start: p.tensor for start, p in zip(starts, pieces, strict=True)}
        return made

    def __init__(self, *given: Any) -> None:
        """Do nothing: ``__new__`` has done all the work."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Tensor:
        """Support the one call that torch makes on it: a copy, whose parts are copied one by
        one.
        """
        if func is torch.ops.aten.new_empty.default:
            return Blocks(args[1], args[0], ())
        raise NotImplementedError(
            f"{func} does not support Blocks: a Blocks tensor can only be saved and loaded"
        )

    def __create_write_items__(self, name: str, tensor: Blocks) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, start),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(start), part.size()),
                    properties=TensorProperties.create_from_tensor(part),
                    size=tensor.size(),
                ),
            )
            for start, part in self.parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(s), t.size()) for s, t in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.parts[tuple(index.offset or ())]


def reordered(name: str, orders: Mapping[str, Sequence[int]]) -> Sequence[int] | None:
    """The order of rows of parameter ``name`` or of one of its slots; ``None`` if unchanged."""
    return orders.get(name) or orders.get(name.rpartition(".")[0])
