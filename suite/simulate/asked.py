"""Check a request for a simulation: the system, its mesh, and the model that it trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from shardproof import axes, registry
from shardproof.contract import Implementation, OptimizerSpec, Options, Refused
from shardproof.costs import shapes
from shardproof.costs.shapes import Shape
from shardproof.errors import Problem, SelectionError
from shardproof.registry.declaration import BrokenContract, Declaration, missing_package
from shardproof.simulate.own import OwnModel, OwnSource, refusal
from shardproof.simulate.sources import ShapeSource

#: Ranks of the largest mesh: the groups of every axis are made for all ranks.
MOST_RANKS = 65_536


def source(
    trained: Shape | OwnModel,
    impl: str,
    mesh: Mapping[str, Any],
    accounting: str,
    options: Mapping[str, Any],
) -> ShapeSource | OwnSource:
    """The training of ``trained`` by ``impl``.

    :raises SelectionError: a name is unknown, or the implementation does not take it.
    """
    about = accounting_of(accounting)
    chosen = dict(options)
    if policy := {name: about[name] for name in ("parameters", "reduce") if name in about}:
        chosen["precision"] = policy
    system = system_of(impl, chosen)
    kind: Any = OwnSource if isinstance(trained, OwnModel) else ShapeSource
    made: ShapeSource | OwnSource = kind(
        trained,
        impl,
        mesh_of(impl, system, chosen, mesh),
        # Momentum 0, as the accountings count it: SGD then keeps no state.
        OptimizerSpec(about.get("optimizer", "adamw"), momentum=0.0),
        chosen,
        dtype=getattr(torch, about["built"]),
    )
    return made


def accounting_of(name: str) -> Mapping[str, Any]:
    """The accounting ``name``.

    :raises SelectionError: it is unknown, or trains nothing.
    """
    about: Mapping[str, Any] = shapes.known(name, shapes.accountings(), "accounting")
    if not about.get("trains", True):
        remedy = "choose A32, A16, M18, B8 or S4"
        raise SelectionError(Problem("this accounting trains nothing", remedy, name))
    return about


def round_off(shape: Shape) -> Shape:
    """``shape`` in a form that can run: a round model without the elements that pad it.

    :raises SelectionError: the shape is only a number of parameters.
    """
    if not shape.layers:
        what = "a model size without layers cannot be simulated"
        remedy = "name a model of `shardproof estimate --models`"
        raise SelectionError(Problem(what, remedy, shape.name))
    return replace(shape, parameters=0, rounded=False) if shape.rounded else shape


def system_of(impl: str, options: Options) -> type[Implementation]:
    """The class of ``impl``.

    :raises SelectionError: it cannot be loaded here, takes other options, or trains no model.
    """
    try:
        system = registry.load(impl)
        declared = Declaration.of(system, options)
    except registry.BrokenImplementation as error:
        raise SelectionError(Problem(str(error), "see `shardproof list impls`")) from error
    except (Refused, BrokenContract) as error:
        what = f"{impl} does not take these options"
        raise SelectionError(Problem(what, str(error), str(dict(options)))) from error
    if declared.not_trained:
        what, _, remedy = declared.not_trained.partition(": ")
        raise SelectionError(Problem(f"{impl} {what}", remedy))
    if "values" in declared.needs:
        what = f"{impl} needs the values of tensors, and simulated tensors have none"
        raise SelectionError(Problem(what, "simulate another implementation", impl))
    if missing := declared.lacks or missing_package(declared.packages):
        raise SelectionError(Problem(f"{impl} cannot be simulated here", missing, impl))
    return system


def mesh_of(
    impl: str, system: type[Implementation], options: Options, given: Mapping[str, Any]
) -> dict[str, int]:
    """The mesh, the outermost axis first.

    :raises SelectionError: the implementation lacks an axis, or a size is no number of ranks.
    """
    own = [axis for axis in axes.names() if axis in system.capabilities(options).axes]
    if not given:
        what, example = "--mesh is missing", (own or axes.names())[0]
        raise SelectionError(Problem(what, f"write the size of each axis: --mesh {example}=8"))
    for name, size in given.items():
        if name not in own:
            remedy = f"its axes: {', '.join(own)}"
            raise SelectionError(Problem(f"{impl} has no axis {name}", remedy, f"{name}={size}"))
        if type(size) is not int or size < 1:
            what = f"axis {name} needs a number of ranks"
            raise SelectionError(Problem(what, f"write {name}=2", str(size)))
    world, most = math.prod(given.values()), system.capabilities(options).max_world
    if world > (limit := MOST_RANKS if most is None else most):
        what = f"the mesh has {world:,} ranks, more than {impl} can have here"
        raise SelectionError(Problem(what, f"give up to {limit:,} ranks", str(world)))
    return {name: given[name] for name in own if name in given}


def refused(impl: str, error: Exception) -> Problem:
    """Why ``impl`` does not run on tensors without values: the operator and the line."""
    if isinstance(error, Refused):
        return Problem(f"{impl} refuses this training", "change the setting it names", str(error))
    return refusal(impl, error, "simulate another implementation, or other options of it")
