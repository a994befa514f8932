"""``from shardproof import estimate``: of a model by name, or of a module of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardproof import registry, strategies
from shardproof.costs.model_facts import ModelFacts, TensorFacts
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.estimate import activations, figures, shapes
from shardproof.estimate.figures import Estimate
from shardproof.estimate.shapes import Batch

if TYPE_CHECKING:
    from torch import nn


def strategy_of(implementation: str) -> str:
    """The strategy of an implementation, or the name of a strategy itself.

    :raises SelectionError: it is neither, or its strategy has no formulas.
    """
    name = implementation
    if "/" in name or ":" in name:
        try:
            name = str(registry.load(implementation).strategy)
        except (registry.UnknownImplementation, registry.BrokenImplementation) as error:
            raise SelectionError(Problem(str(error), "see `shardproof list impls`")) from error
    if not strategies.of(name).is_known:
        valid = [*strategies.names(), *registry.names()]
        raise SelectionError(Problem("no formulas are known", nearest(name, valid), implementation))
    return name


def estimate(
    model: str | nn.Module,
    optimizer: Any = "adamw",
    *,
    impl: str = strategies.REPLICATION,
    gpus: int | None = None,
    mesh: Mapping[str, int] | None = None,
    accounting: str = "",
    inputs: tuple[Any, ...] = (),
    units: tuple[str, ...] = (),
    samples: int = 1,
    positions: int = 0,
    micro_batches: int = 1,
    recompute: str | int = activations.NONE,
    **options: Any,
) -> Estimate:
    """What training holds on the fullest rank, and sends, by the formulas of the checks.

    ``model``: a name (``shardproof estimate --models``), a number of parameters (``"7.5b"``), or a
    module.  Of a module the dtypes are as built unless an ``accounting`` is given, ``optimizer`` is
    a name or an optimizer of torch, and activations are counted where ``inputs`` (a tuple, for one
    micro-batch) are given: one forward on the device ``meta``, which computes no numbers.
    ``units``: names of its repeated blocks (default: the children of its longest ``ModuleList``).

    :raises ValueError: unknown names, a mesh that does not divide, an optimizer without formulas.
    """
    strategy = strategy_of(impl)
    axes = figures.mesh_of(strategy, gpus, mesh or {})
    if isinstance(model, str):
        batch = Batch(samples, positions, micro_batches)
        shape, given = shapes.model(model), accounting or "A16"
        return figures.of_shape(shape, strategy, axes, given, batch, options, recompute, impl)
    if isinstance(recompute, int):
        options["recompute_every"] = recompute
    facts = facts_of_module(model, optimizer, axes, options, units)
    if accounting:
        facts = shapes.in_accounting(facts, accounting, micro_batches)
    kept: int | None = None
    notes: tuple[str, ...] = ()
    if inputs:
        kept, why_not = counted(model, inputs, facts)
        notes = (f"activations not counted: {why_not}",) if why_not else ()
    name = type(model).__name__
    return figures.estimated(facts, name, strategy, accounting or "as built", kept, impl, notes)


def facts_of_module(
    model: nn.Module,
    optimizer: Any,
    axes: Mapping[str, int],
    options: Mapping[str, Any],
    units: tuple[str, ...] = (),
) -> ModelFacts:
    """What cost models know of a module; an optimizer's state is that of torch's Adam or SGD."""
    owners: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(tensor), []).append(name.rpartition(".")[0])

    def told(name: str, tensor: Any) -> TensorFacts:
        dtype, own = str(tensor.dtype).removeprefix("torch."), owners.get(id(tensor), ())
        return TensorFacts(name, tuple(tensor.shape), dtype, tensor.requires_grad, tuple(own))

    kind, momentum = _optimizer(optimizer)
    shares = ModelFacts(axes, {}, ())
    return ModelFacts(
        axes=axes,
        options=dict(options),
        parameters=tuple(told(name, p) for name, p in model.named_parameters()),
        buffers=tuple(told(name, b) for name, b in model.named_buffers()),
        modules={name: type(module).__name__ for name, module in model.named_modules()},
        units=units or _blocks(model),
        micro_batches=(1,) * shares.size("+".join(shares.data_axes) or "none"),
        optimizer=kind,
        momentum=momentum,
    )


def _optimizer(given: Any) -> tuple[str, float]:
    """Name and momentum of an optimizer, as cost models tell them apart."""
    name = given.lower() if isinstance(given, str) else type(given).__name__.lower()
    momentum = 0.0 if isinstance(given, str) else given.defaults.get("momentum", 0.0)
    known = {"adamw": "adamw", "adam": "adamw", "sgd": "sgd"}
    if name not in known or (hasattr(given, "defaults") and given.defaults.get("amsgrad")):
        remedy = nearest(name, known, "optimizers")
        raise SelectionError(Problem("no formula covers this optimizer's state", remedy, name))
    return known[name], float(momentum)


def _blocks(model: nn.Module) -> tuple[str, ...]:
    from torch import nn

    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        return ()
    name, longest = max(lists, key=lambda found: len(found[1]))
    return tuple(f"{name}.{child}" for child, _ in longest.named_children())


def counted(model: nn.Module, inputs: tuple[Any, ...], facts: ModelFacts) -> tuple[int | None, str]:
    """Bytes that backward needs of one forward, or why they could not be counted."""
    import torch
    from torch.func import functional_call

    kept: dict[int, Any] = {}

    def moved(tensor: Any, dtype: str | None = None) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        kind = getattr(torch, dtype) if dtype and tensor.is_floating_point() else tensor.dtype
        return torch.empty_like(tensor, device="meta", dtype=kind).requires_grad_(
            tensor.requires_grad
        )

    def note(tensor: Any) -> Any:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    state = {
        name: moved(p, facts.compute(str(p.dtype).removeprefix("torch.")))
        for name, p in model.named_parameters()
    }
    state |= {name: moved(b) for name, b in model.named_buffers()}
    # Inputs in the dtype that the model is built in are computed with like its parameters.
    built = next((p.dtype for p in model.parameters()), None)
    compute = None if built is None else facts.compute(str(built).removeprefix("torch."))
    given = [moved(x, compute if getattr(x, "dtype", None) == built else None) for x in inputs]
    own = {
        tensor.untyped_storage()._cdata
        for tensor in (*state.values(), *given)
        if isinstance(tensor, torch.Tensor)
    }
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            result = functional_call(model, state, tuple(given))
    except Exception as error:  # noqa: BLE001 - the model is the user's
        return None, f"its forward on the device meta raised {type(error).__name__}: {error}"
    del result
    return sum(storage.nbytes() for key, storage in kept.items() if key not in own), ""


def fits(found: Estimate, memory: int | None) -> str:
    """Whether the estimate fits into ``memory`` bytes, as a word."""
    return "" if memory is None else "fits" if found.total <= memory else "too large"
