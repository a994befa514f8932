"""The oracle: the same training in one process, in plain torch.

It accumulates over the same (data coordinate, micro-batch) pieces at the same shapes: inside a
coordinate in the order of its micro-batches, then a left fold over coordinates in rank order.  That
order is what makes bitwise comparison possible at all.

Buffers follow the declared rule:

* ``rank0``: every coordinate starts each step from coordinate 0's buffers (a broadcast at the start
  of the step, as DDP does it);
* ``per_rank``: every coordinate keeps its own;
* ``synced``: batch statistics are those of all coordinates' micro-batches of the same index, which
  run as one (SyncBatchNorm); the coordinates must have equally many.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from suite.case import Case
from suite.contract import Batch, BufferRule, MicroBatch, OptimizerSpec
from suite.launch import pack
from suite.mantissa import budget
from suite.optimizers import build_optimizer, read_slots, set_learning_rate
from suite.workloads import Workload, make
from suite.workloads.draws import read_draws, restore_draws

Tensors = dict[str, Tensor]
#: From a step's number and its gradients per coordinate, in order, to the gradient that is applied.
Fold = Callable[[int, Sequence[Tensors]], Tensors]


def train(
    workload: Workload,
    optimizer: OptimizerSpec,
    coordinates: int,
    steps: int,
    buffers_rule: BufferRule = "rank0",
    *,
    forced: Sequence[Tensors] = (),
    fold: Fold | None = None,
) -> dict[str, Any]:
    """Train ``steps`` steps over ``coordinates`` data coordinates and record everything.

    Returns ``{"initial": {parameter: tensor}, "initial_buffers": {buffer: tensor}, "steps": []}``;
    a step holds

    * ``loss`` (float, the sum), ``losses`` (float per coordinate);
    * ``gradients`` before clipping and ``norm``, their global L2 norm as
      ``torch.nn.utils.clip_grad_norm_(foreach=False)`` computes it: the norm of the tensors' norms,
      in their dtype; ``clipped``: the gradients times ``min(1, clip / (norm + 1e-6))`` or ``None``;
    * ``parameters`` and ``optimizer`` (``"<parameter>.<slot>"``) after the update;
    * ``buffers``: per coordinate, after its last micro-batch.

    With ``forced`` (teacher forcing) step ``s`` leaves the parameters ``forced[s]`` behind instead
    of its own.  ``fold(step, parts)`` replaces the sum over coordinates: the oracle of a system
    that loses precision in a declared manner (``Implementation.emulator``).

    A parameter that no coordinate used has no gradient and is not updated; one that only some used
    counts as 0 for the others.

    Raises:
        ValueError: ``synced`` with unequal numbers of micro-batches or with a stateful dropout.
    """
    build = workload.build_for(0)
    module = build()
    workload.load(module)
    module.train()
    parameters = dict(module.named_parameters())
    named = {name: p for name, p in parameters.items() if p.requires_grad}
    torch_optimizer = build_optimizer(optimizer, named)
    buffers = [_buffers(module) for _ in range(coordinates)]
    draws = [read_draws(module)] * coordinates
    if draws[0]:
        draws = [read_draws(workload.build_for(0, c)("meta")) for c in range(coordinates)]
    if buffers_rule == "synced" and draws[0]:
        raise ValueError("synced buffers join coordinates, whose dropouts draw apart")
    record: dict[str, Any] = {
        "initial": _copies(parameters),
        "initial_buffers": buffers[0],
        "steps": [],
    }
    for step in range(steps):
        batches = workload.batch(step, coordinates)
        if buffers_rule == "synced":
            pieces = [_joint(module, build.loss, batches, buffers)]
        else:
            if buffers_rule == "rank0":
                buffers = [buffers[0]] * coordinates
            pieces = []
            for coordinate, batch in enumerate(batches):
                _restore(module, buffers[coordinate])
                restore_draws(module, draws[coordinate])
                pieces.append(_accumulate(module, named, build.loss, batch))
                buffers[coordinate] = _buffers(module)
                draws[coordinate] = read_draws(module)
        losses = [loss for piece in pieces for loss in piece[0]]
        parts = [piece[1] for piece in pieces]
        for name, gradient in (fold(step, parts) if fold else left_fold(parts)).items():
            named[name].grad = gradient
        record["steps"].append(
            {"loss": sum(losses), "losses": losses}
            | _update(torch_optimizer, optimizer, step, parameters, named)
            | {"buffers": list(buffers)}
        )
        if forced:
            _force(parameters, forced[step])
    return record


def _accumulate(
    module: nn.Module, named: dict[str, nn.Parameter], loss_of: Any, batch: Batch
) -> tuple[list[float], Tensors]:
    """Loss and gradients of one coordinate; used parameters only; ``.grad`` is left cleared."""
    total = 0.0
    for micro in batch.micro_batches:
        loss = loss_of(module(micro.inputs), micro)
        loss.backward()
        total += float(loss.detach())
    gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
    for p in named.values():
        p.grad = None
    return [total], gradients


def _force(parameters: dict[str, nn.Parameter], values: Tensors) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])


def left_fold(parts: Sequence[Tensors]) -> Tensors:
    """Left fold in rank order; a part without a tensor that another has adds zeros."""
    names = dict.fromkeys(name for part in parts for name in part)
    total: Tensors = {}
    for name in names:
        like = next(part[name] for part in parts if name in part)
        value = None
        for part in parts:
            term = part[name] if name in part else torch.zeros_like(like)
            value = term if value is None else value + term
        assert value is not None
        total[name] = value
    return total


def _update(
    torch_optimizer: torch.optim.Optimizer,
    spec: OptimizerSpec,
    step: int,
    parameters: dict[str, nn.Parameter],
    named: dict[str, nn.Parameter],
) -> dict[str, Any]:
    """Norm, clip and update from ``.grad``; clears the gradients; the observations of the step."""
    gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    clipped = None
    if spec.clip_norm is None:
        norm = torch.nn.utils.get_total_norm(list(gradients.values()), foreach=False)
    else:
        norm = torch.nn.utils.clip_grad_norm_(named.values(), spec.clip_norm, foreach=False)
        clipped = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    set_learning_rate(torch_optimizer, spec, step)
    torch_optimizer.step()
    torch_optimizer.zero_grad(set_to_none=True)
    return {
        "norm": norm.detach().clone(),
        "gradients": gradients,
        "clipped": clipped,
        "parameters": _copies(parameters),
        "optimizer": {
            name: slot.clone() for name, slot in read_slots(torch_optimizer, named).items()
        },
    }


def _joint(
    module: nn.Module, loss_of: Any, batches: Sequence[Batch], buffers: list[Tensors]
) -> tuple[list[float], Tensors]:
    """The ``synced`` rule: micro-batches of equal index run as one; updates ``buffers``."""
    counts = [len(batch.micro_batches) for batch in batches]
    if len(set(counts)) > 1:
        raise ValueError(f"synced buffers need equal numbers of micro-batches, not {counts}")
    losses = [0.0] * len(batches)
    for parts in zip(*(batch.micro_batches for batch in batches), strict=True):
        outputs = module(torch.cat([micro.inputs for micro in parts]))
        shares = outputs.split([len(micro.inputs) for micro in parts])
        terms = [loss_of(out, micro) for out, micro in zip(shares, parts, strict=True)]
        torch.stack(terms).sum().backward()
        losses = [a + float(term.detach()) for a, term in zip(losses, terms, strict=True)]
    buffers[:] = [_buffers(module)] * len(batches)
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return losses, gradients


def evaluate(workload: Workload, state: Tensors, micro_batches: Sequence[MicroBatch]) -> float:
    """Loss of ``micro_batches`` in evaluation mode with ``state`` (parameters and buffers)."""
    build = workload.build_for(0)
    module = build()
    workload.load(module, state)
    module.eval()
    with torch.no_grad():
        return sum(float(build.loss(module(micro.inputs), micro)) for micro in micro_batches)


def _copies(tensors: dict[str, Any]) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _buffers(module: nn.Module) -> Tensors:
    return _copies(dict(module.named_buffers()))


def _restore(module: nn.Module, buffers: Tensors) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])


# ---------------------------------------------------------------------------------------- cache


def load_or_train(case: Case, buffers_rule: BufferRule, cache_dir: Path) -> dict[str, Any]:
    """The oracle of ``case``, from ``cache_dir`` if it is there, else trained and put there.

    A file is valid for one version of this code, of torch and of the processor's instruction set.
    It appears by an atomic rename, so that many processes may share the folder; an unreadable file
    is trained anew.
    """
    path = cache_dir / f"{_cache_key(case, buffers_rule)}.oracle"
    if path.is_file():
        try:
            return pack.load(path)
        except (OSError, pack.PackError):
            path.unlink(missing_ok=True)
    workload = make(case.workload, case.dtype, case.lane)
    record = train(workload, case.optimizer, case.data_coordinates, case.steps, buffers_rule)
    if case.lane == "dyadic":
        exact = make(case.workload, "float64", case.lane)
        record["budget"] = budget(exact, case.optimizer, case.steps).to_dict()
    cache_dir.mkdir(parents=True, exist_ok=True)
    pack.dump(path, record)
    return record


def _cache_key(case: Case, buffers_rule: BufferRule) -> str:
    return hashlib.sha256(f"{case.oracle_key(buffers_rule)} {_code()}".encode()).hexdigest()[:32]


@lru_cache(maxsize=1)
def _code() -> str:
    """Digest of what the numbers depend on besides the case."""
    here = Path(__file__).parent
    files = [here / name for name in ("oracle.py", "optimizers.py", "mantissa.py")]
    files += sorted((here / "workloads").glob("*.py"))
    digest = hashlib.sha256(
        f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}".encode()
    )
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
