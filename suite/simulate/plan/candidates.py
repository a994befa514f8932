"""Every plan that ``plan.yaml`` combines on so many GPUs, and why the impossible ones are none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from shardproof import axes, registry, strategies
from shardproof.contract import Implementation, Options, Refused
from shardproof.costs import FITS, shapes
from shardproof.costs.model_facts import ModelFacts
from shardproof.costs.shapes import BatchSize, Shape
from shardproof.costs.stages import CHUNKS, schedule_name
from shardproof.registry.declaration import Declaration

_FILE = Path(__file__).with_name("plan.yaml")
_NODE = "node"


@dataclass(frozen=True)
class Job:
    """The model to train, and the cluster.

    ``tokens`` and ``positions``: of a global batch, and of a sample; ``node``: GPUs of a node.
    """

    shape: Shape
    accounting: str
    gpus: int
    node: int
    tokens: int
    positions: int

    @property
    def samples(self) -> int:
        """Samples of a global batch."""
        return self.tokens // self.positions


@dataclass(frozen=True)
class Candidate:
    """A system on a mesh; ``samples`` and ``micro_batches``: of a micro-batch, of a rank."""

    implementation: str
    mesh: Mapping[str, int]
    options: Options
    samples: int
    micro_batches: int

    def parts(self, what: axes.Cut) -> int:
        """Ranks over which the mesh cuts ``what``."""
        return axes.parts(self.mesh, what)

    @property
    def experts(self) -> int:
        """Data ranks that divide the experts of a mixture."""
        return int(self.options.get("experts", {}).get("ranks", 1))

    @property
    def recompute(self) -> int:
        """Layers of a group that is computed again."""
        return int(self.options.get("recompute_every", 0))

    @property
    def schedule(self) -> str:
        """The schedule of its stages; empty: it has none."""
        return (schedule_name(self.options) or "") if self.parts("layers") > 1 else ""

    @property
    def chunks(self) -> int:
        """Stages of a rank."""
        return CHUNKS.get(self.schedule, 1)

    @property
    def group(self) -> tuple[object, ...]:
        """The system and the mesh: plans that share them are one line of the table."""
        return self.implementation, self.strategy, *self.mesh.items()

    @property
    def strategy(self) -> str:
        """The strategy of the data axes."""
        own = strategy_of(self.implementation)
        return str(self.options.get("data", own))

    def shown_mesh(self) -> str:
        """The axes with more than one rank."""
        return " ".join(f"{name} {size}" for name, size in self.mesh.items() if size > 1) or "1 GPU"

    def shown(self) -> str:
        """The plan on a line."""
        return (
            f"{self.implementation} on {self.shown_mesh()}{', ' + self.how() if self.how() else ''}"
        )

    def how(self) -> str:
        """Its options in words, those of the mesh left out."""
        words = [str(v) for k, v in self.options.items() if k in ("data", "sharding_strategy")]
        words += [self.schedule] * bool(self.schedule)
        words += [f"experts {self.experts}"] * (self.experts > 1)
        words += ["recompute"] * bool(self.recompute)
        words += [f"offload {to}" for to in [self.options.get("offload")] if to]
        return " ".join([*words, f"batch {self.samples} x {self.micro_batches}"])


@dataclass
class Rejected:
    """Candidates that cannot be, by reason; ``examples`` are all of them, as texts."""

    examples: dict[str, list[str]] = field(default_factory=dict)
    #: For the reason, what else belongs to its first example.
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, candidate: Candidate, detail: str = "") -> None:
        """Note ``candidate``; ``detail``: what only it has, such as a number of bytes."""
        shown = candidate.shown() + (f": {detail}" if detail else "")
        self.examples.setdefault(reason, []).append(shown)

    def __len__(self) -> int:
        return sum(map(len, self.examples.values()))


@cache
def combined() -> Mapping[str, Any]:
    """The file ``plan.yaml``."""
    found: Mapping[str, Any] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return found


@cache
def strategy_of(implementation: str) -> str:
    """The strategy that ``implementation`` claims."""
    return system_of(implementation).strategy


@cache
def system_of(implementation: str) -> type[Implementation]:
    """The class of ``implementation``."""
    return registry.load(implementation)


def candidates(job: Job, rejected: Rejected) -> Iterator[Candidate]:
    """Every candidate for ``job`` that can be, and the others into ``rejected``."""
    about, fits = shapes.accountings()[job.accounting], _Fits(job)
    precision = {name: about[name] for name in ("parameters", "reduce") if name in about}
    for system in combined()["systems"]:
        name = system["implementation"]
        for mesh in meshes(job, system["axes"]):
            for more in _experts(job, system, mesh):
                for options in _options(system, mesh, {**precision}, more):
                    one = Candidate(name, mesh, options, 1, 1)
                    yield from _of_batches(job, one, fits, rejected)


def _experts(
    job: Job, system: Mapping[str, Any], mesh: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """Options that divide experts over data ranks, if ``system`` does that; else no options."""
    if "experts" not in system:
        yield {}
        return
    if job.shape.mixture is None:
        return
    most = math.gcd(job.shape.mixture.experts, axes.size(mesh, axes.sharing(mesh)))
    least = max(2, math.gcd(most, job.node))
    for ranks in (n for n in _divisors(most, most) if n % least == 0):
        for data in system["experts"]:
            # A router needs all positions of a sample.
            yield {"experts": {"ranks": ranks, "data": data}, **combined()["with_experts"]}


def _of_batches(job: Job, plan: Candidate, fits: _Fits, rejected: Rejected) -> Iterator[Candidate]:
    """``plan`` with each size of micro-batch, if it can be."""
    reason = fits.why_not(plan)
    share, rest = divmod(job.samples, axes.size(plan.mesh, axes.sharing(plan.mesh)))
    if not reason and (rest or not share):
        reason = "the global batch does not divide over the data ranks"
    if reason:
        rejected.add(reason, plan)
        return
    for samples in combined()["batch"]:
        # A rank's share holds whole micro-batches only.
        if share % samples == 0:
            found = replace(plan, samples=samples, micro_batches=share // samples)
            if reason := fits.schedule(found):
                rejected.add(reason, found)
            else:
                yield found


def meshes(job: Job, along: Sequence[str]) -> Iterator[dict[str, int]]:
    """All meshes of so many ``along`` axes: what other axes leave lies on the last data axis."""
    limits = {a: job.node if n == _NODE else n for a, n in combined()["most"].items()}
    limits |= {a: 1 for a, n in combined()["long"].items() if job.positions < n}
    data = list(axes.sharing(along))
    others = [axis for axis in along if axis not in data]
    layers = axes.cutting("layers")
    for sizes in itertools.product(
        *(_divisors(job.gpus, limits.get(axis, job.gpus)) for axis in others)
    ):
        mesh = dict(zip(others, sizes, strict=True))
        left, rest = divmod(job.gpus, math.prod(sizes))
        if rest or mesh.get(layers, 1) > job.shape.layers:
            continue
        if others and math.prod(sizes) == 1:
            continue  # without them it is what the strategy of the data axes does alone
        # Copies of shards: the shards of a node, or of several.
        inner = [n for n in _divisors(left, left) if 1 < n < left] if len(data) > 1 else [left]
        for size in inner:
            whole = {**mesh, data[-1]: size, **({data[0]: left // size} if len(data) > 1 else {})}
            yield {name: whole[name] for name in axes.names() if name in whole}


@cache
def _divisors(number: int, most: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, min(number, most) + 1) if number % n == 0)


def _options(
    system: Mapping[str, Any],
    mesh: Mapping[str, int],
    precision: Mapping[str, str],
    more: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """The options of ``system`` on ``mesh``: each combination of what the file lists, and ``more``.

    An option of the file that ``more`` names as ``None`` is left out.
    """
    file, choices = combined(), dict(system.get("options", {}))
    for axis, needed in file["along"].items():
        if mesh.get(axis, 1) > 1:
            choices |= needed
    if axes.size(mesh, axes.sharing(mesh)) == 1 and "data" in choices:
        # With one data rank all strategies of the data axes are the same.
        choices["data"] = (
            [choices["data"]][:1] if isinstance(choices["data"], str) else choices["data"][:1]
        )
    names = [*choices, "recompute_every", "offload"]
    lists = [v if isinstance(v, list) else [v] for v in choices.values()]
    for values in itertools.product(*lists, file["recompute"], file["offload"]):
        options = dict(zip(names, values, strict=True))
        if not options["recompute_every"]:
            del options["recompute_every"]
        if options["offload"] == file["offload"][0]:
            del options["offload"]
        options |= {**more, **({"precision": dict(precision)} if precision else {})}
        yield {key: value for key, value in options.items() if value is not None}


class _Fits:
    """Whether ranks can share the model, each question asked once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._refusals: dict[str, str] = {}
        self._cuts: dict[tuple[str, int], str] = {}

    def why_not(self, found: Candidate) -> str:
        """Why ``found`` can be no plan; empty: it can."""
        return self._refused(found) or self._undivided(found)

    def _refused(self, found: Candidate) -> str:
        """The refusal of the implementation for these options, whatever the mesh."""
        key = f"{found.implementation}{found.options}"
        if key not in self._refusals:
            try:
                declared = Declaration.of(system_of(found.implementation), found.options)
                missing = [axis for axis in found.mesh if axis not in declared.axes]
                says = f"has no axis {missing[0]}" if missing else ""
            except Refused as error:
                says = str(error)
            self._refusals[key] = says and f"{found.implementation}: {says}"
        return self._refusals[key]

    def _undivided(self, found: Candidate) -> str:
        """Heads, widths or positions that the ranks of an axis cannot share."""
        for what, why in FITS.items():
            size = found.parts(what)
            if size > 1 and (what, size) not in self._cuts:
                self._cuts[what, size] = why(self._facts({axes.cutting(what): size}))
            if size > 1 and (reason := self._cuts[what, size]):
                return f"{axes.cutting(what)}={size}: {reason}"
        pieces = 2 * found.parts("positions")
        if pieces > 2 and self.job.positions % pieces:
            return f"a sample of {self.job.positions:,} positions does not divide in {pieces} parts"
        return ""

    def _facts(self, mesh: Mapping[str, int]) -> ModelFacts:
        work = BatchSize(1, self.job.positions)
        return shapes.facts_of(self.job.shape, mesh, {}, self.job.accounting, work)

    def schedule(self, found: Candidate) -> str:
        """Stages without a layer, and what a schedule asks of the number of micro-batches."""
        stages = found.parts("layers") * found.chunks
        if stages > self.job.shape.layers:
            return f"the model has fewer layers than stages ({found.schedule})"
        if not found.schedule or not found.micro_batches:
            return ""
        ranks = found.parts("layers")
        # As many as fill the pipeline, and the same remainder: an order of each is long.
        count = min(found.micro_batches, ranks + found.micro_batches % ranks)
        key = f"{found.schedule} {ranks} {count}"
        if key not in self._refusals:
            system: Any = system_of(found.implementation)
            try:
                system.schedule(found.options, ranks, count)
                self._refusals[key] = ""
            except Refused:
                says = f"{found.schedule} takes other numbers of micro-batches"
                self._refusals[key] = says
        return self._refusals[key]


def is_promised(strategy: str, feature: str) -> bool:
    """Whether a claim of ``strategy`` implies ``feature``."""
    return feature in strategies.of(strategy).profile
