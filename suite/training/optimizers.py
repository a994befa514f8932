"""An optimizer of torch as the contract's ``OptimizerSpec``.

A strategy that shards the optimizer's state gives it flat parts of parameters.  That is right for
an optimizer only if it treats every element alone.  :func:`require_element_wise` tries that: a few
steps on a small matrix, once whole and once in two flat parts, must end in the same bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from shardproof.contract import OptimizerSpec
from shardproof.errors import nearest
from shardproof.training.inputs import require_count, require_positive, require_rate

#: Arguments of ``OptimizerSpec`` that an optimizer of torch may have, by what it has them for.
_IN_SPEC = ("momentum", "betas", "eps", "weight_decay")
#: Steps of the trial: the second one uses the state that the first one made.
_STEPS = 3
#: Path -> class: a class of a script cannot be imported by its path.
_KINDS: dict[str, type[torch.optim.Optimizer]] = {}


#: The learning rate of an optimizer step, counted from 0.
Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Scheduled(OptimizerSpec):
    """A spec whose learning rate is ``schedule(step)`` times ``lr``, if there is a schedule."""

    schedule: Schedule | None = None

    def lr_at(self, step: int) -> float:
        """The learning rate of optimizer step ``step``, counted from 0.

        :raises ValueError: the schedule returns no learning rate.
        """
        if self.schedule is None:
            return super().lr_at(step)
        return self.lr * _rate(self.schedule, step)


def _rate(schedule: Schedule, step: int) -> float:
    remedy = (
        "the function gets the number of an optimizer step, from 0, and must return its learning "
        "rate, a finite number of at least 0"
    )
    return require_rate(f"lr({step})", schedule(step), remedy)


@dataclass(frozen=True)
class TorchOptimizer(Scheduled):
    """The spec of a class; ``given`` are its arguments without the learning rate."""

    given: Mapping[str, Any] = field(default_factory=dict)

    def __reduce__(self) -> Any:
        return _restored, (self.kind, {one.name: getattr(self, one.name) for one in fields(self)})

    @property
    def kind(self) -> type[torch.optim.Optimizer]:
        """The class that :func:`spec` was given."""
        return _KINDS[self.name]

    @property
    def arguments(self) -> dict[str, Any]:
        """The learning rate, and what was given."""
        return {"lr": self.lr, **self.given}


def spec(
    optimizer: str | type[torch.optim.Optimizer],
    lr: float | Schedule | None = None,
    *,
    clip: float | None = None,
    warmup: int = 0,
    **arguments: Any,
) -> OptimizerSpec:
    """The spec of ``optimizer``, a class or a name of ``torch.optim``, with torch's own defaults.

    ``lr``: a number, or a function of the optimizer step.

    :raises ValueError: no such optimizer, or an argument that it does not take.
    """
    kind = _kind(optimizer)
    defaults = {
        name: one.default
        for name, one in inspect.signature(kind).parameters.items()
        if name != "self"
    }
    if unknown := [name for name in arguments if name not in defaults]:
        takes = [name for name in defaults if name not in ("params", "foreach")]
        raise ValueError(
            f"optimizer {kind.__name__} takes no argument {unknown[0]!r}; "
            f"{nearest(unknown[0], takes, 'valid')}"
        )
    rate, schedule = _rate_and_schedule(lr, warmup, kind, defaults)
    decay = arguments.pop("weight_decay", defaults.get("weight_decay", 0.0))
    decay = 0.0 if decay is inspect.Parameter.empty else decay
    _require_numbers(rate, decay, warmup, clip)
    common: dict[str, Any] = {
        "lr": float(rate),
        "weight_decay": float(decay),
        "warmup_steps": warmup,
        "clip_norm": clip,
        **({"schedule": schedule} if schedule is not None else {}),
    }
    plain = OptimizerSpec(name=kind.__name__.lower())  # type: ignore[arg-type]
    known = all(name in _IN_SPEC for name in arguments) and kind.__module__.startswith("torch.")
    try:
        known = known and plain.kind is kind
    except ValueError:  # the contract has no word for it
        known = False
    if known:
        own = {name: defaults[name] for name in _IN_SPEC if name in defaults}
        of_contract = OptimizerSpec if schedule is None else Scheduled
        made = of_contract(name=plain.name, **{**own, **common, **arguments})
    else:
        path = f"{kind.__module__}:{kind.__qualname__}"
        made = _restored(kind, {"name": path, "given": arguments, **common})
    try:
        _trained(made, cuts=1)
    except Exception as error:
        raise ValueError(
            f"optimizer {kind.__name__} with {made.arguments} failed in a trial update: "
            f"{type(error).__name__}: {error}; change the arguments, or the optimizer"
        ) from error
    return made


def _rate_and_schedule(
    lr: Any, warmup: int, kind: type, defaults: Mapping[str, Any]
) -> tuple[Any, Schedule | None]:
    """``lr`` as a number, which is the default's if none is given, and as a function.

    :raises ValueError: there is none, or the function does not return one for step 0.
    """
    if not callable(lr):
        if lr is None and not isinstance(lr := defaults.get("lr"), float | int):
            raise ValueError(f"optimizer {kind.__name__} has no default lr: give lr=")
        return lr, None
    if warmup:
        raise ValueError(
            f"warmup = {warmup} cannot be combined with a function as lr: leave warmup out, and "
            "include the warmup in the function"
        )
    try:
        _rate(lr, 0)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"the function given as lr failed for step 0: {type(error).__name__}: {error}; give a "
            "number, or a function that takes the step and returns the rate (for a torch "
            "scheduler use wrap(...).optimizer)"
        ) from error
    return 1.0, lr  # a factor: strategies whose rate follows the number of ranks change it


def _require_numbers(lr: Any, decay: Any, warmup: Any, clip: Any) -> None:
    for name, value in (("lr", lr), ("weight_decay", decay)):
        if not isinstance(value, float | int | torch.Tensor):
            raise ValueError(f"{name} = {value!r:.60}: give a number")
    require_count("warmup", warmup, least=0)
    if clip is not None:
        require_positive("clip", clip)


def _restored(kind: type[torch.optim.Optimizer], values: Mapping[str, Any]) -> TorchOptimizer:
    """The spec with fields ``values`` of the class ``kind``, in any process."""
    _KINDS[values["name"]] = kind
    return TorchOptimizer(**values)


def arguments_of(given: OptimizerSpec) -> list[str]:
    """Names of the arguments that the optimizer of ``given`` takes, but parameters and rate."""
    names = inspect.signature(given.kind).parameters
    return [name for name in names if name not in ("params", "lr", "kwargs")]


def _kind(optimizer: str | type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        return optimizer
    known = {
        name.lower(): value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    del known["optimizer"]
    if isinstance(optimizer, str) and optimizer.lower() in known:
        return known[optimizer.lower()]
    if isinstance(optimizer, str):
        remedy = nearest(optimizer, known, "valid")
        raise ValueError(f"unknown optimizer {optimizer!r}: give a class or a name ({remedy})")
    raise ValueError(
        f"optimizer {optimizer!r:.60} is an object, expected a name or a class: the strategy "
        "creates its own optimizer. Write e.g. optimizer(torch.optim.AdamW, lr=...)"
    )


def require_element_wise(given: OptimizerSpec) -> None:
    """Raise where the optimizer does not give flat parts of a matrix the same updates as the whole.

    :raises ValueError: it looks at more than an element, or wants a closure.
    """
    if not isinstance(given, TorchOptimizer):
        return
    name = given.kind.__name__
    remedy = "choose a strategy that does not shard optimizer state, or an element-wise optimizer"
    try:
        whole, parts = (_trained(given, cuts) for cuts in (1, 2))
    except Exception as error:
        raise ValueError(
            f"optimizer {name} cannot be used with sharded state: it failed to update a part of a "
            f"parameter ({type(error).__name__}: {error}); {remedy}"
        ) from error
    if not torch.equal(whole, parts):
        raise ValueError(
            f"optimizer {name} cannot be used with sharded state: it is not element-wise (it "
            f"updates two halves of a matrix differently from the whole matrix); {remedy}"
        )


def _trained(given: OptimizerSpec, cuts: int) -> torch.Tensor:
    """A matrix after some updates of it whole, or of its flat parts."""
    generator = torch.Generator().manual_seed(0)
    matrix, *gradients = torch.randn(1 + _STEPS, 6, 4, generator=generator, dtype=torch.float64)
    held = [matrix] if cuts == 1 else [part.clone() for part in matrix.reshape(-1).chunk(cuts)]
    held = [torch.nn.Parameter(part) for part in held]
    group = {"params": held, "weight_decay": given.weight_decay}
    optimizer = given.kind([group], **given.arguments)
    for gradient in gradients:
        of_each = [gradient] if cuts == 1 else gradient.reshape(-1).chunk(cuts)
        for part, own in zip(held, of_each, strict=True):
            part.grad = own.clone()
        optimizer.step()
    return torch.cat([part.detach().reshape(-1) for part in held])
