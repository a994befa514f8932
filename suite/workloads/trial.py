"""One forward and backward of a user's own model, before anything runs: can it be judged at all?

The oracle repeats in one process what many ranks do.  So a model must give the same numbers
whenever it is asked: no draws from torch's global generator, no data that move on.  What the trial
finds besides (frozen, tied or unused parameters, gradients that are zero by construction) becomes
traits of the cases and parts of their comparisons.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardproof.contract import MicroBatch
from shardproof.workloads.base import DTYPES, Found, Region, Workload
from shardproof.workloads.draws import generators
from shardproof.workloads.knobs import WorkloadError
from shardproof.workloads.layers import named_tensors

if TYPE_CHECKING:
    from shardproof.workloads.own import OwnWorkload

#: Relative to the largest element of all gradients: below, a gradient may be round-off alone.
#: Whether it is, each comparison asks again (``ZERO_FLOOR``).
_ROUND_OFF = 1e-10
#: The same in a narrower dtype, in its own steps.
_EPSILONS = 16
#: What two forwards of the same numbers may differ by.
_SAME = 1e-9
#: From here on gradients of parts of a batch add up to another one, in steps of no dtype within.
_OTHER = 1e-5


def run(family: OwnWorkload, workload: Workload) -> Found:
    """Try ``workload``; what it shows.

    :raises WorkloadError: it cannot be judged, with the reason and what to do.
    """
    _check_values(family, workload)
    first, again = (_attempt(family, workload, seed) for seed in (1, 2))
    if abs(first.loss - again.loss) > _SAME * abs(first.loss):
        raise _other_losses(family, first, again)
    module, gradients = first.module, first.gradients
    unused = {name for name, gradient in gradients.items() if gradient is None}
    if len(unused) == len(gradients):
        verb = "gets" if gradients else "requires"
        raise WorkloadError(f"{family.name}: no parameter {verb} a gradient, so nothing is trained")
    exact, widest = _widest(family, workload) or (first, workload.dtype)
    zero = _zero_regions(exact.gradients, DTYPES[widest])
    traits = tuple(_traits(module, unused, workload.units, first))
    calls = _relative(module, first.calls, unused)
    beside, completed = _beside_loss(family, workload), tuple(first.completed)
    return Found(zero, frozenset(unused), traits, calls, widest, beside, completed)


def _widest(family: OwnWorkload, workload: Workload) -> tuple[_Attempt, str] | None:
    """The attempt in the widest dtype, which shows round-off; ``None``: the model's kernels have no
    form for one that is wider than the case's.
    """
    own = DTYPES[workload.dtype].itemsize
    for name in (name for name, dtype in DTYPES.items() if dtype.itemsize > own):
        try:
            return _attempt(family, Workload(family, workload.spec, name), 1), name
        except WorkloadError:
            continue
    return None


@dataclass
class _Attempt:
    """One forward and backward: the module, its gradients, its calls, names in the order in which
    gradients were complete, and rebound buffers.
    """

    module: nn.Module
    loss: float = 0.0
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    completed: list[str] = field(default_factory=list)
    rebinds: bool = False


def _beside_loss(family: OwnWorkload, workload: Workload) -> str:
    """The gradient that two halves of the batch do not add up to though their losses do: something
    joins it that no loss contains, once a forward.  Empty: there is none, or losses depend on the
    cut as well, as those of batch norms and declared terms do.
    """
    exact, half = Workload(family, workload.spec, "float64"), workload.spec.global_batch // 2
    if not half or workload.depends_on_cut:
        return ""
    try:
        parts = (slice(None), slice(half), slice(half, None))
        whole, *halves = (_attempt(family, exact, 1, part) for part in parts)
    except WorkloadError:  # no kernels in float64, or none for such a batch
        return ""
    if abs(whole.loss - sum(one.loss for one in halves)) > _SAME * abs(whole.loss):
        return ""
    given = {name: g for name, g in whole.gradients.items() if g is not None}
    largest = max(float(g.norm()) for g in given.values())
    for name, gradient in given.items():
        added = sum(own for one in halves if (own := one.gradients[name]) is not None)
        if float((gradient - added).norm()) > _OTHER * largest:
            return name
    return ""


def _attempt(
    family: OwnWorkload, workload: Workload, seed: int, part: slice = slice(None)
) -> _Attempt:
    """Of ``part`` of the first batch, with torch's global generator at ``seed``."""
    module = workload.build_for(0)()
    workload.load(module)
    module.train()
    attempt = _Attempt(module)
    before = {name: id(buffer) for name, buffer in module.named_buffers()}
    batch = workload.whole_batch(0)
    parts = (batch.inputs, batch.targets, batch.weights, batch.sample_ids)
    micro = MicroBatch(*(own[part] for own in parts))
    inputs = tuple(micro.inputs.shape)
    with torch.random.fork_rng(devices=[]), _counted(module, attempt):
        torch.manual_seed(seed)
        with family.told(f"model(inputs), of {micro.inputs.dtype} {inputs},"):
            outputs = module(micro.inputs)
        with family.told("loss(outputs, targets)"):
            loss = family.loss(workload.params, outputs, micro)
        attempt.loss = float(loss.detach())
        if loss.requires_grad:
            with family.told("the backward"):
                loss.backward()
    attempt.rebinds = before != {name: id(buffer) for name, buffer in module.named_buffers()}
    attempt.gradients = {n: p.grad for n, p in module.named_parameters() if p.requires_grad}
    finite = all(g is None or bool(g.isfinite().all()) for g in attempt.gradients.values())
    if attempt.loss - attempt.loss != 0.0 or not finite:
        what = f"the loss of the first batch is {attempt.loss}"
        what = f"{what}, but its gradients are not finite" if attempt.loss == attempt.loss else what
        raise WorkloadError(f"{family.name}: {what} in {workload.dtype}, expected finite values")
    return attempt


@contextmanager
def _counted(module: nn.Module, attempt: _Attempt) -> Iterator[None]:
    calls, completed = attempt.calls, attempt.completed
    with ExitStack() as hooks:
        for name, part in module.named_modules():
            hook = part.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
            hooks.callback(hook.remove)
        for name, own in module.named_parameters():
            if own.requires_grad:
                add = own.register_post_accumulate_grad_hook
                hooks.callback(add(lambda _, name=name: completed.append(name)).remove)
        yield


def _check_values(family: OwnWorkload, workload: Workload) -> None:
    """The model and the first batch are the same whenever they are made."""
    models = [named_tensors(workload.model()) for _ in range(2)]
    one, two = ({name: tensor.detach() for name, tensor, _ in model} for model in models)
    for name in {*one, *two}:
        if name not in one or name not in two or not torch.equal(one[name], two[name]):
            remedy = "draw initial values from torch's global generator only"
            message = f"{family.name}: model(...) changes {name!r} from call to call: {remedy}"
            raise WorkloadError(message)
    batches = [workload.fresh_batch(0) for _ in range(2)]
    for what in ("inputs", "targets", "weights"):
        if not torch.equal(*(getattr(batch, what) for batch in batches)):
            remedy = "draw with the given generator only"
            message = f"{family.name}: batch(...) changes its {what} from call to call: {remedy}"
            raise WorkloadError(message)


def _other_losses(family: OwnWorkload, one: _Attempt, two: _Attempt) -> WorkloadError:
    parts = one.module.named_modules()
    drops = [(n, p) for n, p in parts if isinstance(p, nn.modules.dropout._DropoutNd) and p.p]
    dropouts = [f"{name} ({type(part).__name__}, p={part.p})" for name, part in drops]
    which = f": {', '.join(dropouts[:3])}" if dropouts else ""
    return WorkloadError(
        f"{family.name}: two forwards of one batch give the losses {one.loss!r} and {two.loss!r}: "
        f"the model draws from torch's global generator{which}; a split run draws other numbers: "
        "build the model with p=0, or draw from a torch.Generator in the module's own attribute "
        "`generator`"
    )


def _zero_regions(
    gradients: Mapping[str, Tensor | None], dtype: torch.dtype
) -> dict[str, list[Region]]:
    """Runs of rows whose gradient is round-off; rows of true zeros are compared as they are."""
    some = {name: g for name, g in gradients.items() if g is not None and g.numel()}
    share = max(_ROUND_OFF, _EPSILONS * torch.finfo(dtype).eps)
    limit = share * max((float(g.abs().max()) for g in some.values()), default=0.0)
    regions: dict[str, list[Region]] = {}
    for name, gradient in some.items():
        rows = gradient.reshape(len(gradient), -1) if gradient.dim() else gradient.reshape(1, 1)
        largest = rows.abs().amax(1)
        for start, stop in _runs((largest <= limit).tolist()):
            if bool(largest[start:stop].any()):
                rest = tuple((0, n) for n in gradient.shape[1:])
                region = ((start, stop), *rest) if gradient.dim() else ()
                regions.setdefault(name, []).append(region)
    return regions


def _runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` of every stretch of true ones."""
    for is_run, group in itertools.groupby(range(len(flags)), flags.__getitem__):
        if is_run:
            run = [*group]
            yield run[0], run[-1] + 1


def _traits(
    module: nn.Module, unused: set[str], units: Sequence[str], attempt: _Attempt
) -> Iterator[str]:
    """Traits that ``module`` has by itself."""
    named = dict(module.named_parameters())
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)

    def home(name: str) -> str:
        return next((unit for unit in units if name.startswith(f"{unit}.")), "")

    homes = [{*map(home, several)} for several in names.values() if len(several) > 1]
    owners = {name.rpartition(".")[0] for name in named}
    has = {
        "tied": any(len(places) == 1 for places in homes),
        "tied_over_units": any(len(places) > 1 for places in homes),
        "frozen": any(not p.requires_grad for p in named.values()),
        "unused": bool(unused),
        "module_twice": any(attempt.calls[name] > 1 for name in owners if name),
        "scalar": any(not p.dim() for p in named.values()),
        "one_element": any(p.dim() and p.numel() == 1 for p in named.values()),
        "empty": any(not p.numel() for p in named.values()),
        "non_contiguous": any(not p.is_contiguous() for p in named.values()),
        "rebound_buffer": attempt.rebinds,
        "dropout_stateful": bool(generators(module)),
    }
    return (name for name, there in has.items() if there)


def _relative(module: nn.Module, calls: Mapping[str, int], unused: set[str]) -> dict[str, int]:
    """How often one call of its parent calls a module, where that is not once."""
    relative = {}
    for name, part in module.named_modules():
        own = [f"{name}.{leaf}" for leaf, _ in part.named_parameters()]
        if not name or not own:
            continue
        above = name.rpartition(".")[0]
        while above and not calls.get(above):  # a list of modules is called by nobody
            above = above.rpartition(".")[0]
        count, around = calls.get(name, 0), max(1, calls.get(above, 1))
        if count and count != around:
            relative[name] = max(1, count // around)
        elif not count and unused.issuperset(own):
            relative[name] = 0
    return relative
