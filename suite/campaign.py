"""Randomized clean cases: the measure of false alarms.

A campaign draws cases of implementations that are believed right, over seeds, meshes, backends,
options, optimizers, clipping, lanes and combinations of traits, and expects every one to pass.
Case ``number`` depends on the campaign's seed and on that number alone: a false alarm can be
repeated from its id, whatever else was drawn or filtered.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from suite import workloads
from suite.case import DATA_AXES, Case, Lane, WorkloadSpec, split
from suite.contract import OptimizerSpec

LARGEST_WORLD = 5
#: Of meshes of several axes; with more ranks than processes they are threads.
LARGEST_GRID, MOST_PROCESSES = 12, 8
MOST_TRAITS = 3
#: Batches that are tried with a mesh and options before others are drawn.
MOST_TRIES = 300
#: Where it is declined, no rank may have fewer samples than micro-batches either.
UNEQUAL = "unequal_micro_batches"
STRIDED = "non_contiguous"
#: Lanes of the real workloads, the main bug finder twice as often; ``DYADIC`` has its own.
LANES: Sequence[Lane] = ("fp64", "fp64", "bitwise", "native")
DYADIC = "dyadic_mlp"
#: Has batch norms, which want weights and buffers of one dtype.
NORMED = "digits_cnn"
#: What every option is drawn from.
Choices = Mapping[str, Sequence[Any]]
#: Traits that a system declines under its options.
Declines = Callable[[str, Mapping[str, Any]], Collection[str]]
#: Whether a system has a schedule for windows of a size: name, options, mesh, micro-batches.
Schedules = Callable[[str, Mapping[str, Any], Mapping[str, int], int], bool]


@dataclass(frozen=True)
class System:
    """An implementation, and what its meshes and options are drawn from.

    ``options`` are independent of each other but for ``only``: options, mesh and workload that it
    refuses are drawn again.  ``mixed``: knows mixed precision.  ``sums_ranks_first``: adds every
    micro-batch up over ranks before it adds it to the others, so that with several micro-batches
    two ranks are not promised equal bits.  ``flattens``: makes parameters contiguous, whose
    products may then be rounded otherwise.  ``takes``: whether options go with a policy of
    precision, for a model with batch norms or without; where not, nothing is cast.  ``stages``:
    units that a model must have at least (0: as many as it has by default); ``cuts``: whether
    options go with the micro-batches and traits.  ``sizes``: knobs of a workload that the mesh can
    share.  ``workloads``, ``backends``, ``dtypes`` (what a model is built in) and ``lanes`` (of the
    real workloads): what it can be given.  ``clips``: its clipping is believed right.  ``chance``:
    how often it is drawn beside the others.
    """

    name: str
    meshes: Sequence[Mapping[str, int]]
    options: Choices = field(default_factory=dict)
    mixed: bool = False
    sums_ranks_first: Callable[[Mapping[str, Any], Mapping[str, int]], bool] = (
        lambda options, mesh: False
    )
    flattens: Callable[[Mapping[str, Any], Mapping[str, int]], bool] = lambda options, mesh: False
    only: Callable[[Mapping[str, Any], Mapping[str, int], str], bool] = (
        lambda options, mesh, workload: True
    )
    takes: Callable[[Mapping[str, Any], Mapping[str, str], bool], bool] = (
        lambda options, policy, normed: True
    )
    stages: Callable[[Mapping[str, Any], Mapping[str, int]], int] = lambda options, mesh: 0
    cuts: Callable[[Mapping[str, Any], Mapping[str, int], WorkloadSpec], bool] = (
        lambda options, mesh, spec: True
    )
    most_micro_batches: int = 3
    sizes: Callable[[random.Random, str, Mapping[str, int], Mapping[str, Any]], dict[str, Any]] = (
        lambda source, workload, mesh, options: {}
    )
    workloads: tuple[str, ...] = ("charnames_gpt", "digits_cnn", "dyadic_mlp")
    backends: tuple[str, ...] = ("in_memory", "gloo")
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16")
    lanes: Sequence[Lane] = LANES
    clips: bool = True
    chance: float = 1.0


def coordinates(mesh: Mapping[str, int]) -> int:
    """Shares that the batch is cut into."""
    return math.prod(size for axis, size in mesh.items() if axis in DATA_AXES)


def _line(axis: str) -> list[dict[str, int]]:
    return [{axis: size} for size in range(1, LARGEST_WORLD + 1)]


def _always(options: Mapping[str, Any], mesh: Mapping[str, int]) -> bool:
    return True


def _communicates(options: Mapping[str, Any], mesh: Mapping[str, int]) -> bool:
    """Without ``accumulate_without_communication`` every micro-batch is reduced by itself."""
    return not options.get("accumulate_without_communication")


def _reshards(options: Mapping[str, Any], mesh: Mapping[str, int], workload: str) -> bool:
    """Whether an integer ``reshard_after_forward`` divides the ranks that parameters lie on."""
    k = options.get("reshard_after_forward")
    return k is None or isinstance(k, bool) or mesh["shard"] % k == 0


def _as_fsdp1(options: Mapping[str, Any], policy: Mapping[str, str], normed: bool) -> bool:
    """What FSDP1 insists on: no batch norms, and micro-batches are added up in no narrower dtype
    than ranks.
    """
    if normed:
        return not policy
    return _communicates(options, {}) or "reduce" not in policy or "parameters" not in policy


def _as_fsdp2(options: Mapping[str, Any], policy: Mapping[str, str], normed: bool) -> bool:
    """It does not cast buffers."""
    return "buffers" not in policy


_HYBRID = tuple({"replicate": r, "shard": f} for r, f in ((2, 2), (2, 3), (1, 3), (3, 1), (3, 2)))
#: FSDP1 refuses hybrids without sharding.
_SHARDED_HYBRID = tuple(mesh for mesh in _HYBRID if mesh["shard"] > 1)
_SHARDS = _line("shard")
_PIPES = [{"pipe": size} for size in range(1, 7)]
_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v")
#: Of torch.
_SINGLE, _SPLIT = ("gpipe", "1f1b"), ("interleaved_zb", "zb_v", "dualpipe_v")
#: Pipe, replicate, shard, tensor: all that have few enough ranks.
_GRIDS = [
    dict(zip(("pipe", *DATA_AXES, "tensor"), sizes, strict=True))
    for sizes in itertools.product((1, 2, 3), repeat=4)
    if math.prod(sizes) <= LARGEST_GRID
]
#: Where layers are split, of these there must be some.
_LAYERED = ("charnames_gpt", "dyadic_mlp")


def _without_ones(meshes: Sequence[Mapping[str, int]], kept: str = "") -> list[dict[str, int]]:
    """``meshes`` of few ranks that name only the axes of several, and the one that is ``kept``."""
    small = (mesh for mesh in meshes if 1 < math.prod(mesh.values()) <= MOST_PROCESSES)
    return [{axis: n for axis, n in mesh.items() if n > 1 or axis == kept} for mesh in small]


def _stages(options: Mapping[str, Any], mesh: Mapping[str, int]) -> int:
    chunks = 2 if options["schedule"] in ("zb_v", "interleaved") else 1
    return mesh.get("pipe", 1) * chunks


def _native_stages(options: Mapping[str, Any], mesh: Mapping[str, int]) -> int:
    return mesh["pipe"] * (1 if options["schedule"] in _SINGLE else 2)


def _windows(mesh: Mapping[str, int], spec: WorkloadSpec) -> list[list[int]]:
    """Samples of every micro-batch of every window of every data coordinate."""
    return [window for share in spec.cut(coordinates(mesh)) for window in share]


def _in_equal_parts(
    options: Mapping[str, Any], mesh: Mapping[str, int], spec: WorkloadSpec
) -> bool:
    """torch cuts a window's inputs into equal parts.  Where B and W come apart, no stage may end in
    an operation that makes a view, as odd modules inside of units do.
    """
    if any(len(set(window)) > 1 for window in _windows(mesh, spec)):
        return False
    inner = any(workloads.TRAITS[trait].place == "inner" for trait in spec.traits)
    if not inner or options["schedule"] not in _SPLIT:
        return True
    ends = list(itertools.accumulate(split(spec.params["layers"], _native_stages(options, mesh))))
    return spec.params["layers"] // 2 + 1 not in ends[:-1]


def _in_one_window(options: Mapping[str, Any], mesh: Mapping[str, int], spec: WorkloadSpec) -> bool:
    """DeepSpeed's step has one; sizes may differ only where it tells them with every message."""
    windows = _windows(mesh, spec)
    return len(windows) == 1 and (options["dynamic_shape"] or len(set(windows[0])) == 1)


def _recomputes(options: Mapping[str, Any], mesh: Mapping[str, int], workload: str) -> bool:
    """A backward in two parts cannot compute anything again."""
    return not options["recompute_every"] or not options["schedule"].startswith("zb_")


def _goes_together(options: Mapping[str, Any], mesh: Mapping[str, int], workload: str) -> bool:
    """As pipelines; nothing but Transformers and the like can be split into layers."""
    if workload not in _LAYERED and mesh.get("tensor", 1) > 1:
        return False
    return _recomputes(options, mesh, workload)


def _reduces_each(options: Mapping[str, Any], mesh: Mapping[str, int]) -> bool:
    """Hybrids without stages whose data axes reduce every micro-batch."""
    inner = options.get("data_options", {})
    return mesh.get("pipe", 1) == 1 and options["data"] != "ddp" and _communicates(inner, mesh)


def _natively_split(options: Mapping[str, Any], mesh: Mapping[str, int], workload: str) -> bool:
    """Torch's parallel loss is a cross-entropy; its biases are divided by the ranks, which is exact
    for powers of two; backwards that come in two parts want whole parameters.
    """
    if options.get("reshard_after_forward") and options["schedule"] in _SPLIT:
        return False
    if workload != DYADIC:
        return True
    return not options["loss_parallel"] and mesh.get("tensor", 1) in (1, 2, 4)


def _clean_shapes(options: Mapping[str, Any], mesh: Mapping[str, int], workload: str) -> bool:
    """To infer shapes torch feeds batch norms with memory that nobody has written."""
    return workload != NORMED or options["shapes"] == "given"


def _shared(
    source: random.Random, workload: str, mesh: Mapping[str, int], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Layers that the ranks of the tensor axis can share: whole heads, KV heads of one or several
    ranks, a vocabulary and a sequence of any size.
    """
    if workload == NORMED:
        return {}
    if workload == DYADIC:
        return {"width": 60}
    ranks = mesh.get("tensor", 1)
    heads = ranks * source.choice((2, 4))
    kv = [n for n in range(1, heads + 1) if heads % n == 0 and (n % ranks == 0 or ranks % n == 0)]
    return {
        "heads": heads,
        "kv_heads": source.choice(kv),
        "width": heads * (source.choice((4, 8)) if heads > 2 else 8),
        "vocab": source.choice((97, 128)),
        "seq": source.choice((11, 16)),
        "label_smoothing": source.choice((0.0, 0.1)),
    }


def _natively_shared(
    source: random.Random, workload: str, mesh: Mapping[str, int], options: Mapping[str, Any]
) -> dict[str, Any]:
    """As torch wants it: KV heads and, where they are cut, positions that divide by the ranks."""
    if workload == DYADIC:
        return {"width": 60, "seq": 12}
    ranks, sizes = mesh.get("tensor", 1), _shared(source, workload, mesh, options)
    if sizes["kv_heads"] % ranks:
        sizes["kv_heads"] = ranks
    if options["sequence_parallel"]:
        sizes["seq"] = 3 * ranks if ranks > 3 else 12
    if options["loss_parallel"]:
        sizes["label_smoothing"] = 0.0
    return sizes


#: Shared by the sharded systems.  A wrap policy must match something in every workload.
_WRAP: Choices = {"wrap": ({}, {"module_class": ["Block"]}, {"minimum_parameters": 500})}
_SILENT = {"accumulate_without_communication": (False, True)}
_RECOMPUTE = {"recompute_every": (0, 0, 1, 2)}
_STATE = {"offload": ("none", "none", "optimizer")}
_EVERYTHING = {"offload": ("none", "none", "optimizer", "parameters")}
_BUCKETS = {"bucket_bytes": (4096, 49152, 25 * 2**20)}
_PREFETCH = {"prefetch_forward": (0, 1, 2), "prefetch_backward": (0, 1, 2)}
_FSDP = {**_WRAP, **_SILENT, **_RECOMPUTE, **_PREFETCH}
_NATIVE_FSDP = {**_WRAP, **_SILENT, "recompute_every": (0, 0, 1)}
_SPLIT_LAYERS: Choices = {"sequence_parallel": (False, True), "loss_parallel": (None, False)}
_NATIVE_SCHEDULES = (*_SINGLE, "interleaved", "looped_bfs", *_SPLIT)
_NATIVE_DDP = {
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
        sums_ranks_first=_communicates if "shard" in meshes[0] else lambda options, mesh: False,
        flattens=_always,
        only=_reshards,
    )


def _fsdp1(strategy: str, meshes: Sequence[Mapping[str, int]]) -> System:
    options: Choices = {
        "sharding_strategy": (strategy,),
        **_NATIVE_FSDP,
        "prefetch_forward": (0, 1),
        "prefetch_backward": (0, 1),
    }
    return System(
        "pytorch/fsdp1",
        meshes,
        options,
        mixed=True,
        sums_ranks_first=_communicates,
        takes=_as_fsdp1,
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
        sums_ranks_first=_reduces_each,
        flattens=lambda options, mesh: data in ("zero3", "fsdp"),
        only=_goes_together,
        stages=_stages,
        sizes=_shared,
        most_micro_batches=6,
        chance=0.5,
    )


#: Without replicas.
_SHARDED_GRIDS = [mesh for mesh in _GRIDS if mesh["replicate"] == 1]
_SHARDED_GRIDS += _without_ones(_SHARDED_GRIDS, kept="shard")
_WRAPPED = {"wrap": {"module_class": ["Block"]}}
#: Of torch, whose copies want shards: of one rank, if need be.  Many ranks take it long.
_NATIVE_GRIDS = [
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
    System("pytorch/ddp", _line("replicate"), _NATIVE_DDP),
    System("reference/zero1", _SHARDS, {**_BUCKETS, **_RECOMPUTE, **_STATE}, mixed=True),
    System(
        "reference/zero2",
        _SHARDS,
        {**_BUCKETS, **_RECOMPUTE, **_STATE},
        mixed=True,
        sums_ranks_first=_always,
    ),
    System(
        "reference/zero3",
        _SHARDS,
        {**_WRAP, **_RECOMPUTE, **_EVERYTHING},
        mixed=True,
        sums_ranks_first=_always,
        flattens=_always,
    ),
    _fsdp("NO_SHARD", _line("replicate")),
    _fsdp("SHARD_GRAD_OP", _SHARDS, **_EVERYTHING, reshard_after_forward=(None, False)),
    _fsdp("FULL_SHARD", _SHARDS, **_EVERYTHING, reshard_after_forward=(None, True, 2)),
    _fsdp("HYBRID_SHARD", _HYBRID, **_EVERYTHING, reshard_after_forward=(None, False, True, 2)),
    System(
        "pytorch/fsdp2",
        (*_SHARDS, *_HYBRID),
        {
            **_NATIVE_FSDP,
            "offload": ("none", "parameters"),
            "prefetch_forward": (0, 1, 2),
            "prefetch_backward": (1, 2),
            "reshard_after_forward": (None, True, False, 2),
            "reduce_scatter_unused_params": (False, True),
        },
        mixed=True,
        sums_ranks_first=_communicates,
        only=_reshards,
        takes=_as_fsdp2,
    ),
    _fsdp1("NO_SHARD", _line("replicate")),
    _fsdp1("SHARD_GRAD_OP", _SHARDS),
    _fsdp1("FULL_SHARD", _SHARDS),
    _fsdp1("HYBRID_SHARD", _SHARDED_HYBRID),
    System(
        "pytorch/zero_redundancy_optimizer",
        _SHARDS,
        {**_NATIVE_DDP, "parameters_as_bucket_view": (False, True)},
        flattens=lambda options, mesh: bool(options["parameters_as_bucket_view"]),
    ),
    System(
        "reference/pipeline",
        _PIPES,
        {"schedule": _SCHEDULES, "recompute_every": (0, 0, 0, 1)},
        only=_recomputes,
        stages=_stages,
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
        sizes=_shared,
        workloads=_LAYERED,
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
        {"schedule": _NATIVE_SCHEDULES, "shapes": ("inferred", "given", "given")},
        only=_clean_shapes,
        stages=_native_stages,
        cuts=_in_equal_parts,
        most_micro_batches=8,
        dtypes=("float64", "float32"),
    ),
    System(
        "pytorch/tensor_parallel",
        _line("tensor"),
        {"sequence_parallel": (False, True), "loss_parallel": (False, True)},
        only=_natively_split,
        sizes=_natively_shared,
        workloads=_LAYERED,
        lanes=("fp64", "fp64", "native"),
        chance=0.25,
    ),
    System(
        "pytorch/hybrid",
        _NATIVE_GRIDS,
        {
            "schedule": _NATIVE_SCHEDULES,
            "sequence_parallel": (False, True),
            "loss_parallel": (False, True),
            "reshard_after_forward": (False, False, True),
        },
        only=_natively_split,
        stages=_native_stages,
        cuts=_in_equal_parts,
        most_micro_batches=8,
        sizes=_natively_shared,
        workloads=_LAYERED,
        dtypes=("float64", "float32"),
        lanes=("fp64", "fp64", "native"),
        chance=0.25,
    ),
    System(
        "deepspeed/pipeline",
        [{"pipe": size} for size in range(1, LARGEST_WORLD + 1)],
        {"dynamic_shape": (False, True)},
        stages=lambda options, mesh: mesh["pipe"],
        cuts=_in_one_window,
        most_micro_batches=8,
        backends=("gloo",),
        dtypes=("float32",),
        lanes=("native",),
        clips=False,
        chance=0.5,
    ),
)
CHECKS = (
    "equivalence",
    "replicas",
    "norm",
    "traffic",
    "memory",
    "overlap",
    "engagement",
    "schedule",
)
#: Mixed precision: what the model is built in, and the policy.
POLICIES: Sequence[tuple[str, Mapping[str, str]]] = (
    ("float32", {}),
    ("bfloat16", {}),
    ("float32", {"parameters": "bfloat16"}),
    ("float32", {"parameters": "bfloat16", "reduce": "float32"}),
    ("float32", {"parameters": "float16"}),
    ("float32", {"reduce": "bfloat16"}),
)


def draw(count: int, case: Callable[[int], Case], wanted: Callable[[Case], bool]) -> list[Case]:
    """The first ``count`` of the cases 0, 1, 2, ... that are ``wanted``."""
    return list(itertools.islice(filter(wanted, map(case, itertools.count())), count))


def case_of(
    number: int,
    seed: int,
    traits: Mapping[str, Sequence[str]],
    declines: Declines,
    schedules: Schedules,
) -> Case:
    """Case ``number`` of the campaign with ``seed``.

    ``traits`` maps each workload to the traits it can carry.
    """
    source = random.Random(f"{seed} {number}")
    while True:
        case = _drawn(source, f"campaign-{seed}::{number:04d}", traits, declines, schedules)
        if case is not None:
            return case


def _drawn(
    source: random.Random,
    prefix: str,
    traits: Mapping[str, Sequence[str]],
    declines: Declines,
    schedules: Schedules,
) -> Case | None:
    """A case whose id begins with ``prefix``; ``None`` if no batch goes with what is drawn."""
    system = source.choices(SYSTEMS, [system.chance for system in SYSTEMS])[0]
    mesh, options, workload = _configured(source, system)
    backend = source.choice(system.backends)
    if math.prod(mesh.values()) > MOST_PROCESSES:
        backend = "in_memory"
    lane, dtype, policy = _lane(source, workload, system)
    if workload == NORMED and "parameters" in policy:
        policy = {**policy, "buffers": policy["parameters"]}
    if not system.takes(options, policy, workload == NORMED):
        dtype, policy = POLICIES[0]
    if policy:
        options["precision"] = dict(policy)
    one = lane == "bitwise" and system.sums_ranks_first(options, mesh)
    strided = lane == "bitwise" and system.flattens(options, mesh)
    more = (*((UNEQUAL,) if one else ()), *((STRIDED,) if strided else ()))
    declined = {*declines(system.name, options), *more}
    carried = sorted(trait for trait in traits[workload] if trait not in declined)

    def cuts(spec: WorkloadSpec) -> bool:
        sizes = {len(window) for window in _windows(mesh, spec)}
        return system.cuts(options, mesh, spec) and all(
            schedules(system.name, options, mesh, size) for size in sizes
        )

    spec = _workload(
        source,
        workload,
        carried,
        most_micro_batches=1 if one else system.most_micro_batches,
        equal_over=coordinates(mesh) if UNEQUAL in declined else 1,
        stages=system.stages(options, mesh),
        params=system.sizes(source, workload, mesh, options),
        cuts=cuts,
    )
    if spec is None:
        return None
    groups = workloads.suggested_groups(spec.traits)
    optimizer = replace(_optimizer(source, lane, system.clips), groups=groups)
    clipped = "noclip" if optimizer.clip_norm is None else "clip"
    shape = "x".join(f"{axis}{size}" for axis, size in mesh.items())
    return Case(
        id=f"{prefix}::{system.name}::{backend}::{shape}::{workload}"
        f"::{'+'.join(spec.traits) or 'bare'}::{optimizer.name}::{clipped}"
        f"::{'-'.join((lane, dtype, *policy.values()))}",
        scenario="campaign",
        implementation=system.name,
        options=options,
        backend=backend,
        mesh=mesh,
        workload=spec,
        optimizer=optimizer,
        lane=lane,
        dtype=dtype,
        precision=dict(policy),
        checks=CHECKS,
        steps=source.choice((3, 4)),
    )


def _configured(
    source: random.Random, system: System
) -> tuple[dict[str, int], dict[str, Any], str]:
    """A mesh, options and a workload that go together."""
    while True:
        mesh = dict(source.choice(list(system.meshes)))
        options = {name: source.choice(choices) for name, choices in system.options.items()}
        workload = source.choice(system.workloads)
        if system.only(options, mesh, workload):
            return mesh, options, workload


def _lane(
    source: random.Random, workload: str, system: System
) -> tuple[Lane, str, Mapping[str, str]]:
    """A lane that ``workload`` has a form for, a dtype and a policy with which it is judged."""
    if workload == DYADIC:
        found = [dtype for dtype in ("float32", "float64") if dtype in system.dtypes]
        return "dyadic", source.choice(found), {}
    lane = source.choice(system.lanes)
    if lane == "native":
        policies = POLICIES if system.mixed else POLICIES[:2]
        return lane, *source.choice([one for one in policies if one[0] in system.dtypes])
    return lane, "float32" if lane == "bitwise" else "float64", {}


def _optimizer(source: random.Random, lane: Lane, clips: bool) -> OptimizerSpec:
    """SGD or AdamW; equal bits need clipping off, exact sums need powers of two."""
    if lane == "dyadic":
        return OptimizerSpec(lr=0.125, momentum=0.0)
    name: Literal["sgd", "adamw"] = "sgd" if source.random() < 0.5 else "adamw"
    return OptimizerSpec(
        name=name,
        lr=0.1 if name == "sgd" else 1e-3,
        weight_decay=source.choice((0.0, 0.1)),
        warmup_steps=source.choice((0, 2)),
        clip_norm=None if lane == "bitwise" or not clips else source.choice((None, 0.05)),
    )


def _workload(
    source: random.Random,
    name: str,
    carried: Sequence[str],
    most_micro_batches: int,
    equal_over: int,
    stages: int,
    params: dict[str, Any],
    cuts: Callable[[WorkloadSpec], bool],
) -> WorkloadSpec | None:
    """A random workload that can be made: some traits ask for more than one micro-batch.

    Each of ``equal_over`` ranks has as many micro-batches as the others; the model has a unit at
    least for each of ``stages``, and sizes ``params``.
    """
    params = params | ({"layers": stages + source.randint(0, 2)} if stages else {})
    for _ in range(MOST_TRIES):
        spec = WorkloadSpec(
            name,
            traits=tuple(sorted(source.sample(carried, source.randint(0, MOST_TRAITS)))),
            seed=source.randrange(2**31),
            global_batch=source.choice((12, 15, 24)),
            micro_batches=source.randint(1, most_micro_batches),
            windows=1 if most_micro_batches == 1 else source.choice((1, 1, 2)),
            params=params,
        )
        try:
            workloads.check(spec)
        except workloads.WorkloadError:
            continue
        if len(set(spec.micro_batch_counts(equal_over))) == 1 and cuts(spec):
            return spec
    return None
