"""DeepSpeed's own checkpoints and its universal ones, for the adapters.

    deepspeed    ``engine.save_checkpoint``: every rank its partitions; loaded by as many ranks
    universal    the same, then ``ds_to_universal`` on rank 0: a folder for each parameter, from
                 which ``load_universal`` reads in another world

The folder of a step is named in ``latest`` (``latest_universal``), which is written last and in
place.  Generators, progress and the caller's extra are client state, as DeepSpeed calls it.  Its
files are pickles, which it loads without ``weights_only``.
"""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from shardproof.comm import Comm
from shardproof.contract import Implementation, Refused
from shardproof.impls.reference.engine.options import at_least

#: What stages that partition can write; the universal form is made of partitions.
FORMATS = ("deepspeed", "universal")
_UNIVERSAL = "_universal"


@dataclass(frozen=True)
class Checkpoints:
    """``format``: the format that ``save`` writes and ``load`` reads. ``keep``: the number of a
    run's checkpoints to keep.
    """

    format: Literal["deepspeed", "universal"] = "deepspeed"
    keep: int = 2

    def __post_init__(self) -> None:
        at_least("checkpoint.keep", self.keep, 1)

    @property
    def section(self) -> dict[str, Any]:
        """The section of the JSON form."""
        return {"checkpoint": {"load_universal": self.format == "universal"}}


def offered(chosen: Checkpoints, partitions: bool) -> tuple[str, ...]:
    """The formats of a system with optimizer state in ``partitions``.

    :raises Refused: the one that was chosen is not among them.
    """
    formats = FORMATS if partitions else FORMATS[:1]
    if chosen.format not in formats:
        raise Refused(
            f"option 'checkpoint.format' = {chosen.format!r}: DeepSpeed converts only checkpoints "
            "of ZeRO to this format, and this system does not use ZeRO; valid: "
            f"{', '.join(formats)}"
        )
    return formats


@dataclass(frozen=True)
class Saved:
    """The option of all adapters."""

    checkpoint: Checkpoints = field(default_factory=Checkpoints, kw_only=True)


class Saves(Implementation):
    """An adapter for an engine that can save."""

    engine: Any
    comm: Comm
    checkpoints: Checkpoints

    def launched(self) -> AbstractContextManager[None]:
        """The environment that DeepSpeed's launcher would set."""
        raise NotImplementedError

    def save(self, path: Path, extra: Mapping[str, Any]) -> None:
        """Save as DeepSpeed documents it, under a tag named after the step; a collective call."""
        tag = f"step-{self.engine.global_steps:08}"
        state = {
            "extra": json.dumps(extra),
            "rng": self.comm.all_gather_object(torch.get_rng_state()),
        }
        with self.launched():
            self.engine.save_checkpoint(str(path), tag=tag, client_state=state)
        failure = None
        if self.comm.rank == 0:
            try:
                if self.checkpoints.format == "universal":
                    make_universal(path / tag)
                retire(path, self.checkpoints.keep)
            except Exception as error:  # noqa: BLE001 - told to all ranks, which wait for rank 0
                failure = f"{type(error).__name__}: {error}"
        failure = self.comm.broadcast_object(failure)
        if failure is not None:
            raise RuntimeError(f"rank 0 could not finish the checkpoint {tag}: {failure}")

    def load(self, path: Path) -> Mapping[str, Any]:
        """Load the checkpoint that DeepSpeed calls the latest of a root, or a given one."""
        is_root = any((path / name).is_file() for name in ("latest", f"latest{_UNIVERSAL}"))
        place, tag = (path, None) if is_root else (path.parent, path.name)
        with self.launched():
            found, state = self.engine.load_checkpoint(str(place), tag=tag)
        if found is None:
            raise FileNotFoundError(
                f"{path}: DeepSpeed finds no checkpoint at this path - give the path of a "
                "checkpoint folder, or of its parent folder"
            )
        if len(state["rng"]) == self.comm.size:
            torch.set_rng_state(state["rng"][self.comm.rank])
        extra: Mapping[str, Any] = json.loads(state["extra"])
        return extra


def make_universal(folder: Path) -> None:
    """Convert the checkpoint ``folder`` into a new one next to it, with DeepSpeed's own script."""
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        Namespace(
            input_folder=str(folder),
            output_folder=str(folder) + _UNIVERSAL,
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def retire(root: Path, keep: int) -> None:
    """Remove the folders of all steps except the newest ``keep``."""
    steps = sorted({path.name.removesuffix(_UNIVERSAL) for path in root.glob("step-*")})
    for name in steps[:-keep]:
        for path in (root / name, root / (name + _UNIVERSAL)):
            if path.is_dir():
                shutil.rmtree(path)
