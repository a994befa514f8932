"""The systems that a campaign draws from (``systems.yaml``), and what of each goes together.

What a system declares (backends, dtypes, traits) is asked of it and not repeated here.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shardproof import axes, workloads
from shardproof.axes import Cut, cutting
from shardproof.case import Lane, WorkloadSpec, split
from shardproof.contract import Options
from shardproof.strategies import REPLICATION

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
    """Options, mesh and workload that a campaign draws together."""

    options: Options
    mesh: Mapping[str, int]
    workload: str

    def parts(self, what: Cut) -> int:
        """Number of ranks over which the mesh cuts ``what``."""
        return axes.parts(self.mesh, what)

    @property
    def coordinates(self) -> int:
        """Those that have data: all but ranks that serve."""
        serving = int(self.options.get("servers", 0))
        return axes.size(self.mesh, axes.sharing(self.mesh)) - serving

    def windows(self, spec: WorkloadSpec) -> list[list[int]]:
        """Samples of every micro-batch of every window of every data coordinate."""
        return [window for share in spec.cut(self.coordinates) for window in share]


Condition = Callable[[Setup], bool]


def always(setup: Setup) -> bool:
    """True for every setup."""
    return True


def never(setup: Setup) -> bool:
    """False for every setup."""
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
    """Whether the options of FSDP fit the mesh."""
    return reshards(setup) and whole_nodes(setup)


def as_fsdp1(setup: Setup, policy: Policy) -> bool:
    """The limits of FSDP1: no batch norms, and micro-batches are added up in no narrower dtype than
    ranks.
    """
    if setup.workload == NORMED:
        return not policy
    return communicates(setup) or "reduce" not in policy or "parameters" not in policy


def whole_buffers(setup: Setup, policy: Policy) -> bool:
    """FSDP2 casts no buffers."""
    return "buffers" not in policy


def views_buckets(setup: Setup) -> bool:
    """Parameters become views of the buckets in which they are sent."""
    return bool(setup.options["parameters_as_bucket_view"])


def own_stages(setup: Setup) -> int:
    """Stages of the suite's own pipeline schedules."""
    chunks = 2 if setup.options["schedule"] in ("zb_v", "interleaved") else 1
    return setup.parts("layers") * chunks


def upstream_stages(setup: Setup) -> int:
    """Stages of torch's pipeline schedules."""
    return setup.parts("layers") * (1 if setup.options["schedule"] in SINGLE else 2)


def a_stage_a_rank(setup: Setup) -> int:
    """One stage on each rank."""
    return setup.parts("layers")


def in_equal_parts(setup: Setup, spec: WorkloadSpec) -> bool:
    """torch cuts a window's inputs into equal parts.  Where B and W come apart, no stage may end in
    an operation that makes a view, as odd modules inside of units do.
    """
    if any(len(set(window)) > 1 for window in setup.windows(spec)):
        return False
    inner = any(workloads.TRAITS[trait].place == "inner" for trait in spec.traits)
    if not inner or setup.options["schedule"] not in SPLIT:
        return True
    *ends, _ = itertools.accumulate(split(spec.params["layers"], upstream_stages(setup)))
    return spec.params["layers"] // 2 + 1 not in ends


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
    return setup.parts("layers") == 1 and setup.options["data"] != REPLICATION and each


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
    """A reason to avoid batch norms: to infer shapes torch feeds them unwritten memory."""
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


def cut_sizes(source: random.Random, setup: Setup) -> dict[str, int | float]:
    """Heads that context ranks can share under ``all_to_all``, of those of each tensor rank, and
    lengths of which some have a position more than others, or none.
    """
    sizes = shared_sizes(source, setup)
    if setup.workload == DYADIC:
        return {**sizes, "seq": source.choice((4, 7))}
    ranks, splits = setup.parts("positions"), setup.parts("widths")
    heads = ranks * splits * source.choice((1, 2))
    kv = [n for n in range(1, heads + 1) if heads % n == 0 and (n % splits == 0 or splits % n == 0)]
    # Of a tensor rank's KV heads each context rank has some, or several have the same one.
    kv = [n for n in kv if max(1, n // splits) % ranks == 0 or ranks % max(1, n // splits) == 0]
    return {
        **sizes,
        "heads": heads,
        "kv_heads": source.choice(kv),
        "width": heads * source.choice((4, 8) if heads <= 4 else (2, 4)),
        # Context ranks sum gradients as well: see shared_sizes.
        "vocab": sizes["vocab"] - sizes["vocab"] % splits,
        "seq": source.choice((4, 11, 16)),
    }


def routed_sizes(source: random.Random, setup: Setup) -> dict[str, Any]:
    """A mixture whose experts the ranks can share; a bias takes the place of a balancing loss."""
    ranks, top_k = setup.parts("experts"), source.choice((1, 2, 2))
    is_biased = bool(setup.options["balance_rate"])
    scopes = ("none", "micro-batch", "rank", "global")
    return {
        "layers": max(source.choice((1, 2)), setup.options["recompute_every"]),
        "width": 16,
        "seq": source.choice((3, 8)),
        "experts": ranks * source.choice((2, 3)),
        "top_k": top_k,
        "router_weights": "before" if top_k == 1 else source.choice(("after", "before")),
        "shared_experts": source.choice((0, 0, 1)),
        "capacity": source.choice((0.0, 0.0, 0.5, 1.0, 1.5)),
        "capacity_over": source.choice(("micro-batch", "sample")),
        "claims": source.choice(("position", "choice")),
        "balancing_bias": is_biased,
        "balance": "none" if is_biased else source.choice(scopes),
        "z_loss": source.choice((False, True)),
    }


def _line(what: Cut, most: int = LARGEST_WORLD) -> Meshes:
    return [{cutting(what): size} for size in range(1, most + 1)]


_HYBRID = tuple(
    {cutting("samples"): replicas, cutting("state"): shards}
    for replicas, shards in ((2, 2), (2, 3), (1, 3), (3, 1), (3, 2))
)
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


def _with_replicas(what: Cut) -> Meshes:
    """Ranks that cut ``what``, alone and in replicas."""
    sizes = ((2, 1), (2, 2), (3, 2), (1, 4), (2, 3), (2, 4))
    pairs = [{cutting("samples"): copies, cutting(what): ranks} for copies, ranks in sizes]
    return [*_line(what), *pairs, {cutting(what): 7}, {cutting(what): 8}]


def _around(data: Cut) -> Meshes:
    """Cut positions, among stages, data ranks that cut ``data`` and split layers."""
    cuts: tuple[Cut, ...] = ("layers", data, "positions", "widths")
    sizes = itertools.product((1, 2), (1, 2, 3), (2, 3), (1, 2))
    meshes = [dict(zip(map(cutting, cuts), each, strict=True)) for each in sizes]
    return _without_ones(meshes, kept=data)


#: Names of meshes in :data:`FILE`.
MESHES: Mapping[str, Meshes] = {
    "one": [axes.replicas(1)],
    "replicas": _line("samples"),
    "members": _line("samples", 4)[1:],
    "shards": _line("state"),
    "shards_of_replicas": _HYBRID,
    # FSDP1 refuses hybrids without sharding.
    "several_shards_of_replicas": [m for m in _HYBRID if axes.parts(m, "state") > 1],
    "pipes": _line("layers", 6),
    "short_pipes": _line("layers"),
    "splits": _line("widths"),
    "grids": _GRIDS,
    "small_grids": _without_ones(_GRIDS),
    "grids_of_one_replica": _ONE_REPLICA,
    "small_grids_of_one_replica": _without_ones(_ONE_REPLICA, kept="state"),
    "upstream_grids": _UPSTREAM_GRIDS,
    "positions": _with_replicas("positions"),
    "experts": _with_replicas("experts"),
    "positions_of_replicas": _around("samples"),
    "positions_of_shards": _around("state"),
}
FILE = Path(__file__).with_name("systems.yaml")


def _system(entry: Mapping[str, Any], choices: Mapping[str, Choices]) -> System:
    # A text, but for the name, is that of a function above.
    fields: dict[str, Any] = {
        field: globals()[value] if field != "name" and isinstance(value, str) else value
        for field, value in entry.items()
    }
    options: dict[str, Sequence[Any]] = {}
    for part in entry.get("options", ()):
        options |= choices[part] if isinstance(part, str) else part
    meshes = [mesh for name in entry["meshes"] for mesh in MESHES[name]]
    return System(**fields | {"meshes": meshes, "options": options})


_GIVEN = yaml.safe_load(FILE.read_text(encoding="utf-8"))
#: The systems of :data:`FILE`, in its order.
SYSTEMS: Sequence[System] = [_system(entry, _GIVEN["choices"]) for entry in _GIVEN["systems"]]
