"""PyTorch's ``torch.distributed.pipelining`` under any schedule class.

``schedule`` is ``package.module:name`` of a subclass of ``PipelineScheduleSingle`` (one stage a
rank) or of ``PipelineScheduleMulti`` (``{name: ..., chunks: 3}``: so many stages a rank, else 2);
``package.module:file.csv`` is a CSV file of torch's actions beside that module.  The class is made
with the stages, the number of micro-batches, ``loss_fn`` and ``scale_grads=False``: losses are
sums.

A schedule of torch's runtime says what it will run (``pipeline_order_with_comms``); that is judged
before anything runs, and what is run is compared with it.  Of any other schedule the numbers and
the bytes are judged, and not the order.

Cost: between the bounds of its family.  Numbers: as ``pytorch/pipelining``, gradients in any order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch.distributed.pipelining import schedules

from shardproof.by_path import CannotImport, import_module
from shardproof.contract import Capabilities, Depth, Refused
from shardproof.impls.pytorch.checkpoint.options import Saved
from shardproof.impls.pytorch.pipelining import (
    INFERENCE,
    ONE_SHAPE,
    TORN,
    UNSEEN,
    Pipelining,
    outline,
    told_orders,
)
from shardproof.impls.reference.engine.options import own_thing, parse_options
from shardproof.schedules import Schedule

#: torch's classes, those with one stage a rank and those with several.
ONE, SEVERAL = schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti


@dataclass(frozen=True)
class Chunked:
    """The path of a schedule, with the number of stages per rank."""

    name: str
    chunks: int = 2

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise Refused(f"option 'schedule.chunks' must be at least 1, not {self.chunks}")


@dataclass(frozen=True)
class Options(Saved):
    """``split`` and ``shapes`` as for ``pytorch/pipelining``."""

    schedule: str | Chunked = "torch.distributed.pipelining:Schedule1F1B"
    split: tuple[int, ...] = ()
    shapes: Literal["inferred", "given"] = "inferred"

    @property
    def name(self) -> str:
        """The path of the schedule."""
        return self.schedule.name if isinstance(self.schedule, Chunked) else self.schedule

    @property
    def kind(self) -> Any:
        """The class or function of the schedule; :class:`Refused` for anything else."""
        if self.name.endswith(".csv"):
            return partial(_from_file, self._file())
        kind = own_thing("schedule", self.name)
        if not (isinstance(kind, type) and issubclass(kind, ONE | SEVERAL)):
            raise self.refused(
                f"{kind!r:.60} is not a schedule class of torch.distributed.pipelining"
            )
        return kind

    @property
    def is_single(self) -> bool:
        """Whether it takes one stage instead of a list."""
        kind = self.kind
        return isinstance(kind, type) and issubclass(kind, ONE)

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        if self.is_single:
            return 1
        return self.schedule.chunks if isinstance(self.schedule, Chunked) else 2

    def place(self, ranks: int) -> tuple[int, ...]:
        """Round-robin, unless the schedule defines another placement."""
        if self.is_single:
            return tuple(range(ranks))
        told = outline(self, ranks, self._micro_batches(ranks)).stage_index_to_group_rank
        return tuple(told[stage] for stage in range(len(told)))

    def declines(self) -> dict[str, str]:
        """Traits that torch does not support."""
        kept = ("rebound_buffer", "dropout_stateful")
        spoilt = dict.fromkeys(kept, INFERENCE) if self.shapes == "inferred" else {}
        always = {"tied_over_units": TORN, "variable_lengths": ONE_SHAPE, "packed": UNSEEN}
        return always | spoilt

    def refused(self, what: str) -> Refused:
        """The error for a wrong option."""
        return Refused(f"option 'schedule' = {self.name!r}: {what}")

    def _micro_batches(self, ranks: int) -> int:
        """A number of micro-batches that it accepts: a file is for one number only."""
        if not self.name.endswith(".csv"):
            return 2 * ranks
        numbers = re.findall(r"\dF(\d+)", self._file().read_text(encoding="utf-8"))
        return 1 + max(map(int, numbers), default=0)

    def _file(self) -> Path:
        module, _, file = self.name.partition(":")
        try:
            beside = Path(str(import_module(module).__file__)).parent
        except CannotImport as error:
            raise self.refused(str(error)) from error
        if not (beside / file).is_file():
            raise self.refused(f"file {file} does not exist in the folder of module {module}")
        return beside / file


def _from_file(file: Path, *given: Any, **more: Any) -> Any:
    """torch's runtime with the actions of ``file``."""
    made = schedules._PipelineScheduleRuntime(*given, **more)
    made._load_csv(str(file))
    return made


class OwnSchedule(Pipelining):
    """The adapter for any schedule."""

    depth: ClassVar[Depth] = "family"
    options_type: ClassVar[type[Any]] = Options

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The capabilities of torch's own schedules; the order of sums is the schedule's."""
        chosen = parse_options(Options, options)
        _ = chosen.chunks  # imports it
        saves = {key: value for key, value in options.items() if key == "checkpoint"}
        declared = super().capabilities(saves)
        return replace(declared, exactness="reordered-sum", declines=chosen.declines())

    @classmethod
    def schedule(cls, options: Mapping[str, Any], ranks: int, micro_batches: int) -> Any:
        """The order that torch's runtime reports; ``None`` for another kind of schedule."""
        chosen = parse_options(Options, options)
        if chosen.is_single:
            return None
        made = outline(chosen, ranks, micro_batches)
        if not hasattr(made, "pipeline_order_with_comms"):
            return None
        name = chosen.name.rpartition(":")[2]
        return Schedule(name, micro_batches, chosen.place(ranks), told_orders(made, ranks))


IMPLEMENTATION = OwnSchedule
#: Argument of ``prove`` that this adapter takes as the option of that name.
TAKES = "schedule"
