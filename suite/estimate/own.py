"""``from shardproof import estimate``: for a published model or a user's module."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardproof import registry, strategies
from shardproof.axes import dividing
from shardproof.contract import Refused, Role
from shardproof.costs import shapes
from shardproof.costs.model_facts import ITEMSIZE, ModelFacts, TensorFacts, heads_of, shape_key
from shardproof.costs.shapes import BatchSize, activations
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.estimate import figures
from shardproof.estimate.figures import Estimate
from shardproof.registry.declaration import BrokenContract, Declaration

if TYPE_CHECKING:
    from torch import nn


def strategy_of(implementation: str, options: Mapping[str, Any] | None = None) -> str:
    """The strategy of an implementation, or the name of a strategy itself, with its ``options``.

    Those of a strategy are the ones of its reference.

    :raises SelectionError: it is neither, its strategy has no formulas, or it takes no such option.
    """
    name = implementation
    if "/" in name or ":" in name:
        try:
            name = str(registry.load(implementation).strategy)
        except (registry.UnknownImplementation, registry.BrokenImplementation) as error:
            raise SelectionError(Problem(str(error), "see `shardproof list impls`")) from error
    if not strategies.of(name).is_known:
        valid = [known for known in strategies.names() if strategies.of(known).is_known]
        remedy = nearest(name, valid)
        if f"reference/{name}" in registry.names():
            remedy = f"did you mean reference/{name}?"
        if implementation in registry.names():
            remedy = f"choose a system with formulas, e.g. {strategies.REPLICATION}"
        raise SelectionError(Problem("this system has no formulas", remedy, implementation))
    asked = implementation if name != implementation else f"reference/{name}"
    if options and (name != implementation or asked in registry.names()):
        try:
            Declaration.of(registry.load(asked), options)
        except (Refused, BrokenContract) as error:
            what = f"{asked} does not take these options"
            raise SelectionError(Problem(what, str(error), str(dict(options)))) from error
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
    roles: Mapping[str, Role] | None = None,
    samples: int = 1,
    positions: int = 0,
    micro_batches: int = 1,
    recompute: str | int = activations.NONE,
    **options: Any,
) -> Estimate:
    """The bytes that training holds on the fullest rank, and sends, by the formulas of the checks.

    ``model``: a name (``shardproof estimate --models``), a number of parameters (``"7.5b"``), or a
    module.  Of a module the dtypes are as built unless an ``accounting`` is given, ``optimizer`` is
    a name or an optimizer of torch, and activations are counted where ``inputs`` (a tuple, for one
    micro-batch) are given: one forward on the device ``meta``, which computes no numbers.
    ``units`` and ``roles``: its repeated blocks, and what its layers are for, as those of
    :class:`shardproof.OwnWorkload`.

    :raises ValueError: unknown names, a mesh that does not divide, an optimizer without formulas.
    """
    given = {"impl": impl, "mesh": mesh or {}, "inputs": inputs, "units": units}
    _require_kinds(given | {"roles": roles or {}})
    has_inputs = not isinstance(inputs, tuple) or bool(inputs)
    of_module = has_inputs or bool(units or roles) or optimizer not in ("adamw", "adam")
    _require_fitting(model, recompute, of_module, (samples, positions) != (1, 0))
    if not isinstance(recompute, str):
        options["recompute_every"] = recompute
    strategy = strategy_of(impl, options)
    axes = figures.mesh_of(strategy, gpus, mesh or {})
    batch = BatchSize(samples, positions, micro_batches)
    if isinstance(model, str):
        shape, told = shapes.model(model), accounting or "A16"
        return figures.of_shape(shape, strategy, axes, told, batch, options, recompute, impl)
    # Of a compiled module the one that it was made from: autograd sees what its forward keeps.
    model = getattr(model, "_orig_mod", model)
    facts = facts_of_module(model, optimizer, axes, options, units, roles, micro_batches)
    if accounting:
        facts = shapes.in_accounting(facts, accounting, micro_batches)
    kept, notes = None, ""
    if has_inputs:
        facts, kept, notes = _counted(model, inputs, facts)
    name, told = type(model).__name__, accounting or "as built"
    found = figures.estimated(facts, name, strategy, told, kept, impl, [notes] if notes else [])
    # What stages and parts of layers send depends on the activations.
    return found if facts.inputs or not dividing(axes) else replace(found, sent=None)


def facts_of_module(
    model: nn.Module,
    optimizer: Any,
    axes: Mapping[str, int],
    options: Mapping[str, Any],
    units: tuple[str, ...] = (),
    roles: Mapping[str, Role] | None = None,
    micro_batches: int = 1,
) -> ModelFacts:
    """The facts of a module for cost models; an optimizer's state is that of torch's Adam or SGD.

    :raises SelectionError: nothing to train, or layers that the mesh cannot share.
    """
    units, roles = _described(model, units, roles)
    owners: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(tensor), []).append(name.rpartition(".")[0])
    places = {name: number for number, (name, _) in enumerate(model.named_modules())}
    starts = [places[name] for name in units]

    def told(name: str, tensor: Any) -> TensorFacts:
        dtype, own = _dtype(tensor), owners.get(id(tensor))
        own = own or [name.rpartition(".")[0]]
        # What is registered before the first block belongs to it, else to the block before it.
        homes = {max(bisect_right(starts, places[owner]) - 1, 0) for owner in own}
        shape, trains = tuple(tensor.shape), tensor.requires_grad
        return TensorFacts(name, shape, dtype, trains, tuple(own), units=tuple(sorted(homes)))

    kind, momentum = _optimizer(optimizer)
    shares = ModelFacts(axes, {}, ())
    facts = ModelFacts(
        axes=axes,
        options=dict(options),
        parameters=tuple(told(name, p) for name, p in model.named_parameters()),
        buffers=tuple(told(name, b) for name, b in model.named_buffers()),
        modules={name: type(module).__name__ for name, module in model.named_modules()},
        units=units,
        micro_batches=(micro_batches,) * shares.size("+".join(shares.data_axes) or "none"),
        optimizer=kind,
        momentum=momentum,
        roles=roles,
    )
    if facts.parts("widths") == 1:
        return facts
    if not {*roles.values()} & {"column", "row", "heads", "embedding", "classes"}:
        what = f"{type(model).__name__} has no layer that the suite can split"
        remedy = "give roles={'NAME': 'column', ...}, as those of shardproof.OwnWorkload"
        raise SelectionError(Problem(what, remedy))
    try:
        return replace(facts, heads=heads_of(model, roles))
    except AttributeError as error:
        what = f"an attention whose projection has the role heads lacks an attribute: {error}"
        remedy = "give the module head_size, and group (query heads of a KV head)"
        raise SelectionError(Problem(what, remedy)) from error


def _described(
    model: Any, units: tuple[str, ...], roles: Mapping[str, Role] | None
) -> tuple[tuple[str, ...], Mapping[str, Role]]:
    """Blocks and roles of a module, as given or found."""
    from torch import nn

    from shardproof.workloads.own import OwnWorkload

    if not isinstance(model, nn.Module):
        what, remedy = "no model", "give a name (`shardproof estimate --models`) or an nn.Module"
        raise SelectionError(Problem(what, remedy, repr(model)))
    named = dict(model.named_parameters())
    if lazy := [n for n, p in named.items() if isinstance(p, nn.UninitializedParameter)]:
        what = f"parameter {lazy[0]} has no shape yet"
        raise SelectionError(Problem(what, "call the model once to initialize its lazy layers"))
    if odd := [(n, p.dtype) for n, p in named.items() if _dtype(p) not in ITEMSIZE]:
        what = f"no formula covers parameter {odd[0][0]!r}, of {odd[0][1]}"
        raise SelectionError(Problem(what, f"convert it to one of: {', '.join(ITEMSIZE)}"))
    if not named:
        what = f"{type(model).__name__} has no parameters"
        raise SelectionError(Problem(what, "give a module that has parameters"))
    own = OwnWorkload(lambda: model, _nothing, _nothing, units=units, roles=roles)
    own.name = type(model).__name__
    try:
        return own.units(model), own.roles(model)
    except ValueError as error:
        names = ", ".join([name for name, _ in model.named_modules() if name][:8])
        raise SelectionError(
            Problem(str(error), f"name modules of the model: {names}, ...")
        ) from error


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _require_kinds(given: Mapping[str, Any]) -> None:
    """Raise for an argument of ``estimate`` that is no name, no mapping, or no sequence."""
    from torch import Tensor

    kinds: dict[str, tuple[Any, str]] = {
        "impl": (str, '"zero3"; for several call estimate again'),
        "mesh": (Mapping, '{"shard": 8}'),
        "inputs": ((tuple, list, Tensor), "(TENSOR,), in the order of forward's arguments"),
        "units": ((tuple, list), '("blocks.0", "blocks.1")'),
        "roles": (Mapping, '{"up": "column", "down": "row"}'),
    }
    for name, (kind, example) in kinds.items():
        if not isinstance(value := given[name], kind):
            what, remedy = f"{name} is of type {type(value).__name__}", f"write {name}={example}"
            raise SelectionError(Problem(what, remedy, repr(value)))


def _require_fitting(model: Any, recompute: Any, of_module: bool, of_name: bool) -> None:
    """Raise for arguments that only a module has, or only a named model."""
    what = remedy = ""
    if isinstance(recompute, str) and recompute not in (activations.NONE, activations.SELECTIVE):
        what, remedy = "unknown recompute", 'give "none", "selective" or a number of blocks'
        raise SelectionError(Problem(what, remedy, recompute))
    if isinstance(model, str) and of_module:
        what = "inputs=, units=, roles= and an optimizer belong to an nn.Module"
        remedy = 'give samples= and positions=, and accounting="S4" for SGD'
    elif not isinstance(model, str) and (of_name or recompute == activations.SELECTIVE):
        what = "samples=, positions= and selective recomputation belong to named models"
        remedy = "give inputs=(TENSOR,) of that size, or recompute=N"
    if what:
        shown = model if isinstance(model, str) else type(model).__name__
        raise SelectionError(Problem(what, remedy, shown))


def _nothing(*_: Any) -> Any:
    """The loss and the data of a model that is not trained."""


def _counted(
    model: nn.Module, inputs: Any, facts: ModelFacts
) -> tuple[ModelFacts, activations.KeptBytes | None, str]:
    """``facts`` with what travels between blocks, the activations, and why there are none."""
    from torch import Tensor

    from shardproof.estimate.counted import Forward

    if (cut := facts.parts("positions")) > 1:
        why = (
            f"activations not counted: {cut} ranks split each sample, but inputs= has whole samples"
        )
        return facts, None, f"{why} - leave that axis out to count the activations of whole samples"
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    forward = Forward(model, given, facts)
    if forward.problem:
        remedy = "correct inputs=, or give a module whose forward reads no values of tensors"
        return facts, None, f"activations not counted: {forward.problem} - {remedy}"
    if dividing(facts.axes) and isinstance(given[0], Tensor):
        shape, shares = tuple(given[0].shape), len(facts.micro_batches)
        sizes = tuple(forward.outputs[number + 1] for number in range(len(facts.units) - 1))
        window = (shape,) * facts.rounds
        facts = replace(facts, inputs=(((window,),) * shares,), hidden={shape_key(shape): sizes})
    facts = replace(facts, completed=forward.completed)
    again = int(facts.option("recompute_every", 0)) or activations.NONE
    return facts, figures.kept_of(facts, *forward.units(), again), ""


def _optimizer(given: Any) -> tuple[str, float]:
    """Name and momentum of an optimizer, as cost models tell them apart."""
    kind = given if isinstance(given, type) else type(given)
    name = given.lower() if isinstance(given, str) else kind.__name__.lower()
    chosen = getattr(given, "defaults", {})
    momentum = chosen.get("momentum", 0.0)
    known = {"adamw": "adamw", "adam": "adamw", "sgd": "sgd"}
    if name not in known or chosen.get("amsgrad"):
        remedy = "leave amsgrad out" if name in known else nearest(name, known, "optimizers")
        raise SelectionError(Problem("no formula covers this optimizer's state", remedy, name))
    return known[name], float(momentum)


def fits(found: Estimate, memory: int | None) -> str:
    """Whether the estimate fits into ``memory`` bytes, as a word."""
    return "" if memory is None else "fits" if found.total <= memory else "too large"
