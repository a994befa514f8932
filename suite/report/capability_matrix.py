"""Strategy x backend x capability: what the cases of a run say about each, as cells.

Pure functions of the results of a run.  A *capability* is of one of two sorts.
One that a check judges (``traffic``, ``memory``, ...) takes that check's own outcome in each case
that asks for it.  One that a case trains with (clipping, shared weights, ...) takes the verdict of
the whole case: with it, all that was asked held.  A case that expects a refusal trains nothing, so
it says something about refusals only.

A cell is never better than its worst case, and holds only what was judged: skipped and left-out
cases make no cell green.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from shardproof import verdicts
from shardproof.case import Case
from shardproof.checks import CHECKS, OF_UNTRAINED
from shardproof.checks.results import CaseResult, LeftOut
from shardproof.report.tables import error_is_ratio
from shardproof.runs.run_folder import Run
from shardproof.table import Table

State = Literal["fail", "open", "xfail", "working precision only", "pass", "skip", "not run"]
#: Gravest first.  ``open`` is undecidable, inconclusive, lacks a precondition or a comparison with
#: the oracle; ``xfail`` has
#: failures that the scenario expects; ``working precision only``: no
#: case of it passed in another lane.
STATES: tuple[State, ...] = get_args(State)

#: Those that one case brings about, the gravest first, and its verdicts.
_WORSE: dict[State, frozenset[str]] = {
    "fail": verdicts.RED,
    "open": verdicts.OPEN,
    "xfail": frozenset({"xfail"}),
}

#: Capability -> what it says, in the order of columns.
CAPABILITIES: dict[str, str] = {
    "numbers": "loss, gradients, parameters and state equal one process's; replicas are equal",
    "traffic": "the bytes and calls are those of the formulas",
    "memory": "every rank holds the bytes of the formulas",
    "active": "the claimed strategy is in effect",
    "overlap": "communication is issued before the compute that hides it",
    "schedule": "the pipeline runs the schedule that it announced",
    "simulation": "bytes and calls are those of the same code without values",
    "clipping": "the gradient norm is clipped",
    "accumulation": "several micro-batches or windows to a step",
    "mixed-precision": "computing, reducing or storing in lower precisions",
    "loss-scaling": "losses are scaled, and updates with an overflow are skipped",
    "compression": "gradients lose what the compressor drops, and error feedback returns it",
    "recomputation": "activations are computed again instead of kept",
    "offload": "optimizer state or parameters lie in host memory",
    "checkpoint": "fresh ranks resume from a checkpoint, and a fresh instance from pieces",
    "several-axes": "two or more axes of the mesh have several ranks",
    "shared-weights": "tied weights, modules that run twice",
    "partial-gradients": "frozen, unused and conditional parameters",
    "parameter-groups": "groups with other rates and decay",
    "odd-shapes": "scalars, empty tensors, sizes that do not divide by the ranks",
    "buffers": "buffers that every forward moves or re-binds",
    "dropout": "masks that no cut of the batch may change",
    "uneven-data": "ranks with unequal numbers of tokens or micro-batches",
    "epochs": "batches run through the data again, in another order",
    "positions": "rotary embeddings, samples of several documents",
    "late-results": "results that come late, buffers poisoned until then, slow ranks",
    "elastic": "ranks join and leave",
    "refusals": "impossible options are refused with a sentence that says so",
    "collectives": "every call of a backend gives the right elements, and touches no others",
    "data": "every sample once an epoch, in another order, also resumed on other ranks",
    "stopping": "all ranks end training at once, on the same best checkpoint",
    "faults": "a rank that dies, hangs or errs is named",
}

#: Capabilities that take the outcome of checks; the worst of them counts.
BY_CHECK: dict[str, tuple[str, ...]] = {
    "numbers": ("equivalence", "replicas", "norm", "relations"),
    **{name: (name,) for name in CAPABILITIES if name in CHECKS},
}

#: Capabilities that a case trains with if its workload has one of these traits.
BY_TRAIT: dict[str, tuple[str, ...]] = {
    "loss-scaling": ("overflow_on_one_rank",),
    "shared-weights": ("tied", "tied_over_units", "module_twice"),
    "partial-gradients": (
        *("frozen", "unused", "conditional_by_rank", "conditional_by_micro_batch"),
        *("conditional_last_micro_batch", "conditional_late_step", "conditional_early_step"),
    ),
    "parameter-groups": ("two_groups",),
    "odd-shapes": (
        *("scalar", "one_element", "empty", "prime_sized", "smaller_than_world"),
        "non_contiguous",
    ),
    "buffers": ("rebound_buffer",),
    "dropout": ("dropout_counter", "dropout_stateful"),
    "uneven-data": (
        *("unequal_tokens", "one_rank_without_tokens", "variable_lengths", "ignore_index"),
        *("unequal_micro_batches", "incomplete_window", "rotating_shares"),
    ),
    "epochs": ("short_epochs",),
    "positions": ("rotary", "packed"),
    "late-results": ("late_results", "poisoned_buffers", "skewed_ranks"),
}


def _compared_by(case: Case) -> str:
    """The capability that the metamorphic relation of ``case`` says something about."""
    about = {"recompute": "recomputation", "reload": "checkpoint"}
    return about.get(str(case.expect.get("relation")), "")


def _given(options: object, word: str) -> bool:
    """Whether an option whose name begins with ``word`` is on, also inside other options."""
    return isinstance(options, Mapping) and any(
        (str(name).startswith(word) and bool(value)) or _given(value, word)
        for name, value in options.items()
    )


def _trains_with(case: Case, capability: str) -> bool:
    """Whether the case itself does what its relation compares it with."""
    if capability == "checkpoint":
        return case.checkpoint is not None or case.reload_at is not None
    return _given(case.options, "recompute")


def _does(case: Case, capability: str) -> bool:
    """Whether the case itself, or the one that its relation compares it with, does that."""
    return _compared_by(case) == capability or _trains_with(case, capability)


#: Capabilities that other fields of a case tell.
_BY_FIELD: dict[str, Callable[[Case], bool]] = {
    "clipping": lambda case: case.optimizer.clip_norm is not None,
    "accumulation": lambda case: (  # what trains nothing has these numbers by default only
        OF_UNTRAINED.keys().isdisjoint(case.checks)
        and (case.workload.micro_batches > 1 or case.workload.windows > 1)
    ),
    "mixed-precision": lambda case: bool(case.precision),
    "loss-scaling": lambda case: case.optimizer.scaler is not None,
    "recomputation": lambda case: _does(case, "recomputation"),
    "offload": lambda case: _given(case.options, "offload"),
    "checkpoint": lambda case: _does(case, "checkpoint"),
    "several-axes": lambda case: sum(ranks > 1 for ranks in case.mesh.values()) > 1,
    "parameter-groups": lambda case: bool(case.optimizer.groups),
    "buffers": lambda case: (  # batch norms count batches, and average over them
        case.workload.name == "digits_cnn" and case.workload.params.get("norm", "batch") == "batch"
    ),
    "elastic": lambda case: case.changes_members,
}


def capabilities(case: Case) -> list[str]:
    """The capabilities that a case says something about, in order of columns."""
    if "refuses" in case.expect:
        return ["refusals"]
    traits, checks = set(case.workload.traits), set(case.checks)
    return [
        name
        for name in CAPABILITIES
        if checks & set(BY_CHECK.get(name, ()))
        or traits & set(BY_TRAIT.get(name, ()))
        or (name in _BY_FIELD and _BY_FIELD[name](case))
    ]


def outcome(result: CaseResult, capability: str) -> str:
    """The verdict (one of :data:`shardproof.verdicts.VERDICTS`) of one case on one capability."""
    verdict, case = verdicts.kind(result.verdict), result.case
    names = BY_CHECK.get(capability)
    if _compared_by(case) == capability and not _trains_with(case, capability):
        names = ("relations",)
    if names is None or verdict == "xpass" or not result.checks:
        return verdict  # what ended before its checks says the same of each of them
    judged = [check.status for check in result.checks if check.check in names]
    # A check that does not apply says nothing beside one that does.
    status = min(judged, key=verdicts.VERDICTS.index) if judged else verdict
    if status == "fail" and verdict == "xfail":
        return "xfail"
    if status == "pass" and capability == "numbers":
        return _numbers(result)
    return status


def _numbers(result: CaseResult) -> str:
    """The meaning of comparisons that all passed: nothing, without the oracle's."""
    passed = {check.check for check in result.checks if check.status == "pass"}
    if "equivalence" not in passed:
        return verdicts.REPLICAS_ONLY if "replicas" in passed else "skip"
    return verdicts.WORKING_PRECISION_ONLY if error_is_ratio(result) else "pass"


@dataclass
class CapabilityCell:
    """The answer of the cases of one implementation and backend on one capability.

    ``counts`` are verdicts by kind; ``left_out`` counts cases that were selected and not run;
    ``broken`` are ids of cases that broke; ``worlds`` the numbers of ranks of those that ran,
    ``depths`` how closely they were held to their strategy, ``factors`` what their adapters
    multiply losses by.
    """

    implementation: str
    backend: str
    capability: str
    counts: Counter[str] = field(default_factory=Counter)
    left_out: int = 0
    broken: list[str] = field(default_factory=list)
    worlds: set[int] = field(default_factory=set)
    depths: set[str] = field(default_factory=set)
    factors: set[str] = field(default_factory=set)

    def _number(self, kinds: Iterable[str]) -> int:
        return sum(self.counts[kind] for kind in kinds)

    @property
    def judged(self) -> int:
        return self.counts.total() - self.counts["skip"]

    @property
    def passed(self) -> int:
        """Cases that passed, in working precision only or in full."""
        return self._number(("pass", verdicts.WORKING_PRECISION_ONLY))

    @property
    def state(self) -> State:
        for state, kinds in _WORSE.items():
            if self._number(kinds):
                return state
        if self.counts["pass"]:
            return "pass"
        if self.passed:
            return "working precision only"
        return "skip" if self.counts["skip"] else "not run"

    @property
    def text(self) -> str:
        """A few words: ``pass 12/12``, ``fail 1``, ``skip``."""
        state = self.state
        if state in ("pass", "working precision only"):
            return f"{state} {self.passed}/{self.judged}"
        return f"{state} {self._number(_WORSE[state])}" if state in _WORSE else state

    @property
    def sentence(self) -> str:
        """All of it in words, for labels and tool tips."""
        what = " on ".join(filter(None, (self.implementation, self.backend))) or "all cases"
        what += f", {self.capability}" if self.capability else ""
        numbers = [f"{self.counts[v]} {v}" for v in verdicts.VERDICTS if self.counts[v]]
        numbers += [f"{self.left_out} not run"] if self.left_out else []
        worlds = ", ".join(map(str, sorted(self.worlds)))
        where = f"; ranks: {worlds}" if worlds else ""
        for name, values in (("depth", self.depths), ("loss_factor", self.factors)):
            odd = ", ".join(sorted(values - {"layout", "1"}))
            where += f"; {name}: {odd}" if odd else ""
        return f"{what}: {', '.join(numbers) or 'nothing was judged'}{where}"

    def add(self, result: CaseResult, verdict: str) -> None:
        """Count a case with its ``verdict``."""
        self.counts[verdict] += 1
        if verdict in verdicts.RED:
            self.broken.append(result.id)
        if verdict != "skip":
            self.worlds.add(result.case.world)
            self.depths.add(result.depth or "layout")
            self.factors.add(result.loss_factor or "1")


def cells(results: Iterable[CaseResult], left_out: Iterable[LeftOut] = ()) -> list[CapabilityCell]:
    """Every cell that a case says something about, by implementation, backend and capability.

    ``results`` are the lines of cases (``Run.cases``), ``left_out`` those of what was selected and
    not run (``Run.left_out``), of which comparisons say nothing here.
    """
    by_place: dict[tuple[str, str, str], CapabilityCell] = {}

    def of(case: Case, capability: str) -> CapabilityCell:
        key = (case.implementation, case.backend, capability)
        return by_place.setdefault(key, CapabilityCell(*key))

    for result in results:
        for name in capabilities(result.case):
            flaky = verdicts.FLAKY if result.verdict == verdicts.FLAKY else ""
            of(result.case, name).add(result, flaky or outcome(result, name))
    for case in (line.case for line in left_out if line.case is not None):
        for name in capabilities(case):
            of(case, name).left_out += 1
    order = [*CAPABILITIES]
    ordered = sorted(by_place, key=lambda key: (key[0], key[1], order.index(key[2])))
    return [by_place[key] for key in ordered]


@dataclass(frozen=True)
class CapabilityMatrix:
    """``columns`` are capabilities with what they say; ``rows`` have a cell for each of them by
    implementation and backend, in the order of their names (``None``: no case asked).
    """

    columns: list[tuple[str, str]]
    rows: dict[tuple[str, str], list[CapabilityCell | None]]

    def table(self) -> Table:
        """The matrix as a table of words; notes say what each capability is."""
        texts = {p: [cell.text if cell else "" for cell in row] for p, row in self.rows.items()}
        rows = [(*place, *row) for place, row in texts.items()]
        headings = ("implementation", "backend", *(name for name, _ in self.columns))
        notes = [f"- {name}: {about}" for name, about in self.columns]
        return Table("Capabilities", headings, rows, notes=notes)


def matrix(run: Run) -> CapabilityMatrix:
    there = cells(run.cases, run.left_out)
    names = [name for name in CAPABILITIES if name in {cell.capability for cell in there}]
    rows: dict[tuple[str, str], list[CapabilityCell | None]] = {}
    for cell in there:
        row = rows.setdefault((cell.implementation, cell.backend), [None] * len(names))
        row[names.index(cell.capability)] = cell
    return CapabilityMatrix([(name, CAPABILITIES[name]) for name in names], rows)
