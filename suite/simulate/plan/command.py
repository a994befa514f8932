"""``shardproof plan``: the command line of the search, and its tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardproof.commands import options
from shardproof.commands.console import echo, is_json, make_console
from shardproof.errors import Problem, SelectionError
from shardproof.table import Table

if TYPE_CHECKING:
    from shardproof.simulate.machines import Machine
    from shardproof.simulate.plan.candidates import Job
    from shardproof.simulate.plan.search import Found, Plan

#: Powers of ten of a letter, and of two where ``i`` follows.
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b(?:/s)?\Z", re.IGNORECASE)
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)\Z", re.IGNORECASE)
#: GPUs of the largest cluster: candidates and the picture grow with it.
_MOST_GPUS = 65_536


def size_of(text: str, option: str, example: str) -> float:
    """Bytes, or bytes a second, of ``80GB``, ``74.5GiB`` or ``450GB/s``.

    :raises SelectionError: no number with a unit.
    """
    found = _SIZE.match(text.strip())
    if found is None or not float(found[1]):
        what = f"{option} needs a number with a unit"
        own = re.sub(r"\d+", text.strip(), example) if text.strip().isdigit() else example
        raise SelectionError(Problem(what, f"write {own}", text))
    return float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2].lower()]


def count_of(text: str) -> int:
    """Tokens of ``4M`` (4 x 2^20) or ``1000000``.

    :raises SelectionError: no number.
    """
    found = _COUNT.match(text.strip())
    if found is None or not float(found[1]):
        what = "--batch-tokens needs a number of tokens"
        raise SelectionError(Problem(what, "write 4M (4 x 2^20) or 4194304", text))
    return int(float(found[1]) * 1024 ** _POWERS[found[2].lower()])


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="a name of `shardproof estimate --models`")
    ] = "",
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", help="number of GPUs")] = 0,
    memory: Annotated[
        str,
        typer.Option("--memory", metavar="M", help="memory of one GPU (default: the machine's)"),
    ] = "",
    node: Annotated[
        int, typer.Option("--node", metavar="N", min=0, help="GPUs of a node (0: the machine's)")
    ] = 0,
    intra: Annotated[
        str, typer.Option("--intra", metavar="B", help="bytes/s of a GPU in a node, as 450GB/s")
    ] = "",
    inter: Annotated[
        str, typer.Option("--inter", metavar="B", help="bytes/s of a GPU between nodes, as 50GB/s")
    ] = "",
    machine: Annotated[
        str, typer.Option("--machine", metavar="NAME", help="a100, h100, h200 or b200")
    ] = "h100",
    batch_tokens: Annotated[
        str, typer.Option("--batch-tokens", metavar="N", help="tokens of a global batch, as 4M")
    ] = "4M",
    sequence: Annotated[
        int, typer.Option("--sequence", min=0, help="tokens of a sample (0: the model's own)")
    ] = 0,
    accounting: Annotated[
        str, typer.Option("--accounting", metavar="ID", help="A32, A16, M18, B8 or S4")
    ] = "M18",
    show: Annotated[
        int, typer.Option("--show", metavar="N", min=1, help="plans to find, of different meshes")
    ] = 10,
    rejected: Annotated[
        bool, typer.Option("--rejected", help="list every candidate that is no plan")
    ] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="run all layers and micro-batches of each simulation")
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(
            "--write",
            metavar="FILE",
            help="write a scenario of the best",
            callback=options.writable,
        ),
    ] = None,
) -> None:
    """Search the mesh and the strategy that train a model fastest on a cluster, and fit its memory.

    \b
    shardproof plan llama3-70b --gpus 64 --memory 80GB
    shardproof plan llama3-70b --gpus 64 --node 8 --intra 450GB/s --inter 50GB/s --batch-tokens 4M
    shardproof plan llama-7b --gpus 8 --machine a100 --sequence 4096 --show 3 --write best.yaml

    Formulas rank all combinations of docs/plan.md; the fastest of each mesh are then simulated,
    until --show of them fit. `fits` is said of simulated plans only. Exit code 1: no plan fits.
    """
    job, limit, on = _asked(
        model, gpus, memory, node, intra, inter, machine, batch_tokens, sequence, accounting
    )
    from shardproof.simulate.plan.search import search

    console = make_console()
    bar = _progress(show)
    with bar:
        found = search(job, limit, on, show, bar.update, exact)
    for table in _tables(found, on, rejected):
        console.print(table)
    if found.plans:
        _told(found, on, write)
    elif not is_json():
        echo("no plan fits: add GPUs or memory, or see --rejected", err=True)
    if not found.plans:
        raise typer.Exit(1)


def _progress(show: int) -> Any:
    """Progress over the plans that are to be found."""
    from shardproof.commands.console import ProgressBar

    class Plans(ProgressBar):
        def _columns(self, progress: Any) -> list[Any]:
            counted = progress.TextColumn("{task.fields[left]}")
            return [progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), counted]

        def update(self, done: int, what: str) -> None:
            self._move(done, " plans", left=what)

    return Plans(make_console(), "planning", show, "plans", visible=not is_json())


def _asked(
    model: str,
    gpus: int,
    memory: str,
    node: int,
    intra: str,
    inter: str,
    machine: str,
    batch_tokens: str,
    sequence: int,
    accounting: str,
) -> tuple[Job, int, Machine]:
    """The job, bytes of a GPU, and the machine.

    :raises SelectionError: a word that is not known or does not fit the others.
    """
    from shardproof.costs import shapes
    from shardproof.simulate import asked, machines
    from shardproof.simulate.plan.candidates import Job

    see = "name a model of `shardproof estimate --models`"
    if not model:
        raise SelectionError(Problem("MODEL is missing", see))
    shape = shapes.model(model)
    if not shape.layers:
        what = "a number of parameters has no layers that could be planned"
        raise SelectionError(Problem(what, see, model))
    if not 1 <= gpus <= _MOST_GPUS:
        what = "--gpus is missing" if not gpus else "no number of GPUs"
        raise SelectionError(
            Problem(what, f"give --gpus 1 to {_MOST_GPUS:,}", str(gpus or "") or None)
        )
    asked.accounting_of(accounting)
    on = machines.machine(machine, node)
    for name, text in (("intra", intra), ("inter", inter)):
        if text:
            rate = size_of(text, f"--{name}", f"--{name} 50GB/s")
            on = replace(on, **{name: replace(getattr(on, name), bandwidth=rate)})
    positions, tokens = sequence or shape.seq, count_of(batch_tokens)
    if shape.positions and positions > shape.positions:
        what = f"{shape.name} has {shape.positions:,} learned positions, fewer than --sequence"
        raise SelectionError(Problem(what, f"give up to {shape.positions}", str(sequence)))
    if tokens < positions or tokens % positions:
        what = f"--batch-tokens is not a whole number of samples of {positions:,} tokens"
        near = max(1, round(tokens / positions)) * positions
        raise SelectionError(Problem(what, f"write --batch-tokens {near}", batch_tokens))
    limit = size_of(memory, "--memory", "--memory 80GB") if memory else on.memory
    return Job(shape, accounting, gpus, on.node, tokens, positions), int(limit), on


# ---------------------------------------------------------------------------------------- tables


def _tables(found: Found, machine: Machine, every: bool) -> Iterator[Table]:
    job = found.job
    rows = [_row(found, number, plan) for number, plan in enumerate(found.plans, 1)]
    rows += [_row(found, 0, plan) for plan in found.estimated[: 0 if found.plans else 3]]
    notes = (
        f"{job.accounting}, {job.tokens:,} tokens a step in samples of {job.positions:,}; memory "
        f"{found.memory / 1e9:,.1f} GB; {machine.says}",
        "simulations bound the memory of plans that fit; tokens/s, bubble, exposed are by formulas",
        f"{found.looked_at:,} candidates, {found.simulated} simulated, {len(found.plans)} fit",
    )
    title = f"Plans for {job.shape.name} on {job.gpus:,} GPUs"
    headings = ("", "mesh", "how", "memory", "GB", "left", "tokens/s", "bubble", "exposed")
    yield Table(title, headings, rows, notes=notes, align="rlllrrrrr")
    reasons = sorted(found.rejected.examples.items(), key=lambda item: -len(item[1]))
    if every:
        lines = [(reason, text) for reason, texts in reasons for text in texts]
        yield Table("Rejected candidates", ("reason", "candidate"), lines)
    else:
        counted = [(reason, f"{len(texts):,}", texts[0]) for reason, texts in reasons]
        columns = ("reason", "candidates", "for example")
        yield Table("Rejected", columns, counted, notes=("--rejected lists each",), align="lrl")


def _row(found: Found, number: int, plan: Plan) -> tuple[str, ...]:
    one, times = plan.candidate, plan.estimated
    # Only simulated bytes decide; a formula's are no verdict.
    size = plan.bytes if plan.peaks else times.bytes
    word = "fits" if plan.fits(found.memory) else "estimated"
    return (
        str(number or "-"),
        one.shown_mesh(),
        f"{one.implementation} {one.how()}",
        word,
        f"{size / 1e9:,.1f}",
        f"{(found.memory - size) / 1e9:,.1f}",
        f"{found.job.tokens / times.seconds:,.0f}",
        f"{times.bubble / times.seconds:.1%}",
        f"{times.exposed / times.seconds:.1%}",
    )


def _told(found: Found, machine: Machine, write: Path | None) -> None:
    """The placement of the best plan, its scenario and its commands."""
    from shardproof.simulate.plan.placement import placement
    from shardproof.simulate.plan.scenario import command, scenario

    best = found.plans[0].candidate
    make_console().print(placement(best.mesh, machine.node))
    text = scenario(found.job, best, write.stem if write else "plan")
    if write is not None:
        options.write(write, text)
    file = str(write or "plan.yaml")
    lines = [
        ("simulate its ranks", _simulate(found.job, best)),
        ("check it on the cluster", command(found.job, file)),
    ]
    notes = [f"the scenario is written to {file}" if write else "--write FILE writes the scenario"]
    make_console().print(Table("Commands for plan 1", ("to", "command"), lines, notes=notes))


def _simulate(job: Job, plan: object) -> str:
    import json

    from shardproof.simulate.plan.candidates import Candidate

    assert isinstance(plan, Candidate)
    mesh = ",".join(f"{name}={size}" for name, size in plan.mesh.items())
    words = [
        f"shardproof simulate {job.shape.name} --impl {plan.implementation} --mesh {mesh}",
        f"--accounting {job.accounting} --batch {plan.samples} --seq {job.positions}",
        f"--micro-batches {plan.micro_batches}",
    ]
    words += [f"--recompute {plan.recompute}"] * bool(plan.recompute)
    for name, value in plan.options.items():
        if name not in ("precision", "recompute_every"):
            text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            words.append(
                f"--option {name}={text}" if " " not in text else f"--option '{name}={text}'"
            )
    return " ".join(words)
