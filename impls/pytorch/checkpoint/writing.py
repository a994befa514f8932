"""Conversion of a suite checkpoint to a folder of ``torch.distributed.checkpoint``, in one process.

    parameters, buffers    ``model.<name>``, tied ones under each of their names; where masters were
                           saved, these: torch's systems keep parameters in the dtype as built
    optimizer              ``optimizer.state...``, and for each parameter the settings of its group,
                           which follow from the optimizer in the manifest
    rng, progress          as ``state`` has them; error feedback of reducers is left out

``dcp.save`` writes it, and holds all tensors at a time.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.amp import GradScaler

from shardproof.contract import GroupSpec, OptimizerSpec, ScalerSpec
from shardproof.impls.pytorch.checkpoint import folders
from shardproof.impls.pytorch.checkpoint.state import NAMES
from shardproof.impls.pytorch.parts.scaling import make_scaler
from shardproof.impls.reference.checkpoint.data_file import DTYPES
from shardproof.impls.reference.checkpoint.errors import CheckpointError
from shardproof.impls.reference.checkpoint.reading.checkpoint import Checkpoint
from shardproof.impls.reference.checkpoint.reading.regions import Place
from shardproof.impls.reference.engine.masters import SLOT as MASTER
from shardproof.impls.reference.engine.optimizer import (
    build_optimizer,
    param_groups,
    set_learning_rate,
)


def _require_one_copy(source: Checkpoint) -> None:
    for (kind, name), copies in source.copies.items():
        if kind in ("parameters", "optimizer") and len(copies) > 1:
            what = (
                f"the checkpoint has {len(copies)} different copies of {name!r}, one per rank, "
                "but dcp stores one tensor per name"
            )
            raise CheckpointError(source.folder, what, "choose the format 'full' or 'sharded'")


def write_dcp(source: Checkpoint, root: Path) -> Path:
    """Write ``source`` into ``root``; return the new folder.

    :raises CheckpointError: ``source`` is damaged, tells no optimizer, is of ranks that
        train alone, or that step is there.
    """
    about = source.manifest.about
    folder = folders.folder(root, about.step)
    if folder.exists():
        remedy = "name another folder, or remove the old folder"
        raise CheckpointError(folder, f"a folder for step {about.step} already exists", remedy)
    _require_one_copy(source)
    spec = spec_of(source)
    model = dict(parameters(source))
    slots = {
        f"state.{name}": whole(source, "optimizer", name)
        for name in source.names("optimizer")
        if not name.endswith(f".{MASTER}")
    }
    extra = {**about.extra, **({"data": dict(about.data)} if about.data else {})}
    who = {
        "strategy": about.strategy,
        "mesh": dict(about.mesh),
        "optimizer": about.optimizer,
        "buffers": source.names("buffers"),
        "aliases": dict(about.aliases),
    }
    rng: dict[str, dict[str, Tensor]] = {}
    for name in source.names("rng"):
        generator, _, rank = name.rpartition("@")
        rng.setdefault(rank, {})[generator] = whole(source, "rng", name)
    progress = {
        "step": about.step,
        "extra": json.dumps(extra),
        "about": json.dumps(who),
        "scaler": scaler_state(source, spec),
    }
    optimizer = {**slots, **settings(source, spec, model)}
    tree = {"model": model, "optimizer": optimizer, "progress": progress, "rng": rng}
    with warnings.catch_warnings():  # that it is a single process
        warnings.simplefilter("ignore")
        dcp.save(tree, checkpoint_id=folder, no_dist=True)
    return folder


def whole(source: Checkpoint, kind: str, name: str) -> Tensor:
    """The whole tensor."""
    first = source.entries((kind, name))[0]
    shape = first.place.shape
    target = torch.empty(shape, dtype=DTYPES[first.dtype])
    place = Place(shape, tuple((0, size) for size in shape), None)
    source.fill(target, source.plan(place, (kind, name)))
    return target


def parameters(source: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Parameters or their masters, and buffers; tied ones under each name."""
    held = {}
    for kind in ("parameters", "buffers"):
        for name in source.names(kind):
            master = ("optimizer", f"{name}.{MASTER}")
            held[name] = whole(source, *(master if master in source.copies else (kind, name)))
    yield from held.items()
    for name, first in source.manifest.about.aliases.items():
        if first in held:
            yield name, held[first]


def spec_of(source: Checkpoint) -> OptimizerSpec:
    """The specification of the saving run's optimizer.

    :raises CheckpointError: it is not told, or not in the form of this suite.
    """
    told = source.manifest.about.optimizer
    try:
        if told is None:
            raise ValueError("the checkpoint does not describe the optimizer")
        given = {**told, "betas": tuple(told["betas"])}
        given["groups"] = tuple(GroupSpec(**group) for group in told["groups"])
        given["scaler"] = None if told["scaler"] is None else ScalerSpec(**told["scaler"])
        spec = OptimizerSpec(**given)
        dataclasses.replace(spec).kind  # noqa: B018 - an optimizer that there is
        return spec
    except (TypeError, ValueError, KeyError) as error:
        what = f"the optimizer of this checkpoint cannot be created: {error}"
        remedy = "save the checkpoint again by a strategy of this suite"
        raise CheckpointError(source.folder, what, remedy) from None


def settings(source: Checkpoint, spec: OptimizerSpec, model: dict[str, Tensor]) -> dict[str, Any]:
    """The group settings in the form of ``get_state_dict``, parameter by parameter."""
    trained = {name.rpartition(".")[0] for name in source.names("optimizer")}
    trained = trained or set(source.names("parameters"))  # SGD without momentum has no state
    named = {n: torch.empty_like(t, device="meta") for n, t in model.items() if n in trained}
    optimizer = build_optimizer(spec, param_groups(spec, named))
    set_learning_rate(optimizer, spec, max(0, source.manifest.about.step - 1))
    return {
        f"param_groups.{name}.{key}": value
        for group in optimizer.param_groups
        for name in group[NAMES]
        for key, value in group.items()
        if key not in ("params", NAMES)
    }


def scaler_state(source: Checkpoint, spec: OptimizerSpec) -> dict[str, Any]:
    """The loss scale in the form of ``GradScaler.state_dict``; empty without loss scaling."""
    told = source.manifest.about.scaler
    scaler: GradScaler = make_scaler(spec, "cpu")
    if told is None or not scaler.is_enabled():
        return {}
    state: dict[str, Any] = scaler.state_dict()
    return state | {"scale": float(told["scale"]), "_growth_tracker": int(told["good"])}
