"""The commands about several runs: `compare` says what differs, `gate` whether that may pass."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardproof import verdicts
from shardproof.commands import options
from shardproof.commands.console import echo, make_console
from shardproof.commands.options import option, output_option
from shardproof.errors import Problem, SelectionError

if TYPE_CHECKING:
    from shardproof.compare.gate import Gate
    from shardproof.compare.snapshot import Snapshot


Form = Literal["table", "markdown", "json", "html"]
#: What rows (``hardware``: columns) stand for.
By = Literal["strategy", "backend", "hardware"]
#: Whose annotations.
Host = Literal["github"]


@dataclass(frozen=True, kw_only=True)
class ShownOptions:
    """How `compare` shows what it found, or the baseline that it writes in place of that."""

    form: Form = option("table", "--format", help="format of the output")
    as_json: bool = option(False, "--json", help="the same as --format json")
    by: By | None = option(
        None, "--by", help="one row per strategy or backend, or one column per machine (hardware)"
    )
    only_changed: bool = option(False, "--only-changed", help="hide equal and undecided rows")
    save: Path | None = output_option("--save", "write the runs to FILE as one baseline")
    force: bool = option(False, "--force", help="allow --save to replace an existing file")
    into: Path | None = output_option(
        "--into", "write Markdown into FILE, between the comments hardware:begin and hardware:end"
    )

    def check(self) -> None:
        """:raises SelectionError: options that exclude each other."""
        if self.save is not None:
            given = {"--format": self.form != "table", "--by": self.by, "--into": self.into}
            given["--only-changed"] = self.only_changed
            options.refuse(given, "--save writes a baseline and compares nothing", self.save)
            if not self.force and self.save.exists():
                remedy = "add --force to replace the file, or name another"
                raise SelectionError(Problem("the file exists", remedy, file=f"--save {self.save}"))
        elif self.force:
            raise SelectionError(Problem("--force needs --save", "add --save FILE"))
        elif self.into is not None and self.form not in ("table", "markdown"):
            raise SelectionError(Problem("--into writes Markdown", "leave out --format", self.form))


@options.grouped()
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN...", help="runs, baselines or bundles, reference first"),
    ],
    *,
    shown: ShownOptions,
) -> None:
    """Show the differences between runs, and which results are not comparable, and why.

    \b
    shardproof compare 20260102-030405 20260103-040506
    shardproof compare results/baselines/cpu.json RUN --only-changed
    shardproof compare RUN RUN RUN --by strategy --format markdown
    shardproof compare RUN RUN --save results/baselines/cpu.json   write one baseline
    shardproof compare results/baselines/*.json --by hardware --into README.md

    Two results are compared if they have the same id, version of the suite, version of torch,
    configuration and data set. Verdicts, bytes, calls and memory are compared with tolerance 0.
    Seconds are never compared. `bench` measures ratios of times, such as time of A / time of B.
    For each ratio, `compare` shows the difference between two runs, and the 95 % interval of this
    difference (Welch).

    Exit codes: 0 the comparison was made, even if results differ (`gate` judges the differences);
    2 bad input; 3 nothing is comparable.
    """
    from shardproof.compare import baseline

    if shown.as_json:
        shown = replace(shown, form="json")
    shown.check()
    if len(runs) < 2 and shown.by != "hardware" and shown.save is None:
        remedy = "name two runs, or add --save FILE or --by hardware"
        raise SelectionError(Problem("only one run is named", remedy, runs[0]))
    snapshots = [baseline.load(name) for name in runs]
    raise typer.Exit(_save(snapshots, shown.save) if shown.save else _compare(snapshots, shown))


def _save(snapshots: list[Snapshot], path: Path) -> int:
    from shardproof.compare import baseline

    joined = replace(baseline.joined(snapshots), name=path.stem)
    if not (joined.cases or joined.timed):
        remedy = "name a run that has results"
        raise SelectionError(Problem("--save: the run has no results", remedy, snapshots[0].name))
    baseline.save(joined, path)
    counts = (
        f"{len(joined.cases):,} cases, {len(joined.timed):,} timed, {len(joined.kills):,} faults"
    )
    echo(f"{path}: {counts}, {path.stat().st_size / 1000:,.0f} kB, {joined.hardware}")
    return verdicts.HELD


def _compare(snapshots: list[Snapshot], shown: ShownOptions) -> int:
    from shardproof.compare import formats, hardware, tables
    from shardproof.compare.compare import compare as compared

    reference, *others = snapshots
    comparisons = [compared(reference, other) for other in others]
    form, by, into, only_changed = shown.form, shown.by, shown.into, shown.only_changed
    if form == "json":
        echo(formats.json_document(reference, comparisons, only_changed), nl=False, raw=True)
    else:
        if by == "hardware":
            report = hardware.report(reference, comparisons, only_changed)
        else:
            report = tables.report(comparisons, by or "", only_changed)
        if into is not None:
            from shardproof.report import insert

            insert(formats.markdown(report), into, formats.BEGIN, formats.END)
            echo(f"{into}: {report.heading}")
        elif form == "markdown":
            echo(f"# {report.heading}\n\n{formats.markdown(report)}", nl=False, raw=True)
        elif form == "html":
            echo(formats.html(report), nl=False, raw=True)
        else:
            formats.terminal(report, make_console())
    if not comparisons or any(comparison.comparable for comparison in comparisons):
        return verdicts.HELD
    if form == "json" or by == "hardware" or into is not None:
        for one in comparisons:
            echo(f"{one.after.name}: nothing is comparable: {one.obstacle}", err=True)
    return verdicts.NOT_DECIDED


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The places for findings of `gate` other than the terminal."""

    summary: Path | None = output_option("--summary", "write a Markdown summary to FILE")
    append: bool = option(False, "--append", help="append to the file of --summary")
    junit: Path | None = output_option("--junit", "write JUnit XML to FILE")
    annotations: Host | None = option(
        None, "--annotations", help="print annotations for lines of scenario and policy files"
    )


@options.grouped()
def gate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="run folder, id, or bundle")],
    *,
    against: Annotated[
        str, typer.Option("--against", metavar="BASELINE", help="baseline, run folder, or id")
    ],
    policy: Path | None = option(
        None, "--policy", metavar="FILE", help="rules that break the gate (default: see above)"
    ),
    outputs: Outputs,
    verify: bool = option(
        False, "--verify", help="judge the run again from its records, as `verify` does"
    ),
    on: str | None = option(None, "--on", metavar="DATE", help="use this day as today: YYYY-MM-DD"),
) -> None:
    """Check a run against a baseline; a policy file says what breaks the gate.

    \b
    shardproof gate results/pr --against results/baselines/cpu.json
    shardproof gate RUN --against BASELINE --policy policy.yaml --junit gate.xml
    shardproof gate RUN --against BASELINE --summary "$GITHUB_STEP_SUMMARY" --append \\
                    --annotations github
    shardproof gate RUN --against BASELINE --policy FILE --on 2027-02-01
    shardproof gate RUN.tar.gz --against BASELINE --verify   from another machine

    \b
    Without a policy, each of these breaks the gate:
    - a fail, crash or hang, or refused options
    - a verdict worse than in the baseline
    - an exact figure that is worse, changed or missing
    - a measured slowdown above 5 %, if its interval excludes "not slower"
    - a missing case, fault or ratio
    Results better than the baseline, and cases that did not fit into a budget,
    are only reported.

    A run that does not match its manifest always breaks the gate. But a person who changes a run
    can also recompute its digests. Use --verify to judge the run again from its records; this takes
    about as long as `shardproof verify`.

    Exit codes: 0 the gate held, 1 the run broke it, 2 bad input, 3 nothing comparable or decided.
    """
    from shardproof.compare import policy as policies
    from shardproof.compare.compare import compare as compared
    from shardproof.compare.gate import judge

    if outputs.append and outputs.summary is None:
        raise SelectionError(Problem("--append needs --summary", "add --summary FILE"))
    policy_file = policies.read(policy)
    today = _day(on)
    before, old_doubts = _evidence(against, again=False)
    after, doubts = _evidence(run, again=verify)
    if doubts is None:
        what = "is a baseline, which has no records to judge"
        raise SelectionError(Problem(what, "name a run: its folder, id or bundle", file=run))
    policies.check(policy_file, before, after, max(today, _day(None)))
    named = [(before.name, text) for text in old_doubts or ()]
    named += [(after.name, text) for text in doubts]
    gated = judge(compared(before, after), policy_file, today, named)
    _tell(gated, outputs)
    raise typer.Exit(gated.exit_code)


def _evidence(name: str, again: bool) -> tuple[Snapshot, list[str] | None]:
    """A run as it is compared, and what is wrong with its evidence (``None``: it has none)."""
    from shardproof.compare import baseline
    from shardproof.compare.snapshot import of_run
    from shardproof.runs.integrity import changed
    from shardproof.runs.run_folder import read

    with baseline.opened(name) as folder:
        if folder is None:
            return baseline.read(Path(name)), None
        found = read(folder, strict=True)
        if again:
            from shardproof.commands.verify import verify

            doubts = verify(folder).problems
        else:
            doubts = [*filter(None, (*changed(folder), found.gap))]
        if Path(name).is_file():  # nobody knows the temporary folder that it was unpacked into
            doubts = [doubt.replace(str(folder), name) for doubt in doubts]
        return of_run(found), doubts


def _day(text: str | None) -> datetime.date:
    if text is None:
        return datetime.datetime.now(datetime.UTC).date()
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise SelectionError(Problem("--on needs a date", "write YYYY-MM-DD", text)) from None


def _tell(gated: Gate, outputs: Outputs) -> None:
    from shardproof.compare import gate_output

    for line in gate_output.lines(gated):
        echo(line)
    for line in gate_output.github(gated) if outputs.annotations else ():
        echo(line, raw=True)
    if (path := outputs.summary) is not None:
        before = path.read_text(encoding="utf-8") if outputs.append and path.is_file() else ""
        options.write(path, before + gate_output.summary(gated))
    if outputs.junit is not None:
        options.write(outputs.junit, gate_output.junit_xml(gated))
