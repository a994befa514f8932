"""Values that are right: all that the oracle computes, and every partial sum of contributions.

Right values of a case in float64 are as good as unique, so a buffer of whatever layout is made up
of right pieces if each of its elements is one of them.  Of cases whose values are small integers
(lane ``dyadic``) the same case in lane ``fp64`` is asked instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardproof.costs.expression import evaluate
from shardproof.evidence.assembled import Evidence
from shardproof.ledgers.memory import operators
from shardproof.ledgers.program_order import nested_tensors
from shardproof.locate.observed import Shown
from shardproof.oracle import training
from shardproof.oracle.training import left_fold
from shardproof.workloads import for_case

Tensors = Mapping[str, Tensor]
#: Coordinates up to which every subset of them may be a partial sum.
_MOST_SUBSETS = 4
_MOST_ELEMENTS = 1 << 21
#: How far a value is from a right one at most: relative to itself, and to the largest of its
#: tensor, in units of the last place of its dtype.
_OWN, _LARGEST = 1 << 17, 1 << 9


class Collector(TorchDispatchMode):
    """Keeps what every operator makes while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if operators.learn(func)[0] != operators.VIEW:
            changed = args[:1] if func._schema.name.endswith("_") else ()
            for tensor in nested_tensors((result, changed)):
                if tensor.is_meta or not tensor.is_floating_point():
                    continue
                if 0 < tensor.numel() <= _MOST_ELEMENTS:
                    self.made.append(tensor.detach().to(torch.float64).reshape(-1).clone())
        return result


class Known:
    """The right values of a case up to a step."""

    def __init__(self, values: Iterable[Tensor], dtype: torch.dtype) -> None:
        flat = torch.cat([*values, torch.zeros(1, dtype=torch.float64)])
        self.values = flat[flat.isfinite()].unique()
        self.unit = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0

    def explains(self, tensor: Tensor) -> Tensor:
        """Of each element of ``tensor``, flat, whether it is a right value (or no number)."""
        flat = tensor.detach().reshape(-1)
        if not flat.is_floating_point() or not flat.numel():
            return torch.ones(flat.numel(), dtype=torch.bool)
        flat = flat.to(torch.float64)
        finite = flat.isfinite()
        largest = flat[finite].abs().max() if bool(finite.any()) else torch.zeros(())
        within = flat.abs() * _OWN * self.unit + largest * _LARGEST * self.unit
        at = torch.searchsorted(self.values, flat.nan_to_num()).clamp(max=len(self.values) - 1)
        near = torch.minimum(
            (self.values[at] - flat).abs(), (self.values[(at - 1).clamp(min=0)] - flat).abs()
        )
        # Masks hold infinities; what is no number is never right.
        return flat.isinf() | (finite & (near <= within))

    def is_right(self, tensor: Tensor) -> bool:
        """Whether every element of ``tensor`` is a right value."""
        return bool(self.explains(tensor).all())


class Contributions:
    """The terms that each data coordinate adds to the gradients of one step."""

    def __init__(self, evidence: Evidence, step: int, factor: float) -> None:
        case = evidence.case
        workload, truth = for_case(case), evidence.truth
        before = truth.steps[step - 1].parameters if step else truth.initial
        own = [truth.steps[step - 1].buffers] if step else []
        #: By coordinate and micro-batch.
        self.parts: list[list[dict[str, Tensor]]] = []
        for number, batch in enumerate(evidence.shares(step)):
            buffers = own[0][number] if own and number < len(own[0]) else workload.state()
            apart = truth.steps[step - 1].apart if step else ()
            held = apart[number].parameters if number < len(apart) else before
            state = {**workload.state(), **buffers, **held}
            scaled = _scaled(batch, factor)
            self.parts.append(training.parts(workload, case.precision, state, scaled))

    def of(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """The name in words, and the value, of every sum of parts of the gradient of ``name``."""
        for words, tensors in self._sums:
            if name in tensors:
                yield words, tensors[name]

    def named(self, shown: Shown) -> str:
        """The sum that the wrong elements of ``shown`` are instead; empty: none of these."""
        off = shown.wrong
        held = shown.held.reshape(-1).to(torch.float64)[off]
        if not bool(held.abs().max() > 0):
            return "zeros"
        for words, whole in self.of(shown.name):
            expected = shown.piece_of(whole).reshape(-1).to(torch.float64)[off]
            if torch.allclose(held, expected, rtol=1e-9, atol=1e-14):
                return words
        return ""

    def all(self) -> Iterator[Tensor]:
        """Every such tensor."""
        return (tensor for _, tensors in self._sums for tensor in tensors.values())

    @cached_property
    def _sums(self) -> list[tuple[str, Tensors]]:
        found: list[tuple[str, Tensors]] = []
        coordinates = range(len(self.parts))
        subsets: list[tuple[int, ...]] = [(c,) for c in coordinates]
        if len(coordinates) <= _MOST_SUBSETS:
            sizes = range(2, len(coordinates) + 1)
            subsets += [s for n in sizes for s in itertools.combinations(coordinates, n)]
        else:
            starts = itertools.combinations(range(len(coordinates) + 1), 2)
            subsets += [tuple(range(a, b)) for a, b in starts if b - a > 1]
        depth = max(map(len, self.parts), default=0)
        for subset in subsets:
            who = f"data coordinate{'s' * (len(subset) > 1)} {', '.join(map(str, subset))}"
            rounds = [
                left_fold([self.parts[c][m] for c in subset if m < len(self.parts[c])])
                for m in range(depth)
            ]
            for m, one in enumerate(rounds):
                found.append((f"the gradient of micro-batch {m} of {who}", one))
                if m:
                    found.append(
                        (
                            f"the gradient of {who}, up to micro-batch {m}",
                            left_fold(rounds[: m + 1]),
                        )
                    )
        return found


def _scaled(batch: Any, factor: float) -> Any:
    from dataclasses import replace

    windows = tuple(
        tuple(replace(micro, weights=micro.weights * factor) for micro in window)
        for window in batch.windows
    )
    return replace(batch, windows=windows)


def factors(evidence: Evidence) -> list[float]:
    """The numbers that losses of the case are multiplied by on the way to the optimizer."""
    declared = evidence.declaration.loss_factor
    own = {1.0, float(evaluate(declared, evidence.facts))}
    scales = {step.scale for step in evidence.truth.steps}
    trains_alone = (
        {float(evidence.case.data_coordinates)} if evidence.declaration.trains_alone else set()
    )
    return sorted({a * b for a in own | trains_alone for b in scales | {1.0}})


def collect(
    evidence: Evidence, train: Callable[[], Any], last: int
) -> tuple[Known, list[Contributions]]:
    """The values that are right up to step ``last``, and the contributions of each step.

    ``train`` trains the oracle.
    """
    collector = Collector()
    contributions: list[Contributions] = []
    with collector:
        train()
        for step in range(last + 1):
            for factor in factors(evidence):
                made = Contributions(evidence, step, factor)
                if factor == 1.0:
                    contributions.append(made)
                collector.made += [t.reshape(-1).to(torch.float64) for t in made.all()]
    state = for_case(evidence.case).state().values()
    given = [t.detach().reshape(-1).to(torch.float64) for t in state if t.is_floating_point()]
    truth = evidence.truth
    steps = [each for step in truth.steps for each in (step, *step.apart)]
    kept = [
        t
        for s in steps
        for tensors in (s.parameters, s.optimizer, s.gradients)
        for t in tensors.values()
    ]
    given += [t.detach().reshape(-1).to(torch.float64) for t in kept]
    dtype = getattr(torch, evidence.case.lowest_dtype)
    return Known([*collector.made, *given], dtype), contributions
