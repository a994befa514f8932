"""The systems that a campaign draws from: their meshes and options, and what goes together.

What a system declares (backends, dtypes, traits) is asked of it and not repeated here.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardproof import axes, workloads
from shardproof.axes import Cut, cutting
from shardproof.case import Lane, WorkloadSpec, split
from shardproof.contract import Options

LARGEST_WORLD = 5
#: Of meshes of several axes; with more ranks than processes they are threads.
LARGEST_GRID, MOST_PROCESSES = 12, 8
#: Lanes of the real workloads, the main bug finder twice as often; ``DYADIC`` has its own.
LANES: Sequence[Lane] = ("fp64", "fp64", "bitwise", "working_precision")
#: Systems that promise nobody the same bits.
NO_BITWISE: Sequence[Lane] = ("fp64", "fp64", "working_precision")
DYADIC = "dyadic_mlp"
#: Has batch norms, which want weights and buffers of one dtype.
NORMED = "digits_cnn"
#: Where layers are split, of these there must be some.
LAYERED = ("charnames_gpt", DYADIC)
#: What every option is drawn from.
Choices = Mapping[str, Sequence[Any]]
Meshes = Sequence[Mapping[str, int]]
#: Dtypes of mixed precision, by role.
Policy = Mapping[str, str]
#: Schedules of torch: a stage a rank, and those whose backwards come in two parts.
SINGLE, SPLIT = ("gpipe", "1f1b"), ("interleaved_zb", "zb_v", "dualpipe_v")


@dataclass(frozen=True)
class Setup:
    options: Options
    mesh: Mapping[str, int]
    workload: str

    def parts(self, what: Cut) -> int:
        """Number of ranks over which the mesh cuts ``what``."""
        return axes.parts(self.mesh, what)

    @property
    def coordinates(self) -> int:
        """Those that have data: all but ranks that serve."""
        return axes.size(self.mesh, axes.sharing(self.mesh)) - self.servers

    @property
    def servers(self) -> int:
        return int(self.options.get("servers", 0))

    def windows(self, spec: WorkloadSpec) -> list[list[int]]:
        """Samples of every micro-batch of every window of every data coordinate."""
        return [window for share in spec.cut(self.coordinates) for window in share]


Condition = Callable[[Setup], bool]


def always(setup: Setup) -> bool:
    return True


def never(setup: Setup) -> bool:
    return False


@dataclass(frozen=True)
class System:
    """An implementation, and what its meshes and options are drawn from.

    ``options`` are independent of each other but for ``only``: a setup that it refuses is drawn
    again.  ``mixed``: knows mixed precision.  ``sums_ranks_first``: adds every micro-batch up over
    ranks before it adds it to the others, so that with several micro-batches two ranks are not
    promised equal bits.  ``flattens``: makes parameters contiguous, whose products may then be
    rounded otherwise.  ``takes``: whether a setup goes with a policy of precision; where not,
    nothing is cast.  ``stages``: units that a model must have at least (0: as many as it has by
    default); ``cuts``: whether a setup goes with the micro-batches and traits.  ``sizes``: knobs of
    a workload that the mesh can share.  ``workloads`` and ``lanes`` (of the real ones): what it can
    be given.  ``clips``: its clipping is believed right.  ``changes_members``: so do its cases.
    ``chance``: how often it is drawn beside the others.
    """

    name: str
    meshes: Meshes
    options: Choices = field(default_factory=dict)
    mixed: bool = False
    sums_ranks_first: Condition = never
    flattens: Condition = never
    only: Condition = always
    takes: Callable[[Setup, Policy], bool] = lambda setup, policy: True
    stages: Callable[[Setup], int] = lambda setup: 0
    cuts: Callable[[Setup, WorkloadSpec], bool] = lambda setup, spec: True
    most_micro_batches: int = 3
    sizes: Callable[[random.Random, Setup], Options] = lambda source, setup: {}
    workloads: tuple[str, ...] = ("charnames_gpt", NORMED, DYADIC)
    lanes: Sequence[Lane] = LANES
    clips: bool = True
    changes_members: bool = False
    chance: float = 1.0


def communicates(setup: Setup) -> bool:
    """Without ``accumulate_without_communication`` every micro-batch is reduced by itself."""
    return not setup.options.get("accumulate_without_communication")


def reshards(setup: Setup) -> bool:
    """Whether an integer ``reshard_after_forward`` divides the ranks that parameters lie on."""
    k = setup.options.get("reshard_after_forward")
    return k is None or isinstance(k, bool) or setup.parts("state") % k == 0


def whole_nodes(setup: Setup) -> bool:
    """Whether nodes of two ranks, where an algorithm asks for them, divide the replicas."""
    inner = setup.options.get("data_options", {})
    chosen = {**setup.options, **inner}.get("all_reduce")
    return not isinstance(chosen, Mapping) or setup.parts("samples") % 2 == 0


def somebody_works(setup: Setup) -> bool:
    """Of parameter servers: somebody is left to work, what is in turn is never stale, and what is
    never stale has no state by worker.
    """
    in_turn, dies = setup.options["order"] == "in_turn", bool(setup.options["dies"])
    by_worker, stale = setup.options["momentum"] == "by_worker", setup.options["max_staleness"] > 0
    return setup.coordinates > dies and not (in_turn and stale) and (stale or not by_worker)


def of_fsdp(setup: Setup) -> bool:
    return reshards(setup) and whole_nodes(setup)


def as_fsdp1(setup: Setup, policy: Policy) -> bool:
    """What FSDP1 insists on: no batch norms, and micro-batches are added up in no narrower dtype
    than ranks.
    """
    if setup.workload == NORMED:
        return not policy
    return communicates(setup) or "reduce" not in policy or "parameters" not in policy


def own_stages(setup: Setup) -> int:
    chunks = 2 if setup.options["schedule"] in ("zb_v", "interleaved") else 1
    return setup.parts("layers") * chunks


def upstream_stages(setup: Setup) -> int:
    return setup.parts("layers") * (1 if setup.options["schedule"] in SINGLE else 2)


def in_equal_parts(setup: Setup, spec: WorkloadSpec) -> bool:
    """torch cuts a window's inputs into equal parts.  Where B and W come apart, no stage may end in
    an operation that makes a view, as odd modules inside of units do.
    """
    if any(len(set(window)) > 1 for window in setup.windows(spec)):
        return False
    inner = any(workloads.TRAITS[trait].place == "inner" for trait in spec.traits)
    if not inner or setup.options["schedule"] not in SPLIT:
        return True
    ends = list(itertools.accumulate(split(spec.params["layers"], upstream_stages(setup))))
    return spec.params["layers"] // 2 + 1 not in ends[:-1]


def in_one_window(setup: Setup, spec: WorkloadSpec) -> bool:
    """DeepSpeed's step has one; sizes may differ only where it sends them with every message."""
    windows = setup.windows(spec)
    return len(windows) == 1 and (setup.options["dynamic_shape"] or len(set(windows[0])) == 1)


def recomputes(setup: Setup) -> bool:
    """A backward in two parts cannot compute anything again."""
    is_split = setup.options["schedule"].startswith("zb_")
    return not (setup.options["recompute_every"] and is_split)


def goes_together(setup: Setup) -> bool:
    """As pipelines; nothing but Transformers and the like can be split into layers."""
    layered = setup.workload in LAYERED or setup.parts("widths") == 1
    return recomputes(setup) and layered and whole_nodes(setup)


def reduces_each(setup: Setup) -> bool:
    """Hybrids without stages whose data axes reduce every micro-batch."""
    inner = setup.options.get("data_options", {})
    each = not inner.get("accumulate_without_communication")
    return setup.parts("layers") == 1 and setup.options["data"] != "ddp" and each


def upstream_splits(setup: Setup) -> bool:
    """Torch's parallel loss is a cross-entropy; its biases are divided by the ranks, which is exact
    for powers of two; backwards that come in two parts want whole parameters.
    """
    options = setup.options
    if options.get("reshard_after_forward") and options["schedule"] in SPLIT:
        return False
    if setup.workload != DYADIC:
        return True
    return not options["loss_parallel"] and setup.parts("widths") in (1, 2, 4)


def clean_shapes(setup: Setup) -> bool:
    """To infer shapes torch feeds batch norms with memory that nobody has written."""
    return setup.workload != NORMED or setup.options["shapes"] == "given"


def shared_sizes(source: random.Random, setup: Setup) -> dict[str, int | float]:
    """Layers that the ranks of the tensor axis can share: whole heads, KV heads of one or several
    ranks, a vocabulary and a sequence of any size.

    Over three ranks gloo, and rings, add in an order that depends on the size of the buffer.  With
    a vocabulary that does not divide, tensor ranks have buffers of two sizes, and what they hold
    alike (norms, KV heads) differs in its last bit: a finding, no clean system.
    """
    if setup.workload == NORMED:
        return {}
    if setup.workload == DYADIC:
        return {"width": 60}
    ranks = setup.parts("widths")
    heads = ranks * source.choice((2, 4))
    kv = [n for n in range(1, heads + 1) if heads % n == 0 and (n % ranks == 0 or ranks % n == 0)]
    sizes: dict[str, int | float] = {
        "heads": heads,
        "kv_heads": source.choice(kv),
        "width": heads * (source.choice((4, 8)) if heads > 2 else 8),
        "vocab": source.choice((97, 128)),
        "seq": source.choice((11, 16)),
        "label_smoothing": source.choice((0.0, 0.1)),
    }
    if max(setup.parts("state"), setup.parts("samples")) > 2:
        sizes["vocab"] -= sizes["vocab"] % ranks
    return sizes


def upstream_sizes(source: random.Random, setup: Setup) -> dict[str, int | float]:
    """As torch wants it: KV heads and, where they are cut, positions that divide by the ranks."""
    if setup.workload == DYADIC:
        return {"width": 60, "seq": 12}
    ranks, sizes = setup.parts("widths"), shared_sizes(source, setup)
    if sizes["kv_heads"] % ranks:
        sizes["kv_heads"] = ranks
    if setup.options["sequence_parallel"]:
        sizes["seq"] = 3 * ranks if ranks > 3 else 12
    if setup.options["loss_parallel"]:
        sizes["label_smoothing"] = 0.0
    return sizes


def _line(what: Cut, most: int = LARGEST_WORLD) -> Meshes:
    return [{cutting(what): size} for size in range(1, most + 1)]


_HYBRID = tuple(
    {cutting("samples"): replicas, cutting("state"): shards}
    for replicas, shards in ((2, 2), (2, 3), (1, 3), (3, 1), (3, 2))
)
#: FSDP1 refuses hybrids without sharding.
_SHARDED_HYBRID = tuple(mesh for mesh in _HYBRID if axes.parts(mesh, "state") > 1)
_REPLICAS, _SHARDS, _PIPES = _line("samples"), _line("state"), _line("layers", 6)
#: What grids cut.
_CUTS: tuple[Cut, ...] = ("layers", "samples", "state", "widths")
#: All meshes of these axes that have few enough ranks.
_GRIDS: Meshes = [
    dict(zip(map(cutting, _CUTS), sizes, strict=True))
    for sizes in itertools.product((1, 2, 3), repeat=len(_CUTS))
    if math.prod(sizes) <= LARGEST_GRID
]


def _without_ones(meshes: Meshes, kept: Cut | None = None) -> Meshes:
    """``meshes`` of few ranks without the axes of one rank, but for the one that cuts ``kept``."""
    small = (mesh for mesh in meshes if 1 < math.prod(mesh.values()) <= MOST_PROCESSES)
    stays = cutting(kept) if kept else ""
    return [{axis: n for axis, n in mesh.items() if n > 1 or axis == stays} for mesh in small]


#: Without replicas.
_ONE_REPLICA = [mesh for mesh in _GRIDS if axes.parts(mesh, "samples") == 1]
_SHARDED_GRIDS = [*_ONE_REPLICA, *_without_ones(_ONE_REPLICA, kept="state")]
_PAIRS: Sequence[tuple[Cut, Cut]] = (("layers", "widths"), ("layers", "state"))
#: Of torch, whose copies want shards: of one rank, if need be.  Many ranks take it long.
_UPSTREAM_GRIDS: Meshes = [
    *(mesh for mesh in _GRIDS if math.prod(mesh.values()) <= MOST_PROCESSES),
    *(
        {axis: mesh[axis] for axis in map(cutting, kept)}
        for kept in _PAIRS
        for mesh in _GRIDS
        if all(axes.parts(mesh, what) == 1 for what in _CUTS if what not in kept)
    ),
]

#: Shared by the sharded systems.  A wrap policy must match something in every workload.
_WRAP: Choices = {"wrap": ({}, {"module_class": ["Block"]}, {"minimum_parameters": 500})}
_SILENT: Choices = {"accumulate_without_communication": (False, True)}
_RECOMPUTE: Choices = {"recompute_every": (0, 0, 1, 2)}
#: Sums of wholes, and of shards, over send and recv: about half of the time.
_NODES = {"algorithm": "hierarchical", "ranks_per_node": 2}
_SUMS: Choices = {
    "all_reduce": (
        *("backend",) * 5,
        *("ring", "recursive_doubling", "rabenseifner"),
        *("binomial_tree", "double_binary_tree", _NODES),
    )
}
_RINGS: Choices = {"reduce_scatter": ("backend", "ring"), "all_gather": ("backend", "ring")}
#: Lossy compression: every method, some in narrow dtypes, with and without feedback.
_LOSSY: Choices = {
    "compress": (
        {"method": "cast", "dtype": "float16"},
        {"method": "cast", "dtype": "bfloat16", "feedback": True},
        {"method": "topk", "density": 0.1},
        {"method": "topk", "density": 0.01, "dtype": "float16"},
        {"method": "randomk", "density": 0.25},
        {"method": "randomk", "density": 0.25, "dtype": "float16", "feedback": True},
        {"method": "powersgd", "rank": 2},
        {"method": "powersgd", "rank": 1, "feedback": False},
        *({"method": "sign"}, {"method": "onebit"}),
    )
}
#: Of ranks that train alone; dyadic sums would not stay exact between means.
_MEETS: Choices = {"every": (1, 2, 3)}
_LOSSLESS = ("charnames_gpt", NORMED)
#: In every order but ``in_turn`` the first worker is ahead of the others, as far as it may.
_SERVES: Choices = {
    "max_staleness": (0, 1, 2),
    "servers": (1, 2, 3),
    "order": ("in_turn", "slow", "burst", "all_orders", [0, 0, 0, 0, 0]),
    "momentum": ("shared", "shared", "by_worker"),
    "dies": (None, None, {"worker": 0, "turns": 3}, {"worker": 1, "turns": 4}),
}
_ELASTIC: Choices = {
    "batch": ("global", "local"),
    "bucket_bytes": (4096, 25 * 2**20),
    "compress": (
        *(None, None, {"method": "topk", "density": 0.1}, {"method": "powersgd", "rank": 2}),
        {"method": "cast", "dtype": "bfloat16", "feedback": True},
        {"method": "randomk", "density": 0.25, "feedback": True},
    ),
}
_STATE: Choices = {"offload": ("none", "none", "optimizer")}
_EVERYTHING: Choices = {"offload": ("none", "none", "optimizer", "parameters")}
_ZERO: Choices = {"bucket_bytes": (4096, 49152, 25 * 2**20), **_RECOMPUTE, **_STATE, **_RINGS}
_PREFETCH: Choices = {"prefetch_forward": (0, 1, 2), "prefetch_backward": (0, 1, 2)}
_PREFETCH_ONE: Choices = {"prefetch_forward": (0, 1), "prefetch_backward": (0, 1)}
_FSDP: Choices = {**_WRAP, **_SILENT, **_RECOMPUTE, **_PREFETCH}
_UPSTREAM_FSDP: Choices = {**_WRAP, **_SILENT, "recompute_every": (0, 0, 1)}
_SPLIT_LAYERS: Choices = {"sequence_parallel": (False, True), "loss_parallel": (None, False)}
_UPSTREAM_SPLIT: Choices = {"sequence_parallel": (False, True), "loss_parallel": (False, True)}
_STAGES: Choices = {
    "schedule": ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v"),
    "recompute_every": (0, 0, 0, 1),
}
_UPSTREAM_SCHEDULES: Choices = {"schedule": (*SINGLE, "interleaved", "looped_bfs", *SPLIT)}
_UPSTREAM_DDP: Choices = {
    "find_unused_parameters": (True,),
    "gradient_as_bucket_view": (False, True),
    "bucket_cap_mb": (None, 0.05),
    "recompute_every": (0, 0, 1),
}


def _fsdp(strategy: str, meshes: Meshes, options: Choices) -> System:
    return System(
        "reference/fsdp",
        meshes,
        {"sharding_strategy": (strategy,), **_FSDP, **options},
        mixed=True,
        sums_ranks_first=communicates if cutting("state") in meshes[0] else never,
        flattens=always,
        only=of_fsdp,
    )


def _compressed(name: str, meshes: Meshes, options: Choices) -> System:
    return System(
        name,
        meshes,
        {**_LOSSY, **options},
        flattens=always if name in ("reference/zero3", "reference/fsdp") else never,
        workloads=("charnames_gpt", NORMED),
        lanes=("fp64",),
        chance=0.5,
    )


def _hybrid(data: str, meshes: Meshes, inner: Sequence[Options], more: Choices) -> System:
    options: Choices = {"data": (data,), "data_options": inner, **_STAGES, **_SPLIT_LAYERS, **more}
    return System(
        "reference/hybrid",
        meshes,
        options,
        mixed=data != "ddp",
        sums_ranks_first=reduces_each,
        flattens=always if data in ("zero3", "fsdp") else never,
        only=goes_together,
        stages=own_stages,
        sizes=shared_sizes,
        most_micro_batches=6,
        chance=0.5,
    )


_RESHARD = "reshard_after_forward"
_SMALL_BUCKETS = {"bucket_bytes": 4096}
_IN_RINGS = {"reduce_scatter": "ring", "all_gather": "ring"}
_WRAPPED = {"wrap": {"module_class": ["Block"]}}
_REPLICATED = {"sharding_strategy": "HYBRID_SHARD"}
#: What a campaign draws from.  Systems with several entries, and those that take long, have smaller
#: chances, so that none takes up most of a campaign.
SYSTEMS: Sequence[System] = (
    System("plain", [axes.replicas(1)]),
    System(
        "reference/ddp",
        _REPLICAS,
        {"bucket_bytes": (4096, 25 * 2**20), **_RECOMPUTE, **_SUMS},
        only=whole_nodes,
    ),
    System("reference/naive_ddp", _REPLICAS, _SUMS, only=whole_nodes),
    System("pytorch/ddp", _REPLICAS, _UPSTREAM_DDP),
    System("reference/zero1", _SHARDS, _ZERO, mixed=True),
    System("reference/zero2", _SHARDS, _ZERO, mixed=True, sums_ranks_first=always),
    System(
        "reference/zero3",
        _SHARDS,
        {**_WRAP, **_RECOMPUTE, **_EVERYTHING, **_RINGS},
        mixed=True,
        sums_ranks_first=always,
        flattens=always,
    ),
    _compressed("reference/ddp", _REPLICAS, {"bucket_bytes": (4096, 25 * 2**20), **_RECOMPUTE}),
    _compressed("reference/zero1", _SHARDS, {"bucket_bytes": (4096, 49152), **_STATE}),
    _compressed("reference/zero2", _SHARDS, {"bucket_bytes": (4096, 49152), **_STATE}),
    _compressed("reference/zero3", _SHARDS, {**_WRAP, **_EVERYTHING}),
    _compressed("reference/fsdp", _SHARDS, {**_WRAP, **_SILENT, **_EVERYTHING}),
    System("reference/local_sgd", _REPLICAS, _MEETS, workloads=_LOSSLESS, lanes=("fp64",)),
    System(
        "reference/diloco",
        _REPLICAS,
        {**_MEETS, "outer_lr": (0.7, 1), "outer_momentum": (0.9, 0)},
        workloads=_LOSSLESS,
        lanes=("fp64",),
    ),
    System(
        "pytorch/post_local_sgd",
        _REPLICAS,
        {"every": (2, 3)},
        workloads=_LOSSLESS,
        lanes=("fp64",),
        chance=0.5,
    ),
    System(
        "pytorch/ddp_compressed",
        _REPLICAS,
        {"compress": ({"method": "powersgd_hook"}, {"method": "powersgd_hook", "rank": 2})},
        workloads=_LOSSLESS,
        lanes=("fp64",),
        chance=0.5,
    ),
    System(
        "reference/async_sgd",
        _REPLICAS,
        _SERVES,
        only=somebody_works,
        lanes=("fp64",),
        clips=False,
    ),
    System(
        "reference/elastic",
        _line("samples", 4)[1:],
        _ELASTIC,
        workloads=_LOSSLESS,
        lanes=("fp64",),
        changes_members=True,
    ),
    _fsdp("NO_SHARD", _REPLICAS, _SUMS),
    _fsdp("SHARD_GRAD_OP", _SHARDS, {**_EVERYTHING, **_RINGS, _RESHARD: (None, False)}),
    _fsdp("FULL_SHARD", _SHARDS, {**_EVERYTHING, **_RINGS, _RESHARD: (None, True, 2)}),
    _fsdp(
        "HYBRID_SHARD",
        _HYBRID,
        {**_EVERYTHING, **_RINGS, **_SUMS, _RESHARD: (None, False, True, 2)},
    ),
    System(
        "pytorch/fsdp2",
        (*_SHARDS, *_HYBRID),
        {
            **_UPSTREAM_FSDP,
            "offload": ("none", "parameters"),
            "prefetch_forward": (0, 1, 2),
            "prefetch_backward": (1, 2),
            _RESHARD: (None, True, False, 2),
            "reduce_scatter_unused_params": (False, True),
        },
        mixed=True,
        sums_ranks_first=communicates,
        only=reshards,
        takes=lambda setup, policy: "buffers" not in policy,  # which it does not cast
    ),
    *(
        System(
            "pytorch/fsdp1",
            meshes,
            {"sharding_strategy": (strategy,), **_UPSTREAM_FSDP, **_PREFETCH_ONE},
            mixed=True,
            sums_ranks_first=communicates,
            takes=as_fsdp1,
        )
        for strategy, meshes in (
            *(("NO_SHARD", _REPLICAS), ("SHARD_GRAD_OP", _SHARDS), ("FULL_SHARD", _SHARDS)),
            ("HYBRID_SHARD", _SHARDED_HYBRID),
        )
    ),
    System(
        "pytorch/zero_redundancy_optimizer",
        _SHARDS,
        {**_UPSTREAM_DDP, "parameters_as_bucket_view": (False, True)},
        flattens=lambda setup: bool(setup.options["parameters_as_bucket_view"]),
    ),
    System(
        "reference/pipeline",
        _PIPES,
        _STAGES,
        only=recomputes,
        stages=own_stages,
        most_micro_batches=8,
        chance=2.0,
    ),
    System(
        "reference/tensor",
        _line("widths"),
        {**_SPLIT_LAYERS, "sum_each_backward": (False, False, True), "recompute_every": (0, 0, 1)},
        sizes=shared_sizes,
        workloads=LAYERED,
        chance=2.0,
    ),
    _hybrid(
        "ddp",
        [*_GRIDS, *_without_ones(_GRIDS)],
        [
            *({}, _SMALL_BUCKETS, {"broadcast_buffers": False}),
            *({"all_reduce": "recursive_doubling"}, {"all_reduce": _NODES}),
        ],
        {},
    ),
    _hybrid("zero1", _SHARDED_GRIDS, [{}, _SMALL_BUCKETS, _IN_RINGS], _STATE),
    _hybrid("zero2", _SHARDED_GRIDS, [{}, _SMALL_BUCKETS, _IN_RINGS], _STATE),
    _hybrid("zero3", _SHARDED_GRIDS, [{}, _WRAPPED, _IN_RINGS], _EVERYTHING),
    _hybrid(
        "fsdp",
        _SHARDED_GRIDS,
        [
            *({"sharding_strategy": name} for name in ("SHARD_GRAD_OP", "FULL_SHARD")),
            _WRAPPED,
            {"accumulate_without_communication": True},
            {"prefetch_forward": 2, "prefetch_backward": 0},
        ],
        _EVERYTHING,
    ),
    _hybrid("fsdp", _GRIDS, [_REPLICATED, {**_REPLICATED, _RESHARD: False}], _EVERYTHING),
    System(
        "pytorch/pipelining",
        _PIPES,
        {**_UPSTREAM_SCHEDULES, "shapes": ("inferred", "given", "given")},
        only=clean_shapes,
        stages=upstream_stages,
        cuts=in_equal_parts,
        most_micro_batches=8,
    ),
    System(
        "pytorch/tensor_parallel",
        _line("widths"),
        _UPSTREAM_SPLIT,
        only=upstream_splits,
        sizes=upstream_sizes,
        workloads=LAYERED,
        lanes=NO_BITWISE,
        chance=0.25,
    ),
    System(
        "pytorch/hybrid",
        _UPSTREAM_GRIDS,
        {**_UPSTREAM_SCHEDULES, **_UPSTREAM_SPLIT, _RESHARD: (False, False, True)},
        only=upstream_splits,
        stages=upstream_stages,
        cuts=in_equal_parts,
        most_micro_batches=8,
        sizes=upstream_sizes,
        workloads=LAYERED,
        lanes=NO_BITWISE,
        chance=0.25,
    ),
    System(
        "deepspeed/pipeline",
        _line("layers"),
        {"dynamic_shape": (False, True)},
        stages=lambda setup: setup.parts("layers"),
        cuts=in_one_window,
        most_micro_batches=8,
        lanes=("working_precision",),
        clips=False,
        chance=0.5,
    ),
)
