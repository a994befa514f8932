"""Data of a user's own as shares of global batches, one for every step.

    DataLoader            its batch size is that of the global batch; ranks read their own samples
    a map-style data set  the same, with ``batch=``
    a list of batches     one a step, again from the first after the last
    a function            ``data(step)`` gives the batch of a step
    any other iterable    one batch a step; every rank reads all and keeps its share

A batch is ``(inputs, targets)``.  It is cut over the ranks that share out the data, and each share
into micro-batches, in order and as evenly as it goes.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from shardproof.contract import Batch, MicroBatch
from shardproof.training.inputs import require_count

#: Inputs, targets, and how many samples the whole batch has.
Part = tuple[Tensor, Tensor, int]


class Source:
    """The batches of ``data``.

    :raises ValueError: it is none of the forms above.
    """

    def __init__(
        self, data: Any, batch: int | None = None, shuffle: bool | None = None, seed: int = 0
    ) -> None:
        if batch is not None:
            require_count("batch", batch)
        self._data, self._size, self._seed = data, batch, seed
        self._loader: dict[str, Any] = {}
        self._indexed = False
        if isinstance(data, DataLoader):
            shuffle = self._of_loader(data, shuffle)
        elif isinstance(data, Dataset) and not isinstance(data, IterableDataset):
            self._indexed = True
        elif not (callable(data) or hasattr(data, "__iter__")):
            raise ValueError(
                f"data {data!r:.60} is unusable: give a DataLoader, a Dataset with batch=, a list "
                "of (inputs, targets), or a function step -> (inputs, targets)"
            )
        self._shuffle = bool(shuffle)
        if self._indexed:
            if not self._size:
                raise ValueError(
                    "a Dataset needs batch=, the number of samples per step over all ranks"
                )
            if len(self._data) < 1:
                raise ValueError("the data set is empty")
            self._size = min(self._size, len(self._data))

    @property
    def is_one_iterator(self) -> bool:
        """Whether there is one iterator to read, from which each batch comes once."""
        return not self._indexed and hasattr(self._data, "__next__")

    def samples(self, step: int) -> float:
        """Samples of the global batch of ``step``, or of an average one of an epoch."""
        if self._indexed and self._size:
            return len(self._data) / -(-len(self._data) // self._size)
        if isinstance(self._data, Sequence):
            return sum(len(_pair(batch)[0]) for batch in self._data) / len(self._data)
        return 0.0 if self.is_one_iterator else float(len(next(self._whole(step))[0]))

    def _of_loader(self, loader: DataLoader[Any], shuffle: bool | None) -> bool:
        """Take a loader apart, so that each rank reads only its share."""
        sampler = loader.sampler
        usual = isinstance(sampler, RandomSampler | SequentialSampler)
        if loader.batch_size is None or not usual or isinstance(loader.dataset, IterableDataset):
            return False  # a sampler of the user's own decides: all ranks go through all batches
        self._indexed, self._data = True, loader.dataset
        self._size = self._size or loader.batch_size
        self._loader = {
            "collate_fn": loader.collate_fn,
            "num_workers": loader.num_workers,
            "pin_memory": loader.pin_memory,
            "worker_init_fn": loader.worker_init_fn,
        }
        return isinstance(sampler, RandomSampler) if shuffle is None else shuffle

    def batches(
        self, first: int, share: tuple[int | None, int], cuts: int, device: str, dtype: torch.dtype
    ) -> Iterator[Batch]:
        """From step ``first`` on, the share ``(index, of)`` of each batch in ``cuts`` parts;
        ``index = None``: a rank without data, whose batches have no windows.
        """
        index, of = share
        if index is None:
            yield from (Batch(step, ()) for step in itertools.count(first))
            return
        read = self._read if self._indexed else self._cut
        parts = read(first, (index, of), cuts)
        for step, of_step in enumerate(parts, first):
            micros = []
            for inputs, targets, total in of_step:
                size = len(inputs)
                weights = torch.full((size,), 1.0 / total, dtype=dtype, device=device)
                ids = torch.arange(size, device=device)
                micros.append(MicroBatch(inputs.to(device), targets.to(device), weights, ids))
            yield Batch(step, (tuple(micros),))

    def _read(self, first: int, share: tuple[int, int], cuts: int) -> Iterator[list[Part]]:
        """Samples of this share only, by a loader of the suite's own."""
        to_read, plan = itertools.tee(self._plan(first, share, cuts))
        loader: Any = DataLoader(
            self._data,
            batch_sampler=(rows for rows_of_step, _ in to_read for rows in rows_of_step),
            # Its own, or each epoch would draw from the generator that the model draws from.
            generator=torch.Generator().manual_seed(self._seed),
            **{"collate_fn": default_collate, **self._loader},
        )
        read = iter(loader)
        for rows_of_step, total in plan:
            yield [(*_pair(next(read)), total) for _ in rows_of_step]

    def _plan(
        self, first: int, share: tuple[int, int], cuts: int
    ) -> Iterator[tuple[list[list[int]], int]]:
        """For each step, without end: the rows of every micro-batch, and those of all ranks."""
        assert self._size is not None
        of_epoch, epoch = -(-len(self._data) // self._size), -1  # the last one is shorter
        for step in itertools.count(first):
            if step // of_epoch != epoch:
                epoch = step // of_epoch
                order = self._order(epoch)
            at = step % of_epoch * self._size
            whole = order[at : at + self._size]
            yield [part for part in _cut_of(whole, share, cuts) if part], len(whole)

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._data)))
        generator = torch.Generator().manual_seed((self._seed << 20) + epoch)
        return torch.randperm(len(self._data), generator=generator).tolist()

    def _cut(self, first: int, share: tuple[int, int], cuts: int) -> Iterator[list[Part]]:
        """The share of batches that every rank reads whole."""
        for inputs, targets in self._whole(first):
            rows = _cut_of(range(len(inputs)), share, cuts)
            bounds = [(part[0], part[-1] + 1) for part in rows if len(part)]
            yield [(inputs[a:b], targets[a:b], len(inputs)) for a, b in bounds]

    def _whole(self, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        data, step = self._data, first
        if isinstance(data, Sequence):
            while data:
                yield _pair(data[step % len(data)])
                step += 1
        elif inspect.isroutine(data) or not hasattr(data, "__iter__"):
            while True:
                yield _pair(data(step))
                step += 1
        else:
            read = 0
            while True:
                begin = read
                for batch in data:
                    if read >= first:
                        yield _pair(batch)
                    read += 1
                if read == begin:
                    return


def _cut_of(rows: Sequence[int], share: tuple[int, int], cuts: int) -> list[list[int]]:
    """The micro-batches of a share, as row numbers."""
    index, of = share
    own = numpy.array_split(numpy.asarray(rows, dtype=numpy.int64), of)[index]
    return [part.tolist() for part in numpy.array_split(own, cuts)]


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    """``batch``, which must be inputs and targets of as many samples."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, targets = batch
        if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
            if inputs.dim() and targets.dim() and len(inputs) == len(targets):
                return inputs, targets
            sizes = f"{tuple(inputs.shape)} and {tuple(targets.shape)}"
            raise ValueError(
                f"a batch has inputs and targets of shapes {sizes}: give one target per sample"
            )
    kinds = type(batch).__name__
    if isinstance(batch, tuple | list):
        kinds = f"({', '.join(type(part).__name__ for part in batch)})"
    raise ValueError(
        f"a batch is {kinds}, but Training needs (inputs, targets), two tensors with samples on "
        "their first dimension: give a collate_fn that makes them, or write your own loop with "
        "shardproof.wrap"
    )
