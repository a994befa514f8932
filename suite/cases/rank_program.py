"""The program of one rank in one case: set up the implementation, drive its steps, record state.

Runs inside a rank (a thread or a process), started by ``launch/ranks.py`` or by torchrun; out comes
a :class:`~shardproof.evidence.records.RankRecord`.  Observation points copy the rank's pieces;
traffic inside them is not counted.  ``membership.py`` is for systems whose members change:
for all others it is one mesh of all ranks.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial

import torch
from torch import Tensor, nn

from shardproof import contract, registry, tensor_bytes
from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.cases.membership import Membership
from shardproof.cases.saving import Saving
from shardproof.checks import attends, weighs
from shardproof.checks.memory.growth import OBJECTS
from shardproof.comm import Mesh
from shardproof.contract import Batch, Implementation, Kind, MicroBatch, Piece, Point, Refused
from shardproof.evidence import records
from shardproof.evidence.assembled import KEPT
from shardproof.evidence.held import Held
from shardproof.evidence.records import Evaluation, Pieces, RankRecord, StepRecord, TensorDigest
from shardproof.launch.nodes import node_here
from shardproof.launch.process_control import cores
from shardproof.ledgers import program_order, traffic
from shardproof.ledgers.attended import Attended
from shardproof.ledgers.memory.installed import watch as watch_memory
from shardproof.ledgers.memory.recorder import MemoryLedger
from shardproof.ledgers.memory.summary import MemoryRow, summary
from shardproof.registry import answers
from shardproof.registry.declaration import BrokenContract, Declaration
from shardproof.workloads import Workload

#: What training goes on with after a step, in the order in which another instance loads it; then
#: further state, where some is declared.
LOADED: tuple[Kind, ...] = ("parameters", "optimizer", "buffers")
#: The point at which all of that is looked at; at the others gradients are.
_LAST: Point = "after_update"
#: What the system itself shows, by kind.
Local = Mapping[str, Sequence[Piece]]
#: What is added to an error of ``setup`` on a rank without a state.
_NO_STATE = (
    "; the argument state is None on all ranks but rank 0: test for it and broadcast, or declare "
    "Capabilities(initial_state='everywhere')"
)


class CannotReload(RuntimeError):
    """The implementation refuses to take over what another instance of it held."""


def run_rank(case: Case, workload: Workload, rank: int) -> RankRecord:
    """Run ``case`` on this rank inside the default process group; returns the rank's record."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    return _Rank(case, workload, rank).run()


class _Rank:
    """One rank over all steps."""

    def __init__(self, case: Case, workload: Workload, rank: int) -> None:
        self.case, self.workload, self.rank = case, workload, rank
        self.cls = registry.load(case.implementation)
        self.declaration = Declaration.of(self.cls, case.options)
        self.extra: tuple[Kind, ...] = ("extra",) if self.declaration.follows else ()
        self.loaded = (*LOADED, *self.extra)
        self.implementation: Implementation | None = None
        log = self.log = program_order.current()
        self.memory: MemoryLedger | None = None
        if log is not None and weighs(case, self.declaration):
            self.memory = MemoryLedger(lambda: log.phase)
        #: The GPU allocator's peak of each step, beside the ledger's.
        self.allocator: list[MemoryRow] = []
        self.attended = Attended() if attends(case, self.declaration) else None
        self.built: list[weakref.ref[nn.Module]] = []
        #: Dtypes of the outputs that losses of the step under way were taken of.
        self.outputs: set[str] = set()
        self.saving: Saving | None = None
        #: Pieces that lie in no storage of the rank: computed for the observation.
        self.unmatched: dict[str, None] = {}

    def run(self) -> RankRecord:
        """Drive the implementation and record what it holds at every observation."""
        record = RankRecord(self.rank, cores(), self.declaration, node=node_here())
        record.seal = self.case.seal
        record.stands_for = BACKENDS[self.case.backend].ranks(self.case.world)[self.rank]
        with self.memory or nullcontext():
            self._run(record)
        if self.memory:
            record.memory = [*summary(self.memory.log), *self.allocator]
        record.unmatched = list(self.unmatched)
        return record

    def _run(self, record: RankRecord) -> None:
        try:
            # Aside: a mesh lists all ranks, and no bound of a system's bytes grows with the world.
            with self._aside():
                self.members = Membership(self.case, self.cls, self.rank, self.declaration.batch)
                if self.case.checkpoint is not None:
                    self.saving = Saving(self.case, self.rank, self.members.mesh.device)
            if self.members.includes_me:
                with self._aside():
                    state = self._state(other=bool(self.case.loads_from))
                self._set_up(self.members.mesh, state)
            record.coordinate = self.members.mesh.coordinate
            if self.implementation is not None:
                with self._aside():
                    # Shown without a rule, it is looked at as well.
                    if not self.extra and self._pieces(("extra",))["extra"]:
                        self.extra = ("extra",)
                        self.loaded = (*LOADED, *self.extra)
                    record.initial = self._holds(("parameters", "buffers", *self.extra))
            if self.case.loads_from:
                record.steps = self._load(record)
            for step in range(len(record.steps), self.case.steps):
                if step:
                    held, join = self.implementation, self._set_up
                    self.implementation = self.members.change(step, held, join)
                if step == self.case.reload_at:
                    self._reload()
                if self.case.thaws:
                    self._evaluate_frozen()
                if self._evaluates_before(step) and self._judged_between_steps():
                    record.evaluations += self._evaluation(step)
                record.steps.append(self._step(step))
                if self.saving is not None and self.implementation is not None:
                    with self._aside():
                        self.saving.after_step(self.implementation, step + 1)
            if self._judged_between_steps():
                record.full_state = self._full_state()
            if self.saving is not None:
                self.saving.wait()
            if self.implementation is not None:
                self.implementation.drain()
                if self.declaration.oracle == "replay":
                    record.final = self._holds(("parameters",))
                record.history = answers.events(self.implementation)
                self.implementation.close()
        except BaseException:
            if self.implementation is not None:
                with suppress(Exception):  # the first error is the one to tell
                    self.implementation.abort()
            raise
        ledger = traffic.current()
        record.traffic = [dataclasses.replace(c) for c in ledger.calls] if ledger else []
        if self.log:
            record.events, record.actions = self.log.events, self.log.actions

    def _state(self, other: bool) -> Mapping[str, Tensor] | None:
        """The input of a rank's setup; ranks that expect a broadcast get nothing.

        ``other``: a state that training never has, so that what is loaded over it shows.
        """
        if self.declaration.initial_state != "everywhere" and not self.members.is_first:
            return None
        if not other:
            return self.workload.state()
        other_model = self.workload.build_for(self.members.mesh.ranks[0], 0)()
        named = itertools.chain(other_model.named_parameters(), other_model.named_buffers())
        return {name: tensor.detach() for name, tensor in named}

    def _set_up(self, mesh: Mesh, state: Mapping[str, Tensor] | None = None) -> Implementation:
        self.implementation = self.cls()
        if self.log:
            self.implementation.trace = self.log.action
        coordinate = self.members.share()[0] or 0
        own = self.workload.build_for(self.rank, coordinate)
        build = _WatchedBuild(own, self._watch, self.outputs)
        try:
            self.implementation.setup(build, state, self.case.optimizer, mesh, self.case.options)
        except (TypeError, AttributeError) as error:
            if state is None and "NoneType" in str(error):
                # In place, so that the traceback still ends in the line of the system.
                error.args = (f"{error}{_NO_STATE}",)
            raise
        return self.implementation

    def _reload(self) -> None:
        """Go on with a fresh instance: set up from other values, it loads what this one holds."""
        assert self.implementation is not None
        self.implementation.drain()
        own = self._pieces(self.loaded)
        held = {kind: [*map(_copy, pieces)] for kind, pieces in own.items()}
        self.implementation.close()
        self._set_up(self.members.mesh, self._state(other=True))
        for kind in self.loaded:
            try:
                self.implementation.load_pieces(kind, held[kind])
            except Refused as error:
                raise CannotReload(f"refuses load_pieces: {error}") from error

    def _evaluate_frozen(self) -> None:
        """Evaluate while no parameter requires a gradient, as before they are unfrozen, or where a
        script freezes what it has trained for its evaluations.
        """
        assert self.implementation is not None
        modules = [module for made in self.built if (module := made()) is not None]
        wanted = [{n: p.requires_grad for n, p in m.named_parameters()} for m in modules]
        for module in modules:
            module.requires_grad_(False)
        batch, _ = self._batch(0)
        try:
            answers.evaluation(self.implementation, batch)
        except Refused as error:
            raise CannotReload(f"refuses evaluate: {error}") from error
        for module, needed in zip(modules, wanted, strict=True):
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(needed[name])

    def _load(self, record: RankRecord) -> list[StepRecord]:
        """Go on from a checkpoint; in the place of the last step before it, what was loaded."""
        assert self.implementation is not None and self.saving is not None
        assert self.case.checkpoint is not None
        for step in range(self.case.checkpoint.trained):
            self._step(step)  # nothing of it may stay
        loaded = record.loaded = self.saving.load(self.implementation)
        steps = [StepRecord(n, None, None, None, present=False) for n in range(loaded.step)]
        steps[-1].observed = {"after_update": self._holds(self.loaded)}
        steps[-1].draws = self.saving.draws()
        with self._aside():
            self.saving.after_step(self.implementation, loaded.step)  # it may be asked at once
        return steps

    def _watch(self, module: nn.Module, units: Sequence[str]) -> None:
        """Set the suite's hooks on what was built."""
        program_order.watch(module, units)
        if self.attended is not None:
            self.attended.watch(module, self.workload.roles)
        if self.saving is not None:
            self.saving.watch(module)
        self.built.append(weakref.ref(module))
        if self.memory:
            watch_memory(module)

    def _batch(self, step: int) -> tuple[Batch, int | None]:
        """This rank's share of the global batch (empty unless it is a worker), and its number."""
        share, shares = self.members.share()
        if share is None:
            return Batch(step, ()), None
        with self._unseen():
            workload = self.workload
            if self.case.changes_members:
                assert self.implementation is not None
                told = answers.progress(self.implementation)
                workload = workload.at(*self.members.place(step, told))
            batch = workload.batch(step, shares)[share]
            return _placed(batch, self.members.mesh.device, self.case.loss_scale), share

    def _aside(self) -> AbstractContextManager[None]:
        """Do not count what is allocated inside: it is the suite's."""
        return self.memory.paused() if self.memory else nullcontext()

    def _unseen(self) -> AbstractContextManager[object]:
        """Mark copies of the suite, which are not kept."""
        return self.memory.unseen() if self.memory else nullcontext()

    def _holds(self, kinds: tuple[Kind, ...], point: str = "") -> Pieces:
        """Copies of ``kinds``; at an observation ``point`` all kinds are weighed."""
        assert self.implementation is not None
        pieces = self._pieces((*contract.KINDS, *self.extra) if point and self.memory else kinds)
        if point and self.memory:
            # Label what the rank holds at this moment, and mark it.
            modules = [module for made in self.built if (module := made()) is not None]
            self.unmatched |= dict.fromkeys(self.memory.classify(pieces, modules))
            self.memory.mark(point)
        with self._unseen():
            try:
                return {kind: Held.copied(pieces[kind]) for kind in kinds}
            except tensor_bytes.NotPlain as error:
                name = type(self.implementation).__name__
                raise BrokenContract(f"{name}.local_state: {error}") from error

    def _pieces(self, kinds: tuple[Kind, ...]) -> Local:
        """The state of ``kinds`` that the system shows."""
        assert self.implementation is not None
        return {kind: answers.pieces(self.implementation, kind, self.rank) for kind in kinds}

    def _evaluates_before(self, step: int) -> bool:
        """Before the last step; in longer cases before the third as well, for what the first
        evaluation leaves to the second.
        """
        steps = self.case.steps
        return 0 < step == steps - 1 or (step == 2 and steps > 3)

    def _judged_between_steps(self) -> bool:
        """Whether state between steps is judged: it takes an oracle of it and fixed members."""
        plain = self.declaration.oracle == "plain" or self.declaration.trains_alone
        shown = "after_update" in self.declaration.points
        fixed = not self.case.changes_members
        return plain and shown and fixed and self.implementation is not None

    def _evaluation(self, step: int) -> list[Evaluation]:
        """An evaluation of the batch of ``step``, and what it changed; nothing: refused."""
        assert self.implementation is not None
        batch, share = self._batch(step)
        with self.log.observe("evaluation") if self.log else nullcontext():
            before = self._holds(self.loaded)
            try:
                loss = answers.evaluation(self.implementation, batch)
            except Refused:
                return []
            after = self._holds(self.loaded)
        with self._unseen():
            like = {kind: before[kind].likeness(after[kind]) for kind in self.loaded}
        changed = [kind for kind, how in like.items() if how == "changed"]
        retold = [kind for kind, how in like.items() if how == "recut"]
        return [Evaluation(step, share, loss, [*changed], [*retold])]

    def _full_state(self) -> dict[str, TensorDigest] | None:
        """Digest, shape and dtype of the parameters as gathered (``None``: refused)."""
        assert self.implementation is not None
        # Unseen: the last step is over, and none of what it makes is weighed.
        with self.log.observe("full_state") if self.log else nullcontext(), self._unseen():
            try:
                state = answers.full_state(self.implementation, "parameters")
            except Refused:
                return None
        digests = {name: tensor_bytes.digest(tensor) for name, tensor in state.items()}
        return {
            name: TensorDigest(digests[name], list(t.shape), tensor_bytes.dtype_name(t))
            for name, t in state.items()
        }

    def _step(self, step: int) -> StepRecord:
        observed: dict[str, Pieces] = {}
        attempt = ""
        if any(death.step == step for death in self.case.deaths):
            held, begin = self.implementation, partial(self._begin_step, step)
            attempt, self.implementation = self.members.attempt(step, held, begin)
        if self.implementation is None:
            absent = StepRecord(step, None, None, None, present=False, attempt=attempt)
            return dataclasses.replace(absent, observed={point: {} for point in contract.POINTS})
        ledger, log = traffic.current(), self.log
        batch, share = self._batch(step)

        def observe(point: Point) -> None:
            if point not in contract.POINTS:
                raise BrokenContract(f"step {step}: observe({point!r}): not in contract.POINTS")
            if point in observed:
                raise BrokenContract(f"step {step}: observe({point!r}) was called twice")
            with log.observe(point) if log else nullcontext():
                kinds: tuple[Kind, ...] = ("gradients",)
                observed[point] = self._holds(self.loaded if point == _LAST else kinds, point)

        first_call = len(ledger.calls) if ledger else 0
        first_event = log.now if log else 0
        self.outputs.clear()
        if self.attended is not None:
            self.attended.total = 0
        if self.memory:
            self.memory.step = step
            if self.members.mesh.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
        with log.step(step) if log else nullcontext():
            returned = self.implementation.step(batch, observe)
        result = answers.step(self.implementation, step, returned)
        if self.memory and self.members.mesh.device == "cuda":
            device = f"cuda:{torch.cuda.current_device()}"
            peak = torch.cuda.max_memory_allocated()
            self.allocator.append(MemoryRow("allocator", step, "step", device, "all", peak))
        if self.memory and self.declaration.depth == "family":
            self.allocator += self._objects(step)
        for point in self.declaration.points:
            if point not in observed:
                raise BrokenContract(f"step {step}: observe({point!r}) was never called")
        return StepRecord(
            step,
            share,
            loss=answers.number(self.implementation, "step", result.loss),
            norm=answers.number(self.implementation, "step", result.norm),
            windows=[len(window) for window in batch.windows],
            metrics=dict(result.metrics),
            outputs=sorted(self.outputs),
            observed=observed,
            held={point: _elements(kinds) for point, kinds in observed.items()},
            places=_places(observed) if step == self.case.steps - 1 else {},
            calls=[first_call, len(ledger.calls) if ledger else 0],
            events=[first_event, log.now if log else 0],
            draws=self.saving.draws() if self.saving else {},
            samples=_samples(batch) if self.saving or self.case.changes_members else (),
            attempt=attempt,
            attended=self.attended.total if self.attended is not None else None,
        )

    def _objects(self, step: int) -> list[MemoryRow]:
        """Python's small objects in use after ``step``; ranks that are threads share them."""
        if BACKENDS[self.case.backend].threads and self.rank:
            return []
        gc.collect()
        return [MemoryRow(OBJECTS, step, "step", "", "all", sys.getallocatedblocks())]

    def _begin_step(self, step: int, implementation: Implementation) -> None:
        """The step, which is to end nowhere: what it shows is not looked at."""
        batch, _ = self._batch(step)
        with self.log.step(step) if self.log else nullcontext():
            implementation.step(batch, lambda point: None)


def _samples(batch: Batch) -> list[int]:
    """The ids of the samples of a batch, in order."""
    return [int(i) for micro in batch.micro_batches for i in micro.sample_ids]


def _places(observed: Mapping[str, Pieces]) -> dict[str, str]:
    """Where the pieces of each parameter lie that the rank holds after the update."""
    held = observed.get(records.SHOWN_AT["parameters"], {}).get("parameters")
    return {} if held is None else held.places()


def _elements(kinds: Pieces) -> dict[str, dict[str, int]]:
    """Elements by kind and name of what the rank holds at a moment; names of none are left out.

    Of a parameter's optimizer slots the largest counts; counters, masters and what reductions keep
    do not.
    """
    by_kind: dict[str, dict[str, int]] = {}
    for kind, pieces in kinds.items():
        total = Counter[str]()
        for name, size in pieces.sizes():
            total[name] += size
        sizes = dict(+total)
        if kind == "optimizer":
            slots: dict[str, int] = {}
            for name, size in sizes.items():
                owner, _, slot = name.rpartition(".")
                if slot != "step" and not slot.startswith("master") and KEPT not in slot:
                    slots[owner] = max(slots.get(owner, 0), size)
            sizes = slots
        by_kind[kind] = sizes
    return by_kind


def _placed(batch: Batch, device: str, factor: float) -> Batch:
    """A copy of ``batch`` on ``device``, with every loss weight times ``factor``.

    A copy also on the CPU: a system that writes into its inputs spoils nobody else's.
    """

    def place(micro: MicroBatch) -> MicroBatch:
        tensors = (micro.inputs, micro.targets, micro.weights * factor, micro.sample_ids)
        return MicroBatch(*(tensor.to(device, copy=True) for tensor in tensors))

    windows = tuple(tuple(place(micro) for micro in window) for window in batch.windows)
    return dataclasses.replace(batch, windows=windows)


def _copy(piece: Piece) -> Piece:
    return dataclasses.replace(piece, tensor=piece.tensor.detach().clone(), source=None)


class _WatchedBuild:
    """The workload's build, with the suite's program-order hooks on what it makes."""

    def __init__(
        self,
        build: contract.Build,
        watch: Callable[[nn.Module, Sequence[str]], None],
        outputs: set[str],
    ) -> None:
        self._build, self._watch, self._outputs = build, watch, outputs
        self.units, self.roles = build.units, build.roles
        self.cross_entropy, self.terms = build.cross_entropy, build.terms

    def __call__(self, device: str = "cpu") -> nn.Module:
        module = self._build(device)
        self._watch(module, self.units)
        return module

    def stage(self, module: nn.Module, start: int, stop: int) -> nn.Module:
        return self._build.stage(module, start, stop)

    def loss(self, outputs: Tensor, micro: MicroBatch) -> Tensor:
        self._outputs.add(str(outputs.dtype).removeprefix("torch."))
        return self._build.loss(outputs, micro)


def workload_facts(workload: Workload) -> records.WorkloadFacts:
    """The facts about the workload that the checks need."""
    return records.WorkloadFacts(
        zero_gradient=workload.zero_gradient,
        parameter_names=list(workload.parameter_names),
        trainable_names=list(workload.trainable_names),
        unused_possible=workload.unused_possible,
        traits=list(workload.spec.traits),
        widest=workload.found.widest,
        beside_loss=workload.found.beside_loss,
    )
