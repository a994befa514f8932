"""Bad disturbances on request: late results, poisoned buffers, ranks out of step, far nodes.

Correct programs are not affected: they look at a result only after waiting for it, and never rely
on who comes first.  Each kind makes a race show every time instead of one time in a thousand.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardproof.backends import arithmetic
from shardproof.backends.request import Request
from shardproof.case import Fault

#: The handle of a call that comes late, by its request, the group's members, the number of the own
#: rank among them and torch's work; ``None``: it does not.
Far = Callable[[Request, Sequence[int], int, Any], Any]


@dataclass(frozen=True)
class Disturbances:
    """The disturbances that every call gets.

    ``delay``: results appear only where the program waits for them (``in_memory``).  ``poison``:
    receive buffers hold NaN until then; also in place on ``in_memory``, where inputs are kept
    aside.  ``skew_s``: each rank sleeps up to this long before some of its calls, drawn from
    ``seed`` and rank.  ``fault``: what is done to one rank on purpose (``faults.py``).
    ``far``: delays what crosses nodes that are far from each other (native backends).
    """

    delay: bool = False
    poison: bool = False
    skew_s: float = 0.0
    seed: int = 0
    fault: Fault | None = None
    far: Far | None = None

    def skew(self, rank: int) -> Callable[[Request], Request] | None:
        """The ``transform`` of global ``rank`` that sleeps; ``None`` without skew."""
        if not self.skew_s:
            return None
        draw = random.Random(f"{self.seed}/{rank}")

        def sleep(request: Request) -> Request:
            if draw.random() < 0.25:
                time.sleep(draw.uniform(0.0, self.skew_s))
            return request

        return sleep


#: Traits of a workload that are about the disturbances, not about the model.
TRAITS: dict[str, Disturbances] = {
    "late_results": Disturbances(delay=True),
    "poisoned_buffers": Disturbances(delay=True, poison=True),
    "skewed_ranks": Disturbances(skew_s=0.005),
}


def disturbances_of(traits: Iterable[str], fault: Fault | None = None) -> Disturbances | None:
    """The disturbances that ``traits`` and a fault plan ask for together; ``None``: nothing."""
    asked = [TRAITS[name] for name in traits if name in TRAITS]
    if not asked and fault is None:
        return None
    return Disturbances(
        delay=any(w.delay for w in asked),
        poison=any(w.poison for w in asked),
        skew_s=max((w.skew_s for w in asked), default=0.0),
        fault=fault,
    )


def poison(request: Request, rank: int, keep_inputs: bool) -> None:
    """Fill the receive buffers of ``request`` with NaN.

    With ``keep_inputs`` the inputs are copied first, so that buffers used in place are filled too;
    without, buffers that share memory with an input are left alone.  Integers are never filled.
    """
    untouched = (request.operation == "broadcast" and request.root == rank) or (
        # all but the root's are undefined afterwards, but nobody writes them
        request.operation == "reduce" and request.root != rank
    )
    if untouched:
        return
    if keep_inputs:
        request.inputs = [[arithmetic.copy(t) for t in item] for item in request.inputs]
    taken = {t.untyped_storage().data_ptr() for item in request.inputs for t in item}
    with torch.no_grad():
        for tensor in (t for item in request.outputs for t in item):
            fillable = tensor.is_floating_point() or tensor.is_complex()
            if fillable and tensor.untyped_storage().data_ptr() not in taken:
                tensor.data.fill_(float("nan"))
