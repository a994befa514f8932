"""The systems that a campaign draws from, with their meshes and options."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardproof.case import DATA_AXES
from shardproof.studies.campaign.fits import (
    LARGEST_GRID,
    LARGEST_WORLD,
    LAYERED,
    MOST_PROCESSES,
    SINGLE,
    SPLIT,
    Choices,
    System,
    always,
    as_fsdp1,
    as_fsdp2,
    clean_shapes,
    communicates,
    coordinates,
    goes_together,
    in_equal_parts,
    in_one_window,
    own_stages,
    recomputes,
    reduces_each,
    reshards,
    shared_sizes,
    upstream_sizes,
    upstream_splits,
    upstream_stages,
)


def _line(axis: str) -> list[dict[str, int]]:
    return [{axis: size} for size in range(1, LARGEST_WORLD + 1)]


_HYBRID = tuple({"replicate": r, "shard": f} for r, f in ((2, 2), (2, 3), (1, 3), (3, 1), (3, 2)))
#: FSDP1 refuses hybrids without sharding.
_SHARDED_HYBRID = tuple(mesh for mesh in _HYBRID if mesh["shard"] > 1)
_SHARDS = _line("shard")
_PIPES = [{"pipe": size} for size in range(1, 7)]
_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v")
#: Pipe, replicate, shard, tensor: all that have few enough ranks.
_GRIDS = [
    dict(zip(("pipe", *DATA_AXES, "tensor"), sizes, strict=True))
    for sizes in itertools.product((1, 2, 3), repeat=4)
    if math.prod(sizes) <= LARGEST_GRID
]


def _without_ones(meshes: Sequence[Mapping[str, int]], kept: str = "") -> list[dict[str, int]]:
    """``meshes`` of few ranks that name only the axes of several, and the one that is ``kept``."""
    small = (mesh for mesh in meshes if 1 < math.prod(mesh.values()) <= MOST_PROCESSES)
    return [{axis: n for axis, n in mesh.items() if n > 1 or axis == kept} for mesh in small]


#: Shared by the sharded systems.  A wrap policy must match something in every workload.
_WRAP: Choices = {"wrap": ({}, {"module_class": ["Block"]}, {"minimum_parameters": 500})}
_SILENT = {"accumulate_without_communication": (False, True)}
_RECOMPUTE = {"recompute_every": (0, 0, 1, 2)}
_STATE = {"offload": ("none", "none", "optimizer")}
_EVERYTHING = {"offload": ("none", "none", "optimizer", "parameters")}
_BUCKETS = {"bucket_bytes": (4096, 49152, 25 * 2**20)}
_PREFETCH = {"prefetch_forward": (0, 1, 2), "prefetch_backward": (0, 1, 2)}
_FSDP = {**_WRAP, **_SILENT, **_RECOMPUTE, **_PREFETCH}
_UPSTREAM_FSDP = {**_WRAP, **_SILENT, "recompute_every": (0, 0, 1)}
_SPLIT_LAYERS: Choices = {"sequence_parallel": (False, True), "loss_parallel": (None, False)}
_UPSTREAM_SCHEDULES = (*SINGLE, "interleaved", "looped_bfs", *SPLIT)
_UPSTREAM_DDP = {
    "find_unused_parameters": (True,),
    "gradient_as_bucket_view": (False, True),
    "bucket_cap_mb": (None, 0.05),
    "recompute_every": (0, 0, 1),
}


def _fsdp(strategy: str, meshes: Sequence[Mapping[str, int]], **options: Sequence[Any]) -> System:
    return System(
        "reference/fsdp",
        meshes,
        {"sharding_strategy": (strategy,), **_FSDP, **options},
        mixed=True,
        sums_ranks_first=communicates if "shard" in meshes[0] else lambda options, mesh: False,
        flattens=always,
        only=reshards,
    )


def _fsdp1(strategy: str, meshes: Sequence[Mapping[str, int]]) -> System:
    options: Choices = {
        "sharding_strategy": (strategy,),
        **_UPSTREAM_FSDP,
        "prefetch_forward": (0, 1),
        "prefetch_backward": (0, 1),
    }
    return System(
        "pytorch/fsdp1",
        meshes,
        options,
        mixed=True,
        sums_ranks_first=communicates,
        takes=as_fsdp1,
    )


def _hybrid(
    data: str, meshes: Sequence[Mapping[str, int]], *inner: Mapping[str, Any], **more: Sequence[Any]
) -> System:
    """A strategy ``data`` of the data axes, under ``inner`` of its options."""
    return System(
        "reference/hybrid",
        meshes,
        {
            "data": (data,),
            "data_options": inner,
            "schedule": _SCHEDULES,
            "recompute_every": (0, 0, 0, 1),
            **_SPLIT_LAYERS,
            **more,
        },
        mixed=data != "ddp",
        sums_ranks_first=reduces_each,
        flattens=lambda options, mesh: data in ("zero3", "fsdp"),
        only=goes_together,
        stages=own_stages,
        sizes=shared_sizes,
        most_micro_batches=6,
        chance=0.5,
    )


#: Without replicas.
_SHARDED_GRIDS = [mesh for mesh in _GRIDS if mesh["replicate"] == 1]
_SHARDED_GRIDS += _without_ones(_SHARDED_GRIDS, kept="shard")
_WRAPPED = {"wrap": {"module_class": ["Block"]}}
#: Of torch, whose copies want shards: of one rank, if need be.  Many ranks take it long.
_UPSTREAM_GRIDS = [
    *(mesh for mesh in _GRIDS if math.prod(mesh.values()) <= MOST_PROCESSES),
    *({"pipe": n["pipe"], "tensor": n["tensor"]} for n in _GRIDS if coordinates(n) == 1),
    *(
        {"pipe": n["pipe"], "shard": n["shard"]}
        for n in _GRIDS
        if n["replicate"] == n["tensor"] == 1
    ),
]
#: What a campaign draws from.  Systems with several entries, and those that take long, have smaller
#: chances, so that none takes up most of a campaign.
SYSTEMS: Sequence[System] = (
    System("plain", [{"replicate": 1}]),
    System("reference/ddp", _line("replicate"), {"bucket_bytes": (4096, 25 * 2**20), **_RECOMPUTE}),
    System("reference/naive_ddp", _line("replicate")),
    System("pytorch/ddp", _line("replicate"), _UPSTREAM_DDP),
    System("reference/zero1", _SHARDS, {**_BUCKETS, **_RECOMPUTE, **_STATE}, mixed=True),
    System(
        "reference/zero2",
        _SHARDS,
        {**_BUCKETS, **_RECOMPUTE, **_STATE},
        mixed=True,
        sums_ranks_first=always,
    ),
    System(
        "reference/zero3",
        _SHARDS,
        {**_WRAP, **_RECOMPUTE, **_EVERYTHING},
        mixed=True,
        sums_ranks_first=always,
        flattens=always,
    ),
    _fsdp("NO_SHARD", _line("replicate")),
    _fsdp("SHARD_GRAD_OP", _SHARDS, **_EVERYTHING, reshard_after_forward=(None, False)),
    _fsdp("FULL_SHARD", _SHARDS, **_EVERYTHING, reshard_after_forward=(None, True, 2)),
    _fsdp("HYBRID_SHARD", _HYBRID, **_EVERYTHING, reshard_after_forward=(None, False, True, 2)),
    System(
        "pytorch/fsdp2",
        (*_SHARDS, *_HYBRID),
        {
            **_UPSTREAM_FSDP,
            "offload": ("none", "parameters"),
            "prefetch_forward": (0, 1, 2),
            "prefetch_backward": (1, 2),
            "reshard_after_forward": (None, True, False, 2),
            "reduce_scatter_unused_params": (False, True),
        },
        mixed=True,
        sums_ranks_first=communicates,
        only=reshards,
        takes=as_fsdp2,
    ),
    _fsdp1("NO_SHARD", _line("replicate")),
    _fsdp1("SHARD_GRAD_OP", _SHARDS),
    _fsdp1("FULL_SHARD", _SHARDS),
    _fsdp1("HYBRID_SHARD", _SHARDED_HYBRID),
    System(
        "pytorch/zero_redundancy_optimizer",
        _SHARDS,
        {**_UPSTREAM_DDP, "parameters_as_bucket_view": (False, True)},
        flattens=lambda options, mesh: bool(options["parameters_as_bucket_view"]),
    ),
    System(
        "reference/pipeline",
        _PIPES,
        {"schedule": _SCHEDULES, "recompute_every": (0, 0, 0, 1)},
        only=recomputes,
        stages=own_stages,
        most_micro_batches=8,
        chance=2.0,
    ),
    System(
        "reference/tensor",
        _line("tensor"),
        {
            **_SPLIT_LAYERS,
            "sum_each_backward": (False, False, True),
            "recompute_every": (0, 0, 1),
        },
        sizes=shared_sizes,
        workloads=LAYERED,
        chance=2.0,
    ),
    _hybrid(
        "ddp",
        [*_GRIDS, *_without_ones(_GRIDS)],
        {},
        {"bucket_bytes": 4096},
        {"broadcast_buffers": False},
    ),
    _hybrid("zero1", _SHARDED_GRIDS, {}, {"bucket_bytes": 4096}, offload=_STATE["offload"]),
    _hybrid("zero2", _SHARDED_GRIDS, {}, {"bucket_bytes": 4096}, offload=_STATE["offload"]),
    _hybrid("zero3", _SHARDED_GRIDS, {}, _WRAPPED, offload=_EVERYTHING["offload"]),
    _hybrid(
        "fsdp",
        _SHARDED_GRIDS,
        *({"sharding_strategy": name} for name in ("SHARD_GRAD_OP", "FULL_SHARD")),
        _WRAPPED,
        {"accumulate_without_communication": True},
        {"prefetch_forward": 2, "prefetch_backward": 0},
        offload=_EVERYTHING["offload"],
    ),
    _hybrid(
        "fsdp",
        _GRIDS,
        {"sharding_strategy": "HYBRID_SHARD"},
        {"sharding_strategy": "HYBRID_SHARD", "reshard_after_forward": False},
        offload=_EVERYTHING["offload"],
    ),
    System(
        "pytorch/pipelining",
        _PIPES,
        {"schedule": _UPSTREAM_SCHEDULES, "shapes": ("inferred", "given", "given")},
        only=clean_shapes,
        stages=upstream_stages,
        cuts=in_equal_parts,
        most_micro_batches=8,
        dtypes=("float64", "float32"),
    ),
    System(
        "pytorch/tensor_parallel",
        _line("tensor"),
        {"sequence_parallel": (False, True), "loss_parallel": (False, True)},
        only=upstream_splits,
        sizes=upstream_sizes,
        workloads=LAYERED,
        lanes=("fp64", "fp64", "working_precision"),
        chance=0.25,
    ),
    System(
        "pytorch/hybrid",
        _UPSTREAM_GRIDS,
        {
            "schedule": _UPSTREAM_SCHEDULES,
            "sequence_parallel": (False, True),
            "loss_parallel": (False, True),
            "reshard_after_forward": (False, False, True),
        },
        only=upstream_splits,
        stages=upstream_stages,
        cuts=in_equal_parts,
        most_micro_batches=8,
        sizes=upstream_sizes,
        workloads=LAYERED,
        dtypes=("float64", "float32"),
        lanes=("fp64", "fp64", "working_precision"),
        chance=0.25,
    ),
    System(
        "deepspeed/pipeline",
        [{"pipe": size} for size in range(1, LARGEST_WORLD + 1)],
        {"dynamic_shape": (False, True)},
        stages=lambda options, mesh: mesh["pipe"],
        cuts=in_one_window,
        most_micro_batches=8,
        backends=("gloo",),
        dtypes=("float32",),
        lanes=("working_precision",),
        clips=False,
        chance=0.5,
    ),
)
