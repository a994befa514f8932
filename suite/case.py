"""A case: one cell of a scenario's matrix, as plain data.

Cases travel between processes and into ``cases.jsonl`` as JSON, so everything here is made of
strings, numbers, tuples and dictionaries.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from shardproof import axes
from shardproof.contract import OptimizerSpec, Options
from shardproof.files import Form, Stored, standard

Lane = Literal["bitwise", "dyadic", "fp64", "working_precision"]
#: What a stored case may claim to have of ranks, and of steps, samples or micro-batches: a reader
#: takes memory for each.  Scenarios allow less.
MOST_RANKS, MOST_OF_A_CASE = 1 << 12, 1 << 20


def _bounded_count(value: int) -> None:
    if not 0 <= value <= MOST_OF_A_CASE:
        raise ValueError(f"{value:,} is outside the range 0 to {MOST_OF_A_CASE:,}")


def _bounded_mesh(sizes: Mapping[str, int]) -> None:
    if min(sizes.values(), default=1) < 1 or math.prod(sizes.values()) > MOST_RANKS:
        raise ValueError(f"a mesh must have 1 to {MOST_RANKS:,} ranks")


#: As stored, no larger than a case can be.
Count = Annotated[int, Form(check=_bounded_count)]
MeshSizes = Annotated[Mapping[str, int], Form(check=_bounded_mesh)]


@dataclass(frozen=True)
class WorkloadSpec:
    """Names a workload and its knobs; ``traits`` are those of ``shardproof list traits``."""

    name: str
    traits: tuple[str, ...] = ()
    seed: int = 0
    global_batch: Count = 24
    micro_batches: Count = 2
    windows: Count = 1
    params: Options = field(default_factory=dict)

    def micro_batch_counts(self, coordinates: int) -> list[int]:
        """Micro-batches of each of ``coordinates`` data coordinates in a step; none is empty."""
        return [sum(map(len, windows)) for windows in self.cut(coordinates)]

    def cut(self, coordinates: int) -> list[list[list[int]]]:
        """Samples by data coordinate, window and micro-batch of a step; none is empty."""
        shares = []
        for coordinate, size in enumerate(split(self.global_batch, coordinates)):
            counts = self.window_sizes(coordinate)
            pieces = iter(split(size, sum(counts)))
            windows = [[n for n in itertools.islice(pieces, count) if n] for count in counts]
            shares.append([window for window in windows if window])
        return shares

    def window_sizes(self, coordinate: int) -> list[int]:
        """Number of micro-batches of each window of one coordinate, were there samples for all."""
        sizes = [self.micro_batches] * self.windows
        if "incomplete_window" in self.traits:
            last = self.micro_batches // 2
            sizes = [*sizes[:-1], last] if len(sizes) > 1 else [*sizes, last]
        if "unequal_micro_batches" in self.traits and coordinate % 2:
            sizes[0] += 1
        return sizes


def split(total: int, parts: int) -> list[int]:
    """Sizes of ``parts`` contiguous parts of ``total``, the larger ones first."""
    small, larger = divmod(total, parts)
    return [small + 1] * larger + [small] * (parts - larger)


RankFault = Literal["kill", "stop", "raise", "exit", "delay", "corrupt", "drop", "swap", "shape"]
NodeFault = Literal["kill_node", "pause_node", "cut_node", "slow_node", "fill_memory", "fill_disk"]
ClusterFault = Literal["stop_head", "stop_client"]
FaultKind = RankFault | NodeFault
#: What happens to the node of the rank, and to the whole of a cluster.
OF_NODES: tuple[str, ...] = get_args(NodeFault)
OF_CLUSTERS: tuple[str, ...] = get_args(ClusterFault)
FaultPhase = Literal["setup", "forward", "backward", "update", "save", "load"]


@dataclass(frozen=True)
class Fault(Stored):
    """A fault that the suite makes in ``rank`` on purpose, and what must come of it.

    It happens where the rank comes to ``phase`` of ``step`` (``setup``, ``load``: before all steps;
    ``save``: after that step), ``call`` calls later; ``seconds`` are those of a ``delay``.
    ``verdicts``: any of them will do; ``blames``: the rank that the sentence must name as the
    reason; ``says``: texts in it.
    """

    kind: FaultKind | ClusterFault
    rank: int
    step: int
    phase: FaultPhase
    verdicts: tuple[str, ...]
    call: int = 0
    seconds: float = 1.0
    blames: int | None = None
    says: tuple[str, ...] = ()

    @property
    def strikes_nodes(self) -> bool:
        """Whether a node is struck, so that no other case may run at the same time."""
        return self.kind in (*OF_NODES, *OF_CLUSTERS)


@dataclass(frozen=True)
class Death(Stored):
    """Member ``rank`` is gone in ``step``, right before its call number ``call`` of that step.

    The others are told by the calls that it has not made, and take the step again without it.
    """

    rank: int
    step: int
    call: int = 0


@dataclass(frozen=True)
class CheckpointPlan(Stored):
    """When a case saves, and which ranks resume from there.

    ``saves`` checkpoints, each after a step, the last one when ``save_at`` steps are done.
    ``into``: the ``implementation``, ``options``, ``mesh`` and ``precision`` of who loads; what is
    missing is as in the case.  ``again_at``: who loads saves, too, when so many steps are done
    (``save_at``: right after the load, elsewhere), and fresh ranks of its kind load that (0: none).
    ``trained``: steps that who loads has made before, from other values (0: it is fresh).
    """

    save_at: Count
    saves: Count = 1
    into: Mapping[str, Any] = field(default_factory=dict)
    again_at: Count = 0
    trained: Count = 0

    @property
    def saved_at(self) -> range:
        """The steps done at each save."""
        return range(self.save_at - self.saves + 1, self.save_at + 1)

    @staticmethod
    def extra(step: int) -> dict[str, Any]:
        """The values that the caller saves after ``step`` steps: progress and other values."""
        odd: list[Any] = ["", "\u00e9\n\"'", None, True, 0.1, 5e-324, 2**53 + 1, {}]
        return {"data": {"step": step, "epoch": 0}, "odd": odd}


@dataclass(frozen=True)
class Case(Stored):
    """One (implementation, backend, mesh, workload, optimizer, clip on/off, lane)."""

    id: str
    scenario: str
    implementation: str
    backend: str
    mesh: MeshSizes
    workload: WorkloadSpec
    optimizer: OptimizerSpec
    lane: Lane
    checks: tuple[str, ...]
    label: str = ""
    options: Options = field(default_factory=dict)
    #: What the model is built in.
    dtype: str = "float64"
    #: Mixed precision that the system was asked for (``parameters``, ``reduce``, ``output``,
    #: ``buffers``: names of dtypes; what is not named is as built), also among its ``options``.
    precision: Mapping[str, str] = field(default_factory=dict)
    steps: Count = 3
    tier: Literal["quick", "full"] = "quick"
    expect: Mapping[str, Any] = field(default_factory=dict)
    #: Step (as text) -> ranks that take part from that step on; empty: all ranks, always.
    membership: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    #: Members that die inside a step: none from there on, unless ``membership`` names them again.
    deaths: tuple[Death, ...] = ()
    #: CPU seconds that a rank may compute, and seconds without any event after which ranks that
    #: sleep outside of calls are a ``hang``.
    deadline: float = 60.0
    #: Resident memory that one rank process may take, torch's own 0.3 GiB included.
    memory_gib: float = 8.0
    ledgers: bool = True
    #: How closely the system is held to its strategy; empty: as it declares.
    depth: Literal["", "family", "layout", "own"] = ""
    #: Set in the second run of a relation only: which share of the batch (as an index) each
    #: data coordinate gets (empty: its own), what every loss weight is multiplied by, the step
    #: before which a fresh instance takes over with the old one's pieces, and whether an evaluation
    #: of a frozen model comes before each step.
    shares: tuple[int, ...] = ()
    loss_scale: float = 1.0
    reload_at: int | None = None
    thaws: bool = False
    checkpoint: CheckpointPlan | None = None
    #: Set by the leader: the folder to save into, and the one to load from before any step.
    saves_into: str = ""
    loads_from: str = ""
    #: What the suite does to a rank, and what must come of it.
    fault: Fault | None = None
    xfail: str | None = None
    #: Texts, all of which the failure that ``xfail`` expects must contain; empty: any will do.
    xfail_says: tuple[str, ...] = ()
    skip: str | None = None
    #: The cell is another system's, without its options but for the precision policy: what this
    #: system cannot take of it was not asked of it by name.
    is_borrowed: bool = False
    #: The cell is another backend's: what this one cannot do of it was not asked of it by name.
    is_moved: bool = False
    #: A trait that the user did not name: a class that raises an exception under it, outside the
    #: calls of a group, is taken to lack it.
    unasked: str = ""
    #: ``file:line`` of the implementation's entry in the scenario; ``file:``: its cell has another
    #: there; empty: no file gave it.
    source: str = field(default="", compare=False)
    #: Binds the case to the invocation that runs it (:meth:`seal_of`); ranks and leader write it
    #: into the record.  Empty: it runs outside of a run folder.
    seal: str = field(default="", compare=False)

    @property
    def system(self) -> str:
        """The implementation with the label of its options."""
        return self.implementation + (f"+{self.label}" if self.label else "")

    @property
    def world(self) -> int:
        """Number of ranks: the product of the mesh's axes."""
        return math.prod(self.mesh.values())

    @property
    def changes_members(self) -> bool:
        """Whether ranks join, leave or die."""
        return bool(self.membership or self.deaths)

    @property
    def compute_dtype(self) -> str:
        """The dtype that forward and backward compute with."""
        return self.precision.get("parameters", self.dtype)

    @property
    def lowest_dtype(self) -> str:
        """The coarsest of the dtypes that numbers pass through on their way to the optimizer."""
        used = {self.compute_dtype, self.dtype}
        used |= {self.precision[name] for name in ("reduce", "output") if name in self.precision}
        return max(used, key=("float64", "float32", "float16", "bfloat16").index)

    @property
    def data_coordinates(self) -> int:
        """Number of shares that the global batch is cut into."""
        return axes.size(self.mesh, axes.sharing(self.mesh))

    def seal_of(self, nonce: str) -> str:
        """Digest of all that is asked, in the invocation of this ``nonce``."""
        asked = {name: value for name, value in self.to_dict().items() if name != "seal"}
        text = nonce + json.dumps(standard(asked), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def oracle_key(self, buffers: str, batch: str = "global") -> str:
        """Digest of all that the oracle depends on; cases that share it share an oracle.

        ``buffers`` and ``batch`` are the rules that the system declares.
        """
        parts = {
            "workload": dataclasses.asdict(self.workload),
            "optimizer": dataclasses.asdict(self.optimizer),
            "coordinates": self.data_coordinates,
            "dtype": self.dtype,
            "precision": dict(self.precision),
            "lane": self.lane,
            "steps": self.steps,
            "buffers": buffers,
        }
        if self.membership or self.deaths:
            changes = {"world": self.world, "membership": dict(self.membership), "batch": batch}
            parts |= changes | {"deaths": [dataclasses.asdict(death) for death in self.deaths]}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def data_shares(
    mesh: Mapping[str, int], ranks: Sequence[int], workers: Collection[int]
) -> dict[int, int]:
    """Which share of the global batch each worker gets: rank -> index, over ``max + 1`` shares.

    ``ranks`` fill the grid ``mesh`` in order, the last axis innermost.  Ranks that differ only on
    axes that do not share out the batch have the same one; shares are numbered in the order of the
    axes that do, over those that have a worker.
    """
    sharing = axes.sharing(mesh)
    spots = itertools.product(*(range(n) for n in mesh.values()))
    keys = {
        rank: tuple(c for axis, c in zip(mesh, spot, strict=True) if axis in sharing)
        for rank, spot in zip(ranks, spots, strict=True)
        if rank in workers
    }
    order = sorted(set(keys.values()))
    return {rank: order.index(key) for rank, key in keys.items()}
