"""``shardproof simulate``: what a rank of a large world holds and sends, by running its code."""

from __future__ import annotations

import math
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardproof import axes
from shardproof.commands import assigned
from shardproof.commands.console import echo, is_json, make_console
from shardproof.errors import Problem, SelectionError, nearest

if TYPE_CHECKING:
    from shardproof.contract import Implementation, Options
    from shardproof.costs.shapes import BatchSize, Shape
    from shardproof.simulate.rank import SimulatedRank
    from shardproof.simulate.sources import ShapeSource

_SEE_MODELS = "name a model of `shardproof estimate --models`"
#: Forms of attention: the scores are computed again in backward, or kept.
_FORMS = ("flash", "math")
#: Ranks of the largest mesh: a group of each axis is made for all of its ranks.
_MOST_RANKS = 65_536


def simulate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="a name of `shardproof estimate --models`")
    ] = "",
    impl: Annotated[
        str, typer.Option("--impl", metavar="NAME", help="implementation (default: reference/fsdp)")
    ] = "",
    mesh: Annotated[
        str, typer.Option("--mesh", metavar="A=N,...", help="size of each axis, e.g. shard=64")
    ] = "",
    accounting: Annotated[
        str,
        typer.Option(
            "--accounting", metavar="ID", help="precision and optimizer: A32, A16, M18, B8 or S4"
        ),
    ] = "A32",
    batch: Annotated[int, typer.Option("--batch", min=1, help="samples in a micro-batch")] = 1,
    seq: Annotated[
        int, typer.Option("--seq", min=0, help="sequence length in tokens (0: the model's own)")
    ] = 0,
    micro_batches: Annotated[
        int, typer.Option("--micro-batches", min=1, help="micro-batches of each rank in a step")
    ] = 1,
    layers: Annotated[
        int, typer.Option("--layers", min=0, help="number of layers (0: the model's own)")
    ] = 0,
    attention: Annotated[
        str,
        typer.Option(
            "--attention", metavar="FORM", help="flash, or math, which keeps the matrix of scores"
        ),
    ] = "",
    recompute: Annotated[
        int, typer.Option("--recompute", min=0, help="recompute every N layers (0: none)")
    ] = 0,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="K=V", help="set an option of --impl: schedule=1f1b"),
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="show this rank, not the fullest one")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against", metavar="RUN", help="simulate the cases of this run, and compare each"
        ),
    ] = None,
) -> None:
    """Run the real code of one rank of a large world, on tensors without values.

    \b
    shardproof simulate llama-7b --impl reference/fsdp --mesh shard=64
    shardproof simulate llama-7b --impl pytorch/fsdp2 --mesh shard=64 --accounting A16
    shardproof simulate gpt2 --impl reference/pipeline --mesh pipe=4 --micro-batches 8 --rank 3
    shardproof simulate gpt3-175b --impl reference/hybrid --mesh shard=8,tensor=8 --layers 12
    shardproof simulate --against results/RUN

    The ledgers of memory and traffic count what the rank allocates and sends, to the byte; a GB is
    10^9 bytes. Two steps are run, and the second is shown: the first creates the optimizer state.
    The ranks at the ends of each axis are simulated, and the fullest is shown; --json has all of
    them. `shardproof estimate` computes bytes from formulas instead (docs/simulate.md).

    --against compares the bytes and calls of each rank of a stored run with those of the same rank
    simulated. Exit code 1: one differs; 3: no case can be compared.
    """
    if against is not None:
        if model or mesh:
            what = "--against simulates the cases of a run, so a model and a mesh have no effect"
            given = model or f"--mesh {mesh}"
            raise SelectionError(Problem(what, "leave both out, or leave --against out", given))
        from shardproof.simulate.compared import compare_run

        raise typer.Exit(compare_run(against))
    from shardproof.costs import shapes

    impl = impl or shapes.USUAL
    source = _source(model, impl, mesh, accounting, layers, attention, recompute, option or ())
    source = replace(source, work=_work(source.shape, batch, seq, micro_batches))
    world = math.prod(source.axes.values())
    if rank is not None and rank >= world:
        what = f"--rank is outside of the mesh, which has {world:,} ranks"
        raise SelectionError(Problem(what, f"give 0 to {world - 1:,}", str(rank)))
    _require_shared(source, accounting)

    from shardproof.simulate import figures

    ranks = figures.looked_at(source.axes)
    if rank is not None:
        # What a stage receives its neighbours tell; other ranks need nobody.
        stages = axes.parts(source.axes, "layers")
        ranks = sorted({*ranks, rank}) if stages > 1 else [rank]
    made = _simulated(source, ranks)
    if rank is not None:
        made = [one for one in made if one.rank == rank]
    found = [figures.figures(one, source.axes) for one in made]
    console = make_console()
    if is_json():
        for table in figures.exact_tables(found):
            console.print(table)
        return
    most = max(found, key=lambda each: each.peak)
    shown = " x ".join(f"{axis} {size:,}" for axis, size in source.axes.items())
    title = f"{source.shape.name} on {shown}, {impl}: rank {most.rank:,}"
    console.print(figures.memory_table(title, most, _notes(source, found, accounting)))
    console.print(figures.held_table(most))
    console.print(figures.traffic_table(most))


def _notes(source: ShapeSource, found: Sequence[Any], accounting: str) -> list[str]:
    """The notes below the first table: the model, the precision, the simulated ranks."""
    from shardproof.costs import shapes

    shape = source.shape
    count = sum(t.numel for t in shapes.tensors(shape, ""))
    tokens = source.work.samples * (source.work.positions or shape.seq)
    notes = [
        f"{count:,} parameters in {shape.layers} layers, {tokens:,} positions a micro-batch",
        f"{accounting}: {shapes.accountings()[accounting]['says']}",
        "each class at its own highest moment; at one moment: what the rank needs",
    ]
    if shape.dropout:
        notes.append("dropout is left out: its masks are not counted")
    if len(found) > 1:
        least = min(found, key=lambda each: each.peak)
        most = max(found, key=lambda each: each.peak)
        other = f"rank {least.rank:,} needs least, {least.peak / 1e9:,.3f} GB"
        told = other if least.peak < most.peak else "all need as much"
        notes.append(f"of {len(found)} simulated ranks {told}; --rank N shows another")
    return notes


# -------------------------------------------------------------------------------- what is asked


def _source(
    model: str,
    impl: str,
    mesh: str,
    accounting: str,
    layers: int,
    attention: str,
    recompute: int,
    option: Sequence[str],
) -> ShapeSource:
    """The training that the words of the command line name.

    :raises SelectionError: one of them is unknown, or the implementation does not take it.
    """
    if not model:
        raise SelectionError(Problem("MODEL is missing", _SEE_MODELS))
    given = assigned.mesh(mesh)
    options = assigned.assigned(option, "--option", "schedule=1f1b")

    from shardproof.contract import OptimizerSpec
    from shardproof.costs import shapes
    from shardproof.simulate.sources import ShapeSource

    about = shapes.known(accounting, shapes.accountings(), "accounting")
    if not about.get("trains", True):
        remedy = "choose A32, A16, M18, B8 or S4"
        raise SelectionError(Problem("this accounting trains nothing", remedy, accounting))
    shape = _shape(shapes.model(model), layers, attention)
    if recompute:
        options["recompute_every"] = recompute
    if policy := {name: about[name] for name in ("parameters", "reduce") if name in about}:
        options["precision"] = policy
    system = _system(impl, options)
    import torch

    return ShapeSource(
        shape=shape,
        implementation=impl,
        axes=_mesh(impl, system, options, given),
        # Momentum 0, as the accountings count it: SGD then keeps no state.
        optimizer=OptimizerSpec(about.get("optimizer", "adamw"), momentum=0.0),
        options=options,
        dtype=getattr(torch, about["built"]),
    )


def _shape(shape: Shape, layers: int, attention: str) -> Shape:
    """``shape`` with so many layers and that form of attention, where they are given.

    A round model is taken without the elements that fill it up to its name: no layer uses them.
    """
    if not shape.layers:
        what = "a number of parameters has no layers that could run"
        raise SelectionError(Problem(what, _SEE_MODELS, shape.name))
    if attention and attention not in _FORMS:
        what = "unknown form of attention"
        raise SelectionError(Problem(what, nearest(attention, _FORMS, "forms"), attention))
    if layers or shape.rounded:
        name = f"{shape.name} with {layers} layers" if layers else shape.name
        shape = replace(shape, name=name, parameters=0, rounded=False)
    return replace(shape, layers=layers or shape.layers, attention=attention or shape.attention)


def _work(shape: Shape, batch: int, seq: int, micro_batches: int) -> BatchSize:
    """The work of a step.

    :raises SelectionError: the model has fewer positions.
    """
    from shardproof.costs.shapes import BatchSize

    if shape.positions and seq > shape.positions:
        what = f"{shape.name} has {shape.positions:,} learned positions, fewer than --seq"
        raise SelectionError(Problem(what, f"give up to {shape.positions}", str(seq)))
    return BatchSize(batch, seq, micro_batches)


def _system(impl: str, options: Options) -> type[Implementation]:
    """The class of ``impl``.

    :raises SelectionError: it cannot be loaded here, takes other options, or trains no model.
    """
    from shardproof import registry
    from shardproof.contract import Refused
    from shardproof.registry.declaration import BrokenContract, Declaration, missing_package

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


def _mesh(
    impl: str, system: type[Implementation], options: Options, given: Mapping[str, Any]
) -> dict[str, int]:
    """The mesh, the outermost axis first.

    :raises SelectionError: the implementation lacks an axis, or a size is no number of ranks.
    """
    own = [axis for axis in axes.names() if axis in system.capabilities(options).axes]
    if not given:
        what, example = "--mesh is missing", own[0] if own else "shard"
        raise SelectionError(Problem(what, f"write the size of each axis: --mesh {example}=8"))
    for name, size in given.items():
        if name not in own:
            remedy = f"its axes: {', '.join(own)}"
            raise SelectionError(Problem(f"{impl} has no axis {name}", remedy, f"{name}={size}"))
        if type(size) is not int or size < 1:
            what = f"axis {name} needs a number of ranks"
            raise SelectionError(Problem(what, f"write {name}=2", str(size)))
    world, most = math.prod(given.values()), system.capabilities(options).max_world
    if world > (limit := _MOST_RANKS if most is None else most):
        what = f"the mesh has {world:,} ranks, more than {impl} can have here"
        raise SelectionError(Problem(what, f"give up to {limit:,} ranks", str(world)))
    return {name: given[name] for name in own if name in given}


def _require_shared(source: ShapeSource, accounting: str) -> None:
    """Raise where the ranks of an axis cannot share the model.

    :raises SelectionError: heads, widths or layers are too few, or do not divide.
    """
    from shardproof import registry
    from shardproof.costs import cannot_fit
    from shardproof.costs.shapes import facts_of

    facts = facts_of(source.shape, source.axes, source.options, accounting, source.work)
    if reason := cannot_fit(facts, registry.load(source.implementation).strategy):
        shown = ", ".join(f"{name}={size}" for name, size in source.axes.items())
        raise SelectionError(Problem(reason, "choose another size of that axis", shown))
    along, stages = axes.cutting("layers"), facts.parts("layers")
    if stages > source.shape.layers:
        what = f"the model has {source.shape.layers} layers, too few for {stages} stages"
        raise SelectionError(Problem(what, "write fewer stages", f"{along}={stages}"))


# ------------------------------------------------------------------------------------- the run


def _simulated(source: ShapeSource, ranks: Sequence[int]) -> list[SimulatedRank]:
    """The simulated ``ranks``; says on standard error which one runs.

    :raises SelectionError: the implementation cannot run on tensors without values.
    """
    from shardproof.simulate.rank import simulate as run

    world, begun, since = math.prod(source.axes.values()), 0, time.monotonic()

    def began(rank: int) -> None:
        nonlocal begun
        begun += 1
        if not is_json():
            passed = time.monotonic() - since
            of = f"{begun} of {len(ranks)}" if begun <= len(ranks) else "once more"
            text = f"simulating rank {rank:,} of {world:,} ({of}), {passed:.0f} s"
            echo(text, err=True)

    try:
        with warnings.catch_warnings():
            # Of torch, at every rank: not about what the reader asked.
            warnings.simplefilter("ignore", FutureWarning)
            return run(source, ranks, began)
    except Exception as error:
        raise SelectionError(_refusal(source.implementation, error)) from error


def _refusal(impl: str, error: Exception) -> Problem:
    """Why ``impl`` does not run on tensors without values: the operator and the line."""
    from shardproof.contract import Refused

    if isinstance(error, Refused):
        return Problem(f"{impl} refuses this training", "change what it names", str(error))
    frames = traceback.extract_tb(error.__traceback__)
    # The line is that of the implementation: below it are torch, the ledgers and this wing.
    own = [f for f in frames if not _is_ours(Path(f.filename))] or frames
    last = own[-1]
    operator = getattr(error, "func", None)
    name = f"operator {operator}" if operator is not None else type(error).__name__
    what = f"{impl} cannot run on tensors without values: {name} in {last.name}"
    remedy = "simulate another implementation, or other options of it"
    said = "" if operator is not None else (str(error).splitlines() or [""])[0]
    return Problem(what, remedy, said or None, file=Path(last.filename).name, line=last.lineno)


def _is_ours(file: Path) -> bool:
    """Whether ``file`` is torch's, or the suite's but no implementation's."""
    suite = Path(__file__).parents[1]
    is_suite = file.is_relative_to(suite) and not file.is_relative_to(suite / "impls")
    return is_suite or "torch" in file.parts
