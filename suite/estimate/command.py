"""``shardproof estimate``: memory and traffic of a model, before anything runs."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any

import typer

from shardproof import axes, registry, strategies
from shardproof.commands import assigned
from shardproof.commands.console import echo, is_json, make_console
from shardproof.costs.model import JUDGED
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.table import Table
from shardproof.wings import required

#: Bytes of a unit of memory, in lower case.
_UNITS = {
    f"{letter}{kind}": base**power
    for power, letter in enumerate("kmgtp", 1)
    for kind, base in (("b", 1000), ("ib", 1024))
}
_MOST_MEMORY = 10**18
_MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)\Z")


def memory_of(text: str) -> int:
    """Bytes of ``80GB`` or ``74.5GiB``.

    :raises SelectionError: no number with a unit.
    """
    found = _MEMORY.match(text.strip())
    size = float(found[1]) * _UNITS.get(found[2].lower(), 0) if found else 0
    if not 0 < size < _MOST_MEMORY:
        plain = re.match(r"([1-9]\d{0,5}(?:\.\d+)?) ?[A-Za-z]?\Z", text.strip())
        number = plain[1] if plain else "80"
        remedy = f"write {number}GB (10^9 bytes) or {number}GiB (2^30 bytes)"
        what = "an amount of memory needs a unit" if plain else "not an amount of memory"
        raise SelectionError(Problem(what, remedy, text))
    return int(size)


def estimate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="a name from --models, or a size such as 7.5b")
    ] = "",
    impl: Annotated[
        list[str] | None,
        typer.Option("--impl", metavar="P", help="names or globs of implementations or strategies"),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", min=1, help="number of GPUs, one per rank")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="M", help="memory of one GPU, such as 80GB")
    ] = None,
    mesh: Annotated[
        str,
        typer.Option(
            "--mesh",
            metavar="A=N,...",
            help="size of each axis, such as shard=8,tensor=4",
        ),
    ] = "",
    accounting: Annotated[
        str, typer.Option("--accounting", metavar="ID", help="one of A32, A16, M18, B8, S4, P4")
    ] = "A16",
    batch: assigned.Samples = 1,
    seq: assigned.Positions = 0,
    micro_batches: assigned.MicroBatches = 1,
    recompute: Annotated[
        str,
        typer.Option(
            "--recompute",
            help="'none'; 'selective': attention scores; a number N: all layers, in groups of N",
        ),
    ] = "none",
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="K=V", help="option of --impl, such as offload=optimizer"),
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="show the bytes of simulated code next to the formulas"),
    ] = False,
    models: Annotated[bool, typer.Option("--models", help="list the models and exit")] = False,
) -> None:
    """Compute the bytes that a rank holds and sends in a step, from formulas, without training.

    \b
    shardproof estimate 7b --gpus 64 --memory 80GB
    shardproof estimate llama3-70b --impl reference/zero3 --gpus 64 --accounting M18
    shardproof estimate 13b --impl hybrid --mesh tensor=4,pipe=2 --gpus 64 --micro-batches 8
    shardproof estimate 7b --impl fsdp --gpus 8 --recompute 1 --option offload=parameters
    shardproof estimate 7.5b --gpus 64     a size, not a model: activations are not estimated
    shardproof estimate 7b --gpus 64 --simulate        formulas and simulated code
    shardproof estimate --models

    The checks `memory` and `traffic` compare measured bytes with the same formulas, tolerance 0. A
    GB is 10^9 bytes; memory is that of the rank that holds the most bytes. --accounting sets how
    many bytes the value, gradient and optimizer state of a parameter take (docs/estimate.md).
    --simulate takes seconds for each row: the code runs on tensors without values.
    """
    from shardproof.costs import shapes

    if not (models or model) and (impl or gpus or memory or mesh or option):
        remedy = "give a name of `shardproof estimate --models`, or a size such as 7.5b"
        raise SelectionError(Problem("MODEL is missing", remedy))
    if models or not model:
        elements = [sum(t.numel for t in shapes.tensors(s, "")) for s in shapes.models().values()]
        rows = [
            (s.name, f"{n:,}", str(s.layers), str(s.hidden), str(s.heads))
            for s, n in zip(shapes.models().values(), elements, strict=True)
        ]
        headings = ("model", "parameters", "layers", "hidden", "heads")
        return make_console().print(Table("Models", headings, rows, align="lrrrr"))
    from shardproof.estimate import figures
    from shardproof.estimate.own import fits, strategy_of

    most = None if memory is None else memory_of(memory)
    shape, axes_given = shapes.model(model), assigned.mesh(mesh)
    work = shapes.BatchSize(batch, seq, micro_batches)
    again: str | int = int(recompute) if recompute.isdecimal() else recompute
    if again not in ("none", "selective") and not (isinstance(again, int) and again > 0):
        remedy = nearest(recompute, ("none", "selective"), "a number of layers, or")
        raise SelectionError(Problem("unknown value of --recompute", remedy, recompute))
    options = assigned.assigned(option or (), "--option", "offload=optimizer")
    if isinstance(again, int):
        options["recompute_every"] = again

    def one(name: str) -> figures.Estimate:
        strategy = strategy_of(name, options)
        where = figures.mesh_of(strategy, gpus, axes_given)
        return figures.of_shape(shape, strategy, where, accounting, work, options, again, name)

    found, left_out = _each(impl or [], _usual(axes_given), one)
    if simulate:
        found = [*_all_simulated(found, work, options, again)]
    if is_json():
        return make_console().print(_exact(found, most))
    console = make_console()
    if left_out:
        echo(f"left out: {', '.join(left_out)}; --impl {left_out[0]} says why")
    if len(found) == 1:
        console.print(found[0].table())
        if most is not None:
            echo(f"{found[0].total / 1e9:,.2f} GB of {memory}: {fits(found[0], most)}")
        return None
    return console.print(_together(found, most, shapes.accountings()[accounting]["says"]))


def _all_simulated(
    found: Sequence[Any], work: Any, options: Mapping[str, Any], again: str | int
) -> Iterator[Any]:
    """Each of ``found`` with simulated figures; one of several may lack them, with a message.

    :raises SelectionError: the only one cannot be simulated.
    """
    for one in found:
        try:
            yield _with_simulated(one, work, options, again)
        except SelectionError as error:
            if len(found) == 1:
                raise
            echo(f"not simulated: {one.implementation}: {error}", err=True)
            yield one


def _with_simulated(found: Any, work: Any, options: Mapping[str, Any], again: str | int) -> Any:
    """``found`` with the figures of the code of its implementation, or of the strategy's reference.

    :raises SelectionError: it cannot be simulated.
    """
    if again == "selective":
        remedy = "write --recompute 1, or leave --simulate out"
        raise SelectionError(Problem("--simulate cannot recompute scores only", remedy, again))
    from shardproof.costs import shapes

    name = found.implementation
    impl = name if "/" in name or ":" in name else f"reference/{name}"
    if not is_json():
        echo(f"simulating {impl}", err=True)
    training = {
        "model": found.model,
        "impl": impl,
        "mesh": found.mesh,
        "accounting": found.accounting,
        "options": options,
        "samples": work.samples,
        "positions": work.positions,
        "micro_batches": work.micro_batches,
    }
    made = dict(required("simulate", "--simulate", lambda wing: wing.simulated(training)))
    made["state"] = sum((made[kind] for kind in JUDGED), Fraction())
    notes = [*found.notes]
    if shapes.model(found.model).rounded:
        notes.append(f"simulated without what fills {found.model} up to its round size")
    return dataclasses.replace(found, simulated=made, notes=notes)


def _usual(mesh: dict[str, int]) -> list[str]:
    """The strategies that are shown where none is named: those that the axes of the mesh allow."""
    known = strategies.TEXTBOOK.values()
    if axes.dividing(mesh):
        return [s.name for s in known if {*mesh} <= {*s.axes}]
    return [s.name for s in known if s.serves_data_axes and s.axes and {*mesh} <= {*s.axes}]


def _each(
    given: list[str], usual: list[str], one: Callable[[str], Any]
) -> tuple[list[Any], list[str]]:
    """The estimates of the systems that match the patterns ``given`` (none: the ``usual`` ones),
    and those without an estimate that only a glob matched.

    :raises SelectionError: one that is named exactly has none, or all have none.
    """
    is_exact = given and not any(sign in pattern for pattern in given for sign in "*?[")
    if given and not is_exact:
        known = [*strategies.names(), *registry.names()]
        given = [name for pattern in given for name in fnmatch.filter(known, pattern) or [pattern]]
    found, left_out = [], dict[str, SelectionError]()
    for name in dict.fromkeys(given or usual):
        try:
            found.append(one(name))
        except SelectionError as error:
            if is_exact:
                raise
            left_out[name] = error
    if len({*map(str, left_out.values())}) == 1 and not found:
        raise next(iter(left_out.values()))
    if not found:
        remedy = "name one strategy with --impl to see why it does not fit"
        raise SelectionError(Problem("no strategy fits this mesh and these options", remedy))
    return found, [*left_out]


def _together(found: list[Any], memory: int | None, says: str) -> Table:
    """One line for each estimate."""
    from shardproof.estimate.own import fits

    parts, simulated = [name for name, _ in found[0].parts()], any(one.simulated for one in found)
    rows = []
    for one in found:
        sizes, sent = [_gigabytes(n) for _, n in one.parts()], _gigabytes(one.sent)
        made = [_gigabytes(one.simulated.get("total"))] if simulated else []
        rows.append((one.implementation, *sizes[: len(parts)], *made, sent, fits(one, memory)))
    shown = f"{found[0].on_ranks()}, GB on the fullest rank"
    bytes_of = f"{found[0].accounting}: {says}"
    notes = [*found[0].notes, bytes_of, "sent: GB that each rank sends a step"]
    if simulated:
        notes.append("simulated: peak GB that the code of the strategy holds at one moment")
    return Table(
        shown,
        ("strategy", *parts, *["simulated"] * simulated, "sent", "memory"),
        rows,
        notes=notes,
        align="l" + "r" * (len(parts) + simulated + 1),
    )


def _gigabytes(size: float | Fraction | None) -> str:
    return "-" if size is None else f"{float(size) / 1e9:,.2f}"


def _exact(found: list[Any], memory: int | None) -> Table:
    """Every figure in bytes."""
    from shardproof.estimate.own import fits

    plain = []
    for one in found:
        fields = dataclasses.asdict(one)
        made = {f"simulated {name}": float(size) for name, size in fields.pop("simulated").items()}
        fields |= {"state": one.state, "total": one.total, "ratio": float(one.ratio)}
        plain.append(fields | {"fits": fits(one, memory)} | made)
    headings = [*dict.fromkeys(name for each in plain for name in each)]
    values = ([each.get(name) for name in headings] for each in plain)
    rows = [[str("" if value is None else value) for value in row] for row in values]
    return Table("Estimates in bytes", headings, rows)
