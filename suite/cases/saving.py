"""How one rank saves and loads, and which state it shows apart from its pieces.

That is the states of generators, progress in the data, which the caller saves as ``extra``, and
which names are one tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from shardproof import tensor_bytes
from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.contract import Implementation
from shardproof.evidence.records import Loaded
from shardproof.ledgers import program_order
from shardproof.registry import answers
from shardproof.workloads.draws import read_draws
from shardproof.workloads.layers import seed_number

#: The process's own generator, among those of modules, which have dotted names.
PROCESS = "torch"


class Saving:
    """The saves and loads of one rank, in a case with a plan of them."""

    def __init__(self, case: Case, rank: int, device: str) -> None:
        assert case.checkpoint is not None
        self._plan, self._device = case.checkpoint, device
        self._into, self._from = Path(case.saves_into), Path(case.loads_from)
        self._awaits_fault = case.fault is not None
        saves_at = [self._plan.again_at] if case.loads_from else self._plan.saved_at
        self._saves_at = saves_at if case.saves_into else ()
        self._log = program_order.current()
        self._built: list[weakref.ref[nn.Module]] = []
        self._under_way: list[Any] = []
        # Ranks that are threads share it.
        self._has_generator = not BACKENDS[case.backend].threads
        if self._has_generator:
            # Another state on every rank, and in the run that loads.
            torch.manual_seed(seed_number(f"{case.workload.seed}/{rank}/{bool(case.loads_from)}"))

    def watch(self, module: nn.Module) -> None:
        """Look at the generators and tied tensors of what was built."""
        self._built.append(weakref.ref(module))

    def draws(self) -> dict[str, str]:
        """Generator -> digest of its state."""
        states = {name: s for module in self._modules() for name, s in read_draws(module).items()}
        if self._has_generator:
            states[PROCESS] = torch.get_rng_state()
        return {name: tensor_bytes.digest(state) for name, state in states.items()}

    def after_step(self, system: Implementation, done: int) -> None:
        """Save after ``done`` steps if the plan asks for it, without waiting for the end of the
        save.

        Where a fault is to come, the saves before are committed: there is something to load.
        """
        if done in self._saves_at:
            if self._awaits_fault:
                with self._unseen("committed"):
                    self._wait()
            extra = self._plan.extra(done)
            with self._between("save"):
                saved = answers.saved(system, system.save(self._into, extra))
            # Training goes on with its own, and what is saved is what was given.
            extra["data"]["step"] += 1
            extra["odd"].clear()
            self._under_way.append(saved)

    def wait(self) -> None:
        """Return when all that was saved is committed."""
        with self._between("save"):
            self._wait()

    def _wait(self) -> None:
        for saved in self._under_way:
            if saved is not None:
                saved.wait()
        self._under_way.clear()

    def load(self, system: Implementation) -> Loaded:
        """Load; the step to resume from is the returned progress, if that is possible."""
        before, ties = self.draws(), self._ties()
        with self._between("load"):
            extra = answers.extra(system, system.load(self._from))
        parted = [sorted(names) for names in ties - self._ties()]
        return Loaded(self._agreed(extra), extra, before, parted)

    def _agreed(self, extra: Any) -> int:
        """The earliest step that a rank would resume from: with several, ranks would wait for ever.

        One that was never saved is told by the check; training goes on where it should.
        """
        data = extra.get("data")
        step = data.get("step") if isinstance(data, dict) else None
        own = step if type(step) is int and step in self._plan.saved_at else self._plan.save_at
        earliest = torch.tensor([own], device=self._device)
        with self._unseen("progress"):
            dist.all_reduce(earliest, dist.ReduceOp.MIN)
        return int(earliest)

    def _between(self, phase: Literal["save", "load"]) -> AbstractContextManager[None]:
        return self._log.between(phase) if self._log else nullcontext()

    def _unseen(self, what: str) -> AbstractContextManager[None]:
        return self._log.observe(what) if self._log else nullcontext()

    def _modules(self) -> Iterator[nn.Module]:
        return (module for made in self._built if (module := made()) is not None)

    def _ties(self) -> set[frozenset[str]]:
        """Names of one parameter, where there are several."""
        names: dict[int, set[str]] = {}
        for module in self._modules():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), set()).add(name)
        return {frozenset(own) for own in names.values() if len(own) > 1}
