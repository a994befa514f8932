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
from functools import partial
from typing import Any, Literal

from suite import workloads
from suite.case import Case, Lane, WorkloadSpec
from suite.contract import OptimizerSpec

LARGEST_WORLD = 5
MOST_TRAITS = 3
#: Where it is declined, no rank may have fewer samples than micro-batches either.
UNEQUAL = "unequal_micro_batches"
STRIDED = "non_contiguous"
#: What every option is drawn from.
Choices = Mapping[str, Sequence[Any]]
#: Traits that a system declines under its options.
Declines = Callable[[str, Mapping[str, Any]], Collection[str]]


@dataclass(frozen=True)
class System:
    """An implementation, and what its meshes and options are drawn from.

    ``options`` are independent of each other but for ``only``: combinations that it refuses are
    drawn again.  ``mixed``: knows mixed precision.  ``sums_ranks_first``: adds every micro-batch up
    over ranks before it adds it to the others, so that with several micro-batches two ranks are not
    promised equal bits.  ``flattens``: makes parameters contiguous, whose products may then be
    rounded otherwise.  ``takes``: whether options go with a policy of precision, for a model with
    batch norms or without; where not, nothing is cast.  ``stages``: units that a model must have at
    least (0: as many as it has by default); ``cuts``: whether options go with the micro-batches.
    ``sizes``: knobs of a workload that the mesh can share.  ``workloads``: what it can be given
    (none: everything).
    """

    name: str
    meshes: Sequence[Mapping[str, int]]
    options: Choices = field(default_factory=dict)
    mixed: bool = False
    sums_ranks_first: Callable[[Mapping[str, Any]], bool] = lambda options: False
    flattens: Callable[[Mapping[str, Any]], bool] = lambda options: False
    only: Callable[[Mapping[str, Any], Mapping[str, int]], bool] = lambda options, mesh: True
    takes: Callable[[Mapping[str, Any], Mapping[str, str], bool], bool] = (
        lambda options, policy, normed: True
    )
    stages: Callable[[Mapping[str, Any], Mapping[str, int]], int] = lambda options, mesh: 0
    cuts: Callable[[Mapping[str, Any], Mapping[str, int], WorkloadSpec], bool] = (
        lambda options, mesh, spec: True
    )
    most_micro_batches: int = 3
    sizes: Callable[[random.Random, str, Mapping[str, int]], dict[str, Any]] = (
        lambda source, workload, mesh: {}
    )
    workloads: tuple[str, ...] = ()


def _line(axis: str) -> list[dict[str, int]]:
    return [{axis: size} for size in range(1, LARGEST_WORLD + 1)]


def _always(options: Mapping[str, Any]) -> bool:
    return True


def _communicates(options: Mapping[str, Any]) -> bool:
    """Without ``accumulate_without_communication`` every micro-batch is reduced by itself."""
    return not options.get("accumulate_without_communication")


def _reshards(options: Mapping[str, Any], mesh: Mapping[str, int]) -> bool:
    """Whether an integer ``reshard_after_forward`` divides the ranks that parameters lie on."""
    k = options.get("reshard_after_forward")
    return k is None or isinstance(k, bool) or mesh["shard"] % k == 0


def _as_fsdp1(options: Mapping[str, Any], policy: Mapping[str, str], normed: bool) -> bool:
    """What FSDP1 insists on: no batch norms, and micro-batches are added up in no narrower dtype
    than ranks.
    """
    if normed:
        return not policy
    return _communicates(options) or "reduce" not in policy or "parameters" not in policy


def _as_fsdp2(options: Mapping[str, Any], policy: Mapping[str, str], normed: bool) -> bool:
    """It does not cast buffers."""
    return "buffers" not in policy


_HYBRID = tuple({"replicate": r, "shard": f} for r, f in ((2, 2), (2, 3), (1, 3), (3, 1), (3, 2)))
#: FSDP1 refuses hybrids without sharding.
_SHARDED_HYBRID = tuple(mesh for mesh in _HYBRID if mesh["shard"] > 1)
_SHARDS = _line("shard")
_PIPES = [{"pipe": size} for size in range(1, 7)]
_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v")


def _stages(options: Mapping[str, Any], mesh: Mapping[str, int]) -> int:
    return mesh["pipe"] * (2 if options["schedule"] in ("zb_v", "interleaved") else 1)


def _in_groups(options: Mapping[str, Any], mesh: Mapping[str, int], spec: WorkloadSpec) -> bool:
    """Interleaving takes as many micro-batches at a time as there are ranks."""
    windows = (window for share in spec.cut(1) for window in share)
    return options["schedule"] != "interleaved" or all(len(w) % mesh["pipe"] == 0 for w in windows)


def _recomputes(options: Mapping[str, Any], mesh: Mapping[str, int]) -> bool:
    """A backward in two parts cannot compute anything again."""
    return not options["recompute_every"] or not options["schedule"].startswith("zb_")


def _shared(source: random.Random, workload: str, mesh: Mapping[str, int]) -> dict[str, Any]:
    """Layers that the ranks of the tensor axis can share: whole heads, KV heads of one or several
    ranks, a vocabulary of any size.
    """
    if workload == DYADIC:
        return {"width": 60}
    ranks = mesh["tensor"]
    heads = ranks * source.choice((2, 4))
    kv = [n for n in range(1, heads + 1) if heads % n == 0 and (n % ranks == 0 or ranks % n == 0)]
    return {
        "heads": heads,
        "kv_heads": source.choice(kv),
        "width": heads * (source.choice((4, 8)) if heads > 2 else 8),
        "vocab": source.choice((97, 128)),
        "label_smoothing": source.choice((0.0, 0.1)),
    }


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
        sums_ranks_first=_communicates if "shard" in meshes[0] else lambda options: False,
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


#: What a campaign draws from, all with equal chances.
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
        flattens=lambda options: bool(options["parameters_as_bucket_view"]),
    ),
    System(
        "reference/pipeline",
        _PIPES,
        {"schedule": _SCHEDULES, "recompute_every": (0, 0, 0, 1)},
        only=_recomputes,
        stages=_stages,
        cuts=_in_groups,
        most_micro_batches=8,
    ),
    System(
        "reference/tensor",
        _line("tensor"),
        {
            "sequence_parallel": (False, True),
            "loss_parallel": (None, False),
            "sum_each_backward": (False, False, True),
            "recompute_every": (0, 0, 1),
        },
        sizes=_shared,
        workloads=("charnames_gpt", "dyadic_mlp"),
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
#: Lanes of the real workloads, the main bug finder twice as often; ``DYADIC`` has its own.
LANES: Sequence[Lane] = ("fp64", "fp64", "bitwise", "native")
DYADIC = "dyadic_mlp"
#: Has batch norms, which want weights and buffers of one dtype.
NORMED = "digits_cnn"
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
    number: int, seed: int, traits: Mapping[str, Sequence[str]], declines: Declines
) -> Case:
    """Case ``number`` of the campaign with ``seed``.

    ``traits`` maps each workload to the traits it can carry.
    """
    source = random.Random(f"{seed} {number}")
    system = source.choice(SYSTEMS)
    mesh, options = _configured(source, system)
    backend = source.choice(("in_memory", "gloo"))
    workload = source.choice(sorted(set(traits) & set(system.workloads or traits)))
    lane, dtype, policy = _lane(source, workload, system.mixed)
    if workload == NORMED and "parameters" in policy:
        policy = {**policy, "buffers": policy["parameters"]}
    if not system.takes(options, policy, workload == NORMED):
        dtype, policy = POLICIES[0]
    if policy:
        options["precision"] = dict(policy)
    one = lane == "bitwise" and system.sums_ranks_first(options)
    strided = lane == "bitwise" and system.flattens(options)
    more = (*((UNEQUAL,) if one else ()), *((STRIDED,) if strided else ()))
    declined = {*declines(system.name, options), *more}
    carried = sorted(trait for trait in traits[workload] if trait not in declined)
    spec = _workload(
        source,
        workload,
        carried,
        most_micro_batches=1 if one else system.most_micro_batches,
        equal_over=math.prod(mesh.values()) if UNEQUAL in declined else 1,
        stages=system.stages(options, mesh),
        params=system.sizes(source, workload, mesh),
        cuts=partial(system.cuts, options, mesh),
    )
    groups = workloads.suggested_groups(spec.traits)
    optimizer = replace(_optimizer(source, lane), groups=groups)
    clipped = "noclip" if optimizer.clip_norm is None else "clip"
    shape = "x".join(f"{axis}{size}" for axis, size in mesh.items())
    return Case(
        id=f"campaign-{seed}::{number:04d}::{system.name}::{backend}::{shape}::{workload}"
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


def _configured(source: random.Random, system: System) -> tuple[dict[str, int], dict[str, Any]]:
    """A mesh and options that go together."""
    while True:
        mesh = dict(source.choice(list(system.meshes)))
        options = {name: source.choice(choices) for name, choices in system.options.items()}
        if system.only(options, mesh):
            return mesh, options


def _lane(source: random.Random, workload: str, mixed: bool) -> tuple[Lane, str, Mapping[str, str]]:
    """A lane that ``workload`` has a form for, a dtype and a policy with which it is judged."""
    if workload == DYADIC:
        return "dyadic", source.choice(("float32", "float64")), {}
    lane: Lane = source.choice(LANES)
    if lane == "native":
        return lane, *source.choice(POLICIES if mixed else POLICIES[:2])
    return lane, "float32" if lane == "bitwise" else "float64", {}


def _optimizer(source: random.Random, lane: Lane) -> OptimizerSpec:
    """SGD or AdamW; equal bits need clipping off, exact sums need powers of two."""
    if lane == "dyadic":
        return OptimizerSpec(lr=0.125, momentum=0.0)
    name: Literal["sgd", "adamw"] = "sgd" if source.random() < 0.5 else "adamw"
    return OptimizerSpec(
        name=name,
        lr=0.1 if name == "sgd" else 1e-3,
        weight_decay=source.choice((0.0, 0.1)),
        warmup_steps=source.choice((0, 2)),
        clip_norm=None if lane == "bitwise" else source.choice((None, 0.05)),
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
) -> WorkloadSpec:
    """A random workload that can be made: some traits ask for more than one micro-batch.

    Each of ``equal_over`` ranks has as many micro-batches as the others; the model has a unit at
    least for each of ``stages``, and sizes ``params``.
    """
    params = params | ({"layers": stages + source.randint(0, 2)} if stages else {})
    while True:
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
