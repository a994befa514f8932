"""Replicas of one optimizer, compared over ranks every k steps.

At a compared step each rank sends one row of numbers, checksums among them, and goes on; it reads
the rows of the others at its next step.  All ranks read the same table, so all draw the same
conclusions without another word: whether something differs, whether to exchange a checksum for each
parameter to name it, and which step is compared next.

Steps 1 to 3 are compared, then every k-th, such that comparing costs :data:`SHARE` of the time at
most: k follows from the slowest rank's cost over its own step.  So the first step at which ranks
part is known as an interval.
"""

from __future__ import annotations

import json
import math
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardproof.backends.errors import name_ranks, spans
from shardproof.table import grouped, some
from shardproof.watch import checksum
from shardproof.watch.checksum import folded, of_text
from shardproof.watch.exchange import BrokenExchange, Exchange, Pending
from shardproof.watch.found import Found, Held, Tracked, find, is_sparse, local
from shardproof.watch.record import Finding, Kind, RankRecord, Watched

#: Of the time of a step.  A tenth is allowed; the calls that are noted cost as well, and of the CPU
#: seconds of a step, which also waits, a comparison takes up to twice this share.
SHARE = 0.025
#: Steps that are always compared.
FIRST = 3
#: Names in one sentence.
NAMED = 3
#: Comparisons over which a buffer is the same, so that it counts as a constant table.
STEADY = 3
#: Most replica sets of one optimizer.
CLASSES = 4

#: What is named as not compared where nobody compares at the end of the script.
LAST = "what the last step left"
_STEP, _END = 1, 2
_TYPE, _NUMBER, _AT, _COST, _TIME, _COUNT, _SIGNATURE, _FORM, _HYPER, _OPTIMIZERS, _GONE = range(11)
_CALLS, _TABLES = 11, 12
_CLASS = 13
#: What is compared of each replica set, in causal order, as it stands in a row after the set's key.
KINDS: tuple[Kind, ...] = (
    *("initial parameters", "buffers", "gradients", "optimizer state", "parameters"),
)
_ROW = _CLASS + CLASSES * (1 + len(KINDS))
#: Where in a row each set begins.
_STARTS = range(_CLASS, _ROW, 1 + len(KINDS))

Table = list[list[int]]


class Compared:
    """One optimizer of this rank, or several that a script makes for the same parameters.

    It is known weakly, and so is what it holds.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        number: int,
        exchange: Exchange | None,
        record: RankRecord,
        replicas: Sequence[Sequence[int]] | None,
        every: int | None,
        calls: Callable[[], int] = lambda: 0,
    ) -> None:
        self.number, self.record, self._exchange = number, record, exchange
        self._replicas, self._every, self._calls = replicas, every, calls
        self.seen = Watched(type(optimizer).__name__, every=every or 1)
        record.optimizers.append(self.seen)
        self.found = Found()
        #: The latest of them; it may be gone.
        self._owner = weakref.ref(optimizer)
        self._held: Held | None = None
        #: Rows sent, and the step of the last; what ranks have read counts as compared.
        self.rows, self._sent = 0, 0
        self._next = 1
        self._due = False
        self._pending: Pending | None = None
        self._alone: list[int] = []
        self._sums: dict[Kind, list[int]] = {}
        self._hyper: list[dict[str, str]] = []
        self._classes: list[tuple[int, ...]] = []
        #: Checksums of buffers by compared step, up to :data:`STEADY`; 0: a step has changed it.
        self._tables: list[list[int]] = []
        self._equal: dict[Kind, int] = {}
        self._told: set[Kind] = set()
        self._parted = False
        #: The last compared step before which all ranks had made as many calls.
        self._in_step = 0
        #: Whether ranks keep state of different parameters.
        self._has_forms = False
        self._ratios: deque[float] = deque(maxlen=3)
        self._times: deque[float] = deque(maxlen=5)
        self._before = 0.0
        #: Seconds spent here since the last step began, without waits for other ranks.
        self._spent = 0.0
        #: Of them, the last whole comparison: before and after its step, and reading the table.
        self._cost = 0.0

    # ------------------------------------------------------------------------------------- whose

    def fits(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is of the same type, for the same tensors: the same answer on every rank."""
        is_same = type(optimizer).__name__ == self.seen.name
        return is_same and self._held is not None and self._held.are_of(optimizer)

    def go_on_with(self, optimizer: torch.optim.Optimizer) -> None:
        """The script has made ``optimizer`` in place of the one before."""
        self._owner = weakref.ref(optimizer)
        self.seen.made += 1

    # ------------------------------------------------------------------------------------- steps

    def before(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        """The optimizer is about to make a step."""
        began = time.perf_counter()
        if self._before:
            self._times.append(max(1e-6, began - self._before - self._spent))
        self._before, compared, self._spent = began, self._spent, 0.0
        is_read = self._pending is not None
        waited = self._settle()
        if is_read:
            self._cost = compared + time.perf_counter() - began - waited
            self.seen.cost_seconds = self._cost
        self.seen.steps += 1
        self._due = self.seen.steps == self._next
        if self._due:
            self._look(optimizer)
            self._sums = {}
            if self.seen.steps == 1:
                self._sums["initial parameters"] = checksum.of_parameters(self.found.tracked).sums
            gradients = [one.parameter.grad for one in self.found.tracked]
            if not has_closure and any(gradient is not None for gradient in gradients):
                self._sums["gradients"] = checksum.of_gradients(self.found.tracked).sums
                self._finite("gradient", [checksum.dense(gradient) for gradient in gradients])
            self._hyper = checksum.hyperparameters(optimizer)
        self._spent += time.perf_counter() - began - waited

    def after(self, optimizer: torch.optim.Optimizer) -> bool:
        """The step is made; whether it is compared."""
        if not self._due:
            return False
        began = time.perf_counter()
        self._look_again(optimizer)
        self._compare(optimizer, _STEP)
        self._next = 0  # until the table is read
        if self._exchange is None:
            self._schedule([self._alone])
        self._spent += time.perf_counter() - began
        return True

    def end(self, optimizers: int) -> None:
        """The script ends: compare what the last step left, unless the optimizer is gone."""
        self._settle()
        if self._exchange is None or self._exchange.broken:
            return
        optimizer, self._sums = self._owner(), {}
        if optimizer is None:
            row = self._row(_END, optimizers)
            row[_GONE] = 1
            self._send(row)
        else:
            self._look(optimizer)
            self._hyper = checksum.hyperparameters(optimizer)
            self._compare(optimizer, _END, optimizers)
        self._settle()

    def skip_the_end(self, why: str) -> None:
        """The last step is not compared, because of ``why``."""
        if self.seen.steps and self._exchange is not None:
            self.seen.not_compared[LAST] = why

    def stop(self, why: str) -> None:
        """Stop comparing: no rank reads the last values of the others."""
        pending, self._pending, self._due, self._next = self._pending, None, False, 0
        if pending is not None:
            pending.exchange.give_up(pending, why)

    # ----------------------------------------------------------------------------------- details

    def _look_again(self, optimizer: torch.optim.Optimizer) -> None:
        """Its step may have put new tensors in place of those that were found before it.

        What was kept of the old ones counts for the new ones where these have the same names.
        """
        if self._held is not None and self._held.are_of(optimizer):
            return
        before = [one.described for one in self.found.tracked]
        self._look(optimizer)
        if before != [one.described for one in self.found.tracked]:
            self._sums = {}
            self.seen.not_compared["gradients"] = "the step replaces the parameters by others"

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the parameters, again if there are others than before."""
        if self._held is not None and self._held.are_of(optimizer):
            return
        self._held = Held(optimizer)
        self.found = find(optimizer, self.record.rank, self.record.world, self._replicas)
        found = self.found
        sets = list(dict.fromkeys(one.replicas for one in found.tracked))
        self._classes = sets[:CLASSES]
        beyond = [one.name for one in found.tracked if one.replicas in sets[CLASSES:]]
        found.not_compared |= dict.fromkeys(beyond, f"more than {CLASSES} sets of replicas")
        found.tracked = [one for one in found.tracked if one.replicas in self._classes]
        self._tables = []
        self.seen.tracked = len(found.tracked)
        self.seen.tracked_bytes = sum(local(one.parameter).nbytes for one in found.tracked)
        sparse = [f"gradient of {one.name}" for one in found.tracked if is_sparse(one)]
        self.seen.not_compared = found.not_compared | dict.fromkeys(sparse, "sparse")
        self.seen.outside = [*self.found.outside]

    def _keep_state(self, state: checksum.Sums) -> None:
        if state.read or any(state.sums):
            self._sums["optimizer state"] = state.sums
            self.seen.not_compared.pop("optimizer state", None)
        elif self.found.tracked:
            self.seen.not_compared["optimizer state"] = "the optimizer shows no state"

    def _keep_tables(self) -> None:
        """Batch norms keep statistics of each rank's own: only what no step changes is compared."""
        self._sums.pop("buffers", None)
        sums = checksum.of_tables(self.found.tables)
        kept = self._tables[-1] if self._tables else sums
        same = [now if now == was else 0 for now, was in zip(sums, kept, strict=True)]
        self._tables = [*self._tables, same][-STEADY:]
        if len(self._tables) == STEADY and any(same):
            self._sums["buffers"] = same

    def _finite(self, what: str, tensors: Sequence[torch.Tensor | None]) -> None:
        number = checksum.not_finite(tensors) if "non-finite" not in self._told else None
        if number is not None:
            name = self.found.tracked[number].name
            self._tell("non-finite", self._since("non-finite"), name=f"{what} of {name}")
            self._told.add("non-finite")

    def _compare(self, optimizer: torch.optim.Optimizer, kind: int, optimizers: int = 0) -> None:
        """Take the checksums after the step and send the row."""
        tracked = self.found.tracked
        self._sums["parameters"] = checksum.of_parameters(tracked).sums
        state, form = checksum.of_state(optimizer, tracked)
        if not self._has_forms:  # told once
            self._keep_state(state)
        self._keep_tables()
        self._finite("parameter", [checksum.dense(one.parameter) for one in tracked])
        if "non-finite" not in self._told:
            self._equal["non-finite"] = self.seen.steps
        row = self._row(kind, optimizers)
        # The whole of the one before; the first is dear, and its search for names is not repeated.
        row[_COST] = int(1e6 * (self._cost if self.seen.steps > 2 else self._spent))
        row[_TIME] = int(1e6 * statistics.median(self._times)) if self._times else 0
        self.seen.step_seconds = row[_TIME] / 1e6
        row[_COUNT], row[_TABLES] = len(tracked), len(self.found.tables)
        row[_SIGNATURE], row[_FORM] = checksum.signature(tracked, self._classes), form
        row[_HYPER] = of_text(json.dumps(self._hyper))
        for start, ranks in zip(_STARTS, self._classes, strict=False):
            row[start] = of_text(spans(ranks))
            for offset, name in enumerate(KINDS, start + 1):
                if sums := self._sums.get(name):
                    row[offset] = folded(sums[n] for n in self._members_of(name, ranks))
        self._send(row)

    def _compared(self, kind: Kind) -> list[Tracked]:
        """The tensors whose checksums are those of ``kind``."""
        return self.found.tables if kind == "buffers" else self.found.tracked

    def _members_of(self, kind: Kind, ranks: tuple[int, ...]) -> list[int]:
        """The numbers of those that ``ranks`` hold alike."""
        return [n for n, one in enumerate(self._compared(kind)) if one.replicas == ranks]

    def _row(self, kind: int, optimizers: int) -> list[int]:
        """A row that says where this rank is, and nothing else yet."""
        row = [0] * _ROW
        row[_TYPE], row[_NUMBER], row[_AT] = kind, self.number, self.seen.steps
        row[_OPTIMIZERS], row[_CALLS] = optimizers, self._calls()
        return row

    def _send(self, row: list[int]) -> None:
        self.rows, self._sent = self.rows + 1, self.seen.steps
        if self._exchange is None:
            self._alone = row
            return
        try:
            self._pending = self._exchange.start(row)
        except BrokenExchange as error:
            self._over(str(error))

    # ----------------------------------------------------------------------------------- verdicts

    def _settle(self) -> float:
        """Read what the others sent; the seconds that this rank waited for them."""
        pending, self._pending = self._pending, None
        began = time.perf_counter()
        waited = 0.0
        try:
            if pending is not None:
                table = pending.result()
                waited = time.perf_counter() - began
                self._judge(table)
        except BrokenExchange as error:
            self._over(str(error))
            waited = time.perf_counter() - began
        return waited

    def _over(self, why: str) -> None:
        """The exchange failed: say so once, and compare no more."""
        last = self._equal.get("parameters", 0)
        sentence = f"replicas were not compared after step {last}: {why}"
        if not any(finding.kind == "not compared" for finding in self.record.findings):
            self._tell("not compared", sentence, broken=False)
        self._next = 0

    def _judge(self, table: Table) -> None:
        """Draw from the table of all ranks what every rank draws from it."""
        mine = table[self.record.rank]
        if not self._same_step(table):
            return
        if any(row[_GONE] for row in table):
            if self.seen.compared[-1:] != [mine[_AT]]:
                self._ended_before(mine[_AT])
            return
        self._note_calls(table)
        self.seen.compared.append(mine[_AT])
        self._hyperparameters(table)
        for offset, kind in enumerate(KINDS, 1):
            if self._is_open(table, kind, offset):
                self._details(table, kind, offset)
            elif kind in self._sums and kind not in self._told:
                self._equal[kind] = mine[_AT]
            self._count(kind)
        self._schedule(table)

    def _ended_before(self, step: int) -> None:
        """Report that the steps up to ``step`` cannot be compared, for they may hold a fault."""
        self.seen.not_compared[LAST] = "the optimizer was gone before the script ended"
        last = self.seen.compared[-1] if self.seen.compared else 0
        sentence = (
            f"an optimizer ended before its last steps were compared: {self.seen.name} made "
            f"{step}, and step {last} was the last compared; keep the optimizer until the script "
            "ends, or compare more often by --every"
        )
        self._tell("not compared", sentence, broken=False)

    def _note_calls(self, table: Table) -> None:
        """Whether ranks that count the same step have made as many calls: one may be behind."""
        step = table[0][_AT]
        if len({row[_CALLS] for row in table}) == 1:
            self._in_step = step
        elif self._in_step and not self.seen.behind_at:
            self.seen.behind_at = step

    def _count(self, kind: Kind) -> None:
        """Ranks have compared ``kind`` once more, unless what they hold cannot be compared."""
        is_apart = "shapes" in self._told or (kind == "optimizer state" and self._has_forms)
        if kind in self._sums and not is_apart:
            self.seen.counts[kind] = self.seen.counts.get(kind, 0) + 1

    def _same_step(self, table: Table) -> bool:
        """Whether all ranks are at the same point; a difference is reported, and ends comparing."""
        points = {rank: (row[_TYPE], row[_NUMBER], row[_AT]) for rank, row in enumerate(table)}
        optimizers = {rank: row[_OPTIMIZERS] for rank, row in enumerate(table)}
        if len({*points.values()}) == len({*optimizers.values()}) == 1:
            return True
        if len({*points.values()}) == 1:
            self._apart(f"ranks have different numbers of optimizers: {odd(optimizers)}")
            return False
        several = len({number for _, number, _ in points.values()}) > 1
        words: dict[str, list[int]] = {}
        for rank, (kind, number, at) in points.items():
            text = f"ended after step {at}" if kind == _END else f"is at step {at}"
            words.setdefault(text + f" of optimizer {number}" * several, []).append(rank)
        told = "; ".join(f"{name_ranks(ranks)} {text}" for text, ranks in words.items())
        self._apart(f"ranks make different numbers of steps: {told}")
        return False

    def _apart(self, sentence: str) -> None:
        """Rows of different steps meet: nothing can be compared any more."""
        self._tell("steps", sentence)
        if self._exchange is not None:
            self._exchange.broken = sentence
        self._next = 0

    def _hyperparameters(self, table: Table) -> None:
        if len({row[_HYPER] for row in table}) == 1:
            if "hyperparameters" not in self._told:
                self._equal["hyperparameters"] = table[0][_AT]
            return
        if "hyperparameters" in self._told or self._exchange is None:
            return
        self._told.add("hyperparameters")
        texts = self._exchange.texts(json.dumps(self._hyper))
        # Those of ranks that hold some of the same; of all where nobody holds any.
        own = table[self.record.rank]
        mine = [start for start in _STARTS if own[start]]
        same = [r for r, row in enumerate(table) if any(row[s] == own[s] for s in mine)]
        peers = same or range(len(table))
        if difference := differing({rank: json.loads(texts[rank]) for rank in peers}):
            sentence = f"hyperparameters differ {self._since('hyperparameters')}: {difference}"
            self._tell("hyperparameters", sentence)

    def _is_open(self, table: Table, kind: Kind, offset: int) -> bool:
        """Whether some set of replicas differs in ``kind``: the same answer on every rank."""
        if kind in self._told or self._parted:
            return False
        for start in _STARTS:
            rows = {
                (row[start], row[_SIGNATURE], row[start + offset]) for row in table if row[start]
            }
            if len(rows) > len({key for key, _, _ in rows}):
                return True
        return False

    def _details(self, table: Table, kind: Kind, offset: int) -> None:
        """Exchange checksums of single parameters and say which differ where."""
        assert self._exchange is not None
        self._told.add(kind)
        count = max(max(row[_COUNT], row[_TABLES]) for row in table)
        sums = self._sums.get(kind, [])
        all_sums = self._exchange.all([*sums, *[0] * (count + 1 - len(sums))])
        if kind == "buffers":
            # A rank may have grown a table for longer inputs than others had.
            shapes = [of_text(described(one)) for one in self.found.tables]
            all_shapes = self._exchange.all([*shapes, *[0] * (count + 1 - len(shapes))])
        mine = table[self.record.rank]
        for start, own in zip(_STARTS, self._classes, strict=False):
            ranks = [rank for rank, row in enumerate(table) if row[start] == mine[start]]
            if len({table[rank][_SIGNATURE] for rank in ranks}) > 1:
                self._shapes(table, ranks)
                continue
            if kind == "optimizer state" and len({table[r][_FORM] for r in ranks}) > 1:
                self._forms(table, ranks)
                continue
            members = self._members_of(kind, own)
            differ = [n for n in members if len({all_sums[rank][n] for rank in ranks}) > 1]
            if kind == "buffers":
                steady = (n for n in differ if all(all_sums[rank][n] for rank in ranks))
                differ = [n for n in steady if len({all_shapes[rank][n] for rank in ranks}) == 1]
            if differ:
                self._blame(kind, ranks, differ, all_sums)
        if kind in ("initial parameters", "parameters"):
            self._parted = True

    def _blame(self, kind: Kind, ranks: list[int], differ: list[int], all_sums: Table) -> None:
        tracked = self._compared(kind)
        names = some([described(tracked[number]) for number in differ], NAMED)
        values = {rank: all_sums[rank][differ[0]] for rank in ranks}
        noun = {"buffers": "buffers", "gradients": "gradients", "optimizer state": "states"}
        of = f"{len(differ)} of {len(tracked)} {noun.get(kind, 'parameters')}"
        when = self._since(kind)
        if kind == "buffers":
            when = "that no step changes: nothing made them equal"
        elif kind == "initial parameters":
            when = "before the first step: nothing made them equal"
        elif kind == "gradients" and self._were_equal():
            when += ", while parameters were still equal"
        verb = {"parameters": "start to differ", "optimizer state": "differs"}
        head = f"{kind} {verb.get(kind, 'differ')}"
        assumed = any(tracked[number].assumed for number in differ)
        sentence = f"{head} {when}: {odd(values)} ({of}: {names})"
        self._tell(kind, sentence, assumed=assumed)

    def _were_equal(self) -> bool:
        """Whether the parameters that this step began with were compared, and were equal."""
        before: Kind = "initial parameters" if self._sent == 1 else "parameters"
        at = self._sent if self._sent == 1 else self._sent - 1
        return before not in self._told and self._equal.get(before) == at

    def _shapes(self, table: Table, ranks: list[int]) -> None:
        if "shapes" in self._told:
            return
        self._told.add("shapes")
        values = {rank: table[rank][_SIGNATURE] for rank in ranks}
        sentence = (
            f"names, shapes or dtypes of parameters differ between ranks: {odd(values)}; nothing "
            "was compared. If ranks hold parts of one model, say by --replicas which ranks hold "
            "the same parts"
        )
        self._tell("shapes", sentence, broken=False)

    def _forms(self, table: Table, ranks: list[int]) -> None:
        values = {rank: table[rank][_FORM] for rank in ranks}
        self._has_forms = True
        self.seen.counts.pop("optimizer state", None)
        why = "ranks keep state of different parameters or shapes, as sharded optimizers do"
        self.seen.not_compared["optimizer state"] = f"{why}: {odd(values)}"

    def _schedule(self, table: Table) -> None:
        """Which step is compared next."""
        step = self._sent
        ratios = [row[_COST] / row[_TIME] for row in table if row[_TIME]]
        if ratios:
            self._ratios.append(max(ratios))
        wanted = statistics.median(self._ratios) / SHARE if self._ratios else 1.0
        self.seen.every = self._every or (1 if step < FIRST else max(1, math.ceil(wanted)))
        self._next = step + self.seen.every

    def _step_of(self, kind: Kind) -> int:
        """The step that is looked at: others are known one step late."""
        return self.seen.steps if kind == "non-finite" else self._sent or self.seen.steps

    def _since(self, kind: Kind) -> str:
        step, equal = self._step_of(kind), self._equal.get(kind, 0)
        if equal and step - equal > 1:
            return f"between step {equal} and step {step}"
        return f"at step {step}"

    def _tell(self, kind: Kind, sentence: str, broken: bool = True, **more: Any) -> None:
        where = self._step_of(kind), self._equal.get(kind), self.number
        self.record.findings.append(Finding(kind, sentence, broken, *where, **more))


def described(one: Tracked) -> str:
    """Name and shape of a parameter."""
    shape = "x".join(map(str, one.shape)) or "scalar"
    return f"{one.name} [{shape}]"


def odd(values: Mapping[int, Any]) -> str:
    """Which ranks differ from the largest set of equal ranks, in words."""
    sets = grouped((value, rank) for rank, value in values.items())
    ordered = sorted(sets.values(), key=lambda ranks: (-len(ranks), ranks))
    if len(ordered) == len(values) == 2:
        return " and ".join(map(name_ranks, ordered))
    if len(ordered) == len(values):
        return f"no two of {name_ranks(sorted(values))} are equal"
    return f"{'; '.join(map(name_ranks, ordered[1:]))} from {name_ranks(ordered[0])}"


def differing(texts: Mapping[int, list[dict[str, str]]]) -> str:
    """The first hyperparameters that differ over ranks, with their values."""
    counts = {rank: len(groups) for rank, groups in texts.items()}
    if len({*counts.values()}) > 1:
        return f"numbers of parameter groups: {odd(counts)}"
    told = []
    for number in range(min(counts.values())):
        for name in sorted({name for groups in texts.values() for name in groups[number]}):
            values = {rank: groups[number].get(name, "none") for rank, groups in texts.items()}
            if len({*values.values()}) > 1:
                said = ", ".join(
                    f"{value} on {name_ranks([r for r in values if values[r] == value])}"
                    for value in dict.fromkeys(values.values())
                )
                told.append(f"{name} of group {number} is {said}")
    return "; ".join(told[:NAMED])
