"""The command ``bench``: pairs of implementations, timed side by side, and the table of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suite import verdicts
from suite.errors import Problem, SelectionError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from suite.timing.plan import Pair

Line = Mapping[str, Any]


class FailOn(StrEnum):
    """What is a failure beside a crash."""

    slower = "slower"
    goal = "goal"


class OptimizerChoice(StrEnum):
    """Optimizers as options."""

    adamw = "adamw"
    sgd = "sgd"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(short_help="Time pairs of implementations, A B B A.")(bench)


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="A B | FILE",
            help="two implementations, or speed scenarios (default: scenarios/speed)",
        ),
    ] = None,
    expression: Annotated[
        str, typer.Option("-k", metavar="EXPR", help="of scenarios: pairs whose id matches")
    ] = "",
    backend: Annotated[str, typer.Option("--backend", metavar="B", help="where ranks talk")] = "",
    world: Annotated[
        int | None, typer.Option("--world", metavar="N", min=1, max=1024, help="number of ranks")
    ] = None,
    workload: Annotated[
        str, typer.Option("--workload", metavar="W", help="model and data")
    ] = "charnames_gpt",
    size: Annotated[
        str, typer.Option("--size", metavar="S", help="preset of the model's parameters, e.g. 20m")
    ] = "",
    param: Annotated[
        list[str] | None, typer.Option("--param", metavar="K=V", help="one of the model's knobs")
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", metavar="N", min=1, max=4096, help="samples a step, all ranks")
    ] = 16,
    micro_batches: Annotated[
        int, typer.Option("--micro-batches", metavar="M", min=1, max=64, help="per rank and step")
    ] = 1,
    optimizer: Annotated[
        OptimizerChoice, typer.Option("--optimizer", help="the same kernel on both sides")
    ] = OptimizerChoice.adamw,
    dtype: Annotated[str, typer.Option("--dtype", help="of the model")] = "float32",
    option_a: Annotated[
        list[str] | None, typer.Option("--option-a", metavar="K=V", help="option of A; a.b=V nests")
    ] = None,
    option_b: Annotated[
        list[str] | None, typer.Option("--option-b", metavar="K=V", help="option of B")
    ] = None,
    mesh_a: Annotated[
        str, typer.Option("--mesh-a", metavar="AXIS=N,...", help="mesh of A (default: one axis)")
    ] = "",
    mesh_b: Annotated[str, typer.Option("--mesh-b", metavar="AXIS=N,...", help="mesh of B")] = "",
    blocks: Annotated[
        int | None, typer.Option("--blocks", metavar="N", min=2, max=100_000, help="A B B A blocks")
    ] = None,
    launches: Annotated[
        int | None,
        typer.Option("--launches", metavar="L", min=1, max=1000, help="fresh ranks so often"),
    ] = None,
    goal: Annotated[
        float | None,
        typer.Option("--goal", metavar="R", min=0.01, help="upper end of A over B, at most"),
    ] = None,
    fail_on: Annotated[
        list[FailOn] | None,
        typer.Option("--fail-on", help="exit code 1 for `slower`, or for a missed `goal`"),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="afterwards: where a step's time goes, by phase")
    ] = False,
    no_memory: Annotated[
        bool, typer.Option("--no-memory", help="leave out the passes that weigh peak memory")
    ] = False,
    deadline: Annotated[
        float, typer.Option("--deadline", metavar="S", min=1, help="seconds of a launch, at most")
    ] = 900.0,
    results: Annotated[
        Path | None,
        typer.Option("--results", metavar="RUN", help="write into this run folder, new or old"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what would be timed, and time nothing")
    ] = False,
) -> None:
    """Is A faster than B here? Blocks of steps in the order A B B A, both alive in the same ranks.

    \b
    shardproof bench reference/ddp pytorch/ddp --size 20m --world 2
    shardproof bench reference/ddp pytorch/ddp --option-b gradient_as_bucket_view=true
    shardproof bench                                   every pair in scenarios/speed
    shardproof bench data-parallel -k zero3 --profile  one of them, and where its time goes

    Ratios are A over B, from medians of blocks, with the 95 % interval of a paired t on their logs;
    p is that of the exact sign-flip permutation. A/A: A beside its twin, what this machine leaves
    open. The margin is 5 % or the A/A half-width, whichever is more.

    \b
    faster, slower     certain, and at least the margin
    same               certain to be within the margin
    small difference   certain, but smaller than the margin
    inconclusive       neither; the smallest effect that could be seen stands beside it

    Exit codes: 0 decided (slower is no failure unless --fail-on slower), 1 a crash, a hang or sides
    that do not train the same, 2 bad input, 3 inconclusive or nothing timed.
    """
    from suite.timing import plan
    from suite.timing.session import Bench

    if names is not None and _are_implementations(names):
        pairs = [
            plan.Pair(
                name="pair",
                a=plan.Side(
                    names[0],
                    plan.parse_assignments(option_a or (), "--option-a"),
                    plan.parse_mesh(mesh_a, "--mesh-a"),
                ),
                b=plan.Side(
                    names[1],
                    plan.parse_assignments(option_b or (), "--option-b"),
                    plan.parse_mesh(mesh_b, "--mesh-b"),
                ),
                backend=backend or "gloo",
                world=world or 2,
                workload=plan.spec_of(
                    workload,
                    size,
                    plan.parse_assignments(param or (), "--param"),
                    batch,
                    micro_batches,
                    0,
                ),
                optimizer=plan.default_optimizer(optimizer.value),
                dtype=dtype,
                size=size,
            )
        ]
    else:
        for option, given in (
            ("--option-a", option_a),
            ("--option-b", option_b),
            ("--mesh-a", mesh_a),
            ("--mesh-b", mesh_b),
            ("--param", param),
            ("--size", size),
        ):
            if given:
                remedy = "write it into the speed scenario, or name two implementations"
                raise SelectionError(Problem(f"{option} belongs to one pair", remedy, str(given)))
        pairs = _chosen(plan.read(names or []), expression)
    changes: dict[str, Any] = {
        "blocks": blocks,
        "launches": launches or min(plan.LAUNCHES, blocks or plan.BLOCKS),
        "goal": goal,
        "backend": backend or None,
        "world": world,
        "deadline": deadline,
    }
    asked = {key: value for key, value in changes.items() if value is not None}
    pairs = [replace(pair, **asked) for pair in pairs]
    for pair in pairs:
        plan.check(pair)
    if profile and any(pair.backend == "in_memory" for pair in pairs):
        remedy = "profile on gloo: threads of one process share its clocks"
        raise SelectionError(Problem("--profile needs ranks that are processes", remedy))
    if dry_run:
        for pair in pairs:
            typer.echo(pair.id)
        return
    with Bench() as session:
        code = _execute(session, pairs, results, not no_memory, profile, set(fail_on or ()))
    raise typer.Exit(code)


def _are_implementations(names: Sequence[str]) -> bool:
    """Whether ``names`` are a pair; one name alone is a speed scenario or a mistake."""
    from suite import registry

    if all(name.endswith((".yaml", ".yml")) or Path(name).is_dir() for name in names):
        return False
    known = registry.names()
    alike = [name for name in names if "/" in name or ":" in name or name in known]
    if not alike:
        return False
    if len(names) != 2:
        what = f"a pair has two sides, not {len(names)}"
        raise SelectionError(Problem(what, "name A and B", " ".join(names)))
    for name in names:
        registry.check(name)
    return True


def _chosen(pairs: list[Pair], expression: str) -> list[Pair]:
    from suite.scenarios.select import compile_expression

    matches = compile_expression(expression)
    chosen = [pair for pair in pairs if matches(pair.id)]
    if not chosen:
        remedy = nearest(expression, [pair.name for pair in pairs], "pairs")
        raise SelectionError(Problem("-k matches no pair", remedy, expression))
    return chosen


def _execute(
    session: Any,
    pairs: Sequence[Pair],
    results: Path | None,
    weigh: bool,
    profile: bool,
    fail_on: set[FailOn],
) -> int:
    from suite import execute
    from suite.timing.session import keep

    console = execute.make_console()
    measured = session.examine(pairs)
    lines: list[dict[str, Any]] = []
    with execute.open_folder(results) as folder:

        def body(interrupts: execute.Interrupts) -> int:
            folder.plan_benches([pair.id for pair in pairs])
            for number, item in enumerate(measured, 1):
                pair = item.pair
                said = f"{number}/{len(pairs)} {pair.a.implementation} v {pair.b.implementation}"
                try:
                    if item.problem is None:
                        with _Blocks(console, said, pair.blocks) as shown:
                            session.time(item, shown.tell)
                            if weigh and item.problem is None:
                                shown.say("memory")
                                session.memory(item)
                            if profile and item.problem is None:
                                shown.say("profile")
                                session.profile(item)
                finally:
                    if item.rows or item.problem:  # also after Ctrl-C: whole blocks can be judged
                        with interrupts.held():
                            lines.append(keep(folder, item))
            show(lines, console)
            return exit_code(lines, fail_on)

        def interrupted() -> None:
            show(lines, console)
            execute.tell(console, f"stopped: {len(lines)} of {len(pairs)} comparisons have figures")

        return execute.guarded(folder, console, body, interrupted, lambda: None)


def exit_code(lines: Sequence[Line], fail_on: set[FailOn]) -> int:
    """1 something broke, 3 something is open, 0 all decided."""
    told = [line["verdict"] for line in lines]
    slower = FailOn.slower in fail_on and "slower" in told
    missed = FailOn.goal in fail_on and any(line["goal_met"] is False for line in lines)
    if slower or missed or any(word in ("crash", "hang", "fail") for word in told):
        return verdicts.BROKEN
    if not told or any(word in ("inconclusive", "precondition") for word in told):
        return verdicts.NOT_DECIDED
    return verdicts.HELD


class _Blocks:
    """Progress over the blocks of one comparison: a bar on a terminal, else a line now and then."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        self._console, self._what, self._total = console, what, total
        self._began = self._spoke = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> _Blocks:
        if self._console.is_terminal:
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.TextColumn("{task.completed}/{task.total} blocks"),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total)
        else:
            self._line(f"{self._what}: {self._total} blocks")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def tell(self, done: int) -> None:
        """So many blocks are over."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
            return
        now = time.monotonic()
        if now - self._spoke > 10.0 or done == self._total:
            self._spoke = now
            self._line(f"  {done}/{self._total} blocks in {now - self._began:.0f} s")

    def say(self, what: str) -> None:
        """What comes after the blocks."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._what}: {what}")
        else:
            self._line(f"  {what}")

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


# ------------------------------------------------------------------------------------- tables

HEADINGS = (
    *("pair", "verdict", "A / B [95 %]", "p", "A/A [95 %]", "margin"),
    *("A ms", "B ms", "A tokens/s", "B tokens/s", "peak A / B", "goal"),
)


def cells(line: Line) -> tuple[str, ...]:
    """The texts of :data:`HEADINGS`."""
    pair, same, seconds = line["pair"], line.get("aa"), line.get("median_seconds", {})
    name = f"{pair['a']['implementation']} v {pair['b']['implementation']}"
    rates = line.get("targets_per_second", {})
    p = line.get("p")
    met = line.get("goal_met")
    return (
        name,
        line["verdict"],
        _interval(line) if "ratio" in line else "-",
        "-" if p is None else f"{p:.2g}{'' if line['p_exact'] else ' (drawn)'}",
        "-" if not same else f"{_interval(same)} +-{same['half_width']:.1%}",
        f"{line['margin']:.1%}" if "margin" in line else "-",
        *(f"{1e3 * seconds[s]:.1f}" if s in seconds else "-" for s in ("a", "b")),
        *(f"{rates[s]:,.0f}" if s in rates else "-" for s in ("a", "b")),
        _memory(line.get("memory")),
        "-" if met is None else f"{'met' if met else 'missed'} ({pair['goal']:.2f})",
    )


def _interval(found: Mapping[str, Any]) -> str:
    return f"{found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def _memory(told: Mapping[str, Any] | None) -> str:
    if told is None or "problem" in told:
        return "-"
    advisory = "" if told["kind"] == "ledger" else " resident, advisory"
    mib = " / ".join(f"{told[side] / 2**20:.1f}" for side in ("a", "b"))
    return f"{mib} MiB = {told['ratio']:.3f}{advisory}"


def details(line: Line) -> list[str]:
    """Below the table: what was compared, and what to make of it."""
    pair = line["pair"]
    workload = pair["workload"]
    size = f" {pair['size']}" if pair["size"] else ""
    per_step = line.get("targets_per_step", {}).get("a")
    tokens = "" if per_step is None else f", {per_step} targets a step"
    told = [
        line["id"],
        f"    {workload['name']}{size}, {workload['micro_batches']} micro-batches{tokens}, "
        f"{pair['optimizer']['name']} foreach=False, {pair['dtype']}, {pair['world']} ranks",
    ]
    for letter in ("a", "b"):
        side, mesh = pair[letter], line["meshes"].get(letter) or {}
        shape = " x ".join(f"{axis}={n}" for axis, n in mesh.items())
        options = ", ".join(f"{k}={v}" for k, v in side["options"].items()) or "as it comes"
        told.append(f"    {letter.upper()}  {side['implementation']} ({shape}): {options}")
    if line.get("reason"):
        told.append(f"    {line['verdict']}: {line['reason']}")
    if "ratio" in line:
        told.append(
            f"    {line['blocks']} blocks over {line['launches']} launches in "
            f"{line['seconds']:.0f} s; effects from {line['smallest_effect']:.1%} on can be seen"
        )
    same, differ = line.get("aa"), line.get("launches_differ_p")
    if same:
        told.append(
            f"    A/A: SD of a block {same['sd']:.3f}; a half-width of 5 % takes "
            f"{same['blocks_needed']} blocks here"
        )
    if same and (same["low"] > 1 or same["high"] < 1):
        told.append("    caution: A differs from its own twin here: take no verdict from this run")
    if differ is not None and differ < 0.01:
        told.append(f"    caution: launches differ (p {differ:.1g}), the interval is too narrow")
    if line.get("memory") and "problem" in line["memory"]:
        told.append(f"    no memory figures: {line['memory']['problem']}")
    return told + _profile(line.get("profile"))


def _profile(told: Mapping[str, Any] | None) -> list[str]:
    if told is None:
        return []
    if "problem" in told:
        return [f"    no profile: {told['problem']}"]
    lines = ["    ms of a mean step, slowest rank     A        B"]
    notes = {"blocked": "  of it without a core", "threads": "  CPU of other threads, beside it"}
    for phase in told["a"]:
        both = f"{told['a'][phase]:10.1f} {told['b'][phase]:8.1f}"
        lines.append(f"      {phase:24} {both}{notes.get(phase, '')}")
    return lines


def show(lines: Sequence[Line], console: Console) -> None:
    """The table, and what belongs to each row."""
    from rich.table import Table
    from rich.text import Text

    from suite import execute

    if not lines:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=heading == "pair")
    for line in lines:
        red = line["verdict"] in ("slower", "crash", "hang", "fail")
        table.add_row(*(Text(cell, style="red" if red else "") for cell in cells(line)))
    console.print(table)
    for line in lines:
        for text in details(line):
            execute.tell(console, text)


def markdown(lines: Sequence[Line]) -> str:
    """The table as Markdown."""
    rows = [HEADINGS, tuple("---" for _ in HEADINGS), *(cells(line) for line in lines)]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)
